"""A checkpoint that is pickled at once and written later, from the tensors' own memory.

`torch.save` writes a small pickle of the structure, then the memory of every storage. Here the two
are taken apart: the structure is final when `record` returns, and storages are written piece by
piece afterwards. Memory is copied only if it changes before it is written:

```
save ──► writer:   a  b  c  d  e  f  g  h            front to back
             update is about to begin: ▲  copies h  g  f  from the back, as far as it may
                                          waits for d, e; then everything may change
```

The writer begins at the front and the copies at the back, so that what is still to be copied is
what the writer comes to last. With no room for copies the update waits for the writer.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from roundpipe_lightning.files import DigestWriter

Storage = torch.UntypedStorage
TakeStorage = Callable[[Storage], AbstractContextManager[Storage]]
"""Gives the memory to write for a storage; its exit says that the memory has been written."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """One entry of a file in torch's format."""

    name: str
    data: str | bytes | Storage
    num_bytes: int


class _Recorder:
    """Takes the place of torch's file writer."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def write_record(self, name: str, data: str | bytes | Storage, num_bytes: int) -> None:
        self.records.append(Record(name=name, data=data, num_bytes=num_bytes))


def record(content: Any) -> tuple[Record, ...]:
    """Pickle the structure of what `torch.save` takes, and list the storages of its tensors."""
    recorder = _Recorder()
    torch.serialization._save(content, recorder, pickle, 2, False)  # noqa: SLF001 - takes any writer
    return tuple(recorder.records)


def write_records(records: Sequence[Record], file: DigestWriter, *, take: TakeStorage) -> None:
    """Write what `torch.load` reads into an empty file; OSError: the file could not be written."""
    keeper = _ErrorKeepingFile(file)
    try:
        with torch.serialization._open_zipfile_writer(keeper) as archive:  # type: ignore[arg-type]  # noqa: SLF001 - asks for write() and flush()
            for entry in records:
                if isinstance(entry.data, Storage):
                    with take(entry.data) as storage:
                        archive.write_record(entry.name, storage, entry.num_bytes)
                else:
                    archive.write_record(entry.name, entry.data, entry.num_bytes)
    except Exception:
        if keeper.error is not None:  # torch's writer reports something vaguer
            raise keeper.error from None
        raise


class _ErrorKeepingFile:
    """A file that keeps its write error."""

    def __init__(self, file: DigestWriter) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self._file.flush()


class _Protected:
    """A storage that is to be written as it is now."""

    def __init__(self, storage: Storage) -> None:
        self.storage: Storage | None = storage  # the memory itself, then a copy of it, then None
        self.num_bytes = storage.nbytes()
        self.num_files = 0  # that it is still to be written into
        self.is_copy = False
        self.is_read = threading.Lock()
        self.may_change = threading.Event()  # written, or copied


class Snapshots:
    """Keeps the memory that background writers still need, as it was when they were given it."""

    def __init__(self, *, max_copy_bytes: int) -> None:
        self._max_copy_bytes = max_copy_bytes
        self._mutex = threading.Lock()  # of two locks a thread takes `is_read` first
        self._present: dict[int, _Protected] = {}
        self._copied_bytes = 0
        self.peak_copied_bytes = 0
        """The most bytes of copies that existed at once."""

    @property
    def is_idle(self) -> bool:
        return not self._present

    def protect(self, storages: Iterable[Storage]) -> Snapshot:
        """Keep host memory as it is now for one more file; it may change after `release` only."""
        members: dict[int, _Protected] = {}
        with self._mutex:
            for key, storage in {storage._cdata: storage for storage in storages}.items():  # noqa: SLF001
                if key not in self._present or not self._present[key].num_files:
                    self._present[key] = _Protected(storage)
                members[key] = self._present[key]
                members[key].num_files += 1
        return Snapshot(self, members)

    def release(self, *, unchanged: Iterable[Storage] = ()) -> None:
        """Wait until protected memory may change, written or copied; `unchanged` stays as it is."""
        kept = {storage._cdata for storage in unchanged}  # noqa: SLF001 - torch's key for a storage
        with self._mutex:
            present = self._present.items()
            members = [member for key, member in present if key not in kept]
            self._present = {k: member for k, member in present if k in kept and member.num_files}
        for member in reversed(members):
            self._copy_if_possible(member)
        for member in members:
            member.may_change.wait()

    def _copy_if_possible(self, member: _Protected) -> None:
        if not member.is_read.acquire(blocking=False):
            return  # the writer is at it
        try:
            live, num_bytes = member.storage, self._copied_bytes + member.num_bytes
            if live is None or num_bytes > self._max_copy_bytes:
                return
            copy = live.clone()
            with self._mutex:
                if member.num_files:  # else its writer has given up meanwhile
                    member.storage, member.is_copy = copy, True
                    self._copied_bytes += member.num_bytes
                    self.peak_copied_bytes = max(self.peak_copied_bytes, self._copied_bytes)
                    member.may_change.set()
        finally:
            member.is_read.release()

    def _done(self, member: _Protected) -> None:
        with self._mutex:
            member.num_files -= 1
            if not member.num_files:
                member.storage = None
                member.may_change.set()
                self._copied_bytes -= member.num_bytes * member.is_copy


class Snapshot:
    """The memory of one file."""

    def __init__(self, owner: Snapshots, members: dict[int, _Protected]) -> None:
        self._owner = owner
        self._members = members

    @contextmanager
    def take(self, storage: Storage) -> Iterator[Storage]:
        """Give the memory to write for `storage`, live or copied; once for every storage."""
        member = self._members.pop(storage._cdata, None)  # noqa: SLF001
        if member is None:
            yield storage
            return
        with member.is_read:
            assert member.storage is not None
            try:
                yield member.storage
            finally:
                self._owner._done(member)  # noqa: SLF001 - its own part

    def abandon(self) -> None:
        while self._members:
            self._owner._done(self._members.popitem()[1])  # noqa: SLF001


class WriteQueue:
    """Runs jobs one after the other, in a thread for which a process that ends waits.

    An error does not stop the jobs after it; the first is handed out once, by `raise_error`.
    """

    def __init__(self) -> None:
        self._jobs: list[Future[None]] = []  # that are not over, or whose errors were not raised
        self._pool: ThreadPoolExecutor | None = None

    def submit(self, job: Callable[[], None]) -> None:
        """Run `job` after all that were submitted before; RuntimeError: there is no thread."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="roundpipe-checkpoints")
        self._jobs = [each for each in self._jobs if not each.done() or each.exception()]
        try:
            self._jobs.append(self._pool.submit(job))
        except RuntimeError:
            self._pool = None  # which would run it later
            raise

    def drain(self) -> None:
        """Wait for all jobs, and end the thread."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()

    def raise_error(self) -> None:
        errors = [each.exception() for each in self._jobs if each.done()]
        self._jobs = [each for each in self._jobs if not each.done()]
        for error in filter(None, errors):
            raise error
