"""Page-locked host memory for boundaries, divided into pools: one per microbatch under way.

A microbatch borrows in the order of its own thread, from the pool that it has, and what it gives
back can be lent again at once: whoever writes there next waits for the copies that were still using
it. So what a pool needs follows from what the microbatch sends home, not from who was faster. A
pool goes to another microbatch when the schedule says that the one before has ended (`pool_numbers`
of `worker/turns.py`), and the pools of two steps under way are apart:

```
addresses   0 .............. set 0 .............. set 1 .............. length of the buffer
            [ pool 0        ][ pool 1        ]   [ pool 0 ][ pool 1 ]
              lent  gap lent   lent     gap
```

Page-locking takes long and stops the device, so it is done between steps only. What a microbatch
needs beyond its pool it gets from ordinary memory, whose copies are slower, and the pools of that
number are made as long as that microbatch has needed. From the second step of a kind on everything
is page-locked.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from roundpipe_lightning.engine.device.base import Device
from roundpipe_lightning.engine.device.events import Event
from roundpipe_lightning.engine.device.host_memory import own_pages

_ALIGNMENT_BYTES = 256
_ENDLESS = 1 << 62
_MOST_SETS = 2  # as many as there are steps under way


class PinnedBlock:
    """A part of a pool; it goes back when nobody refers to this any more.

    Attributes:
        tensor: The memory, as flat bytes.
        after: What must have happened before it is written into.
    """

    def __init__(
        self, tensor: Tensor, *, after: Sequence[Event], used: list[Event], back: deque[list[Event]]
    ) -> None:
        self.tensor = tensor
        self.after = tuple(after)
        self._used = used
        self._back = back

    def used_until(self, event: Event) -> None:
        """Say that a copy from or to it ends with an event."""
        self._used.append(event)

    def __del__(self) -> None:
        # Not to the pool itself, at which its microbatch may be at work.
        self._back.append(self._used)


@dataclass(frozen=True, kw_only=True)
class _Gap:
    """A part of a pool that can be lent.

    Attributes:
        start: Its first byte.
        stop: The byte after its last one.
        used: The ends of copies that may still be using it.
    """

    start: int
    stop: int
    used: tuple[Event, ...] = ()


class PinnedPool:
    """Memory of one microbatch after the other. Called by the thread of the one that has it.

    Args:
        buffer: Page-locked memory; what goes beyond it is ordinary.

    Attributes:
        num_bytes: Most that it has needed.
    """

    def __init__(self, buffer: Tensor) -> None:
        self.num_bytes = 0
        self._buffer = buffer
        self._gaps = [_Gap(start=0, stop=_ENDLESS)]  # ascending
        self._lent: dict[int, tuple[int, int, list[Event]]] = {}  # by the list's identity
        self._back: deque[list[Event]] = deque()

    @property
    def is_short(self) -> bool:
        """Whether it has needed more than is page-locked."""
        return self.num_bytes > self._buffer.nbytes

    def allocate(self, num_bytes: int) -> PinnedBlock:
        """Lend some memory, from the first gap that is wide enough."""
        self._take_back()
        size = max(1, -(-num_bytes // _ALIGNMENT_BYTES)) * _ALIGNMENT_BYTES
        first, last = self._found(size)
        start, after = self._gaps[first].start, _to_come(self._gaps[first : last + 1])
        stop, rest = start + size, self._gaps[last]
        left = [_Gap(start=stop, stop=rest.stop, used=rest.used)] if rest.stop > stop else []
        self._gaps[first : last + 1] = left
        self.num_bytes = max(self.num_bytes, stop)
        used: list[Event] = []
        self._lent[id(used)] = (start, stop, used)
        return PinnedBlock(self._tensor(start, num_bytes), after=after, used=used, back=self._back)

    def _found(self, size: int) -> tuple[int, int]:
        """Return the first and the last of the neighbouring gaps that together are so wide."""
        first = 0
        for index, gap in enumerate(self._gaps):
            if index and self._gaps[index - 1].stop != gap.start:
                first = index
            if gap.stop - self._gaps[first].start >= size:
                return first, index
        raise AssertionError("the last gap is endless")

    def _tensor(self, start: int, num_bytes: int) -> Tensor:
        if start + num_bytes <= self._buffer.nbytes:
            return self._buffer[start : start + num_bytes]
        with torch.inference_mode(mode=False):
            return torch.empty(num_bytes, dtype=torch.uint8)

    def _take_back(self) -> None:
        while self._back:
            start, stop, used = self._lent.pop(id(self._back.popleft()))
            self._gaps.append(_Gap(start=start, stop=stop, used=tuple(used)))
        self._gaps.sort(key=lambda gap: gap.start)

    def retire(self) -> None:
        """Lend nothing of the page-locked memory any more: its step was given up."""
        self._buffer = self._buffer[:0]

    def reset(self) -> None:
        """Hear that the microbatch that has it takes nothing from it any more."""
        self._take_back()
        spans = [_Gap(start=a, stop=b, used=tuple(used)) for a, b, used in self._lent.values()]
        used = _to_come([*self._gaps, *spans])
        self._gaps = [_Gap(start=0, stop=_ENDLESS, used=used)]
        self._lent, self._back = {}, deque()


def _to_come(gaps: Iterable[_Gap]) -> tuple[Event, ...]:
    """Return the ends of copies that may still be using some gaps."""
    return tuple(dict.fromkeys(e for gap in gaps for e in gap.used if not e.is_done))


class PinnedPools:
    """Makes the pools. Its methods are called by the Trainer's thread.

    Args:
        device: Page-locks for all devices of its kind.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._lengths: list[int] = []  # that are needed, of the pools of a set, by their numbers
        self._made: tuple[tuple[int, ...], int] = ((), 1)  # what there is, and the number of sets
        self._num_wanted = 1  # sets
        self._was_without = False  # whether a step has followed another without pools of its own
        self._sets: list[list[PinnedPool]] = [[]]
        self._busy: list[int] = []  # sets of the steps under way

    @property
    def num_bytes(self) -> int:
        """Bytes that are page-locked."""
        return self._buffer.nbytes

    def begin_step(self, numbers: Sequence[int]) -> tuple[PinnedPool, ...]:
        """Give a pool to each microbatch of a step, which may follow one that is under way.

        Args:
            numbers: Of the pools, by microbatch.
        """
        free = next(i for i in range(_MOST_SETS) if i not in self._busy)
        self._busy.append(free)
        while len(self._sets) <= free:
            self._sets.append([])
        pools = self._sets[free]
        pools += (
            PinnedPool(torch.empty(0, dtype=torch.uint8)) for _ in range(len(pools), _num(numbers))
        )
        return tuple(pools[number] for number in numbers)

    def end_first(self) -> None:
        """Hear that the step that has begun first has ended, and another goes on."""
        del self._busy[0]

    def want_two(self) -> None:
        """Have pools for two steps when no step is under way."""
        self._num_wanted = _MOST_SETS

    def can_follow(self, numbers: Sequence[int]) -> bool:
        """Say whether a step can begin while one is under way: there are pools for both.

        Args:
            numbers: Of the pools of the step, by microbatch.
        """
        lengths, num_sets = self._made
        if num_sets < _MOST_SETS and not self._was_without:
            self.want_two()
            self._was_without = True
            return True  # for once in ordinary memory
        is_made = num_sets == _MOST_SETS and _num(numbers) <= len(lengths)
        return is_made and not any(pool.is_short for pool in self._all)

    def end(self, *, failed: bool = False) -> None:
        """Hear that no step is under way: make pools as long as steps have needed.

        Args:
            failed: Whether steps were given up, so that threads may still have some.
        """
        self._busy.clear()
        if failed:
            for pool in self._all:
                pool.retire()
            self._divide()
            return
        for one in self._sets:
            for number, pool in enumerate(one):
                pool.reset()
                if number == len(self._lengths):
                    self._lengths.append(0)
                self._lengths[number] = max(self._lengths[number], pool.num_bytes)
        if self._made != (tuple(self._lengths), self._num_wanted):
            self._made = (tuple(self._lengths), self._num_wanted)
            self._device.unpin(self._buffer)
            with torch.inference_mode(mode=False):
                self._buffer = own_pages(self._num_wanted * sum(self._lengths))
            self._device.pin(self._buffer)
            self._divide()

    @property
    def _all(self) -> Iterator[PinnedPool]:
        return itertools.chain.from_iterable(self._sets)

    def _divide(self) -> None:
        """Cut the buffer into pools."""
        lengths, num_sets = self._made
        start, self._sets = 0, []
        with torch.inference_mode(mode=False):
            for _ in range(num_sets):
                self._sets.append([])
                for length in lengths:
                    self._sets[-1].append(PinnedPool(self._buffer[start : start + length]))
                    start += length

    def close(self) -> None:
        """Give the memory back."""
        self._device.unpin(self._buffer)
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._sets, self._lengths, self._made = [[]], [], ((), 1)


def _num(numbers: Sequence[int]) -> int:
    """Return how many pools there are of some numbers."""
    return max(numbers, default=-1) + 1
