"""Actions and schedules: golden round-robin schedules as text, and round-trips."""

from __future__ import annotations

import pytest

from roundpipe_lightning.errors import PlanError
from roundpipe_lightning.planning.schedule.round_robin import round_robin_schedule
from roundpipe_lightning.planning.schedule.schedule import (
    Action,
    ActionKey,
    NeededFor,
    Schedule,
    dependencies,
)
from roundpipe_lightning.planning.schedule.stages import Partition, StageKind

PARTITION = Partition(forward=(2, 2), backward=(1, 2, 2))

GOLDEN = {
    (2, 4, 2, 1): """\
worker 0: F0.0 F0.1 X0.0 X0.1 B2.0 B2.1 F1.2 F1.3 B1.2 B1.3
worker 1: F1.0 F1.1 B1.0 B1.1 F0.2 F0.3 X0.2 X0.3 B2.2 B2.3
""",
    (3, 2, 2, 1): """\
worker 0: F0.0 F0.1 B1.0 B1.1
worker 1: F1.0 F1.1 B2.0 B2.1
worker 2: X0.0 X0.1
""",
    (2, 4, 4, 2): """\
worker 0: F0.0 F0.2 F1.0 F1.2 X0.0 X0.2 B1.0 B1.2 B2.0 B2.2
worker 1: F0.1 F0.3 F1.1 F1.3 X0.1 X0.3 B1.1 B1.3 B2.1 B2.3
""",
    (1, 3, 2, 1): """\
worker 0: F0.0 F0.1 F1.0 F1.1 X0.0 X0.1 B1.0 B1.1 B2.0 B2.1 F0.2 F1.2 X0.2 B1.2 B2.2
""",
}


@pytest.mark.parametrize("shape", GOLDEN)
def test_round_robin_schedule(shape: tuple[int, int, int, int]) -> None:
    num_workers, num_microbatches, round_size, team_size = shape
    schedule = round_robin_schedule(
        PARTITION,
        num_workers=num_workers,
        num_microbatches=num_microbatches,
        round_size=round_size,
        team_size=team_size,
    )
    assert schedule.to_text() == GOLDEN[shape]
    assert Schedule.from_text(GOLDEN[shape]) == schedule


def test_round_robin_refuses_numbers_that_do_not_fit() -> None:
    with pytest.raises(PlanError, match="team_size=3 does not divide num_workers=4"):
        round_robin_schedule(
            PARTITION, num_workers=4, num_microbatches=1, round_size=1, team_size=3
        )
    with pytest.raises(PlanError, match="round_size=0"):
        round_robin_schedule(PARTITION, num_workers=4, num_microbatches=1, round_size=0)


def test_action_text_round_trips() -> None:
    action = Action(kind=StageKind.FORWARD, stage=2, microbatch=5, worker=1)
    assert str(action) == "F2.5@1"
    assert Action.parse("F2.5@1") == action
    assert str(action.key) == "F2.5"


@pytest.mark.parametrize("text", ["", "F2", "G2.5@1", "F2.5@", "F-1.0@0"])
def test_text_that_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="not an action"):
        Action.parse(text)


def test_an_action_without_worker_is_refused() -> None:
    with pytest.raises(PlanError, match="names no worker"):
        Action.parse("F2.5")


def test_a_row_out_of_order_is_refused() -> None:
    with pytest.raises(PlanError, match="Expected a line 'worker 0"):
        Schedule.from_text("worker 1: F0.0")


def test_a_stray_worker_survives_the_text_form() -> None:
    schedule = Schedule.from_text("worker 0: F0.0@1\nworker 1: F0.1")
    assert Schedule.from_text(schedule.to_text()) == schedule
    assert schedule.worker_of(ActionKey(StageKind.FORWARD, 0, 0)) == 1
    with pytest.raises(PlanError, match=r"No worker .* F9\.9"):
        schedule.worker_of(ActionKey(StageKind.FORWARD, 9, 9))


def test_dependencies_of_every_kind() -> None:
    def waits(text: str) -> list[str]:
        found = dependencies(Action.parse(text, worker=0).key, PARTITION)
        return [f"{d.key} {d.needed_for.value}" for d in found]

    assert waits("F0.3") == []
    assert waits("F1.3") == ["F0.3 start"]
    assert waits("X0.3") == ["F1.3 start"]
    assert waits("B1.3") == ["F0.3 start", "X0.3 gradient"]
    assert waits("B2.3") == ["F0.3 start", "B1.3 gradient"]
    only_fused = Partition(forward=(), backward=(3,))
    assert dependencies(ActionKey(StageKind.FUSED, 0, 1), only_fused) == ()
    assert NeededFor("gradient") is NeededFor.GRADIENT
