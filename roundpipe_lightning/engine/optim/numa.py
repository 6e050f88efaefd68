"""Where the processors and the memory of this machine are.

A machine with several sockets has memory at each; reading the other's takes about twice as long.
Where Linux says that there are several nodes, a thread works on the memory of its own first.
Elsewhere all processors and all memory are one node.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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
