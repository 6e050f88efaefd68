"""Plans within a machine's memory, and what is missing where there is none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundpipe_lightning.errors import PlanError
from roundpipe_lightning.planning.cost.memory import RESERVED_BYTES
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
from roundpipe_lightning.planning.schedule.stages import Partition
from roundpipe_lightning.planning.search.fit import (
    Search,
    TrainingJob,
    fit_training,
    fits_memory,
)
from roundpipe_lightning.planning.search.request import PartitionHints

MIB = 2**20


def part(name: str, *, mib: int = 100) -> BlockWork:
    """A block that takes a tenth of a second and keeps 1 MiB per token."""
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
        device_bytes=device_mib * MIB + RESERVED_BYTES,
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


@settings(max_examples=10)
@given(st.integers(1, 9), st.integers(500, 6000))
def test_a_plan_fits_or_bytes_are_missing(num_blocks: int, device_mib: int) -> None:
    asked = job(num_blocks=num_blocks, device_mib=device_mib, search=Search.QUICK)
    answer = fit_training(asked)
    assert answer.fits is fits_memory(asked)
    assert answer.fits is not bool(answer.memory.reason)
    if answer.planned is not None:
        plan = answer.planned.plan
        assert plan.partition == answer.layout.partition
        assert not answer.memory.device.missing_bytes
        assert answer.tokens_per_second > 0
    else:
        assert answer.tokens_per_second == 0
        assert answer.memory.device.missing_bytes


def test_a_quick_look_fits_too_and_is_not_faster() -> None:
    full, quick = (fit_training(job(search=search)) for search in (Search.FULL, Search.QUICK))
    assert quick.fits
    assert full.tokens_per_second >= quick.tokens_per_second


def test_a_host_that_is_too_small_is_said_with_a_plan() -> None:
    asked = job()
    small = replace(asked, hardware=replace(asked.hardware, host_bytes=2**28))
    answer = fit_training(small)
    assert answer.planned is not None
    assert not answer.fits
    assert "host memory are missing" in answer.memory.reason
    assert not fits_memory(small)


def test_hints_are_kept() -> None:
    cuts = PartitionHints(forward=(1, 3), backward=(2, 2, 2))
    answer = fit_training(job(hints=cuts))
    assert answer.layout.partition == Partition(forward=(1, 3), backward=(2, 2, 2))
    hints = PartitionHints(most_forward=1, most_backward=1, most_fused=0, team_size=2, round_size=4)
    answer = fit_training(job(hints=hints))
    assert answer.layout.partition == Partition(forward=(1,) * 6, backward=(0,) + (1,) * 6)
    assert (answer.layout.team_size, answer.layout.round_size) == (2, 4)


def test_cuts_that_do_not_fit_are_said_with_their_size() -> None:
    answer = fit_training(job(device_mib=1000, hints=PartitionHints(backward=(0, 6))))
    assert answer.planned is None
    assert answer.layout.partition.backward == (0, 6)
    assert answer.memory.device.missing_bytes


def test_hints_that_cannot_be_kept_are_refused() -> None:
    with pytest.raises(PlanError, match="has 5 blocks, the model has 6"):
        fit_training(job(hints=PartitionHints(backward=(2, 3))))


def test_accumulated_batches_are_one_stream() -> None:
    answer = fit_training(job(num_batches=2))
    assert answer.planned is not None
    assert answer.planned.plan.num_microbatches == 16
    single = fit_training(job())
    assert answer.tokens_per_second >= single.tokens_per_second
