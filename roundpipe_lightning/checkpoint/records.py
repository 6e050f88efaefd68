"""A checkpoint as the records of torch's file format: pickled at once, written later.

`torch.save` writes a small pickle of the structure and then the memory of every storage. Here the
two are taken apart: the structure is final when `record` returns, and the storages are written
piece by piece afterwards, whatever has happened to their tensors (see `checkpoint_snapshot`).
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import IO, Any

import torch

TakeStorage = Callable[[torch.UntypedStorage], AbstractContextManager[torch.UntypedStorage]]
"""Gives the memory to write for a storage, and is told when it has been written."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """One entry of the file.

    Attributes:
        name: Its name in the archive.
        data: Text, bytes, or host memory.
        num_bytes: Its size.
    """

    name: str
    data: str | bytes | torch.UntypedStorage
    num_bytes: int


class _Recorder:
    """Takes the place of torch's file writer."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def write_record(
        self, name: str, data: str | bytes | torch.UntypedStorage, num_bytes: int
    ) -> None:
        self.records.append(Record(name=name, data=data, num_bytes=num_bytes))


def record(content: Any) -> tuple[Record, ...]:
    """Pickle the structure of `content`, and list the storages of its tensors.

    Args:
        content: What `torch.save` takes.
    """
    recorder = _Recorder()
    torch.serialization._save(content, recorder, pickle, 2, False)  # noqa: SLF001 - takes any writer
    return tuple(recorder.records)


def write_records(records: Sequence[Record], file: IO[bytes], *, take: TakeStorage) -> None:
    """Write what `torch.load` reads.

    Args:
        records: What `record` returned.
        file: An empty binary file.
        take: Gives the memory of a storage.

    Raises:
        OSError: The file could not be written.
    """
    keeper = _ErrorKeepingFile(file)
    try:
        with torch.serialization._open_zipfile_writer(keeper) as archive:  # type: ignore[arg-type]  # noqa: SLF001 - asks for write() and flush()
            for entry in records:
                if isinstance(entry.data, torch.UntypedStorage):
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

    def __init__(self, file: IO[bytes]) -> None:
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
