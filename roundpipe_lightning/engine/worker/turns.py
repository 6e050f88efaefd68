"""Turns: the schedule as gates that host threads pass.

Step M2 of docs/design.md. A gate opens when the action before it on the same worker and everything
in `dependencies()` have ended; whoever waits in `begin` then owns the worker until `end`:

```
thread of microbatch 0     begin(F0.0) ... end        begin(F1.0) ... end
thread of microbatch 1         begin(F0.1) waits ────────┘  (worker 0 is free) ... end
```

One gate, one waiter: nobody is woken in vain. A gate is a lock that is held until it opens. Each
worker's first action of a step waits for its last one of the step before, which may still run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from dataclasses import KW_ONLY, dataclass
from functools import partial
from time import monotonic
from typing import Any

from torch import nn

from roundpipe_lightning.engine.capture.view import ViewClasses
from roundpipe_lightning.engine.device.events import Event, StepAborted
from roundpipe_lightning.engine.transfer.gradient_reduce import GradientReducer
from roundpipe_lightning.engine.worker.worker import Worker
from roundpipe_lightning.planning.report.step_record import StepProgress
from roundpipe_lightning.planning.schedule.plan import Plan
from roundpipe_lightning.planning.schedule.schedule import Action, ActionKey, dependencies
from roundpipe_lightning.planning.schedule.stages import Stage, StageKind


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
        num_waits: dict[ActionKey, int] = {}
        opens: dict[ActionKey, list[ActionKey]] = {action.key: [] for action in plan.schedule}
        ends_run: set[ActionKey] = set()
        for actions in plan.schedule.workers:
            for before, action, after in zip(
                (None, *actions), actions, (*actions[1:], None), strict=False
            ):
                needed = set(dependencies(action.key, plan.partition))
                if before is not None:
                    needed.add(before.key)
                num_waits[action.key] = len(needed)
                for source in needed:
                    opens[source].append(action.key)
                if after is None or (after.kind, after.stage) != (action.kind, action.stage):
                    ends_run.add(action.key)
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
            num_waits=num_waits,
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
            self._count_down(key)

    def _count_down(self, key: ActionKey) -> None:
        self._left[key] -= 1
        if not (self._left[key] or self.is_aborted):
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
                self._count_down(key)
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


@dataclass(eq=False)
class MicrobatchTurns:
    """One microbatch's way through the turns of a step. Used by the microbatch's thread.

    Steps M6 and M9 of docs/design.md.

    Attributes:
        stage: The stage whose turn it has, or waits for.
        number: Number of the turn, from 0 on.
        on_leave: Called with the number of a turn that another one follows, when it has ended.
    """

    index: int
    _: KW_ONLY
    turns: Turns
    workers: Sequence[Worker]
    reducer: GradientReducer
    # returns the parameters that are used outside the stages
    used_outside: Callable[[], Set[nn.Parameter]]
    # the classes of views; a thread that waits for its turn holds none of their locks
    classes: ViewClasses

    def __post_init__(self) -> None:
        self.plan = self.turns.graph.plan
        self._path = self.turns.graph.paths[self.index]
        self._activation: AbstractContextManager[Any] | None = None
        self._begin_mark: Any = None
        self.ends: dict[Worker, Event] = {}  # of its last turn on each
        self.is_over = False
        self.on_leave: Callable[[int], None] = lambda number: None
        self._take_position(0)

    def _take_position(self, position: int) -> None:
        self.number = position
        self._stays: dict[Worker, bool] = {}  # what is known in this turn
        self._action = action = self._path[position]
        self.stage: Stage = self.plan.partition.stage(action.kind, action.stage)
        self.in_forward_stage = action.kind is StageKind.FORWARD
        self.worker: Worker = self.workers[action.worker]

    @property
    def is_active(self) -> bool:
        return self._activation is not None

    @property
    def is_last(self) -> bool:
        return self.number + 1 == len(self._path)

    @property
    def next_worker(self) -> Worker | None:
        return None if self.is_last else self.workers[self._path[self.number + 1].worker]

    @property
    def stays_here(self) -> bool:
        """Whether all turns that are left reach this worker, and it has room for what they take."""
        if self.worker not in self._stays:
            rest = {action.worker for action in self._path[self.number + 1 :]}
            here = self.worker.device
            self._stays[self.worker] = here.has_spare_memory() and all(
                self.workers[index].device.reaches(here) for index in rest
            )
        return self._stays[self.worker]

    @property
    def place(self) -> str:
        blocks, names = self.stage.blocks, self.plan.block_names
        covered = ["the head segment"] if self.number == 0 else []
        if blocks:
            covered.append(f"blocks {names[blocks[0]]} to {names[blocks[-1]]}")
        if self.stage.kind is StageKind.FUSED:
            covered.append("the tail segment")
        return (
            f"{self._action.kind.name} stage {self._action.stage} ({', '.join(covered)}), "
            f"microbatch {self.index}, {self.worker}"
        )

    def enter(self) -> None:
        """Wait for the turn, unless it is had already; StepAborted if the step has failed."""
        if self._activation is not None:
            return
        with self.classes.released():
            self.turns.begin(self._action)
        self._activation = self.worker.device.activate()
        self._activation.__enter__()
        self._begin_mark = self.worker.device.mark()

    def next_turn(self) -> None:
        self.leave()
        self.enter()

    def leave(self) -> None:
        """End the turn, and wait for the next one when that is entered."""
        self.end()
        number = self.number
        self._take_position(number + 1)
        self.on_leave(number)

    def end(self) -> None:
        """End the turn. The last one of a round sends the gradients of the stage to the host."""
        self.enter()
        self.check_not_aborted()
        graph, worker, action = self.turns.graph, self.worker, self._action
        ends_run = action.key in graph.ends_run
        if not self.in_forward_stage:
            worker.end_backward(
                self.stage,
                microbatch=self.index,
                reducer=self.reducer,
                is_last=ends_run,
                outside=self.used_outside(),
            )
        if ends_run:
            worker.send_outside(reducer=self.reducer, last=self.index)
            worker.end_stage_run()
        self.turns.marks[action] = (self._begin_mark, worker.device.mark())
        if graph.last[action.worker] == action.key:
            worker.end_turns(self.turns)
        if worker.transfers is not None:
            self.ends[worker] = worker.device.mark_event(f"end of {action}")
        self.deactivate()
        self.turns.end(action)

    def go_to_last(self) -> None:
        while not self.is_last:
            self.next_turn()

    def end_all(self) -> None:
        if not self.is_over:
            self.go_to_last()
        if not self.is_over:
            self.end()  # brings the last stage's gradients of shared parameters
        self.deactivate()
        self.reducer.close_microbatch(self.index)

    def end_last(self) -> None:
        """Pass the turns that are left; the microbatch has more to do than they hold."""
        self.go_to_last()
        self.end()
        self.is_over = True

    def borrow(self, other: MicrobatchTurns) -> None:
        """Compute on the worker of a microbatch that waits in its last turn."""
        self.worker = other.worker
        self._activation = self.worker.device.activate()
        self._activation.__enter__()

    @contextmanager
    def as_guest_of(self, other: MicrobatchTurns) -> Iterator[None]:
        """Compute in the turn of a microbatch that waits meanwhile, until the context ends."""
        if self.is_active:  # the other has borrowed this one's worker
            yield
            return
        own = self.worker
        self.borrow(other)
        try:
            yield
        finally:
            self.deactivate()
            self.worker = own

    def deactivate(self) -> None:
        if self._activation is not None:
            self._activation.__exit__(None, None, None)
            self._activation = None

    def check_not_aborted(self) -> None:
        """Leave what the next step may be using already alone, when user code returns too late."""
        if self.turns.is_aborted:
            raise StepAborted
