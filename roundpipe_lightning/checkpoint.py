"""Checkpoints as files that are either whole or not there.

The format is Lightning's own, a plain `torch.save` of the checkpoint's dictionary: any strategy
reads ours, and ours reads any strategy's. Only the writing differs:

```
last.ckpt            the previous checkpoint, complete
.last.ckpt.1f3a.tmp  1. written beside it, straight from the tensors' own memory
                     2. flushed and fsynced
last.ckpt            3. renamed onto it (atomic); on an error the temporary file is removed instead
```
"""

from __future__ import annotations

import os
import secrets
import zipfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import torch
from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]
from lightning.pytorch.plugins.io import TorchCheckpointIO

from roundpipe_lightning.errors import CheckpointError

_ZIP_MAGIC = b"PK\x03\x04"


class RoundPipeCheckpointIO(TorchCheckpointIO):
    """Writes and reads plain Lightning checkpoints; a local file is replaced atomically.

    Remote paths (`s3://...`, `gs://...`) go Lightning's usual way.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write `checkpoint` to `path`, or leave what is at `path` as it was.

        Args:
            checkpoint: What Lightning's `dump_checkpoint` made.
            path: A local path, or any URL that fsspec knows.
            storage_options: Not supported, as in Lightning's own plugin.

        Raises:
            CheckpointError: The file could not be written (a full disk, say).
        """
        local_path = _local_path(path)
        if local_path is None or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)
            return
        try:
            local_path.parent.mkdir(parents=True, exist_ok=True)
            with _replaced_when_complete(local_path) as file:
                _save(checkpoint, file)
        except OSError as error:
            raise CheckpointError(
                f"The checkpoint {local_path} could not be written: {error.strerror or error}. "
                "What was there before is untouched. Free some space or choose another folder "
                "(ModelCheckpoint(dirpath=...) or Trainer(default_root_dir=...))."
            ) from error

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Any | None = lambda storage, _: storage,
        weights_only: bool | None = None,  # noqa: FBT001 - Lightning's signature
    ) -> dict[str, Any]:
        """Read a checkpoint of any strategy.

        Args:
            path: A local path, or any URL that fsspec knows.
            map_location: As in `torch.load`; the default leaves every tensor in host memory.
            weights_only: As in `torch.load`.

        Raises:
            FileNotFoundError: There is nothing at `path`.
            CheckpointError: The file is truncated or damaged.
        """
        local_path = _local_path(path)
        if local_path is None:
            return super().load_checkpoint(path, map_location, weights_only)
        if local_path.is_file() and _is_truncated(local_path):
            raise _unreadable(local_path, "its end is missing")
        try:
            return super().load_checkpoint(path, map_location, weights_only)
        except OSError:
            raise
        except RuntimeError as error:
            raise _unreadable(local_path, str(error)) from error
        except Exception as error:
            if zipfile.is_zipfile(local_path):  # sound, with objects that `weights_only` forbids
                raise
            raise _unreadable(local_path, "it is not in torch's format") from error


class _ErrorKeepingFile:
    """A file that keeps its write error, because torch's C++ writer reports something vaguer."""

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


def _save(checkpoint: dict[str, Any], file: IO[bytes]) -> None:
    """`torch.save` record by record into `file`; a write error comes out as the OSError it was."""
    keeper = _ErrorKeepingFile(file)
    try:
        torch.save(checkpoint, keeper)  # type: ignore[arg-type]  # torch asks for write() and flush() only
    except Exception:
        if keeper.error is not None:
            raise keeper.error from None
        raise


@contextmanager
def _replaced_when_complete(path: Path) -> Generator[IO[bytes], None, None]:
    """Yield a new file beside `path`; put it in `path`'s place, or remove it after an error."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(FileNotFoundError):
            temporary.unlink()
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Make a rename durable (on Windows a folder cannot be opened, and need not be)."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _local_path(path: str | Path) -> Path | None:
    """`path` as a local file's, or None where it names a remote one."""
    filesystem, stripped = url_to_fs(str(path))
    return Path(stripped) if isinstance(filesystem, LocalFileSystem) else None


def _is_truncated(path: Path) -> bool:
    """Whether a file begins as torch's format does and lacks the directory that ends it."""
    with path.open("rb") as file:
        begins_as_zip = file.read(len(_ZIP_MAGIC)) == _ZIP_MAGIC
    return begins_as_zip and not zipfile.is_zipfile(path)


def _unreadable(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint {path} cannot be read: {reason}. The file is truncated or damaged; "
        "resume from another one (ckpt_path=...)."
    )
