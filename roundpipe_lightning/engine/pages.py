"""Host memory that can be page-locked: whole pages, of which nothing else has a part.

A driver locks pages, not bytes. Two small buffers of the C library's heap may share a page, and a
driver refuses to lock it twice, or unlocks it for both with the first.
"""

from __future__ import annotations

import ctypes
import mmap
import sys

import torch
from torch import Tensor

PAGE_BYTES = mmap.PAGESIZE


def own_pages(num_elements: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Return zeros in pages of their own; they go back to the system with the last view of them.

    Args:
        num_elements: Length of the flat tensor.
        dtype: Of its elements.
    """
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
