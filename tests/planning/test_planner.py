from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundpipe_lightning.errors import FitError, PlanError
from roundpipe_lightning.planning.cost.costs import RecomputeStart, stage_costs
from roundpipe_lightning.planning.cost.device_memory import Footprint
from roundpipe_lightning.planning.cost.simulate import simulate
from roundpipe_lightning.planning.model.hardware import RESERVED_BYTES, HardwareSpec
from roundpipe_lightning.planning.model.profile import BlockProfile, ModelProfile
from roundpipe_lightning.planning.schedule.plan import PipelineConfig, schedule_of
from roundpipe_lightning.planning.schedule.stages import Partition, RecomputePolicy
from roundpipe_lightning.planning.search.cases import limits_within, pipeline_configs
from roundpipe_lightning.planning.search.partition import Effort, StageLimits, even_partitions
from roundpipe_lightning.planning.search.planner import plan_of_one_batch, plan_training
from roundpipe_lightning.planning.search.request import PartitionHints, PlanningRequest
from tests.kit.plans import keeps_cuts, keeps_limits
from tests.kit.profiles import machine, random_profiles, uniform_profile

QUICK = Effort(num_actions=50_000)


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
    hints = PartitionHints(most_forward=4, most_backward=2, most_fused=1)
    request = PlanningRequest(
        num_microbatches=microbatches, num_batches=batches, hints=hints, effort=QUICK
    )
    planned = plan_training(profile, hardware=machine(devices), request=request)
    assert keeps_limits(planned.plan.partition, limits)
    assert planned.plan.num_microbatches == microbatches * batches
    planned.plan.check_model(profile.fingerprint, block_names=profile.block_names)
    assert len(planned.timeline.entries) == sum(map(len, planned.plan.schedule.workers))


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
        num_microbatches=8,
        hop_seconds=0.1,
        hints=PartitionHints(team_size=1, round_size=8),
        effort=QUICK,
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
    with pytest.raises(FitError, match=r"testx2 cannot hold even one block, 'b': it has 0.1 KiB"):
        plan_training(
            profile,
            hardware=small,
            request=PlanningRequest(
                num_microbatches=4,
                hints=PartitionHints(round_size=4, team_size=1, weight_slots=2),
            ),
        )
    unknown = plan_training(
        uniform_profile(20), hardware=machine(4), request=PlanningRequest(num_microbatches=4)
    )
    most = StageLimits(forward=10, backward=5, fused=5)
    assert keeps_limits(unknown.plan.partition, most)


@pytest.mark.parametrize(
    ("hints", "message"),
    [
        (PartitionHints(team_size=4), "No team size of"),
        (PartitionHints(round_size=8), "No team size of"),
    ],
)
def test_a_request_that_contradicts_the_machine_is_refused(
    hints: PartitionHints, message: str
) -> None:
    asked = PlanningRequest(num_microbatches=2, hints=hints)
    with pytest.raises(PlanError, match=message):
        plan_training(uniform_profile(4), hardware=machine(4), request=asked)


SHORT = Effort(num_actions=20_000)
FULL, SELECTIVE, NONE = RecomputePolicy
SMALL_STAGES: dict[str, Any] = {"most_forward": 4, "most_fused": 1, "most_backward": 2}


def model(num_blocks: int = 8, **sizes: Any) -> ModelProfile:
    profile = uniform_profile(num_blocks, tail=0.0)
    sizes = {"activation_bytes": 10, **sizes}
    return replace(profile, blocks=tuple(replace(block, **sizes) for block in profile.blocks))


def request(
    num_microbatches: int | tuple[int, ...] = 4, changes: dict[str, Any] | None = None, **hints: Any
) -> PlanningRequest:
    asked = PlanningRequest(
        num_microbatches=num_microbatches, effort=SHORT, hints=PartitionHints(**hints)
    )
    return replace(asked, **(changes or {}))


def room(num_devices: int, num_bytes: int, **changes: Any) -> HardwareSpec:
    return machine(num_devices, device_bytes=RESERVED_BYTES + num_bytes, **changes)


# --- recompute -----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_devices", [1, 2])
def test_nothing_runs_twice_where_everything_fits(num_devices: int) -> None:
    planned = plan_training(model(), hardware=room(num_devices, 10**6), request=request())
    assert planned.plan.recompute is NONE
    assert planned.plan.partition == Partition(forward=(), backward=(8,))
    assert planned.timeline.makespan_seconds == 4 * 8 * 3 / num_devices


def test_blocks_run_twice_where_their_activations_do_not_fit() -> None:
    planned = plan_training(model(), hardware=room(1, 45), request=request())
    assert planned.plan.recompute is FULL
    assert max(planned.plan.partition.backward) <= 4


def test_attention_is_kept_where_that_is_allowed_and_pays() -> None:
    profile = model(attention_seconds=0.5, attention_bytes=5)
    hardware = room(2, 100)  # eight blocks' activations and boundaries do not fit
    allowed = request(recompute=(FULL, SELECTIVE), **SMALL_STAGES)
    full = plan_training(profile, hardware=hardware, request=allowed.with_recompute(FULL))
    both = plan_training(profile, hardware=hardware, request=allowed)
    assert both.plan.recompute is SELECTIVE
    assert both.timeline.makespan_seconds < full.timeline.makespan_seconds
    slow = replace(hardware, upload_bytes_per_second=0.01, download_bytes_per_second=0.01)
    assert plan_training(profile, hardware=slow, request=allowed).plan.recompute is FULL


def test_attention_is_kept_by_default_where_it_takes_enough_of_a_step() -> None:
    hardware = room(2, 100)
    for seconds, policy in ((0.5, SELECTIVE), (0.07, FULL)):
        profile = model(attention_seconds=seconds, attention_bytes=5)
        planned = plan_training(profile, hardware=hardware, request=request(**SMALL_STAGES))
        assert planned.plan.recompute is policy
    never = plan_training(
        model(attention_seconds=0.5, attention_bytes=5),
        hardware=hardware,
        request=request(**SMALL_STAGES),
        admits=lambda layout: layout.recompute is not SELECTIVE,  # the host is too small
    )
    assert never.plan.recompute is FULL


def test_recompute_none_needs_the_memory() -> None:
    asked = request(recompute=(NONE,))
    with pytest.raises(FitError, match=r"recompute=none needs all 8 blocks on one device at once"):
        plan_training(model(), hardware=room(1, 45), request=asked)
    whole = request(recompute=(FULL,), forward=(), backward=(8,))
    with pytest.raises(FitError, match="None of the partitions goes with recompute=full"):
        plan_training(model(), hardware=room(1, 10**6), request=whole)


# --- slots and what stays ------------------------------------------------------------------------


def test_one_slot_where_two_do_not_fit() -> None:
    profile = model(parameter_bytes=100, activation_bytes=10)
    two = plan_training(profile, hardware=room(2, 10**4), request=request())
    assert two.plan.weight_slots == 2
    one = plan_training(profile, hardware=room(2, 115), request=request())
    assert one.plan.weight_slots == 1
    with pytest.raises(FitError, match=r"cannot hold even one block, 'layers\.\d'"):
        plan_training(profile, hardware=room(2, 115), request=request(weight_slots=2))


def test_one_slot_is_taken_only_where_it_pays() -> None:
    # Two slots hold stages of one block, one slot of two, which are uploaded half as often.
    profile = model(12, parameter_bytes=100)
    for link in (1000.0, 30.0):
        hardware = room(2, 245, link=link)
        best = plan_training(profile, hardware=hardware, request=request())
        seconds = {
            n: plan_training(
                profile, hardware=hardware, request=request(weight_slots=n)
            ).timeline.makespan_seconds
            for n in (1, 2)
        }
        assert best.timeline.makespan_seconds == pytest.approx(min(seconds.values()))


def test_spare_memory_keeps_weights_and_shortens_the_step() -> None:
    profile = model(parameter_bytes=100, activation_bytes=100)
    hardware = room(1, 700, link=20.0)
    moving = plan_training(profile, hardware=hardware, request=request(resident=0))
    kept = plan_training(profile, hardware=hardware, request=request())
    assert moving.plan.resident == ()
    assert any(kept.plan.resident)
    assert kept.timeline.makespan_seconds < moving.timeline.makespan_seconds
    layout = kept.plan.layout
    assert Footprint(profile, hardware=hardware).fits(layout)


def test_more_blocks_than_fit_cannot_stay() -> None:
    profile = model(parameter_bytes=100, activation_bytes=100)
    with pytest.raises(FitError, match=r"7 blocks cannot stay on a device of testx1"):
        plan_training(profile, hardware=room(1, 700), request=request(resident=7))


# --- microbatches --------------------------------------------------------------------------------


def split(count: int) -> ModelProfile:
    sequences = 8 // count
    blocks = tuple(
        replace(
            block,
            forward_seconds=0.1 + sequences,
            backward_seconds=0.1 + 2 * sequences,
            activation_bytes=10 * sequences,
            parameter_bytes=10,
        )
        for block in uniform_profile(6).blocks
    )
    return ModelProfile(blocks=blocks, fingerprint="m")


def test_the_number_of_microbatches_is_chosen_with_the_rest() -> None:
    asked = request((8, 4, 2, 1))
    roomy = plan_training(split, hardware=room(2, 10**6), request=asked)
    assert roomy.plan.num_microbatches == 2
    tight = plan_training(split, hardware=room(2, 60), request=asked)
    assert tight.plan.num_microbatches > 2
    alone = [
        plan_training(split, hardware=room(2, 60), request=request(count)).timeline
        for count in (8, 4)
    ]
    assert tight.timeline.makespan_seconds == min(each.makespan_seconds for each in alone)
    with pytest.raises(PlanError, match="give a function from the number to the profile"):
        plan_training(split(2), hardware=room(2, 60), request=asked)


def test_the_plan_of_one_of_several_batches() -> None:
    asked = request(4, {"num_batches": 3}, team_size=1)
    planned = plan_training(model(), hardware=room(2, 45), request=asked)
    assert (planned.plan.num_microbatches, planned.plan.num_batches) == (12, 3)
    one = plan_of_one_batch(planned.plan)
    assert (one.num_microbatches, one.num_batches) == (4, 3)
    assert one.partition == planned.plan.partition
    assert len(one.schedule.workers[0]) < len(planned.plan.schedule.workers[0])


# --- never worse than even -----------------------------------------------------------------------

_seconds = st.floats(min_value=0, max_value=5, allow_nan=False, allow_subnormal=False)


@st.composite
def sized_profiles(draw: st.DrawFn) -> ModelProfile:
    num_blocks = draw(st.integers(1, 7))
    alike = draw(st.booleans())

    def block(name: str) -> BlockProfile:
        size = draw(st.integers(0, 60))
        return BlockProfile(
            name=name,
            forward_seconds=draw(_seconds),
            backward_seconds=draw(_seconds),
            parameter_bytes=size,
            trainable_bytes=draw(st.sampled_from([0, size])),
            boundary_bytes=draw(st.integers(0, 5)),
            activation_bytes=draw(st.integers(1, 30)),
            working_bytes=draw(st.integers(0, 20)),
            forward_bytes=draw(st.integers(0, 20)),
        )

    first = block("layers.0")
    blocks = [first]
    for index in range(1, num_blocks):
        name = f"layers.{index}"
        blocks.append(replace(first, name=name) if alike else block(name))
    cuts = draw(st.sets(st.integers(1, max(num_blocks - 1, 1)), max_size=2))
    return ModelProfile(
        blocks=tuple(blocks),
        head=replace(block("head"), forward_bytes=0),
        tail=block("tail"),
        fingerprint="random",
        cuts=tuple(sorted(cut for cut in cuts if cut < num_blocks)),
    )


@settings(max_examples=25)
@given(
    sized_profiles(),
    st.sampled_from([1, 2, 3]),
    st.integers(1, 4),
    st.sampled_from([100, 300, 10**6]),
    st.sampled_from([5.0, 1e12]),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.integers(0, 20),
)
def test_the_choice_is_never_slower_than_a_full_recompute_and_fits(
    profile: ModelProfile,
    devices: int,
    microbatches: int,
    device_bytes: int,
    link: float,
    attention: float,
    size: int,
) -> None:
    blocks = tuple(
        replace(block, attention_seconds=attention * block.forward_seconds, attention_bytes=size)
        for block in profile.blocks
    )
    profile = replace(profile, blocks=blocks)
    hardware = room(devices, device_bytes, link=link, host=4 * link)
    try:
        full = plan_training(
            profile, hardware=hardware, request=request(microbatches, recompute=(FULL,))
        )
    except FitError:
        return
    chosen = plan_training(profile, hardware=hardware, request=request(microbatches))
    assert chosen.timeline.makespan_seconds <= full.timeline.end_seconds * (1 + 1e-9)
    assert Footprint(profile, hardware=hardware).fits(chosen.plan.layout)


@settings(max_examples=40)
@given(
    sized_profiles(),
    st.sampled_from([1, 2, 3, 4]),
    st.integers(1, 5),
    st.sampled_from([100, 300, 600, 10**6]),
    st.sampled_from([5.0, 40.0, 1e12]),
    st.sampled_from(RecomputeStart),
    st.booleans(),
)
def test_no_even_partition_is_better_with_any_team_or_round(
    profile: ModelProfile,
    devices: int,
    microbatches: int,
    device_bytes: int,
    link: float,
    recompute_start: RecomputeStart,
    plain: bool,
) -> None:
    hardware = room(devices, device_bytes, link=link, host=4 * link)
    changes = {"recompute_start": recompute_start, "hop_seconds": 0.1, "plain": plain}
    asked = request(microbatches, changes)
    footprint = Footprint(profile, hardware=hardware)
    ways = pipeline_configs(hardware, asked, num_batches=1)
    holding = {way: limits for way in ways if (limits := limits_within(footprint, config=way))}
    if not holding:
        with pytest.raises(FitError, match=r"cannot hold (even one block|the tail segment)"):
            plan_training(profile, hardware=hardware, request=asked)
        return
    planned = plan_training(profile, hardware=hardware, request=asked)
    plan = planned.plan
    plan.check_model("random", block_names=profile.block_names, cuts=profile.cuts)
    assert footprint.fits(plan.layout)
    for way, limits in holding.items():
        for even in even_partitions(profile, limits=limits, plain=plain):
            assert keeps_cuts(even, profile.cuts)
            if (even.keeps_graphs and way.shares_backward) or not footprint.fits(
                way.with_stages(even)
            ):
                continue
            step = simulate(
                schedule_of(way.with_stages(even), num_workers=devices),
                layout=way.with_stages(even),
                costs=stage_costs(
                    profile,
                    partition=even,
                    hop_seconds=0.1,
                    recompute_start=recompute_start,
                ),
                profile=profile,
                hardware=hardware,
            )
            # With the first upload, which a makespan does not count and a bound on the step does.
            assert planned.timeline.makespan_seconds <= step.end_seconds * (1 + 1e-9)
