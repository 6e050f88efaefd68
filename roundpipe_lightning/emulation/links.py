"""The links of an emulated server, and the host's memory that they share.

```
link of device 0  [ copy, 100 kB, alone ][ copy, at half the rate      ]
link of device 1                         [ copy, at half the rate  ][ alone ]
```

Copies are served by the server's clock, in the order of their computed times; a link has no thread
of its own.
"""

from __future__ import annotations

import heapq
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from roundpipe_lightning.emulation.clock import Due, ServerClock
from roundpipe_lightning.emulation.events import EmulatedEvent
from roundpipe_lightning.engine.device.events import Event


class _Lane:
    """Copies under way on links of one rate, all equally fast at every moment.

    Args:
        bytes_per_second: The links' rate.
    """

    def __init__(self, bytes_per_second: float) -> None:
        self.bytes_per_second = bytes_per_second
        self.done_bytes = 0.0  # of a copy that has always been under way
        # By `done_bytes` at their end.
        self.copies: list[tuple[float, int, Callable[[float], None]]] = []


class HostMemory:
    """The memory that all links of a server share, equally at every moment.

    Args:
        bytes_per_second: Its rate.
        clock: The server's, in whose thread everything here happens.
    """

    def __init__(self, bytes_per_second: float, *, clock: ServerClock) -> None:
        self._bytes_per_second = bytes_per_second
        self._clock = clock
        self._lanes: dict[float, _Lane] = {}
        self._num_copies = 0  # under way
        self._number = 0  # of the last one
        self._now = 0.0
        self._next: Due | None = None

    def begin(
        self,
        seconds: float,
        num_bytes: int,
        *,
        bytes_per_second: float,
        arrived: Callable[[float], None],
    ) -> None:
        """Begin a copy.

        Args:
            seconds: When.
            num_bytes: Its length.
            bytes_per_second: The link's rate.
            arrived: Told when it has ended.
        """
        if math.isinf(self._bytes_per_second):
            end = seconds + num_bytes / bytes_per_second
            self._clock.call_at(end, lambda: arrived(end))
            return
        self._go_to(seconds)
        lane = self._lanes.setdefault(bytes_per_second, _Lane(bytes_per_second))
        self._num_copies += 1
        self._number += 1
        before = (self._now - seconds) * self._rate_of(lane)  # the clock may be further
        heapq.heappush(lane.copies, (lane.done_bytes + num_bytes - before, self._number, arrived))
        self._await_next()

    def _rate_of(self, lane: _Lane) -> float:
        return min(lane.bytes_per_second, self._bytes_per_second / self._num_copies)

    def _go_to(self, seconds: float) -> None:
        if seconds > self._now:
            if self._num_copies:
                for lane in self._lanes.values():
                    lane.done_bytes += (seconds - self._now) * self._rate_of(lane)
            self._now = seconds

    def _await_next(self) -> None:
        if self._next is not None:
            self._next.cancel()
            self._next = None
        ends = [
            (max(0.0, lane.copies[0][0] - lane.done_bytes) / self._rate_of(lane), lane)
            for lane in self._lanes.values()
            if lane.copies
        ]
        if ends:
            left, lane = min(ends, key=lambda end: end[0])
            end = self._now + left
            self._next = self._clock.call_at(end, lambda: self._end(lane, end))

    def _end(self, lane: _Lane, seconds: float) -> None:
        self._go_to(seconds)
        _, _, arrived = heapq.heappop(lane.copies)
        self._num_copies -= 1
        self._await_next()
        arrived(seconds)


@dataclass(frozen=True, kw_only=True)
class Copy:
    """A copy on a link.

    Attributes:
        num_bytes: Its size.
        issued_seconds: When the host issued it.
        after: What it waits for.
        begin: Called when it begins.
        copy: Copies, when its time is up.
        finish: Told when it ended, or why it could not be made.
    """

    num_bytes: int
    issued_seconds: float
    after: Sequence[Event]
    begin: Callable[[], None]
    copy: Callable[[], None]
    finish: Callable[[float, BaseException | None], None]


class LinkQueue:
    """One direction of a device's link: makes its copies in order.

    Args:
        bytes_per_second: The link's rate.
        copy_seconds: What each copy takes beside its bytes.
        memory: The host's.
        clock: The server's.
        delay: Gives random times.
    """

    def __init__(
        self,
        *,
        bytes_per_second: float,
        copy_seconds: float,
        memory: HostMemory,
        clock: ServerClock,
        delay: Callable[[], float],
    ) -> None:
        self._bytes_per_second = bytes_per_second
        self._copy_seconds = copy_seconds
        self._memory = memory
        self._clock = clock
        self._delay = delay
        self._mutex = threading.Lock()
        self._copies: deque[Copy] = deque()
        self._is_busy = False
        self._end = 0.0

    def put(self, copy: Copy) -> None:
        """Issue a copy."""
        with self._mutex:
            self._copies.append(copy)
            if self._is_busy:
                return
            self._is_busy = True
        self._clock.call_at(copy.issued_seconds, self._take_next)

    # ------------------------------------------------------------------------ in the clock's thread

    def _take_next(self) -> None:
        with self._mutex:
            if not self._copies:
                self._is_busy = False
                return
            copy = self._copies.popleft()
        self._await(copy, list(copy.after), ready=copy.issued_seconds)

    def _await(self, copy: Copy, left: list[Event], *, ready: float) -> None:
        """Begin a copy when the events that are left have happened."""
        while left:
            event = left.pop()
            if not has_happened(event):
                self._when_happened(
                    event, lambda since: self._await(copy, left, ready=max(ready, since))
                )
                return
        try:
            start = max([ready, copy.issued_seconds, self._end, *map(happened_at, copy.after)])
            copy.begin()
        except BaseException as error:  # noqa: BLE001 - raised where the copy is waited for
            self._finish(copy, time.perf_counter(), error)
            return
        start += self._copy_seconds + self._delay()
        if start > time.perf_counter():
            self._clock.call_at(start, lambda: self._begin(copy, start))
        else:
            self._begin(copy, start)

    def _when_happened(self, event: Event, call: Callable[[float], None]) -> None:
        """Call in the clock's thread when an event has happened, with a time that is not after."""
        if isinstance(event, EmulatedEvent):
            event.when_happened(lambda: _in(self._clock, lambda: call(0.0)))
        else:
            event.when_done(lambda: _in(self._clock, partial(call, time.perf_counter())))

    def _begin(self, copy: Copy, start: float) -> None:
        self._memory.begin(
            start,
            copy.num_bytes,
            bytes_per_second=self._bytes_per_second,
            arrived=lambda end: self._arrived(copy, end),
        )

    def _arrived(self, copy: Copy, end: float) -> None:
        try:
            copy.copy()
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            self._finish(copy, end, error)
        else:
            self._finish(copy, end, None)

    def _finish(self, copy: Copy, end: float, error: BaseException | None) -> None:
        self._end = end
        copy.finish(end, error)
        self._take_next()


def has_happened(event: Event) -> bool:
    """Say whether an event has happened, as a device sees it: the host learns nothing."""
    return event.has_happened if isinstance(event, EmulatedEvent) else event.is_done


def happened_at(event: Event) -> float:
    """Return when an event of an emulated device happened that has; of others that is not known.

    Raises:
        Exception: What made it fail.
    """
    if isinstance(event, EmulatedEvent):
        return event.await_seconds()
    event.wait()
    return 0.0


def _in(clock: ServerClock, call: Callable[[], None]) -> None:
    clock.call_at(0.0, call)
