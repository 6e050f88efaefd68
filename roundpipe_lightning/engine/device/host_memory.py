"""Memory of the host: its size, pages of a tensor's own, and the return of freed memory."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from roundpipe_lightning.errors import FitError

UNKNOWN_BYTES = 2**60
"""Taken for the memory of a host that cannot be asked: none has as much, so nothing is refused."""

_CONTROL_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")
_AVAILABLE = Path("/proc/meminfo")
_FILES = {  # of the two versions of control groups: the limit, what is used, what can be dropped
    "v1": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    "v2": ("memory.max", "memory.current", "inactive_file"),
}


def host_bytes() -> int | None:
    """Return the host's memory, or what control groups allow of it; None where it is not known."""
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # not on this system (Windows)
        return None
    return min([total, *(limit for limit, _ in _limits())]) if total > 0 else None


def free_host_bytes() -> int | None:
    """Return the memory that this process can still take; None where that is not known."""
    found = [limit - used for limit, used in _limits()]
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = _AVAILABLE.read_text(encoding="ascii").splitlines()
        available = next(line for line in lines if line.startswith("MemAvailable:"))
        found.append(1024 * int(available.split()[1]))
    return max(0, min(found)) if found else None


def check_host_memory(num_bytes: float, *, what: str, way_out: str) -> None:
    """Refuse to take more memory than there is, before the system ends the process for it.

    Args:
        num_bytes: What is about to be taken.
        what: Of what, as the subject of a sentence.
        way_out: A sentence that says what to do.

    Raises:
        FitError: So much is not free.
    """
    free = free_host_bytes()
    if free is not None and num_bytes > free:
        gib = 2**30
        raise FitError(
            f"{what} needs {num_bytes / gib:,.1f} GiB of host memory, and {free / gib:,.1f} GiB "
            f"are free here. {way_out}"
        )


def _limits() -> Iterator[tuple[int, int]]:
    """Yield limit and use of this process's control groups, from its own to the root's."""
    try:
        lines = _OWN_GROUPS.read_text(encoding="utf-8").splitlines()
    except OSError:  # not on this system
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            version, top = "v2", _CONTROL_GROUPS
        elif "memory" in controllers.split(","):
            version, top = "v1", _CONTROL_GROUPS / "memory"
        else:
            continue
        own = top / path.lstrip("/")
        for folder in (own, *own.parents):  # a container's own group is mounted as the top one
            with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
                yield _limit(folder, *_FILES[version])
            if folder == top:
                break


def _limit(folder: Path, limit: str, used: str, dropped: str) -> tuple[int, int]:
    """Limit and use of a control group, without cached files, which give way."""
    size = int((folder / limit).read_text(encoding="ascii"))
    try:
        in_use = int((folder / used).read_text(encoding="ascii"))
        stat = (folder / "memory.stat").read_text(encoding="ascii").split()
        in_use -= int(stat[stat.index(dropped) + 1])
    except (OSError, ValueError):
        in_use = 0
    return size, in_use


PAGE_BYTES = mmap.PAGESIZE


def own_pages(num_elements: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Return flat zeros in pages of their own; they go back to the system with their last view."""
    if num_elements == 0:
        return torch.empty(0, dtype=dtype)
    num_bytes = num_elements * dtype.itemsize
    if sys.platform == "win32":
        pages = mmap.mmap(-1, num_bytes)
    else:  # private: a process that is forked has a copy, as of any other memory
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype, count=num_elements)


def return_freed_memory() -> None:
    """Give what was freed back to the system: the C library keeps pieces below 32 MiB.

    Without it, opening a store may take the memory of the model twice. Only glibc needs this.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
