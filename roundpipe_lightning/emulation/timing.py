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
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from roundpipe_lightning.emulation.race_checker import HOST, ProtocolChecker, Stamp
from roundpipe_lightning.engine.device.events import Callback, Event, block_until
from roundpipe_lightning.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class EmulatedTiming:
    """Speeds and delays of an emulated server; ConfigurationError: one is out of its range."""

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
        """Note that a thread has waited, since a time of its own, for what happened at a moment."""
        late = time.perf_counter() - max(since, seconds)
        self._local.late = (max(0.0, late), self._epoch)


class ServerClock:
    """Calls when moments have come. Its thread starts with the first and ends with `close`.

    What is called later than its moment has not happened later: whoever is called knows the moment.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._num_due = 0  # counts them: of two with one moment the earlier goes first
        self._is_open = False
        self._thread: threading.Thread | None = None

    def call_at(self, seconds: float, call: Callable[[], None]) -> None:
        """Call at a moment of `time.perf_counter`, from the clock's thread."""
        with self._changed:
            self._num_due += 1
            heapq.heappush(self._due, (seconds, self._num_due, call))
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                self._is_open = True
                self._thread.start()
            elif self._due[0][1] == self._num_due:
                self._changed.notify()

    def close(self) -> None:
        """Do all that is left and join the thread; the next call starts another."""
        with self._changed:
            thread, self._is_open = self._thread, False
            self._changed.notify()
        if thread is not None:
            thread.join()

    def _serve(self) -> None:
        while (call := self._next()) is not None:
            call()
            del call  # while the thread sleeps it keeps nothing alive

    def _next(self) -> Callable[[], None] | None:
        """Sleep until something is due; None at the end."""
        with self._changed:
            while self._due or self._is_open:
                left = self._due[0][0] - time.perf_counter() if self._due else None
                if left is not None and left <= 0:
                    return heapq.heappop(self._due)[2]
                self._changed.wait(left)
            self._thread = None
            return None


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
    """A moment of a device's queue, from when it is known on: a copy's when it has been made.

    Args:
        host: The time of the threads that wait for it.
        checker: Learns what they know, or None.
        stamp: What will have ended.
    """

    def __init__(
        self,
        name: str,
        *,
        host: HostClock,
        clock: ServerClock,
        checker: ProtocolChecker | None,
        stamp: Stamp,
    ) -> None:
        self.name = name
        self.stamp = stamp
        self._host = host
        self._clock = clock
        self._checker = checker
        self._mutex = threading.Lock()
        self._seconds = math.inf  # until it is known
        self._error: BaseException | None = None
        self._callbacks: list[Callback] = []  # until then

    def finish(self, seconds: float, error: BaseException | None = None) -> None:
        """Say when it happens, and what made it fail."""
        with self._mutex:
            self._seconds, self._error = seconds, error
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    # ------------------------------------------------ as devices see it: the host learns nothing

    @property
    def has_happened(self) -> bool:
        """Whether the event has happened, on the server's clock."""
        return time.perf_counter() >= self._seconds

    def await_seconds(self) -> float:
        """Wait until it has, and return when."""
        if self._seconds == math.inf:
            block_until(self.when_happened)
        left = self._seconds - time.perf_counter()
        if left > 0:
            time.sleep(left)
        if self._error is not None:
            raise self._error
        return self._seconds

    def when_happened(self, callback: Callback) -> None:
        """Call back once it has, or at once."""
        with self._mutex:
            if self._seconds == math.inf:
                self._callbacks.append(callback)
                return
        if self.has_happened:
            callback()
        else:
            self._clock.call_at(self._seconds, callback)

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


class HostMemory:
    """The memory that all links of a server share.

    A copy goes at the rate of its link, or of an equal share of the memory for each of the copies
    that are in flight when it begins. The clock's thread alone asks.
    """

    def __init__(self, bytes_per_second: float) -> None:
        self._bytes_per_second = bytes_per_second
        self._num_copies = 0  # in flight

    def begin(self, num_bytes: int, *, bytes_per_second: float) -> float:
        """Begin a copy, and return how long it takes."""
        self._num_copies += 1
        return num_bytes / min(bytes_per_second, self._bytes_per_second / self._num_copies)

    def end(self) -> None:
        self._num_copies -= 1


@dataclass(frozen=True, kw_only=True)
class Copy:
    """A copy on a link."""

    num_bytes: int
    issued_seconds: float
    after: Sequence[Event]  # what it waits for
    begin: Callable[[], None]
    copy: Callable[[], None]  # copies, when its time is up
    event: EmulatedEvent


@dataclass(kw_only=True, eq=False)
class LinkQueue:
    """One direction of a device's link: makes its copies in order."""

    bytes_per_second: float
    copy_seconds: float
    memory: HostMemory
    clock: ServerClock
    delay: Callable[[], float]

    def __post_init__(self) -> None:
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
        self.clock.call_at(copy.issued_seconds, self._take_next)

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
        start += self.copy_seconds + self.delay()
        if start > time.perf_counter():
            self.clock.call_at(start, lambda: self._begin(copy, start))
        else:
            self._begin(copy, start)

    def _when_happened(self, event: Event, call: Callable[[float], None]) -> None:
        """Call in the clock's thread when an event has happened, with a time that is not after."""
        if isinstance(event, EmulatedEvent):
            event.when_happened(lambda: self._call_soon(lambda: call(0.0)))
        else:
            event.when_done(lambda: self._call_soon(partial(call, time.perf_counter())))

    def _call_soon(self, call: Callable[[], None]) -> None:
        self.clock.call_at(0.0, call)

    def _begin(self, copy: Copy, start: float) -> None:
        seconds = self.memory.begin(copy.num_bytes, bytes_per_second=self.bytes_per_second)
        self.clock.call_at(start + seconds, lambda: self._arrived(copy, start + seconds))

    def _arrived(self, copy: Copy, end: float) -> None:
        self.memory.end()
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
    """Return when an event happened, 0 for others than emulated ones; raises what made it fail."""
    if isinstance(event, EmulatedEvent):
        return event.await_seconds()
    event.wait()
    return 0.0
