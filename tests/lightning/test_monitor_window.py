from dataclasses import replace

import pytest

from roundpipe_lightning.callbacks.window import MeasuredBatch, Window
from roundpipe_lightning.models.batches import BatchCounts
from roundpipe_lightning.planning.model.work import Operations
from roundpipe_lightning.planning.report.step_record import EngineCounters, IdleCause, StepRecord
from roundpipe_lightning.planning.schedule.plan import Plan
from roundpipe_lightning.planning.schedule.schedule import Action, Schedule
from roundpipe_lightning.planning.schedule.stages import Partition
from roundpipe_lightning.planning.schedule.timeline import Timeline, TimelineEntry

# worker 0 |F0.0|F0.1|.....|  |B1.0|  |B1.1|     a step of 12 s, in a batch of 20 s
# worker 1 |....|X0.0......|X0.1|...........|
TIMES = {
    "F0.0@0": (10.0, 11.0),
    "F0.1@0": (11.0, 12.0),
    "B1.0@0": (15.5, 18.0),
    "B1.1@0": (20.0, 22.0),
    "X0.0@1": (11.5, 15.0),
    "X0.1@1": (15.0, 17.0),
}
TIMELINE = Timeline(
    num_workers=2,
    entries=tuple(
        TimelineEntry(action=Action.parse(text), start_seconds=start, end_seconds=end)
        for text, (start, end) in TIMES.items()
    ),
)
PLAN = Plan(
    model="",
    partition=Partition(forward=(1,), backward=(1, 1)),
    num_workers=2,
    num_microbatches=2,
    round_size=2,
    schedule=Schedule.from_text("worker 0: F0.0 F0.1 B1.0 B1.1\nworker 1: X0.0 X0.1"),
    block_names=("a", "b"),
)
RECORD = StepRecord(
    plan=PLAN,
    timeline=TIMELINE,
    counters=EngineCounters(
        uploaded_bytes=30_000_000_000,
        downloaded_bytes=8_000_000_000,
        upload_wait_seconds=1.5,
        boundary_wait_seconds=0.25,
    ),
    operations=Operations(model=8e12, recompute=2e12),
    operations_per_token=None,
    peak_operations_per_second=4e12,
)
BATCH = MeasuredBatch(
    wall_seconds=20.0,
    data_seconds=3.0,
    optimizer_seconds=2.0,
    counts=BatchCounts(samples=4, tokens=100, targets=60),
    record=RECORD,
)


def test_one_batch() -> None:
    window = Window()
    window.add(BATCH)
    busy = 1 + 1 + 2.5 + 2 + 3.5 + 2 - 1.5 - 0.25
    assert window.figures() == pytest.approx(
        {
            "samples_per_second": 4 / 20,
            "tokens_per_second": 100 / 20,
            "targets_per_second": 60 / 20,
            "batch_seconds": 20,
            "idle_share": 1 - busy / 40,
            "idle_fill_share": 1.5 / 40,
            "idle_drain_share": 5 / 40,
            "idle_boundary_share": (3 + 0.25) / 40,
            "idle_upload_share": 1.5 / 40,
            "idle_data_share": 2 * 3 / 40,
            "idle_optimizer_share": 2 * 2 / 40,
            "idle_other_share": (0.5 + 2 + 2 * (20 - 12 - 3 - 2)) / 40,
            "step_idle_share": 1 - busy / 24,
            "upload_gb_per_second": 1.5,
            "download_gb_per_second": 0.4,
            "tflop_per_second": 8 / 20,
            "computed_tflop_per_second": 10 / 20,
            "share_of_peak": 0.1,
            "computed_share_of_peak": 0.125,
        }
    )


def test_batches_are_added_before_they_are_divided() -> None:
    window = Window()
    window.add(BATCH)
    other = replace(
        BATCH,
        wall_seconds=60.0,
        data_seconds=43.0,
        counts=BatchCounts(samples=2, tokens=None, targets=None),
    )
    window.add(other)
    figures = window.figures()
    assert figures["samples_per_second"] == pytest.approx(6 / 80)
    assert figures["tokens_per_second"] == pytest.approx(100 / 80)
    assert figures["batch_seconds"] == 40
    assert figures["idle_data_share"] == pytest.approx(2 * 46 / 160)
    assert figures["share_of_peak"] == pytest.approx(16 / (4 * 80))
    parts = sum(figures[f"idle_{cause.value}_share"] for cause in IdleCause)
    assert parts == pytest.approx(figures["idle_share"])


# worker 0 |B1.1|..|F0.0|    from 20 s on: this step begins at 21 s, the one above ends at 22 s
# worker 1 |....|X0.0|
LATER = replace(
    RECORD,
    timeline=Timeline(
        num_workers=2,
        entries=tuple(
            TimelineEntry(action=Action.parse(text), start_seconds=start, end_seconds=end)
            for text, (start, end) in {"X0.0@1": (0.0, 2.0), "F0.0@0": (2.0, 3.0)}.items()
        ),
    ),
    counters=EngineCounters(),
    clock_seconds=21.0,
)


def test_steps_that_overlap_are_not_counted_twice() -> None:
    window = Window()
    window.add(replace(BATCH, wall_seconds=11.0, data_seconds=0.0, optimizer_seconds=0.0))
    window.add(replace(BATCH, wall_seconds=2.0, optimizer_seconds=0.0, record=LATER, before=RECORD))
    figures = window.figures()
    workers = 2 * (11 + 2)
    busy = 12 - 1.75 + 3
    assert figures["idle_share"] == pytest.approx(1 - busy / workers)
    assert figures["step_idle_share"] == pytest.approx(1 - busy / (2 * (24 - 10)))
    # Worker 1 drains from 17 to 21 s, then works until 23 s; worker 0 fills from 22 to 23 s.
    assert figures["idle_drain_share"] == pytest.approx((4 + 1) / workers)
    assert figures["idle_fill_share"] == pytest.approx((1.5 + 1) / workers)
    assert figures["idle_data_share"] == 0, "the pipeline was never empty"
    parts = sum(figures[f"idle_{cause.value}_share"] for cause in IdleCause)
    assert parts == pytest.approx(figures["idle_share"])


def test_data_is_waited_for_when_the_step_before_has_ended() -> None:
    late = replace(LATER, clock_seconds=22.5)
    batch = replace(BATCH, wall_seconds=5.0, optimizer_seconds=0.0, record=late, before=RECORD)
    window = Window()
    window.add(batch)
    assert window.figures()["idle_data_share"] == pytest.approx(0.5 / 5)
    assert window.figures()["step_idle_share"] == pytest.approx(1 - 3 / (2 * 3))


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        (BatchCounts(samples=4, tokens=100, targets=None), 100 * 5e9),
        (BatchCounts(samples=4, tokens=None, targets=None), 4 * 5e9),
        (BatchCounts(samples=None, tokens=None, targets=None), None),
    ],
)
def test_estimates_from_parameters_are_per_token(
    counts: BatchCounts, expected: float | None
) -> None:
    per_token = Operations(model=5e9, recompute=1e9)
    record = replace(RECORD, operations=None, operations_per_token=per_token)
    window = Window()
    window.add(replace(BATCH, counts=counts, record=record))
    found = window.figures().get("tflop_per_second")
    assert found == (None if expected is None else pytest.approx(expected / 20 / 1e12))
