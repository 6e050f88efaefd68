"""One microbatch's way back through the chain.

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
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from roundpipe_lightning.engine.chain.forward import ChainRun
from roundpipe_lightning.engine.chain.segments import Source, share_a_graph
from roundpipe_lightning.engine.chain.values import BlockCall, Value
from roundpipe_lightning.engine.worker.loaded_blocks import ResidentBlocks
from roundpipe_lightning.planning.schedule.stages import Stage, StageKind


class BackwardRun:
    """The backward pass of one microbatch.

    Args:
        run: Its forward pass.
        collect: Called when the backward of a segment has ended.
    """

    def __init__(self, run: ChainRun, *, collect: Callable[[], None]) -> None:
        self._run = run
        self._collect = collect
        self._gradients = run.sources.gradients

    def run(self, loss: Tensor, scale: Tensor) -> None:
        """Run it.

        Args:
            loss: The microbatch's.
            scale: Its gradient.
        """
        segments, stop = self._run.segments, len(self._run.calls)
        self._run.drop_turn()
        self._backward([loss], [scale], below=segments.number + 1)
        self._run.sources.fetch_gradients(segments.last.leaves)
        self._collect()
        for number in range(segments.number, -1, -1):
            start = segments[number].start
            for group in self._groups(start, stop):
                self._run_group(group)
            stop = start
            self._run_segment(number)

    def _backward(
        self, roots: Sequence[Tensor], gradients: Sequence[Tensor], *, below: int
    ) -> None:
        """Run the graph of segments, not freeing what segments `below` a number need."""
        lower = [t for t in self._taken() if self._run.segments.made_in(t) < below]
        with self._run.user.in_backward():
            torch.autograd.backward(
                roots, list(gradients), retain_graph=share_a_graph(roots, lower)
            )

    def _taken(self) -> Iterator[Tensor]:
        """Tensors of user code that blocks or later segments have taken and that are to come."""
        for call in self._run.calls:
            yield from (t for t in call.arguments if t.requires_grad)
        for source in self._gradients:
            if isinstance(source, Tensor):
                yield source
        for number in range(self._run.segments.number + 1):
            for source in self._run.segments[number].leaves:
                if isinstance(source, Tensor) and source.requires_grad:
                    yield source

    # -------------------------------------------------------------------------------- segments

    def _run_segment(self, number: int) -> None:
        """Run a segment backward from what others have taken of it."""
        run, segment = self._run, self._run.segments[number]
        roots: list[tuple[Tensor, Tensor]] = []
        for source in list(self._gradients):
            tensor = self._root(source, number)
            if tensor is not None:
                gradient = self._gradients.pop(source)
                roots.append((tensor, gradient.on(run.user.worker_of(tensor))))
        if roots:
            self._backward([t for t, _ in roots], [g for _, g in roots], below=number)
            run.sources.fetch_gradients(segment.leaves)
            self._collect()
        for call in run.calls:
            if call.place.segment == number:
                for value in call.values:
                    value.here = None

    def _root(self, source: Source, number: int) -> Tensor | None:
        """Return what a gradient of a source enters a segment's graph at; None if it does not."""
        segments = self._run.segments
        leaf = segments[number].leaves.get(source)
        if leaf is not None:  # found before, by a later one: it goes first
            return leaf if leaf.requires_grad else None
        if isinstance(source, Value):
            return source.here if source.segment == number else None
        return source if segments.made_in(source) == number else None

    # ---------------------------------------------------------------------------------- groups

    def _groups(self, start: int, stop: int) -> Iterator[list[BlockCall]]:
        """The groups of a range of calls, the last one first."""
        group: list[BlockCall] = []
        for call in reversed(self._run.calls[start:stop]):
            if call.wanted and call.place.segment is None:
                group.insert(0, call)
                if call.begins_group:
                    yield group
                    group = []
        assert not group, "the first call of a segment begins a group"

    def _run_group(self, group: list[BlockCall]) -> None:
        used = self._run.user.side_outputs.used_of
        while group and not (
            any(value in self._gradients for value in group[-1].values)
            or used(range(group[-1].place.number, group[-1].place.number + 1))
        ):
            group.pop()  # nothing needs what it made
        if not group:
            return
        place, worker = group[0].place, self._run.taker.worker
        if place.position is None:
            with worker.streamed(place.block, StageKind.BACKWARD) as resident:
                self._recompute(group, resident)
                _, gradients = resident.take_gradients()
            self._run.taker.add_gradients(gradients)
            return
        stage = self._go_to(place.position)
        worker = self._run.taker.worker
        self._recompute(group, worker.resident(stage, [call.place.block for call in group]))

    def _go_to(self, position: int) -> Stage:
        """Wait for the turn of the BACKWARD stage that has a position."""
        taker = self._run.taker
        while not (taker.stage.kind is StageKind.BACKWARD and position in taker.stage.blocks):
            self._send_ahead(position)
            taker.next_turn()
        return taker.stage

    def _send_ahead(self, position: int) -> None:
        """Send what the next turn takes to its worker: gradients, and the values it begins with.

        Args:
            position: Of the call that is to run next, if the next turn has it.
        """
        run = self._run
        gradients = list(self._gradients.values())
        inputs = [
            value.host
            for call in run.calls
            if call.place.position == position
            for value in call.inputs
            if value.host is not None
        ]
        run.sources.send_ahead([*gradients, *inputs])

    def _recompute(self, group: Sequence[BlockCall], resident: ResidentBlocks) -> None:
        """Run a group's blocks once more, then their backward."""
        sources, user = self._run.sources, self._run.user
        leaves: dict[Source, Tensor] = {}
        made: dict[Source, Tensor] = {}

        def take(source: Source, in_object: bool) -> Tensor:  # noqa: FBT001 - a `Swap`
            if isinstance(source, Value) and in_object and source.in_object:
                return source.phantom()
            return made[source] if source in made else sources.leaf(leaves, source, repeats=True)

        for call in group:
            for value in call.values:
                value.here = None
        with torch.enable_grad():
            for call in group:
                outcome = self._run.runner.run(call, resident, take=take, given=None)
                made.update(zip(call.values, (t for t, _ in outcome.tensors), strict=True))
        worker = self._run.taker.worker
        worker.count_bytes(self._run.boundary_bytes())
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
                    [tensor for tensor, _ in roots], [g.on(worker) for _, g in roots]
                )
        sources.fetch_gradients(leaves)
        for call in group:
            for value in call.values:
                value.host = None  # nothing below takes it
