"""Time on an emulated server: when the work of its queues begins and ends.

```
host thread   launches work, issues copies, waits for events        real time
compute queue [ work ][ work ]..[ work ]                            computed times
link               [ copy, 2 ms ][ copy, 1 ms ]                     computed times
```

Copies are served by the server's clock, in the order of their computed times. A device waits for an
event without the host learning of it; a host thread that waits then knows, which the race checker
notes. A thread that has waited for the device goes on as if it had woken up in time (`HostClock`).
docs/emulation.md (time) says how ends are computed.
"""

from __future__ import annotations

import heapq
import math
import random
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from roundpipe_lightning.emulation.race_checker import HOST, ProtocolChecker, Stamp
from roundpipe_lightning.engine.device.events import Callback, Event, block_until
from roundpipe_lightning.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class EmulatedTiming:
    """Speeds and delays of an emulated server.

    Raises:
        ConfigurationError: If a rate is not positive or a time is negative.
    """

    upload_bytes_per_second: float = math.inf  # of each device's link
    download_bytes_per_second: float = math.inf  # of each device's link
    host_bytes_per_second: float = math.inf  # of the host's memory, which copies in flight share
    # of copies from device to device, on the link of the one that receives them; None: no device
    # reaches another's memory
    direct_bytes_per_second: float | None = None
    copy_seconds: float = 0.0  # what each copy takes beside its bytes
    # what a piece of compute takes the host, with the interpreter's lock
    launch_seconds: float = 0.0
    # every copy and every mark on a compute queue takes a random time more, up to this
    max_delay_seconds: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("upload", "download", "host", "direct"):
            rate = getattr(self, f"{name}_bytes_per_second")
            if rate is not None and not rate > 0:
                raise ConfigurationError(
                    f"{name}_bytes_per_second={rate} must be positive; math.inf takes no time."
                )
        for name in ("copy_seconds", "launch_seconds", "max_delay_seconds"):
            seconds = getattr(self, name)
            if not 0 <= seconds < math.inf:
                raise ConfigurationError(f"{name}={seconds} must be a time of 0 s or more.")

    def delays(self, name: str) -> Callable[[], float]:
        if not self.max_delay_seconds:
            return lambda: 0.0
        numbers = random.Random(f"{self.seed} {name}")
        return lambda: self.max_delay_seconds * numbers.random()


class HostClock:
    """The time of the host's threads, less what they woke up too late."""

    def __init__(self) -> None:
        self._local = threading.local()
        self._epoch = 0

    def restart(self) -> None:
        """Let every thread's time be the real one again."""
        self._epoch += 1

    def now(self) -> float:
        return time.perf_counter() - self._late

    @property
    def _late(self) -> float:
        late, epoch = getattr(self._local, "late", (0.0, 0))
        return late if epoch == self._epoch else 0.0

    def woke_for(self, seconds: float, *, since: float) -> None:
        """Note that the calling thread has waited for something that happened at a moment.

        Args:
            since: The thread's time when it began to wait.
        """
        late = time.perf_counter() - max(since, seconds)
        self._local.late = (max(0.0, late), self._epoch)


@dataclass(order=True, slots=True)
class Due:
    """Something that is to be done at a moment."""

    seconds: float  # the moment, of `time.perf_counter`
    number: int  # counts them: of two with one moment the earlier goes first
    # what is to be done; None: nothing any more
    call: Callable[[], None] | None = field(compare=False)

    def cancel(self) -> None:
        self.call = None


class ServerClock:
    """Calls when moments have come. Its thread starts with the first and ends with `close`.

    What is called later than its moment has not happened later: whoever is called knows the moment.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._mutex = threading.Lock()
        self._wake = threading.Lock()  # held, but when the thread is to look again
        self._wake.acquire()
        self._due: list[Due] = []
        self._num_due = 0
        self._sleeps_until = 0.0  # 0: it does not sleep
        self._is_open = False
        self._thread: threading.Thread | None = None

    def call_at(self, seconds: float, call: Callable[[], None]) -> Due:
        """Call at a moment of `time.perf_counter`, from the clock's thread."""
        with self._mutex:
            self._num_due += 1
            due = Due(seconds, self._num_due, call)
            heapq.heappush(self._due, due)
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                self._is_open = True
                self._thread.start()
            elif seconds < self._sleeps_until:
                self._rouse()
        return due

    def _rouse(self) -> None:
        self._sleeps_until = 0.0
        self._wake.release()

    def close(self) -> None:
        """Do all that is left and join the thread; the next call starts another."""
        with self._mutex:
            thread = self._thread
            self._is_open = False
            if self._sleeps_until:
                self._rouse()
        if thread is not None:
            thread.join()

    def _serve(self) -> None:
        while (call := self._next()) is not None:
            call()
            del call  # while the thread sleeps it keeps nothing alive

    def _next(self) -> Callable[[], None] | None:
        """Sleep until something is due; None at the end."""
        while True:
            with self._mutex:
                while self._due and self._due[0].call is None:
                    heapq.heappop(self._due)
                if not self._due and not self._is_open:
                    self._thread = None
                    return None
                left = self._due[0].seconds - time.perf_counter() if self._due else -1.0
                if self._due and left <= 0:
                    return heapq.heappop(self._due).call
                self._sleeps_until = self._due[0].seconds if self._due else float("inf")
            if self._wake.acquire(timeout=left):  # without a limit if nothing is due
                continue
            with self._mutex:
                if not self._sleeps_until:  # roused meanwhile, in vain
                    self._wake.acquire()
                self._sleeps_until = 0.0


class ComputeQueue:
    """The compute queue of a device, in order: all times are known at the launch."""

    def __init__(self, *, host: HostClock, delay: Callable[[], float]) -> None:
        self._host = host
        self._delay = delay
        self._mutex = threading.Lock()
        self._end = 0.0
        self._spans: list[tuple[float, float]] = []

    def launch(self, seconds: float) -> None:
        """Compute for some time, after all that was launched before."""
        with self._mutex:
            start = max(self._end, self._host.now())
            self._end = start + seconds
            self._spans.append((start, self._end))

    def occupy(self, seconds: float, *, after: float = 0.0) -> None:
        if seconds or after:
            with self._mutex:
                self._end = max(self._end, self._host.now(), after) + seconds

    def mark(self) -> float:
        """Note a moment, after all that was launched and marked before."""
        with self._mutex:
            self._end = max(self._end, self._host.now()) + self._delay()
            return self._end

    def restart(self) -> None:
        with self._mutex:
            self._spans.clear()

    @property
    def spans(self) -> tuple[tuple[float, float], ...]:
        """Times of compute since `restart`, as (start, end), in order."""
        with self._mutex:
            return tuple(self._spans)


class EmulatedEvent(Event):
    """A moment of a device's queue.

    Args:
        host: The time of the threads that wait for it.
        checker: Learns what they know, or None.
        stamp: What will have ended.
    """

    def __init__(
        self, name: str, *, host: HostClock, checker: ProtocolChecker | None, stamp: Stamp
    ) -> None:
        self.name = name
        self.stamp = stamp
        self._host = host
        self._checker = checker

    # ------------------------------------------------ as devices see it: the host learns nothing

    @property
    @abstractmethod
    def has_happened(self) -> bool:
        """Whether the event has happened, on the server's clock."""

    @abstractmethod
    def await_seconds(self) -> float:
        """Wait until it has, and return when."""

    @abstractmethod
    def when_happened(self, callback: Callback) -> None:
        """Call back once it has, or at once."""

    def hold(self) -> None:
        """Let the calling thread wait because its device does."""
        since = self._host.now()
        self._host.woke_for(self.await_seconds(), since=since)

    # -------------------------------------------------------- as the host sees it, which then knows

    @property
    def is_done(self) -> bool:
        if not self.has_happened:
            return False
        self._tell_checker()
        return True

    def wait(self) -> None:
        self.hold()
        self._tell_checker()

    def when_done(self, callback: Callback) -> None:
        """Call back once it has happened, from the clock's thread; at once if it has already."""

        def call() -> None:
            self._tell_checker()
            callback()

        self.when_happened(callback if self._checker is None else call)

    def _tell_checker(self) -> None:
        if self._checker is not None:
            self._checker.wait(HOST, self.stamp)


class MarkEvent(EmulatedEvent):
    """The end of what a device had to compute, which is known when the mark is made."""

    def __init__(
        self, name: str, *, compute: ComputeQueue, clock: ServerClock, **given: Any
    ) -> None:
        super().__init__(name, **given)
        self._clock = clock
        self._seconds = compute.mark()

    @property
    def has_happened(self) -> bool:
        return time.perf_counter() >= self._seconds

    def await_seconds(self) -> float:
        left = self._seconds - time.perf_counter()
        if left > 0:
            time.sleep(left)
        return self._seconds

    def when_happened(self, callback: Callback) -> None:
        if self.has_happened:
            callback()
        else:
            self._clock.call_at(self._seconds, callback)


class CopyEvent(EmulatedEvent):
    """The end of a copy."""

    def __init__(self, name: str, **given: Any) -> None:
        super().__init__(name, **given)
        self._mutex = threading.Lock()
        self._is_made = False
        self._seconds = 0.0
        self._error: BaseException | None = None
        self._callbacks: list[Callback] = []

    def finish(self, seconds: float, error: BaseException | None) -> None:
        with self._mutex:
            self._seconds, self._error = seconds, error
            self._is_made = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    @property
    def has_happened(self) -> bool:
        return self._is_made

    def await_seconds(self) -> float:
        if not self._is_made:
            block_until(self.when_happened)
        if self._error is not None:
            raise self._error
        return self._seconds

    def when_happened(self, callback: Callback) -> None:
        with self._mutex:
            if not self._is_made:
                self._callbacks.append(callback)
                return
        callback()


@dataclass
class _RateGroup:
    """Copies in flight on links of one rate, all equally fast at every moment."""

    bytes_per_second: float
    done_bytes: float = 0.0  # of a copy that has always been in flight
    # a heap by `done_bytes` at their end; a number; called with the end
    copies: list[tuple[float, int, Callable[[float], None]]] = field(default_factory=list)


class HostMemory:
    """The memory that all links of a server share, equally at every moment.

    Args:
        clock: The server's, in whose thread everything here happens.
    """

    def __init__(self, bytes_per_second: float, *, clock: ServerClock) -> None:
        self._bytes_per_second = bytes_per_second
        self._clock = clock
        self._groups: dict[float, _RateGroup] = {}
        self._num_copies = 0  # in flight
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
            arrived: Called with its end.
        """
        if math.isinf(self._bytes_per_second):
            end = seconds + num_bytes / bytes_per_second
            self._clock.call_at(end, lambda: arrived(end))
            return
        self._go_to(seconds)
        group = self._groups.setdefault(bytes_per_second, _RateGroup(bytes_per_second))
        self._num_copies += 1
        self._number += 1
        before = (self._now - seconds) * self._rate_of(group)  # the clock may be further
        heapq.heappush(group.copies, (group.done_bytes + num_bytes - before, self._number, arrived))
        self._await_next()

    def _rate_of(self, group: _RateGroup) -> float:
        return min(group.bytes_per_second, self._bytes_per_second / self._num_copies)

    def _go_to(self, seconds: float) -> None:
        if seconds > self._now:
            if self._num_copies:
                for group in self._groups.values():
                    group.done_bytes += (seconds - self._now) * self._rate_of(group)
            self._now = seconds

    def _await_next(self) -> None:
        if self._next is not None:
            self._next.cancel()
            self._next = None
        ends = [
            (max(0.0, group.copies[0][0] - group.done_bytes) / self._rate_of(group), group)
            for group in self._groups.values()
            if group.copies
        ]
        if ends:
            left, group = min(ends, key=lambda end: end[0])
            end = self._now + left
            self._next = self._clock.call_at(end, lambda: self._end(group, end))

    def _end(self, group: _RateGroup, seconds: float) -> None:
        self._go_to(seconds)
        _, _, arrived = heapq.heappop(group.copies)
        self._num_copies -= 1
        self._await_next()
        arrived(seconds)


@dataclass(frozen=True, kw_only=True)
class Copy:
    """A copy on a link."""

    num_bytes: int
    issued_seconds: float
    after: Sequence[Event]  # what it waits for
    begin: Callable[[], None]
    copy: Callable[[], None]  # copies, when its time is up
    event: CopyEvent


class LinkQueue:
    """One direction of a device's link: makes its copies in order.

    Args:
        copy_seconds: What each copy takes beside its bytes.
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
            event.when_happened(lambda: self._call_soon(lambda: call(0.0)))
        else:
            event.when_done(lambda: self._call_soon(partial(call, time.perf_counter())))

    def _call_soon(self, call: Callable[[], None]) -> None:
        self._clock.call_at(0.0, call)

    def _begin(self, copy: Copy, start: float) -> None:
        self._memory.begin(
            start,
            copy.num_bytes,
            bytes_per_second=self._bytes_per_second,
            arrived=lambda end: self._arrived(copy, end),
        )

    def _arrived(self, copy: Copy, end: float) -> None:
        error: BaseException | None = None
        try:
            copy.copy()
        except BaseException as raised:  # noqa: BLE001 - raised where it is waited for
            error = raised
        self._finish(copy, end, error)

    def _finish(self, copy: Copy, end: float, error: BaseException | None) -> None:
        self._end = end
        copy.event.finish(end, error)
        self._take_next()


def has_happened(event: Event) -> bool:
    """Return whether an event has happened, as a device sees it: the host learns nothing."""
    return event.has_happened if isinstance(event, EmulatedEvent) else event.is_done


def happened_at(event: Event) -> float:
    """Return the time of an emulated device's event that has happened; None for other events.

    Raises:
        Exception: What made it fail.
    """
    if isinstance(event, EmulatedEvent):
        return event.await_seconds()
    event.wait()
    return 0.0
