"""Prediction and measurement of a step, side by side: a trace for Perfetto and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from roundpipe_lightning.callbacks.listening import Listening
from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.files import write_text
from roundpipe_lightning.planning.cost.costs import ActionCost, RecomputeStart, StageCosts
from roundpipe_lightning.planning.cost.simulate import simulate
from roundpipe_lightning.planning.report.render import render_svg, render_trace, write_picture
from roundpipe_lightning.planning.report.step_record import StepRecord, idle_seconds
from roundpipe_lightning.planning.schedule.plan import Plan
from roundpipe_lightning.planning.schedule.schedule import Timeline
from roundpipe_lightning.planning.schedule.stages import Stage
from roundpipe_lightning.strategy.strategy import RoundPipeStrategy

_NUM_WARMUP_STEPS = 3
_NUM_DEFAULT_STEPS = 5


class PipelineTimeline(Listening):
    """Records when every action of chosen steps ran, and what the plan makes of the same durations.

    The prediction is the plan's schedule, simulated with the median of the measured durations of
    every stage: what differs from the measurement is waiting that the plan does not know of.

    At the end of training (also of one that was interrupted) it writes into `dirpath`

    - `timeline.json`: the prediction and every recorded step, for ui.perfetto.dev;
    - `timeline.svg`, `timeline.png`: the prediction above the recorded step of median duration, a
      row per worker, with the idle share of both and its parts.

    Args:
        dirpath: Where to; None is the logger's folder, or the Trainer's default folder.
        steps: Which training batches to record, counted from 0 where `fit` begins; None records
            five after three for warming up, and the last one. Batches that are smaller than the
            largest one run on other plans and are left out.

    Raises:
        ConfigurationError: A step is negative.
    """

    _hears_of = "step_listeners"
    _needs_roundpipe = True

    def __init__(
        self, dirpath: str | Path | None = None, *, steps: Sequence[int] | None = None
    ) -> None:
        if steps is not None and any(step < 0 for step in steps):
            raise ConfigurationError(
                f"PipelineTimeline(steps={list(steps)}): batches are counted from 0, so give "
                "numbers of 0 or more."
            )
        self._dirpath = None if dirpath is None else Path(dirpath)
        self._steps = None if steps is None else frozenset(steps)
        self._strategy: RoundPipeStrategy | None = None
        self._forget()

    def _forget(self) -> None:
        self._num_batches = 0
        self._plan: Plan | None = None
        self._recorded: dict[int, Timeline] = {}
        self._last: tuple[int, Timeline] | None = None

    @property
    def measured(self) -> dict[int, Timeline]:
        """The recorded steps, by their number; of one plan."""
        recorded = dict(self._recorded)
        if self._steps is None and self._last is not None:
            recorded[self._last[0]] = self._last[1]
        return recorded

    @property
    def predicted(self) -> Timeline | None:
        """The plan's schedule with the measured durations; None before a step was recorded."""
        timelines = list(self.measured.values())
        if self._plan is None or not timelines:
            return None
        partition = self._plan.partition
        costs = [_measured_cost(stage, timelines) for stage in partition.stages()]
        return simulate(
            self._plan.schedule,
            partition=partition,
            costs=StageCosts(
                forward=tuple(costs[: partition.num_forward]),
                backward=tuple(costs[partition.num_forward :]),
                recompute_start=RecomputeStart.WITH_GRADIENT,
            ),
        )

    @property
    def predicted_bubble_fraction(self) -> float | None:
        """Share of the workers' time in which the prediction has them idle, from 0 to 1."""
        predicted = self.predicted
        return None if predicted is None else predicted.bubble_fraction

    @property
    def measured_bubble_fraction(self) -> float | None:
        shares = [timeline.bubble_fraction for timeline in self.measured.values()]
        return median(shares) if shares else None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        assert isinstance(trainer.strategy, RoundPipeStrategy), "others are refused"
        self._strategy = trainer.strategy

    def on_train_start(self, *_: Any) -> None:
        """Forget steps from before the training: those of a search for the learning rate."""
        self._forget()

    def _take(self, record: StepRecord) -> None:
        assert self._strategy is not None, "the strategy calls this"
        number, self._num_batches = self._num_batches, self._num_batches + 1
        if record.plan != self._strategy.plan:
            return
        if self._plan != record.plan:
            self._plan = record.plan
            self._recorded.clear()
        self._last = (number, record.timeline)
        if self._is_chosen(number):
            self._recorded[number] = record.timeline

    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        """Write the files, with the last step, which may still be in flight."""
        assert self._strategy is not None, "it has trained"
        self._strategy.join_updates()
        self._write(trainer)

    def on_exception(self, trainer: Trainer, *_: Any) -> None:
        self._write(trainer)

    def _is_chosen(self, number: int) -> bool:
        if self._steps is not None:
            return number in self._steps
        return _NUM_WARMUP_STEPS <= number < _NUM_WARMUP_STEPS + _NUM_DEFAULT_STEPS

    def _write(self, trainer: Trainer) -> None:
        measured, predicted, picture = self.measured, self.predicted, self.picture()
        if predicted is None or picture is None:
            return
        folder = self._dirpath or Path(trainer.log_dir or trainer.default_root_dir)
        titles = {f"measured, batch {number}": measured[number] for number in sorted(measured)}
        write_text(folder / "timeline.json", render_trace({"predicted": predicted, **titles}))
        write_picture(folder / "timeline.svg", picture)

    def picture(self) -> str | None:
        """The prediction above the typical recorded step, as SVG; None before a step."""
        measured, predicted = self.measured, self.predicted
        if predicted is None:
            return None
        by_duration = sorted(measured, key=lambda number: measured[number].makespan_seconds)
        number = by_duration[len(by_duration) // 2]
        typical = measured[number]
        drawn = {"predicted": predicted.beside(typical), f"measured, batch {number}": typical}
        notes = {name: self._idle_note(timeline) for name, timeline in drawn.items()}
        return render_svg(drawn, notes=notes)

    def _idle_note(self, timeline: Timeline) -> str:
        assert self._plan is not None
        parts = idle_seconds(timeline, partition=self._plan.partition)
        available = timeline.num_workers * timeline.makespan_seconds
        shares = {cause.value: seconds / available for cause, seconds in parts.items()}
        return ", ".join(f"{name} {share:.1%}" for name, share in shares.items() if share > 5e-4)


def _measured_cost(stage: Stage, timelines: Sequence[Timeline]) -> ActionCost:
    """Median duration of a stage's actions, waiting not counted."""
    durations = [
        entry.busy_seconds
        for timeline in timelines
        for entry in timeline.entries
        if (entry.action.kind, entry.action.stage) == (stage.kind, stage.index)
    ]
    return ActionCost(compute_seconds=max(0.0, median(durations)))
