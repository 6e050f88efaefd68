"""Segments: the pieces of a microbatch's graph that user code makes between the blocks.

```
calls        0 1 2          3 4            5 (fused)
segments   0       1            2
           head    middle       tail, with the fused blocks
```

A segment's graph begins at leaves: values of blocks before it, and tensors of earlier segments. It
runs backward as a whole, when the blocks above it have: what it made and others took has all its
gradients then, and what it took hands its gradients on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from roundpipe_lightning.engine.chain.values import Value

Source: TypeAlias = Value | Tensor
"""Where a tensor that a block or a segment takes comes from: a block, or user code."""


@dataclass(kw_only=True, eq=False)
class Segment:
    """A piece of user code.

    Attributes:
        start: How many calls were made before it.
        first_node: Number of its first autograd node.
        is_fused: Whether it runs in the FUSED stage's turn, whose blocks are part of its graph.
        is_closed: Whether blocks without a graph have run since: who takes what they made needs a
            segment of its own.
        leaves: What stands in it for what it takes.
    """

    start: int
    first_node: int
    is_fused: bool = False
    is_closed: bool = False
    leaves: dict[Source, Tensor] = field(default_factory=dict)


class Segments:
    """The segments of one microbatch; the head segment is there from the beginning."""

    def __init__(self) -> None:
        self._all = [Segment(start=0, first_node=0)]

    @property
    def last(self) -> Segment:
        """The one whose code runs at present."""
        return self._all[-1]

    @property
    def number(self) -> int:
        """Number of the last one."""
        return len(self._all) - 1

    def __getitem__(self, number: int) -> Segment:
        """Return a segment."""
        return self._all[number]

    def open(self, *, num_calls: int, is_fused: bool) -> None:
        """Let what follows be a segment of its own."""
        self._all.append(Segment(start=num_calls, first_node=_next_node(), is_fused=is_fused))

    def made_in(self, tensor: Tensor) -> int:
        """Return the number of the segment that made a tensor; 0 for leaves."""
        node = tensor.grad_fn
        if node is None:
            return 0
        number = node._sequence_nr()  # noqa: SLF001
        return max(i for i, segment in enumerate(self._all) if segment.first_node <= number)

    def is_earlier(self, tensor: Tensor) -> bool:
        """Say whether a tensor has a graph that an earlier segment made."""
        if len(self._all) == 1 or tensor.grad_fn is None:
            return False
        return tensor.grad_fn._sequence_nr() < self.last.first_node  # noqa: SLF001

    def clear(self) -> None:
        """Forget everything."""
        for segment in self._all:
            segment.leaves.clear()
        self._all.clear()


def share_a_graph(upper: Sequence[Tensor], lower: Sequence[Tensor]) -> bool:
    """Say whether the graph of some tensors reaches into the graph that made others.

    It does where user code carries a tensor past PyTorch's functions. Both graphs are then run
    backward, so the first run must not free what the second needs.
    """
    below = _nodes([tensor.grad_fn for tensor in lower])
    return bool(below) and not below.isdisjoint(_nodes([tensor.grad_fn for tensor in upper]))


def reachable_leaves(outputs: Sequence[Tensor]) -> set[Any]:
    """Return the autograd nodes of the leaves that tensors depend on."""
    return {n for n in _nodes([t.grad_fn for t in outputs], leaves=True) if not n.next_functions}


def _nodes(starts: Sequence[Any], *, leaves: bool = False) -> set[Any]:
    """All autograd nodes that can be reached; those of the leaves, which keep nothing, if asked."""
    found: set[Any] = set()
    pending = [node for node in starts if node is not None]
    while pending:
        node = pending.pop()
        if node not in found and (leaves or node.next_functions):
            found.add(node)
            pending.extend(
                following for following, _ in node.next_functions if following is not None
            )
    return found


def _next_node() -> int:
    """Return a number that is above those of all of this thread's autograd nodes."""
    with torch.enable_grad():
        node = torch.zeros((), requires_grad=True).clone().grad_fn
    assert node is not None, "the clone of a tensor that requires a gradient has one"
    return node._sequence_nr()  # noqa: SLF001
