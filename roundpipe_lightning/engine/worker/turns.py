"""Turns: the schedule as gates that host threads pass.

Step M2 of docs/design.md.

Every action of a step has a gate. It opens when the action before it on the same worker and
everything in `dependencies()` have ended; whoever waits in `begin` then owns the worker until
`end`:

```
thread of microbatch 0     begin(F0.0) ... end        begin(F1.0) ... end
thread of microbatch 1         begin(F0.1) waits ────────┘  (worker 0 is free) ... end
```

One gate, one waiter: nobody is woken in vain. A gate is a lock that is held until it opens.

A step may begin while the one before it still runs: each worker's first action then waits for the
end of its last action there, too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any

from roundpipe_lightning.engine.device.events import StepAborted
from roundpipe_lightning.planning.report.step_record import StepProgress
from roundpipe_lightning.planning.schedule.plan import Plan
from roundpipe_lightning.planning.schedule.schedule import Action, ActionKey, dependencies


@dataclass(frozen=True, kw_only=True)
class TurnGraph:
    """The gates of a plan, made once and used for every step."""

    plan: Plan
    actions: dict[ActionKey, Action]  # every action by its key
    num_waits: dict[ActionKey, int]  # how many ends each action waits for
    opens: dict[ActionKey, tuple[ActionKey, ...]]  # which actions wait for the end of each
    # every microbatch's actions in the order in which it passes them
    paths: tuple[tuple[Action, ...], ...]
    # actions after which the worker goes on with another stage, or is done
    ends_run: frozenset[ActionKey]
    first: dict[int, ActionKey]  # every worker's first action, by its number
    last: dict[int, ActionKey]  # every worker's last action

    @classmethod
    def from_plan(cls, plan: Plan) -> TurnGraph:
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
        paths = tuple(
            tuple(actions_by_key[ActionKey(s.kind, s.index, microbatch)] for s in stages)
            for microbatch in range(plan.num_microbatches)
        )
        busy = [actions for actions in plan.schedule.workers if actions]
        return cls(
            plan=plan,
            actions=actions_by_key,
            num_waits={key: len(needed) for key, needed in waits.items()},
            opens={key: tuple(keys) for key, keys in opens.items()},
            paths=paths,
            ends_run=frozenset(ends_run),
            first={actions[0].worker: actions[0].key for actions in busy},
            last={actions[0].worker: actions[-1].key for actions in busy},
        )


class Turns:
    """The gates of one step.

    Args:
        before: Those of the step before, if it may still run.

    Attributes:
        marks: When each action began and ended, in the time of its worker's device.
    """

    def __init__(self, graph: TurnGraph, *, before: Turns | None = None) -> None:
        self.graph = graph
        self.marks: dict[Action, tuple[Any, Any]] = {}
        self._left = dict(graph.num_waits)
        earlier = {} if before is None else before.last
        waits = [(earlier[worker], key) for worker, key in graph.first.items() if worker in earlier]
        for _, key in waits:
            self._left[key] += 1
        self._gates = {key: threading.Lock() for key in graph.actions}
        for key, gate in self._gates.items():
            if self._left[key]:
                gate.acquire()
        self._mutex = threading.Lock()
        self.is_aborted = False
        self._begun: dict[ActionKey, float] = {}  # by `monotonic`
        self._ended: set[ActionKey] = set()
        self._callbacks: dict[ActionKey, list[Callable[[], None]]] = {}
        for (turns, last), key in waits:
            turns.call_at_end(last, partial(self._worker_is_free, key))
        self._idle = {w: last for w, last in earlier.items() if w not in graph.last}

    @property
    def last(self) -> dict[int, tuple[Turns, ActionKey]]:
        return self._idle | {worker: (self, key) for worker, key in self.graph.last.items()}

    def _worker_is_free(self, key: ActionKey) -> None:
        with self._mutex:
            self._left[key] -= 1
            if not self._left[key] and not self.is_aborted:
                self._gates[key].release()

    def call_at_end(self, key: ActionKey, callback: Callable[[], None]) -> None:
        with self._mutex:
            if key not in self._ended:
                self._callbacks.setdefault(key, []).append(callback)
                return
        callback()

    def begin(self, action: Action) -> None:
        """Wait until it is the action's turn; StepAborted if the step has failed elsewhere."""
        self._gates[action.key].acquire()
        if self.is_aborted:
            raise StepAborted
        with self._mutex:
            self._begun[action.key] = monotonic()

    def end(self, action: Action) -> None:
        """Give the worker to its next action, and open the gates of the dependents."""
        with self._mutex:
            self._ended.add(action.key)
            if self.is_aborted:
                return
            for key in self.graph.opens[action.key]:
                self._left[key] -= 1
                if not self._left[key]:
                    self._gates[key].release()
            callbacks = self._callbacks.pop(action.key, ())
        for callback in callbacks:
            callback()

    def abort(self) -> None:
        with self._mutex:
            if self.is_aborted:
                return
            self.is_aborted = True
            for key, left in self._left.items():
                if left:
                    self._gates[key].release()

    @property
    def num_events(self) -> int:
        """Counts begins and ends: it grows as long as the step makes progress."""
        return len(self._begun) + len(self._ended)

    def progress(self) -> StepProgress:
        """Return which actions have ended and which run, to any thread."""
        now = monotonic()
        with self._mutex:
            return StepProgress(
                plan=self.graph.plan,
                ended=set(self._ended),
                running={
                    key: now - begun for key, begun in self._begun.items() if key not in self._ended
                },
            )
