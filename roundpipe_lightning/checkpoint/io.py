"""Checkpoints as files, or folders of files, that are either whole or not there.

The content is Lightning's own, and a file is a plain `torch.save` of the checkpoint's dictionary:
any strategy reads ours, and ours reads any strategy's. Only the writing differs:

```
last.ckpt            the previous checkpoint, complete
.last.ckpt.1f3a.tmp  1. written beside it, straight from the tensors' own memory
                     2. flushed and fsynced
last.ckpt            3. renamed onto it (atomic); on an error the temporary file is removed instead
```
"""

from __future__ import annotations

import errno
import sys
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, TypeAlias, get_args

from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]
from lightning.pytorch.plugins.io import TorchCheckpointIO

from roundpipe_lightning.checkpoint.folder import (
    Folder,
    Part,
    Share,
    load_file,
    make_place,
    unreadable,
    write_folder,
)
from roundpipe_lightning.checkpoint.snapshot import (
    Record,
    Snapshots,
    Storage,
    TakeStorage,
    WriteQueue,
    record,
    write_records,
)
from roundpipe_lightning.errors import CheckpointError, ConfigurationError
from roundpipe_lightning.files import DigestWriter, find_damage, replaced_file

__all__ = ["RoundPipeAsyncCheckpointIO", "RoundPipeCheckpointIO", "merge_checkpoint"]

_GIB = 1 << 30

Form: TypeAlias = Literal["file", "distributed"]


class RoundPipeCheckpointIO(TorchCheckpointIO):
    """Writes and reads plain Lightning checkpoints; what is there is replaced as a whole.

    Remote paths (`s3://...`, `gs://...`) go Lightning's usual way, as one file; `storage_options`
    are refused by it.

    Args:
        form: `"file"`: one file. `"distributed"`: a folder of `torch.distributed.checkpoint`, to
            which every host writes its part. Both are read, whatever this says.
        max_file_bytes: Size of the files of a folder.

    Raises:
        ConfigurationError: A setting cannot work.
    """

    def __init__(self, *, form: Form = "file", max_file_bytes: int = 4 * _GIB) -> None:
        if form not in get_args(Form):
            raise ConfigurationError(f"form={form!r}: set 'file' or 'distributed'.")
        if type(max_file_bytes) is not int or max_file_bytes <= 0:
            raise ConfigurationError(f"max_file_bytes={max_file_bytes}: set a positive number.")
        self.form = form
        self.max_file_bytes = max_file_bytes

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write `checkpoint` to `path`, or leave what is at `path` as it was.

        Raises:
            CheckpointError: The file could not be written (a full disk, say).
        """
        local_path = _local_path(path)
        if local_path is None or storage_options is not None:
            if self.form != "file":
                warnings.warn(
                    f"form={self.form!r} writes folders on this machine only: {path} is one file.",
                    stacklevel=2,
                )
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)
            return
        self.save_taken(checkpoint, path, take=nullcontext)

    def writes_parts(self, path: str | Path, storage_options: Any | None = None) -> bool:
        """Return whether every host writes its part, by `save_part`."""
        return self.form == "distributed" and not storage_options and _local_path(path) is not None

    def save_part(
        self, checkpoint: dict[str, Any], path: str | Path, *, share: Share, **options: Any
    ) -> None:
        """Write this host's part of `checkpoint`.

        Args:
            share: As of `write_folder`.
            options: As of `Part`.

        Raises:
            CheckpointError: A host could not write its part.
            HostError: Another host is lost.
        """
        local_path = _local_path(path)
        assert local_path is not None
        part = Part(checkpoint, max_file_bytes=self.max_file_bytes, **options)
        write_folder(part, local_path, share=share)

    def save_taken(
        self, checkpoint: dict[str, Any], path: str | Path, *, take: TakeStorage
    ) -> bool:
        """Write `checkpoint`, with the memory that `take` gives for each tensor.

        Returns:
            Whether that can be: False for a remote path, where nothing is done.

        Raises:
            CheckpointError: The file could not be written.
        """
        local_path = _local_path(path)
        if local_path is not None:
            _write(local_path, self._content(checkpoint), take=take)
        return local_path is not None

    def _content(self, checkpoint: dict[str, Any]) -> Part | Sequence[Record]:
        if self.form == "distributed":
            return Part(checkpoint, max_file_bytes=self.max_file_bytes)
        return record(checkpoint)

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Any | None = lambda storage, _: storage,
        weights_only: bool | None = None,  # noqa: FBT001 - Lightning's signature
    ) -> dict[str, Any]:
        """Read a checkpoint of any strategy, of either form; by default into host memory.

        From an address it is copied to a temporary file first, and read as a local one is.

        Args:
            weights_only: As in `torch.load`; None is True, from an address as well.

        Raises:
            FileNotFoundError: There is nothing at `path`.
            CheckpointError: The checkpoint is truncated or damaged, or is none, or cannot be
                reached, or holds objects that `weights_only` forbids.
        """
        options = {"map_location": map_location, "weights_only": weights_only}
        local_path = _local_path(path)
        if local_path is not None:
            return read_checkpoint(local_path, **options)
        with TemporaryDirectory(prefix="roundpipe_", ignore_cleanup_errors=True) as folder:
            copied = Path(folder) / "fetched.ckpt"
            _fetch(str(path), copied)
            try:
                return read_checkpoint(copied, **options)
            except CheckpointError as error:
                raise CheckpointError(str(error).replace(str(copied), str(path))) from error


class RoundPipeAsyncCheckpointIO(RoundPipeCheckpointIO):
    """Writes checkpoints in the background, while training goes on.

    Under the roundpipe strategy nothing is copied at first: the writer reads the parameters and the
    optimizer's state where they are. When the next optimizer step is about to change them, what has
    not been written by then is copied, from the end of the file towards the writer, up to
    `max_copy_bytes`; for the rest the step waits. All else is copied at once, as is everything with
    another strategy.

    Saves and removals happen in the order in which they were asked for. `load_checkpoint` and
    `teardown` wait for them, and so does the end of the process. An error in the background is
    raised by the next call, once.

    Args:
        max_copy_bytes: The most memory for copies of parameters and optimizer state.
        form: As for `RoundPipeCheckpointIO`; on several hosts host 0 writes all of it.
        max_file_bytes: As for `RoundPipeCheckpointIO`.

    Raises:
        ConfigurationError: A setting cannot work.
    """

    def __init__(
        self, *, max_copy_bytes: int = 4 * _GIB, form: Form = "file", max_file_bytes: int = 4 * _GIB
    ) -> None:
        super().__init__(form=form, max_file_bytes=max_file_bytes)
        if type(max_copy_bytes) is not int or max_copy_bytes < 0:
            raise ConfigurationError(f"max_copy_bytes={max_copy_bytes}: set 0 or more.")
        self.snapshots = Snapshots(max_copy_bytes=max_copy_bytes)
        """The memory that is still to be written, and how much of it was copied."""
        self._queue = WriteQueue()

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | Path,
        storage_options: Any | None = None,
        *,
        steady: Collection[Storage] = (),
    ) -> None:
        """Write `checkpoint` as it is now, without copies of what is steady.

        Args:
            path: A local path; remote ones are written before this returns.
            steady: Memory that changes after the next `release` only.

        Raises:
            CheckpointError: An earlier checkpoint could not be written.
        """
        self._queue.raise_error()
        local_path = _local_path(path)
        if local_path is None or storage_options is not None:
            self.wait()
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        kept = {storage._cdata for storage in steady}  # noqa: SLF001 - torch's own key for a storage
        content = self._content(checkpoint)
        if isinstance(content, Part):
            protected = content.copy_all_but(kept)
        else:
            protected, copied = [], list[Record]()
            for entry in content:
                if isinstance(entry.data, Storage) and entry.data._cdata in kept:  # noqa: SLF001
                    protected.append(entry.data)
                elif isinstance(entry.data, Storage):
                    entry = replace(entry, data=entry.data.clone())
                copied.append(entry)
            content = copied
        snapshot = self.snapshots.protect(protected)

        def write() -> None:
            try:
                _write(local_path, content, take=snapshot.take)
            finally:
                snapshot.abandon()

        self._queue.submit(write)

    def writes_parts(self, *_: Any) -> bool:
        """Return False: in the background there is no talk with other hosts."""
        return False

    def release(self, *, unchanged: Collection[Storage] = ()) -> None:
        """Wait until memory that was given as steady may change, but for `unchanged`."""
        self.snapshots.release(unchanged=unchanged)

    def remove_checkpoint(self, path: str | Path) -> None:
        remove = super().remove_checkpoint
        self._queue.submit(lambda: remove(path))

    def load_checkpoint(self, *args: Any, **options: Any) -> dict[str, Any]:
        self.wait()
        return super().load_checkpoint(*args, **options)

    def wait(self) -> None:
        """Wait until all saves and removals are done; CheckpointError if one was not written."""
        self._queue.drain()
        self._queue.raise_error()

    def teardown(self) -> None:
        self.wait()


def merge_checkpoint(folder: str | Path, file: str | Path, *, weights_only: bool = True) -> None:
    """Write a folder's checkpoint as one file, without holding it in memory.

    Args:
        file: The file to write; what is there is replaced as a whole.
        weights_only: As in `torch.load`: False for a checkpoint that holds objects of other
            classes, which run their code when they are read.

    Raises:
        CheckpointError: The folder is no checkpoint, or damaged, or holds such objects, or the file
            cannot be written.
    """
    read = Folder(Path(folder), weights_only=weights_only)
    _write(Path(file), record(read.checkpoint), take=partial(_read_late, read))


@contextmanager
def _read_late(folder: Folder, storage: Storage) -> Iterator[Storage]:
    is_read = folder.fill(storage)
    yield storage
    if is_read:
        storage.resize_(0)


def _write(path: Path, content: Part | Sequence[Record], *, take: TakeStorage) -> None:
    """Write a folder or a file; CheckpointError: it could not be written."""
    try:
        if isinstance(content, Part):
            write_folder(content, path, take=take)
            return
        make_place(path)
        with replaced_file(path) as file, DigestWriter(file) as written:
            write_records(content, written, take=take)
            written.end_zip()
    except OSError as error:
        raise CheckpointError(
            f"The checkpoint {path} could not be written: {error.strerror or error}. "
            "What was there before is untouched. Free some space or choose another folder "
            "(ModelCheckpoint(dirpath=...) or Trainer(default_root_dir=...))."
        ) from error


def _fetch(address: str, file: Path) -> None:
    """Copy a file from an address; what an earlier one of that name was is not looked up.

    Raises as `load_checkpoint`.
    """
    try:
        files, path = url_to_fs(address)
        files.get_file(path, str(file))
    except FileNotFoundError as error:
        raise FileNotFoundError(f"Checkpoint file not found: {address}") from error
    except Exception as error:
        is_full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        room = f" Set TMPDIR to a folder with room: {file.parent} is full." if is_full else ""
        raise CheckpointError(
            f"The checkpoint {address} cannot be fetched: {type(error).__name__}: {error}.{room}"
        ) from error


def read_checkpoint(
    path: Path, *, map_location: Any = None, weights_only: bool | None = None
) -> dict[str, Any]:
    """Read a checkpoint of any strategy, of either form; tensors stay in it until they are used.

    Raises:
        FileNotFoundError: There is nothing at `path`.
        CheckpointError: The checkpoint is truncated or damaged, or is none, or holds objects that
            `weights_only` forbids.
    """
    if path.is_dir():
        return Folder(path, map_location=map_location, weights_only=weights_only).read()
    if not path.is_file():
        raise FileNotFoundError(f"Checkpoint file not found: {path}")
    with path.open("rb") as file:  # once: another may take its place meanwhile
        damage = find_damage(file)
        if damage is not None:
            raise unreadable(path, damage)
        mmap = sys.platform != "win32"  # which replaces no file that is mapped
        checkpoint: dict[str, Any] = load_file(
            file, path, map_location=map_location, weights_only=weights_only, mmap=mmap
        )
    return checkpoint


def _local_path(path: str | Path) -> Path | None:
    filesystem, stripped = url_to_fs(str(path))
    return Path(stripped) if isinstance(filesystem, LocalFileSystem) else None
