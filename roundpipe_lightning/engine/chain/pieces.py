"""The forward passes of a step whose user code runs once: the driver's, and the other pieces'.

```
driver    user code   F0: 0 1   F1: 2 3   X0: user code, loss
piece 1               F0: 0 1   F1: 2 3   X0: -
```

See `joined.py` for the values. A form says which dimension of every argument and output of a call
has the batch's rows. It is found when such a call is first made, by running the block on the rows
of the first piece, of the second, and of both. Where both together do not give what each gives by
itself, the rows are not independent, and the call runs on the whole batch.
"""

from __future__ import annotations

import threading
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextvars import copy_context
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from roundpipe_lightning.engine.capture.arguments import Copies
from roundpipe_lightning.engine.capture.autocast import autocast_as, autocast_now, variables_as
from roundpipe_lightning.engine.capture.module_writes import ModuleWrites
from roundpipe_lightning.engine.capture.placeholder import LazyTensor
from roundpipe_lightning.engine.capture.trees import tensors_in
from roundpipe_lightning.engine.chain.block_outcome import (
    Given,
    Outcome,
    run_block,
    works_in_place,
)
from roundpipe_lightning.engine.chain.forward import ForwardPass
from roundpipe_lightning.engine.chain.joined import (
    CallForm,
    JoinedValue,
    Left,
    PieceBoard,
    PostedCall,
    Shadow,
    Slices,
    piece_sizes,
)
from roundpipe_lightning.engine.chain.row_marks import RowMarks
from roundpipe_lightning.engine.chain.values import BlockCall, Source, Value
from roundpipe_lightning.engine.device.events import StepAborted
from roundpipe_lightning.engine.worker.loaded_blocks import ResidentBlocks
from roundpipe_lightning.errors import CaptureError
from roundpipe_lightning.planning.schedule.stages import StageKind

Key: TypeAlias = tuple[Any, ...]

BlockWrites: TypeAlias = Sequence[tuple[nn.Module, str, Any]]
"""Attributes that a block has written: module, name and value."""

_KEPT = (
    "Block {!r} puts tensors of the batch into a list, a closure or a global, which pieces of the "
    "batch would fill in any order, and again in a recompute. Let it return them or keep them as "
    "an attribute, or set num_microbatches=1."
)
_PLAIN = (bool, int, float, str, type(None))
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
_TOLERANCE = 5e-2  # of narrower types, relative to the largest value


class WholeBatchWarning(UserWarning):
    """A block does not treat the rows of a batch independently: it runs on the whole batch."""


class CallForms:
    """The forms of calls that have been seen, kept from step to step.

    Args:
        trusts_rows: Whether rows are taken to be independent without a look.
    """

    def __init__(self, *, trusts_rows: bool = False) -> None:
        self.trusts_rows = trusts_rows
        self.whole: dict[str, str] = {}  # blocks that run on the whole batch, and why
        self._known: dict[Key, CallForm | None] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._known

    def get(self, key: Key) -> CallForm | None:
        return self._known[key]

    def put(self, key: Key, form: CallForm | None, *, name: str, reason: str) -> None:
        self._known[key] = form
        if form is None and name not in self.whole:
            self.whole[name] = reason
            if len(self.whole) == 1:
                warnings.warn(
                    f"Block {name!r} runs on the whole batch, not on microbatches: {reason}. "
                    "Workers share a batch only where its rows are independent. "
                    "RoundPipeStrategy(trust_rows=True) splits it all the same.",
                    category=WholeBatchWarning,
                    stacklevel=2,
                )


class _Argument(NamedTuple):
    """A tensor among a call's arguments.

    Attributes:
        tensor: As the user's code gave it.
        joined: What it stands for, if pieces have made it.
        in_object: Whether it is inside an object.
    """

    tensor: Tensor
    joined: JoinedValue | None
    in_object: bool


class PieceForward(ForwardPass):
    """Replays the driver's calls on one piece of the batch. Arguments as of `ForwardPass`.

    Args:
        piece: Its number.
    """

    def __init__(self, *args: Any, piece: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._piece = piece
        self._numbers: list[int] = []  # of the driver's calls
        self._posted: PostedCall | None = None

    def replay(self, posted: PostedCall) -> None:
        """Run a call."""
        if not posted.sizes[self._piece]:
            return
        self._posted = posted
        if posted.begins_segment and self.segments.last.start != len(self.calls):
            self.segments.open_next()
        self._numbers.append(posted.number)
        with (
            torch.set_grad_enabled(posted.gradient),
            autocast_as(posted.autocast),
            variables_as(posted.variables),
        ):
            self._call(posted.block, posted.given_for(self._piece))
        posted.check_unwritten()
        for joined in posted.taken:
            joined.note_pending(-1, [self._piece])

    def _position_of(self, block: nn.Module) -> int | None:  # noqa: ARG002
        assert self._posted is not None, "a call is replayed"
        return self._posted.position

    def writes_within(self, block: nn.Module) -> ModuleWrites:  # noqa: ARG002
        assert self._posted is not None, "a call is replayed"
        return self._posted.writes

    def source_of(self, given: Tensor | Value) -> Source:
        return given if isinstance(given, Value) else super().source_of(given)

    def _handed_out(self, call: BlockCall, outcome: Outcome) -> None:  # noqa: ARG002
        assert self._posted is not None, "a call is replayed"
        self._posted.calls[self._piece] = call
        for joined, value in zip(self._posted.values, call.values, strict=True):
            joined.watch(value, piece=self._piece)

    def leave(self, left: Left) -> None:
        """Leave the turns that the driver has left."""
        turns = self.turns
        while turns.number <= left.number and not turns.is_last:
            if turns.in_forward_stage:
                self.leave_turn()
            else:
                turns.leave()

    def finish(self) -> None:
        """Go to the FUSED stage, without waiting for its turn."""
        self._go_to_fused_stage()

    def range_of(self, start: int, stop: int) -> tuple[int, int]:
        """Return the own numbers of a range of the driver's calls."""
        return bisect_left(self._numbers, start), bisect_left(self._numbers, stop)

    def _refuse_unordered_writes(self, *, repeated: str | None = None) -> None:  # noqa: ARG002
        self.user.writes.were_any = True


class DriverForward(ForwardPass):
    """Runs the user's calls on the first piece, and posts them. Arguments as of `ForwardPass`.

    Args:
        board: Where to.
        forms: What is known of calls.
    """

    def __init__(self, *args: Any, board: PieceBoard, forms: CallForms, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        board.forwards[0] = self
        self.board = board
        self.slices = Slices()
        self.posted: list[PostedCall] = []
        self._forms = forms
        self._posted: PostedCall | None = None  # the call that is made
        self._form: CallForm | None = None
        self._shadows: Sequence[Shadow] | None = None
        self._unknown: Callable[[], None] | None = None  # says that a call has no form
        self._sources: dict[int, Source] = {}  # what the first piece takes for a given tensor
        self._passed: set[int | None] = set()  # positions whose BACKWARD turn will have ended
        self._posted_here = False  # in the present turn
        self.turns.on_leave = self._post_left
        self.user.before_write = self._let_pieces_end
        self._thread_id = threading.get_ident()

    # ------------------------------------------------------------------------------- before a call

    def _prepare(self, block: nn.Module, given: Given, position: int | None) -> int | None:
        """Choose between pieces and the whole batch, and make the arguments ready."""
        arguments = _arguments_of(given)
        self._sources, self._posted, self._form = {}, None, None
        found = self._form_of(block, given, arguments, position)
        if found is None:
            for tensor, joined, in_object in arguments:
                if joined is not None and not (in_object and joined.in_object):
                    self._sources[id(tensor)] = joined.materialize()
            return self._in_turn(position)
        self._form, sizes = found

        def swap(tensor: Tensor, in_object: bool) -> Any:  # noqa: ARG001, FBT001 - a `Swap`
            joined = _joined_in(tensor)
            if joined is not None:
                self._sources[id(tensor)] = joined.part(0)
                joined.note_pending(1, [i for i, size in enumerate(sizes) if size and i])
                from_pieces.append(joined)
                return joined
            whole = self._whole(tensor)
            versions.append((whole, whole._version))
            cut = self.slices.of(whole, dims[id(tensor)], sizes)
            self._sources[id(tensor)] = cut.parts[0]
            return cut

        versions: list[tuple[Tensor, int]] = []
        from_pieces: list[JoinedValue] = []
        dims = {id(a.tensor): d for a, d in zip(arguments, self._form.arguments, strict=True)}
        taken = Copies(swap).copied(given)  # can begin a segment
        position = self._in_turn(position)
        self._posted = PostedCall(
            number=len(self.calls),
            position=position,
            block=block,
            name=self._names[block],
            given=taken,
            taken=from_pieces,
            sizes=sizes,
            versions=versions,
            gradient=torch.is_grad_enabled(),
            autocast=autocast_now(),
            variables=copy_context(),
            writes=self.writes_within(block),
            begins_segment=self.segments.last.start == len(self.calls),
        )
        return position

    def _in_turn(self, position: int | None) -> int | None:
        """Return a position, or None where it has no turn: here, or in the backward pass.

        Where a segment of user code begins in the middle of a BACKWARD stage, the pieces have left
        that stage's turn when they wait for the segment.
        """
        if self.segments.last.start == len(self.calls):
            planned = (c.position for c in reversed(self.calls) if c.position is not None)
            last = next(planned, None)
            for stage in self.turns.plan.partition.stages():
                if stage.kind is StageKind.BACKWARD and last in stage.blocks:
                    self._passed.update(range((last or 0) + 1, stage.blocks.stop))
        if position in self._passed or position not in self.turns.stage.blocks:
            return None
        return position

    def _whole(self, tensor: Tensor) -> Tensor:
        """Return what a value that the driver made alone stands for."""
        return tensor.value.materialize() if isinstance(tensor, LazyTensor) else tensor

    def source_of(self, given: Tensor | Value) -> Source:
        source = self._sources.get(id(given))
        if source is not None:
            return source
        return given if isinstance(given, Value) else super().source_of(given)

    def _form_of(
        self,
        block: nn.Module,
        given: Given,
        arguments: Sequence[_Argument],
        position: int | None,
    ) -> tuple[CallForm, Sequence[int]] | None:
        """Return the form of a call and the rows of every piece; None: it takes the whole batch."""
        if not self.turns.in_forward_stage or self.board.num_pieces == 1 or not arguments:
            return None
        name, forms = self._names[block], self._forms
        gradient = self._backward and torch.is_grad_enabled()
        if not gradient and _holds_objects(given):
            return None  # the block writes into the object itself, a cache say
        key = (name, gradient, *((a.tensor.dim(), a.tensor.dtype) for a in arguments))
        reason = _reason_against_pieces(block, self.user.writes.within(block))
        if reason:
            if key not in forms or forms.get(key) is not None:  # the hook can be a later one
                forms.put(key, None, name=name, reason=reason)
            return None
        if key in forms:
            form = forms.get(key)
            sizes = None if form is None else self._sizes(arguments, form.arguments)
            if form is None or sizes is not None:
                return None if form is None or sizes is None else (form, sizes)
        return self._tried(key, block, given, arguments, position)

    def _tried(
        self,
        key: Key,
        block: nn.Module,
        given: Given,
        arguments: Sequence[_Argument],
        position: int | None,
    ) -> tuple[CallForm, Sequence[int]] | None:
        """Find the form of a call on a few rows."""
        for tensor, joined, _ in arguments:  # what is looked at can end the turn
            if joined is None or joined.shadow is None:
                self._whole(tensor)
        if not self.turns.in_forward_stage:
            return None
        position, few, reason = self._in_turn(position), False, ""
        name, forms = self._names[block], self._forms
        for dims in _candidates(arguments):
            sizes = self._sizes(arguments, dims)
            if sizes is None:
                continue
            if sizes[1] < 1:
                few = True
                continue
            found = self._check(block, given, arguments, dims, sizes, position)
            if isinstance(found, str):
                reason = reason or found
                continue
            values, self._shadows = found
            form = CallForm(arguments=tuple(dims), values=values)
            forms.put(key, form, name=name, reason="")
            return form, sizes
        if not few:
            reason = reason or "no dimension of its arguments is the batch's"
            self._unknown = partial(forms.put, key, None, name=name, reason=reason)
        return None

    def _sizes(
        self, arguments: Sequence[_Argument], dims: Sequence[int | None]
    ) -> Sequence[int] | None:
        """Return the rows of every piece; None where the arguments do not agree about them."""
        sizes: Sequence[int] | None = None
        for (tensor, joined, _), dim in zip(arguments, dims, strict=True):
            if joined is not None and joined.dim is not None:
                own: Sequence[int] = joined.sizes
            elif joined is None and dim is not None:
                own = piece_sizes(tensor.shape[dim], self.board.num_pieces)
            else:
                continue
            if sizes is not None and list(sizes) != list(own):
                return None
            sizes = own
        return sizes

    # ------------------------------------------------------------------------------ after the call

    def _handed_out(self, call: BlockCall, outcome: Outcome) -> Any:
        posted, form = self._posted, self._form
        if self._unknown is not None:  # it runs on the whole batch, where it might have raised, too
            self._unknown()
            self._unknown = None
        if posted is None or form is None:
            return super()._handed_out(call, outcome)
        posted.calls[0] = call
        posted.values += [
            JoinedValue(
                self.segments,
                posted,
                value,
                slot=slot,
                dim=form.values[slot],
                board=self.board,
                before_use=self._before_use,
            )
            for slot, value in enumerate(call.values)
        ]
        if self._shadows is not None:
            # A try may count a number in an object (a cache's length) that the call leaves alone.
            for joined, shadow in zip(posted.values, self._shadows, strict=False):
                joined.shadow = shadow
            self._shadows = None
        self.posted.append(posted)
        self._posted_here = True
        self.board.post(posted)
        lazy = [joined.lazy() for joined in posted.values]  # held, therefore kept
        ends = self._ends_pass(call)
        if ends:
            self._end_pass(call)
        is_last = ends and call.position is not None and call.position + 1 == len(self._chain)
        return outcome.handed_out(
            lambda slot, in_object: (
                self.segments.for_user(posted.values[slot])
                if is_last and not in_object
                else lazy[slot]
            )
        )

    def _post_left(self, number: int) -> None:
        self.board.post(Left(number))
        self._posted_here = False

    def _before_use(self) -> None:
        """Let the pieces have the worker where they need it for what is asked for."""
        if threading.get_ident() != self._thread_id:
            return
        self.user.write_parameters_back()
        if self._posted_here:
            with self.user.suspended():
                self.next_turn()

    def _let_pieces_end(self) -> None:
        """Wait until the pieces have run all calls: user code writes into a parameter."""
        self._before_use()
        self.board.await_all()

    def call_block(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.user.write_parameters_back()
        return super().call_block(block, args, kwargs)

    def _refuse_unordered_writes(self, *, repeated: str | None = None) -> None:  # noqa: ARG002
        self.user.writes.were_any = True

    # --------------------------------------------------------------------------------- the check

    def _check(
        self,
        block: nn.Module,
        given: Given,
        arguments: Sequence[_Argument],
        dims: Sequence[int | None],
        sizes: Sequence[int],
        position: int | None,
    ) -> tuple[tuple[int | None, ...], Sequence[Shadow]] | str:
        """Run a block on a few rows; return the outputs' dimensions and values, or what differs."""
        shadows = [
            Shadow(*map(self._brought, joined.shadow))
            if joined is not None and joined.shadow is not None
            else self._shadow_of(tensor, joined.dim if joined else dim, sizes)
            for (tensor, joined, _), dim in zip(arguments, dims, strict=True)
        ]
        number = {id(a.tensor): i for i, a in enumerate(arguments)}
        marks = RowMarks()
        results: list[Sequence[Tensor]] = []
        writes = self.writes_within(block)
        with (
            self._resident(block, position) as resident,
            resident.undone(block) as buffers,
            resident.written(writes),
        ):
            written: list[Any] = []
            for part in range(4):  # the first rows, the next, both, and as many that are alike

                def take(tensor: Any, in_object: bool, part: int = part) -> Any:  # noqa: FBT001
                    joined = _joined_in(tensor)
                    if in_object and joined is not None and joined.in_object:
                        return tensor
                    shadow, dim = shadows[number[id(tensor)]], dims[number[id(tensor)]]
                    if dim is None:
                        return shadow.first.clone()
                    return marks.mark(
                        shadow[part].clone() if part < 3 else _alike(shadow.both, dim)
                    )

                try:
                    with marks:
                        results.append(self._run_shadow(block, resident, take, given))
                except (StepAborted, torch.OutOfMemoryError):
                    raise
                except Exception as error:  # noqa: BLE001 - any: the form does not fit
                    return f"it raises {type(error).__name__} on a part of the batch"
                written.append(resident.take_writes())
        if buffers:
            return "it writes into buffers (running statistics, say)"
        if _keeps_values(written[0], written[2], marks):
            return "it keeps values of the batch in attributes"
        written.clear()
        if marks.alive(besides=[tensor for result in results for tensor in result]):
            raise CaptureError(_KEPT.format(self._names[block]))
        if len({len(result) for result in results}) != 1:
            return "it gives other outputs for another number of rows"
        made = [Shadow(*parts) for parts in zip(*results[:3], strict=True)]
        return self._compared(made, results[3], marks, rows=sizes[0] + sizes[1])

    def _compared(
        self, made: Sequence[Shadow], of_alike: Sequence[Tensor], marks: RowMarks, *, rows: int
    ) -> tuple[tuple[int | None, ...], Sequence[Shadow]] | str:
        dims: list[int | None] = []
        for (first, second, both), alike in zip(made, of_alike, strict=True):
            differing = [
                d for d, (a, b) in enumerate(zip(first.shape, both.shape, strict=False)) if a != b
            ]
            if first.dim() != both.dim() or len(differing) > 1:
                return "its output has the batch's rows in no one dimension"
            dim = differing[0] if differing else None
            if dim is None:
                same = not marks.has(both) and _close(first, both) and _close(second, both)
            elif both.shape[dim] != rows or first.shape[dim] + second.shape[dim] != rows:
                return "its output has another number of rows than its input"
            else:
                row = alike.narrow(dim, 0, 1).expand_as(alike)
                same = _close(torch.cat([first, second], dim), both) and _close(row, alike)
            if not (same or self._forms.trusts_rows):
                return "what it gives for a row depends on the other rows"
            dims.append(dim)
        return tuple(dims), made

    def _brought(self, tensor: Tensor) -> Tensor:
        device = self.turns.worker.device
        return tensor if device.holds(tensor) else device.bring(tensor)

    def _shadow_of(self, tensor: Tensor, dim: int | None, sizes: Sequence[int]) -> Shadow:
        """Return the first rows of a tensor of user code, where the block computes."""
        here = self._brought(self._whole(tensor).detach())
        if dim is None:
            return Shadow(here, here, here)
        first, both = sizes[0], sizes[0] + sizes[1]
        return Shadow(
            here.narrow(dim, 0, first),
            here.narrow(dim, first, sizes[1]),
            here.narrow(dim, 0, both),
        )

    def _run_shadow(
        self,
        block: nn.Module,
        resident: ResidentBlocks,
        take: Callable[[Any, bool], Any],
        given: Given,
    ) -> Sequence[Tensor]:
        user, stream = self.user, self.user.stream
        assert stream is not None, "the step runs"
        stream.drops_out = False
        try:
            with torch.no_grad(), user.in_block(len(self.calls), resident):
                outcome = run_block(
                    resident.block(block),
                    take,
                    given=given,
                    watched=lambda taken: user.resumed(),
                    name=self._names[block],
                    repeats=True,
                    writes=works_in_place(block),
                )
        finally:
            stream.drops_out = True
        return [tensor for tensor, _ in outcome.tensors]

    def close(self) -> None:
        for posted in self.posted:
            posted.clear()
        self.posted.clear()
        self.slices.clear()
        self._sources.clear()
        super().close()


def _joined_in(tensor: Any) -> JoinedValue | None:
    value = tensor.value if isinstance(tensor, LazyTensor) else None
    return value if isinstance(value, JoinedValue) else None


def _holds_objects(given: Given) -> bool:
    copies = Copies(lambda tensor, in_object: tensor)
    copies.copied(given)
    return copies.hold_objects


def _arguments_of(given: Given) -> Sequence[_Argument]:
    found: list[_Argument] = []

    def look(tensor: Any, in_object: bool) -> Any:  # noqa: FBT001 - a `Swap`
        found.append(_Argument(tensor, _joined_in(tensor), in_object))
        return tensor

    Copies(look).copied(given)
    return found


def _candidates(arguments: Sequence[_Argument]) -> Iterator[Sequence[int | None]]:
    """Guess which dimension of every argument has the batch's rows, the likeliest guess first."""
    joined = next((a for a in arguments if a.joined is not None and a.joined.dim is not None), None)
    if joined is not None and joined.joined is not None:
        assert joined.joined.dim is not None
        leads = [(sum(joined.joined.sizes), joined.joined.dim)]
    else:
        first = next(
            (a.tensor for a in arguments if a.tensor.dim() > 1 and a.tensor.is_floating_point()),
            next((a.tensor for a in arguments if a.tensor.dim()), None),
        )
        leads = [] if first is None else [(first.shape[d], d) for d in range(min(2, first.dim()))]
    for num_rows, lead in leads:
        yield [_dim_of(argument, num_rows, lead) for argument in arguments]


def _dim_of(argument: _Argument, num_rows: int, lead: int) -> int | None:
    if argument.joined is not None:
        return argument.joined.dim
    shape = argument.tensor.shape
    return next((d for d in (lead, 0) if d < len(shape) and shape[d] == num_rows), None)


def _reason_against_pieces(block: nn.Module, writes: ModuleWrites) -> str:
    tables = ("_forward_hooks", "_forward_pre_hooks")
    hooked = {module for module, written in writes if any(map(written.get, tables))}
    for name, module in block.named_modules():
        if module in hooked or any(module.__dict__[table] for table in tables):
            return f"a hook looks at {name or 'it'}, once per batch"
    return ""


def _keeps_values(first: BlockWrites, later: BlockWrites, marks: RowMarks) -> bool:
    """Return whether a block writes values of the batch into attributes, in every call."""
    if any(map(marks.has, tensors_in([value for _, _, value in later]))):
        return True
    plain = [
        {(id(m), name): value for m, name, value in writes if isinstance(value, _PLAIN)}
        for writes in (first, later)
    ]
    return plain[0] != plain[1]


def _alike(tensor: Tensor, dim: int) -> Tensor:
    """Return a tensor of the same shape whose rows are one row, and its tokens one token.

    A block that treats rows independently makes rows of them that are alike, too. One that has no
    more than so much room for all rows, such as experts with a capacity, does not.
    """
    narrowed = range(tensor.dim() - 1) if tensor.is_floating_point() else ()
    for other in {dim, *narrowed}:
        tensor = tensor.narrow(other, 0, 1).expand_as(tensor)
    return tensor.clone()


def _close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    scale = float(other.abs().nan_to_num(0, 0, 0).max()) if other.numel() else 0.0
    tolerance = _TOLERANCES.get(one.dtype, _TOLERANCE)
    return torch.allclose(one, other, rtol=0, atol=tolerance * max(scale, 1e-30), equal_nan=True)
