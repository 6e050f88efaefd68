from dataclasses import replace
from typing import Any

import pytest
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from benchmarks.plan_choice import hinted, hints_of, jobs_of, step_seconds
from benchmarks.published_throughput import measure
from roundpipe_lightning.errors import PlanError
from roundpipe_lightning.planning.cost.costs import (
    Evaluator,
    PartitionTable,
    RecomputeStart,
    stage_costs,
)
from roundpipe_lightning.planning.cost.simulate import simulate
from roundpipe_lightning.planning.model.hardware import RESERVED_BYTES
from roundpipe_lightning.planning.model.profile import BlockProfile, ModelProfile
from roundpipe_lightning.planning.schedule.plan import PipelineConfig, schedule_of
from roundpipe_lightning.planning.schedule.stages import Partition, RecomputePolicy
from roundpipe_lightning.planning.search.fit import fit_training
from roundpipe_lightning.planning.search.partition import QUICK as QUICK_SEARCH
from roundpipe_lightning.planning.search.partition import (
    Effort,
    PartitionSearch,
    StageLimits,
    even_partitions,
)
from roundpipe_lightning.planning.search.planner import plan_training
from roundpipe_lightning.planning.search.request import PartitionHints, PlanningRequest
from tests.kit.engine import (
    WIDTH,
    Regressor,
    differences,
    emulated_workers,
    engine_step,
    layers_of,
    plain_step,
    regression_batches,
)
from tests.kit.plans import balanced_partition, default_plan, keeps_cuts, keeps_limits
from tests.kit.profiles import machine, random_profiles, uniform_profile

QUICK = Effort(num_actions=100_000)


def simulated(evaluator: Evaluator, partition: Partition) -> float:
    count, size = sum(evaluator.rounds), evaluator.rounds[0]
    layout = PipelineConfig(
        num_microbatches=count,
        round_size=size,
        joined=evaluator.joined > 0,
        shares_backward=evaluator.shares_backward,
    ).with_stages(partition)
    costs = stage_costs(
        evaluator.profile,
        partition=partition,
        hop_seconds=evaluator.hop_seconds,
        recompute_start=evaluator.recompute_start,
    )
    schedule = schedule_of(layout, num_workers=evaluator.num_workers)
    return simulate(schedule, layout=layout, costs=costs).makespan_seconds


def random_counts(data: st.DataObject, total: int) -> tuple[int, ...]:
    counts = []
    while total:
        counts.append(data.draw(st.integers(1, total)))
        total -= counts[-1]
    return tuple(counts)


def random_partition(profile: ModelProfile, kind: str, data: st.DataObject) -> Partition:
    """Draw a partition: `fused`, `joined`, `plain`, `shared`, or `kept`, plain with kept graphs."""
    fused = 0 if kind == "joined" else data.draw(st.integers(0, profile.num_blocks))
    rest = profile.num_blocks - fused
    backward = (fused, *random_counts(data, rest))
    if kind in ("plain", "shared"):
        forward = random_counts(data, profile.num_blocks)
        forward = (*forward, 0) if data.draw(st.booleans()) or not forward else forward
        return Partition(forward=forward, backward=backward, plain=True)
    is_kept = kind == "kept"
    forward = (*random_counts(data, rest), *[fused] * is_kept)
    return Partition(forward=forward, backward=backward, plain=is_kept, keeps_graphs=is_kept)


@pytest.mark.parametrize(
    ("rounds", "kind"),
    [
        *(((1,), kind) for kind in ("fused", "plain", "kept")),
        *(((4,), kind) for kind in ("fused", "joined", "plain", "kept")),
        *(((3, 3), kind) for kind in ("fused", "plain", "kept")),
        *(((size,), "shared") for size in (12, 24)),
        ((4, 2), "fused"),
    ],
)
@settings(max_examples=25)
@given(
    profile=random_profiles(max_blocks=9),
    workers=st.integers(1, 4),
    recompute_start=st.sampled_from(RecomputeStart),
    data=st.data(),
)
def test_evaluator_agrees_with_the_simulator(
    profile: ModelProfile,
    workers: int,
    rounds: tuple[int, ...],
    recompute_start: RecomputeStart,
    *,
    kind: str,
    data: st.DataObject,
) -> None:
    evaluator = Evaluator(
        profile=profile,
        num_workers=workers,
        rounds=rounds,
        hop_seconds=0.25,
        recompute_start=recompute_start,
        joined=rounds[0] if kind == "joined" else 0,
        shares_backward=kind == "shared",
    )
    partitions = [random_partition(profile, kind, data) for _ in range(3)]
    table = PartitionTable.of(partitions)
    for partition, makespan in zip(partitions, evaluator.makespans(table), strict=True):
        exact = simulated(evaluator, partition)
        # An early recompute may also have to wait for its stored boundary, which is left out.
        if recompute_start is RecomputeStart.WITH_GRADIENT or workers == 1:
            assert makespan == pytest.approx(exact, abs=1e-9)
        else:
            assert makespan <= exact + 1e-9


def test_uneven_stages_beat_even_ones_and_the_search_repeats_itself() -> None:
    profile = uniform_profile(28, tail=3.0)
    evaluator = Evaluator(profile=profile, num_workers=8, rounds=(16,), hop_seconds=0.2)
    limits = StageLimits(forward=28, backward=4, fused=4)
    search = PartitionSearch(
        evaluator=evaluator, limits=limits, effort=Effort(num_actions=2_000_000)
    )
    best = search.best(even_partitions(profile, limits=limits))
    even = [
        balanced_partition(profile, num_fused=fused, num_forward=forward, num_backward=backward)
        for fused in range(4)
        for forward in range(1, 25, 2)
        for backward in range(7, 29, 2)
    ]
    table = PartitionTable.of(even)
    assert simulated(evaluator, best[0]) < 0.98 * min(evaluator.makespans(table))
    again = replace(search, seconds={}).best(even_partitions(profile, limits=limits))
    assert again == best


# The choice ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("machine", "batch"), [("rtx4090x8", 8), ("rtx3090x2", 4)])
def test_no_team_or_round_predicts_a_step_more_than_1_percent_shorter(
    machine: str, batch: int
) -> None:
    jobs = jobs_of(measure("qwen3_1_7b"), machine=machine, batch=batch)
    chosen = fit_training(*jobs)
    assert chosen.prediction is not None
    even = replace(QUICK_SEARCH, num_even=4)
    best = min(hinted(jobs, hints, even) for hints in hints_of(jobs))
    assert best > 0.99 * step_seconds(chosen)


# Runs of plans ------------------------------------------------------------------------------------


NUM_BLOCKS = 6


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).view(1, len(x), 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        return x + y.transpose(1, 2).reshape(x.shape)


_seconds = st.floats(min_value=0.01, max_value=5.0, allow_nan=False)


@settings(max_examples=24)
@given(
    st.lists(st.tuples(_seconds, _seconds), min_size=NUM_BLOCKS, max_size=NUM_BLOCKS),
    st.integers(1, 4),
    st.sampled_from([(), (1.0, 0.5, 0.4, 0.4)]),
    st.integers(1, 3),
    st.integers(1, 2),
    st.sampled_from([1e30, 30.0]),
    st.sampled_from([500, 5000]),
    st.sampled_from([None, *((policy,) for policy in RecomputePolicy)]),
    st.booleans(),
)
def test_the_engine_runs_random_plans_with_unchanged_results(
    durations: list[tuple[float, float]],
    num_workers: int,
    speeds: tuple[float, ...],
    num_microbatches: int,
    num_batches: int,
    link: float,
    room: int,
    recompute: tuple[RecomputePolicy, ...] | None,
    emulated: bool,
) -> None:
    """One or two slots for weights, blocks that stay, teams, speeds, rounds, every recompute."""
    module = Regressor(NUM_BLOCKS, make_block=Attention)
    stack = layers_of(module)
    blocks = tuple(
        BlockProfile(
            name=name,
            forward_seconds=forward,
            backward_seconds=backward,
            parameter_bytes=100,
            trainable_bytes=100,
            activation_bytes=60,
            attention_seconds=forward / 2,
            attention_bytes=10,
        )
        for name, (forward, backward) in zip(stack.names, durations, strict=True)
    )
    planned = plan_training(
        ModelProfile(blocks=blocks, fingerprint="tiny"),
        hardware=machine(
            num_workers,
            link=link,
            device_bytes=RESERVED_BYTES + (5000 if recompute == (RecomputePolicy.NONE,) else room),
        ),
        request=PlanningRequest(
            num_microbatches=num_microbatches,
            num_batches=num_batches,
            speeds=speeds[:num_workers],
            hints=PartitionHints(recompute=recompute),
            effort=Effort(num_actions=20_000),
        ),
    )
    batches = regression_batches(num_microbatches * num_batches)
    plain = plain_step(module, batches)
    devices = emulated_workers(num_workers) if emulated else None
    result = engine_step(module, stack, planned.plan, batches, devices=devices)
    # Devices add up a round's gradients before they go home, those of a team each its own.
    tolerance = 1e-6 if emulated and (num_batches > 1 or planned.plan.team_size > 1) else 0.0
    assert not differences(module, result, plain, tolerance=tolerance)


# Cuts ---------------------------------------------------------------------------------------------


FEW_ACTIONS = Effort(num_actions=30_000)


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
@given(cut_profiles(), st.integers(1, 4), st.integers(1, 4), st.integers(0, 3), st.booleans())
def test_even_and_searched_partitions_keep_the_cuts_and_the_limits(
    profile: ModelProfile, forward: int, backward: int, fused: int, plain: bool
) -> None:
    limits = StageLimits(forward=forward, backward=backward, fused=fused)
    even = even_partitions(profile, limits=limits, plain=plain)
    assert even
    evaluator = Evaluator(profile=profile, num_workers=3, rounds=(4,), hop_seconds=0.1)
    found = PartitionSearch(evaluator=evaluator, limits=limits, effort=FEW_ACTIONS).best(even)
    for partition in (*even, *found):
        assert keeps_cuts(partition, profile.cuts)
        assert keeps_limits(partition, limits)
        assert partition.num_blocks == profile.num_blocks
        assert partition.plain is plain


@settings(max_examples=15)
@given(cut_profiles(), st.sampled_from([1, 2, 4]), st.integers(1, 4), st.booleans())
def test_the_planner_keeps_the_cuts(
    profile: ModelProfile, devices: int, microbatches: int, plain: bool
) -> None:
    request = PlanningRequest(num_microbatches=microbatches, effort=FEW_ACTIONS, plain=plain)
    planned = plan_training(profile, hardware=machine(devices), request=request)
    assert keeps_cuts(planned.plan.partition, profile.cuts)
    assert planned.plan.plain is plain


def test_smaller_stages_for_a_small_device_keep_the_cuts_too() -> None:
    blocks = tuple(
        replace(block, parameter_bytes=10**9, trainable_bytes=10**9)
        for block in uniform_profile(12).blocks
    )
    profile = ModelProfile(blocks=blocks, fingerprint="m", cuts=(5, 7))
    request = PlanningRequest(num_microbatches=2, effort=FEW_ACTIONS)
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
