"""Threads that step pieces of parameters, each with one intra-op thread, away from the launchers.

Pieces are taken from one queue, so a thread that is held up leaves its pieces to the others. What a
piece's result is does not depend on who computes it.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

import torch

from roundpipe_lightning.engine.device.threads import Failure, ThreadTeam
from roundpipe_lightning.optim.pieces import Scratch

T = TypeVar("T")

_MANY = 8  # of so many processors one is left to the threads that copy and launch
_FOREVER = 1e9


def usable_processors() -> set[int]:
    """Return the processors that the operating system lets this process use."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def pin_this_thread(processors: Iterable[int]) -> None:
    """Keep the calling thread on some processors, where the operating system lets it."""
    if hasattr(os, "sched_setaffinity"):
        try:
            os.sched_setaffinity(0, processors)
        except OSError:  # a container's limits changed since: the thread runs anywhere
            return


class KernelThreads(Generic[T]):
    """Threads that work on pieces.

    Args:
        num_threads: How many; None: as many as torch's intra-op threads, but one processor in
            eight is left to others.
        num_scratch: Elements of each thread's scratch memory.
    """

    def __init__(self, *, num_threads: int | None, num_scratch: int) -> None:
        processors = sorted(usable_processors())
        self._processors = processors[len(processors) // _MANY :]
        self.num_threads = num_threads or min(torch.get_num_threads(), len(self._processors))
        self._num_scratch = num_scratch
        self._own = threading.local()
        self._team: ThreadTeam | None = None

    def process(self, work: Callable[[T, Scratch], None], pieces: Iterable[T]) -> None:
        """Call `work` for every piece, in any thread, and wait.

        Raises:
            BaseException: The first that `work` raised. The other pieces taken are finished,
                those that nobody has begun are not.
        """
        left = deque(pieces)
        failures: list[Failure] = []

        def serve() -> None:
            with torch.no_grad():
                while not failures:
                    try:
                        piece = left.popleft()
                    except IndexError:
                        return
                    self._own.scratch.clear()
                    work(piece, self._own.scratch)

        tasks = [serve] * self.num_threads
        run = self._started().start(tasks, on_failure=failures.append)
        try:
            run.wait(_FOREVER)
        except KeyboardInterrupt:
            left.clear()
            run.wait(_FOREVER)
            raise
        if failures:
            raise failures[0].error

    def close(self) -> None:
        """End the threads; a later `process` starts new ones."""
        if self._team is not None:
            self._team.close()
            self._team = None

    def dismiss(self) -> None:
        """End the threads; can be called from any thread, when nothing runs."""
        if self._team is not None:
            self._team.dismiss()

    def _started(self) -> ThreadTeam:
        if self._team is None:
            total = torch.get_num_threads()
            self._team = ThreadTeam(
                self.num_threads, name="roundpipe-optimizer", prepare=self._prepare
            )
            ready: list[Failure] = []
            nothing = [lambda: None] * self.num_threads
            self._team.start(nothing, on_failure=ready.append).wait(_FOREVER)
            torch.set_num_threads(total)  # a thread's own number is also that of later threads
        return self._team

    def _prepare(self) -> None:
        torch.get_num_threads()  # a thread's first question sets the number to that of all
        torch.set_num_threads(1)
        self._own.scratch = Scratch(self._num_scratch)
        pin_this_thread(self._processors)
