from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundpipe_lightning.errors import PlanError
from roundpipe_lightning.planning.cost.costs import Evaluator
from roundpipe_lightning.planning.model.profile import ModelProfile
from roundpipe_lightning.planning.schedule.stages import Partition, RecomputePolicy
from roundpipe_lightning.planning.search.partition import (
    Effort,
    PartitionSearch,
    StageLimits,
    even_partitions,
)
from roundpipe_lightning.planning.search.planner import plan_training
from roundpipe_lightning.planning.search.request import PartitionHints, PlanningRequest
from tests.kit.plans import default_plan, keeps_cuts, keeps_limits
from tests.kit.profiles import machine, random_profiles, uniform_profile

QUICK = Effort(num_actions=30_000)


@st.composite
def cut_profiles(draw: st.DrawFn) -> ModelProfile:
    profile = draw(random_profiles(max_blocks=10))
    cuts = draw(st.sets(st.integers(1, max(profile.num_blocks - 1, 1)), max_size=4))
    inside = sorted(cut for cut in cuts if cut < profile.num_blocks)
    return replace(profile, cuts=tuple(inside))


@pytest.mark.parametrize("cuts", [(0,), (4,), (2, 2), (3, 1), (-1,), (9,)])
def test_cuts_that_cut_nothing_are_refused(cuts: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match=r"of 4 blocks: give ascending numbers from 1 to 3"):
        replace(uniform_profile(4), cuts=cuts)


@settings(max_examples=60)
@given(cut_profiles(), st.integers(1, 4), st.integers(1, 4), st.integers(0, 3))
def test_even_and_searched_partitions_keep_the_cuts_and_the_limits(
    profile: ModelProfile, forward: int, backward: int, fused: int
) -> None:
    limits = StageLimits(forward=forward, backward=backward, fused=fused)
    even = even_partitions(profile, limits=limits)
    assert even
    evaluator = Evaluator(profile=profile, num_workers=3, rounds=(4,), hop_seconds=0.1)
    found = PartitionSearch(evaluator=evaluator, limits=limits, effort=QUICK).best(even)
    for partition in (*even, *found):
        assert keeps_cuts(partition, profile.cuts)
        assert keeps_limits(partition, limits)
        assert partition.num_blocks == profile.num_blocks


@settings(max_examples=15)
@given(cut_profiles(), st.sampled_from([1, 2, 4]), st.integers(1, 4))
def test_the_planner_keeps_the_cuts(profile: ModelProfile, devices: int, microbatches: int) -> None:
    request = PlanningRequest(num_microbatches=microbatches, effort=QUICK)
    planned = plan_training(profile, hardware=machine(devices), request=request)
    assert keeps_cuts(planned.plan.partition, profile.cuts)


def test_smaller_stages_for_a_small_device_keep_the_cuts_too() -> None:
    blocks = tuple(
        replace(block, parameter_bytes=10**9, trainable_bytes=10**9)
        for block in uniform_profile(12).blocks
    )
    profile = ModelProfile(blocks=blocks, fingerprint="m", cuts=(5, 7))
    request = PlanningRequest(num_microbatches=2, effort=QUICK)
    free = plan_training(profile, hardware=machine(2), request=request).plan
    small = machine(2, device_bytes=int(4.9e9))
    held = plan_training(profile, hardware=small, request=request).plan
    assert max(held.partition.backward) <= 2 < max(free.partition.backward)
    assert keeps_cuts(held.partition, profile.cuts)


def test_stages_that_are_asked_for_may_not_span_a_cut() -> None:
    profile = replace(uniform_profile(6), cuts=(2, 4))
    for bad in (
        Partition(forward=(3, 1), backward=(2, 2, 2)),
        Partition(forward=(2,), backward=(4, 2)),
        Partition(forward=(2, 2), backward=(2, 4)),
    ):
        hints = PartitionHints(forward=bad.forward, backward=bad.backward)
        limits = StageLimits(forward=6, backward=6, fused=6)
        with pytest.raises(
            PlanError, match=r"partition hints: .* has both 'layers\.\d' and .* spans"
        ):
            hints.partitions(profile.block_names, limits=limits, cuts=profile.cuts)


def test_the_half_of_a_hint_that_is_open_keeps_the_cuts() -> None:
    names = uniform_profile(6).block_names
    limits = StageLimits(forward=6, backward=6, fused=6)
    for hints in (PartitionHints(forward=(2, 2)), PartitionHints(backward=(1, 1, 2, 2))):
        found = hints.partitions(names, limits=limits, cuts=(2, 4))
        assert found
        assert all(keeps_cuts(partition, (2, 4)) for partition in found)


def test_a_plan_whose_stage_spans_a_cut_is_refused() -> None:
    profile = uniform_profile(6)
    plan = default_plan(profile, num_workers=2, num_microbatches=2)
    cuts = (1, 2, 3, 4, 5)
    with pytest.raises(PlanError, match=r"The plan: stage .* Cut there .*\(1, 2, 3, 4, 5\)"):
        plan.check_model(profile.fingerprint, block_names=profile.block_names, cuts=cuts)


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
        ({"recompute": (RecomputePolicy.NONE,)}, r"the model has cuts at \(4,\), where other code"),
    ],
)
def test_hints_fit_the_model_and_the_machine(hints: dict[str, Any], reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        PartitionHints(**hints).check(num_blocks=8, num_devices=4, num_microbatches=6, cuts=(4,))


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
