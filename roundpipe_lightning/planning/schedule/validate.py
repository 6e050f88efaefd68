"""Checks that a schedule can run: every action once, on its own worker's row, and no deadlock.

An error shows the whole grid with the offending action between `>` and `<`:

```
PlanError: The schedule deadlocks: worker 0 stands at F1.0, waiting for F0.0; none of these can
    come.
worker 0 | >F1.0<  F0.0   X0.0
```
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator

from roundpipe_lightning.errors import PlanError
from roundpipe_lightning.planning.schedule.dependencies import dependencies
from roundpipe_lightning.planning.schedule.schedule import Action, ActionKey, Schedule
from roundpipe_lightning.planning.schedule.stages import Partition


def format_grid(schedule: Schedule, *, marked: Collection[Action] = ()) -> str:
    """Draw the schedule, one row per worker in the order of its actions.

    Args:
        schedule: What to draw.
        marked: Actions to put between `>` and `<`.
    """
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


def walk(schedule: Schedule, partition: Partition) -> Iterator[Action]:
    """Yield the actions in an order in which they can run, every worker's in its own order.

    Raises:
        PlanError: If some of them can never run, showing where every worker stands.
    """
    done: set[ActionKey] = set()
    waiters: dict[ActionKey, list[int]] = {}
    position = [0] * schedule.num_workers
    ready = deque(range(schedule.num_workers))
    while ready:
        worker = ready.popleft()
        actions = schedule.workers[worker]
        while position[worker] < len(actions):
            action = actions[position[worker]]
            key = action.key
            missing = next((d.key for d in dependencies(key, partition) if d.key not in done), None)
            if missing is not None:
                waiters.setdefault(missing, []).append(worker)
                break
            position[worker] += 1
            done.add(key)
            ready.extend(waiters.pop(key, ()))
            yield action
    if waiters:
        raise PlanError(_describe_deadlock(schedule, partition, position, done))


def validate_schedule(schedule: Schedule, *, partition: Partition, num_microbatches: int) -> None:
    """Check that the schedule runs every stage once for every microbatch and cannot deadlock.

    Args:
        schedule: What to check.
        partition: The stages.
        num_microbatches: How many microbatches the schedule must serve.

    Raises:
        PlanError: With the reason, the offending action and the grid.
    """
    for worker, actions in enumerate(schedule.workers):
        for action in actions:
            if action.worker != worker:
                raise _error(f"{action} stands in the row of worker {worker}.", schedule, action)
    expected = expected_keys(partition, num_microbatches)
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
    for _ in walk(schedule, partition):
        pass


def expected_keys(partition: Partition, num_microbatches: int) -> frozenset[ActionKey]:
    """Return every action that a step must run, once each."""
    return frozenset(
        ActionKey(stage.kind, stage.index, microbatch)
        for stage in partition.stages()
        for microbatch in range(num_microbatches)
    )


def _error(reason: str, schedule: Schedule, *marked: Action) -> PlanError:
    return PlanError(f"{reason}\n{format_grid(schedule, marked=marked)}")


def _describe_deadlock(
    schedule: Schedule, partition: Partition, position: list[int], done: set[ActionKey]
) -> str:
    """Say what the stuck workers wait for, and mark where they stand."""
    stuck = [row[at] for row, at in zip(schedule.workers, position, strict=True) if at < len(row)]
    reasons = []
    for action in stuck:
        waits = [str(d.key) for d in dependencies(action.key, partition) if d.key not in done]
        reasons.append(
            f"worker {action.worker} stands at {action.key}, waiting for {' and '.join(waits)}"
        )
    return (
        f"The schedule deadlocks: {'; '.join(reasons)}; none of these can come.\n"
        f"{format_grid(schedule, marked=stuck)}"
    )
