"""A timeline: when every action ran, predicted by the simulator or measured by the engine."""

from __future__ import annotations

from dataclasses import dataclass, replace

from roundpipe_lightning.errors import PlanError
from roundpipe_lightning.planning.schedule.schedule import Action


@dataclass(frozen=True, kw_only=True, slots=True)
class TimelineEntry:
    """One action's place in time.

    Attributes:
        start_seconds: When it began, from the beginning of the step.
        waiting_seconds: Part of the time between, in which the worker stood idle inside the action:
            a BACKWARD action that has recomputed and waits for its gradient.
    """

    action: Action
    start_seconds: float
    end_seconds: float
    waiting_seconds: float = 0.0

    @property
    def busy_seconds(self) -> float:
        return self.end_seconds - self.start_seconds - self.waiting_seconds


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Times of every action of a step, and its worker.

    Attributes:
        num_workers: Number of workers, idle ones included.
        entries: The actions, in any order.

    Raises:
        PlanError: If an entry ends before it begins or names a worker that does not exist.
    """

    num_workers: int
    entries: tuple[TimelineEntry, ...]

    def __post_init__(self) -> None:
        for entry in self.entries:
            if not entry.start_seconds <= entry.end_seconds:
                raise PlanError(
                    f"{entry.action} begins at {entry.start_seconds} s and ends at "
                    f"{entry.end_seconds} s."
                )
            if not 0 <= entry.action.worker < self.num_workers:
                raise PlanError(f"{entry.action} ran on one of {self.num_workers} workers?")

    @property
    def start_seconds(self) -> float:
        return min((entry.start_seconds for entry in self.entries), default=0.0)

    @property
    def makespan_seconds(self) -> float:
        return max((entry.end_seconds for entry in self.entries), default=0.0) - self.start_seconds

    @property
    def busy_seconds(self) -> float:
        return sum(entry.busy_seconds for entry in self.entries)

    @property
    def bubble_fraction(self) -> float:
        available = self.num_workers * self.makespan_seconds
        return 1.0 - self.busy_seconds / available if available > 0 else 0.0

    def beside(self, other: Timeline) -> Timeline:
        """Return the same on the workers on which `other`, of the same actions, has run.

        Batches of a stream begin with other workers (`schedule/round_robin.py`).
        """
        if not self.entries:
            return self
        first = min(self.entries, key=lambda entry: entry.start_seconds).action
        there = {entry.action.key: entry.action.worker for entry in other.entries}
        further = there.get(first.key, first.worker) - first.worker
        entries = []
        for entry in self.entries:
            worker = (entry.action.worker + further) % self.num_workers
            entries.append(replace(entry, action=replace(entry.action, worker=worker)))
        return replace(self, entries=tuple(entries))

    def rows(self) -> tuple[tuple[TimelineEntry, ...], ...]:
        rows: list[list[TimelineEntry]] = [[] for _ in range(self.num_workers)]
        for entry in self.entries:
            rows[entry.action.worker].append(entry)
        return tuple(tuple(sorted(row, key=lambda entry: entry.start_seconds)) for row in rows)
