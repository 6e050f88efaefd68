"""Threads that step pieces of parameters, each with one intra-op thread, away from the launchers.

Pieces are taken from one queue, so a thread that is held up leaves its pieces to the others. What a
piece's result is does not depend on who computes it.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Generic, TypeVar

import torch

from roundpipe_lightning.optim.pieces import Scratch

T = TypeVar("T")

_MANY = 8  # of so many processors one is left to the threads that copy and launch


def usable_processors() -> set[int]:
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
    """Threads that work on pieces; they end when nobody holds this object any more.

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
        self._pool: ThreadPoolExecutor | None = None

    def process(self, work: Callable[[T, Scratch], None], pieces: Iterable[T]) -> None:
        """Call `work` for every piece, in any thread, and wait.

        Raises:
            BaseException: The first that `work` raised. The other pieces taken are finished,
                those that nobody has begun are not.
        """
        left = deque(pieces)

        def serve() -> None:
            with torch.no_grad():
                while left:
                    try:
                        piece = left.popleft()
                    except IndexError:
                        return
                    self._own.scratch.clear()
                    try:
                        work(piece, self._own.scratch)
                    except BaseException:
                        left.clear()
                        raise

        pool = self._started()
        served = [pool.submit(serve) for _ in range(self.num_threads)]
        try:
            wait(served)
        except KeyboardInterrupt:
            left.clear()
            wait(served)
            raise
        for one in served:
            one.result()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _started(self) -> ThreadPoolExecutor:
        if self._pool is None:
            total = torch.get_num_threads()
            given = (self._own, self._num_scratch, self._processors)
            all_there = threading.Barrier(self.num_threads)
            self._pool = ThreadPoolExecutor(
                self.num_threads, "roundpipe-optimizer", _prepare, (*given, all_there)
            )
            wait([self._pool.submit(int) for _ in range(self.num_threads)])
            torch.set_num_threads(total)  # a thread's own number is also that of later threads
        return self._pool


def _prepare(
    own: threading.local, num_scratch: int, processors: list[int], all_there: threading.Barrier
) -> None:
    """Begin a thread. It holds nothing that holds the pool, which would then never end."""
    torch.get_num_threads()  # a thread's first question sets the number to that of all
    torch.set_num_threads(1)
    own.scratch = Scratch(num_scratch)
    pin_this_thread(processors)
    all_there.wait()
