"""Gradients to the hosts that own them, new values to all: one optimizer step on several hosts.

```
host 0   gradients of b0 ─┐ own elements of b0: sum, step ─┐  b0's new values
host 1   gradients of b0 ─┼──▶ all_to_all ──▶ sum, step ───┼──▶ all_to_all ──▶ everybody
host 2   gradients of b0 ─┘                   sum, step ───┘
```

Sums are made by the owner in the order of the hosts, so they have the same bits run after run.
(gloo's own `reduce_scatter` sends everything twice, and adds in another order.) Blocks go one after
the other, in the same order on all hosts; while one is stepped, the gradients of the next ones and
the new values of those before travel, in two threads with a group each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from roundpipe_lightning.engine.exchange.hosts import Hosts
from roundpipe_lightning.engine.exchange.ranges import (
    Ownership,
    Piece,
    copy_range,
    part_of,
    write_range,
)
from roundpipe_lightning.engine.store.block_layout import gradient_dtype
from roundpipe_lightning.errors import ConfigurationError

_CHUNK_BYTES = 2**23


class Exchange:
    """What hosts send each other for the steps of an optimizer. One thread calls it.

    Args:
        hosts: All hosts.
        chunk_bytes: About how much is sent at once.
    """

    def __init__(self, hosts: Hosts, *, chunk_bytes: int = _CHUNK_BYTES) -> None:
        self.hosts = hosts
        self._chunk_bytes = chunk_bytes
        self._ownership = Ownership(hosts.num)
        self._gradients = ThreadPoolExecutor(1, thread_name_prefix="roundpipe-gradients")
        self._weights = ThreadPoolExecutor(1, thread_name_prefix="roundpipe-weights")

    # Who owns what -------------------------------------------------------------------------------

    def divide(self, tensors: Sequence[Tensor], *, whole: bool) -> None:
        """As `Ownership.divide`.

        Raises:
            ConfigurationError: A parameter's elements do not lie one after the other.
        """
        if not all(tensor.is_contiguous() for tensor in tensors):
            raise ConfigurationError(
                "A parameter is not contiguous, which training on several hosts does not support. "
                "Replace it by nn.Parameter(parameter.detach().contiguous())."
            )
        self._ownership.divide(tensors, whole=whole)

    def owned(self, tensor: Tensor) -> Piece | None:
        """Return what this host owns of a parameter; None: nothing, or nobody owns it yet."""
        if tensor not in self._ownership:
            return None
        return self._ownership.pieces(tensor)[self.hosts.rank]

    def is_divided(self, tensor: Tensor) -> bool:
        return tensor in self._ownership

    def to_first(self, mine: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
        """Give host 0 a tensor, one-dimensional; there, return what each host gave."""
        given = [mine, *[mine[:0]] * (self.hosts.num - 1)]
        return self._gradients.submit(self.hosts.gradients.swap, given, sizes).result()

    # Steps ---------------------------------------------------------------------------------------

    def agree(self, value: Any) -> Sequence[Any]:
        """Return every host's object, by rank; not while gradients travel."""
        return self._gradients.submit(self.hosts.gradients.objects, value).result()

    def sum(
        self, tensors: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> Future[dict[Tensor, Tensor]]:
        """Begin to add up gradients over the hosts.

        Args:
            tensors: Parameters of a block, the same on all hosts.
            gradients: This host's, of their shapes; None counts as zeros.

        Returns:
            The sums of what this host owns, one-dimensional, by parameter.
        """
        return self._gradients.submit(self._sum, tensors, gradients)

    def gather(self, tensors: Sequence[Tensor], then: Callable[[], None]) -> Future[None]:
        """Begin to bring every owner's values into all hosts' parameters.

        Args:
            tensors: Parameters of a block, the same on all hosts; what this host owns is new.
            then: Called when all is.
        """
        return self._weights.submit(self._gather, tensors, then)

    def close(self) -> None:
        """End the threads, when what travels has arrived or is given up (`Hosts.close`)."""
        self._gradients.shutdown(cancel_futures=True)
        self._weights.shutdown(cancel_futures=True)

    # In their threads ----------------------------------------------------------------------------

    def _sum(
        self, tensors: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> dict[Tensor, Tensor]:
        rank, sums = self.hosts.rank, dict[Tensor, Tensor]()
        given = dict(zip(tensors, gradients, strict=True))
        for members, dtype in _by_dtype(tensors, gradient_dtype):
            of_hosts = [self._pieces(members, host) for host in range(self.hosts.num)]
            values = [
                [_values_of(piece, given[piece.tensor], dtype) for piece in of] for of in of_hosts
            ]
            mine = torch.empty(sum(piece.size for piece in of_hosts[rank]), dtype=dtype)
            for elements in self._chunks(of_hosts, dtype):
                sent = []
                for host, some in enumerate(values):
                    part = torch.empty(_length(elements[host]), dtype=dtype)
                    copy_range(some, elements[host], part)
                    sent.append(part)
                count = _length(elements[rank])
                taken = self.hosts.gradients.swap(sent, [count] * self.hosts.num)
                mine[elements[rank]] = _added(taken)
            pieces = of_hosts[rank]
            parts = mine.split([piece.size for piece in pieces])
            sums |= {piece.tensor: part for piece, part in zip(pieces, parts, strict=True)}
        return sums

    def _gather(self, tensors: Sequence[Tensor], then: Callable[[], None]) -> None:
        rank, num = self.hosts.rank, self.hosts.num
        for members, dtype in _by_dtype(tensors, lambda tensor: tensor.dtype):
            of_hosts = [self._pieces(members, host) for host in range(num)]
            values = [[piece.of(piece.tensor) for piece in of] for of in of_hosts]
            for elements in self._chunks(of_hosts, dtype):
                mine = torch.empty(_length(elements[rank]), dtype=dtype)
                copy_range(values[rank], elements[rank], mine)
                sent = [mine[:0] if host == rank else mine for host in range(num)]
                sizes = [0 if h == rank else _length(some) for h, some in enumerate(elements)]
                taken = self.hosts.weights.swap(sent, sizes)
                for host, new in enumerate(taken):
                    if host != rank:
                        write_range(values[host], elements[host], new)
        then()

    def _pieces(self, tensors: Sequence[Tensor], host: int) -> Sequence[Piece]:
        found = (self._ownership.pieces(tensor)[host] for tensor in tensors)
        return [piece for piece in found if piece is not None]

    def _chunks(
        self, of_hosts: Sequence[Sequence[Piece]], dtype: torch.dtype
    ) -> Iterable[Sequence[slice]]:
        """Yield a range of each host's elements, of about equal bytes together."""
        sizes = [sum(piece.size for piece in pieces) for pieces in of_hosts]
        most = max(1, self._chunk_bytes // (dtype.itemsize * self.hosts.num))
        num = -(-max(sizes) // most)
        for chunk in range(num):
            yield [part_of(size, chunk, num) for size in sizes]


def _by_dtype(
    tensors: Sequence[Tensor], dtype_of: Callable[[Tensor], torch.dtype]
) -> list[tuple[list[Tensor], torch.dtype]]:
    found: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault(dtype_of(tensor), []).append(tensor)
    return [(members, dtype) for dtype, members in found.items()]


def _values_of(piece: Piece, gradient: Tensor | None, dtype: torch.dtype) -> Tensor:
    if gradient is None:
        return torch.zeros((), dtype=dtype).expand(piece.size)
    return gradient.detach().reshape(-1)[piece.start : piece.stop]


def _added(terms: Sequence[Tensor]) -> Tensor:
    """Add up in the order of the hosts, in float32 at least."""
    first = terms[0]
    total = first.to(torch.promote_types(first.dtype, torch.float32), copy=True)
    for term in terms[1:]:
        total += term
    return total.to(first.dtype)


def _length(elements: slice) -> int:
    return int(elements.stop - elements.start)
