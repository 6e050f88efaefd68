"""Turns: the schedule as gates that host threads pass.

Every action of a step has a gate. It opens when the action before it on the same worker and
everything in `dependencies()` have ended; whoever waits in `begin` then owns the worker until
`end`:

```
thread of microbatch 0     begin(F0.0) ... end        begin(F1.0) ... end
thread of microbatch 1         begin(F0.1) waits ────────┘  (worker 0 is free) ... end
```

One gate, one waiter: nobody is woken in vain. A gate is a lock that is held until it opens.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from roundpipe_lightning.planning.dependencies import dependencies
from roundpipe_lightning.planning.plan import Plan
from roundpipe_lightning.planning.schedule import Action, ActionKey


class StepAborted(BaseException):
    """Unwinds the threads of a step that failed elsewhere. It never leaves the engine.

    Not an `Exception`, so that user code with `except Exception` cannot swallow it.
    """


@dataclass(frozen=True, kw_only=True)
class TurnGraph:
    """The gates of a plan, made once and used for every step.

    Attributes:
        actions: Every action by its key.
        num_waits: How many ends each action waits for.
        opens: Which actions wait for the end of each.
        paths: Every microbatch's actions in the order in which it passes them.
        ends_run: Actions after which the worker goes on with another stage, or is done.
    """

    actions: dict[ActionKey, Action]
    num_waits: dict[ActionKey, int]
    opens: dict[ActionKey, tuple[ActionKey, ...]]
    paths: tuple[tuple[Action, ...], ...]
    ends_run: frozenset[ActionKey]

    @classmethod
    def of(cls, plan: Plan) -> TurnGraph:
        """Build the graph of a plan's schedule."""
        waits: dict[ActionKey, set[ActionKey]] = {}
        ends_run: set[ActionKey] = set()
        for actions in plan.schedule.workers:
            for position, action in enumerate(actions):
                needed = {d.key for d in dependencies(action.key, plan.partition)}
                if position:
                    needed.add(actions[position - 1].key)
                waits[action.key] = needed
                following = actions[position + 1 : position + 2]
                if not any((a.kind, a.stage) == (action.kind, action.stage) for a in following):
                    ends_run.add(action.key)
        opens: dict[ActionKey, list[ActionKey]] = {key: [] for key in waits}
        for key, needed in waits.items():
            for source in needed:
                opens[source].append(key)
        actions_by_key = {action.key: action for action in plan.schedule}
        stages = plan.partition.stages()
        return cls(
            actions=actions_by_key,
            num_waits={key: len(needed) for key, needed in waits.items()},
            opens={key: tuple(keys) for key, keys in opens.items()},
            paths=tuple(
                tuple(actions_by_key[ActionKey(s.kind, s.index, microbatch)] for s in stages)
                for microbatch in range(plan.num_microbatches)
            ),
            ends_run=frozenset(ends_run),
        )


class Turns:
    """The gates of one step.

    Args:
        graph: The plan's.
    """

    def __init__(self, graph: TurnGraph) -> None:
        self._graph = graph
        self._left = dict(graph.num_waits)
        self._gates = {key: threading.Lock() for key in graph.actions}
        for key, gate in self._gates.items():
            if self._left[key]:
                gate.acquire()
        self._mutex = threading.Lock()
        self._aborted = False
        self._begun: set[ActionKey] = set()
        self._ended: set[ActionKey] = set()

    def begin(self, action: Action) -> None:
        """Wait until it is the action's turn.

        Raises:
            StepAborted: If the step has failed elsewhere.
        """
        self._gates[action.key].acquire()
        if self._aborted:
            raise StepAborted
        with self._mutex:
            self._begun.add(action.key)

    def end(self, action: Action) -> None:
        """Give the worker to its next action and let the dependents know."""
        with self._mutex:
            self._ended.add(action.key)
            if self._aborted:
                return
            for key in self._graph.opens[action.key]:
                self._left[key] -= 1
                if not self._left[key]:
                    self._gates[key].release()

    def abort(self) -> None:
        """Release every waiter; each raises `StepAborted`."""
        with self._mutex:
            if self._aborted:
                return
            self._aborted = True
            for key, left in self._left.items():
                if left:
                    self._gates[key].release()

    @property
    def num_events(self) -> int:
        """Counts begins and ends: it grows as long as the step makes progress."""
        return len(self._begun) + len(self._ended)

    def running(self) -> tuple[Action, ...]:
        """Actions that have begun and not ended."""
        with self._mutex:
            return tuple(self._graph.actions[key] for key in self._begun - self._ended)

    def report(self, plan: Plan) -> str:
        """Return what is left of the schedule, a line per worker, running actions in > <."""
        rows = []
        with self._mutex:
            for worker, actions in enumerate(plan.schedule.workers):
                done = sum(action.key in self._ended for action in actions)
                words = [
                    f">{action.key}<" if action.key in self._begun else str(action.key)
                    for action in actions[done:]
                ]
                rows.append(
                    f"worker {worker}: {done} of {len(actions)} done, then "
                    f"{' '.join(words) or 'none'}"
                )
        return "\n".join(rows)
