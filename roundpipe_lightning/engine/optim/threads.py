"""Threads that step pieces of parameters, each with one intra-op thread, away from the launchers.

Pieces are taken from queues, one per node of the machine, so a thread that is held up leaves its
pieces to the others. What a piece's result is does not depend on who computes it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch

from roundpipe_lightning.engine.optim.numa import Topology, pin_this_thread, read_topology
from roundpipe_lightning.engine.optim.scratch import Scratch
from roundpipe_lightning.engine.threads import Failure, ThreadTeam

T = TypeVar("T")

_FEW_PROCESSORS = 8
_FOREVER = 1e9


def reserved_by_default(topology: Topology) -> int:
    """Return how many processors are left to threads that copy and launch: an eighth of many."""
    count = topology.num_processors
    return count // _FEW_PROCESSORS


class KernelThreads(Generic[T]):
    """Threads that work on pieces.

    Args:
        num_threads: How many; None: as many as torch's intra-op threads, less the reserved.
        num_scratch: Elements of each thread's scratch memory.
        topology: The machine; None: it is asked.
        reserved: Processors on which no thread runs; None: an eighth of them.
    """

    def __init__(
        self,
        *,
        num_threads: int | None,
        num_scratch: int,
        topology: Topology | None = None,
        reserved: int | None = None,
    ) -> None:
        machine = read_topology() if topology is None else topology
        spared = reserved_by_default(machine) if reserved is None else reserved
        self._topology = machine.without(spared)
        free = self._topology.num_processors
        self.num_threads = num_threads or max(1, min(torch.get_num_threads(), free))
        self._num_scratch = num_scratch
        self._homes = [i % len(self._topology.nodes) for i in range(self.num_threads)]
        self._waiting = iter(range(self.num_threads))
        self._own = threading.local()
        self._team: ThreadTeam | None = None

    @property
    def nodes(self) -> tuple[int, ...]:
        """Nodes of the machine on which there are threads."""
        return self._topology.nodes

    def run(self, work: Callable[[T, Scratch], None], pieces: Sequence[Sequence[T]]) -> None:
        """Work on all pieces, and wait.

        Args:
            work: Called for each piece, in any thread.
            pieces: By node, in the order of `nodes`.

        Raises:
            BaseException: The first that `work` raised. The other pieces taken are finished,
                those that nobody has begun are not.
        """
        queues = [deque(some) for some in pieces]
        failures: list[Failure] = []

        def serve() -> None:
            home = self._own.home
            with torch.no_grad():
                for index in range(len(queues)):
                    queue = queues[(home + index) % len(queues)]
                    while not failures and (piece := _pop(queue)) is not None:
                        self._own.scratch.clear()
                        work(piece, self._own.scratch)

        run = self._started().start([serve] * self.num_threads, on_failure=failures.append)
        try:
            run.wait(_FOREVER)
        except KeyboardInterrupt:
            for queue in queues:
                queue.clear()
            run.wait(_FOREVER)
            raise
        if failures:
            raise failures[0].error

    def close(self) -> None:
        """End the threads; a later `run` starts new ones."""
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
            self._waiting = iter(range(self.num_threads))
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
        self._own.home = self._homes[next(self._waiting)]
        self._own.scratch = Scratch(self._num_scratch)
        pin_this_thread(self._topology.processors[self._own.home])


def _pop(queue: deque[T]) -> T | None:
    try:
        return queue.popleft()
    except IndexError:
        return None
