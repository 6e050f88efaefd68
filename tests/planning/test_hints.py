"""Hints: kept, or refused with the reason."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundpipe_lightning.errors import PlanError
from roundpipe_lightning.planning.schedule.stages import Partition
from roundpipe_lightning.planning.search.partition import StageLimits
from roundpipe_lightning.planning.search.request import PartitionHints

LIMITS = StageLimits(forward=4, fused=2, backward=3)


def names(num_blocks: int) -> list[str]:
    return [f"layers.{index}" for index in range(num_blocks)]


@pytest.mark.parametrize(
    ("hints", "reason"),
    [
        ({"forward": (3, 0)}, r"partition.forward=\[3, 0\]: every stage needs"),
        ({"backward": ()}, "must begin with the blocks of the fused"),
        ({"forward": (2, 2), "backward": (1, 2)}, "sum"),
        ({"forward": (5,), "most_forward": 4}, "limits.forward=4 allows at most 4: drop one"),
        ({"backward": (3, 1), "most_fused": 2}, "limits.fused=2"),
        ({"most_backward": 0}, "limits.backward=0 must be 1 or more"),
        ({"team_size": 4, "round_size": 2}, "without a microbatch"),
    ],
)
def test_hints_that_cannot_be_kept_are_refused(hints: dict[str, Any], reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        PartitionHints(**hints)


@pytest.mark.parametrize(
    ("hints", "reason"),
    [
        ({"backward": (1, 3)}, "has 4 blocks, the model has 8"),
        ({"forward": (9,)}, "has 9 blocks, the model has 8"),
        ({"team_size": 3}, r"does not divide the 4 devices: choose from \[1, 2, 4\]"),
        ({"round_size": 7}, "round_size=7 is more than the 6 microbatches"),
    ],
)
def test_hints_fit_the_model_and_the_machine(hints: dict[str, Any], reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        PartitionHints(**hints).check(num_blocks=8, num_devices=4, num_microbatches=6)


def test_both_cuts_are_the_partition() -> None:
    hints = PartitionHints(forward=(3, 3), backward=(2, 3, 3))
    hints.check(num_blocks=8, num_devices=4, num_microbatches=4)
    assert hints.partitions(names(8), limits=LIMITS) == (
        Partition(forward=(3, 3), backward=(2, 3, 3)),
    )
    assert PartitionHints().partitions(names(8), limits=LIMITS) == ()


@given(st.integers(1, 12), st.integers(0, 3), st.data())
def test_one_cut_leaves_the_other_to_be_even(
    num_blocks: int, fused: int, data: st.DataObject
) -> None:
    fused = min(fused, num_blocks)
    rest = num_blocks - fused
    first = data.draw(st.integers(0, rest))
    cut = tuple(count for count in (first, rest - first) if count)
    given_backward = PartitionHints(backward=(fused, *cut)).partitions(
        names(num_blocks), limits=LIMITS
    )
    for partition in given_backward:
        assert partition.backward == (fused, *cut)
        assert max(partition.forward, default=0) <= LIMITS.forward
    for partition in PartitionHints(forward=cut).partitions(names(num_blocks), limits=LIMITS):
        assert partition.forward == cut
        assert max(partition.backward[1:], default=0) <= LIMITS.backward
    assert given_backward


def test_limits_are_the_tighter_ones() -> None:
    hints = PartitionHints(most_forward=9, most_fused=0, most_backward=1)
    assert hints.limited(LIMITS) == StageLimits(forward=4, fused=0, backward=1)
