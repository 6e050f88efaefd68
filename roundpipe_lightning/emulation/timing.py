"""Time on an emulated server: when the work of its queues begins and ends.

```
host thread   launches work, issues copies, waits for events        real time
compute queue [ work ][ work ]..[ work ]                            computed times
link               [ copy, 2 ms ][ copy, 1 ms ]                     computed times
```

docs/emulation.md (time) says how ends are computed. A thread that has waited for the device goes on
as if it had woken up in time (`HostClock`).
"""

from __future__ import annotations

import heapq
import math
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

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
