from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundpipe_lightning.planning.model.hardware import load_hardware
from roundpipe_lightning.planning.model.work import (
    Amount,
    BlockWork,
    MicrobatchShape,
    ParameterStorage,
    Peak,
    Work,
    WorkProfile,
)
from roundpipe_lightning.planning.search.fit import TrainingJob, fit_training, fits_memory
from roundpipe_lightning.planning.search.partition import QUICK, Effort
from roundpipe_lightning.planning.search.remedies import Alternatives, remedies
from roundpipe_lightning.planning.search.request import PartitionHints

MIB = 2**20


def part(name: str, *, mib: int = 100) -> BlockWork:
    products = Amount(per_token=1e11)
    return BlockWork(
        name=name,
        forward=Work(matrix_operations=products),
        backward=Work(matrix_operations=products + products),
        num_parameters=mib * MIB // 2,
        num_trainable=mib * MIB // 2,
        parameter_bytes=mib * MIB,
        trainable_bytes=mib * MIB,
        boundary_bytes=Amount(per_token=0.1 * MIB),
        kept_bytes=Amount(per_token=MIB),
        forward_peak_bytes=Peak(amounts=(Amount(per_token=0.5 * MIB),)),
        peak_bytes=Peak(amounts=(Amount(per_token=1.5 * MIB),)),
    )


def job(*, num_blocks: int = 6, device_mib: int = 4000, **changes: Any) -> TrainingJob:
    blocks = tuple(part(f"layers.{index}") for index in range(num_blocks))
    hardware = replace(
        load_hardware("rtx4090x4"),
        device_bytes=device_mib * MIB,
        reserved_bytes=1,
        host_bytes=2**37,
    )
    whole = TrainingJob(
        work=WorkProfile(blocks=blocks, tail=part("tail", mib=20)),
        hardware=hardware,
        dtype="bfloat16",
        storage=ParameterStorage(),
        shape=MicrobatchShape(sequences=1, seq_len=100),
        num_microbatches=8,
    )
    return replace(whole, **changes)


@settings(max_examples=20)
@given(st.integers(1, 9), st.integers(500, 6000), st.booleans())
def test_a_plan_fits_or_bytes_are_missing(num_blocks: int, device_mib: int, plain: bool) -> None:
    asked = job(num_blocks=num_blocks, device_mib=device_mib, effort=QUICK, plain=plain)
    answer = fit_training(asked)
    assert answer.fits is fits_memory(asked)
    assert answer.fits is not bool(answer.memory.reason)
    if answer.planned is not None:
        plan = answer.planned.plan
        assert plan.partition == answer.layout.partition
        assert plan.plain is plain
        assert not answer.memory.device.missing_bytes
        assert answer.tokens_per_second > 0
    else:
        assert answer.tokens_per_second == 0
        assert answer.memory.device.missing_bytes


def test_a_quick_look_fits_too_and_is_not_faster() -> None:
    full, quick = (fit_training(job(effort=effort)) for effort in (Effort(), QUICK))
    assert quick.fits
    assert full.tokens_per_second >= quick.tokens_per_second


@pytest.mark.parametrize(("host_bytes", "there"), [(2**28, "of 0.2 GiB"), (1, "GiB, none free")])
def test_a_host_that_is_too_small_is_said_with_a_plan(host_bytes: int, there: str) -> None:
    asked = job()
    small = replace(asked, hardware=replace(asked.hardware, host_bytes=host_bytes))
    answer = fit_training(small)
    assert answer.planned is not None
    assert not answer.fits
    assert "host memory are missing" in answer.memory.reason
    assert there in answer.memory.reason
    assert not fits_memory(small)


def test_cuts_that_do_not_fit_are_said_with_their_size() -> None:
    answer = fit_training(job(device_mib=1000, hints=PartitionHints(backward=(0, 6))))
    assert answer.planned is None
    assert answer.layout.partition.backward == (0, 6)
    assert answer.memory.device.missing_bytes


@pytest.mark.parametrize("plain", [False, True])
def test_accumulated_batches_are_one_stream(plain: bool) -> None:
    answer = fit_training(job(num_batches=2, plain=plain))
    assert answer.planned is not None
    assert answer.planned.plan.num_microbatches == 16
    assert not plain or answer.planned.plan.round_size == 8
    single = fit_training(job(plain=plain))
    assert answer.tokens_per_second >= single.tokens_per_second


GIB = 2**30
FREE = PartitionHints()


def large_job(*, activations: float = 1.0, parameters: float = 0.1, count: int = 4) -> TrainingJob:
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
        effort=QUICK,
    )


def test_smaller_microbatches_come_first() -> None:
    large = large_job(activations=40.0)
    assert not fit_training(large).fits
    alternatives = Alternatives(
        most_microbatches=64,
        with_microbatches=lambda count: large_job(activations=40.0, count=count),
        narrower_precision="bf16-true",
    )
    found = remedies(large, alternatives, free_hints=FREE)
    assert found[0].startswith("set num_microbatches=8 ")
    assert found[1] == "set Trainer(precision='bf16-true')"
    assert "use larger devices, such as" in found[2]


def test_only_what_fits_is_offered() -> None:
    large = large_job(activations=60.0)
    alternatives = Alternatives(narrower_precision="bf16-true")  # 30 GiB are too many, too
    (found,) = remedies(large, alternatives, free_hints=FREE)
    name = found.removeprefix("use larger devices, such as ")
    assert fit_training(replace(large, hardware=load_hardware(name))).fits


def test_hints_are_dropped_before_anything_else() -> None:
    hinted = replace(large_job(activations=10.0), hints=PartitionHints(backward=(4, 4)))
    assert not fit_training(hinted).fits
    found = remedies(hinted, Alternatives(), free_hints=FREE)
    assert found[0] == "drop the hints about stages (hints=None)"


def test_less_to_train_and_more_memory_help_the_host() -> None:
    large = large_job(parameters=4.0)
    large = replace(large, hardware=replace(large.hardware, host_bytes=100 * GIB))
    found = remedies(large, Alternatives(), free_hints=FREE)
    assert found[0].startswith("train adapters")
    assert found[1] == "use a machine with 144 GiB of host memory"
    needed = fit_training(large).memory.host.total_bytes
    assert 128 * GIB < needed <= 144 * GIB


@pytest.mark.parametrize("count", [0, 1])
def test_no_more_than_asked_for(count: int) -> None:
    large = large_job(activations=40.0)
    assert len(remedies(large, Alternatives(), free_hints=FREE, count=count)) == count


def test_nothing_helps() -> None:
    assert remedies(large_job(activations=1e6), Alternatives(), free_hints=FREE) == ()
