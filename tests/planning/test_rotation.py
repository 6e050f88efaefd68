"""Batches of a stream begin with the worker after the one that ended the batch before."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundpipe_lightning.planning.schedule.plan import Plan
from roundpipe_lightning.planning.schedule.round_robin import (
    rotated,
    round_robin_schedule,
    turns_of_batch,
)
from roundpipe_lightning.planning.schedule.schedule import Schedule
from roundpipe_lightning.planning.schedule.stages import Partition
from roundpipe_lightning.planning.schedule.timeline import Timeline, TimelineEntry
from tests.kit.plans import round_robin_plan


def plan_with(
    *, num_workers: int, team_size: int = 1, num_rounds: int = 1, backward: int = 2
) -> Plan:
    """Return a plan of rounds of two microbatches."""
    return round_robin_plan(
        Partition(forward=(backward,), backward=(1, *[1] * backward)),
        num_workers=num_workers,
        num_microbatches=2 * num_rounds,
        round_size=2,
        team_size=team_size,
    )


def as_batch(plan: Plan, batch: int) -> Schedule:
    """Return a plan's schedule with the numbers that its microbatches have in a stream."""
    first = batch * plan.num_microbatches
    rows = plan.schedule.workers
    return Schedule(
        workers=tuple(
            tuple(replace(action, microbatch=first + action.microbatch) for action in row)
            for row in rows
        )
    )


@settings(deadline=None, max_examples=40)
@given(
    num_teams=st.integers(1, 5),
    team_size=st.integers(1, 2),
    num_rounds=st.integers(1, 3),
    backward=st.integers(1, 5),
)
def test_batches_one_after_the_other_are_the_planned_stream(
    num_teams: int, team_size: int, num_rounds: int, backward: int
) -> None:
    num_workers = num_teams * team_size
    plan = plan_with(
        num_workers=num_workers, team_size=team_size, num_rounds=num_rounds, backward=backward
    )
    stream = round_robin_schedule(
        plan.partition,
        num_workers=num_workers,
        num_microbatches=4 * plan.num_microbatches,
        round_size=plan.round_size,
        team_size=team_size,
    )
    rows: list[list[object]] = [[] for _ in range(num_workers)]
    for batch in range(4):
        schedule = as_batch(rotated(plan, batch * turns_of_batch(plan)), batch)
        for row, actions in zip(rows, schedule.workers, strict=True):
            row += actions
    assert rows == [list(row) for row in stream.workers]


def test_a_plan_that_is_not_laid_round_the_workers_begins_where_it_says() -> None:
    plan = plan_with(num_workers=3)
    first, second, third = plan.schedule.workers
    moved = tuple(replace(action, worker=2) for action in second)
    assert turns_of_batch(plan) == 1
    other = replace(plan, schedule=Schedule(workers=(first, (), (*moved, *third))))
    assert turns_of_batch(other) == 0


@pytest.mark.parametrize(
    ("resident", "num_batches", "turns"),
    [
        ((), 1, 1),
        (((0, 1),) * 3, 1, 1),  # wherever a batch begins, they are there
        (((0,), (1,), ()), 1, 0),  # chosen for the workers of one batch
        (((0,), (1,), ()), 2, 1),  # chosen for a stream
    ],
)
def test_blocks_that_stay_decide(
    resident: tuple[tuple[int, ...], ...], num_batches: int, turns: int
) -> None:
    plan = replace(plan_with(num_workers=3), resident=resident, num_batches=num_batches)
    assert turns_of_batch(plan) == turns
    assert rotated(plan, 2).resident == plan.resident


def test_a_whole_turn_changes_nothing() -> None:
    plan = plan_with(num_workers=3)
    assert rotated(plan, 0) is plan
    assert rotated(plan, 3) is plan
    assert rotated(rotated(plan, 1), 2) == plan


def timeline_of(plan: Plan) -> Timeline:
    """Return a timeline in which every action takes a second."""
    entries = [
        TimelineEntry(action=action, start_seconds=number, end_seconds=number + 1)
        for row in plan.schedule.workers
        for number, action in enumerate(row)
    ]
    return Timeline(num_workers=plan.num_workers, entries=tuple(entries))


def test_a_prediction_is_shown_beside_what_has_run_on_other_workers() -> None:
    plan = plan_with(num_workers=3)
    predicted = timeline_of(plan)
    for further in range(3):
        measured = timeline_of(rotated(plan, further))
        assert predicted.beside(measured).rows() == measured.rows()
    assert predicted.beside(Timeline(num_workers=3, entries=())) == predicted
    nothing = Timeline(num_workers=3, entries=())
    assert nothing.beside(predicted) == nothing
