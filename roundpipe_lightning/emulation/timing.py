"""Time on an emulated server: when the work of its queues begins and ends.

```
host thread   launches work, issues copies, waits for events        real time
compute queue [ work ][ work ]..[ work ]                            computed times
link               [ copy, 2 ms ][ copy, 1 ms ]                     computed times
```

A second of the server is one of `time.perf_counter`. The end of every piece of work is computed:
it begins when the piece before it in its queue and everything that it waits for have ended, and
when the host has launched it, and it takes as long as its bytes or the given seconds say. One
thread does what is due at computed times (`ServerClock`); when it wakes up late, nothing that
comes after it is late.

A thread that has waited for the device goes on as if it had woken up in time (`HostClock`): on
hardware the device waits by itself, and nobody wakes up for it. All else that the host does before
it launches something counts: the time of its work, of locks, and of other threads' turns.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from roundpipe_lightning.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class EmulatedTiming:
    """What takes how long on an emulated server.

    Attributes:
        upload_bytes_per_second: Of each device's link.
        download_bytes_per_second: Of each device's link.
        host_bytes_per_second: Of the host's memory, which copies under way share.
        direct_bytes_per_second: Of copies from device to device, on the link of the one that
            receives them; None: no device reaches another's memory.
        copy_seconds: What each copy takes beside its bytes.
        max_delay_seconds: Every copy and every mark on a compute queue takes a random time more,
            up to this.
        seed: Of the random times.

    Raises:
        ConfigurationError: If a rate is not positive or a time is negative.
    """

    upload_bytes_per_second: float = math.inf
    download_bytes_per_second: float = math.inf
    host_bytes_per_second: float = math.inf
    direct_bytes_per_second: float | None = None
    copy_seconds: float = 0.0
    max_delay_seconds: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse rates and times that cannot be."""
        for name in ("upload", "download", "host", "direct"):
            rate = getattr(self, f"{name}_bytes_per_second")
            if rate is not None and not rate > 0:
                raise ConfigurationError(
                    f"{name}_bytes_per_second={rate} must be positive; math.inf takes no time."
                )
        for name in ("copy_seconds", "max_delay_seconds"):
            seconds = getattr(self, name)
            if not 0 <= seconds < math.inf:
                raise ConfigurationError(f"{name}={seconds} must be a time of 0 s or more.")

    def delays(self, name: str) -> Callable[[], float]:
        """Return a source of random times for the queue of that name."""
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
        """Return the calling thread's time."""
        return time.perf_counter() - self._late

    @property
    def _late(self) -> float:
        late, epoch = getattr(self._local, "late", (0.0, 0))
        return late if epoch == self._epoch else 0.0

    def woke_for(self, seconds: float, *, since: float) -> None:
        """Note that the calling thread has waited for something that happened at a moment.

        Args:
            seconds: The moment.
            since: The thread's time when it began to wait.
        """
        late = time.perf_counter() - max(since, seconds)
        self._local.late = (max(0.0, late), self._epoch)


def sleep_until(seconds: float) -> None:
    """Sleep until a moment of `time.perf_counter`."""
    left = seconds - time.perf_counter()
    if left > 0:
        time.sleep(left)


class ComputeQueue:
    """What a device computes, in order: all times are known at the launch.

    Args:
        host: The threads that launch.
        delay: Gives random times.
    """

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

    def occupy(self, seconds: float) -> None:
        """Let the queue be busy with something else than computing."""
        with self._mutex:
            self._end = max(self._end, self._host.now()) + seconds

    def mark(self) -> float:
        """Return when all that was launched so far will have ended."""
        with self._mutex:
            now = self._host.now()
            delay = self._delay()
            if delay:
                self._end = max(self._end, now) + delay
            return max(self._end, now)

    def restart(self) -> None:
        """Forget the spans."""
        with self._mutex:
            self._spans.clear()

    @property
    def spans(self) -> tuple[tuple[float, float], ...]:
        """When it computed since `restart`, as (start, end), in order."""
        with self._mutex:
            return tuple(self._spans)
