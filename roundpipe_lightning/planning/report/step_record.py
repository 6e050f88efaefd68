"""A training step: where its idle time comes from, and how far it is, as text for messages.

```
worker 0  │F0│F0│.........│B1│    │B1│         │    .  boundary: what it depends on has not ended
worker 1  │ fill   │X0│X0│       drain          │       a gap after that: other
```

Before a worker's first action it fills, after its last one it drains. In a gap between two actions
it waits for a boundary as long as an action that the next one depends on (`dependencies()`) has
not ended, and after that for something else.

Progress of one that runs:

```
[done] >running<  waiting; a row has a worker's actions in order
worker 0 | [F0.0] [F0.1]  X0.0   X0.1
worker 1 | [F1.0] >F1.1<  B1.0   B1.1
worker 0: 2 of 4 done, may begin X0.0, which its microbatch has not come to
worker 1: 1 of 4 done, runs F1.1 for 612.4 s
```
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

from roundpipe_lightning.planning.model.work import Operations
from roundpipe_lightning.planning.schedule.plan import PipelineLayout, Plan
from roundpipe_lightning.planning.schedule.schedule import Action, ActionKey, Timeline


class IdleCause(Enum):
    """Causes for which a worker is idle; docs/monitoring.md defines each."""

    FILL = "fill"  # before its first action of the step
    DRAIN = "drain"  # after its last one
    UPLOAD = "upload"  # weights are on their way, or their update has not ended
    BOUNDARY = "boundary"  # or its gradient: being made, or on its way
    OPTIMIZER = "optimizer"  # while no step runs
    DATA = "data"
    OTHER = "other"  # the host between actions, and Lightning between batches

    __hash__ = object.__hash__  # members are singletons; that of Enum hashes their name each time


def idle_seconds(timeline: Timeline, *, layout: PipelineLayout) -> dict[IdleCause, float]:
    """Return the workers' idle time between the step's first action and its last, by cause.

    The values add up to `num_workers * makespan_seconds - busy_seconds`. Causes that a timeline
    does not show are 0.
    """
    ended = {entry.action.key: entry.end_seconds for entry in timeline.entries}
    total = dict.fromkeys(IdleCause, 0.0)
    begin, end = timeline.start_seconds, timeline.end_seconds
    for row in timeline.rows():
        fill = boundary = other = 0.0  # waits before the first action, for boundaries, and others
        free = None
        for entry in row:
            start = entry.start_seconds
            sources = layout.dependencies(entry.action.key)
            boundary += entry.waiting_seconds
            if free is None:
                fill, free = start - begin, start
            elif start > free:
                ready = free
                for source in sources:
                    ready = max(ready, min(ended.get(source, free), start))
                boundary += ready - free
                other += start - ready
            free = max(free, entry.end_seconds)
        total[IdleCause.FILL] += fill if row else end - begin
        total[IdleCause.DRAIN] += end - max(entry.end_seconds for entry in row) if row else 0.0
        total[IdleCause.BOUNDARY] += boundary
        total[IdleCause.OTHER] += other
    return total


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Time that two overlapping steps both count as theirs: to be taken from the sums of both.

    Attributes:
        step_seconds: For how long the later one ran before the earlier one had ended.
        fill_seconds: Idle time while the pipeline fills, summed over the workers.
        drain_seconds: The same while it drains.
        pause_seconds: From the end of the earlier one to the beginning of the later one, where they
            do not overlap.
    """

    step_seconds: float = 0.0
    fill_seconds: float = 0.0
    drain_seconds: float = 0.0
    pause_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class EngineCounters:
    """Counters of the engine for a step, all workers together.

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
        clock_seconds: Where the timeline's 0 lies on the clock of the step before, which was still
            in flight; None: none was, and the clock is the timeline's own.
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
        return max(0.0, self.timeline.busy_seconds - self._unseen_wait_seconds)

    @property
    def _unseen_wait_seconds(self) -> float:
        """Waits that the engine has counted beyond those in the timeline's actions."""
        counters = self.counters
        waited = counters.upload_wait_seconds + counters.boundary_wait_seconds
        return waited - sum(entry.waiting_seconds for entry in self.timeline.entries)

    def idle_seconds(self) -> dict[IdleCause, float]:
        """As the function of this name, with the waits that the engine has counted."""
        found = idle_seconds(self.timeline, layout=self.plan)
        uploads = self.counters.upload_wait_seconds
        found[IdleCause.UPLOAD] += uploads
        # Waits inside actions stand there as waits for boundaries, whatever was waited for.
        found[IdleCause.BOUNDARY] += self._unseen_wait_seconds - uploads
        return found

    @property
    def end_seconds(self) -> float:
        """Its end on the clock of the step before, or on its own."""
        return (self.clock_seconds or 0.0) + self.timeline.end_seconds

    def overlap(self, before: StepRecord | None) -> Overlap | None:
        """Return the time both this step and the one before count; None if they share no clock.

        Each worker begins this one after its last action of the one before:

        ```
        before  ..│B1│ drain      │                    drain ends where a worker goes on
        after             │ fill  │F0│..               fill begins when the earlier step has ended
                          └ both ─┘ or where F0 begins
        ```
        """
        if before is None or self.clock_seconds is None:
            return None
        shift = self.clock_seconds - (before.clock_seconds or 0.0)
        begin, end = self.timeline.start_seconds + shift, before.timeline.end_seconds
        if begin >= end:
            return Overlap(pause_seconds=begin - end)
        fill = drain = 0.0
        for earlier, later in zip(before.timeline.rows(), self.timeline.rows(), strict=True):
            first = later[0].start_seconds + shift if later else end
            fill += max(0.0, min(end, first) - begin)
            if earlier:
                drain += max(0.0, end - first)
            else:  # all of the earlier step counts as filling
                fill += max(0.0, end - first)
        return Overlap(step_seconds=end - begin, fill_seconds=fill, drain_seconds=drain)


_SHOWN = 16  # actions of a worker that are shown, from the last finished ones on
_SHOWN_BEFORE = 3  # number of finished ones among them


@dataclass(frozen=True, kw_only=True)
class WorkerState:
    """What a worker does at a moment, in words, and what waits in its queues."""

    doing: str
    num_ended: int  # actions of the step
    num_actions: int
    num_uploads: int = 0
    num_downloads: int = 0
    bytes: int = 0  # the most in use so far


@dataclass(frozen=True, kw_only=True)
class StepProgress:
    """Progress of a step; `running` has the seconds since unfinished actions began."""

    plan: Plan
    ended: Collection[ActionKey]
    running: Mapping[ActionKey, float] = field(default_factory=dict)

    def to_text(self) -> str:
        """Return the grid and, for every worker, what it runs or waits for."""
        lines = ["[done] >running<  waiting; a row has a worker's actions in order"]
        lines += self._grid()
        for worker, state in enumerate(self.workers()):
            done = f"{state.num_ended} of {state.num_actions} done"
            lines.append(f"worker {worker}: {done}, {state.doing}")
        return "\n".join(lines)

    def workers(self) -> Iterator[WorkerState]:
        """Yield what every worker runs or waits for."""
        for actions in self.plan.schedule.workers:
            num_done = sum(action.key in self.ended for action in actions)
            doing = self._doing(actions[num_done]) if num_done < len(actions) else "is through"
            yield WorkerState(doing=doing, num_ended=num_done, num_actions=len(actions))

    def _doing(self, action: Action) -> str:
        seconds = self.running.get(action.key)
        if seconds is not None:
            return f"runs {action.key} for {seconds:.1f} s"
        missing = [
            self._state(key) for key in self.plan.dependencies(action.key) if key not in self.ended
        ]
        if not missing:
            return f"may begin {action.key}, which its microbatch has not come to"
        return f"waits to begin {action.key} for {' and '.join(missing)}"

    def _state(self, key: ActionKey) -> str:
        state = "running" if key in self.running else "not begun"
        return f"{key} (worker {self.plan.schedule.worker_of(key)}, {state})"

    def _grid(self) -> Iterator[str]:
        width = max((len(str(action.key)) for action in self.plan.schedule), default=0) + 2
        for worker, actions in enumerate(self.plan.schedule.workers):
            num_done = sum(action.key in self.ended for action in actions)
            first = max(0, min(num_done, len(actions) - 1) - _SHOWN_BEFORE)
            some = actions[first : first + _SHOWN]
            shown = " ".join(self._cell(action.key).ljust(width) for action in some)
            before, after = "... " if first else "", " ..." if first + _SHOWN < len(actions) else ""
            yield f"worker {worker} | {before}{shown}{after}".rstrip()

    def _cell(self, key: ActionKey) -> str:
        if key in self.ended:
            return f"[{key}]"
        return f">{key}<" if key in self.running else f" {key} "
