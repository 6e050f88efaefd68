"""Which host owns which elements of which parameters.

The parameters of a block, one after the other, are cut into as many pieces as there are hosts:

```
block     [ q_proj          | k_proj  | v_proj  | o_proj          | norm ]
elements  host 0 ────────────▶ host 1 ─────────────▶ host 2 ─────────────▶
```

So every host owns about as much of every block, and one piece at most of a parameter. An optimizer
that needs a whole matrix gets whole parameters; then hosts own as much of all blocks together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

_ALIGNMENT = 16  # elements: a cache line of float32


@dataclass(frozen=True)
class Piece:
    """Elements that a host owns of one parameter.

    Attributes:
        tensor: The parameter.
        start: Its first element, of the flattened parameter.
        stop: The element after the last one.
    """

    tensor: Tensor
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def elements(self) -> slice:
        return slice(self.start, self.stop)

    @property
    def is_whole(self) -> bool:
        return self.size == self.tensor.numel()

    def of(self, values: Tensor) -> Tensor:
        """Return these elements of a tensor of the parameter's shape: a view, one-dimensional."""
        return values.detach().view(-1)[self.start : self.stop]


class Ownership:
    """Which host owns what; the same on all hosts, and for the whole training.

    Args:
        num_hosts: How many there are.
    """

    def __init__(self, num_hosts: int) -> None:
        self._num_hosts = num_hosts
        self._loads = [0] * num_hosts
        self._pieces: dict[Tensor, list[Piece | None]] = {}

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor in self._pieces

    def divide(self, tensors: Sequence[Tensor], *, whole: bool) -> None:
        """Give those owners that have none yet.

        Args:
            tensors: The parameters of a block.
            whole: Whether a parameter has one owner.
        """
        new = [tensor for tensor in tensors if tensor not in self._pieces]
        if whole:
            for tensor in new:
                owner = self._loads.index(min(self._loads))
                self._loads[owner] += tensor.numel()
                whole_one = Piece(tensor, 0, tensor.numel())
                self._pieces[tensor] = [
                    whole_one if host == owner else None for host in range(self._num_hosts)
                ]
            return
        total, offset = sum(tensor.numel() for tensor in new), 0
        bounds = [_aligned(total * host // self._num_hosts, total) for host in self._ends]
        for tensor in new:
            cuts = [min(max(bound - offset, 0), tensor.numel()) for bound in bounds]
            self._pieces[tensor] = [
                Piece(tensor, start, stop) if start < stop else None
                for start, stop in pairwise(cuts)
            ]
            offset += tensor.numel()

    @property
    def _ends(self) -> range:
        return range(self._num_hosts + 1)

    @property
    def tensors(self) -> Iterable[Tensor]:
        return self._pieces.keys()

    def pieces(self, tensor: Tensor) -> Sequence[Piece | None]:
        """Return what each host owns of a parameter, by rank."""
        return self._pieces[tensor]


def _aligned(bound: int, total: int) -> int:
    return min(-(-bound // _ALIGNMENT) * _ALIGNMENT, total)


def part_of(count: int, part: int, num_parts: int) -> slice:
    """Return one of about equal parts of `count` elements."""
    return slice(count * part // num_parts, count * (part + 1) // num_parts)


def copy_range(values: Sequence[Tensor], elements: slice, into: Tensor) -> None:
    """Copy a range of the elements of one-dimensional tensors, one after the other, into one."""
    for mine, theirs in _overlaps(values, elements):
        into[theirs].copy_(mine)


def write_range(values: Sequence[Tensor], elements: slice, new: Tensor) -> None:
    """Write into a range of the elements of one-dimensional tensors: what `copy_range` reads."""
    with torch.no_grad():
        for mine, theirs in _overlaps(values, elements):
            mine.copy_(new[theirs])


def _overlaps(values: Sequence[Tensor], elements: slice) -> list[tuple[Tensor, slice]]:
    found, offset = [], 0
    for value in values:
        start = max(elements.start - offset, 0)
        stop = min(elements.stop - offset, value.numel())
        if start < stop:
            at = offset + start - elements.start
            found.append((value[start:stop], slice(at, at + stop - start)))
        offset += value.numel()
    return found
