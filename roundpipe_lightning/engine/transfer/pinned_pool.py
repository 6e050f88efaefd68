"""Page-locked host memory for what travels: boundaries, and gradients, which stay there.

What the pool gives is lent as long as a tensor in it lives. Whoever copies holds the tensors until
the host knows that the copy has ended, so what nobody holds nobody uses, and it is lent again:

```
boundary    take ── download ── upload ─┐ its last copy has ended
gradient    take ── download ── sums ── .grad ── optimizer step ─┐ .grad is gone
```

Page-locking takes long. The first steps do most of it; a later one does, if more is in flight at
once than ever before.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from roundpipe_lightning.engine.device.base import Device
from roundpipe_lightning.engine.device.host_memory import PAGE_BYTES, own_pages

_LONGEST = 2  # times what is asked for: tensors of other lengths share memory, and waste little
_MOST_UNUSED_STEPS = 16


class _Block:
    """Pages that are lent as a whole."""

    def __init__(self, num_bytes: int) -> None:
        self.pages = own_pages(num_bytes)
        self.num_bytes = num_bytes
        self.free_since = 0  # the number of the step in which they were given back


class PinnedPool:
    """The pool of all workers. Memory is taken, and given back, by any thread.

    Args:
        device: Page-locks for all devices of its kind.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._blocks: set[_Block] = set()
        self._free: list[_Block] = []  # a block comes back in the middle of anything: no lock then
        self._num_steps = 0
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        return sum(block.num_bytes for block in list(self._blocks))

    @property
    def is_locked(self) -> bool:
        return self._device.is_page_locked(self.take(1))

    def take(self, num_bytes: int) -> Tensor:
        """Return flat bytes that nobody else has, as long as this tensor or a view of it lives."""
        length = max(1, -(-num_bytes // PAGE_BYTES)) * PAGE_BYTES
        with self._lock:
            block = self._pop_free(length, _LONGEST * length, choose=min)
        with torch.inference_mode(mode=False):  # an evaluation may be the first to come here
            block = block or self._make(length)
            array = block.pages.numpy()
            weakref.finalize(array, self._give_back, block).atexit = False
            return torch.from_numpy(array)[:num_bytes]

    def _give_back(self, block: _Block) -> None:
        block.free_since = self._num_steps
        self._free.append(block)

    def _pop_free(
        self, least: int, most: int, *, choose: Callable[..., _Block | None]
    ) -> _Block | None:
        free = (block for block in list(self._free) if least <= block.num_bytes <= most)
        block = choose(free, key=lambda block: block.num_bytes, default=None)
        if block is not None:
            self._free.remove(block)
        return block

    def _make(self, length: int) -> _Block:
        """Make a block, in place of one that is too short, and of those that are not used."""
        with self._lock:
            shorter = self._pop_free(length // _LONGEST, length - 1, choose=max)
            oldest = self._num_steps - _MOST_UNUSED_STEPS
            over = [block for block in list(self._free) if block.free_since < oldest]
            for block in over:
                self._free.remove(block)
            over += filter(None, [shorter])
            self._blocks.difference_update(over)
        for block in over:
            self._device.unpin(block.pages)
        del over, shorter
        block = _Block(length)
        self._device.pin(block.pages)
        with self._lock:
            self._blocks.add(block)
        return block

    def end_step(self) -> None:
        self._num_steps += 1

    def close(self) -> None:
        """Give the page locks back. What is lent stays as long as somebody has it."""
        for block in self._blocks:
            self._device.unpin(block.pages)
        self._blocks.clear()
        self._free.clear()
