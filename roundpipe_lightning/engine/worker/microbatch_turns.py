"""The turns of one microbatch: which stage it runs, on which worker, and what it owns meanwhile.

Steps M6 and M9 of docs/design.md.

```
thread of a microbatch    F0 on worker 0 ── next_turn ── F1 on worker 1 ── next_turn ── X0 ...
                          begin: the gate opens, the device is made current
                          end:   gradients of the stage leave, the gate of the next action opens
```
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn

from roundpipe_lightning.engine.capture.view import ViewClasses
from roundpipe_lightning.engine.device.events import Event, StepAborted
from roundpipe_lightning.engine.transfer.gradient_reduce import GradientReducer, Gradients
from roundpipe_lightning.engine.worker.turns import Turns
from roundpipe_lightning.engine.worker.worker import Worker
from roundpipe_lightning.planning.schedule.stages import Stage, StageKind


class MicrobatchTurns:
    """One microbatch's way through the turns of a step. Used by the microbatch's thread.

    Args:
        used_outside: Returns the parameters that are used outside the stages.
        classes: The classes of views; a thread that waits for its turn holds none of their locks.

    Attributes:
        stage: The stage whose turn it has, or waits for.
        number: Number of the turn, from 0 on.
        on_leave: Called with the number of a turn that another one follows, when it has ended.
    """

    def __init__(
        self,
        index: int,
        *,
        turns: Turns,
        workers: Sequence[Worker],
        reducer: GradientReducer,
        used_outside: Callable[[], Set[nn.Parameter]],
        classes: ViewClasses,
    ) -> None:
        self.index = index
        self.plan = turns.graph.plan
        self._turns = turns
        self._workers = workers
        self._reducer = reducer
        self._used_outside = used_outside
        self._classes = classes
        self._path = turns.graph.paths[index]
        self._activation: AbstractContextManager[Any] | None = None
        self._begin_mark: Any = None
        self._ends: dict[Worker, Event] = {}
        self.is_over = False
        self.on_leave: Callable[[int], None] = lambda number: None
        self._take_position(0)

    def _take_position(self, position: int) -> None:
        self.number = position
        self._stays: dict[Worker, bool] = {}  # what is known in this turn
        self._action = action = self._path[position]
        self.stage: Stage = self.plan.partition.stage(action.kind, action.stage)
        self.worker: Worker = self._workers[action.worker]

    @property
    def in_forward_stage(self) -> bool:
        return self.stage.kind is StageKind.FORWARD

    @property
    def is_active(self) -> bool:
        return self._activation is not None

    @property
    def is_last(self) -> bool:
        return self.number + 1 == len(self._path)

    @property
    def next_worker(self) -> Worker | None:
        return None if self.is_last else self._workers[self._path[self.number + 1].worker]

    @property
    def stays_here(self) -> bool:
        """Whether all turns that are left reach this worker, and it has room for what they take."""
        if self.worker not in self._stays:
            rest = {action.worker for action in self._path[self.number + 1 :]}
            here = self.worker.device
            self._stays[self.worker] = here.has_spare_memory() and all(
                self._workers[index].device.reaches(here) for index in rest
            )
        return self._stays[self.worker]

    def last_end(self, worker: Worker) -> Event | None:
        return self._ends.get(worker)

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

    # -------------------------------------------------------------------------------- begin and end

    def enter(self) -> None:
        """Wait for the turn, unless it is had already; StepAborted if the step has failed."""
        if self._activation is not None:
            return
        with self._classes.released():
            self._turns.begin(self._action)
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
        graph, worker, action = self._turns.graph, self.worker, self._action
        ends_run = action.key in graph.ends_run
        if not self.in_forward_stage:
            worker.end_backward(
                self.stage,
                microbatch=self.index,
                reducer=self._reducer,
                is_last=ends_run,
                outside=self._used_outside(),
            )
        if ends_run:
            worker.send_outside(reducer=self._reducer, last=self.index)
            worker.end_stage_run()
        self._turns.marks[action] = (self._begin_mark, worker.device.mark())
        if graph.last[action.worker] == action.key:
            worker.end_turns(self._turns)
        if worker.transfers is not None:
            self._ends[worker] = worker.device.mark_event(f"end of {action}")
        self.deactivate()
        self._turns.end(action)

    def go_to_last(self) -> None:
        while not self.is_last:
            self.next_turn()

    def end_all(self) -> None:
        if not self.is_over:
            self.go_to_last()
        if not self.is_over:
            self.end()  # brings the last stage's gradients of shared parameters
        self.deactivate()
        self._reducer.close_microbatch(self.index)

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

    def add_gradients(self, gradients: Gradients) -> None:
        self._reducer.add_shared(self.index, gradients)

    def deactivate(self) -> None:
        if self._activation is not None:
            self._activation.__exit__(None, None, None)
            self._activation = None

    def check_not_aborted(self) -> None:
        """Leave what the next step may be using already alone, when user code returns too late.

        Raises:
            StepAborted: If the step was given up.
        """
        if self._turns.is_aborted:
            raise StepAborted
