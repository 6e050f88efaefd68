"""One microbatch's way through the chain, forward: every call of a block, planned or not.

Steps M4 and M7 of docs/design.md. What flows is any number of values: tensors that blocks made and
that later blocks or the user's code take, from turn to turn through the host. A call that comes
when the chain has it next, or later, runs in its stage. Any other is *streamed*: the worker whose
turn it is uploads that one block, runs it without a graph and drops it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from roundpipe_lightning.engine.capture.compiled import BlockCompiler
from roundpipe_lightning.engine.capture.placeholder import Form, LazyTensor
from roundpipe_lightning.engine.capture.side_outputs import Watch
from roundpipe_lightning.engine.capture.torch_functions import (
    is_called_from,
    saved_tensor_hooks_away,
)
from roundpipe_lightning.engine.capture.trees import Swap, tensors_in
from roundpipe_lightning.engine.capture.view import put
from roundpipe_lightning.engine.chain.chain import BlockStack, Chain, Link, following_blocks
from roundpipe_lightning.engine.chain.joined import PostedCall
from roundpipe_lightning.engine.chain.saved_outputs import KeptOutputs
from roundpipe_lightning.engine.chain.segments import USED_ELSEWHERE, Segments
from roundpipe_lightning.engine.chain.values import (
    BlockCall,
    Given,
    Outcome,
    Source,
    Sources,
    Value,
)
from roundpipe_lightning.engine.worker.loaded_blocks import ResidentBlocks
from roundpipe_lightning.engine.worker.turns import MicrobatchTurns
from roundpipe_lightning.engine.worker.user_code import UserCode
from roundpipe_lightning.errors import CaptureError
from roundpipe_lightning.planning.schedule.stages import Stage, StageKind, operations_kept

_CHECKPOINTED = (
    "Activation checkpointing runs block {!r} and code around it again, or runs it without a graph "
    "(use_reentrant=True). Turn it off, or checkpoint single blocks with use_reentrant=False: the "
    "engine recomputes blocks already."
)


@dataclass(eq=False)
class ForwardPass:
    """One microbatch's calls of blocks. Made in the microbatch's thread."""

    turns: MicrobatchTurns
    _: KW_ONLY
    user: UserCode  # the user code around the blocks: it knows where tensors are
    stacks: Sequence[BlockStack]
    chain: Chain
    backward: bool
    compiler: BlockCompiler | None  # compiles blocks; None: they run as they are
    # whether recomputes are compared with their forward pass on devices, too, which then wait;
    # where workers compute in host memory they always are
    checks: bool = False

    def __post_init__(self) -> None:
        self.calls: list[BlockCall] = []
        self.sources = Sources(self.user, self.turns)
        self.segments = Segments(
            self.calls,
            user=self.user,
            turns=self.turns,
            sources=self.sources,
            backward=self.backward,
        )
        self.user.before_read = self._end_forward
        self.user.used_by = self._used_by
        self.user.check_gradients = self.segments.check_gradients
        self.user.side_outputs.on_use = self.segments.side_output_used
        self._names = {b: n for s in self.stacks for b, n in zip(s.blocks, s.names, strict=True)}
        self._following = following_blocks(self.stacks)
        self._kept_operations = operations_kept(self.turns.plan.recompute)
        stages = self.turns.plan.partition.stages()
        self._starts = {s.blocks.start for s in stages if s.kind is StageKind.BACKWARD}
        self._has_ended = False  # whether the user's code has
        self._has_run = False  # whether a block has since the last look at what blocks write
        self._position = 0
        self._stage: Stage | None = None  # the last one that a call was in, and its blocks
        self._blocks: tuple[nn.Module, ...] = ()
        self._here: dict[Source, Tensor] = {}  # what the present FORWARD turn has taken
        self._live: list[Value] = []  # values that may be on the present worker
        self._posted: PostedCall | None = None  # the call that is made, if all pieces make it

    def call_block(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a block that the user's code has called, and return the code's result.

        Among the arguments lazy tensors stand for what other blocks made.
        """
        self.turns.check_not_aborted()
        is_off = self.backward and not torch.is_grad_enabled()
        if self._has_ended or (is_off and is_called_from("torch.utils.checkpoint")):
            raise CaptureError(_CHECKPOINTED.format(self._names[block]))
        # The engine recomputes the block: what the user's checkpointing would have is not needed.
        self.user.check_call(block, self._names[block])
        with self.user.suspended(), saved_tensor_hooks_away():
            return self._call(block, self.segments.as_written((args, kwargs)))

    def _used_by(self, parameter: nn.Parameter) -> str:
        wanted = (call for call in self.calls if call.wanted)
        found = (c.name for c in wanted if any(p is parameter for p in c.block.parameters()))
        return next(found, "")

    def _call(self, block: nn.Module, given: Given) -> Any:
        self.user.cut = self.segments.cut  # from the first block on
        position = self._prepare(block, given, self._go_to(block))
        call = self._new_call(block, given, position)
        self.calls.append(call)
        self.segments.last.is_closed |= call.is_recomputed
        with torch.set_grad_enabled(call.segment is not None):
            outcome = self._run_forward(call, given)
        call.values = [
            Value(self.segments, call, tensor, form=Form.of(tensor), in_object=in_object)
            for tensor, in_object in outcome.tensors
        ]
        self._live += call.values
        if call.position is not None and call.position + 1 == self.turns.stage.blocks.stop:
            self._end_forward()
        return self._handed_out(call, outcome)

    def _handed_out(self, call: BlockCall, outcome: Outcome) -> Any:
        """Return what the user's code gets, in the turn where that goes on."""
        if not self._ends_pass(call):
            return outcome.handed_out(lambda slot, in_object: call.values[slot].lazy())
        lazy = [value.lazy() for value in call.values]  # held, therefore kept
        self._end_pass(call)
        return outcome.handed_out(
            lambda slot, in_object: (
                lazy[slot] if in_object else self.segments.for_user(call.values[slot])
            )
        )

    def source_of(self, given: Tensor | Value) -> Source:
        if not isinstance(given, LazyTensor):
            return given
        value: Value = given.value
        return value

    def _go_to(self, block: nn.Module) -> int | None:
        """Go to the turn of a call of a block, and return its position; None: it has none."""
        position = self._position_of(block)
        if position is not None:
            while position >= self.turns.stage.blocks.stop and self.turns.in_forward_stage:
                self.next_turn()
            self._position = position + 1
        self.turns.enter()
        return position if position in self.turns.stage.blocks else None

    def _position_of(self, block: nn.Module) -> int | None:
        gradient = self.backward and torch.is_grad_enabled()
        return self.chain.find(
            block, gradient=gradient if self.backward else None, start=self._position
        )

    def _prepare(
        self,
        block: nn.Module,  # noqa: ARG002 - for the driver of pieces
        given: Given,  # noqa: ARG002
        position: int | None,
    ) -> int | None:
        return position

    def _new_call(self, block: nn.Module, given: Given, position: int | None) -> BlockCall:
        gradient = self.backward and torch.is_grad_enabled()
        in_graph = gradient and position is not None and not self.turns.in_forward_stage
        if in_graph and (self.segments.last.is_closed or not self.segments.last.is_fused):
            self.segments.open_next()
        cut = (
            self.segments.code_ran
            or (bool(self.calls) and self._following.get(self.calls[-1].block) is not block)
            or (position is not None and self.chain.links[position].cut)
        )
        self.segments.code_ran = False
        if self._live:  # what nobody can take any more in the present turn is freed
            for value in self._live:
                if value.segment is None and not value.is_held:
                    value.here = None
            self._live = [value for value in self._live if value.here is not None]
        posted = self._posted
        call = BlockCall(
            block,
            given,
            name=self._names[block],
            number=len(self.calls),
            position=position,
            gradient=gradient,
            segment=self.segments.number if in_graph else None,
            cut=cut,
            writes=self.user.writes.within(block) if posted is None else posted.writes,
            source_of=self.source_of,
        )
        call.left = () if posted is None else posted.form.left
        if call.is_recomputed:
            if self._kept_operations:
                call.kept = KeptOutputs(self._kept_operations)
            before = self.calls[-1] if self.calls else None
            call.begins_group = (
                call.position is None
                or call.position in self._starts
                or self.segments.last.start == call.number
                or before is None
                or not before.wanted
                or before.position != call.position - 1
            )
        if call.begins_group:
            self._keep_values()
        return call

    def _ends_pass(self, call: BlockCall) -> bool:
        if call.position is None:
            return call.block not in self._following
        return self.chain.ends_pass(call.position)

    def _end_pass(self, call: BlockCall) -> None:
        self._end_forward()
        if call.position is not None and call.position + 1 == len(self.chain):
            self.go_to_fused_stage()
            self.turns.enter()
        elif call.position is not None and call.position + 1 == self.turns.stage.blocks.stop:
            self.next_turn()
        if self.segments.last.is_closed:
            self.segments.open_next()

    def go_to_fused_stage(self) -> None:
        while self.turns.in_forward_stage:
            self.leave_turn()
        needed: set[Value] = set()  # by a recompute; the user's code holds what it may take
        start = 0
        for call in self.calls:
            start = call.number if call.begins_group else start
            needed.update(value for value in call.inputs if value.call < start)
        for call in self.calls:
            for value in call.values:
                if value not in needed and not value.is_held:
                    value.forget_host()

    def next_turn(self) -> None:
        self.leave_turn()
        self.turns.enter()

    def leave_turn(self) -> None:
        """End the turn, and enter the next one when it is needed."""
        self._end_forward()
        self._keep_values()
        for value in self._live:
            value.here = None
        self._live.clear()
        self._here.clear()
        self.write_buffers_back()
        last = self.calls[-1].values if self.calls else ()
        self.sources.send_ahead([value.host for value in last if value.host is not None])
        self.turns.leave()

    def write_buffers_back(self) -> None:
        self.user.writes.were_any |= self.user.write_buffers_back()

    def _end_forward(self) -> None:
        # Without the turn another microbatch has the worker: it may run blocks there.
        if not (self._has_run and self.turns.is_active):
            return
        worker, self._has_run = self.turns.worker, False
        worker.count_bytes(self.boundary_bytes())
        self._note_written(worker.end_forward(self.turns.stage))

    def _note_written(self, wrote: bool) -> None:  # noqa: FBT001 - what `end_forward` returns
        if wrote:
            self.user.writes.were_any = True
            self.user.renew_buffers()

    def end_user_code(self) -> None:
        self._has_ended = True
        self._end_forward()
        self.go_to_fused_stage()
        self.turns.enter()

    def drop_turn(self) -> None:
        for value in self._live:
            if value.segment is None:
                value.here = None
        self._live.clear()
        self._here.clear()

    def _keep_values(self) -> None:
        """Put on its way what later turns, a recompute or the user's code may take."""
        for value in self._live:
            if value.here is not None and value.host is None and value.is_held:
                value.host = self.sources.pack(value.here)

    def _run_forward(self, call: BlockCall, given: Given) -> Outcome:
        leaves = self._here if call.segment is None else self.segments.last.leaves
        holds = self.turns.worker.device.holds

        def take(source: Source, in_object: bool) -> Tensor:  # noqa: FBT001 - a `Swap`
            value = self.source_of(source)
            if isinstance(value, Value):
                if in_object and value.in_object:
                    return value.lazy()
                if value.owner is not self.segments:
                    raise CaptureError(
                        USED_ELSEWHERE.format(value.block_name, "another microbatch")
                    )
                if value.here is not None and value.segment == call.segment:
                    return value.here
            elif (
                call.segment is not None
                and (
                    value.grad_fn is not None
                    or (self.segments.number == 0 and value.requires_grad and holds(value))
                )
                and not self.segments.is_earlier(value)
            ):
                return value  # part of the graph of the FUSED stage
            if call.segment is not None:
                return self.sources.leaf(leaves, value)
            if value not in leaves:
                leaves[value] = self.sources.here(value, repeats=call.wanted)
            return leaves[value]

        self._has_run = True
        with self._resident(call.block, call.position) as resident:
            outcome = self.run_block(call, resident, take=take, given=given)
            if call.position is None:
                self._note_written(resident.end_forward())
                if call.wanted:
                    self.user.streamed.update(call.block.parameters())
        return outcome

    def _resident(
        self, block: nn.Module, position: int | None
    ) -> AbstractContextManager[ResidentBlocks]:
        worker, stage = self.turns.worker, self.turns.stage
        if position is None:
            return worker.streamed(block, StageKind.FORWARD, refuses=self.user.refuses_writes)
        if self._stage is not stage:
            links = self.chain.links[stage.blocks.start : stage.blocks.stop]
            self._stage, self._blocks = stage, tuple(link.block for link in links)
        return nullcontext(worker.resident(stage, self._blocks, refuses=self.user.refuses_writes))

    def run_block(
        self, call: BlockCall, resident: ResidentBlocks, *, take: Swap, given: Given | None = None
    ) -> Outcome:
        """Run a block on what the user's code has given it, or None: once more on the same.

        `take` brings a tensor to where the block computes.
        """
        user, compiler, again = self.user, self.compiler, given is None

        def watched(taken: Sequence[Tensor]) -> AbstractContextManager[None]:
            watch = _watch(call, again=again)
            user.side_outputs.begin_block(call.number, watch, taken, name=call.name)
            return user.resumed()

        keepers = resident.store.keepers
        with (
            user.in_block(
                call.number, resident, gathers=not call.gradient or call.block in keepers
            ),
            resident.written(call.writes) if call.writes else nullcontext(),
            call.keeping(self.turns, resident, sources=self.sources, again=again)
            if call.is_recomputed
            else nullcontext(),
        ):
            block = resident.block(call.block)
            if compiler is not None:
                block = compiler.stand_in(
                    block, block=call.block, name=call.name, placed=resident, stream=user.stream
                )
            if given is None:
                outcome = call.run_again(resident, block, take, watched=watched)
            else:
                outcome = call.run_forward(resident, block, take, given=given, watched=watched)
            if compiler is not None and user.stream is not None and user.stream.num_draws:
                compiler.add_drawing(call.name)
            if compiler is not None and resident.assigns_buffers(call.block):
                compiler.exclude(call.name, "it assigns a buffer anew")
            if compiler is not None and resident.rounded.are_made_whole:
                compiler.exclude(call.name, "it uses a weight where autocast does not round it")
        device = self.turns.worker.device
        if self.checks or device.shares_host_memory:
            call.check(outcome, device)
        for module, attribute, value in resident.take_writes():
            if again:
                continue  # an echo
            keepers.update(call.block for _ in tensors_in(value))
            if (module, attribute) in call.left:
                user.writes.were_any = True
                continue
            # This microbatch's user code reads the attributes that its block has written.
            put(user.maker.view_of(module), attribute, value)
            user.writes.renew(module, attribute, value)
            if compiler is not None:
                compiler.exclude(call.name, f"it writes an attribute ({attribute})")
        return outcome

    def boundary_bytes(self) -> int:
        """Bytes of the values on the host, and of what recomputes do not run again."""
        kept = [call.kept for call in self.calls if call.kept is not None]
        sent = [v.host for call in self.calls for v in call.values if v.host is not None]
        return sum(each.num_bytes for each in (*kept, *sent))

    def links(self) -> list[Link]:
        return [
            Link(
                block=call.block,
                name=call.name,
                cut=call.cut,
                gradient=call.gradient,
                backward=call.wanted,
            )
            for call in self.calls
        ]

    def close(self) -> None:
        """Break the circles of references, so that memory is free at once. Nothing works after."""
        if self.compiler is not None:
            for number in self.user.side_outputs.calls_with_leaves:
                self.compiler.exclude(
                    self.calls[number].name, "a tensor that it leaves beside its output is used"
                )
        for call in self.calls:
            for value in call.values:
                value.drop()
            call.values.clear()
            call.kept = None
        self.calls.clear()
        self._here.clear()
        self._live.clear()
        self.segments.clear()
        self.sources.clear()


def _watch(call: BlockCall, *, again: bool) -> Watch:
    if not call.gradient:
        return Watch.UNWATCHED
    if call.segment is not None:
        return Watch.NOTHING
    return Watch.FIND if again else Watch.MARK
