"""Partitions: what they accept, the stages they give, their text form."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundpipe_lightning.errors import PlanError
from roundpipe_lightning.planning.schedule.stages import Partition, StageKind


def test_stages_run_forward_then_fused_then_backward() -> None:
    partition = Partition(forward=(3, 3), backward=(2, 4, 2))
    assert " ".join(map(str, partition.stages())) == "F0[0:3] F1[3:6] X0[6:8] B1[2:6] B2[0:2]"
    assert partition.num_blocks == 8


def test_a_model_without_blocks_has_only_the_tail() -> None:
    partition = Partition(forward=(), backward=(0,))
    assert [str(stage) for stage in partition.stages()] == ["X0[0:0]"]


@pytest.mark.parametrize(
    ("forward", "backward", "message"),
    [
        ((), (), "no fused stage"),
        ((2,), (-1, 3), "0 or more"),
        ((2, 0), (0, 2), "at least one block"),
        ((2,), (0, 2, 0), "at least one block"),
        ((3,), (0, 2), "must be"),
    ],
)
def test_a_malformed_partition_is_refused(
    forward: tuple[int, ...], backward: tuple[int, ...], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        Partition(forward=forward, backward=backward)


def test_producer_is_the_stage_that_computes_the_input() -> None:
    partition = Partition(forward=(3, 3), backward=(2, 4, 2))
    producers = [str(partition.producer(block))[:2] for block in range(8)]
    assert producers == ["F0", "F0", "F0", "F0", "F1", "F1", "F1", "X0"]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(0, 3), st.integers(1, 4))
def test_text_round_trips(forward: list[int], fused: int, size: int) -> None:
    total = sum(forward)
    sizes = [size] * (total // size) + ([total % size] if total % size else [])
    partition = Partition(forward=tuple(forward), backward=(fused, *sizes))
    assert Partition.parse(str(partition)) == partition
    blocks = [stage.blocks for stage in partition.stages() if stage.kind is not StageKind.FORWARD]
    assert sorted(block for r in blocks for block in r) == list(range(partition.num_blocks))


@pytest.mark.parametrize("text", ["", "forward 1", "forward x | backward 0 1", "3 3 | 2 3 3"])
def test_text_that_is_no_partition_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="not a partition"):
        Partition.parse(text)


def test_an_unknown_stage_is_refused() -> None:
    with pytest.raises(PlanError, match="no stage B3"):
        Partition(forward=(1,), backward=(0, 1)).stage(StageKind.BACKWARD, 3)
