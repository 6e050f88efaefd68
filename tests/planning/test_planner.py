"""The planner: valid plans within limits, never worse than even stages, honest refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundpipe_lightning.errors import FitError, PlanError
from roundpipe_lightning.planning.cost.costs import stage_costs
from roundpipe_lightning.planning.cost.device_memory import RESERVED_BYTES, Footprint
from roundpipe_lightning.planning.cost.simulate import simulate_transfers
from roundpipe_lightning.planning.model.profile import BlockProfile, ModelProfile
from roundpipe_lightning.planning.schedule.plan import PipelineConfig
from roundpipe_lightning.planning.schedule.stages import Partition
from roundpipe_lightning.planning.search.evolve import Effort
from roundpipe_lightning.planning.search.limits import limits_within
from roundpipe_lightning.planning.search.partition import StageLimits
from roundpipe_lightning.planning.search.planner import PlanningRequest, plan_training
from tests.kit.plans import default_plan
from tests.kit.profiles import machine, random_profiles, uniform_profile

QUICK = Effort(num_actions=50_000, num_children=24, num_parents=8)


def heavy(profile: ModelProfile, *, parameter_bytes: int) -> ModelProfile:
    blocks = tuple(
        replace(block, parameter_bytes=parameter_bytes, trainable_bytes=parameter_bytes)
        for block in profile.blocks
    )
    return replace(profile, blocks=blocks)


@settings(max_examples=15)
@given(
    random_profiles(max_blocks=9),
    st.sampled_from([1, 2, 3, 4]),
    st.integers(1, 6),
    st.integers(1, 2),
    st.sampled_from([0, 30]),
)
def test_random_plans_are_valid_and_keep_the_limits(
    profile: ModelProfile, devices: int, microbatches: int, batches: int, weight: int
) -> None:
    profile = heavy(profile, parameter_bytes=weight)
    limits = StageLimits(forward=4, backward=2, fused=1)
    request = PlanningRequest(
        num_microbatches=microbatches, num_batches=batches, limits=limits, effort=QUICK
    )
    planned = plan_training(profile, hardware=machine(devices), request=request)
    assert limits.allow(planned.plan.partition)
    assert planned.plan.num_microbatches == microbatches * batches
    planned.plan.check_model(profile.fingerprint, block_names=profile.block_names)
    assert len(planned.timeline.entries) == sum(map(len, planned.plan.schedule.workers))


@pytest.mark.parametrize("link", [1e30, 20.0])
def test_a_plan_is_not_worse_than_even_stages(link: float) -> None:
    profile = heavy(uniform_profile(24), parameter_bytes=60)
    hardware = machine(4, link=link)
    request = PlanningRequest(num_microbatches=8, hop_seconds=0.1, team_sizes=(1,), effort=QUICK)
    planned = plan_training(profile, hardware=hardware, request=request)
    even = default_plan(profile, num_workers=4, num_microbatches=8)
    baseline = simulate_transfers(
        even.schedule,
        partition=even.partition,
        costs=stage_costs(profile, partition=even.partition, hop_seconds=0.1),
        profile=profile,
        hardware=hardware,
    )
    assert planned.timeline.makespan_seconds <= baseline.makespan_seconds


def test_chooses_among_the_partitions_that_are_asked_for() -> None:
    choices = (
        Partition(forward=(8,), backward=(0, 8)),
        Partition(forward=(2, 2, 2, 2), backward=(0, 2, 2, 2, 2)),
        Partition(forward=(4, 4), backward=(0, 4, 4)),
    )
    request = PlanningRequest(num_microbatches=4, team_sizes=(1,), partitions=choices)
    planned = plan_training(uniform_profile(8), hardware=machine(4), request=request)
    assert planned.plan.partition == choices[1]


def test_large_teams_where_links_are_fast_small_ones_where_not() -> None:
    profile = heavy(uniform_profile(32), parameter_bytes=100)
    request = PlanningRequest(num_microbatches=8, hop_seconds=0.1, effort=QUICK)
    fast = plan_training(profile, hardware=machine(4, link=1e30), request=request)
    slow = plan_training(profile, hardware=machine(4, link=20.0), request=request)
    assert fast.plan.team_size == 4
    assert slow.plan.team_size < 4
    assert fast.timeline.makespan_seconds < slow.timeline.makespan_seconds


def test_a_stream_of_batches_idles_less_than_one() -> None:
    profile = uniform_profile(16)
    request = PlanningRequest(
        num_microbatches=8, hop_seconds=0.1, team_sizes=(1,), round_sizes=(8,), effort=QUICK
    )
    one = plan_training(profile, hardware=machine(4), request=request)
    stream = plan_training(profile, hardware=machine(4), request=replace(request, num_batches=6))
    assert stream.timeline.bubble_fraction < one.timeline.bubble_fraction
    assert stream.plan.num_microbatches == 48
    assert stream.plan.round_size == 8


def test_workers_in_host_memory_copy_nothing() -> None:
    profile = heavy(uniform_profile(8), parameter_bytes=10**9)
    hardware = machine(2, link=1.0, shares_host_memory=True)
    request = PlanningRequest(num_microbatches=4, effort=QUICK)
    planned = plan_training(profile, hardware=hardware, request=request)
    assert planned.timeline.start_seconds == 0.0
    assert planned.timeline.makespan_seconds < 200.0


def test_limits_follow_from_device_memory() -> None:
    block = BlockProfile(
        name="b", parameter_bytes=100, trainable_bytes=100, activation_bytes=100, boundary_bytes=5
    )
    profile = ModelProfile(
        blocks=(block,) * 20,
        tail=BlockProfile(name="t", parameter_bytes=50, activation_bytes=100),
        fingerprint="",
    )
    config = PipelineConfig(num_microbatches=4, round_size=4)

    def limits(room: int, weight_slots: int = 2) -> StageLimits | None:
        hardware = machine(2, device_bytes=RESERVED_BYTES + 30 + room)
        footprint = Footprint(profile, hardware=hardware)
        return limits_within(footprint, config=replace(config, weight_slots=weight_slots))

    # backward: a stage of n, its neighbours of n: 2 n 100 weights, 2 n 100 gradients, n 100 kept;
    # forward: n 100 and the tail's and a fused block's weights beside
    two, one = limits(1700), limits(1700, weight_slots=1)
    assert two is not None
    assert one is not None
    assert (two.backward, one.backward) == (3, 4)
    assert one.forward >= two.forward
    assert limits(499) is None
    small = machine(2, device_bytes=RESERVED_BYTES + 30 + 499)
    with pytest.raises(FitError, match=r"testx2 cannot hold even one block, 'b': it has 0.00 GiB"):
        plan_training(
            profile,
            hardware=small,
            request=PlanningRequest(
                num_microbatches=4, round_sizes=(4,), team_sizes=(1,), weight_slots=(2,)
            ),
        )
    unknown = plan_training(
        uniform_profile(20), hardware=machine(4), request=PlanningRequest(num_microbatches=4)
    )
    assert StageLimits(forward=10, backward=5, fused=5).allow(unknown.plan.partition)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (PlanningRequest(num_microbatches=4, team_sizes=(3,)), "3 does not divide the 4 devices"),
        (PlanningRequest(num_microbatches=2, team_sizes=(4,)), "No team size of"),
        (PlanningRequest(num_microbatches=2, round_sizes=(8,)), "No team size of"),
    ],
)
def test_a_request_that_contradicts_the_machine_is_refused(
    request_: PlanningRequest, message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        plan_training(uniform_profile(4), hardware=machine(4), request=request_)


def test_a_request_for_nothing_is_refused() -> None:
    with pytest.raises(PlanError, match="num_batches: 0"):
        PlanningRequest(num_microbatches=1, num_batches=0)


def test_partitions_that_contradict_the_limits_or_the_model_are_refused() -> None:
    partition = Partition(forward=(4,), backward=(0, 4))
    with pytest.raises(PlanError, match=r"'forward 4 \| backward 0 4' .* backward=2"):
        PlanningRequest(
            num_microbatches=4,
            partitions=(partition,),
            limits=StageLimits(forward=4, backward=2, fused=1),
        )
    request = PlanningRequest(num_microbatches=4, partitions=(partition,))
    with pytest.raises(PlanError, match="has 4 blocks, the model has 6"):
        plan_training(uniform_profile(6), hardware=machine(2), request=request)


def test_the_best_of_the_asked_partitions_is_taken_wherever_it_stands() -> None:
    good = Partition(forward=(2, 2, 2, 2), backward=(0, 1, 1, 1, 1, 1, 1, 1, 1))
    bad = Partition(forward=(8,), backward=(0, 8))
    for asked in ((bad, good), (good, bad), (bad, bad, good)):
        request = PlanningRequest(num_microbatches=8, partitions=asked, team_sizes=(1,))
        planned = plan_training(uniform_profile(8), hardware=machine(4), request=request)
        assert planned.plan.partition == good
