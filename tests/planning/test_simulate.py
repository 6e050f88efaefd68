from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundpipe_lightning.errors import PlanError
from roundpipe_lightning.planning.cost.costs import (
    ActionCost,
    RecomputeStart,
    StageCosts,
    stage_costs,
)
from roundpipe_lightning.planning.cost.simulate import simulate
from roundpipe_lightning.planning.model.profile import BlockProfile, ModelProfile
from roundpipe_lightning.planning.schedule.schedule import Schedule
from roundpipe_lightning.planning.schedule.stages import Partition
from roundpipe_lightning.planning.schedule.timeline import Timeline
from tests.kit.plans import default_plan
from tests.kit.profiles import random_profiles

PARTITION = Partition(forward=(1,), backward=(0, 1))
SCHEDULE = Schedule.from_text("worker 0: F0.0 B1.0\nworker 1: X0.0\n")
COSTS = StageCosts(
    forward=(ActionCost(compute_seconds=1.0),),
    backward=(
        ActionCost(compute_seconds=3.0),
        ActionCost(recompute_seconds=1.0, compute_seconds=2.0),
    ),
    hop_seconds=0.5,
)


def rows(timeline: Timeline) -> list[tuple[str, float, float, float]]:
    return [
        (str(e.action), e.start_seconds, e.end_seconds, e.waiting_seconds) for e in timeline.entries
    ]


def test_an_early_recompute_waits_inside_its_action() -> None:
    timeline = simulate(SCHEDULE, partition=PARTITION, costs=COSTS)
    assert rows(timeline) == [
        ("F0.0@0", 0.0, 1.0, 0.0),
        ("X0.0@1", 1.5, 4.5, 0.0),
        ("B1.0@0", 1.0, 7.0, 3.0),
    ]
    assert timeline.makespan_seconds == 7.0
    assert timeline.busy_seconds == 7.0
    assert timeline.bubble_fraction == pytest.approx(0.5)


def test_a_recompute_with_its_gradient_begins_late() -> None:
    costs = StageCosts(
        forward=COSTS.forward,
        backward=COSTS.backward,
        hop_seconds=0.5,
        recompute_start=RecomputeStart.WITH_GRADIENT,
    )
    timeline = simulate(SCHEDULE, partition=PARTITION, costs=costs)
    assert rows(timeline)[-1] == ("B1.0@0", 5.0, 8.0, 0.0)


def test_head_and_tail_are_counted_once() -> None:
    profile = ModelProfile(
        blocks=tuple(
            BlockProfile(name=f"b{i}", forward_seconds=1.0, backward_seconds=2.0) for i in range(3)
        ),
        head=BlockProfile(name="head", forward_seconds=10.0, backward_seconds=20.0),
        tail=BlockProfile(name="tail", forward_seconds=100.0, backward_seconds=200.0),
        fingerprint="",
    )
    costs = stage_costs(profile, partition=Partition(forward=(1, 1), backward=(1, 2)))
    assert [cost.seconds for cost in costs.forward] == [11.0, 1.0]
    assert [cost.seconds for cost in costs.backward] == [303.0, 26.0]
    assert costs.backward[1].recompute_seconds == 2.0
    fused = stage_costs(profile, partition=Partition(forward=(), backward=(3,)))
    assert sum(cost.seconds for cost in (*fused.forward, *fused.backward)) == 339.0
    with pytest.raises(PlanError, match="3 blocks"):
        stage_costs(profile, partition=PARTITION)


@given(random_profiles(), st.integers(1, 5), st.integers(1, 7), st.sampled_from(RecomputeStart))
def test_a_default_plan_is_valid_and_its_simulation_consistent(
    profile: ModelProfile, workers: int, microbatches: int, recompute_start: RecomputeStart
) -> None:
    plan = default_plan(
        profile,
        num_workers=workers,
        num_microbatches=microbatches,
        recompute_start=recompute_start,
    )
    costs = stage_costs(profile, partition=plan.partition, recompute_start=recompute_start)
    timeline = simulate(plan.schedule, partition=plan.partition, costs=costs)
    assert len(timeline.entries) == plan.partition.num_stages * microbatches
    assert timeline.busy_seconds == pytest.approx(
        microbatches * sum(cost.seconds for cost in (*costs.forward, *costs.backward))
    )
    assert -1e-9 <= timeline.bubble_fraction <= 1.0
    for row in timeline.rows():
        for before, after in pairwise(row):
            assert before.end_seconds <= after.start_seconds
