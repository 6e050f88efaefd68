"""The callbacks wait for nobody: batches in flight stay in flight, and the figures are right."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback

from roundpipe_lightning import ExportPretrained, PipelineMonitor, PipelineTimeline, PlanReport
from roundpipe_lightning.planning.report.step_record import IdleCause, StepRecord
from roundpipe_lightning.strategy import sync_hooks as readers
from tests.kit.training import QUIET, same_bits
from tests.lightning.test_batches_in_flight import NUM_MICROBATCHES, TIMEOUT_SECONDS, fit

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]


@pytest.mark.parametrize("kind", [PipelineMonitor, PipelineTimeline, PlanReport, ExportPretrained])
def test_no_step_is_waited_for_because_of_them(kind: type[Callback]) -> None:
    hooks = [name for name in dir(Callback) if name.startswith("on_")]
    assert not [hook for hook in hooks if readers.needs_sync(kind(), hook)]


def test_batches_in_flight_stay_in_flight(tmp_path: Path) -> None:
    begun = threading.Event()
    steps: list[int] = []

    def on_step(view: Any, batch: Any, index: int) -> None:
        steps.append(index)
        if index == 2:
            begun.set()

    def hear() -> None:
        if len(steps) > NUM_MICROBATCHES:  # in the backward pass of the second batch
            assert begun.wait(TIMEOUT_SECONDS / 2), "the third batch has not begun"

    monitor, timeline = PipelineMonitor(every_n_steps=1), PipelineTimeline(tmp_path / "drawn")
    report = PlanReport(write=lambda text: None)
    module, trainer = fit(tmp_path, monitor, timeline, report, hear=hear, on_step=on_step)
    assert same_bits(module, fit(tmp_path)[0])
    assert list(timeline.measured) == [3, 4, 5], "the last one, too"
    figures = monitor.figures
    assert figures["samples_per_second"] * figures["batch_seconds"] == pytest.approx(4)
    parts = [figures[f"idle_{cause.value}_share"] for cause in IdleCause]
    assert sum(parts) == pytest.approx(figures["idle_share"])
    assert 0 < figures["step_idle_share"] < 1
    logged = trainer.logged_metrics
    assert {"roundpipe/idle_share", "roundpipe/tokens_per_second"} & set(logged)


def test_steps_are_told_of_in_their_order(tmp_path: Path) -> None:
    class Watching(Callback):
        told: list[tuple[int, StepRecord]]

        def on_train_start(self, trainer: Any, *_: Any) -> None:
            self.told = []
            self.strategy = trainer.strategy
            count = trainer.fit_loop.epoch_loop.batch_progress.current

            def note(record: StepRecord) -> None:
                self.told.append((count.ready, record))

            trainer.strategy.step_listeners.append(note)

    watching = Watching()
    fit(tmp_path, watching)
    # Of the first batch of an engine and of the last one of a window the end is waited for.
    assert [batch for batch, _ in watching.told] == [1, 3, 3, 5, 6, 6]
    follows = [record.clock_seconds is not None for _, record in watching.told]
    assert follows == [False, False, True, False, True, True]
    assert watching.strategy.last_step is not None
    assert watching.strategy.last_step.timeline is watching.told[-1][1].timeline
    assert not watching.strategy.is_in_flight
