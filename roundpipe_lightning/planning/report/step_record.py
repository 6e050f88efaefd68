"""What is known of a training step that has run, for whoever watches the pipeline."""

from __future__ import annotations

from dataclasses import dataclass, field

from roundpipe_lightning.planning.model.operations import Operations
from roundpipe_lightning.planning.report.idle import IdleCause, Overlap, idle_seconds, overlap
from roundpipe_lightning.planning.schedule.plan import Plan
from roundpipe_lightning.planning.schedule.timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class EngineCounters:
    """What the engine has counted in a step, all workers together.

    Attributes:
        uploaded_bytes: Bytes copied to devices: weights, boundaries and whatever else.
        downloaded_bytes: Bytes copied from devices: gradients, boundaries and whatever else.
        upload_wait_seconds: How long the computing of all workers stood still inside actions until
            weights had arrived.
        boundary_wait_seconds: The same for boundaries and their gradients.
    """

    uploaded_bytes: int = 0
    downloaded_bytes: int = 0
    upload_wait_seconds: float = 0.0
    boundary_wait_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """A training step that has run.

    Attributes:
        plan: Its plan.
        timeline: When every action ran.
        counters: What the engine has counted.
        clock_seconds: Where the timeline's 0 lies on the clock of the step before, which was still
            under way; None: none was, and the clock is the timeline's own.
        operations: Operations of the whole step; None where the step's code could not be measured.
        operations_per_token: An estimate from the parameters, for each token (or sample, where a
            sample is one row), without attention; None where the step's code was measured.
        peak_operations_per_second: Matrix products of all devices together at the rate that is
            known for their dtype; None where that is assumed.
    """

    plan: Plan
    timeline: Timeline
    counters: EngineCounters = field(default_factory=EngineCounters)
    clock_seconds: float | None = None
    operations: Operations | None
    operations_per_token: Operations | None
    peak_operations_per_second: float | None

    @property
    def busy_seconds(self) -> float:
        """Time in which workers computed, summed over the workers."""
        return max(0.0, self.timeline.busy_seconds - self._unseen_wait_seconds)

    @property
    def _unseen_wait_seconds(self) -> float:
        """What the engine has counted of waits beyond those that the timeline's actions have."""
        counters = self.counters
        waited = counters.upload_wait_seconds + counters.boundary_wait_seconds
        return waited - sum(entry.waiting_seconds for entry in self.timeline.entries)

    def idle_seconds(self) -> dict[IdleCause, float]:
        """Return the workers' idle time between the step's first action and its last, by cause."""
        found = idle_seconds(self.timeline, partition=self.plan.partition)
        uploads = self.counters.upload_wait_seconds
        found[IdleCause.UPLOAD] += uploads
        # Waits inside actions stand there as waits for boundaries, whatever was waited for.
        found[IdleCause.BOUNDARY] += self._unseen_wait_seconds - uploads
        return found

    def overlap(self, before: StepRecord | None) -> Overlap | None:
        """Return what this step and the one before both count; None if they share no clock."""
        if before is None or self.clock_seconds is None:
            return None
        shift = self.clock_seconds - (before.clock_seconds or 0.0)
        return overlap(before.timeline, self.timeline, shift_seconds=shift)
