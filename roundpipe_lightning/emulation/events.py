"""Events of an emulated server."""

from __future__ import annotations

import threading
import time
from abc import abstractmethod

from roundpipe_lightning.emulation.clock import ServerClock
from roundpipe_lightning.emulation.race_checker import HOST, ProtocolChecker, Stamp
from roundpipe_lightning.emulation.timing import ComputeQueue, HostClock, sleep_until
from roundpipe_lightning.engine.device.events import Callback, Event, block_until


class EmulatedEvent(Event):
    """A moment of a device's queue.

    Args:
        name: For people.
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

    # --------------------------------------------------------- as devices see it, which tell nobody

    @property
    @abstractmethod
    def has_happened(self) -> bool:
        """Whether it has."""

    @abstractmethod
    def await_seconds(self) -> float:
        """Wait until it has, and return when."""

    @abstractmethod
    def when_happened(self, callback: Callback) -> None:
        """Call back once it has, or at once."""

    # -------------------------------------------------------------------------- as the host sees it

    @property
    def is_done(self) -> bool:
        """Whether it has happened: the host then knows."""
        if not self.has_happened:
            return False
        self.note()
        return True

    def wait(self) -> None:
        """Let the calling thread wait; it then knows that the moment has passed."""
        self.hold()
        self.note()

    def when_done(self, callback: Callback) -> None:
        """Call back once it has happened, from the clock's thread; at once if it has already."""

        def call() -> None:
            self.note()
            callback()

        self.when_happened(callback if self._checker is None else call)

    def hold(self) -> None:
        """Let the calling thread wait because its device does."""
        since = self._host.now()
        self._host.woke_for(self.await_seconds(), since=since)

    def note(self) -> None:
        """Note that the host knows that the moment has passed."""
        if self._checker is not None:
            self._checker.wait(HOST, self.stamp)


class MarkEvent(EmulatedEvent):
    """The end of what a device had to compute.

    Args:
        name: For people.
        compute: The device's queue.
        clock: The server's.
        host: The time of the threads that wait for it.
        checker: Learns what they know, or None.
        stamp: What will have ended.
    """

    def __init__(
        self,
        name: str,
        *,
        compute: ComputeQueue,
        clock: ServerClock,
        host: HostClock,
        checker: ProtocolChecker | None,
        stamp: Stamp,
    ) -> None:
        super().__init__(name, host=host, checker=checker, stamp=stamp)
        self._clock = clock
        self._seconds = compute.mark()

    @property
    def has_happened(self) -> bool:
        """Whether its time has come."""
        return time.perf_counter() >= self._seconds

    def await_seconds(self) -> float:
        """Wait for its time."""
        sleep_until(self._seconds)
        return self._seconds

    def when_happened(self, callback: Callback) -> None:
        """Call back when its time has come."""
        if self.has_happened:
            callback()
        else:
            self._clock.call_at(self._seconds, callback)


class CopyEvent(EmulatedEvent):
    """The end of a copy.

    Args:
        name: For people.
        host: The time of the threads that wait for it.
        checker: Learns what they know, or None.
        stamp: What will have ended.
    """

    def __init__(
        self, name: str, *, host: HostClock, checker: ProtocolChecker | None, stamp: Stamp
    ) -> None:
        super().__init__(name, host=host, checker=checker, stamp=stamp)
        self._mutex = threading.Lock()
        self._is_made = False
        self._seconds = 0.0
        self._error: BaseException | None = None
        self._callbacks: list[Callback] = []

    def finish(self, seconds: float, error: BaseException | None) -> None:
        """Say when it ended, or why it could not be made."""
        with self._mutex:
            self._seconds, self._error = seconds, error
            self._is_made = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    @property
    def has_happened(self) -> bool:
        """Whether it was made."""
        return self._is_made

    def await_seconds(self) -> float:
        """Wait until it was made."""
        if not self._is_made:
            block_until(self.when_happened)
        if self._error is not None:
            raise self._error
        return self._seconds

    def when_happened(self, callback: Callback) -> None:
        """Call back when it was made."""
        with self._mutex:
            if not self._is_made:
                self._callbacks.append(callback)
                return
        callback()
