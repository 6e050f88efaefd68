"""Page-locked host memory for boundaries: one buffer, of which parts are lent.

Page-locking takes long and stops the device, so it is done between steps only. What a step needs
beyond the buffer it gets from ordinary memory, whose copies are slower, and the buffer is made as
long as that step has needed. From the second step of a kind on everything is page-locked.

```
addresses   0 ........................ length of the buffer ........ as far as was ever asked for
            [ lent ][ free ][ lent ]  [ free ]                 [ lent, from ordinary memory ]
```
"""

from __future__ import annotations

import threading
from collections import deque

import torch
from torch import Tensor

from roundpipe_lightning.engine.device import Device
from roundpipe_lightning.engine.pages import own_pages

_ALIGNMENT_BYTES = 256
_ENDLESS = 1 << 62


class Lent:
    """A part of the arena; it goes back when nobody refers to this any more.

    Attributes:
        tensor: The memory, as flat bytes.
    """

    def __init__(self, tensor: Tensor, span: tuple[int, int], back: deque[tuple[int, int]]) -> None:
        self.tensor = tensor
        self._span = span
        self._back = back

    def __del__(self) -> None:
        # No lock here: the collector may come to this while the arena holds its own.
        self._back.append(self._span)


class HostArena:
    """Lends page-locked memory.

    Args:
        device: Page-locks for all devices of its kind.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._free = [(0, _ENDLESS)]  # ascending, with gaps between them
        self._back: deque[tuple[int, int]] = deque()
        self._end = 0  # of what was asked for in this step

    @property
    def num_bytes(self) -> int:
        """Bytes that are page-locked."""
        return self._buffer.nbytes

    def lend(self, num_bytes: int) -> Lent:
        """Lend some memory."""
        size = max(1, -(-num_bytes // _ALIGNMENT_BYTES)) * _ALIGNMENT_BYTES
        with self._lock:
            self._take_back()
            index = next(i for i, (start, stop) in enumerate(self._free) if stop - start >= size)
            start, stop = self._free[index]
            if stop - start == size:
                del self._free[index]
            else:
                self._free[index] = (start + size, stop)
            self._end = max(self._end, start + size)
        if start + size <= self._buffer.nbytes:
            tensor = self._buffer[start : start + num_bytes]
        else:
            with torch.inference_mode(mode=False):
                tensor = torch.empty(num_bytes, dtype=torch.uint8)
        return Lent(tensor, (start, start + size), self._back)

    def _take_back(self) -> None:
        while self._back:
            self._free.append(self._back.popleft())
        self._free.sort()
        joined: list[tuple[int, int]] = []
        for start, stop in self._free:
            if joined and joined[-1][1] == start:
                joined[-1] = (joined[-1][0], stop)
            else:
                joined.append((start, stop))
        self._free = joined

    def end_step(self) -> None:
        """Make the buffer as long as the step has needed; all of it must have come back."""
        with self._lock:
            self._take_back()
            if self._end > self._buffer.nbytes and self._free == [(0, _ENDLESS)]:
                self._device.unpin(self._buffer)
                with torch.inference_mode(mode=False):
                    self._buffer = own_pages(self._end)
                self._device.pin(self._buffer)
            self._end = 0

    def close(self) -> None:
        """Give the memory back."""
        with self._lock:
            self._device.unpin(self._buffer)
            self._buffer = torch.empty(0, dtype=torch.uint8)
