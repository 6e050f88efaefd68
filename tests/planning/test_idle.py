import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundpipe_lightning.errors import PlanError
from roundpipe_lightning.planning.cost.costs import ActionCost, RecomputeStart, StageCosts
from roundpipe_lightning.planning.cost.simulate import simulate
from roundpipe_lightning.planning.report.step_record import IdleCause, idle_seconds
from roundpipe_lightning.planning.schedule.round_robin import round_robin_schedule
from roundpipe_lightning.planning.schedule.schedule import Action
from roundpipe_lightning.planning.schedule.stages import Partition
from roundpipe_lightning.planning.schedule.timeline import Timeline, TimelineEntry

PARTITION = Partition(forward=(1,), backward=(1, 1))


def entry(text: str, start: float, end: float, waiting: float = 0.0) -> TimelineEntry:
    return TimelineEntry(
        action=Action.parse(text), start_seconds=start, end_seconds=end, waiting_seconds=waiting
    )


# worker 0 |F|F|.......|B|   |B|      from 10 s to 22 s
# worker 1 |   |X.....X|X| .......    (one second of the first X0 is waiting)
TIMELINE = Timeline(
    num_workers=2,
    entries=(
        entry("F0.0@0", 10, 11),
        entry("F0.1@0", 11, 12),
        entry("X0.0@1", 11.5, 15, waiting=1),
        entry("X0.1@1", 15, 17),
        entry("B1.0@0", 15.5, 18),
        entry("B1.1@0", 20, 22),
    ),
)


def test_a_timeline_made_by_hand() -> None:
    parts = idle_seconds(TIMELINE, partition=PARTITION)
    assert parts == {
        IdleCause.FILL: 1.5,  # worker 1 before 11.5
        IdleCause.DRAIN: 5.0,  # worker 1 after 17
        IdleCause.BOUNDARY: 3.0 + 1.0,  # worker 0 until X0.0 has ended at 15, and inside X0.0
        IdleCause.OTHER: 0.5 + 2.0,  # 15 to 15.5, and 18 to 20: X0.1 had ended at 17
        IdleCause.UPLOAD: 0.0,
        IdleCause.OPTIMIZER: 0.0,
        IdleCause.DATA: 0.0,
    }
    assert sum(parts.values()) == 2 * 12 - TIMELINE.busy_seconds


def test_other_stages_are_refused() -> None:
    timeline = Timeline(num_workers=1, entries=(entry("F0.0@0", 0, 1), entry("F7.0@0", 1, 4)))
    with pytest.raises(PlanError, match="There is no stage F7 in forward 1"):
        idle_seconds(timeline, partition=PARTITION)


@given(
    num_workers=st.integers(1, 4),
    num_microbatches=st.integers(1, 6),
    costs=st.lists(st.floats(0.01, 5.0), min_size=5, max_size=5),
    start=st.sampled_from(RecomputeStart),
    hop_seconds=st.sampled_from([0.0, 0.1]),
    joined=st.booleans(),
)
def test_parts_add_up(
    num_workers: int,
    num_microbatches: int,
    costs: list[float],
    start: RecomputeStart,
    hop_seconds: float,
    joined: bool,
) -> None:
    pieces = num_microbatches if joined else 0
    partition = Partition(forward=(2, 1), backward=(1, 2, 1), joined=pieces)
    schedule = round_robin_schedule(
        partition,
        num_workers=num_workers,
        num_microbatches=num_microbatches,
        round_size=num_microbatches,
        team_size=1,
    )
    timeline = simulate(
        schedule,
        partition=partition,
        costs=StageCosts(
            forward=tuple(ActionCost(compute_seconds=c) for c in costs[:2]),
            backward=tuple(
                ActionCost(compute_seconds=c, recompute_seconds=c / 4) for c in costs[2:]
            ),
            hop_seconds=hop_seconds,
            recompute_start=start,
        ),
    )
    parts = idle_seconds(timeline, partition=partition)
    idle = num_workers * timeline.makespan_seconds - timeline.busy_seconds
    assert sum(parts.values()) == pytest.approx(idle, abs=1e-9)
    assert min(parts.values()) >= -1e-9
    assert hop_seconds or parts[IdleCause.OTHER] == pytest.approx(0, abs=1e-9)
