"""Joined values: user code runs once on the whole batch, and blocks run on pieces of it.

```
user code        h = embed(ids)      h = layer0(h)   h = layer1(h)      h.mean(0)
                 h, whole ─ cut ─┐                      lazy, whole ─┐ joined: one leaf
piece 0                          ├─▶ layer0(h0) ──▶ layer1(h0) ──────┤
piece 1                          └─▶ layer0(h1) ──▶ layer1(h1) ──────┘
```

The *driver* is piece 0: it runs the user's code, and posts each call of a block to a list that the
other pieces replay in threads of their own. A block's output is a lazy tensor of the whole batch.
Who computes with it waits for all pieces and gets a leaf of the next segment; who hands it to
another block hands on the pieces.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from roundpipe_lightning.engine.capture.module_writes import ModuleWrites
from roundpipe_lightning.engine.capture.placeholder import Form
from roundpipe_lightning.engine.capture.torch_functions import Autocast, Variables, version_of
from roundpipe_lightning.engine.capture.trees import Copies, Reference
from roundpipe_lightning.engine.chain.values import WRITTEN_SINCE, BlockCall, Given, Value
from roundpipe_lightning.engine.device.events import StepAborted
from roundpipe_lightning.engine.transfer.boundary import TransferEndpoint
from roundpipe_lightning.engine.worker.turns import Turns
from roundpipe_lightning.errors import CaptureError

if TYPE_CHECKING:
    from roundpipe_lightning.engine.chain.forward import ForwardPass
    from roundpipe_lightning.engine.chain.segments import Segments

_POLL_SECONDS = 0.2  # how soon a waiting thread notices that the step was aborted


class CallForm(NamedTuple):
    """Which dimension of each tensor has the batch's rows; None: the pieces share the tensor.

    Attributes:
        left: Modules and names of attributes that the block leaves tensors in: its last values.
    """

    arguments: tuple[int | None, ...]
    values: tuple[int | None, ...]
    left: tuple[tuple[nn.Module, str], ...] = ()

    @property
    def lead(self) -> int:
        """That of the first argument that has rows."""
        return next(dim for dim in self.arguments if dim is not None)


def piece_sizes(num_rows: int, num_pieces: int) -> tuple[int, ...]:
    """Return the rows of every piece; the first ones have one more, the last ones perhaps none."""
    each, more = divmod(num_rows, num_pieces)
    return tuple(each + (index < more) for index in range(num_pieces))


class Cut(Reference):
    """Stands for a tensor of user code in a posted call: every piece takes its part."""

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self.parts = parts  # what each piece takes: a leaf without a graph


@dataclass(kw_only=True, eq=False)
class PostedCall:
    """A call of a block, for the pieces to replay."""

    number: int
    position: int | None  # its position in the chain; None: it is streamed
    block: nn.Module
    name: str
    given: Given  # its arguments, with `Cut` and `JoinedValue` in place of tensors
    taken: Sequence[JoinedValue]  # the joined values among them
    sizes: Sequence[int]  # rows of every piece; one without rows leaves the call out
    gradient: bool
    autocast: Sequence[Autocast]
    variables: Variables
    writes: ModuleWrites  # what user code has written into the block's attributes
    form: CallForm
    shadows: Sequence[Shadow]  # what its values are for a few rows, where that was tried
    begins_segment: bool  # whether it is the first call after a segment of user code
    # tensors that all pieces' parts are views of, and how often they were written into
    versions: Sequence[tuple[Tensor, int]]
    calls: dict[int, BlockCall] = field(default_factory=dict)  # the pieces' calls, by their numbers
    values: list[JoinedValue] = field(default_factory=list)

    def check_unwritten(self) -> None:
        """Raise if user code has written meanwhile into what a piece has computed with."""
        if any(version_of(tensor) != version for tensor, version in self.versions):
            raise CaptureError(WRITTEN_SINCE.format(self.name))

    def given_for(self, piece: int) -> Given:
        def part(source: Any, in_object: bool) -> Any:  # noqa: ARG001, FBT001 - a `Swap`
            return source.parts[piece] if isinstance(source, Cut) else source.part(piece)

        given: Given = Copies(part).arguments(self.given)
        return given

    def clear(self) -> None:
        for value in self.values:
            value.drop()
        self.calls.clear()
        self.values.clear()
        self.given, self.taken, self.versions, self.shadows = ((), {}), (), (), ()


Posted: TypeAlias = Callable[[Any], None]
"""What the pieces are to do; called by each of them, in its thread, with itself."""


class PieceBoard:
    """What the driver of a step posts to its other pieces, and how far each of these is.

    Who waits is released when the step's turns are aborted.
    """

    def __init__(self, num_pieces: int, turns: Turns) -> None:
        self.num_pieces = num_pieces
        self.forwards: dict[int, ForwardPass] = {}  # the pieces' forward passes, by their numbers
        self._turns = turns
        self._changed = threading.Condition()
        self._posted: list[Posted | None] = []
        self._num_done = [0] * num_pieces

    def post(self, entry: Posted | None) -> None:
        """Tell the pieces what to do; None: the step has ended."""
        if self.num_pieces == 1:
            return
        with self._changed:
            self._posted.append(entry)
            self._changed.notify_all()

    def entries(self, piece: int) -> Iterator[Posted]:
        """Return what is posted, until the end; one that was taken before counts as done."""
        number = 0
        while True:
            self._wait(lambda: len(self._posted) > number)  # noqa: B023 - waited for here
            entry = self._posted[number]
            if entry is not None:
                yield entry
            number += 1
            with self._changed:
                self._num_done[piece] = number
                self._changed.notify_all()
            if entry is None:
                return

    def await_all(self) -> None:
        self._wait(lambda: min(self._num_done[1:], default=len(self._posted)) == len(self._posted))

    def _wait(self, is_over: Callable[[], bool]) -> None:
        with self._changed:
            while not self._changed.wait_for(is_over, timeout=_POLL_SECONDS):
                if self._turns.is_aborted:
                    raise StepAborted
        if self._turns.is_aborted:
            raise StepAborted


class Shadow(NamedTuple):
    """Values for the rows of the first piece, the second, and both together."""

    first: Tensor
    second: Tensor
    both: Tensor


class JoinedValue(Value):
    """What a call made in all pieces.

    Args:
        first: What the driver has made.
        slot: Its number among what the call made.

    Attributes:
        dim: The dimension along which the pieces are joined; None: all have made the same.
        sizes: Rows of every piece.
        shadow: Values for the first rows, while calls are checked.
    """

    def __init__(
        self,
        owner: Segments,
        posted: PostedCall,
        first: Value,
        *,
        slot: int,
        board: PieceBoard,
        before_use: Callable[[], None],
    ) -> None:
        self.dim, self.sizes = posted.form.values[slot], tuple(posted.sizes)
        # A try may count a number in an object (a cache's length) that the call leaves alone.
        self.shadow: Shadow | None = next(iter(posted.shadows[slot : slot + 1]), None)
        self._slot = slot
        self._calls = posted.calls
        self._before_use = before_use
        self._num_pending = [0] * len(self.sizes)
        self._counting = threading.Lock()
        super().__init__(
            owner,
            posted.calls[0],
            None,
            form=_whole(first.form, self.dim, sum(self.sizes)),
            in_object=first.in_object,
        )
        self._board = board
        self.host = self
        self.watch(first, piece=0)

    @property
    def pieces(self) -> Sequence[int]:
        if self.dim is None:
            return (0,)
        return tuple(index for index, size in enumerate(self.sizes) if size)

    def part(self, piece: int) -> Value:
        return self._calls[piece].values[self._slot]

    def watch(self, value: Value, *, piece: int) -> None:
        """Let a piece's value be kept as long as somebody may take it or ask for the whole."""
        value.is_wanted = lambda: self.is_held or self._num_pending[piece] > 0

    def note_pending(self, change: int, pieces: Iterable[int]) -> None:
        with self._counting:  # the driver counts up while pieces count down
            for piece in pieces:
                self._num_pending[piece] += change

    def materialize(self) -> Tensor:
        self._before_use()
        return super().materialize()

    def detached(self) -> Tensor:
        self._before_use()
        return super().detached()

    # its parts on their way, which the pieces send, count and release

    num_bytes = 0

    def on(self, worker: TransferEndpoint | None) -> Tensor:
        self._board.await_all()
        parts = []
        for piece in self.pieces:
            boundary = self.part(piece).host
            assert boundary is not None, "kept when its turn ended"
            parts.append(boundary.on(worker))
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim or 0)

    def send_to(self, worker: TransferEndpoint) -> None:
        pass  # it is brought when it is asked for

    def release(self) -> None:
        pass

    def cut(self, whole: Tensor) -> Mapping[int, Tensor]:
        """Return the parts of something of its shape, by the number of the piece."""
        if self.dim is None:
            return {0: whole}
        parts = whole.split(self.sizes, self.dim)
        return {piece: parts[piece].contiguous() for piece in self.pieces}


def _whole(form: Form, dim: int | None, num_rows: int) -> Form:
    if dim is None:
        return form
    shape = list(form.shape)
    shape[dim] = num_rows
    like = torch.empty(shape, device="meta")
    return Form(like.shape, like.stride(), form.dtype, form.device)
