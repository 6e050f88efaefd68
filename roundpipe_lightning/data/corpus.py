"""Which text is trained on: files of a folder, chosen the same way on every run."""

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from roundpipe_lightning.errors import ConfigurationError

SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests"})
"""Folders that are not read: installed packages and the test suites some systems leave out."""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Documents for training and for validation; no file is in both.

    Attributes:
        train: Documents to train on.
        validation: Documents to validate on.
    """

    train: tuple[bytes, ...]
    validation: tuple[bytes, ...]


def standard_library() -> Path:
    """Folder of the running Python's own standard library."""
    return Path(sysconfig.get_path("stdlib"))


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
        """The folder that is read."""
        return standard_library() if self.folder is None else Path(self.folder).expanduser()

    def read(self) -> Corpus:
        """Read validation documents first, then training documents, each up to its budget.

        Files are taken in the order of `find_files`; the last one of each part is cut so that the
        budget holds exactly, and what was cut off is used by neither.

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
        return Corpus(train=train, validation=validation)


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
    found = [
        path
        for path in folder.rglob(pattern)
        if path.is_file() and not SKIPPED_FOLDERS.intersection(path.relative_to(folder).parts[:-1])
    ]
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
