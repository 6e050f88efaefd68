"""Two copies of the parameters: the one a step computes with, and when that may change.

With `update="async"` two steps may be in flight. The earlier step still reads the copy. The later
step reads the parameters themselves: nothing writes into them. When the earlier step has ended, the
same values are put into the copy. Uploads read the copy from then on, and the optimizer may write
into the parameters:

```
step k     │ reads the copy, W(k-1) ───────────── its backward pass ends
step k+1   │            begins: reads the parameters, W(k) ──┬─▶ reads the copy, now W(k)
updater    │                           parameters ─▶ copy ───┘ switch ─▶ update k
```
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from roundpipe_lightning.engine.device.base import Device


class WeightVersions:
    """Source of the uploads of some steps. Steps that share it read the same values at all times.

    Args:
        previous: Whether from the copy beside the parameters.
    """

    def __init__(self, *, previous: bool) -> None:
        self._changed = threading.Condition()
        self.previous = previous
        self._num_reading = {False: 0, True: 0}  # by whether from the copy

    def begin_reading(self) -> tuple[bool, Callable[[], None]]:
        """Return whether to read the copy, and what to call when the reading is over."""
        with self._changed:
            previous = self.previous
            self._num_reading[previous] += 1
        return previous, partial(self._end_reading, previous=previous)

    def _end_reading(self, *, previous: bool) -> None:
        with self._changed:
            self._num_reading[previous] -= 1
            self._changed.notify_all()

    @contextmanager
    def writing(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not any(self._num_reading.values()))
            yield

    @contextmanager
    def reading(self, device: Device) -> Iterator[bool]:
        """Read until what was launched on a device in the context has been done there.

        Gives whether from the copy.
        """
        previous, end = self.begin_reading()
        try:
            yield previous
            copied = device.mark_event("values are copied")
        except BaseException:  # what arrives is not used
            end()
            raise
        copied.when_done(end)

    def switch(self) -> None:
        with self._changed:
            self.previous = True
            self._changed.wait_for(lambda: not self._num_reading[False])
