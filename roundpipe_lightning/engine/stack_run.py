"""One pass of one microbatch through the stages of a stack, forward and backward.

```
entry ─▶ [F0] ─ boundary ─▶ [F1] ─ boundary ─▶ cut ─▶ [X0: last blocks] ─▶ output, to the user's
            code keeps the inputs of blocks that start a BACKWARD stage
head ◀─ gradient ◀─ [B2: recompute, backward] ◀─ gradient ◀─ [B1] ◀─ cut.grad ◀─ the user's loss
```

Boundaries and gradients between stages go through the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from roundpipe_lightning.engine.capture import BlockCall, ObjectCopies
from roundpipe_lightning.engine.gradients import fold
from roundpipe_lightning.engine.side_outputs import Watch
from roundpipe_lightning.engine.stack import BlockStack
from roundpipe_lightning.engine.user_code import UserCode
from roundpipe_lightning.engine.worker import ResidentStage, Worker
from roundpipe_lightning.errors import CaptureError
from roundpipe_lightning.planning.stages import Partition, Stage, StageKind


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


class StackRun:
    """One microbatch in a stack.

    Args:
        taker: Gives the stages and their workers, turn by turn.
        user: The user code around the stack: it knows where tensors are.
        stack: The blocks.
        partition: The stages.
        entry: What flows into block 0.
        calls: The blocks' arguments.
        keep_boundaries: Whether BACKWARD stages will follow.
    """

    def __init__(
        self,
        taker: TurnTaker,
        *,
        user: UserCode,
        stack: BlockStack,
        partition: Partition,
        entry: Tensor,
        calls: Sequence[BlockCall],
        keep_boundaries: bool,
    ) -> None:
        self._taker = taker
        self._user = user
        self._stack = stack
        self._calls = calls
        self._entry = entry
        self._inputs_to_keep = {
            stage.blocks.start
            for stage in partition.stages()
            if stage.kind is StageKind.BACKWARD and keep_boundaries
        }
        self._recomputes = keep_boundaries
        self._boundaries: dict[int, Tensor] = {}
        self._cut: Tensor | None = None
        self._host_arguments: dict[Tensor, Tensor] = {}
        self._leaves: dict[Tensor, Tensor] = {}
        self._argument_gradients: dict[Tensor, Tensor] = {}
        self._lowest = self._lowest_block_with_gradient()

    @property
    def roots(self) -> list[Tensor]:
        """The tensors of the head segment that the stack hands gradients to."""
        tensors = [self._entry, *(tensor for call in self._calls for tensor in call.tensors())]
        return [tensor for tensor in dict.fromkeys(tensors) if tensor.requires_grad]

    def _lowest_block_with_gradient(self) -> int:
        """Return the first block with something to differentiate; below it there is no backward."""
        if self._entry.requires_grad:
            return -1
        for index, block in enumerate(self._stack.blocks):
            arguments = self._calls[index].tensors()
            if any(t.requires_grad for t in (*block.parameters(), *arguments)):
                return index
        return len(self._stack.blocks)

    # ---------------------------------------------------------------------------------- forward

    def forward(self) -> Tensor:
        """Run the FORWARD stages and the fused blocks.

        Returns:
            The stack's output on the fused stage's worker. Its graph begins at the cut.
        """
        flowing = self._user.owner_of(self._entry).download(self._entry)
        while self._taker.stage.kind is StageKind.FORWARD:
            stage, device = self._taker.stage, self._taker.worker.device
            if stage.blocks.start in self._inputs_to_keep:
                self._inputs_to_keep.remove(stage.blocks.start)
                self._boundaries[stage.blocks.start] = flowing
            with torch.no_grad():
                result = self._run_blocks(stage, device.upload(flowing), self._argument)
            flowing = device.download(result)
            del result
            self._taker.next_turn()
        stage, device = self._taker.stage, self._taker.worker.device
        cut = device.upload(flowing)
        if torch.is_grad_enabled():
            self._cut = cut.requires_grad_(
                self._lowest < stage.blocks.start and cut.is_floating_point()
            )
            output = self._run_blocks(stage, cut, self._argument_leaf)
        else:
            output = self._run_blocks(stage, cut, self._argument)
        # A leaf would refuse in-place operations, which the user's code may apply to a block's
        # output.
        return output if stage.blocks else output.clone()

    def _run_blocks(
        self, stage: Stage, flowing: Tensor, argument: Callable[[Tensor], Tensor]
    ) -> Tensor:
        if not stage.blocks:
            return flowing
        worker = self._taker.worker
        resident = worker.resident(stage)
        copies = ObjectCopies(wanted=self._recomputes)
        for index in stage.blocks:
            if index in self._inputs_to_keep:
                self._inputs_to_keep.remove(index)
                self._boundaries[index] = worker.device.download(flowing)
            watched = self._user.side_outputs.block(index, self._watch(stage), flowing)
            with self._user.in_block(index):
                result = self._calls[index].run(
                    resident.block(index), flowing, swap=argument, copies=copies, watched=watched
                )
            if not isinstance(result, Tensor):
                raise CaptureError(
                    f"Block {self._stack.names[index]!r} returned a {type(result).__name__}, not a "
                    "tensor: only one tensor can flow through a stack. Return the tensor alone, or "
                    "name other blocks with RoundPipeStrategy(blocks=[...])."
                )
            flowing = result
            self._hand_over_writes(resident)
        worker.count_bytes(self._boundary_bytes())
        if stage.kind is not StageKind.BACKWARD:
            resident.end_forward()
        return flowing

    def _watch(self, stage: Stage) -> Watch:
        if not self._recomputes or stage.kind is StageKind.FUSED:
            return Watch.NOTHING
        return Watch.MARK if stage.kind is StageKind.FORWARD else Watch.FIND

    def _hand_over_writes(self, resident: ResidentStage) -> None:
        """Let this microbatch's user code read the attributes that its block has written."""
        for module, name, value in resident.take_writes():
            self._user.maker.view_of(module).__dict__[name] = value

    def _boundary_bytes(self) -> int:
        return sum(boundary.nbytes for boundary in self._boundaries.values())

    def _argument(self, tensor: Tensor) -> Tensor:
        """Return a block's extra argument here, without a graph."""
        if tensor not in self._host_arguments:
            self._host_arguments[tensor] = self._user.owner_of(tensor).download(tensor)
        return self._taker.worker.device.upload(self._host_arguments[tensor])

    def _argument_leaf(self, tensor: Tensor) -> Tensor:
        """Return a block's extra argument here, as a leaf of the stage if it needs a gradient."""
        if tensor not in self._leaves:
            self._leaves[tensor] = self._argument(tensor).requires_grad_(tensor.requires_grad)
        return self._leaves[tensor]

    # --------------------------------------------------------------------------------- backward

    def backward(self) -> None:
        """Run the BACKWARD stages and the head's backward; the loss's has reached the cut."""
        gradient = self._end_stage(self._cut)
        while self._boundaries:
            self._taker.next_turn()
            stage, device = self._taker.stage, self._taker.worker.device
            boundary = self._boundaries.pop(stage.blocks.start)
            wanted = gradient is not None or self._user.side_outputs.used_of(stage.blocks)
            if not wanted or stage.blocks.stop <= self._lowest:
                continue
            start = device.upload(boundary)
            del boundary
            start.requires_grad_(self._lowest < stage.blocks.start and start.is_floating_point())
            with torch.enable_grad():
                output = self._run_blocks(stage, start, self._argument_leaf)
            roots = [] if gradient is None else [(output, device.upload(gradient))]
            for tensor, of_leaf in self._user.side_outputs.take_found():
                roots.append(
                    (tensor, device.upload(self._user.owner_of(of_leaf).download(of_leaf)))
                )
            with self._user.in_backward():
                torch.autograd.backward([root for root, _ in roots], [g for _, g in roots])
            del output, roots
            gradient = self._end_stage(start)
        self._backward_into_head(gradient)

    def _end_stage(self, start: Tensor | None) -> Tensor | None:
        """Fetch the gradients of a stage's input, which is returned, and of its extra arguments."""
        for tensor, leaf in self._leaves.items():
            if leaf.grad is not None:
                host = self._taker.worker.device.download(leaf.grad)
                fold(self._argument_gradients, {tensor: host})
        self._leaves.clear()
        if start is None or start.grad is None:
            return None
        gradient, start.grad = start.grad, None
        return self._taker.worker.device.download(gradient)

    def _backward_into_head(self, gradient: Tensor | None) -> None:
        if gradient is not None:
            fold(self._argument_gradients, {self._entry: gradient})
        found = [(t, g) for t, g in self._argument_gradients.items() if t.requires_grad]
        if found:
            roots = [tensor for tensor, _ in found]
            gradients = [self._user.owner_of(t).upload(g) for t, g in found]
            with self._user.in_backward():
                torch.autograd.backward(roots, gradients)
