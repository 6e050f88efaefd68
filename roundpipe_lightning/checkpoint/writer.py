"""One thread that saves and removes checkpoints in the order in which it was asked to."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class WriteQueue:
    """Runs jobs one after the other, in a thread that lives while there are any.

    The thread is no daemon: a process that ends waits for it. An error does not stop the jobs
    after it; the first is handed out once, by `raise_error`.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._jobs: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def submit(self, job: Callable[[], None]) -> None:
        """Run `job` after all that were submitted before.

        Raises:
            RuntimeError: The system gives no thread; the job is not taken then.
        """
        with self._changed:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="roundpipe-checkpoints")
                thread.start()  # it looks for jobs when this lock is free
                self._thread = thread
            self._jobs.append(job)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._jobs:
                    self._thread = None
                    self._changed.notify_all()
                    return
                job = self._jobs[0]
            try:
                job()
            except Exception as error:  # noqa: BLE001 - handed to the caller's thread
                if self._error is None:
                    self._error = error
            with self._changed:
                self._jobs.popleft()
                self._changed.notify_all()

    def drain(self) -> None:
        with self._changed:
            thread = self._thread
            while self._jobs:
                self._changed.wait()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def raise_error(self) -> None:
        with self._changed:
            error, self._error = self._error, None
        if error is not None:
            raise error
