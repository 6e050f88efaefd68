"""The published schedules as text."""

from __future__ import annotations

import pytest

from benchmarks.published_schedules import (
    bound_partition,
    gpipe_schedule,
    interleaved_schedule,
    looped_bfs_schedule,
    one_f_one_b_schedule,
)
from roundpipe_lightning.errors import PlanError
from roundpipe_lightning.planning.schedule.schedule import Schedule, validate_schedule

GOLDEN = {
    "gpipe": """\
worker 0: F0.0 F0.1 F0.2 B2.0 B2.1 B2.2
worker 1: F1.0 F1.1 F1.2 X0.0 B1.0 X0.1 B1.1 X0.2 B1.2
""",
    "one_f_one_b": """\
worker 0: F0.0 F0.1 B2.0 F0.2 B2.1 B2.2
worker 1: F1.0 X0.0 B1.0 F1.1 X0.1 B1.1 F1.2 X0.2 B1.2
""",
    "interleaved": """\
worker 0: F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B4.0 F2.3 B4.1 B2.2 B2.3 B4.2 B4.3
worker 1: F1.0 F1.1 F3.0 X0.0 B1.0 F3.1 X0.1 B1.1 F1.2 B3.0 F1.3 B3.1 F3.2 X0.2 B1.2 F3.3 X0.3 \
B1.3 B3.2 B3.3
""",
    "looped_bfs": """\
worker 0: F0.0 F0.1 F2.0 F2.1 B2.0 B2.1 B4.0 B4.1
worker 1: F1.0 F1.1 F3.0 F3.1 X0.0 B1.0 X0.1 B1.1 B3.0 B3.1
""",
}

MADE = {
    "gpipe": (gpipe_schedule(num_workers=2, num_microbatches=3), 2, 3),
    "one_f_one_b": (one_f_one_b_schedule(num_workers=2, num_microbatches=3), 2, 3),
    "interleaved": (interleaved_schedule(num_stages=4, num_workers=2, num_microbatches=4), 4, 4),
    "looped_bfs": (looped_bfs_schedule(num_stages=4, num_workers=2, num_microbatches=2), 4, 2),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_published_schedule(name: str) -> None:
    schedule, num_stages, num_microbatches = MADE[name]
    assert schedule.to_text() == GOLDEN[name]
    assert Schedule.from_text(GOLDEN[name]) == schedule
    partition = bound_partition([1] * num_stages)
    validate_schedule(schedule, partition=partition, num_microbatches=num_microbatches)


def test_interleaving_needs_multiples_of_the_workers() -> None:
    with pytest.raises(PlanError, match="num_stages=3 must be a multiple of num_workers=2"):
        interleaved_schedule(num_stages=3, num_workers=2, num_microbatches=4)
