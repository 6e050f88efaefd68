"""The backward pass of a step whose user code runs once, on pieces of the batch.

```
driver    tail segment ─ gradients of joined values, cut ─┐  B1.0        join ─ head segment
piece 1                                                   └▶ B1.1 ─ gradients of its arguments ─┘
```

The driver waits between stages, never inside an autograd node. The head segment runs when all
pieces have run their last stage: on the worker of the last piece, which keeps its turn meanwhile.
Where all calls between two segments were streamed, the pieces run them one after the other in the
driver's turn: it is needed again for the calls below.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from roundpipe_lightning.engine.chain.backward import BackwardPass
from roundpipe_lightning.engine.chain.joined import JoinedValue, LastTurn, RunBackward
from roundpipe_lightning.engine.chain.pieces import DriverForward, PieceForward


class PieceBackward(BackwardPass):
    """The backward pass of a piece, told by the driver what to run."""

    _forward: PieceForward

    def run_range(self, entry: RunBackward) -> None:
        """Run calls of the driver's numbers; then let others have the worker."""
        self.run_calls(*self._forward.range_of(entry.start, entry.stop))
        if entry.guest is None and self._turns.is_active and not self._turns.is_last:
            self._turns.leave()

    def end(self, *, holds: bool) -> None:
        """Pass all turns; the last one is kept if it `holds`."""
        if holds:
            self._turns.go_to_last()
        else:
            self._turns.end_last()


class DriverBackward(BackwardPass):
    """The backward pass of the driver. Arguments as of `BackwardPass`."""

    _forward: DriverForward

    def run_calls(self, start: int, stop: int) -> None:
        """Run calls in all pieces, and join the gradients of what these have taken."""
        forward, turns, board = self._forward, self._turns, self._forward.board
        posted = [posted for posted in forward.posted if start <= posted.number < stop]
        if not posted:
            super().run_calls(start, stop)
            return
        self._hand_out(start, stop)
        if all(one.position is None for one in posted):
            super().run_calls(start, stop)
            for piece in range(1, board.num_pieces):
                board.post(RunBackward(start, stop, guest=piece))
                board.await_all()
            if turns.is_over or start:
                return
        else:
            board.post(RunBackward(start, stop))
            super().run_calls(start, stop)
        if start == 0 and not turns.is_over:
            turns.go_to_last()
        if turns.is_last:
            turns.end_last()
            board.post(LastTurn())
            board.await_all()
            turns.borrow(board.forwards[board.num_pieces - 1].turns)
        else:
            turns.leave()
            board.await_all()
            turns.enter()

    def _hand_out(self, start: int, stop: int) -> None:
        """Give the pieces the gradients of what a range of calls has made."""
        worker = self._turns.worker
        for source in list(self._gradients):
            if isinstance(source, JoinedValue) and start <= source.call < stop:
                whole = self._gradients.pop(source).take(worker)
                for piece, part in source.cut(whole).items():
                    sources = self._forward.board.forwards[piece].sources
                    sources.add_gradient(source.part(piece), part, worker)

    def _run_segment(self, number: int) -> None:
        for tensor, dim, parts in self._forward.slices.trained():
            if self._segments.made_in(tensor) == number:
                self._join(tensor, dim, parts)
        super()._run_segment(number)

    def _join(self, tensor: Tensor, dim: int | None, parts: Sequence[Tensor]) -> None:
        worker, board = self._turns.worker, self._forward.board
        found = [
            board.forwards[piece].sources.gradients.pop(part, None)
            for piece, part in enumerate(parts)
            if piece in board.forwards
        ]
        if not any(found):
            return
        taken = [None if gradient is None else gradient.take(worker) for gradient in found]
        if dim is None:
            whole = torch.stack([t for t in taken if t is not None]).sum(0)
        else:
            like = next(t for t in taken if t is not None)
            whole = torch.cat(
                [
                    like.new_zeros(part.shape) if t is None else t
                    for t, part in zip(taken, parts, strict=False)
                ],
                dim,
            )
        self._sources.add_gradient(tensor, whole, worker)

    def _taken(self) -> Iterator[Tensor]:
        yield from super()._taken()
        for tensor, _, _ in self._forward.slices.trained():
            yield tensor
