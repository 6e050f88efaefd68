"""The clock of an emulated server: one thread that does what is due, in the order of its times."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable


class Due:
    """Something that is to be done at a moment.

    Args:
        seconds: The moment, of `time.perf_counter`.
        number: Counts them: of two with one moment the earlier goes first.
        call: What is to be done.
    """

    __slots__ = ("call", "number", "seconds")

    def __init__(self, seconds: float, number: int, call: Callable[[], None]) -> None:
        self.seconds = seconds
        self.number = number
        self.call: Callable[[], None] | None = call

    def __lt__(self, other: Due) -> bool:
        return (self.seconds, self.number) < (other.seconds, other.number)

    def cancel(self) -> None:
        """Do not do it."""
        self.call = None


class ServerClock:
    """Calls when moments have come. Its thread starts with the first and ends with `close`.

    What is called later than its moment has not happened later: whoever is called knows the moment.

    Args:
        name: The thread's.
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
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._is_open = True
                self._thread.start()
            elif seconds < self._sleeps_until:
                self._rouse()
        return due

    def _rouse(self) -> None:
        """Let the thread look again, which sleeps."""
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

    def _run(self) -> None:
        while (call := self._next()) is not None:
            call()
            del call

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
            # Without a limit if nothing is due.
            if not self._wake.acquire(timeout=left):
                self._rest_is_over()

    def _rest_is_over(self) -> None:
        """Note that it has slept long enough; who has roused it meanwhile has done so in vain."""
        with self._mutex:
            if not self._sleeps_until:
                self._wake.acquire()
            self._sleeps_until = 0.0
