"""The forward passes of a step whose user code runs once: the driver's, and the other pieces'.

See `joined.py` for the values. A form says which dimension of every argument and output of a call
has the batch's rows. It is found when such a call is first made (`row_check.py`). Where the rows
are not independent, the call runs on the whole batch.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from roundpipe_lightning.engine.capture.files import watched_writes
from roundpipe_lightning.engine.capture.placeholder import LazyTensor
from roundpipe_lightning.engine.capture.torch_functions import (
    autocast_as,
    autocast_now,
    variables_as,
    variables_now,
    version_of,
)
from roundpipe_lightning.engine.capture.trees import Copies, Swap
from roundpipe_lightning.engine.capture.view import put
from roundpipe_lightning.engine.chain.forward import ForwardPass
from roundpipe_lightning.engine.chain.joined import (
    CallForm,
    Cut,
    JoinedValue,
    PieceBoard,
    PostedCall,
    Shadow,
    piece_sizes,
)
from roundpipe_lightning.engine.chain.row_check import (
    Argument,
    FunctionCalls,
    NotByRowsError,
    RowTrial,
    arguments_of,
    candidates,
    joined_in,
    reason_against_pieces,
    state_of,
)
from roundpipe_lightning.engine.chain.values import (
    BlockCall,
    Given,
    Outcome,
    Source,
    Value,
    run_block,
    works_in_place,
)
from roundpipe_lightning.engine.worker.loaded_blocks import ResidentBlocks
from roundpipe_lightning.planning.schedule.stages import StageKind

Key: TypeAlias = tuple[Any, ...]

_Found: TypeAlias = tuple[CallForm, Sequence[int], Sequence[Shadow]]
"""The form of a call, the rows of every piece, and what the call gave for a few rows, if tried."""


class WholeBatchWarning(UserWarning):
    """A block does not treat the rows of a batch independently: it runs on the whole batch."""


class CallForms:
    """The forms of calls that have been seen, kept from step to step."""

    def __init__(self, *, trusts_rows: bool = False) -> None:
        self.trusts_rows = trusts_rows
        self.whole: dict[str, str] = {}  # blocks that run on the whole batch, and why
        self.known: dict[Key, CallForm | None] = {}
        # of the blocks when they were compared, by `state_of` and `read_outside`, and the rows of
        # those batches
        self.states: dict[Key, tuple[Any, set[int]]] = {}
        #: Returns the values that a block may read from other objects.
        self.read_outside: Callable[[nn.Module], Any] = lambda block: None
        # dimensions of what blocks gave
        self.by_calls: dict[FunctionCalls, Sequence[int | None]] = {}
        #: Gives what runs of a block share, to be compared.
        self.contents: Callable[[], Mapping[Any, Any]] = dict
        self.tells_of_one_row = True
        self.looks = False  # whether calls are compared where the batch is one piece, too
        self._watched: set[type] = set()
        self._divided: dict[type, str] = {}  # classes of blocks that ran on pieces, and the first

    @contextmanager
    def watched(self, block: nn.Module, name: str) -> Iterator[None]:
        """Warn, once for a class, where a block that runs once more writes into what is kept."""
        if type(block) in self._watched:
            yield
            return
        self._watched.add(type(block))
        before, writers = self.contents(), set[str]()

        def may_write(name: str) -> bool:
            writers.add(name)
            return True

        try:
            with watched_writes(may_write):
                yield
        finally:  # checkpointing may end a recompute early, by an exception
            after = self.contents()
            writers.discard("print")
            if writers or any(after.get(key, old) != old for key, old in before.items()):
                warnings.warn(
                    f"Block {name!r} writes into a list, a dict or another object, into a file or "
                    "a global. It runs once per microbatch, and again when it is recomputed: what "
                    "it writes is not what one device has. Let it return the values, or assign "
                    "them to attributes.",
                    stacklevel=2,
                )

    def put(self, key: Key, form: CallForm | None, *, kind: type, name: str, reason: str) -> None:
        self.known[key] = form
        if form is not None:
            self._divided.setdefault(kind, name)
        elif name not in self.whole:
            self.whole[name] = reason
            if len(self.whole) == 1:
                earlier = self._divided.get(kind, name)
                warnings.warn(
                    f"Block {name!r} runs on the whole batch, not on microbatches: {reason}. "
                    "Workers share a batch only where its rows are independent."
                    + f" Block {earlier!r}, of the same class, has run on microbatches of this "
                    "batch: its numbers may differ." * (earlier != name),
                    category=WholeBatchWarning,
                    stacklevel=2,
                )


class PieceForward(ForwardPass):
    """Replays the driver's calls on one piece of the batch."""

    _posted: PostedCall

    def __init__(self, *args: Any, piece: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._piece = piece
        self.numbers: list[int] = []  # of the driver's calls

    def replay(self, posted: PostedCall) -> None:
        if not posted.sizes[self._piece]:
            return
        self._posted = posted
        if posted.begins_segment and self.segments.last.start != len(self.calls):
            self.segments.open_next()
        self.numbers.append(posted.number)
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
        return self._posted.position

    def _handed_out(self, call: BlockCall, outcome: Outcome) -> None:  # noqa: ARG002
        self._posted.calls[self._piece] = call
        for joined, value in zip(self._posted.values, call.values, strict=True):
            joined.watch(value, piece=self._piece)

    def leave(self, number: int) -> None:
        """Leave a turn, as the driver has, and those before it."""
        turns = self.turns
        while turns.number <= number and not turns.is_last:
            if turns.in_forward_stage:
                self.leave_turn()
            else:
                turns.leave()


class DriverForward(ForwardPass):
    """Runs the user's calls on the first piece, and posts them."""

    def __init__(self, *args: Any, board: PieceBoard, forms: CallForms, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        board.forwards[0] = self
        self.board = board
        # tensors of user code that blocks take, cut into pieces along a dimension: each once
        self.slices: dict[tuple[Tensor, int | None], Cut] = {}
        self.posted: list[PostedCall] = []
        self._forms = forms
        self._unknown: Callable[[], None] | None = None  # says that a call has no form
        self._sources: dict[int, Source] = {}  # what the first piece takes for a given tensor
        self._passed: set[int | None] = set()  # positions whose BACKWARD turn will have ended
        self._posted_here = False  # in the present turn
        self._left: dict[tuple[nn.Module, str], JoinedValue] = {}  # in attributes
        self.turns.on_leave = self._post_left
        self.user.before_write = self._let_pieces_end
        self._thread_id = threading.get_ident()

    def _prepare(self, block: nn.Module, given: Given, position: int | None) -> int | None:
        self._sources, self._posted = {}, None
        if self.board.num_pieces == 1 and not self._forms.looks:
            return self._in_turn(position)
        arguments, hold_objects = arguments_of(given)
        gradient = self.backward and torch.is_grad_enabled()
        found = None
        # A block writes into an object that it is given (a cache, say) itself.
        if not hold_objects or (gradient and self.board.num_pieces > 1):
            found = self._form_of(block, given, arguments, position)
        if found is None or self.board.num_pieces == 1:
            for tensor, joined in arguments:
                if joined is not None:
                    self._sources[id(tensor)] = joined.materialize()
            return self._in_turn(position)
        form, sizes, shadows = found

        def swap(tensor: Tensor, in_object: bool) -> Any:  # noqa: ARG001, FBT001 - a `Swap`
            joined = joined_in(tensor)
            if joined is not None:
                self._sources[id(tensor)] = joined.part(0)
                joined.note_pending(1, [i for i, size in enumerate(sizes) if size and i])
                from_pieces.append(joined)
                return joined
            whole = self._whole(tensor)
            versions.append((whole, version_of(whole)))
            cut = self._cut(whole, dims[id(tensor)], sizes)
            self._sources[id(tensor)] = cut.parts[0]
            return cut

        versions: list[tuple[Tensor, int]] = []
        from_pieces: list[JoinedValue] = []
        dims = {id(a.tensor): d for a, d in zip(arguments, form.arguments, strict=True)}
        taken = Copies(swap).arguments(given)  # can begin a segment
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
            variables=variables_now(),
            writes=self.user.writes.within(block),
            form=form,
            shadows=shadows,
            begins_segment=self.segments.last.start == len(self.calls),
        )
        return position

    def _cut(self, tensor: Tensor, dim: int | None, sizes: Sequence[int]) -> Cut:
        key = (tensor, dim)
        if key not in self.slices:
            bare = tensor.detach()
            parts = [bare.detach() for _ in sizes] if dim is None else list(bare.split(sizes, dim))
            for part in parts:
                part.requires_grad_(tensor.requires_grad)
            self.slices[key] = Cut(parts)
        return self.slices[key]

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
        if not isinstance(tensor, LazyTensor):
            return tensor
        value = tensor.value
        # Of a batch in one piece it is only looked at: no code of the user's runs between blocks.
        whole: Tensor = value.materialize() if self.board.num_pieces > 1 else value.detached()
        return whole

    def source_of(self, given: Tensor | Value) -> Source:
        source = self._sources.get(id(given))
        return super().source_of(given) if source is None else source

    @property
    def _may_try(self) -> bool:
        """Whether a call may run on pieces, or is looked at for those of later batches."""
        return self.turns.in_forward_stage or self.board.num_pieces == 1

    def _form_of(
        self, block: nn.Module, given: Given, arguments: Sequence[Argument], position: int | None
    ) -> _Found | None:
        """Return how to cut a call; None: it takes the whole batch."""
        if not self._may_try or not arguments:
            return None
        name, forms = self._names[block], self._forms
        gradient = self.backward and torch.is_grad_enabled()
        writes = self.user.writes.within(block)
        modes = (*(m.training for m in block.modules()), *(w.get("training") for _, w in writes))
        key = (name, gradient, modes, *((a.tensor.dim(), a.tensor.dtype) for a in arguments))
        reason = reason_against_pieces(block, writes)
        if reason:
            forms.put(key, None, kind=type(block), name=name, reason=reason)
        form = forms.known.get(key)
        if form is None and key in forms.known:
            return None
        sizes = None if form is None else self._sizes(arguments, form.arguments)
        state = state_of(block, writes), forms.read_outside(block)
        before, compared = forms.states.setdefault(key, (state, set()))
        if before != state:
            # All are compared once more, from the first block of the next batch on.
            forms.known.clear()
            form, forms.states = None, {key: (state, set())}
        if form is not None and sizes is not None and sum(sizes) in compared:
            return form, sizes, ()
        return self._tried(key, block, given, arguments, position)

    def _tried(
        self,
        key: Key,
        block: nn.Module,
        given: Given,
        arguments: Sequence[Argument],
        position: int | None,
    ) -> _Found | None:
        for tensor, joined in arguments:  # what is looked at can end the turn
            if joined is None or joined.shadow is None:
                self._whole(tensor)
        if not self._may_try:
            return None
        position, few, reason = self._in_turn(position), False, ""
        name, forms = self._names[block], self._forms
        for dims in candidates(arguments):
            sizes = self._sizes(arguments, dims)
            if sizes is None:
                continue
            if sizes[1] < 1:  # of one row nobody knows whether its next dimension has the rows
                few = True
                break
            try:
                form, shadows = self._check(block, given, arguments, dims, sizes, position)
            except NotByRowsError as error:
                # Another guess that comes further says more than one that does not fit at all.
                reason = str(error) if not reason or error.__cause__ is None else reason
                continue
            forms.put(key, form, kind=type(block), name=name, reason="")
            forms.states[key][1].add(sum(sizes))
            return form, sizes, shadows
        if few and forms.tells_of_one_row and self.board.num_pieces > 1:
            forms.tells_of_one_row = False
            warnings.warn(
                f"Block {name!r} is given one row, so one worker computes it, and others wait. "
                "Where sequences are packed into one row, make several rows of them; "
                "num_microbatches=1 says that one is meant.",
                category=WholeBatchWarning,
                stacklevel=2,
            )
        if not few:
            reason = reason or "no dimension of its arguments is the batch's"
            kind = type(block)
            self._unknown = partial(forms.put, key, None, kind=kind, name=name, reason=reason)
        return None

    def _sizes(
        self, arguments: Sequence[Argument], dims: Sequence[int | None]
    ) -> Sequence[int] | None:
        """Return the rows of every piece; None where the arguments do not agree about them."""
        sizes: Sequence[int] | None = None
        for (tensor, joined), dim in zip(arguments, dims, strict=True):
            if joined is not None and joined.dim is not None:
                own: Sequence[int] = joined.sizes
            elif joined is None and dim is not None:
                own = piece_sizes(tensor.shape[dim], max(2, self.board.num_pieces))
            else:
                continue
            if sizes is not None and list(sizes) != list(own):
                return None
            sizes = own
        return sizes

    def _handed_out(self, call: BlockCall, outcome: Outcome) -> Any:
        posted = self._posted
        if self._unknown is not None:  # it runs on the whole batch, where it might have raised, too
            self._unknown()
            self._unknown = None
        if posted is None:
            return super()._handed_out(call, outcome)
        posted.calls[0] = call
        posted.values += [
            JoinedValue(
                self.segments,
                posted,
                value,
                slot=slot,
                board=self.board,
                before_use=self._before_use,
            )
            for slot, value in enumerate(call.values)
        ]
        left = zip(reversed(posted.form.left), reversed(posted.values), strict=False)
        for (module, name), joined in left:
            put(self.user.maker.view_of(module), name, joined.lazy())
            self._left[module, name] = joined
        self.posted.append(posted)
        self._posted_here = True
        self.board.post(lambda piece: piece.forward.replay(posted))
        lazy = [joined.lazy() for joined in posted.values]  # held, therefore kept
        ends = self._ends_pass(call)
        if ends:
            self._end_pass(call)
        is_last = ends and call.position is not None and call.position + 1 == len(self.chain)
        return outcome.handed_out(
            lambda slot, in_object: (
                self.segments.for_user(posted.values[slot])
                if is_last and not in_object
                else lazy[slot]
            )
        )

    def run_block(
        self, call: BlockCall, resident: ResidentBlocks, *, take: Swap, given: Given | None = None
    ) -> Outcome:
        watched = self._forms.watched(call.block, call.name)
        with watched if given is None else nullcontext():
            return super().run_block(call, resident, take=take, given=given)

    def end_user_code(self) -> None:
        for (module, name), joined in self._left.items():
            lazy = self.user.maker.view_of(module).__dict__.get(name)
            if isinstance(lazy, LazyTensor) and lazy.value is joined:  # the code has left it there
                whole = joined.detached()
                self.user.writes.note(module, name, self.user.owner_of(whole).download(whole))
        super().end_user_code()

    def _post_left(self, number: int) -> None:
        self.board.post(lambda piece: piece.forward.leave(number))
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

    def _check(
        self,
        block: nn.Module,
        given: Given,
        arguments: Sequence[Argument],
        dims: Sequence[int | None],
        sizes: Sequence[int],
        position: int | None,
    ) -> tuple[CallForm, Sequence[Shadow]]:
        """Run a block on a few rows; return the form of its call, and what it gave."""
        shadows = [
            Shadow(*map(self._brought, joined.shadow))
            if joined is not None and joined.shadow is not None
            else self._shadow_of(tensor, joined.dim if joined else dim, sizes)
            for (tensor, joined), dim in zip(arguments, dims, strict=True)
        ]
        trial = RowTrial(arguments, shadows, dims, sizes)
        writes, name = self.user.writes.within(block), self._names[block]
        with (
            self._resident(block, position) as resident,
            resident.undone(block) as buffers,
            resident.written(writes),
        ):
            calls = trial.run(
                block,
                lambda take: self._run_shadow(block, resident, take, given),
                resident.take_writes,
                gradient=self.backward and torch.is_grad_enabled() and not self._forms.trusts_rows,
                known=self._forms.by_calls,
                again=self._forms.watched(block, name),
            )
        if buffers:
            raise NotByRowsError(
                "it writes into buffers (running statistics, say; GroupNorm has none)"
            )
        form, made = trial.form(
            num_rows=sizes[0] + sizes[1],
            trusts_rows=self._forms.trusts_rows,
            name=name,
            settle=self.turns.worker.device.synchronize,
        )
        self._forms.by_calls[calls] = form.values
        return form, made

    def _brought(self, tensor: Tensor) -> Tensor:
        device = self.turns.worker.device
        return tensor if device.holds(tensor) else device.bring(tensor, self.user.owner_of(tensor))

    def _shadow_of(self, tensor: Tensor, dim: int | None, sizes: Sequence[int]) -> Shadow:
        """Return the first rows of a tensor of user code, where the block computes."""
        here = self._brought(self._whole(tensor).detach())
        if dim is None:
            return Shadow(here, here, here)
        first, second, _ = here.split([*sizes[:2], here.shape[dim] - sum(sizes[:2])], dim)
        return Shadow(first, second, here.narrow(dim, 0, sum(sizes[:2])))

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
            with user.in_block(len(self.calls), resident):
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
        self._left.clear()
        self._sources.clear()
        self.board.forwards.clear()
        del self.turns.on_leave
        super().close()
