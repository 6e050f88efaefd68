"""A schedule is data: the actions of every worker, what each waits for, when it runs.

```
worker 0: F0.0 F0.1 X0.0 X0.1
worker 1: F1.0 F1.1 B1.0 B1.1
```

The validator, the simulator, the renderer and the engine all ask `dependencies()`, so that what is
simulated is what runs. For one microbatch m of a plain step:

```
F0 ──> F1 ──> .. ──> F(a-1) ══║══> B0 ══> B1 ══> ..      ══ gradient, ── start
 │      └────────────────────────> B0's recompute          (the boundary it starts from)
 └───────────────────────────────────────> B1's recompute
```

║ is the barrier: the driver's own backward pass gives B0 its gradient, and it begins when F(a-1) of
all microbatches of the batch have ended. Where F(a-1) keeps its graphs, B0 goes back on them on the
same worker, and recomputes nothing. In a fused step X0 takes the place of both:

```
F0 ──> F1 ──> .. ──> F(a-1) ──> X0 ══> B1 ══> B2 ══> ..
```

Where microbatches are pieces of one batch (`Partition.joined`), its tail segment runs in X0 of the
first of them: that waits for F(a-1) of all, and X0 of the others, which is empty, for it.

An error of `validate_schedule` shows the whole grid with the offending action between `>` and `<`:

```
PlanError: The schedule deadlocks: worker 0 stands at F1.0, waiting for F0.0; none of these can
    come.
worker 0 | >F1.0<  F0.0   X0.0
```
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from roundpipe_lightning.errors import PlanError
from roundpipe_lightning.planning.schedule.stages import Partition, StageKind

_ACTION = re.compile(r"(?P<kind>[FXB])(?P<stage>\d+)\.(?P<microbatch>\d+)(?:@(?P<worker>\d+))?")
_ROW = re.compile(r"worker (?P<worker>\d+):(?P<actions>.*)")


class ActionKey(NamedTuple):
    """Identity of an action, whichever worker runs it; unique in a schedule."""

    kind: StageKind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.stage}.{self.microbatch}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """One stage, by its `Stage.index`, for one microbatch on one worker."""

    kind: StageKind
    stage: int
    microbatch: int
    worker: int

    @property
    def key(self) -> ActionKey:
        return ActionKey(self.kind, self.stage, self.microbatch)

    def __str__(self) -> str:
        return f"{self.kind.value}{self.stage}.{self.microbatch}@{self.worker}"

    @classmethod
    def parse(cls, text: str, *, worker: int = 0) -> Action:
        """Read e.g. `F2.5@1` back; `worker` is that of a text that names none."""
        match = _ACTION.fullmatch(text.strip())
        if match is None:
            raise PlanError(f"{text!r} is not an action; write for example 'F2.5@1'.")
        return cls(
            kind=StageKind(match["kind"]),
            stage=int(match["stage"]),
            microbatch=int(match["microbatch"]),
            worker=int(match["worker"] or worker),
        )


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Every worker's actions in the order in which it runs them.

    A schedule is not checked where it is made, so that `validate_schedule` can show a wrong one as
    a whole; a `Plan` holds only checked schedules.
    """

    workers: tuple[tuple[Action, ...], ...]

    @property
    def num_workers(self) -> int:
        return len(self.workers)

    def __iter__(self) -> Iterator[Action]:
        for actions in self.workers:
            yield from actions

    def worker_of(self, key: ActionKey) -> int:
        return self._worker_of[key]

    @cached_property
    def _worker_of(self) -> dict[ActionKey, int]:
        return {action.key: action.worker for action in self}

    def to_text(self) -> str:
        rows = []
        for worker, actions in enumerate(self.workers):
            words = [str(a.key) if a.worker == worker else str(a) for a in actions]
            rows.append(f"worker {worker}: {' '.join(words)}".rstrip())
        return "\n".join(rows) + "\n"

    @classmethod
    def from_text(cls, text: str) -> Schedule:
        """Read the text form back; PlanError: workers are missing, or a line is none of theirs."""
        rows: list[tuple[Action, ...]] = []
        for line in filter(None, (line.strip() for line in text.splitlines())):
            match = _ROW.fullmatch(line)
            if match is None or int(match["worker"]) != len(rows):
                raise PlanError(
                    f"Expected a line 'worker {len(rows)}: F0.0 ...', got {line[:80]!r}."
                )
            words = match["actions"].split()
            rows.append(tuple(Action.parse(word, worker=len(rows)) for word in words))
        return cls(workers=tuple(rows))

    def __str__(self) -> str:
        return self.to_text()


def dependencies(
    key: ActionKey, partition: Partition, *, round_size: int = 0
) -> tuple[ActionKey, ...]:
    """Return the actions that an action waits for; PlanError if the partition has no such stage.

    Args:
        round_size: Microbatches of a batch, which a plain partition needs for its barrier.
    """
    round_size = partition.joined or round_size
    assert round_size or not partition.plain, "the barrier of a plain partition is of a round"
    first = key.microbatch - key.microbatch % max(round_size, 1)
    if partition.joined and key.kind is StageKind.FUSED and key.microbatch != first:
        return (key._replace(microbatch=first),)
    return tuple(
        ActionKey(kind, stage, microbatch)
        for kind, stage, is_barrier in stage_dependencies(key.kind, key.stage, partition)
        for microbatch in (range(first, first + round_size) if is_barrier else (key.microbatch,))
    )


class StageDependency(NamedTuple):
    """A stage that another one waits for; at a barrier for all microbatches of the batch."""

    kind: StageKind
    stage: int
    is_barrier: bool = False


def stage_dependencies(
    kind: StageKind, index: int, partition: Partition
) -> tuple[StageDependency, ...]:
    """Return a stage's dependencies: the rule behind `dependencies()`, without microbatches.

    Nothing of an action may begin before, but for the last one of a BACKWARD stage, which gives the
    gradient: the recompute may begin before that.
    """
    stage = partition.stage(kind, index)
    last = partition.num_forward - 1
    if kind is StageKind.FORWARD:
        return (StageDependency(kind, index - 1),) if index > 0 else ()
    if kind is StageKind.FUSED:
        is_barrier = partition.joined > 0
        return (StageDependency(StageKind.FORWARD, last, is_barrier),) if last >= 0 else ()
    source = partition.producer(stage.blocks.start)
    if index == 0:
        giver = StageDependency(StageKind.FORWARD, last, is_barrier=True)
        if stage.keeps_graph:
            return (giver,)
    else:
        before = partition.stages()[last + index]
        giver = StageDependency(before.kind, before.index)
    return (StageDependency(source.kind, source.index), giver)


def format_grid(schedule: Schedule, *, marked: Collection[Action] = ()) -> str:
    """Draw the schedule, one row per worker in the order of its actions, some marked `>so<`."""
    cells = [
        [_cell(action, worker, marked) for action in actions]
        for worker, actions in enumerate(schedule.workers)
    ]
    width = max((len(cell) for row in cells for cell in row), default=0)
    label = len(str(max(schedule.num_workers - 1, 0)))
    return "\n".join(
        f"worker {worker:>{label}} | " + " ".join(cell.ljust(width) for cell in row).rstrip()
        for worker, row in enumerate(cells)
    )


def _cell(action: Action, worker: int, marked: Collection[Action]) -> str:
    text = str(action.key) if action.worker == worker else str(action)
    return f">{text}<" if action in marked else f" {text} "


def validate_schedule(
    schedule: Schedule, *, partition: Partition, num_microbatches: int, round_size: int = 0
) -> None:
    """Raise a PlanError, with the grid, unless all stages run once per microbatch and can."""

    def needs(action: Action) -> tuple[ActionKey, ...]:
        return dependencies(action.key, partition, round_size=round_size)

    for worker, actions in enumerate(schedule.workers):
        for action in actions:
            if action.worker != worker:
                raise _error(f"{action} stands in the row of worker {worker}.", schedule, action)
    expected = frozenset(
        ActionKey(stage.kind, stage.index, microbatch)
        for stage in partition.stages()
        for microbatch in range(num_microbatches)
    )
    seen: set[ActionKey] = set()
    for action in schedule:
        if action.key not in expected:
            reason = f"{action} is no action of '{partition}' with {num_microbatches} microbatches."
            raise _error(reason, schedule, action)
        if action.key in seen:
            raise _error(f"{action.key} is run twice.", schedule, action)
        seen.add(action.key)
    missing = sorted(map(str, expected - seen))
    if missing:
        raise _error(f"{len(missing)} action(s) are missing: {', '.join(missing[:8])}.", schedule)
    _run_through(schedule, needs)


def _run_through(schedule: Schedule, needs: Callable[[Action], Sequence[ActionKey]]) -> None:
    """Run all actions as soon as those that they need have run; PlanError: some never can."""
    done: set[ActionKey] = set()
    waiters: dict[ActionKey, list[int]] = {}
    position = [0] * schedule.num_workers
    ready = deque(range(schedule.num_workers))
    while ready:
        worker = ready.popleft()
        for action in schedule.workers[worker][position[worker] :]:
            late = next((each for each in needs(action) if each not in done), None)
            if late is not None:
                waiters.setdefault(late, []).append(worker)
                break
            position[worker] += 1
            done.add(action.key)
            ready.extend(waiters.pop(action.key, ()))
    if waiters:
        rows = zip(schedule.workers, position, strict=True)
        stuck = {row[at]: needs(row[at]) for row, at in rows if at < len(row)}
        raise PlanError(_describe_deadlock(schedule, stuck, done))


def _error(reason: str, schedule: Schedule, *marked: Action) -> PlanError:
    return PlanError(f"{reason}\n{format_grid(schedule, marked=marked)}")


def _describe_deadlock(
    schedule: Schedule, stuck: Mapping[Action, Sequence[ActionKey]], done: Collection[ActionKey]
) -> str:
    """Name what the stuck workers wait for, and mark where they stand."""
    reasons = []
    for action, needs in stuck.items():
        waits = [str(key) for key in needs if key not in done]
        reasons.append(
            f"worker {action.worker} stands at {action.key}, waiting for {' and '.join(waits)}"
        )
    return (
        f"The schedule deadlocks: {'; '.join(reasons)}; none of these can come.\n"
        f"{format_grid(schedule, marked=stuck)}"
    )


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
    """Times of every action of a step, in any order, and its worker; idle ones count, too."""

    num_workers: int
    entries: tuple[TimelineEntry, ...]

    @property
    def start_seconds(self) -> float:
        return min((entry.start_seconds for entry in self.entries), default=0.0)

    @property
    def end_seconds(self) -> float:
        return max((entry.end_seconds for entry in self.entries), default=0.0)

    @property
    def makespan_seconds(self) -> float:
        return self.end_seconds - self.start_seconds

    @property
    def busy_seconds(self) -> float:
        return sum(entry.busy_seconds for entry in self.entries)

    @property
    def bubble_fraction(self) -> float:
        available = self.num_workers * self.makespan_seconds
        return 1.0 - self.busy_seconds / available if available > 0 else 0.0

    def beside(self, other: Timeline) -> Timeline:
        """Return the same on the workers on which `other`, of the same actions, has run.

        Batches of a stream begin with other workers (`schedule/plan.py`).
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
