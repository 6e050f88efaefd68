"""One microbatch's way back through the chain. Step M8 of docs/design.md.

```
calls       0 1 2 │ 3 4 │ 5 6 (fused)
backward          │     │ the tail segment with 5 and 6: the loss, down to its leaves
                  │ recompute 3 and 4, backward
        the middle segment
  recompute 0 to 2, backward
the head segment
```

Calls that follow each other in one stage are recomputed as a *group*; one that was streamed is a
group of its own. A group's graph begins at leaves, one per value or argument that it takes; their
gradients, and those found before, are what the groups and segments below begin their backward with.
Where nothing needs a gradient, nothing is recomputed.

Where user code runs once, on pieces of the batch, the driver waits between stages, never inside an
autograd node. The head segment runs when all pieces have run their last stage: on the worker of the
last piece, which keeps its turn meanwhile. Where all calls between two segments were streamed, the
pieces run them one after the other in the driver's turn: it is needed again for the calls below.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from roundpipe_lightning.engine.capture.torch_functions import nodes_of
from roundpipe_lightning.engine.chain.forward import ForwardPass
from roundpipe_lightning.engine.chain.joined import JoinedValue
from roundpipe_lightning.engine.chain.pieces import DriverForward, PieceForward
from roundpipe_lightning.engine.chain.values import BlockCall, Source, Value
from roundpipe_lightning.engine.worker.loaded_blocks import ResidentBlocks
from roundpipe_lightning.planning.schedule.stages import Stage, StageKind


@dataclass(eq=False)
class BackwardPass:
    """The backward pass of one microbatch."""

    forward: ForwardPass
    _: KW_ONLY
    # called when the backward of a segment has ended, with the tensors whose graphs are to come
    collect: Callable[[Sequence[Tensor]], None]

    def __post_init__(self) -> None:
        self._turns, self._user = self.forward.turns, self.forward.user
        self._segments, self._sources = self.forward.segments, self.forward.sources
        self._gradients = self.forward.sources.gradients

    def run_backward(self, loss: Tensor, scale: Tensor) -> None:
        segments, stop = self._segments, len(self.forward.calls)
        self.forward.drop_turn()
        self._run_graph([loss], [scale], below=segments.number + 1)
        self._sources.fetch_gradients(segments.last.leaves)
        self.collect(self._made_below(segments.number + 1))
        for number in range(segments.number, -1, -1):
            start = segments[number].start
            self.run_calls(start, stop)
            stop = start
            self._run_segment(number)

    def run_calls(self, start: int, stop: int) -> None:
        for group in self._groups(start, stop):
            self._run_group(group)

    def _run_graph(
        self, roots: Sequence[Tensor], gradients: Sequence[Tensor], *, below: int
    ) -> None:
        """Run the graph of segments, not freeing what segments `below` a number need.

        The graph reaches into theirs where user code carries a tensor past PyTorch's functions.
        """
        lower = {node for node in nodes_of(self._made_below(below)) if node.next_functions}
        shares = bool(lower) and not lower.isdisjoint(nodes_of(roots))
        with self._user.in_backward():
            torch.autograd.backward(roots, list(gradients), retain_graph=shares)

    def _made_below(self, number: int) -> list[Tensor]:
        return [t for t in self._taken() if self._segments.made_in(t) < number]

    def _taken(self) -> Iterator[Tensor]:
        """Tensors of user code that blocks or later segments have taken and that are to come."""
        for call in self.forward.calls:
            yield from (t for t in call.arguments if t.requires_grad)
        for source in self._gradients:
            if isinstance(source, Tensor):
                yield source
        for number in range(self._segments.number + 1):
            for source in self._segments[number].leaves:
                if isinstance(source, Tensor) and source.requires_grad:
                    yield source

    def _run_segment(self, number: int) -> None:
        segment = self._segments[number]
        roots: list[tuple[Tensor, Tensor]] = []
        for source in list(self._gradients):
            tensor = self._root(source, number)
            if tensor is not None:
                gradient = self._gradients.pop(source)
                roots.append((tensor, gradient.take(self._user.worker_of(tensor))))
        if roots:
            self._run_graph([t for t, _ in roots], [g for _, g in roots], below=number)
        # A later segment's graph may have reached the leaves, even where nothing else does.
        self._sources.fetch_gradients(segment.leaves)
        if roots:
            self.collect(self._made_below(number))
        for call in self.forward.calls:
            if call.segment == number:
                for value in call.values:
                    value.here = None

    def _root(self, source: Source, number: int) -> Tensor | None:
        """Return where a source's gradient enters a segment's graph; None if it does not."""
        leaf = self._segments[number].leaves.get(source)
        if leaf is not None:  # found before, by a later one: it goes first
            return leaf if leaf.requires_grad else None
        if isinstance(source, Value):
            return source.here if source.segment == number else None
        return source if self._segments.made_in(source) == number else None

    def _groups(self, start: int, stop: int) -> Iterator[list[BlockCall]]:
        """The groups of a range of calls, the last one first."""
        group: list[BlockCall] = []
        for call in reversed(self.forward.calls[start:stop]):
            if call.is_recomputed:
                group.insert(0, call)
                if call.begins_group:
                    yield group
                    group = []
        assert not group, "the first call of a segment begins a group"

    def _run_group(self, group: list[BlockCall]) -> None:
        while group and not (
            not group[-1].values  # it may register hooks on what it hands back
            or any(value in self._gradients for value in group[-1].values)
            or self._user.side_outputs.is_used(group[-1].number)
        ):
            group.pop()  # nothing needs what it made
        if not group:
            return
        first = group[0]
        if first.position is None:
            self._turns.enter()
            with self._turns.worker.streamed(first.block, StageKind.BACKWARD) as resident:
                self._recompute(group, resident)
                gradients = resident.take_gradients()
            self._turns.reducer.reserve_shared(self._turns.index)(gradients)
            return
        stage = self._go_to(first.position)
        blocks = [call.block for call in group]
        self._recompute(group, self._turns.worker.resident(stage, blocks))

    def _go_to(self, position: int) -> Stage:
        turns = self._turns
        while not (turns.stage.kind is StageKind.BACKWARD and position in turns.stage.blocks):
            # what the next turn takes goes to its worker: gradients, and what it begins with
            inputs = [
                value.host
                for call in self.forward.calls
                if call.position == position
                for value in call.inputs
                if value.host is not None
            ]
            self._sources.send_ahead([*self._gradients.values(), *inputs])
            turns.next_turn()
        turns.enter()
        return turns.stage

    def _recompute(self, group: Sequence[BlockCall], resident: ResidentBlocks) -> None:
        sources, user = self._sources, self._user
        leaves: dict[Source, Tensor] = {}
        made: dict[Source, Tensor] = {}

        def take(source: Source, in_object: bool) -> Tensor:  # noqa: FBT001 - a `Swap`
            if isinstance(source, Value) and in_object and source.in_object:
                return source.lazy()
            return made[source] if source in made else sources.leaf(leaves, source, repeats=True)

        for call in group:
            for value in call.values:
                value.here = None
        with torch.enable_grad():
            for call in group:
                outcome = self.forward.run_block(call, resident, take=take)
                made.update(zip(call.values, (t for t, _ in outcome.tensors), strict=True))
        worker = self._turns.worker
        worker.count_bytes(self.forward.boundary_bytes())
        # A gradient found before goes first: sums then have the order of one plain backward.
        roots = [
            (tensor, self._gradients.pop(source))
            for source, tensor in {**made, **leaves}.items()
            if source in self._gradients and tensor.requires_grad
        ]
        found = user.side_outputs.take_found()
        roots += [(tensor, sources.pack(g)) for tensor, g in found]
        if roots:
            with user.in_backward():
                torch.autograd.backward(
                    [tensor for tensor, _ in roots], [g.take(worker) for _, g in roots]
                )
        sources.fetch_gradients(leaves)
        for call in group:
            for value in call.values:
                value.forget_host()  # nothing below takes it


class PieceBackward(BackwardPass):
    """The backward pass of a piece, told by the driver what to run."""

    forward: PieceForward

    def run_range(self, start: int, stop: int, *, leaves: bool = True) -> None:
        """Run calls of the driver's numbers; then let others have the worker if it `leaves`."""
        numbers = self.forward.numbers
        self.run_calls(bisect_left(numbers, start), bisect_left(numbers, stop))
        if leaves and self._turns.is_active and not self._turns.is_last:
            self._turns.leave()

    def end(self, *, holds: bool) -> None:
        """Pass all turns; the last one is kept if it `holds`."""
        if holds:
            self._turns.go_to_last()
        else:
            self._turns.end_last()


class DriverBackward(BackwardPass):
    """The backward pass of the driver. Arguments as of `BackwardPass`."""

    forward: DriverForward

    def run_calls(self, start: int, stop: int) -> None:
        """Run calls in all pieces, and join the gradients of what these have taken."""
        forward, turns, board = self.forward, self._turns, self.forward.board
        posted = [posted for posted in forward.posted if start <= posted.number < stop]
        if not posted:
            super().run_calls(start, stop)
            return
        worker = self._turns.worker
        for source in list(self._gradients):
            if isinstance(source, JoinedValue) and start <= source.call < stop:
                whole = self._gradients.pop(source).take(worker)
                for piece, part in source.cut(whole).items():
                    sources = self.forward.board.forwards[piece].sources
                    sources.add_gradient(source.part(piece), part, worker)
        if all(one.position is None for one in posted):
            super().run_calls(start, stop)
            for piece in range(1, board.num_pieces):
                board.post(partial(_run_as_guest, number=piece, start=start, stop=stop))
                board.await_all()
            if turns.is_over or start:
                return
        else:
            board.post(lambda piece: piece.backward.run_range(start, stop))
            super().run_calls(start, stop)
        if start == 0 and not turns.is_over:
            turns.go_to_last()
        if turns.is_last:
            turns.end_last()
            # The last one waits in its last turn, whose worker the driver uses.
            last = board.num_pieces - 1
            board.post(lambda piece: piece.backward.end(holds=piece.index == last))
            board.await_all()
            turns.borrow(board.forwards[last].turns)
        else:
            turns.leave()
            board.await_all()
            turns.enter()

    def _run_segment(self, number: int) -> None:
        for (tensor, dim), cut in self.forward.slices.items():
            if tensor.requires_grad and self._segments.made_in(tensor) == number:
                self._join(tensor, dim, cut.parts)
        super()._run_segment(number)

    def _join(self, tensor: Tensor, dim: int | None, parts: Sequence[Tensor]) -> None:
        worker, board = self._turns.worker, self.forward.board
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
        yield from (tensor for tensor, _ in self.forward.slices if tensor.requires_grad)


def _run_as_guest(piece: Any, *, number: int, start: int, stop: int) -> None:
    if piece.index == number:
        with piece.turns.as_guest_of(piece.driver.turns):
            piece.backward.run_range(start, stop, leaves=False)
