"""Memory of the host: its size, pages of a tensor's own, page-locked ones, what is given back."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from roundpipe_lightning.engine.device.base import Device
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
        what: Of what, as the subject of a sentence.
        way_out: A sentence that says what to do.
    """
    free = free_host_bytes()
    if free is not None and num_bytes > free:
        gib = 2**30
        raise FitError(
            f"{what} needs {num_bytes / gib:,.1f} GiB of host memory, and {free / gib:,.1f} GiB "
            f"are free here. {way_out}"
        )


def _limits() -> Iterator[tuple[int, int]]:
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


def own_pages(
    num_elements: int, dtype: torch.dtype = torch.uint8, *, is_shared: bool = True
) -> Tensor:
    """Return flat zeros in pages of their own; they go back to the system with their last view.

    A process that is forked (a DataLoader's worker) copies nothing of them, page-locked or not: it
    reads what this process has there now, and has a page of its own once it writes. That is on
    Linux, and if they are `is_shared`; others are memory like any other: a forked process has them
    as they were.
    """
    if num_elements == 0:
        return torch.empty(0, dtype=dtype)
    num_bytes = num_elements * dtype.itemsize
    is_shared = is_shared and hasattr(os, "memfd_create")
    pages = _shared_file().map(num_bytes) if is_shared else None
    if pages is None:
        private = {"flags": mmap.MAP_PRIVATE} if hasattr(mmap, "MAP_PRIVATE") else {}
        pages = mmap.mmap(-1, num_bytes, **private)
    return torch.frombuffer(pages, dtype=dtype, count=num_elements)


_C: Any = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
_ADVICE_HUGE, _ADVICE_REMOVE, _ADVICE_UNNEEDED = 14, 9, 4  # of <sys/mman.h>
_FIXED = 0x10
_LEAST_APART = -3  # M_MMAP_THRESHOLD of <malloc.h>
_FAILED = ctypes.c_void_p(-1).value
if _C is not None:
    _C.mmap.restype = ctypes.c_void_p
    _C.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    _C.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    _C.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class _SharedFile:
    """A file in memory, parts of which are mapped.

    Linux copies private pages that are pinned for a device into every child at fork. Pages of a
    shared mapping it does not. A child then maps the same parts privately, in their place.
    """

    def __init__(self) -> None:
        self._file = os.memfd_create("roundpipe")
        self._size = 0
        self._lock = threading.Lock()
        self._is_child = False
        self._parts: dict[int, tuple[int, int]] = {}  # size and place in the file, by address
        os.register_at_fork(after_in_child=self._part_from_parent)

    def map(self, num_bytes: int) -> Any:
        """Return new zeros; None in a child, and where the system gives none."""
        if self._is_child:
            return None
        size = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
        with self._lock, contextlib.suppress(OSError):
            place, self._size = self._size, self._size + size
            os.ftruncate(self._file, self._size)
            address = self._mapped(None, size, mmap.MAP_SHARED, place)
            # Where /sys/kernel/mm/transparent_hugepage/shmem_enabled lets it, 2 MiB a page.
            _C.madvise(address, size, _ADVICE_HUGE)
            self._parts[address] = size, place
            pages = (ctypes.c_char * num_bytes).from_address(address)
            weakref.finalize(pages, self._unmap, address).atexit = False
            return pages
        return None

    def _mapped(self, address: int | None, size: int, flags: int, place: int) -> int:
        access = mmap.PROT_READ | mmap.PROT_WRITE
        found: int = _C.mmap(address, size, access, flags, self._file, place)
        if found == _FAILED:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return found

    def _unmap(self, address: int) -> None:
        size, _ = self._parts.pop(address)
        if not self._is_child:
            _C.madvise(address, size, _ADVICE_REMOVE)
        _C.munmap(address, size)

    def _part_from_parent(self) -> None:
        if not self._is_child:  # a child's own child copies its private pages as any others
            self._is_child = True
            for address, (size, place) in list(self._parts.items()):
                self._mapped(address, size, mmap.MAP_PRIVATE | _FIXED, place)


_shared_file = functools.cache(_SharedFile)


def release_pages(values: Tensor) -> None:
    """Give back the pages that lie wholly in a part of `own_pages`: then it reads as zeros there.

    Nothing is given back on systems other than Linux.
    """
    begin = -(-values.data_ptr() // PAGE_BYTES) * PAGE_BYTES
    size = (values.data_ptr() + values.nbytes) // PAGE_BYTES * PAGE_BYTES - begin
    if _C is None or size <= 0:
        return
    if _C.madvise(begin, size, _ADVICE_REMOVE):  # of a file in memory; else they are private
        _C.madvise(begin, size, _ADVICE_UNNEEDED)


class _HeapFigures(ctypes.Structure):
    """What `mallinfo2` returns; its ninth figure is bytes that are free in the heap."""

    _fields_ = (("figures", ctypes.c_size_t * 10),)


def keep_pieces_apart(num_bytes: int) -> None:
    """Let pieces of so many bytes have pages of their own, which go back when they are freed.

    The C library keeps those below 32 MiB otherwise, between others that stay. Only glibc does.
    """
    set_option = getattr(_C, "mallopt", None)
    if set_option is not None:
        set_option(_LEAST_APART, num_bytes)


def return_freed_memory(*, least: int = 0) -> None:
    """Give what was freed back to the system: the C library keeps pieces below 32 MiB.

    Without it, opening a store may take the memory of the model twice, and steps on CPU workers
    take half as much again as they use. Only glibc needs this. Where less than `least` bytes are
    free in the heap, they stay: taking them again costs time.
    """
    trim, look = (getattr(_C, name, None) for name in ("malloc_trim", "mallinfo2"))
    if least and look is not None:
        look.restype = _HeapFigures
    if trim is not None and (not least or (look is not None and look().figures[8] >= least)):
        trim(0)


_LONGEST = 2  # times what is asked for: tensors of other lengths share memory, and waste little
_MOST_UNUSED_STEPS = 16


class _Block:
    """Pages that are lent as a whole."""

    def __init__(self, num_bytes: int) -> None:
        self.pages = own_pages(num_bytes)
        self.num_bytes = num_bytes
        self.free_since = 0  # the number of the step in which they were given back


class PinnedPool:
    """Page-locked memory for what travels, of all workers: boundaries, and gradients, which stay.

    It is lent as long as a tensor in it lives (docs/engine.md, one pool):

    ```
    boundary    take ── download ── upload ─┐ its last copy has ended
    gradient    take ── download ── sums ── .grad ── optimizer step ─┐ .grad is gone
    ```

    Memory is taken, and given back, by any thread. The device page-locks for all of its kind.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._blocks: set[_Block] = set()
        self._free: list[_Block] = []  # a block comes back in the middle of anything: no lock then
        self._num_steps = 0
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        return sum(block.num_bytes for block in list(self._blocks))

    @property
    def is_locked(self) -> bool:
        return self._device.is_page_locked(self.take(1))

    def take(self, num_bytes: int) -> Tensor:
        """Return flat bytes that nobody else has, as long as this tensor or a view of it lives."""
        length = max(1, -(-num_bytes // PAGE_BYTES)) * PAGE_BYTES
        with self._lock:
            block = self._pop_free(length, _LONGEST * length, choose=min)
        with torch.inference_mode(mode=False):  # an evaluation may be the first to come here
            block = block or self._make(length)
            array = block.pages.numpy()
            weakref.finalize(array, self._give_back, block).atexit = False
            return torch.from_numpy(array)[:num_bytes]

    def _give_back(self, block: _Block) -> None:
        block.free_since = self._num_steps
        self._free.append(block)

    def _pop_free(
        self, least: int, most: int, *, choose: Callable[..., _Block | None]
    ) -> _Block | None:
        free = (block for block in list(self._free) if least <= block.num_bytes <= most)
        block = choose(free, key=lambda block: block.num_bytes, default=None)
        if block is not None:
            self._free.remove(block)
        return block

    def _make(self, length: int) -> _Block:
        """Make a block, in place of one that is too short, and of those that are not used."""
        with self._lock:
            shorter = self._pop_free(length // _LONGEST, length - 1, choose=max)
            oldest = self._num_steps - _MOST_UNUSED_STEPS
            over = [block for block in list(self._free) if block.free_since < oldest]
            for block in over:
                self._free.remove(block)
            over += filter(None, [shorter])
            self._blocks.difference_update(over)
        for block in over:
            self._device.unpin(block.pages)
        del over, shorter
        block = _Block(length)
        self._device.pin(block.pages)
        with self._lock:
            self._blocks.add(block)
        return block

    def end_step(self) -> None:
        self._num_steps += 1

    def close(self) -> None:
        """Give the page locks back. What is lent stays as long as somebody has it."""
        for block in self._blocks:
            self._device.unpin(block.pages)
        self._blocks.clear()
        self._free.clear()
