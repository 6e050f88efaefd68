"""Text on the user's machine, byte by byte; by default Python's own standard library."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import filter as filter_names
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from roundpipe_lightning.data.samples import Row
from roundpipe_lightning.data.token_data import FileOptions, TokenDataModule
from roundpipe_lightning.errors import ConfigurationError

NUM_TOKENS = 257
"""Token ids in use: one for each byte (0 to 255) and the document separator."""

DOCUMENT_SEPARATOR = 256
"""Token id written before every document."""

SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests"})
"""Folders that are not read: installed packages and the test suites some systems leave out."""


class ByteDataModule(TokenDataModule):
    """Byte-level windows of source text that is already on the user's machine.

    Nothing is downloaded and nothing is written. The files are read in `setup`, so making the
    data module costs nothing.

    Args:
        text: Which files are read, and how much of them.
        options: Fields of `FileOptions`: `seq_len` (in bytes), `batch_size`, `seed`, `num_workers`.

    Raises:
        ConfigurationError: A figure is too small, or (in `setup`) there is too little text.
    """

    num_tokens = NUM_TOKENS
    drops_last_validation_batch = True

    def __init__(self, *, text: TextFolder, **options: Any) -> None:
        super().__init__(FileOptions(**options))
        self.text = text

    @override
    def setup(self, stage: str | None = None) -> None:
        """Read and pack the text, once."""
        if self.train_rows is None:
            train, validation = self.text.read()
            windows = self._windows(train, part="training", setting="train_bytes")
            self.validation_rows = self._windows(
                validation, part="validation", setting="validation_bytes"
            )
            self.train_rows = windows

    def _windows(self, documents: Iterable[bytes], *, part: str, setting: str) -> list[Row]:
        """The windows of a part; too few for a batch would silently train nothing."""
        windows = pack(documents, seq_len=self.seq_len)
        if len(windows) < self.batch_size:
            raise ConfigurationError(
                f"The {part} text makes {len(windows)} windows of data.seq_len={self.seq_len} "
                f"bytes, less than one batch of data.batch_size={self.batch_size}. Raise "
                f"data.text.{setting}, or lower data.seq_len or data.batch_size."
            )
        return [{"input_ids": window, "labels": window} for window in windows]


def pack(documents: Iterable[bytes], *, seq_len: int) -> Tensor:
    """Lay documents end to end, each after a separator, and cut them into equal windows.

    The tokens left over after the last whole window are dropped.

    Args:
        documents: The documents, in order.
        seq_len: Tokens of a window.

    Returns:
        Token ids, int64, on the CPU, shape (windows, seq_len); no window for too little text.
    """
    pieces = [np.zeros(0, np.int64)]
    for document in documents:
        pieces += [np.array([DOCUMENT_SEPARATOR]), np.frombuffer(document, np.uint8)]
    stream = torch.from_numpy(np.concatenate(pieces))
    num_windows = len(stream) // seq_len
    return stream[: num_windows * seq_len].reshape(num_windows, seq_len)


@dataclass(frozen=True, kw_only=True)
class TextFolder:
    """Files of a folder as documents, chosen the same way on every run.

    Attributes:
        folder: Where the files are; None: the running Python's standard library.
        pattern: Glob pattern of the files' names.
        train_bytes: Most bytes to train on.
        validation_bytes: Most bytes to validate on; whole files, none of which is trained on.

    Raises:
        ConfigurationError: A budget is below one byte.
    """

    folder: str | None = None
    pattern: str = "*.py"
    train_bytes: int = 4_000_000
    validation_bytes: int = 65_536

    def __post_init__(self) -> None:
        for name in ("train_bytes", "validation_bytes"):
            if getattr(self, name) < 1:
                raise ConfigurationError(
                    f"data.text.{name}={getattr(self, name)} must be at least 1 byte."
                )

    @property
    def root(self) -> Path:
        return Path(
            sysconfig.get_path("stdlib") if self.folder is None else self.folder
        ).expanduser()

    def read(self) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """Documents to train and to validate on, each up to its budget; no file is in both.

        Validation documents are read first. Files are taken in the order of `find_files`; the last
        one of each part is cut so that the budget holds exactly, and what was cut off is used by
        neither.

        Raises:
            ConfigurationError: The folder does not exist, has no such file, or too little text.
        """
        files = find_files(self.root, pattern=self.pattern)
        validation, num_used = _take(files, num_bytes=self.validation_bytes)
        train, _ = _take(files[num_used:], num_bytes=self.train_bytes)
        if not train:
            raise ConfigurationError(
                f"{str(self.root)!r} has too little text: all of its {len(files)} files went into "
                f"the {self.validation_bytes} bytes for validation. Lower "
                "data.text.validation_bytes."
            )
        return train, validation


def find_files(folder: Path, *, pattern: str) -> list[Path]:
    """Files under `folder` that match `pattern`, in an order that mixes the folders.

    The order is that of a hash of each file's path within `folder`: it depends on nothing else,
    so the same text is read on every run, whatever the seed.

    Raises:
        ConfigurationError: The folder does not exist or has no such file.
    """
    if not folder.is_dir():
        raise ConfigurationError(
            f"data.text.folder={str(folder)!r} is not a folder. Name one that holds text "
            "files, or use data.text.folder=null for the source of Python's standard library."
        )
    found: list[Path] = []
    for parent, folders, names in os.walk(folder):
        folders[:] = set(folders) - SKIPPED_FOLDERS  # thousands of files below one, often
        found += filter(Path.is_file, (Path(parent, name) for name in filter_names(names, pattern)))
    if not found:
        raise ConfigurationError(
            f"No file in {str(folder)!r} matches data.text.pattern={pattern!r}. If this Python "
            "comes without the source of its standard library, name a folder of text with "
            "data.text.folder."
        )

    def place(path: Path) -> str:
        return hashlib.sha256(path.relative_to(folder).as_posix().encode()).hexdigest()

    return sorted(found, key=place)


def _take(files: list[Path], *, num_bytes: int) -> tuple[tuple[bytes, ...], int]:
    """Contents of the first files, `num_bytes` in all, and how many files were opened for it."""
    documents: list[bytes] = []
    left = num_bytes
    for path in files:
        if left <= 0:
            break
        document = path.read_bytes()[:left]
        documents.append(document)
        left -= len(document)
    return tuple(documents), len(documents)
