"""Figures of a running training: speed, what the workers wait for, memory, plan."""

from __future__ import annotations

import sys
import time
from abc import abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, MutableSequence
from dataclasses import dataclass, replace
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.models.batches import BatchCounts, count_batch
from roundpipe_lightning.planning.model.work import Operations
from roundpipe_lightning.planning.report.step_record import IdleCause, Overlap, StepRecord
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


class CollectsLosses(Callback):
    """Keeps the losses of batches, with the optimizer steps that came before their ends."""

    _losses: MutableSequence[tuple[int, float]]

    def on_train_start(self, *_: Any) -> None:
        self._losses.clear()

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,  # noqa: ARG002
        outputs: Any,
        *_: Any,
    ) -> None:
        if isinstance(outputs, Mapping) and "loss" in outputs:
            loss = float(outputs["loss"]) * trainer.accumulate_grad_batches  # as before its share
            self._losses.append((trainer.global_step, loss))


class Listening(Callback):
    """Takes what the strategy tells while `fit` runs; a subclass names one of its lists."""

    _hears_of = "plan_listeners"
    _needs_roundpipe = False
    _roundpipe: RoundPipeStrategy | None = None  # the Trainer's, if it is one

    @abstractmethod
    def _take(self, told: Any) -> None:
        """Called with each plan, or each step."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Register with the strategy: an earlier fit may have failed before teardown."""
        super().setup(trainer, pl_module, stage)
        strategy = trainer.strategy
        self._roundpipe = strategy if isinstance(strategy, RoundPipeStrategy) else None
        self._unregister(trainer)
        if self._roundpipe is not None:
            if stage == "fit":
                getattr(strategy, self._hears_of).append(self._take)
        elif self._needs_roundpipe:
            raise ConfigurationError(
                f"{type(self).__name__} needs Trainer(strategy='roundpipe'), found "
                f"{type(strategy).__name__}. Leave the callback out, or change the strategy."
            )

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:  # noqa: ARG002
        self._unregister(trainer)

    def _unregister(self, trainer: Trainer) -> None:
        listeners: list[Any] = getattr(trainer.strategy, self._hears_of, [])
        if self._take in listeners:
            listeners.remove(self._take)


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
        self._data_seconds = self._fetch_began = 0.0
        self._epoch_began: float | None = None
        self._window = Counter[str]()  # of `MeasuredBatch.sums`
        self._before = Counter[str]()  # of earlier windows
        self._logged: list[str] = []  # Lightning's names of the figures that it holds
        self._have_reached_loggers = False
        self._batch_began = 0.0
        self._batch_ended: float | None = None  # None: before the first one
        self._paused_seconds = 0.0
        self._paused_since: float | None = None
        self._optimizer_began: float | None = None
        self._record: StepRecord | None = None  # the last one
        self._arrived = _NOTHING  # that of the present batch, and the one before it
        # batches whose records are to come: when each began, and when the one before it ended
        self._in_flight: deque[tuple[MeasuredBatch | None, float, float | None]] = deque()
        self._plans: list[Plan] = []
        self._steps_seen = 0
        self._steps_left = 0
        self._rests_until = 0.0

    @property
    def figures(self) -> dict[str, float]:
        """Rates and shares over the whole fit, by their names without `roundpipe/`."""
        total = Counter(self._before)
        total.update(self._window)
        return figures_of(total)

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        """Begin anew: an earlier fit says nothing."""
        self._forget()
        self._steps_seen = trainer.global_step
        compat.listen_to_fetches(trainer, self._fetch_begins, self._fetch_ended)

    def _unregister(self, trainer: Trainer) -> None:
        super()._unregister(trainer)
        compat.leave_fetches(trainer)

    def _fetch_begins(self) -> None:
        self._fetch_began = time.perf_counter()

    def _fetch_ended(self) -> None:
        self._data_seconds += time.perf_counter() - self._fetch_began

    def on_train_epoch_start(self, *_: Any) -> None:
        self._epoch_began = time.perf_counter()

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if self._epoch_began is not None:  # the first fetch counts with the iterator's making
            self._data_seconds = time.perf_counter() - self._epoch_began
            self._epoch_began = None
        if self._have_reached_loggers:
            # Lightning would log the figures again after every batch. What reads metrics (progress
            # bars, `trainer.callback_metrics`) keeps the last ones.
            results = compat.epoch_results(trainer)
            for result in [results[name] for name in self._logged if name in results]:
                result.reset()
            self._logged, self._have_reached_loggers = [], False
        self._optimizer_began = None
        self._batch_began = time.perf_counter()

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
        measured, before = self._measure(batch, now), self._batch_ended
        self._batch_ended = now
        if self._roundpipe is not None and self._roundpipe.is_in_flight:
            self._in_flight.append((measured, self._batch_began, before))
        elif measured is not None:
            self._window.update(measured.sums())
        if trainer.global_step != self._steps_seen:
            self._steps_seen = trainer.global_step
            self._steps_left -= 1
            flags: Any = trainer
            if self._is_due(now) and (flags.fast_dev_run or self._window):
                began = time.thread_time()  # not the wall's: on a busy machine others run, too
                self._log(pl_module)
                spent = time.thread_time() - began
                self._rests_until = now + min(spent / _MOST_SHARE, _LONGEST_REST_SECONDS)
                interval = self._every_n_steps or flags.log_every_n_steps or _OFTEN_ENOUGH
                self._steps_left = interval - 1
            if self._logged and compat.should_update_logs(trainer):
                self._have_reached_loggers = True

    def on_train_end(self, *_: Any) -> None:
        """Wait for the last batch, whose record may still be to come."""
        if self._roundpipe is not None:
            self._roundpipe.join_updates()

    def _is_due(self, now: float) -> bool:
        if self._steps_left >= 0:
            return False
        return self._every_n_steps is not None or now >= self._rests_until

    def _take(self, record: StepRecord) -> None:
        """Take what the pipeline did: for the batch in flight, else for the present one."""
        before, self._record = self._record, record
        if not any(plan is record.plan for plan in self._plans):
            self._plans.append(record.plan)
        if not self._in_flight:
            self._arrived = (record, before)
            return
        measured, began, last_end = self._in_flight.popleft()
        returned = self._batch_ended or began
        # The Trainer went on before it ended. The devices' clock, which begins with a step or goes
        # on from the step before, says when; the Trainer's thread may hear of it much later.
        ended = began + record.end_seconds
        if before is not None and last_end is not None and record.clock_seconds is not None:
            ended = last_end + record.end_seconds - before.end_seconds
        self._batch_ended = min(max(ended, returned), time.perf_counter())
        if measured is not None:
            # The optimizer was not waited for: the batch was in flight.
            wall = measured.wall_seconds + self._batch_ended - returned
            found = replace(measured, wall_seconds=wall, record=record, before=before)
            self._window.update(replace(found, optimizer_seconds=0.0).sums())

    def _measure(self, batch: Any, now: float) -> MeasuredBatch | None:
        """Return the batch that has ended; None for the first one."""
        (record, before), self._arrived = self._arrived, _NOTHING
        data, paused = self._data_seconds, self._paused_seconds
        self._data_seconds = self._paused_seconds = 0.0
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

    def _log(self, pl_module: LightningModule) -> None:
        figures = figures_of(self._window)
        self._before.update(self._window)
        self._window.clear()
        shown: dict[str, float] = {}
        if self._progress_bar:
            shown = {name: figures[key] for key, name in _IN_PROGRESS_BAR.items() if key in figures}
            pl_module.log_dict(shown, prog_bar=True, logger=False, batch_size=1)
        if self._record is not None:
            plan = self._record.plan
            figures.update(
                num_microbatches=plan.num_microbatches,
                num_stages=plan.partition.num_stages,
                round_size=plan.round_size,
                team_size=plan.team_size,
                num_plans=len(self._plans),
            )
        sizes = {"peak_host_gib": peak_host_bytes()}
        if self._roundpipe is not None:
            sizes["peak_device_gib"] = self._roundpipe.peak_device_bytes
        figures.update({name: size / _GIB for name, size in sizes.items() if size is not None})
        named = {_PREFIX + name: float(value) for name, value in figures.items()}
        pl_module.log_dict(named, batch_size=1)
        self._logged = [f"on_train_batch_end.{name}" for name in (*shown, *named)]
        self._have_reached_loggers = False


def figures_among(callbacks: Iterable[Callback]) -> Mapping[str, float]:
    """Return what the first `PipelineMonitor` has measured over the whole run, if there is one."""
    return next((each.figures for each in callbacks if isinstance(each, PipelineMonitor)), {})


def peak_host_bytes() -> int | None:
    """Return the most memory that this process has had resident; None where nobody counts it."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@dataclass(frozen=True, kw_only=True)
class MeasuredBatch:
    """A training batch that has been run.

    Attributes:
        wall_seconds: From the end of the batch before to its own, without validation.
        data_seconds: Part of it in which the Trainer waited for the data loader.
        optimizer_seconds: Part of it from the last backward to the end: the optimizer.
        record: What the pipeline did; None where none ran.
        before: What it did in the batch before.
    """

    wall_seconds: float
    data_seconds: float
    optimizer_seconds: float
    counts: BatchCounts
    record: StepRecord | None
    before: StepRecord | None = None

    @property
    def operations(self) -> Operations | None:
        record = self.record
        if record is None:
            return None
        if record.operations is not None or record.operations_per_token is None:
            return record.operations
        counts = self.counts
        count = counts.samples if counts.tokens is None else counts.tokens
        return None if count is None else record.operations_per_token * count

    def idle_seconds(self, overlap: Overlap | None) -> dict[IdleCause, float]:
        """Return the workers' idle time in all of `wall_seconds`, by cause, less an overlap."""
        record = self.record
        assert record is not None, "only pipelines have workers"
        workers = record.timeline.num_workers
        idle = record.idle_seconds()
        data = self.data_seconds
        if overlap is not None:
            idle[IdleCause.FILL] -= overlap.fill_seconds
            idle[IdleCause.DRAIN] -= overlap.drain_seconds
            data = min(data, overlap.pause_seconds)  # before that nobody waited for it
        idle[IdleCause.DATA] += workers * data
        idle[IdleCause.OPTIMIZER] += workers * self.optimizer_seconds
        all_idle = workers * self.wall_seconds - record.busy_seconds
        idle[IdleCause.OTHER] += all_idle - sum(idle.values())
        return idle

    def sums(self) -> dict[str, Any]:
        """Return what is added up over batches; seconds of workers are those of all together."""
        record, wall = self.record, self.wall_seconds
        sums: dict[str, Any] = {"batches": 1, "wall": wall, "data": self.data_seconds}
        sums |= {name: count for name, count in vars(self.counts).items() if count is not None}
        if record is None:
            return sums
        workers, overlap = record.timeline.num_workers, record.overlap(self.before)
        step = record.timeline.makespan_seconds - (overlap.step_seconds if overlap else 0.0)
        sums |= {
            "pipeline": wall,
            "workers": workers * wall,
            "idle": workers * wall - record.busy_seconds,
            "step_workers": workers * step,
            "step_idle": workers * step - record.busy_seconds,
            "uploaded": record.counters.uploaded_bytes,
            "downloaded": record.counters.downloaded_bytes,
        }
        idle = self.idle_seconds(overlap)
        sums |= {f"idle_{cause.value}": seconds for cause, seconds in idle.items()}
        operations = self.operations
        if operations is not None:
            sums |= {"known": wall, "model": operations.model, "computed": operations.all}
            if record.peak_operations_per_second is not None:
                sums["peak"] = wall * record.peak_operations_per_second
        return sums


_RATIOS: Mapping[str, tuple[str, str, float]] = {
    **{f"{name}_per_second": (name, "wall", 1) for name in ("samples", "tokens", "targets")},
    "batch_seconds": ("wall", "batches", 1),
    "data_share": ("data", "wall", 1),
    "idle_share": ("idle", "workers", 1),
    **{f"idle_{cause.value}_share": (f"idle_{cause.value}", "workers", 1) for cause in IdleCause},
    "step_idle_share": ("step_idle", "step_workers", 1),
    "upload_gb_per_second": ("uploaded", "pipeline", 1e9),
    "download_gb_per_second": ("downloaded", "pipeline", 1e9),
    "tflop_per_second": ("model", "known", 1e12),
    "computed_tflop_per_second": ("computed", "known", 1e12),
    "share_of_peak": ("model", "peak", 1),
    "computed_share_of_peak": ("computed", "peak", 1),
}
"""Figures: which sum is divided by which other one, and by a number."""


def figures_of(sums: Counter[str]) -> dict[str, float]:
    """Return the figures of batches whose sums were added up; unknown ones are missing."""
    return {
        name: sums[amount] / sums[whole] / scale
        for name, (amount, whole, scale) in _RATIOS.items()
        if amount in sums and sums[whole] > 0 and (name != "data_share" or not sums["workers"])
    }
