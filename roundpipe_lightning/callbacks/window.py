"""The batches between two lines of the monitor, added up."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from roundpipe_lightning.models.batches import BatchCounts
from roundpipe_lightning.planning.model.work import Operations
from roundpipe_lightning.planning.report.step_record import IdleCause, Overlap, StepRecord


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
        """The workers' idle time in the whole of `wall_seconds`, by cause.

        Args:
            overlap: With the step before, which was still in flight.
        """
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


_MOST_WAITING = 32


@dataclass(kw_only=True)
class Window:
    """Sums over batches. Seconds of workers are those of all workers together.

    Batches are added up when somebody asks for figures, many at a time: code that runs once between
    two steps, whose data has taken all caches, takes several times as long as in a loop.
    """

    wall_seconds: float = 0.0
    data_seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    worker_seconds: float = 0.0
    busy_seconds: float = 0.0
    idle: dict[IdleCause, float] = field(default_factory=lambda: defaultdict(float))
    step_worker_seconds: float = 0.0
    pipeline_seconds: float = 0.0
    uploaded_bytes: int = 0
    downloaded_bytes: int = 0
    known_seconds: float = 0.0
    model_operations: float = 0.0
    computed_operations: float = 0.0
    peak_operations: float = 0.0
    num_batches: int = 0
    waiting: list[MeasuredBatch] = field(default_factory=list)

    def add(self, batch: MeasuredBatch) -> None:
        self.waiting.append(batch)
        if len(self.waiting) == _MOST_WAITING:
            self._add_waiting()

    @property
    def is_empty(self) -> bool:
        return not (self.num_batches or self.waiting)

    def _add_waiting(self) -> None:
        for batch in self.waiting:
            self._add(batch)
        self.waiting.clear()

    def _add(self, batch: MeasuredBatch) -> None:
        self.num_batches += 1
        self.wall_seconds += batch.wall_seconds
        self.data_seconds += batch.data_seconds
        for name, count in vars(batch.counts).items():
            if count is not None:
                self.counts[name] += count
        if batch.record is not None:
            self._add_pipeline(batch, batch.record)

    def _add_pipeline(self, batch: MeasuredBatch, record: StepRecord) -> None:
        timeline = record.timeline
        self.pipeline_seconds += batch.wall_seconds
        self.worker_seconds += timeline.num_workers * batch.wall_seconds
        self.busy_seconds += record.busy_seconds
        overlap = record.overlap(batch.before)
        for cause, seconds in batch.idle_seconds(overlap).items():
            self.idle[cause] += seconds
        step_seconds = timeline.makespan_seconds - (overlap.step_seconds if overlap else 0.0)
        self.step_worker_seconds += timeline.num_workers * step_seconds
        self.uploaded_bytes += record.counters.uploaded_bytes
        self.downloaded_bytes += record.counters.downloaded_bytes
        operations = batch.operations
        if operations is not None:
            self.known_seconds += batch.wall_seconds
            self.model_operations += operations.model
            self.computed_operations += operations.all
            if record.peak_operations_per_second is not None:
                self.peak_operations += batch.wall_seconds * record.peak_operations_per_second

    def merge(self, later: Window) -> None:
        later._add_waiting()
        for name, value in vars(later).items():
            if not isinstance(value, (dict, list)):
                setattr(self, name, getattr(self, name) + value)
        self.counts.update(later.counts)
        for cause, seconds in later.idle.items():
            self.idle[cause] += seconds

    def figures(self) -> dict[str, float]:
        """The rates and shares, by name; those that are not known are missing."""
        self._add_waiting()
        if self.wall_seconds <= 0:
            return {}
        wall = self.wall_seconds
        found = {f"{name}_per_second": count / wall for name, count in self.counts.items()}
        found["batch_seconds"] = wall / self.num_batches
        if self.worker_seconds > 0:
            found.update(self._pipeline_figures())
        else:
            found["data_share"] = self.data_seconds / wall
        if self.known_seconds > 0:
            found["tflop_per_second"] = self.model_operations / self.known_seconds / 1e12
            found["computed_tflop_per_second"] = (
                self.computed_operations / self.known_seconds / 1e12
            )
        if self.peak_operations > 0:
            found["share_of_peak"] = self.model_operations / self.peak_operations
            found["computed_share_of_peak"] = self.computed_operations / self.peak_operations
        return found

    def _pipeline_figures(self) -> dict[str, float]:
        idle = 1.0 - self.busy_seconds / self.worker_seconds
        found = {"idle_share": idle}
        for cause in IdleCause:
            found[f"idle_{cause.value}_share"] = self.idle[cause] / self.worker_seconds
        if self.step_worker_seconds > 0:
            found["step_idle_share"] = 1.0 - self.busy_seconds / self.step_worker_seconds
        found["upload_gb_per_second"] = self.uploaded_bytes / self.pipeline_seconds / 1e9
        found["download_gb_per_second"] = self.downloaded_bytes / self.pipeline_seconds / 1e9
        return found
