"""What would make a training fit is verified by planning it, the cheapest first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from roundpipe_lightning.planning.model.hardware import load_hardware
from roundpipe_lightning.planning.model.storage import ParameterStorage
from roundpipe_lightning.planning.model.work import (
    Amount,
    BlockWork,
    MicrobatchShape,
    Peak,
    Work,
    WorkProfile,
)
from roundpipe_lightning.planning.search.fit import Search, TrainingJob, fit_training
from roundpipe_lightning.planning.search.remedies import Alternatives, remedies
from roundpipe_lightning.planning.search.request import PartitionHints

GIB = 2**30
NONE = PartitionHints()


def job(*, activations: float = 1.0, parameters: float = 0.1, count: int = 4) -> TrainingJob:
    """Eight blocks, in GiB per block, of a batch in `count` microbatches."""
    kept = Amount(fixed=activations * GIB * 4 / count)
    values = round(parameters * GIB / 4)

    def block(name: str) -> BlockWork:
        return BlockWork(
            name=name,
            forward=Work(matrix_operations=Amount(fixed=1e12)),
            backward=Work(matrix_operations=Amount(fixed=2e12)),
            num_parameters=values,
            num_trainable=values,
            parameter_bytes=4 * values,
            trainable_bytes=4 * values,
            boundary_bytes=Amount(fixed=1e6),
            kept_bytes=kept,
            forward_peak_bytes=Peak(amounts=(kept,)),
            peak_bytes=Peak(amounts=(kept,)),
        )

    return TrainingJob(
        work=WorkProfile(blocks=tuple(block(f"layers.{i}") for i in range(8)), fingerprint="x"),
        hardware=load_hardware("rtx4090x2"),
        dtype="float32",
        storage=ParameterStorage(master_bytes=0, gradient_bytes=4, optimizer_bytes=8),
        shape=MicrobatchShape(sequences=1, seq_len=1),
        num_microbatches=count,
        search=Search.QUICK,
    )


def test_smaller_microbatches_come_first() -> None:
    large = job(activations=40.0)
    assert not fit_training(large).fits
    alternatives = Alternatives(
        most_microbatches=64,
        with_microbatches=lambda count: job(activations=40.0, count=count),
        narrower_precision="bf16-true",
    )
    found = remedies(large, alternatives, free_hints=NONE)
    assert found[0].startswith("set num_microbatches=8 ")
    assert found[1] == "set Trainer(precision='bf16-true')"
    assert "use larger devices, such as" in found[2]


def test_only_what_fits_is_offered() -> None:
    large = job(activations=60.0)
    alternatives = Alternatives(narrower_precision="bf16-true")  # 30 GiB are too many, too
    (found,) = remedies(large, alternatives, free_hints=NONE)
    name = found.removeprefix("use larger devices, such as ")
    assert fit_training(replace(large, hardware=load_hardware(name))).fits


def test_hints_are_dropped_before_anything_else() -> None:
    hinted = replace(job(activations=10.0), hints=PartitionHints(backward=(4, 4)))
    assert not fit_training(hinted).fits
    found = remedies(hinted, Alternatives(), free_hints=NONE)
    assert found[0] == "drop the hints about stages (hints=None)"


def test_less_to_train_and_more_memory_help_the_host() -> None:
    large = job(parameters=4.0)
    large = replace(large, hardware=replace(large.hardware, host_bytes=100 * GIB))
    found = remedies(large, Alternatives(), free_hints=NONE)
    assert found[0].startswith("train adapters")
    assert found[1] == "use a machine with 144 GiB of host memory"
    needed = fit_training(large).memory.host.total_bytes
    assert 128 * GIB < needed <= 144 * GIB


@pytest.mark.parametrize("count", [0, 1])
def test_no_more_than_asked_for(count: int) -> None:
    large = job(activations=40.0)
    assert len(remedies(large, Alternatives(), free_hints=NONE, count=count)) == count


def test_nothing_helps() -> None:
    assert remedies(job(activations=1e6), Alternatives(), free_hints=NONE) == ()
