"""A microbatch: one thread of control through the user's code and all stages of a step.

```
turn   F0                      F1           X0                           B1     B2
       head segment, blocks    blocks       blocks 4-5, tail segment,    2-3    0-1, then
       (user code)   0-1       2-3          loss, backward to the cut           the head
```

The user's graph is cut where blocks run without one: what they give belongs to the graph of the
segment that uses it, which begins at a leaf, and the segment before ends at their input. The
backward of each part runs to its leaves and returns, so nothing ever waits inside an autograd node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from roundpipe_lightning.engine.capture.compiled import BlockCompiler
from roundpipe_lightning.engine.capture.placeholder import without_phantoms
from roundpipe_lightning.engine.capture.randomness import RandomStream, StepDraws
from roundpipe_lightning.engine.capture.trees import map_tensors
from roundpipe_lightning.engine.capture.view import ViewClasses
from roundpipe_lightning.engine.chain.backward import BackwardRun
from roundpipe_lightning.engine.chain.block_runner import BlockRunner
from roundpipe_lightning.engine.chain.chain import BlockStack, Chain, Link
from roundpipe_lightning.engine.chain.forward import ChainRun
from roundpipe_lightning.engine.device.events import Event, StepAborted
from roundpipe_lightning.engine.device.notes import noted
from roundpipe_lightning.engine.transfer.boundary import send_to_host
from roundpipe_lightning.engine.transfer.gradient_reduce import GradientReducer, Gradients, fold
from roundpipe_lightning.engine.transfer.pinned_pool import PinnedPool
from roundpipe_lightning.engine.worker.out_of_memory import Shortage, memory_explained, shortage_on
from roundpipe_lightning.engine.worker.turns import TurnGraph, Turns
from roundpipe_lightning.engine.worker.user_code import Outside, UserCode
from roundpipe_lightning.engine.worker.worker import Worker
from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.planning.schedule.plan import Plan
from roundpipe_lightning.planning.schedule.schedule import Action
from roundpipe_lightning.planning.schedule.stages import Stage, StageKind, operations_kept

UserStep: TypeAlias = Callable[[Any, Any, int], Any]
"""Calls the user's step: the view of the module, the microbatch and its index."""


@dataclass(frozen=True, kw_only=True)
class StepContext:
    """What the microbatches of one step share.

    Attributes:
        module: The user's module.
        stacks: Its blocks.
        chain: The calls of blocks that are planned.
        repeated: Parameters of blocks that stand in the chain more than once.
        plan: The plan that is run.
        graph: The plan's gates.
        turns: The step's gates.
        workers: The workers.
        classes: The classes of views.
        reducer: Where gradients are summed.
        draws: The step's random draws.
        pools: Memory on the host for what goes from turn to turn, by microbatch; None where no
            worker needs any.
        step_seed: The step's random number.
        call: The user's step.
        backward: Whether gradients are wanted.
        thread_context: Entered in every thread: thread-local state such as autocast.
        overrides: Attributes of the root view, per microbatch.
        stand_ins: Modules that are something else in the view, per microbatch.
        outside: Asked before every torch function outside the blocks, or None.
        compiler: Compiles blocks; None: they run as they are.
        told: Called when the user's step of a microbatch has returned.
        marks: When each action began and ended, in the workers' devices' time.
    """

    module: nn.Module
    stacks: Sequence[BlockStack]
    chain: Chain
    repeated: frozenset[nn.Parameter]
    plan: Plan
    graph: TurnGraph
    turns: Turns
    workers: Sequence[Worker]
    classes: ViewClasses
    reducer: GradientReducer
    draws: StepDraws
    pools: Sequence[PinnedPool] | None
    step_seed: int
    call: UserStep
    backward: bool
    thread_context: Callable[[], AbstractContextManager[Any]]
    overrides: Callable[[int], Mapping[str, Any]]
    stand_ins: Callable[[int], Mapping[nn.Module, nn.Module]]
    told: Callable[[], None] = lambda: None
    outside: Outside | None = None
    compiler: BlockCompiler | None = None
    marks: dict[Action, tuple[Any, Any]] = field(default_factory=dict)


class Microbatch:
    """One microbatch's way through a step.

    Args:
        context: What it shares with the others.
        index: Its number.
        batch: Its part of the batch, on the host.
        loss_scale: What its loss is multiplied by for the backward pass; 0 skips it.
    """

    def __init__(self, context: StepContext, *, index: int, batch: Any, loss_scale: float) -> None:
        self.index = index
        self.output: Any = None
        self.loss: Tensor | None = None
        #: Memory on the host for what goes from turn to turn.
        self.pool = None if context.pools is None else context.pools[index]
        self._homecomings: list[Event] = []
        self._context = context
        self._batch = batch
        self._loss_scale = loss_scale
        self._path = context.graph.paths[index]
        self._take_position(0)
        self._activation: AbstractContextManager[Any] | None = None
        self._begin_mark: Any = None
        self._left: dict[Worker, Event] = {}
        self._run: ChainRun | None = None
        #: The calls of blocks that it made, and how many of them were not planned.
        self.links: list[Link] = []
        self.num_streamed = 0
        self._user = UserCode(
            module=context.module,
            worker=lambda: self.worker,
            workers=context.workers,
            stream=RandomStream(
                context.draws,
                step_seed=context.step_seed,
                microbatch=index,
                generators=self._generators,
            ),
            classes=context.classes,
            outside=context.outside,
        )

    # ------------------------------------------------------------------------------------ turns

    def _take_position(self, position: int) -> None:
        self._position = position
        self._action = action = self._path[position]
        #: The stage whose turn this microbatch has, or waits for.
        self.stage: Stage = self._context.plan.partition.stage(action.kind, action.stage)
        #: The worker that runs it.
        self.worker: Worker = self._context.workers[action.worker]

    @property
    def next_worker(self) -> Worker | None:
        """The worker of the next turn; None if there is none."""
        following = self._path[self._position + 1 : self._position + 2]
        return self._context.workers[following[0].worker] if following else None

    @property
    def stays_here(self) -> bool:
        """Whether all turns that are left reach this worker, and it has room for what they take."""
        rest = {action.worker for action in self._path[self._position + 1 :]}
        followers = (self._context.workers[index].device for index in rest)
        here = self.worker.device
        return self.worker.has_room and all(device.reaches(here) for device in followers)

    def left(self, worker: Worker) -> Event | None:
        """Return the end of its last turn on another worker."""
        return self._left.get(worker)

    @property
    def place(self) -> str:
        """Where the microbatch stands, for people."""
        blocks, names = self.stage.blocks, self._context.plan.block_names
        covered = ["the head segment"] if self._position == 0 else []
        if blocks:
            covered.append(f"blocks {names[blocks[0]]} to {names[blocks[-1]]}")
        if self.stage.kind is StageKind.FUSED:
            covered.append("the tail segment")
        return (
            f"{self._action.kind.name} stage {self._action.stage} ({', '.join(covered)}), "
            f"microbatch {self.index}, {self.worker}"
        )

    def _generators(self) -> Sequence[torch.Generator]:
        return self.worker.device.generators()

    def _begin(self) -> None:
        self._context.turns.begin(self._action)
        self._activation = self.worker.device.activate()
        self._activation.__enter__()
        self._begin_mark = self.worker.device.mark()

    def _end(self) -> None:
        """End the turn; where it is the last of a round, the stage's gradients go home before."""
        self._check_still_runs()
        stage, reducer = self.stage, self._context.reducer
        is_last = self._action.key in self._context.graph.ends_run
        if stage.kind is not StageKind.FORWARD:
            self.worker.end_backward(
                stage,
                microbatch=self.index,
                reducer=reducer,
                is_last=is_last,
                outside=self._user.used_parameters | self._context.repeated,
            )
        if is_last:
            self.worker.end_visit()
        self._context.marks[self._action] = (self._begin_mark, self.worker.device.mark())
        if self._context.graph.last[self._action.worker] == self._action.key:
            self.worker.leave_step(self._context.turns)
        if self.worker.transfers is not None:
            self._left[self.worker] = self.worker.device.mark_event(f"end of {self._action}")
        self._deactivate()
        self._context.turns.end(self._action)

    def _check_still_runs(self) -> None:
        """Leave what the next step may be using already alone, when user code returns too late.

        Raises:
            StepAborted: If the step was given up.
        """
        if self._context.turns.is_aborted:
            raise StepAborted

    def _deactivate(self) -> None:
        if self._activation is not None:
            self._activation.__exit__(None, None, None)
            self._activation = None

    def next_turn(self) -> None:
        """End this turn and wait for the next."""
        self._end()
        self._take_position(self._position + 1)
        self._begin()

    # -------------------------------------------------------------------------------------- run

    @property
    def has_written(self) -> bool:
        """Whether its code or a block has written attributes or buffers of modules."""
        return self._user.writes.were_any

    def tell_writes(self) -> None:
        """Let the modules have the attributes that the user's code has written."""
        self._user.writes.tell()

    def run(self) -> None:
        """Run the user's step and all stages. The engine calls this in the microbatch's thread."""
        device = self.worker.device
        try:
            self._begin()
            with (
                self._context.thread_context(),
                device.thread_context(),
                self._user,
                memory_explained(self._shortage),
            ):
                self._run_step()
        finally:
            self._deactivate()
            if self._run is not None:
                self._run.close()
                self._run = None
            self._user.close()

    def _shortage(self) -> Shortage:
        boundaries = 0 if self._run is None else self._run.boundary_bytes()
        return shortage_on(
            self.worker,
            among=self._context.workers,
            place=self.place,
            stage=self.stage,
            plan=self._context.plan,
            boundaries=boundaries,
        )

    def _run_step(self) -> None:
        context = self._context
        with torch.set_grad_enabled(context.backward):
            output = self._run_user_code()
            while self.stage.kind is StageKind.FORWARD:  # no block was called
                self.next_turn()
            loss = loss_of(output)
            self._send_home(output, loss)
            context.told()
            # A scale of 0 means a microbatch with nothing to average over, whose mean is not a
            # number.
            if loss is not None and context.backward and self._loss_scale:
                self._run_backward(loss)
        del output, loss
        while self._position + 1 < len(self._path):  # nothing left to compute
            self.next_turn()
        if self.pool is not None:  # another microbatch may have it when this turn has ended
            self.pool.reset()
        self._end()  # brings the last stage's gradients of shared parameters
        context.reducer.close_microbatch(self.index)

    def _run_user_code(self) -> Any:
        context, user = self._context, self._user
        view = user.open_view(
            [block for stack in context.stacks for block in stack.blocks],
            called=self._block_called,
            overrides=context.overrides(self.index),
            stand_ins=context.stand_ins(self.index),
        )
        batch = map_tensors(self.worker.device.upload, self._batch)
        with user.active():
            output = context.call(view, batch, self.index)
        self._check_still_runs()
        self._write_buffers_back()
        run = self._run
        if run is not None:
            with user.suspended():
                run.end_user_code()
            self.links = run.links()
            self.num_streamed = sum(call.place.position is None for call in run.calls)
        user.check_unwritten()
        if context.backward:
            user.check_frozen()
        return without_phantoms(output)

    def _write_buffers_back(self) -> None:
        if self._user.write_buffers_back():
            self.buffers_written()

    def buffers_written(self, *, repeated: str | None = None) -> None:
        """Refuse writes into buffers where microbatches do not come one after the other.

        Args:
            repeated: A block that has run in an earlier turn, too.

        Raises:
            ConfigurationError: If the plan has several rounds or teams, or for such a block.
        """
        self._user.writes.were_any = True
        plan = self._context.plan
        if plan.team_size > 1 or plan.round_size < plan.num_microbatches:
            raise ConfigurationError(
                "The forward pass writes into buffers of the module (running statistics, for "
                f"example), but the plan has rounds of {plan.round_size} of "
                f"{plan.num_microbatches} microbatches and teams of {plan.team_size}: the "
                "microbatches would write in no order. Use a plan of one round without teams: "
                f"hints=PartitionHints(team_size=1, round_size={plan.num_microbatches}), or "
                "plan='auto'."
            )
        if repeated is not None and plan.num_microbatches > 1:
            raise ConfigurationError(
                f"The forward pass writes into buffers of block {repeated!r} (running statistics, "
                "for example), which a step calls more than once: the microbatches would write in "
                "another order than one after the other. Set num_microbatches=1, or put the "
                "module that writes into evaluation mode."
            )

    def add_gradients(self, gradients: Gradients) -> None:
        """Take gradients of parameters that no stage has."""
        self._context.reducer.add_shared(self.index, gradients)

    def _block_called(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serve a proxy."""
        self._check_still_runs()
        context = self._context
        with self._user.suspended():
            if self._run is None:
                self._run = ChainRun(
                    self,
                    user=self._user,
                    stacks=context.stacks,
                    chain=context.chain,
                    partition=context.plan.partition,
                    backward=context.backward,
                    runner=BlockRunner(
                        self._user,
                        worker=lambda: self.worker,
                        keeps=operations_kept(context.plan.recompute),
                        stays=lambda: self.stays_here,
                        pool=self.pool,
                        compiler=context.compiler,
                    ),
                )
                self._user.cut = self._run.cut
                self._user.check_gradient = self._run.check_gradient
                self._user.side_outputs.on_use = self._run.side_output_used
            return self._run.call(block, args, kwargs)

    def _run_backward(self, loss: Tensor) -> None:
        if not loss.requires_grad:
            raise ConfigurationError(
                "training_step returned a loss that does not require a gradient: no trainable "
                "parameter took part in it, or it was detached."
            )
        with self._user.suspended():
            scale = torch.full_like(loss, self._loss_scale, requires_grad=False)
            if self._run is not None:
                BackwardRun(self._run, collect=self._collect).run(loss, scale)
                return
            with self._user.in_backward():
                loss.backward(scale)
            self._collect()

    def _collect(self) -> None:
        """Send home the gradients of what user code has used outside the blocks."""
        context, found = self._context, self._user.take_gradients()
        if sum(map(len, found.values())) == len({p for some in found.values() for p in some}):
            for worker, gradients in found.items():
                add_reserved = context.reducer.reserve_shared(self.index)
                context.workers[worker].send_outside(gradients, landed=add_reserved)
            return
        total: Gradients = {}  # the same parameter on several workers: one sum of all
        for worker, gradients in found.items():
            device = context.workers[worker].device
            with noted(f"gradients of microbatch {self.index} on {device.name}"):
                fold(total, {p: device.download(g) for p, g in gradients.items()})
        context.reducer.add_shared(self.index, total)

    def _send_home(self, output: Any, loss: Tensor | None) -> None:
        """Send what the user's step has returned to the host, while the backward pass runs."""
        sent: dict[int, Tensor] = {}

        def send(tensor: Tensor) -> Tensor:
            if id(tensor) not in sent:
                sent[id(tensor)] = self._sent_home(tensor)
            return sent[id(tensor)]

        with self._user.suspended():
            self.output = map_tensors(send, output)
            self.loss = None if loss is None else send(loss)

    def _sent_home(self, tensor: Tensor) -> Tensor:
        """Return a host tensor that has a tensor's values when `await_output` returns."""
        worker = self._user.worker_of(tensor)
        transfers = None if worker is None else worker.transfers
        if worker is None or transfers is None or tensor.layout is not torch.strided:
            device = self._user.owner_of(tensor)  # perhaps not that of the last action
            with noted(f"the outcome of microbatch {self.index} on {device.name}"):
                return device.download(tensor)
        made = None if worker is self.worker else self.left(worker)
        host, landed = send_to_host(
            tensor.detach(), transfers, after=made or worker.device.mark_event("an output is made")
        )
        self._homecomings.append(landed)
        return host

    def await_output(self) -> None:
        """Wait until what the user's step has returned is on the host."""
        for landed in self._homecomings:
            landed.wait()
        self._homecomings.clear()


def loss_of(output: Any) -> Tensor | None:
    """Return the loss in what a training step returned: itself, or its entry `loss`.

    Raises:
        ConfigurationError: If there is none, and the output is not None.
    """
    if output is None or isinstance(output, Tensor):
        return output
    loss = output.get("loss") if isinstance(output, Mapping) else None
    if not isinstance(loss, Tensor):
        raise ConfigurationError(
            f"training_step returned a {type(output).__name__} without a tensor 'loss': return the "
            "loss, a dict with the key 'loss', or None to skip the batch."
        )
    return loss
