"""Gradients to the hosts that own them, new values to all: one optimizer step on several hosts.

```
host 0   gradients of b0 ─┐ own elements of b0: sum, step ─┐  b0's new values
host 1   gradients of b0 ─┼──▶ all_to_all ──▶ sum, step ───┼──▶ all_to_all ──▶ everybody
host 2   gradients of b0 ─┘                   sum, step ───┘
```

Sums are made by the owner in the order of the hosts, so they have the same bits run after run.
(gloo's own `reduce_scatter` sends everything twice, and adds in another order.) Gradients and new
values travel in chunks, on a group each that has two threads:

```
begins   [pack 0][pack 1][pack 2]  [pack 3]  [pack 4]
wire            [0 ───────][1 ───────][2 ───────][3 ───────]
ends                       [add up 0] [add up 1] [add up 2]
```

So the network does not stand still between two chunks or two blocks. Several chunks have to be on
their way: gloo sends what the receiver has said to wait for, and says that behind what it sends
itself. With one chunk at a time either direction stands still half of the time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from roundpipe_lightning.engine.device.host_memory import keep_pieces_apart
from roundpipe_lightning.engine.exchange.hosts import Hosts, Line, Taken
from roundpipe_lightning.engine.store.block_layout import gradient_dtype
from roundpipe_lightning.errors import ConfigurationError

_ALIGNMENT = 16  # elements: a cache line of float32


@dataclass(frozen=True)
class Piece:
    """Elements that a host owns of a parameter: `start` to `stop` of the flattened parameter."""

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
    """Which host owns which elements; the same on all hosts, and for the whole training.

    The parameters of a block, one after the other, are cut into as many pieces as there are hosts:

    ```
    block     [ q_proj          | k_proj  | v_proj  | o_proj          | norm ]
    elements  host 0 ────────────▶ host 1 ─────────────▶ host 2 ─────────────▶
    ```

    So every host owns its part of every block, and one piece at most of a parameter. An
    optimizer that needs a whole matrix gets whole parameters; then hosts own their parts of all
    blocks together.

    Args:
        parts: How much each host owns, together 1.
    """

    def __init__(self, parts: Sequence[float]) -> None:
        self._parts = parts
        self._ends = [0.0, *accumulate(parts[:-1]), 1.0]
        self._loads = [0] * len(parts)
        self._pieces: dict[Tensor, list[Piece | None]] = {}

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor in self._pieces

    def divide(self, tensors: Sequence[Tensor], *, whole: bool) -> None:
        """Give the parameters of a block owners that have none yet; one each if they stay `whole`.

        Raises:
            ConfigurationError: A parameter's elements do not lie one after the other.
        """
        if not all(tensor.is_contiguous() for tensor in tensors):
            raise ConfigurationError(
                "A parameter is not contiguous, which training on several hosts does not support. "
                "Replace it by nn.Parameter(parameter.detach().contiguous())."
            )
        new = [tensor for tensor in tensors if tensor not in self._pieces]
        if whole:
            for tensor in new:
                hosts = range(len(self._parts))
                owner = min(hosts, key=lambda host: self._loads[host] / self._parts[host])
                self._loads[owner] += tensor.numel()
                whole_one = Piece(tensor, 0, tensor.numel())
                self._pieces[tensor] = [whole_one if host == owner else None for host in hosts]
            return
        total, offset = sum(tensor.numel() for tensor in new), 0
        bounds = [_aligned(int(total * end), total) for end in self._ends]
        for tensor in new:
            cuts = [min(max(bound - offset, 0), tensor.numel()) for bound in bounds]
            self._pieces[tensor] = [
                Piece(tensor, start, stop) if start < stop else None
                for start, stop in pairwise(cuts)
            ]
            offset += tensor.numel()

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._pieces)

    def pieces(self, tensor: Tensor) -> Sequence[Piece | None]:
        """Return what each host owns of a parameter, by rank; empty: nobody owns it yet."""
        return self._pieces.get(tensor, ())


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


_CHUNK_BYTES = 2**21  # about so much is sent at once
_ON_THE_WAY = 4

T = TypeVar("T")

Elements: TypeAlias = Sequence[slice]
"""A range of what each host owns, by rank."""

Arrived: TypeAlias = Callable[[Sequence[Tensor]], None]
"""Called with what each host gave."""

Begin: TypeAlias = Callable[[Callable[[], Taken], Arrived], None]
"""Begins an operation, and has what comes be taken in another thread."""


@dataclass(frozen=True, kw_only=True)
class Given:
    """A host's part of the gradients of some parameters."""

    gradients: Mapping[Tensor, Tensor]  # by parameter; missing ones count as zeros
    share: float  # they are multiplied by it
    read_whole: Collection[Tensor]  # parameters of which this host needs the values themselves


@dataclass(frozen=True, kw_only=True)
class Sums:
    """Gradients of some parameters, added up."""

    present: Sequence[Tensor]  # parameters of which some host has a gradient
    read_whole: Collection[Tensor]  # those of which some host needs the new values themselves
    owned: Mapping[Tensor, Tensor]  # sums of what this host owns, one-dimensional, by parameter


class Exchange:
    """What hosts send each other for the steps of an optimizer. One thread calls it."""

    def __init__(self, hosts: Hosts) -> None:
        keep_pieces_apart(2 * _CHUNK_BYTES)  # else sums and moments leave holes behind
        self.hosts = hosts
        self.ownership = Ownership(hosts.parts)
        self._gradients = Traffic(hosts, hosts.gradients, "gradients")
        self._weights = Traffic(hosts, hosts.weights, "values")

    def to_first(self, mine: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
        """Give host 0 a tensor, one-dimensional; there, return what each host gave."""
        given = [mine, *[mine[:0]] * (self.hosts.num - 1)]
        return self._gradients.call(self.hosts.gradients.swap, given, sizes)

    def agree(self, value: Any) -> Sequence[Any]:
        """Return every host's object, by rank; not while gradients travel."""
        return self._gradients.call(self.hosts.gradients.objects, value)

    def sum(self, name: str, tensors: Sequence[Tensor], given: Callable[[], Given]) -> Future[Sums]:
        """Begin to add up gradients over the hosts. Calls come in the same order on all hosts.

        Args:
            name: The block's, for messages.
            tensors: Parameters of a block, the same on all hosts.
            given: Called in the thread of the gradients: waits for those of this host.
        """
        return self._gradients.run(name, partial(self._sum, tensors, given))

    def gather(
        self, name: str, values: Mapping[Tensor, Tensor], then: Callable[[], None]
    ) -> Future[None]:
        """Begin to bring every owner's values to all hosts. Calls come in the same order on all.

        Args:
            name: The block's, for messages.
            values: By parameter, of its shape: what its owners have is new.
            then: Called when all is.
        """
        return self._weights.run(name, partial(self._gather, values, then))

    def close(self) -> None:
        """End the threads, when what travels has arrived or is given up (`Hosts.close`)."""
        self._gradients.close()
        self._weights.close()

    # In their threads ----------------------------------------------------------------------------

    def _sum(
        self, tensors: Sequence[Tensor], given: Callable[[], Given], begin: Begin
    ) -> Callable[[], Sums]:
        """Begin to add up; return what gives the sums in the end.

        Before each host's elements goes which gradients there are; missing ones go as zeros.
        """
        rank, num = self.hosts.rank, self.hosts.num
        mine, found = given(), list[tuple[Sequence[Tensor], Sequence[Piece], Tensor]]()
        for members, dtype in _by_dtype({tensor: gradient_dtype(tensor) for tensor in tensors}):
            of_hosts = [self._pieces(members, host) for host in range(num)]
            said = [[p in mine.gradients, p in mine.read_whole] for p in members]
            flags = torch.tensor(said, dtype=dtype).view(-1)
            values = [
                [flags, *(_values_of(p, mine.gradients.get(p.tensor), dtype) for p in of)]
                for of in of_hosts
            ]
            sizes = [sum(map(torch.numel, some)) for some in values]
            sums = torch.empty(sizes[rank], dtype=dtype)
            for elements in self._chunks(sizes, dtype):
                begin(
                    partial(self._begin_sum, values, mine.share, dtype, elements),
                    partial(_add_into, sums[elements[rank]]),
                )
            found.append((members, of_hosts[rank], sums))
        return partial(_summed, found)

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

    def _gather(
        self, values: Mapping[Tensor, Tensor], then: Callable[[], None], begin: Begin
    ) -> Callable[[], None]:
        rank, num = self.hosts.rank, self.hosts.num
        for members, dtype in _by_dtype({tensor: each.dtype for tensor, each in values.items()}):
            of_hosts = [self._pieces(members, host) for host in range(num)]
            places = [[piece.of(values[piece.tensor]) for piece in of] for of in of_hosts]
            sizes = [sum(piece.size for piece in of) for of in of_hosts]
            for elements in self._chunks(sizes, dtype):
                begin(
                    partial(self._begin_gather, places[rank], dtype, elements),
                    partial(_write_all, places, elements, rank),
                )
        return then

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
        found = (self.ownership.pieces(tensor)[host] for tensor in tensors)
        return [piece for piece in found if piece is not None]

    def _chunks(self, sizes: Sequence[int], dtype: torch.dtype) -> Iterable[Elements]:
        """Yield a range of each host's elements, of about equal bytes together."""
        most = max(1, _CHUNK_BYTES // (dtype.itemsize * self.hosts.num))
        num = -(-max(sizes) // most)
        for chunk in range(num):
            yield [part_of(size, chunk, num) for size in sizes]


@dataclass(eq=False)
class Traffic:
    """The operations of a line, which tasks begin one after the other."""

    hosts: Hosts
    line: Line
    what: str  # goes over it, for messages

    def __post_init__(self) -> None:
        self._free = threading.Semaphore(_ON_THE_WAY)
        self._begins = ThreadPoolExecutor(1, thread_name_prefix=f"roundpipe-{self.what}")
        self._ends = ThreadPoolExecutor(1, thread_name_prefix=f"roundpipe-{self.what}-arrive")

    def run(self, block: str, task: Callable[[Begin], Callable[[], T]]) -> Future[T]:
        """Run a task that begins operations, and returns what makes the result when all have ended.

        The block's name is for messages.
        """
        result = Future[T]()
        self._begins.submit(self._run, block, task, result)
        return result

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function that begins operations and waits for them."""

        def task(_: Begin) -> Callable[[], T]:
            value = function(*args)
            return lambda: value

        return self.run("", task).result()

    def close(self) -> None:
        self._begins.shutdown(cancel_futures=True)
        self._ends.shutdown()

    def _run(self, block: str, task: Callable[[Begin], Callable[[], T]], result: Future[T]) -> None:
        self.line.what = f"{self.what} of block {block}" if block else self.what
        self.hosts.block = block or self.hosts.block
        try:
            with self.line.kept_in_order():
                end = task(self._begin)
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            result.set_exception(error)
        else:
            self._ends.submit(self._end, end, result)

    def _begin(self, begin: Callable[[], Taken], arrived: Arrived) -> None:
        self._free.acquire()
        try:
            self._ends.submit(self._arrive, begin(), arrived)
        except BaseException:
            self._free.release()
            raise

    def _arrive(self, taken: Taken, arrived: Arrived) -> None:
        try:
            with suppress(BaseException), self.line.kept_in_order():  # `_end` raises it
                self.line.check_in_order()
                arrived(taken())
        finally:
            self._free.release()

    def _end(self, end: Callable[[], T], result: Future[T]) -> None:
        try:
            self.line.check_in_order()
            result.set_result(end())
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            result.set_exception(error)


def _by_dtype(dtypes: Mapping[Tensor, torch.dtype]) -> list[tuple[list[Tensor], torch.dtype]]:
    found: dict[torch.dtype, list[Tensor]] = {}
    for tensor, dtype in dtypes.items():
        found.setdefault(dtype, []).append(tensor)
    return [(members, dtype) for dtype, members in found.items()]


def _summed(found: Sequence[tuple[Sequence[Tensor], Sequence[Piece], Tensor]]) -> Sums:
    present, read_whole = dict[Tensor, None](), set[Tensor]()
    owned: dict[Tensor, Tensor] = {}
    for members, pieces, sums in found:
        said, *parts = sums.split([2 * len(members), *(piece.size for piece in pieces)])
        flags = (said > 0).view(-1, 2).tolist()
        present |= {p: None for p, (is_there, _) in zip(members, flags, strict=True) if is_there}
        read_whole |= {p for p, (_, is_read) in zip(members, flags, strict=True) if is_read}
        arrived = zip(pieces, parts, strict=True)
        owned |= {piece.tensor: part for piece, part in arrived if piece.tensor in present}
    return Sums(present=list(present), read_whole=read_whole, owned=owned)


def _add_into(sums: Tensor, taken: Sequence[Tensor]) -> None:
    """Add up in the order of the hosts, in float32 at least."""
    dtype = torch.promote_types(sums.dtype, torch.float32)
    total = taken[0].to(dtype, copy=True)
    for term in taken[1:]:
        total += term
    sums.copy_(total)


def _write_all(
    places: Sequence[Sequence[Tensor]], elements: Elements, rank: int, taken: Sequence[Tensor]
) -> None:
    for host, new in enumerate(taken):
        if host != rank:
            write_range(places[host], elements[host], new)


def _values_of(piece: Piece, gradient: Tensor | None, dtype: torch.dtype) -> Tensor:
    if gradient is None:
        return torch.zeros((), dtype=dtype).expand(piece.size)
    return gradient.detach().reshape(-1)[piece.start : piece.stop]


def _length(elements: slice) -> int:
    return int(elements.stop - elements.start)
