"""Page-locked host memory for boundaries: a pool per microbatch in flight.

A microbatch allocates and releases in the order of its own thread. A block that it has released
can be allocated again at once: whoever writes there next waits for the copies that still use it. So
what a pool needs follows from what the microbatch offloads, not from who was faster. A pool goes to
another microbatch when the schedule says that the one before has ended (`pool_numbers` of
`worker/turns.py`), and the pools of two steps in flight are apart:

```
buffer      [ set 0: pool 0 | pool 1 | pool 2 ][ set 1: pool 0 | pool 1 | pool 2 ]
pool        [ block | block | free  | block | ...   ]
```

Page-locking takes long and stops the device, so it is done between steps only. What a microbatch
needs beyond its pool it gets from ordinary memory, whose copies are slower, and the pools of that
number are made as long as that microbatch has needed. From the second step of a kind on everything
is page-locked.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from roundpipe_lightning.engine.device.base import Device
from roundpipe_lightning.engine.device.events import Event
from roundpipe_lightning.engine.device.host_memory import own_pages

_ALIGNMENT_BYTES = 256
_MOST_SETS = 2  # as many as there are steps in flight


class PinnedBlock:
    """A part of a pool.

    Attributes:
        tensor: The memory, as flat bytes.
        after: What must have happened before it is written into.
        start: Its first byte in the pool.
        size: Its bytes there.
        users: The ends of all copies from or to it, those before it included.
    """

    def __init__(self, tensor: Tensor, *, start: int, size: int, after: Sequence[Event]) -> None:
        self.tensor = tensor
        self.after = tuple(after)
        self.start = start
        self.size = size
        self.users: list[Event] = list(after)

    def used_until(self, event: Event) -> None:
        """Say that a copy from or to it ends with an event."""
        self.users.append(event)


class PinnedPool:
    """Memory of one microbatch after the other. Called by the thread of the one that has it.

    Args:
        buffer: Page-locked memory; what goes beyond it is ordinary.

    Attributes:
        num_bytes: Most that a microbatch has needed.
    """

    def __init__(self, buffer: Tensor) -> None:
        self.num_bytes = 0
        self._buffer = buffer
        self._stop = 0  # of all blocks
        self._blocks: dict[int, PinnedBlock] = {}  # the last ones that were allocated, by start
        self._free: dict[int, list[PinnedBlock]] = {}  # by size
        self._used_before: list[Event] = []  # by the microbatch before

    @property
    def is_short(self) -> bool:
        """Whether a microbatch has needed more than is page-locked."""
        return self.num_bytes > self._buffer.nbytes

    def allocate(self, num_bytes: int) -> PinnedBlock:
        """Return memory that nobody else has: the last block of its size that was released."""
        size = max(1, -(-num_bytes // _ALIGNMENT_BYTES)) * _ALIGNMENT_BYTES
        free = self._free.get(size)
        if free:
            released = free.pop()
            start, users = released.start, _to_come(released.users)
        else:
            start, users = self._stop, _to_come(self._used_before)
            self._stop += size
            self.num_bytes = max(self.num_bytes, self._stop)
        block = PinnedBlock(self._tensor(start, num_bytes), start=start, size=size, after=users)
        self._blocks[start] = block
        return block

    def _tensor(self, start: int, num_bytes: int) -> Tensor:
        if start + num_bytes <= self._buffer.nbytes:
            return self._buffer[start : start + num_bytes]
        with torch.inference_mode(mode=False):
            return torch.empty(num_bytes, dtype=torch.uint8)

    def release(self, block: PinnedBlock) -> None:
        """Take a block back. Nobody submits a copy from or to it any more."""
        if self._blocks.get(block.start) is block:  # else its microbatch has ended
            self._free.setdefault(block.size, []).append(block)

    def reset(self) -> None:
        """Take everything back: the microbatch that has the pool takes nothing from it any more."""
        users = (user for block in self._blocks.values() for user in block.users)
        self._used_before = _to_come([*self._used_before, *users])
        self._stop, self._blocks, self._free = 0, {}, {}

    def retire(self) -> None:
        """Give nothing of the page-locked memory any more: its step was given up."""
        self._buffer = self._buffer[:0]


def _to_come(events: Iterable[Event]) -> list[Event]:
    return [event for event in dict.fromkeys(events) if not event.is_done]


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
        self._was_without = False  # whether a step has overlapped another without a set of its own
        self._sets: list[list[PinnedPool]] = [[]]
        self._busy: list[int] = []  # sets of the steps in flight

    @property
    def num_bytes(self) -> int:
        return self._buffer.nbytes

    def begin_step(self, numbers: Sequence[int]) -> tuple[PinnedPool, ...]:
        """Return the pools of a step's microbatches, by their numbers; another may be in flight."""
        free = next(i for i in range(_MOST_SETS) if i not in self._busy)
        self._busy.append(free)
        while len(self._sets) <= free:
            self._sets.append([])
        pools = self._sets[free]
        missing = range(len(pools), _num(numbers))
        pools += [PinnedPool(torch.empty(0, dtype=torch.uint8)) for _ in missing]
        return tuple(pools[number] for number in numbers)

    def end_first(self) -> None:
        """End the step that has begun first; another one goes on."""
        del self._busy[0]

    def reserve_second_set(self) -> None:
        """Make pools for two steps when no step is in flight."""
        self._num_wanted = _MOST_SETS

    def can_overlap(self, numbers: Sequence[int]) -> bool:
        """Return whether a step can begin while one is in flight: there are pools for both."""
        lengths, num_sets = self._made
        if num_sets < _MOST_SETS and not self._was_without:
            self.reserve_second_set()
            self._was_without = True
            return True  # for once in ordinary memory
        is_made = num_sets == _MOST_SETS and _num(numbers) <= len(lengths)
        return is_made and not any(pool.is_short for pool in self._all)

    def end(self, *, failed: bool = False) -> None:
        """Make pools as long as steps have needed; none is in flight any more."""
        self._busy.clear()
        if failed:  # threads of steps that were given up may still have some
            for pool in self._all:
                pool.retire()
            self._divide()
            return
        for pools in self._sets:
            self._lengths += [0] * (len(pools) - len(self._lengths))
            for number, pool in enumerate(pools):
                pool.reset()
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
        lengths, num_sets = self._made
        start, self._sets = 0, []
        with torch.inference_mode(mode=False):
            for _ in range(num_sets):
                self._sets.append([])
                for length in lengths:
                    self._sets[-1].append(PinnedPool(self._buffer[start : start + length]))
                    start += length

    def close(self) -> None:
        self._device.unpin(self._buffer)
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._sets, self._lengths, self._made = [[]], [], ((), 1)


def _num(numbers: Sequence[int]) -> int:
    return max(numbers, default=-1) + 1
