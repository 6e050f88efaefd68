"""One pass of one microbatch through the stages of a stack, forward and backward.

```
entry ─▶ [F0] ─ boundary ─▶ [F1] ─ boundary ─▶ cut ─▶ [X0: last blocks] ─▶ output, to the user's
            code keeps what flows into the blocks that start a BACKWARD stage
head ◀─ gradient ◀─ [B2: recompute, backward] ◀─ gradient ◀─ [B1] ◀─ gradient ◀─ the user's loss
```

What flows is any number of values: tensors that blocks made and that later blocks or the user's
code take. Values and their gradients go from stage to stage through the host. A stage's graph
begins at leaves, one per value or argument that it takes; their gradients, and those that later
stages found before, are what the stages before begin their backward with.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from roundpipe_lightning.engine.capture import Phantom, check_finished, check_order
from roundpipe_lightning.engine.side_outputs import Watch
from roundpipe_lightning.engine.stack import BlockStack
from roundpipe_lightning.engine.user_code import UserCode
from roundpipe_lightning.engine.values import BlockCall, Outcome, Value
from roundpipe_lightning.engine.view import put
from roundpipe_lightning.engine.worker import Worker
from roundpipe_lightning.errors import CaptureError
from roundpipe_lightning.planning.stages import Partition, Stage, StageKind

Source: TypeAlias = Value | Tensor
"""Where a tensor that a block takes comes from: a block, or user code outside the blocks."""


class TurnTaker(Protocol):
    """Who owns a worker's turn and can pass it on."""

    @property
    def stage(self) -> Stage:
        """The stage whose turn it is."""

    @property
    def worker(self) -> Worker:
        """The worker whose turn it is."""

    def next_turn(self) -> None:
        """End this turn and wait for the next."""

    def buffers_written(self) -> None:
        """Hear that the forward pass wrote into buffers of the module."""


class StackRun:
    """One microbatch in a stack.

    Args:
        taker: Gives the stages and their workers, turn by turn.
        user: The user code around the stack: it knows where tensors are.
        stack: The blocks.
        partition: The stages.
        keep_boundaries: Whether BACKWARD stages will follow.
    """

    def __init__(
        self,
        taker: TurnTaker,
        *,
        user: UserCode,
        stack: BlockStack,
        partition: Partition,
        keep_boundaries: bool,
    ) -> None:
        self._taker = taker
        self._user = user
        self._stack = stack
        self._recomputes = keep_boundaries
        self._backward_stages = [
            stage for stage in partition.stages() if stage.kind is StageKind.BACKWARD
        ]
        self._starts = {s.blocks.start for s in self._backward_stages if keep_boundaries}
        self._calls: list[BlockCall] = []
        self._host: dict[Tensor, Tensor] = {}  # arguments from outside the blocks
        self._here: dict[Source, Tensor] = {}  # what the present stage has taken
        self._gradients: dict[Source, Tensor] = {}
        self._first_node: int | None = None  # number of the tail's first autograd node

    @property
    def finished(self) -> bool:
        """Whether all blocks have been called."""
        return len(self._calls) == len(self._stack.blocks)

    @property
    def is_held(self) -> bool:
        """Whether the user's code still has something to use the values of."""
        return any(value.is_held for call in self._calls for value in call.values)

    @property
    def roots(self) -> list[Tensor]:
        """The tensors outside the blocks that the stack hands gradients to."""
        arguments = (t for call in self._calls for t in call.arguments)
        cut = (source for source in self._here if isinstance(source, Tensor))
        return [tensor for tensor in dict.fromkeys([*arguments, *cut]) if tensor.requires_grad]

    def check_finished(self) -> None:
        """Raise if some blocks were not called.

        Raises:
            CaptureError: Naming the first of them.
        """
        check_finished(self._stack, num_called=len(self._calls))

    def close(self) -> None:
        """Break the circles of references, so that memory is free at once. Nothing works after."""
        for call in self._calls:
            for value in call.values:
                value.drop()
            call.values.clear()
        for table in (self._calls, self._here, self._host, self._gradients):
            table.clear()

    # ---------------------------------------------------------------------------------- forward

    def call(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a block that the user's code has called, and return what it is to get.

        Args:
            index: Number of the block.
            args: Positional arguments, with phantoms of what other blocks made.
            kwargs: Keyword arguments, likewise.

        Raises:
            CaptureError: If it is not this block's turn.
        """
        check_order(self._stack, index=index, num_called=len(self._calls))
        while index >= self._taker.stage.blocks.stop:
            self._next_forward_turn()
        if self._has_graph and self._recomputes and self._first_node is None:
            self._first_node = _next_node()
        if index in self._starts:
            self._keep_values()
        self._drop_unheld()
        call = BlockCall(args, kwargs, objects=self._recomputes)
        self._calls.append(call)
        with torch.set_grad_enabled(self._has_graph and torch.is_grad_enabled()):
            outcome = self._run_block(index, given=(args, kwargs))
        call.values = self._values_of(index, outcome)
        if self.finished or index + 1 == self._taker.stage.blocks.stop:
            self._end_forward_of_stage()
        if not self.finished:
            return outcome.handed_out(lambda slot, in_object: call.values[slot].phantom())
        phantoms = [value.phantom() for value in call.values]  # held, therefore kept
        self._go_to_fused_stage()
        if self._recomputes and self._first_node is None:
            self._first_node = _next_node()
        return outcome.handed_out(
            lambda slot, in_object: (
                phantoms[slot] if in_object else self._for_user(call.values[slot])
            )
        )

    @property
    def _has_graph(self) -> bool:
        return self._taker.stage.kind is not StageKind.FORWARD

    def _go_to_fused_stage(self) -> None:
        while self._taker.stage.kind is StageKind.FORWARD:
            self._next_forward_turn()
        self._forget_unused()

    def _next_forward_turn(self) -> None:
        self._keep_values()
        for call in self._calls:
            for value in call.values:
                value.here = None
        self._here.clear()
        if self._user.write_buffers_back():
            self._taker.buffers_written()
        self._taker.next_turn()

    def _end_forward_of_stage(self) -> None:
        worker, stage = self._taker.worker, self._taker.stage
        if stage.blocks:
            worker.count_bytes(self._boundary_bytes())
            if worker.resident(stage).end_forward():
                self._taker.buffers_written()

    def _keep_values(self) -> None:
        """Bring to the host what later blocks or the user's code may take."""
        device = self._taker.worker.device
        for call in self._calls:
            for value in call.values:
                if value.here is not None and value.host is None and value.is_held:
                    value.host = device.download(value.here)

    def _drop_unheld(self) -> None:
        """Free what nobody can take any more in the present stage."""
        if not self._has_graph:
            for call in self._calls:
                for value in call.values:
                    if not value.is_held:
                        value.here = None

    def _forget_unused(self) -> None:
        """Drop what neither a recompute nor the user's code will take."""
        needed: set[Value] = set()
        for stage in self._backward_stages if self._recomputes else ():
            for index in stage.blocks:
                needed.update(v for v in self._calls[index].inputs if v.block < stage.blocks.start)
        for call in self._calls:
            for value in call.values:
                if value not in needed and not value.is_held:
                    value.host = None

    def _values_of(self, index: int, outcome: Outcome) -> list[Value]:
        block, call = self._stack.blocks[index], self._calls[index]
        wanted = self._recomputes and (
            any(p.requires_grad for p in block.parameters())
            or any(t.requires_grad for t in call.arguments)
            or any(v.needs_gradient for v in call.inputs)
        )
        return [
            Value(
                self,
                block=index,
                block_name=self._stack.names[index],
                tensor=tensor,
                needs_gradient=wanted and (tensor.is_floating_point() or tensor.is_complex()),
                in_object=in_object,
            )
            for tensor, in_object in outcome.tensors
        ]

    def real(self, value: Value) -> Tensor | None:
        """Return what the user's code gets for a value; None while blocks are to come.

        Raises:
            CaptureError: If the value was put into an object.
        """
        self._refuse_object(value)
        if value.here is None and value.host is None:
            raise CaptureError(
                f"An output of block {value.block_name!r} is used after its step has ended. Keep "
                "a detached copy (`x.detach()`) instead."
            )
        if not self.finished:
            return None
        with self._user.suspended():
            return self._for_user(value)

    def detached(self, value: Value) -> Tensor | None:
        """Return a value without a graph; None if it has been dropped.

        Raises:
            CaptureError: If the value was put into an object.
        """
        self._refuse_object(value)
        if value.here is not None:
            return value.here.detach()
        return None if value.host is None else self._taker.worker.device.upload(value.host)

    def cut(self, tensor: Tensor) -> Tensor:
        """Return what the tail segment uses for a phantom, or a tensor made before it: a leaf.

        So the graph of the loss ends there, and runs backward before the stages do. What was made
        before goes backward once, when all its gradients are there, as in one plain backward.
        """
        if isinstance(tensor, Phantom):
            value: Value = tensor.value
            real = self.real(value) if torch.is_grad_enabled() else self.detached(value)
            return tensor if real is None else real
        node = tensor.grad_fn
        if (
            node is None
            or not torch.is_grad_enabled()
            or self._first_node is None
            or node._sequence_nr() >= self._first_node  # noqa: SLF001
        ):
            return tensor
        return self._take(tensor)

    def _refuse_object(self, value: Value) -> None:
        if value.in_object:
            raise CaptureError(
                f"A tensor that block {value.block_name!r} has put into an object (a cache, say) "
                "is used by another block or after the blocks: its gradient would be lost. In "
                "training do without the object (`use_cache=False` for transformers models)."
            )

    def _for_user(self, value: Value) -> Tensor:
        tensor = self._take(value)
        # User code may write into a block's output: a leaf would refuse, and others read it.
        return tensor.clone() if tensor.is_leaf else tensor

    # --------------------------------------------------------------------------- running a block

    def _run_block(self, index: int, *, given: tuple[Any, Any] | None) -> Outcome:
        """Run a block on what the user's code has given it, or None: once more on the same."""
        call, name = self._calls[index], self._stack.names[index]
        resident = self._taker.worker.resident(self._taker.stage)
        block = resident.block(index)

        def watched(taken: Sequence[Tensor]) -> AbstractContextManager[None]:
            return self._user.side_outputs.block(index, self._watch, taken)

        if given is not None:
            call.writes = self._user.writes.within(self._stack.blocks[index])
        with self._user.in_block(index, resident), resident.written(call.writes):
            if given is None:
                outcome = call.run_again(
                    block, self._take_argument, watched=watched, block_name=name
                )
            else:
                outcome = call.run(
                    block, self._take_argument, given=given, watched=watched, block_name=name
                )
        for module, attribute, value in resident.take_writes():
            # This microbatch's user code reads the attributes that its block has written.
            put(self._user.maker.view_of(module), attribute, value)
            self._user.writes.renew(module, attribute, value)
        return outcome

    @property
    def _watch(self) -> Watch:
        kind = self._taker.stage.kind
        if not self._recomputes or kind is StageKind.FUSED:
            return Watch.NOTHING
        return Watch.MARK if kind is StageKind.FORWARD else Watch.FIND

    def _take_argument(self, source: Source, in_object: bool) -> Tensor:  # noqa: FBT001 - a `Swap`
        value = source.value if isinstance(source, Phantom) else source
        if in_object and isinstance(value, Value) and value.in_object:
            return value.phantom()
        return self._take(value)

    def _take(self, source: Source) -> Tensor:
        """Return a value or an argument on the present worker, as a leaf if it needs a gradient."""
        if isinstance(source, Value) and source.here is not None:
            return source.here
        if source not in self._here:
            host, wanted = self._on_host(source)
            leaf = self._taker.worker.device.upload(host)
            self._here[source] = leaf.requires_grad_(self._has_graph and wanted)
        return self._here[source]

    def _on_host(self, source: Source) -> tuple[Tensor, bool]:
        """Return the values on the host, and whether a gradient is wanted."""
        if isinstance(source, Value):
            assert source.host is not None, "kept when its stage ended"
            return source.host, source.needs_gradient
        if source not in self._host:
            self._host[source] = self._user.owner_of(source).download(source)
        return self._host[source], self._recomputes and source.requires_grad

    # --------------------------------------------------------------------------------- backward

    def backward(self) -> None:
        """Run the BACKWARD stages and the head's backward; the loss's has reached the leaves."""
        self._end_stage()
        for stage in self._backward_stages:
            self._taker.next_turn()
            assert self._taker.stage == stage, "the turns of a microbatch follow the stages"
            self._run_backward(stage)
            self._end_stage()
            for call in self._calls[stage.blocks.start :]:
                for value in call.values:
                    value.host = None  # nothing below takes it
        self._backward_into_head()

    def _run_backward(self, stage: Stage) -> None:
        made = [value for index in stage.blocks for value in self._calls[index].values]
        side_outputs = self._user.side_outputs
        if not (any(v in self._gradients for v in made) or side_outputs.used_of(stage.blocks)):
            return
        with torch.enable_grad():
            for index in stage.blocks:
                outcome = self._run_block(index, given=None)
                for value, (tensor, _) in zip(
                    self._calls[index].values, outcome.tensors, strict=True
                ):
                    value.here = tensor
        self._taker.worker.count_bytes(self._boundary_bytes())
        # A gradient found before goes first: sums then have the order of one plain backward.
        tensors: dict[Source, Tensor | None] = {**{v: v.here for v in made}, **self._here}
        roots = [
            (tensor, self._gradients.pop(source))
            for source, tensor in tensors.items()
            if source in self._gradients and tensor is not None and tensor.requires_grad
        ]
        found = side_outputs.take_found()
        roots += [(tensor, self._user.owner_of(g).download(g)) for tensor, g in found]
        if not roots:
            return
        device = self._taker.worker.device
        with self._user.in_backward():
            torch.autograd.backward(
                [tensor for tensor, _ in roots], [device.upload(g) for _, g in roots]
            )

    def _end_stage(self) -> None:
        """Fetch the gradients of what the stage has taken."""
        for source, leaf in self._here.items():
            if leaf.grad is not None:
                self._gradients[source] = self._taker.worker.device.download(leaf.grad)
        self._here.clear()
        for call in self._calls:
            for value in call.values:
                value.here = None

    def _boundary_bytes(self) -> int:
        return sum(value.host_bytes for call in self._calls for value in call.values)

    def _backward_into_head(self) -> None:
        found = [(t, g) for t, g in self._gradients.items() if isinstance(t, Tensor)]
        if found:
            roots = [tensor for tensor, _ in found]
            gradients = [self._user.owner_of(t).upload(g) for t, g in found]
            with self._user.in_backward():
                torch.autograd.backward(roots, gradients)


def _next_node() -> int:
    """Return a number that is above those of all of this thread's autograd nodes."""
    with torch.enable_grad():
        node = torch.zeros((), requires_grad=True).clone().grad_fn
    assert node is not None, "the clone of a tensor that requires a gradient has one"
    return node._sequence_nr()  # noqa: SLF001
