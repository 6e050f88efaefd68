"""Progress of the workers of a step in their schedule, as text for messages.

```
[done] >running<  waiting; a column's actions may run at the same time
worker 0 | [F0.0] [F0.1]  X0.0   X0.1
worker 1 |        [F1.0] >F1.1<         B1.0   B1.1
worker 0: 2 of 4 done, may begin X0.0, which its microbatch has not come to
worker 1: 1 of 4 done, runs F1.1 for 612.4 s
```
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from roundpipe_lightning.planning.schedule.plan import Plan
from roundpipe_lightning.planning.schedule.schedule import Action, ActionKey, dependencies, walk

_MOST_COLUMNS = 16
"""Columns of the grid; those around the running actions are shown."""

_COLUMNS_BEFORE = 3
"""Number of finished columns that are shown before them."""


@dataclass(frozen=True, kw_only=True)
class StepProgress:
    """Progress of a step.

    Attributes:
        plan: What is run.
        ended: The actions that have ended.
        running: The actions that have begun and not ended, with the seconds since they began.
    """

    plan: Plan
    ended: Collection[ActionKey]
    running: Mapping[ActionKey, float] = field(default_factory=dict)

    def to_text(self) -> str:
        """Return the grid and, for every worker, what it runs or waits for."""
        lines = ["[done] >running<  waiting; a column's actions may run at the same time"]
        lines += self._grid()
        for worker, actions in enumerate(self.plan.schedule.workers):
            num_done = sum(action.key in self.ended for action in actions)
            doing = self._doing(actions[num_done]) if num_done < len(actions) else "is through"
            lines.append(f"worker {worker}: {num_done} of {len(actions)} done, {doing}")
        return "\n".join(lines)

    def _doing(self, action: Action) -> str:
        """Name what a worker does whose first unfinished action this is."""
        seconds = self.running.get(action.key)
        if seconds is not None:
            return f"runs {action.key} for {seconds:.1f} s"
        missing = [
            self._state(dependency.key)
            for dependency in dependencies(action.key, self.plan.partition)
            if dependency.key not in self.ended
        ]
        if not missing:
            return f"may begin {action.key}, which its microbatch has not come to"
        return f"waits to begin {action.key} for {' and '.join(missing)}"

    def _state(self, key: ActionKey) -> str:
        state = "running" if key in self.running else "not begun"
        return f"{key} (worker {self.plan.schedule.worker_of(key)}, {state})"

    def _grid(self) -> list[str]:
        columns = earliest_columns(self.plan)
        open_columns = [column for key, column in columns.items() if key not in self.ended]
        last = max(columns.values(), default=0)
        first = max(0, min(open_columns, default=last) - _COLUMNS_BEFORE)
        end = min(last + 1, first + _MOST_COLUMNS)
        width = max((len(str(key)) for key in columns), default=0) + 2
        rows = []
        for worker, actions in enumerate(self.plan.schedule.workers):
            cells = {columns[action.key]: self._cell(action.key) for action in actions}
            shown = " ".join(cells.get(column, "").ljust(width) for column in range(first, end))
            before, after = "... " if first else "", " ..." if end <= last else ""
            rows.append(f"worker {worker} | {before}{shown}{after}".rstrip())
        return rows

    def _cell(self, key: ActionKey) -> str:
        if key in self.ended:
            return f"[{key}]"
        return f">{key}<" if key in self.running else f" {key} "


def earliest_columns(plan: Plan) -> dict[ActionKey, int]:
    """Return the earliest begin of each action if every action takes one unit of time."""
    columns: dict[ActionKey, int] = {}
    latest = [-1] * plan.num_workers
    for action in walk(plan.schedule, plan.partition):
        before = [columns[each.key] for each in dependencies(action.key, plan.partition)]
        columns[action.key] = latest[action.worker] = 1 + max([latest[action.worker], *before])
    return columns
