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

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypedDict

import torch
from torch import Tensor, nn

from roundpipe_lightning.engine.capture.compiled import BlockCompiler
from roundpipe_lightning.engine.capture.module_writes import Writes
from roundpipe_lightning.engine.capture.placeholder import materialized
from roundpipe_lightning.engine.capture.randomness import RandomStream, StepDraws
from roundpipe_lightning.engine.capture.trees import map_tensors
from roundpipe_lightning.engine.capture.view import ViewClasses
from roundpipe_lightning.engine.chain.backward import BackwardPass, DriverBackward, PieceBackward
from roundpipe_lightning.engine.chain.chain import BlockStack, Chain, Link
from roundpipe_lightning.engine.chain.forward import ForwardPass
from roundpipe_lightning.engine.chain.joined import PieceBoard
from roundpipe_lightning.engine.chain.pieces import CallForms, DriverForward, PieceForward
from roundpipe_lightning.engine.chain.segments import rows_to_come
from roundpipe_lightning.engine.device.base import strides_of_copy
from roundpipe_lightning.engine.device.events import Event
from roundpipe_lightning.engine.device.threads import Countdown, noted
from roundpipe_lightning.engine.transfer.copy_queue import Job, Priority
from roundpipe_lightning.engine.transfer.gradient_reduce import (
    GradientReducer,
    Gradients,
    Rows,
    fold,
)
from roundpipe_lightning.engine.worker.out_of_memory import Shortage, memory_explained
from roundpipe_lightning.engine.worker.turns import MicrobatchTurns, Turns
from roundpipe_lightning.engine.worker.user_code import Outside, UserCode
from roundpipe_lightning.engine.worker.worker import Worker
from roundpipe_lightning.errors import ConfigurationError

UserStep: TypeAlias = Callable[[Any, Any, int], Any]
"""Calls the user's step: the view of the module, the microbatch and its index."""


class StepOptions(TypedDict, total=False):
    """What `Engine.begin_step` may be told."""

    backward: bool  # whether gradients are wanted, as they are by default
    step_seed: int  # the step's random number; by default one is drawn
    # microbatches of the whole batch that other hosts have before these: random numbers follow from
    # it
    first_microbatch: int
    # entered in every thread, for thread-local state such as autocast
    thread_context: Callable[[], AbstractContextManager[Any]]
    # asked, in every microbatch's thread, before each torch function of the user's code outside the
    # blocks; it may answer in the function's place
    outside: Outside | None
    # called in every microbatch's thread with its index and what its step has returned, on the
    # host, before it gives gradients away; what it raises ends the step
    verify: Callable[[int, Any], None] | None
    writes_nothing: bool  # whether the step is proven to write no attributes: else it is refused


@dataclass(frozen=True, kw_only=True)
class StepContext:
    """State that the microbatches of one step share. The rest is as of `StepOptions`."""

    module: nn.Module
    stacks: Sequence[BlockStack]
    chain: Chain
    repeated: frozenset[nn.Parameter]  # parameters of blocks that stand in the chain more than once
    turns: Turns
    workers: Sequence[Worker]
    classes: ViewClasses
    reducer: GradientReducer
    draws: StepDraws
    call: UserStep
    returned: Countdown  # counts down the microbatches whose user code has not returned
    is_first: bool  # whether no step of the engine has ended before it began
    backward: bool = True
    step_seed: int = field(default_factory=lambda: int(torch.randint(0, 2**62, (), device="cpu")))
    first_microbatch: int = 0
    thread_context: Callable[[], AbstractContextManager[Any]] = nullcontext
    may_write: bool | None = None  # as of `UserCode`
    outside: Outside | None = None
    verify: Callable[[int, Any], None] | None = None
    writes_nothing: bool = False
    outside_blocks: frozenset[nn.Parameter] = frozenset()
    compiler: BlockCompiler | None = None
    # what is known of calls, where the user's code runs once on the whole batch and the
    # microbatches are pieces of it; None: it runs for every microbatch
    forms: CallForms | None = None


class Microbatch:
    """One microbatch's way through a step.

    Args:
        batch: Its part of the batch, on the host.
        loss_scale: What its loss is multiplied by for the backward pass; 0 skips it.
        outside: The user code outside the blocks; None: its own.
    """

    runs_user_code = True

    def __init__(
        self,
        context: StepContext,
        *,
        index: int,
        batch: Any = None,
        loss_scale: float = 0.0,
        outside: UserCode | None = None,
    ) -> None:
        # what the user's step has returned, on the host when `await_output` returns
        self.output: Any = None
        self.loss: Tensor | None = None  # the loss in it, likewise
        self.links: list[Link] = []  # the calls of blocks that it made
        self.num_streamed = 0  # how many of them were not planned
        self._index = index
        self._context = context
        self._batch = batch
        self._loss_scale = loss_scale
        self._downloads: list[Event] = []  # of what the user's step has returned
        self._has_returned = False
        self._forward: ForwardPass | None = None
        self._rows: dict[tuple[int, nn.Parameter], Tensor] = {}
        user = UserCode(
            module=context.module,
            worker=lambda: turns.worker,
            workers=context.workers,
            stream=RandomStream(
                context.draws,
                step_seed=context.step_seed,
                microbatch=context.first_microbatch + index,
                generators=lambda: turns.worker.device.generators(),  # noqa: PLW0108 - it changes
                is_free_outside=context.forms is not None,
                watches_blocks=self.runs_user_code,
            ),
            classes=context.classes,
            outside=context.outside,
            may_write=context.may_write,
            writes=Writes(are_refused=context.writes_nothing),
        )
        turns = MicrobatchTurns(
            index,
            turns=context.turns,
            workers=context.workers,
            reducer=context.reducer,
            used_outside=lambda: whole.used_parameters | context.repeated,
            classes=context.classes,
        )
        whole = user if outside is None else outside
        self.turns, self.user = turns, user

    def execute(self) -> None:
        """Run the user's step and all stages. Called in the microbatch's thread."""
        device, turns = self.turns.worker.device, self.turns
        try:
            if self.runs_user_code:
                turns.enter()
            with (
                self._context.thread_context(),
                device.thread_context(),
                memory_explained(self._shortage),
                torch.set_grad_enabled(self._context.backward),
                self.user,
                self.user.suspended(),
            ):
                self._run_step()
                turns.end_all()
        finally:
            turns.deactivate()
            if self._forward is not None:
                self._forward.close()
                self._forward = None
            self.user.close()

    def _shortage(self) -> Shortage:
        turns = self.turns
        return Shortage(
            turns.worker,
            workers=self._context.workers,
            place=turns.place,
            stage=turns.stage,
            plan=turns.plan,
            boundaries=0 if self._forward is None else self._forward.boundary_bytes(),
        )

    def _forward_arguments(self) -> dict[str, Any]:
        context = self._context
        return {
            "turns": self.turns,
            "user": self.user,
            "stacks": context.stacks,
            "chain": context.chain,
            "backward": context.backward,
            "compiler": context.compiler,
            "checks": context.is_first,
        }

    def _make_forward(self) -> ForwardPass:
        return ForwardPass(**self._forward_arguments())

    def _make_backward(self) -> BackwardPass:
        assert self._forward is not None
        return BackwardPass(self._forward, collect=self._collect)

    def _run_step(self) -> None:
        context = self._context
        self._forward = forward = self._make_forward()
        output = self._run_user_code(forward)
        loss = loss_of(output)
        self._download(output, loss)
        # A scale of 0 means a microbatch with nothing to average over, whose mean is not a number.
        has_backward = context.backward and bool(self._loss_scale)
        if loss is None or not has_backward or context.verify is None:
            self._tell_returned()
        if loss is None or not has_backward:
            return
        if not loss.requires_grad:
            raise ConfigurationError(
                "training_step returned a loss that does not require a gradient: no trainable "
                "parameter took part in it, or it was detached."
            )
        scale = torch.full_like(loss, self._loss_scale, requires_grad=False)
        self._make_backward().run_backward(loss, scale)

    def _tell_returned(self) -> None:
        """Say that the user's step has returned, after a look at what it gave.

        Where one is wanted, the loss's backward pass has been launched: the device computes while
        the host waits for the values.
        """
        context = self._context
        if context.verify is not None:
            self.await_output()
            context.verify(self._index, self.output)
        context.returned.count()
        self._has_returned = True

    def _run_user_code(self, forward: ForwardPass) -> Any:
        context, user, turns = self._context, self.user, self.turns
        blocks = [block for stack in context.stacks for block in stack.blocks]
        view = user.open_view(blocks, called=forward.call_block)
        batch = map_tensors(turns.worker.upload, self._batch)
        with user.active():
            output = context.call(view, batch, self._index)
        turns.check_not_aborted()
        forward.write_buffers_back()
        user.write_parameters_back()
        user.hold_last_writes()
        forward.end_user_code()
        self.links = forward.links()
        self.num_streamed = sum(call.position is None for call in forward.calls)
        if context.backward:
            user.check_kept()
        return materialized(output)

    def _collect(self, rest: Sequence[Tensor]) -> None:
        """Add the gradients of what user code has used outside the blocks.

        What is to come is the graph of `rest`.
        """
        context = self._context
        if not self._has_returned:
            self._tell_returned()
        total: Gradients = {}  # the same parameter on several workers: one sum of all
        sent: set[nn.Parameter] = set()
        for worker, gradients in self.user.take_gradients().items():
            transfers = context.workers[worker].transfers
            if transfers is None:
                fold(total, gradients)
            else:
                rows = {p: ids for (w, p), ids in self._rows.items() if w == worker}
                self.turns.worker.add_outside(transfers, gradients, rows)
                sent.update(gradients)
        self._rows = self._rows_to_come(rest, sent)
        if total:
            context.reducer.reserve_shared(self._index)(total, left=self._left(total, rest))

    def _rows_to_come(
        self, rest: Sequence[Tensor], sent: Collection[nn.Parameter]
    ) -> dict[tuple[int, nn.Parameter], Tensor]:
        """Return the rows that gradients of embeddings on workers will have, where that helps.

        They can be sent alone after a whole gradient of the parameter: after what was just `sent`
        (that of the LM head), or from the second round on.
        """
        plan, workers = self._context.turns.graph.plan, self._context.workers
        leaves: dict[Tensor, tuple[int, nn.Parameter]] = {
            leaf: (worker, parameter)
            for (worker, parameter), leaf in self.user.leaves.items()
            if workers[worker].transfers is not None
            and (parameter in sent or plan.round_size < plan.num_microbatches)
            and parameter.dim() == 2
            and not (leaf._backward_hooks or leaf._post_accumulate_grad_hooks)  # noqa: SLF001
        }
        rows = rows_to_come(rest, list(leaves)) if leaves else {}
        return {leaves[leaf]: ids for leaf, ids in rows.items() if len(ids)}

    def _left(self, gradients: Gradients, rest: Sequence[Tensor]) -> Rows:
        """Return the rows of parameters that later gradients may have, where that is known."""
        left: Rows = {}
        for parameter in gradients.keys() & self._context.outside_blocks:
            leaves = self.user.leaves_of(parameter)
            uses = list(rows_to_come(rest, leaves).values())
            rows = [some for some in uses if len(some)]
            on_host = all(self.user.owner_of(some).shares_host_memory for some in rows)
            if len(uses) == len(leaves) and on_host:
                left[parameter] = torch.cat(rows) if rows else uses[0]
        return left

    def _download(self, output: Any, loss: Tensor | None) -> None:
        """Send what the user's step has returned to the host, while the backward pass runs."""
        sent: dict[int, Tensor] = {}

        def send(tensor: Tensor) -> Tensor:
            if id(tensor) not in sent:
                sent[id(tensor)] = self._host_copy(tensor)
            return sent[id(tensor)]

        self.output = map_tensors(send, output)
        self.loss = None if loss is None else send(loss)

    def _host_copy(self, tensor: Tensor) -> Tensor:
        worker = self.user.worker_of(tensor)
        transfers = None if worker is None else worker.transfers
        if worker is None or transfers is None or tensor.layout is not torch.strided:
            device = self.user.owner_of(tensor)  # perhaps not that of the last action
            with noted(f"the outcome of microbatch {self._index} on {device.name}"):
                return device.download(tensor)
        # Not the end of the turn there: the user's code may have written into it since.
        made = worker.device.mark_event("an output is made")
        flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
        host = flat.as_strided(tensor.shape, strides_of_copy(tensor))
        pieces = [(host, tensor.detach())]
        job = Job(name="an output", priority=Priority.WEIGHTS, pieces=pieces, after=[made])
        self._downloads.append(transfers.downloads.submit(job))
        return host

    def await_output(self) -> None:
        for landed in self._downloads:
            landed.wait()
        self._downloads.clear()


class Driver(Microbatch):
    """The first piece of a batch, whose thread runs the user's code on all of it."""

    def __init__(self, context: StepContext, *, board: PieceBoard, **given: Any) -> None:
        super().__init__(context, index=0, **given)
        self.board = board

    def _make_forward(self) -> ForwardPass:
        assert self._context.forms is not None
        return DriverForward(
            **self._forward_arguments(), board=self.board, forms=self._context.forms
        )

    def _make_backward(self) -> BackwardPass:
        assert isinstance(self._forward, DriverForward)
        return DriverBackward(self._forward, collect=self._collect)

    def _run_user_code(self, forward: ForwardPass) -> Any:
        output = super()._run_user_code(forward)
        self.board.post(lambda piece: piece.forward.go_to_fused_stage())
        return output

    def _run_step(self) -> None:
        super()._run_step()
        self.board.post(None)
        self.board.await_all()  # nobody replays what it drops now


class Piece(Microbatch):
    """Another piece of a batch: its thread replays what the driver posts."""

    runs_user_code = False

    def __init__(self, context: StepContext, *, driver: Driver, index: int) -> None:
        super().__init__(context, index=index, outside=driver.user)
        self.driver, self.index = driver, index

    def _run_step(self) -> None:
        board = self.driver.board
        self.forward = PieceForward(**self._forward_arguments(), piece=self.index)
        self._forward = board.forwards[self.index] = self.forward
        self.backward = PieceBackward(self.forward, collect=lambda rest: None)
        for entry in board.entries(self.index):
            entry(self)


def loss_of(output: Any) -> Tensor | None:
    """Return the loss in what a training step returned: itself, or its entry `loss`.

    Raises:
        ConfigurationError: If there is none, and the output is not None.
    """
    if output is None or isinstance(output, Tensor):
        return output
    loss = output.get("loss", output) if isinstance(output, Mapping) else output
    if not (loss is None or isinstance(loss, Tensor)):
        raise ConfigurationError(
            f"training_step returned a {type(output).__name__} without a tensor 'loss': return the "
            "loss, a dict with the key 'loss', or None to skip the batch."
        )
    return loss
