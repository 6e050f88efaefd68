"""Figures of a running training: speed, what the workers wait for, memory, plan."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from roundpipe_lightning.callbacks.listening import Listening
from roundpipe_lightning.callbacks.window import MeasuredBatch, Window
from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.models.batches import count_batch
from roundpipe_lightning.planning.report.step_record import StepRecord
from roundpipe_lightning.planning.schedule.plan import Plan
from roundpipe_lightning.strategy import compat
from roundpipe_lightning.strategy.strategy import RoundPipeStrategy

_PREFIX = "roundpipe/"
_GIB = 2**30
_OFTEN_ENOUGH = 50  # steps, where the Trainer logs nothing
_MOST_SHARE = 0.001  # share of the time that logging may take, where nobody has said how often

_LONGEST_REST_SECONDS = 30.0
_NOTHING: tuple[StepRecord | None, StepRecord | None] = (None, None)
_IN_PROGRESS_BAR = {
    "tokens_per_second": "tok/s",
    "tflop_per_second": "TFLOP/s",
    "idle_share": "idle",
}


class PipelineMonitor(Listening):
    """Logs how fast a training is, and what keeps it from being faster.

    Every logger of the Trainer has the figures, under `roundpipe/`; docs/monitoring.md defines each
    of them. The first batch of a fit, in which the step is planned, is left out, and so is
    validation. With another strategy than roundpipe's only speed, data and host memory are known.

    Args:
        every_n_steps: Optimizer steps between two measurements, each of which covers all batches
            since the one before. None: the Trainer's `log_every_n_steps`, or more where steps are
            so short that logging would take over 0.1 % of the time. The first comes after the
            second step.
        progress_bar: Whether tokens per second, TFLOP/s and the idle share are shown there, too.
        count_tokens: Counts the tokens of a batch that has no `input_ids`.

    Raises:
        ConfigurationError: `every_n_steps` is less than 1.
    """

    _hears_of = "step_listeners"

    def __init__(
        self,
        *,
        every_n_steps: int | None = None,
        progress_bar: bool = True,
        count_tokens: Callable[[Any], float] | None = None,
    ) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise ConfigurationError(
                f"PipelineMonitor(every_n_steps={every_n_steps}) must be 1 or more, or None for "
                "the Trainer's log_every_n_steps."
            )
        self._every_n_steps = every_n_steps
        self._progress_bar = progress_bar
        self._count_tokens = count_tokens
        self._forget()

    def _forget(self) -> None:
        self._clock = FetchClock()
        self._window = Window()
        self._before = Window()  # what was in earlier windows
        self._logged: list[str] = []  # Lightning's names of the figures that it holds
        self._have_reached_loggers = False
        self._batch_ended: float | None = None  # None: before the first one
        self._paused_seconds = 0.0
        self._paused_since: float | None = None
        self._optimizer_began: float | None = None
        self._record: StepRecord | None = None  # the last one
        self._arrived = _NOTHING  # that of the present batch, and the one before it
        self._in_flight: deque[MeasuredBatch | None] = deque()  # batches whose records are to come
        self._plans: list[Plan] = []
        self._steps_seen = 0
        self._steps_left = 0
        self._rests_until = 0.0

    @property
    def figures(self) -> dict[str, float]:
        """Rates and shares over the whole fit, by their names without `roundpipe/`."""
        total = Window()
        total.merge(self._before)
        total.merge(self._window)
        return total.figures()

    # --- when things happen -----------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        """Begin anew: an earlier fit says nothing."""
        self._forget()
        self._steps_seen = trainer.global_step

    def on_train_epoch_start(self, *_: Any) -> None:
        self._clock.epoch_started()

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self._clock.batch_started(trainer)
        if self._have_reached_loggers:
            self._withdraw(trainer)
        self._optimizer_began = None

    def on_before_optimizer_step(self, *_: Any) -> None:
        if self._optimizer_began is None:
            self._optimizer_began = time.perf_counter()

    def on_validation_start(self, *_: Any) -> None:
        self._paused_since = time.perf_counter()

    def on_validation_end(self, *_: Any) -> None:
        if self._paused_since is not None:
            self._paused_seconds += time.perf_counter() - self._paused_since
            self._paused_since = None

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,  # noqa: ARG002
        batch: Any,
        *_: Any,
    ) -> None:
        now = time.perf_counter()
        measured = self._measure(batch, now)
        self._batch_ended = now
        strategy = trainer.strategy
        if isinstance(strategy, RoundPipeStrategy) and strategy.is_in_flight:
            self._in_flight.append(measured)
        elif measured is not None:
            self._window.add(measured)
        if trainer.global_step != self._steps_seen:
            self._steps_seen = trainer.global_step
            self._steps_left -= 1
            flags: Any = trainer
            if self._is_due(now) and (flags.fast_dev_run or not self._window.is_empty):
                began = time.thread_time()  # not the wall's: on a busy machine others run, too
                self._log(trainer, pl_module)
                spent = time.thread_time() - began
                self._rests_until = now + min(spent / _MOST_SHARE, _LONGEST_REST_SECONDS)
                interval = self._every_n_steps or flags.log_every_n_steps or _OFTEN_ENOUGH
                self._steps_left = interval - 1
            if self._logged and compat.should_update_logs(trainer):
                self._have_reached_loggers = True

    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        """Wait for the last batch, whose record may still be to come."""
        if isinstance(trainer.strategy, RoundPipeStrategy):
            trainer.strategy.join_updates()

    def _is_due(self, now: float) -> bool:
        if self._steps_left >= 0:
            return False
        return self._every_n_steps is not None or now >= self._rests_until

    # --- measuring --------------------------------------------------------------------------------

    def _take(self, record: StepRecord) -> None:
        """Take what the pipeline did: for the batch in flight, else for the present one."""
        before, self._record = self._record, record
        if not any(plan is record.plan for plan in self._plans):
            self._plans.append(record.plan)
        if not self._in_flight:
            self._arrived = (record, before)
            return
        measured = self._in_flight.popleft()
        if measured is not None:
            # The optimizer was not waited for: the batch was in flight.
            self._window.add(replace(measured, record=record, before=before, optimizer_seconds=0.0))

    def _measure(self, batch: Any, now: float) -> MeasuredBatch | None:
        """Return the batch that has ended; None for the first one."""
        (record, before), self._arrived = self._arrived, _NOTHING
        data, paused = self._clock.take_seconds(), self._paused_seconds
        self._paused_seconds = 0.0
        if self._batch_ended is None:
            return None
        began = self._optimizer_began
        return MeasuredBatch(
            wall_seconds=now - self._batch_ended - paused,
            data_seconds=data,
            optimizer_seconds=0.0 if began is None else now - began,
            counts=count_batch(batch, tokens=self._count_tokens),
            record=record,
            before=before,
        )

    # --- logging ----------------------------------------------------------------------------------

    def _log(self, trainer: Trainer, pl_module: LightningModule) -> None:
        figures = self._window.figures()
        self._before.merge(self._window)
        self._window = Window()
        shown: dict[str, float] = {}
        if self._progress_bar:
            shown = {name: figures[key] for key, name in _IN_PROGRESS_BAR.items() if key in figures}
            pl_module.log_dict(shown, prog_bar=True, logger=False, batch_size=1)
        figures.update(self._plan_figures())
        figures.update(_memory_figures(trainer))
        named = {_PREFIX + name: float(value) for name, value in figures.items()}
        pl_module.log_dict(named, batch_size=1)
        self._logged = [f"on_train_batch_end.{name}" for name in (*shown, *named)]
        self._have_reached_loggers = False

    def _withdraw(self, trainer: Trainer) -> None:
        """Take the figures out of what Lightning logs: it would repeat them after every batch.

        What reads metrics (progress bars, `trainer.callback_metrics`) keeps the last ones.
        """
        results = compat.epoch_results(trainer)
        for result in [results[name] for name in self._logged if name in results]:
            result.reset()
        self._logged, self._have_reached_loggers = [], False

    def _plan_figures(self) -> dict[str, float]:
        if self._record is None:
            return {}
        plan = self._record.plan
        return {
            "num_microbatches": plan.num_microbatches,
            "num_stages": plan.partition.num_stages,
            "round_size": plan.round_size,
            "team_size": plan.team_size,
            "num_plans": len(self._plans),
        }


def _memory_figures(trainer: Trainer) -> dict[str, float]:
    found = {"peak_host_gib": peak_host_bytes()}
    if isinstance(trainer.strategy, RoundPipeStrategy):
        found["peak_device_gib"] = trainer.strategy.peak_device_bytes
    return {name: size / _GIB for name, size in found.items() if size is not None}


def peak_host_bytes() -> int | None:
    """Return the most memory that this process has had resident; None where nobody counts it."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class FetchClock:
    """Adds up the time in which the Trainer's thread fetches training batches.

    The first fetch of an epoch happens before the clock can listen: that one counts from the
    epoch's start to the batch's, with the making of the iterator.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._began: float | None = None
        self._epoch_began: float | None = None
        self._listens: object = None

    def epoch_started(self) -> None:
        self._epoch_began = time.perf_counter()

    def batch_started(self, trainer: Trainer) -> None:
        """Note that a batch is there, and listen to the next fetches."""
        if self._epoch_began is not None:
            self._seconds += time.perf_counter() - self._epoch_began
            self._epoch_began = None
        self._listens = compat.listen_to_fetches(
            trainer, self._begin, self._end, known=self._listens
        )

    def take_seconds(self) -> float:
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _begin(self) -> None:
        self._began = time.perf_counter()

    def _end(self) -> None:
        if self._began is not None:
            self._seconds += time.perf_counter() - self._began
            self._began = None
