"""Threads that step pieces of parameters, each with one intra-op thread, away from the launchers.

Pieces are taken from queues, one per node of the machine, so a thread that is held up leaves its
pieces to the others. What a piece's result is does not depend on who computes it.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import torch

from roundpipe_lightning.engine.device.threads import Failure, ThreadTeam
from roundpipe_lightning.optim.scratch import Scratch

_NODES = Path("/sys/devices/system/node")
_MOVE_PAGES = {"x86_64": 279, "aarch64": 239}  # numbers of the system call that tells a page's node


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The processors this process may use, by node.

    Attributes:
        nodes: Number of each node.
        processors: Those of each node, ascending; at least one of a node.
    """

    nodes: tuple[int, ...]
    processors: tuple[tuple[int, ...], ...]

    @property
    def num_processors(self) -> int:
        """Number of processors."""
        return sum(len(some) for some in self.processors)

    def without(self, reserved: int) -> Topology:
        """Return the topology without some processors: the first ones, at least one stays."""
        order = sorted(cpu for some in self.processors for cpu in some)
        kept = set(order[min(reserved, len(order) - 1) :])
        nodes = [
            (node, tuple(cpu for cpu in some if cpu in kept))
            for node, some in zip(self.nodes, self.processors, strict=True)
        ]
        return Topology(
            nodes=tuple(node for node, some in nodes if some),
            processors=tuple(some for _, some in nodes if some),
        )


def read_topology(folder: Path = _NODES) -> Topology:
    """Return the processors that this process may use.

    Args:
        folder: Where Linux describes the nodes.
    """
    allowed = usable_processors()
    found = []
    for path in sorted(folder.glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
        listed = parse_processors((path / "cpulist").read_text(encoding="ascii"))
        mine = tuple(sorted(listed & allowed))
        if mine:
            found.append((int(path.name[4:]), mine))
    if not found:
        return Topology(nodes=(0,), processors=(tuple(sorted(allowed)),))
    return Topology(
        nodes=tuple(node for node, _ in found), processors=tuple(some for _, some in found)
    )


def usable_processors() -> set[int]:
    """Return the processors that the operating system lets this process use."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def pin_this_thread(processors: Sequence[int]) -> None:
    """Keep the calling thread on some processors, where the operating system lets it."""
    if hasattr(os, "sched_setaffinity") and processors:
        try:
            os.sched_setaffinity(0, processors)
        except OSError:  # a container's limits changed since: the thread runs anywhere
            return


def parse_processors(text: str) -> set[int]:
    """Read a list as Linux writes it: `0-3,8`."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            found.update(range(int(first), int(last or first) + 1))
    return found


def node_of(address: int) -> int | None:
    """Return the node of the page at an address; None if nobody knows."""
    number = _MOVE_PAGES.get(platform.machine())
    if sys.platform != "linux" or number is None:
        return None
    page = ctypes.c_void_p(address)
    status = ctypes.c_int(-1)
    libc = ctypes.CDLL(None)
    failed = libc.syscall(
        ctypes.c_long(number),
        ctypes.c_int(0),
        ctypes.c_ulong(1),
        ctypes.byref(page),
        None,
        ctypes.byref(status),
        ctypes.c_int(0),
    )
    return None if failed or status.value < 0 else int(status.value)


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
