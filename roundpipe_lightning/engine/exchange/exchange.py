"""Gradients to the hosts that own them, new values to all: one optimizer step on several hosts.

```
host 0   gradients of b0 ─┐ own elements of b0: sum, step ─┐  b0's new values
host 1   gradients of b0 ─┼──▶ all_to_all ──▶ sum, step ───┼──▶ all_to_all ──▶ everybody
host 2   gradients of b0 ─┘                   sum, step ───┘
```

Sums are made by the owner in the order of the hosts, so they have the same bits run after run.
(gloo's own `reduce_scatter` sends everything twice, and adds in another order.) Gradients and new
values travel in two threads with a group each, in chunks: while one is on the wire, the next is
packed and the one before is added up.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from roundpipe_lightning.engine.exchange.hosts import Hosts, Line, Taken
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

T = TypeVar("T")

Elements: TypeAlias = Sequence[slice]
"""A range of what each host owns, by rank."""


@dataclass(frozen=True, kw_only=True)
class Given:
    """A host's part of the gradients of some parameters.

    Attributes:
        gradients: By parameter, of their shapes; missing ones count as zeros.
        share: They are multiplied by it.
        read_whole: Parameters of which this host needs the new values themselves.
    """

    gradients: Mapping[Tensor, Tensor]
    share: float
    read_whole: Collection[Tensor]


@dataclass(frozen=True, kw_only=True)
class Sums:
    """Gradients of some parameters, added up.

    Attributes:
        present: Parameters of which some host has a gradient.
        read_whole: Those of which some host needs the new values themselves.
        owned: The sums of what this host owns, one-dimensional, by parameter.
    """

    present: Sequence[Tensor]
    read_whole: Collection[Tensor]
    owned: Mapping[Tensor, Tensor]


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
        swap = self.hosts.gradients.swap
        return self._by_gradients("the optimizer's state", "", swap, given, sizes).result()

    # Steps ---------------------------------------------------------------------------------------

    def agree(self, value: Any) -> Sequence[Any]:
        """Return every host's object, by rank; not while gradients travel."""
        return self._by_gradients("steps", "", self.hosts.gradients.objects, value).result()

    def sum(self, name: str, tensors: Sequence[Tensor], given: Callable[[], Given]) -> Future[Sums]:
        """Begin to add up gradients over the hosts. Calls come in the same order on all hosts.

        Args:
            name: The block's, for messages.
            tensors: Parameters of a block, the same on all hosts.
            given: Called in the thread of the gradients: waits for those of this host.
        """
        return self._by_gradients("gradients", name, self._sum, tensors, given)

    def gather(
        self, name: str, values: Mapping[Tensor, Tensor], then: Callable[[], None]
    ) -> Future[None]:
        """Begin to bring every owner's values to all hosts. Calls come in the same order on all.

        Args:
            name: The block's, for messages.
            values: By parameter, of its shape: what its owners have is new.
            then: Called when all is.
        """
        line = self.hosts.weights
        return self._weights.submit(self._run, line, "values", name, self._gather, values, then)

    def close(self) -> None:
        """End the threads, when what travels has arrived or is given up (`Hosts.close`)."""
        self._gradients.shutdown(cancel_futures=True)
        self._weights.shutdown(cancel_futures=True)

    def _by_gradients(self, what: str, block: str, task: Callable[..., T], *args: Any) -> Future[T]:
        return self._gradients.submit(self._run, self.hosts.gradients, what, block, task, *args)

    # In their threads ----------------------------------------------------------------------------

    def _run(self, line: Line, what: str, block: str, task: Callable[..., T], *args: Any) -> T:
        line.what = f"{what} of block {block}" if block else what
        self.hosts.block = block or self.hosts.block
        with line.kept_in_order():
            return task(*args)

    def _sum(self, tensors: Sequence[Tensor], given: Callable[[], Given]) -> Sums:
        rank, num = self.hosts.rank, self.hosts.num
        mine, owned = given(), dict[Tensor, Tensor]()
        flags = torch.tensor([[p in mine.gradients, p in mine.read_whole] for p in tensors])
        said = self.hosts.gradients.swap([flags.view(-1)] * num, [flags.numel()] * num)
        of_some = torch.stack(list(said)).any(0).view(-1, 2).tolist()
        present = [p for p, (is_there, _) in zip(tensors, of_some, strict=True) if is_there]
        read_whole = {p for p, (_, is_read) in zip(tensors, of_some, strict=True) if is_read}
        for members, dtype in _by_dtype({tensor: gradient_dtype(tensor) for tensor in present}):
            of_hosts = [self._pieces(members, host) for host in range(num)]
            values = [
                [_values_of(piece, mine.gradients.get(piece.tensor), dtype) for piece in of]
                for of in of_hosts
            ]
            begin = partial(self._begin_sum, values, mine.share, dtype)
            sums = torch.empty(sum(piece.size for piece in of_hosts[rank]), dtype=dtype)
            for elements, taken in _one_ahead(self._chunks(of_hosts, dtype), begin):
                sums[elements[rank]] = _added(taken)
            parts = sums.split([piece.size for piece in of_hosts[rank]])
            owned |= {p.tensor: part for p, part in zip(of_hosts[rank], parts, strict=True)}
        return Sums(present=present, read_whole=read_whole, owned=owned)

    def _begin_sum(
        self,
        values: Sequence[Sequence[Tensor]],
        share: float,
        dtype: torch.dtype,
        elements: Elements,
    ) -> Taken:
        counts = [_length(some) for some in elements]
        sent = torch.empty(sum(counts), dtype=dtype)
        for some, part, into in zip(values, elements, sent.split(counts), strict=True):
            copy_range(some, part, into)
        if share != 1:
            sent *= share
        return self.hosts.gradients.begin(sent, counts, [counts[self.hosts.rank]] * len(counts))

    def _gather(self, values: Mapping[Tensor, Tensor], then: Callable[[], None]) -> None:
        rank, num = self.hosts.rank, self.hosts.num
        for members, dtype in _by_dtype({tensor: each.dtype for tensor, each in values.items()}):
            of_hosts = [self._pieces(members, host) for host in range(num)]
            places = [[piece.of(values[piece.tensor]) for piece in of] for of in of_hosts]
            begin = partial(self._begin_gather, places[rank], dtype)
            for elements, taken in _one_ahead(self._chunks(of_hosts, dtype), begin):
                for host, new in enumerate(taken):
                    if host != rank:
                        write_range(places[host], elements[host], new)
        then()

    def _begin_gather(
        self, mine: Sequence[Tensor], dtype: torch.dtype, elements: Elements
    ) -> Taken:
        rank, num = self.hosts.rank, self.hosts.num
        part = torch.empty(_length(elements[rank]), dtype=dtype)
        copy_range(mine, elements[rank], part)
        counts = [0 if host == rank else len(part) for host in range(num)]
        sizes = [0 if host == rank else _length(some) for host, some in enumerate(elements)]
        return self.hosts.weights.begin(part.repeat(num - 1), counts, sizes)

    def _pieces(self, tensors: Sequence[Tensor], host: int) -> Sequence[Piece]:
        found = (self._ownership.pieces(tensor)[host] for tensor in tensors)
        return [piece for piece in found if piece is not None]

    def _chunks(
        self, of_hosts: Sequence[Sequence[Piece]], dtype: torch.dtype
    ) -> Iterable[Elements]:
        """Yield a range of each host's elements, of about equal bytes together."""
        sizes = [sum(piece.size for piece in pieces) for pieces in of_hosts]
        most = max(1, self._chunk_bytes // (dtype.itemsize * self.hosts.num))
        num = -(-max(sizes) // most)
        for chunk in range(num):
            yield [part_of(size, chunk, num) for size in sizes]


def _by_dtype(dtypes: Mapping[Tensor, torch.dtype]) -> list[tuple[list[Tensor], torch.dtype]]:
    found: dict[torch.dtype, list[Tensor]] = {}
    for tensor, dtype in dtypes.items():
        found.setdefault(dtype, []).append(tensor)
    return [(members, dtype) for dtype, members in found.items()]


def _one_ahead(
    chunks: Iterable[Elements], begin: Callable[[Elements], Taken]
) -> Iterator[tuple[Elements, Sequence[Tensor]]]:
    """Yield chunks with what was taken; each is waited for when the next one is on its way."""
    before: tuple[Elements, Taken] | None = None
    for elements in chunks:
        begun = elements, begin(elements)
        if before is not None:
            yield before[0], before[1]()
        before = begun
    if before is not None:
        yield before[0], before[1]()


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
