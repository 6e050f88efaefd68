"""Progress of the workers of a step in their schedule, as text for messages.

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

from roundpipe_lightning.planning.schedule.plan import Plan
from roundpipe_lightning.planning.schedule.schedule import Action, ActionKey, dependencies

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
    """Progress of a step.

    Attributes:
        running: The actions that have begun and not ended, with the seconds since they began.
    """

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
