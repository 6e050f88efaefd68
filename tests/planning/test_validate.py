"""The validator catches every planted defect and shows where it is."""

from __future__ import annotations

import pytest

from roundpipe_lightning.errors import PlanError
from roundpipe_lightning.planning.schedule.schedule import Schedule, format_grid, validate_schedule
from roundpipe_lightning.planning.schedule.stages import Partition

PARTITION = Partition(forward=(1, 1), backward=(0, 1, 1))
GOOD = "worker 0: F0.0 F0.1 X0.0 X0.1 B2.0 B2.1\nworker 1: F1.0 F1.1 B1.0 B1.1\n"


def check(text: str, *, num_microbatches: int = 2) -> None:
    validate_schedule(
        Schedule.from_text(text), partition=PARTITION, num_microbatches=num_microbatches
    )


def test_a_good_schedule_passes() -> None:
    check(GOOD)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("F1.1 ", "", "1 action.s. are missing: F1.1"),
        ("F1.1", "F1.0", "F1.0 is run twice"),
        ("F1.1 ", "F1.1 F1.1 ", "F1.1 is run twice"),
        ("F1.1", "F1.1@0", "F1.1@0 stands in the row of worker 1"),
        ("F1.1", "F2.1", "F2.1@1 is no action"),
        ("B1.1", "B0.1", "B0.1@1 is no action"),
        ("F1.1", "F1.2", "F1.2@1 is no action"),
    ],
)
def test_a_planted_defect_is_found_and_marked(old: str, new: str, message: str) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        check(GOOD.replace(old, new))
    if "missing" not in message:
        assert f">{new.split()[-1]}<" in str(caught.value)


def test_a_deadlock_is_found_and_drawn() -> None:
    with pytest.raises(PlanError) as caught:
        check("worker 0: X0.0 F0.0 B2.0\nworker 1: F1.0 B1.0\n", num_microbatches=1)
    assert str(caught.value) == (
        "The schedule deadlocks: worker 0 stands at X0.0, waiting for F1.0; "
        "worker 1 stands at F1.0, waiting for F0.0; none of these can come.\n"
        "worker 0 | >X0.0<  F0.0   B2.0\n"
        "worker 1 | >F1.0<  B1.0"
    )


def test_the_grid_of_nothing_is_empty_rows() -> None:
    assert format_grid(Schedule(workers=((), ()))) == "worker 0 | \nworker 1 | "
