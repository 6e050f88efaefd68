"""Optimizer state in a file that is mapped into memory, read ahead and written behind.

```
window     k-1                 k                    k+1
           written to disk,    stepped by the       read from disk
           then dropped        threads              into the page cache
```

So three windows are in memory at most, besides what the system keeps without being asked. Which
window comes next is what came next the last time. The state's room on the disk is taken when the
file is made: a disk that is too full refuses the optimizer, not its hundredth step. The file has no
name in its folder, so the system frees it when the process ends, however it ends; nothing is left
behind by a run that was killed.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import shutil
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from roundpipe_lightning.errors import OffloadError
from roundpipe_lightning.planning.model.work import STATE_WINDOW_BYTES

T = TypeVar("T")

_ALIGNMENT = 64
_SYNC_RANGE = 1 | 2 | 4  # sync_file_range: wait for older writes, write, wait
_ZEROS = 1 << 20


class Range(NamedTuple):
    """Bytes of a file."""

    file: int  # index of the file
    start: int  # first byte; a multiple of the page size
    stop: int  # end; likewise, or the end of the file


class StateFile:
    """A file without a name, mapped into memory; OffloadError: there is no room, say."""

    def __init__(self, folder: Path, num_bytes: int) -> None:
        self._folder, self.num_bytes = folder, num_bytes
        try:
            file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - as long as its tensors
        except OSError as error:
            raise _explained(error, folder, num_bytes) from error
        self._number = file.fileno()
        weakref.finalize(self, file.close)
        try:
            _reserve(self._number, num_bytes)
            self._map = mmap.mmap(self._number, num_bytes)
        except OSError as error:
            file.close()
            raise _explained(error, folder, num_bytes) from error
        self.address = torch.frombuffer(self._map, dtype=torch.uint8).data_ptr()

    def tensor(self, like: Tensor, *, offset: int) -> Tensor:
        count = like.numel()
        vector = torch.frombuffer(self._map, dtype=like.dtype, count=count, offset=offset)
        return vector.as_strided(like.shape, like.stride())

    def read_ahead(self, part: Range) -> None:
        """Ask the system to read a part into its cache, without waiting for it."""
        if hasattr(os, "posix_fadvise"):
            advice = os.POSIX_FADV_WILLNEED
            os.posix_fadvise(self._number, part.start, part.stop - part.start, advice)

    def write_behind(self, part: Range) -> None:
        """Write a part to the disk and drop it; OffloadError if that fails: it stays in memory."""
        number, size = self._number, part.stop - part.start
        try:
            _sync(number, part.start, size)
        except OSError as error:
            raise _explained(error, self._folder, size) from error
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, part.start, size)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(number, part.start, size, os.POSIX_FADV_DONTNEED)


class StateFiles:
    """All state of an optimizer on disk."""

    def __init__(self, folder: Path, *, window_bytes: int = STATE_WINDOW_BYTES) -> None:
        self._folder, self._window_bytes = folder, window_bytes
        self._files: list[StateFile] = []
        self._next: dict[tuple[Range, ...], tuple[Range, ...]] = {}
        self._last: tuple[Range, ...] = ()
        self._pool: ThreadPoolExecutor | None = None  # a thread reads ahead, another one writes
        self._writing: Future[None] | None = None

    def allocate(self, fields: Sequence[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
        """Make a file for the state of parameters, all zero; OffloadError: the disk has no room."""
        places: list[dict[str, int]] = []
        end = 0
        for tensors in fields:
            places.append({})
            for name, field in tensors.items():
                places[-1][name] = end
                end += -(-field.nbytes // _ALIGNMENT) * _ALIGNMENT
        if end:
            self._files.append(StateFile(self._folder, end))
        return [
            {
                name: self._files[-1].tensor(field, offset=offsets[name])
                if field.nbytes
                else torch.zeros_like(field, device="cpu")
                for name, field in tensors.items()
            }
            for tensors, offsets in zip(fields, places, strict=True)
        ]

    def in_windows(
        self, tasks: Sequence[T], state_of: Callable[[T], Iterable[Tensor]]
    ) -> Iterator[Sequence[T]]:
        """Yield tasks whose state may be in memory at the same time, to be done before the next.

        Meanwhile the next window is read ahead, and the one before is written behind. OffloadError:
        state could not be written, now or since the last time; it is in memory.
        """
        if self._pool is None:
            self._pool = ThreadPoolExecutor(2, "roundpipe-optimizer")
        error: BaseException | None = None
        for members, ranges in self._windows(tasks, state_of):
            if self._last:
                self._next[self._last] = ranges
            self._last = ranges
            if ahead := self._next.get(ranges):
                self._pool.submit(_each, self._files, ahead, StateFile.read_ahead)
            yield members
            written, self._writing = self._writing, None
            error = (written and written.exception()) or error
            self._writing = self._pool.submit(_each, self._files, ranges, StateFile.write_behind)
        if error is not None:
            raise error

    def _windows(
        self, tasks: Sequence[T], state_of: Callable[[T], Iterable[Tensor]]
    ) -> Iterator[tuple[Sequence[T], tuple[Range, ...]]]:
        members: list[T] = []
        found: list[Range] = []
        for task in tasks:
            members.append(task)
            for piece in state_of(task):
                found.extend(self._ranges(piece))
            if sum(part.stop - part.start for part in found) >= self._window_bytes:
                yield members, _merged(found)
                members, found = [], []
        if members:
            yield members, _merged(found)

    def close(self) -> None:
        """Finish what is being read or written and end the threads. The state stays."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _ranges(self, piece: Tensor) -> Iterator[Range]:
        """Return the pages of a file that a tensor lies in; none for a tensor in memory."""
        address = piece.data_ptr()
        for index, file in enumerate(self._files):
            if file.address <= address < file.address + file.num_bytes:
                start, page = address - file.address, mmap.PAGESIZE
                stop = -(-(start + piece.nbytes) // page) * page
                yield Range(index, start // page * page, min(stop, file.num_bytes))


def _each(
    files: Sequence[StateFile], ranges: Sequence[Range], act: Callable[[StateFile, Range], None]
) -> None:
    for part in ranges:
        act(files[part.file], part)


def _merged(ranges: Iterable[Range]) -> tuple[Range, ...]:
    merged: list[Range] = []
    for part in sorted(ranges):
        last = merged[-1] if merged else None
        if last is not None and last.file == part.file and part.start <= last.stop:
            merged[-1] = Range(last.file, last.start, max(last.stop, part.stop))
        else:
            merged.append(part)
    return tuple(merged)


def _reserve(number: int, num_bytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(number, 0, num_bytes)
        return
    zeros = bytes(_ZEROS)
    left = num_bytes
    while left:
        left -= os.write(number, zeros[: min(left, _ZEROS)])


def _sync(number: int, start: int, size: int) -> None:
    """Write a range of a file to the disk and wait; the whole file where nothing less is known."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        code = libc.sync_file_range(
            ctypes.c_int(number), ctypes.c_int64(start), ctypes.c_int64(size), _SYNC_RANGE
        )
        if code == 0:
            return
        if ctypes.get_errno() not in (errno.ENOSYS, errno.EINVAL, errno.ESPIPE):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    os.fsync(number)


def _explained(error: OSError, folder: Path, num_bytes: int) -> OffloadError:
    try:
        free = f"{shutil.disk_usage(folder).free / 2**30:.2f} GiB are free there"
    except OSError:
        free = "that folder cannot be asked for its free space"
    return OffloadError(
        f"The optimizer's state cannot be kept on disk: {num_bytes / 2**30:.2f} GiB in the folder "
        f"{folder} ({error.strerror}); {free}. Give optimizer.offload_dir a folder with more room, "
        "or choose moments='8bit', which needs a quarter of it."
    )
