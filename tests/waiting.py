"""Lets a test hear that another thread stands and waits."""

from __future__ import annotations

import threading


class ToldOfWaits(threading.Condition):
    """A condition that tells when a thread other than the test's waits for it.

    Attributes:
        waits: Released once for every wait. Nothing that the condition guards changes between that
            and the wait: the thread holds the lock.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits = threading.Semaphore(0)

    def wait(self, timeout: float | None = None) -> bool:
        """Tell, and wait."""
        if threading.current_thread() is not threading.main_thread():
            self.waits.release()
        return super().wait(timeout)
