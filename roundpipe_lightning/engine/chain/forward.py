"""One microbatch's way through the chain, forward: every call of a block, planned or not.

```
entry ─▶ [F0] ─ boundary ─▶ [F1] ─ boundary ─▶ [X0: last blocks] ─▶ output, to the user's code
            keeps what flows into the blocks that begin a recompute
```

What flows is any number of values: tensors that blocks made and that later blocks or the user's
code take, from turn to turn through the host. A call that comes when the chain has it next, or
later, runs in its stage. Any other is *streamed*: the worker whose turn it is uploads that one
block, runs it without a graph and drops it. `chain_backward.py` tells the way back.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from roundpipe_lightning.engine.capture.placeholder import Phantom
from roundpipe_lightning.engine.chain.block_runner import BlockRunner
from roundpipe_lightning.engine.chain.chain import BlockStack, Chain, Link, following_blocks
from roundpipe_lightning.engine.chain.segments import Segments, Source, reachable_leaves
from roundpipe_lightning.engine.chain.tensor_routes import Sources, Turn
from roundpipe_lightning.engine.chain.values import BlockCall, CallPlace, Outcome, Value
from roundpipe_lightning.engine.transfer.gradient_reduce import Gradients
from roundpipe_lightning.engine.worker.loaded_blocks import ResidentBlocks
from roundpipe_lightning.engine.worker.user_code import UserCode
from roundpipe_lightning.errors import CaptureError
from roundpipe_lightning.planning.schedule.stages import Partition, Stage, StageKind

_OTHERS = (
    "Block {!r} made a tensor that {} gets by another way than its arguments (a closure, a global "
    "or an attribute): its gradient would be lost. Hand it to the block as an argument."
)


class TurnTaker(Turn, Protocol):
    """Who owns a worker's turn and can pass it on."""

    @property
    def stage(self) -> Stage:
        """The stage whose turn it is."""

    def next_turn(self) -> None:
        """End this turn and wait for the next."""

    def buffers_written(self, *, repeated: str | None = None) -> None:
        """Hear that the forward pass wrote into buffers, of a block that ran before, perhaps."""

    def add_gradients(self, gradients: Gradients) -> None:
        """Take gradients of parameters that no stage has."""


class ChainRun:
    """One microbatch in the chain.

    Args:
        taker: Gives the stages and their workers, turn by turn.
        user: The user code around the blocks: it knows where tensors are.
        stacks: All blocks.
        chain: The calls that are planned.
        partition: Their stages.
        backward: Whether a backward pass will follow.
        runner: Runs the blocks.

    Attributes:
        calls: The calls so far.
        segments: The user's code between them.
        sources: Tensors on their way.
    """

    def __init__(
        self,
        taker: TurnTaker,
        *,
        user: UserCode,
        stacks: Sequence[BlockStack],
        chain: Chain,
        partition: Partition,
        backward: bool,
        runner: BlockRunner,
    ) -> None:
        self.taker = taker
        self.user = user
        self.runner = runner
        self.calls: list[BlockCall] = []
        self.segments = Segments()
        self.sources = Sources(user, taker)
        self._names: Mapping[nn.Module, str] = {
            b: n for s in stacks for b, n in zip(s.blocks, s.names, strict=True)
        }
        self._following = following_blocks(stacks)
        self._thread = threading.get_ident()
        self._chain = chain
        self._backward = backward
        self._starts = {s.blocks.start for s in partition.stages() if s.kind is StageKind.BACKWARD}
        self._position = 0
        self._stage: Stage | None = None  # the last one that a call was in, and its blocks
        self._blocks: tuple[nn.Module, ...] = ()
        self._glue = False
        self._here: dict[Source, Tensor] = {}  # what the present FORWARD turn has taken
        self._live: list[Value] = []  # values that may be on the present worker
        self._ran: set[nn.Module] = set()  # blocks, in turns that have ended
        self._running: list[nn.Module] = []  # and in the present one

    # ----------------------------------------------------------------------------------- calls

    def call(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a block that the user's code has called, and return what it is to get.

        Args:
            block: The block.
            args: Positional arguments, with phantoms of what other blocks made.
            kwargs: Keyword arguments, likewise.
        """
        place = self._place(block)
        self._drop_unheld()
        call = BlockCall(place, args, kwargs, self.user.writes.within(block))
        call.begins_group = self._begins_group(call)
        self.runner.prepare(call)
        if call.begins_group:
            self._keep_values()
        self.calls.append(call)
        self._running.append(block)
        self.segments.last.is_closed |= call.wanted and place.segment is None
        with torch.set_grad_enabled(place.segment is not None):
            outcome = self._run_forward(call, (args, kwargs))
        call.values = [self._value(call, *made) for made in outcome.tensors]
        self._live += call.values
        if place.position is not None and place.position + 1 == self.taker.stage.blocks.stop:
            self._end_forward()
        if not self._ends_pass(place):
            return outcome.handed_out(lambda slot, in_object: call.values[slot].phantom())
        phantoms = [value.phantom() for value in call.values]  # held, therefore kept
        self._end_pass(call)
        return outcome.handed_out(
            lambda slot, in_object: (
                phantoms[slot] if in_object else self._for_user(call.values[slot])
            )
        )

    def _place(self, block: nn.Module) -> CallPlace:
        """Go to the turn of a call, and say which it is."""
        gradient = self._backward and torch.is_grad_enabled()
        position = self._chain.find(
            block, gradient=gradient if self._backward else None, start=self._position
        )
        if position is not None:
            while position >= self.taker.stage.blocks.stop and self._in_forward_stage:
                self._next_turn()
            self._position = position + 1
        in_graph = gradient and position is not None and not self._in_forward_stage
        if in_graph and (self.segments.last.is_closed or not self.segments.last.is_fused):
            self._open_segment()
        last = self.calls[-1].place.block if self.calls else None
        cut = (
            self._glue
            or (last is not None and self._following.get(last) is not block)
            or (position is not None and self._chain.links[position].cut)
        )
        self._glue = False
        return CallPlace(
            number=len(self.calls),
            block=block,
            name=self._names[block],
            position=position,
            gradient=gradient,
            segment=self.segments.number if in_graph else None,
            cut=cut,
        )

    def _open_segment(self) -> None:
        self.segments.open(num_calls=len(self.calls), is_fused=not self._in_forward_stage)

    @property
    def _in_forward_stage(self) -> bool:
        return self.taker.stage.kind is StageKind.FORWARD

    def _begins_group(self, call: BlockCall) -> bool:
        if not call.wanted or call.place.segment is not None:
            return False
        position, number = call.place.position, call.place.number
        before = self.calls[-1] if self.calls else None
        return (
            position is None
            or position in self._starts
            or self.segments.last.start == number
            or before is None
            or not before.wanted
            or before.place.position != position - 1
        )

    def _ends_pass(self, place: CallPlace) -> bool:
        if place.position is None:
            return place.block not in self._following
        return self._chain.ends_pass(place.position)

    def _end_pass(self, call: BlockCall) -> None:
        """Go to where the user's code goes on, with a segment of its own."""
        self._end_forward()
        position = call.place.position
        if position is not None and position + 1 == len(self._chain):
            self.go_to_fused_stage()
        elif position is not None and position + 1 == self.taker.stage.blocks.stop:
            self._next_turn()
        if self.segments.last.is_closed:
            self._open_segment()

    # ----------------------------------------------------------------------------------- turns

    def go_to_fused_stage(self) -> None:
        """Pass the FORWARD turns that are left."""
        while self._in_forward_stage:
            self._next_turn()
        self._forget_unused()

    def _next_turn(self) -> None:
        self._end_forward()
        self._keep_values()
        for value in self._live:
            value.here = None
        self._live.clear()
        self._here.clear()
        self._ran.update(self._running)
        self._running.clear()
        if self.user.write_buffers_back():
            self.taker.buffers_written()
        last = self.calls[-1].values if self.calls else ()
        self.sources.send_ahead([value.host for value in last if value.host is not None])
        self.taker.next_turn()

    def _end_forward(self) -> None:
        worker, stage = self.taker.worker, self.taker.stage
        worker.count_bytes(self.boundary_bytes())
        if worker.end_forward(stage):
            self._buffers_written()

    def _buffers_written(self) -> None:
        again = next((b for b in self._running if b in self._ran), None)
        self.taker.buffers_written(repeated=None if again is None else self._names[again])

    def end_user_code(self) -> None:
        """Do what is left when the user's code has returned."""
        self._end_forward()
        self.go_to_fused_stage()

    def drop_turn(self) -> None:
        """Drop what the last forward turn has beside the segments' graphs."""
        for value in self._live:
            if value.segment is None:
                value.here = None
        self._live.clear()
        self._here.clear()

    # ---------------------------------------------------------------------------------- values

    def _value(self, call: BlockCall, tensor: Tensor, in_object: bool) -> Value:  # noqa: FBT001
        place = call.place
        return Value(
            self,
            call=place.number,
            block_name=place.name,
            tensor=tensor,
            needs_gradient=call.wanted and (tensor.is_floating_point() or tensor.is_complex()),
            in_object=in_object,
            segment=place.segment,
        )

    def _keep_values(self) -> None:
        """Put on its way what later turns, a recompute or the user's code may take."""
        for value in self._live:
            if value.here is not None and value.host is None and value.is_held:
                value.host = self.sources.pack(value.here)

    def _drop_unheld(self) -> None:
        """Free what nobody can take any more in the present turn."""
        if self._live:
            for value in self._live:
                if value.segment is None and not value.is_held:
                    value.here = None
            self._live = [value for value in self._live if value.here is not None]

    def _forget_unused(self) -> None:
        """Drop what neither a recompute nor the user's code will take."""
        needed: set[Value] = set()
        start = 0
        for call in self.calls:
            start = call.place.number if call.begins_group else start
            needed.update(value for value in call.inputs if value.call < start)
        for call in self.calls:
            for value in call.values:
                if value not in needed and not value.is_held:
                    value.host = None

    def real(self, value: Value) -> Tensor:
        """Return what the user's code computes with in place of a value.

        Where it needs a gradient, the blocks before it and those after it are recomputed apart.

        Raises:
            CaptureError: If the value was put into an object, or its step has ended.
        """
        self._check_use(value)
        if value.needs_gradient:
            self._glue = True
            if value.segment is None and value.call >= self.segments.last.start:
                self._open_segment()
        with self.user.suspended():
            return self._for_user(value)

    def side_output_used(self, call: int) -> None:
        """Let the code that uses a side output be a segment after the call that has left it.

        That segment then runs backward before the call is recomputed, as for an output.
        """
        self._glue = True
        if self.calls[call].place.segment is None and call >= self.segments.last.start:
            with self.user.suspended():
                self._open_segment()

    def detached(self, value: Value) -> Tensor:
        """Return a value without a graph.

        Raises:
            CaptureError: If the value was put into an object, or its step has ended.
        """
        self._check_use(value)
        with self.user.suspended():
            return self.sources.here(value)

    def _check_use(self, value: Value) -> None:
        if value.in_object:
            raise CaptureError(
                f"A tensor that block {value.block_name!r} has put into an object (a cache, say) "
                "is used by another block or after the blocks: its gradient would be lost. In "
                "training do without the object (`use_cache=False` for transformers models)."
            )
        if self._thread != threading.get_ident() or self.user.runs_a_block:
            reader = f"block {self.calls[-1].place.name!r}"
            if not self.user.runs_a_block:
                reader = "another microbatch"
            raise CaptureError(_OTHERS.format(value.block_name, reader))
        if value.here is None and value.host is None:
            raise CaptureError(
                f"An output of block {value.block_name!r} is used after its step has ended. Keep "
                "a detached copy (`x.detach()`) instead."
            )

    def cut(self, tensor: Tensor) -> Tensor:
        """Return what a segment uses for a phantom, or for a tensor of an earlier segment: a leaf.

        So the graph of the segment ends there. What was made before goes backward once, when all
        its gradients are there, as in one plain backward.
        """
        if isinstance(tensor, Phantom):
            value: Value = tensor.value
            return value.real() if torch.is_grad_enabled() else value.detached()
        if not torch.is_grad_enabled() or not self.segments.is_earlier(tensor):
            return tensor
        return self.sources.leaf(self.segments.last.leaves, tensor)

    def check_gradient(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """Refuse `torch.autograd.grad` where a part of the graph is in the blocks.

        Raises:
            CaptureError: If an input is not made by the code after the last block.
        """
        if self.segments.number == 0:
            return
        leaves = reachable_leaves(outputs)
        reached = any(
            leaf.requires_grad and torch.autograd.graph.get_gradient_edge(leaf).node in leaves
            for leaf in self.segments.last.leaves.values()
        )
        inside = all(t.grad_fn is not None and not self.segments.is_earlier(t) for t in inputs)
        if reached and not inside:
            raise CaptureError(
                "torch.autograd.grad(...) asks for a gradient through the blocks, which run "
                "backward only after the user's code: its graph ends at the last block. Ask for "
                "gradients of what was made after the blocks, or make the term part of the loss."
            )

    def _for_user(self, value: Value) -> Tensor:
        if value.segment == self.segments.number and value.here is not None:
            tensor = value.here
        elif self._backward:
            tensor = self.sources.leaf(self.segments.last.leaves, value)
        else:
            tensor = self.sources.here(value)
        # User code may write into a block's output: a leaf would refuse, and others read it.
        return tensor.clone() if tensor.is_leaf else tensor

    # --------------------------------------------------------------------------- running blocks

    def _run_forward(self, call: BlockCall, given: tuple[Any, Any]) -> Outcome:
        place = call.place
        leaves = self._here if place.segment is None else self.segments.last.leaves

        def take(source: Source, in_object: bool) -> Tensor:  # noqa: FBT001 - a `Swap`
            value = source.value if isinstance(source, Phantom) else source
            if isinstance(value, Value):
                if in_object and value.in_object:
                    return value.phantom()
                if value.owner is not self:
                    raise CaptureError(_OTHERS.format(value.block_name, "another microbatch"))
                if value.here is not None and value.segment == place.segment:
                    return value.here
            elif place.segment is not None and self._is_of_segment(value):
                return value
            if place.segment is not None:
                return self.sources.leaf(leaves, value)
            if value not in leaves:
                leaves[value] = self.sources.here(value, repeats=call.wanted)
            return leaves[value]

        with self._blocks_of(place) as resident:
            outcome = self.runner.run(call, resident, take=take, given=given)
            if place.position is None:
                self._end_streamed(call, resident)
        return outcome

    def _is_of_segment(self, tensor: Tensor) -> bool:
        """Say whether a tensor is part of the graph of the FUSED stage."""
        return tensor.grad_fn is not None and not self.segments.is_earlier(tensor)

    def _blocks_of(self, place: CallPlace) -> AbstractContextManager[ResidentBlocks]:
        worker, stage = self.taker.worker, self.taker.stage
        if place.position is None:
            return worker.streamed(place.block, StageKind.FORWARD)
        if self._stage is not stage:
            links = self._chain.links[stage.blocks.start : stage.blocks.stop]
            self._stage, self._blocks = stage, tuple(link.block for link in links)
        return nullcontext(worker.resident(stage, self._blocks))

    def _end_streamed(self, call: BlockCall, resident: ResidentBlocks) -> None:
        if resident.end_forward():
            self._buffers_written()
        if call.wanted:
            self.user.note_streamed(call.place.block)

    # -------------------------------------------------------------------------------- the whole

    def boundary_bytes(self) -> int:
        """Bytes of the values on the host, and of what recomputes do not run again."""
        kept = sum(call.kept.num_bytes for call in self.calls if call.kept is not None)
        return kept + sum(value.host_bytes for call in self.calls for value in call.values)

    def links(self) -> list[Link]:
        """Return the calls as links of a chain."""
        return [
            Link(
                block=call.place.block,
                name=call.place.name,
                cut=call.place.cut,
                gradient=call.place.gradient,
                backward=call.wanted,
            )
            for call in self.calls
        ]

    def close(self) -> None:
        """Break the circles of references, so that memory is free at once. Nothing works after."""
        self.runner.note_side_outputs(self.calls)
        for call in self.calls:
            for value in call.values:
                value.drop()
            call.values.clear()
            call.kept = None
        for thing in (self.calls, self._here, self._live, self.segments, self.sources):
            thing.clear()
