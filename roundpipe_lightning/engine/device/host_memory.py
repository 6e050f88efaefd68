"""Memory of the host: its size, pages of a tensor's own, and the return of freed memory."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
from pathlib import Path

import torch
from torch import Tensor

UNKNOWN_BYTES = 2**60
"""Taken for the memory of a host that cannot be asked: none has as much, so nothing is refused."""

_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")


def host_bytes() -> int | None:
    """Return the host's memory, or what a container may use of it; None where that is not known."""
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # not on this system (Windows)
        return None
    with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
        total = min(total, int(_CONTAINER_LIMIT.read_text(encoding="ascii")))
    return total if total > 0 else None


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
