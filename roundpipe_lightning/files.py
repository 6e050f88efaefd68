"""Files and folders that are whole or not there, whatever stops the process that writes them.

And text files of which each size is limited before it is read, since anybody may have written them.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
import socket
import sys
import time
import zipfile
import zlib
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import xxhash
import yaml
from typing_extensions import Self

if sys.platform != "win32":
    import fcntl

from roundpipe_lightning.errors import ConfigurationError

_MARK = ".tmp"
_HOST = f"{zlib.crc32(socket.gethostname().encode()):08x}"
_PROCESS = secrets.token_hex(4)
_OWNER = re.compile(
    rf"(?P<host>[0-9a-f]{{8}})-(?P<number>\d+)-(?P<process>[0-9a-f]{{8}})-[0-9a-f]{{8}}{re.escape(_MARK)}"
)
"""What stands behind the name of a file or a folder that is being written."""
_MOST_SECONDS = 24 * 3600  # that a writer on another host leaves its file as it is
_PIECE_BYTES = 1 << 22
_ZIP_MAGIC = b"PK\x03\x04"
_IS_FOLDER = 0x10  # of the attributes of DOS
_DIGEST_COMMENT = b"roundpipe xxh3_128="
DIGEST_LENGTH = 32
_MOST_TEXT_BYTES = 4 << 20  # of a file of settings: lists of 50,000 files are shorter
_MOST_LEVELS = 50


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file of names and plain values; no tag makes an object.

    Raises:
        ConfigurationError: It is not one, or is larger than settings are.
        OSError: It cannot be read.
    """
    text = _limited_text(path)
    try:
        _check_levels(path, text)
        return _mapping(path, yaml.load(text, Loader=_Loader))
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{path} is not YAML: {' '.join(str(error).split())}.") from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file with names and values; raises as `read_yaml`."""
    text = _limited_text(path)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path} is not JSON: {error}.") from error
    return _mapping(path, content)


def _limited_text(path: Path) -> str:
    with path.open("rb") as file:
        content = file.read(_MOST_TEXT_BYTES + 1)
    if len(content) > _MOST_TEXT_BYTES:
        raise ConfigurationError(f"{path} is larger than the {_MOST_TEXT_BYTES >> 20} MiB allowed.")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path} is not UTF-8: {error}.") from error


def _check_levels(path: Path, text: str) -> None:
    """Refuse what grows while it is read: nine lines of aliases stand for 10 GB."""
    level = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.AliasEvent):
            raise ConfigurationError(f"{path} has an alias (*{event.anchor}): write the value out.")
        level += isinstance(event, yaml.CollectionStartEvent)
        level -= isinstance(event, yaml.CollectionEndEvent)
        if level > _MOST_LEVELS:
            raise ConfigurationError(f"{path} is nested more than {_MOST_LEVELS} levels deep.")


def _mapping(path: Path, content: object) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise ConfigurationError(f"{path} must have names and values, not {str(content)[:40]!r}.")
    return content


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """YAML 1.2's numbers: `1e9` is one, as it is for Hydra."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def write_text(path: Path, text: str) -> None:
    """Write a text file as UTF-8, its line ends as they are; missing folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced_file(path) as file:
        file.write(text.encode())


@contextmanager
def replaced_file(path: Path) -> Generator[IO[bytes], None, None]:
    """Yield a new file beside `path`; put it in `path`'s place, or remove it after an error.

    A reader sees the old content or the new, and after a power cut it is the one or the other.
    `path` may be a folder.
    """
    temporary = _beside(path)
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        with _alone_in(path.parent):
            if path.is_dir() and not path.is_symlink():
                with _moved_aside(path):
                    temporary.replace(path)
            else:
                temporary.replace(path)
    except BaseException:
        with suppress(FileNotFoundError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


@contextmanager
def new_folder(path: Path) -> Generator[Path, None, None]:
    """Yield an empty folder beside `path`, which is removed in the end if it is still there."""
    temporary = _beside(path)
    temporary.mkdir(parents=True)
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def place_folder(temporary: Path, path: Path) -> None:
    """Put a complete folder where nothing, a file, or another folder is.

    Where something is, there are two renames: a kill between them leaves it under a hidden name
    beside `path`. Elsewhere it is one step.
    """
    with _alone_in(path.parent):
        _place(temporary, path)
    sync_folder(path.parent)


def _place(temporary: Path, path: Path) -> None:
    if path.is_symlink() or path.exists():
        with _moved_aside(path):
            temporary.rename(path)
    else:
        temporary.rename(path)


def replace_folder(temporary: Path, path: Path, *, index: str, suffix: str) -> None:
    """Put the files of a complete folder in the place of those of another one.

    Args:
        temporary: Its files are named as none of the other's are, but for the index.
        path: Where files are added before the index is replaced, and removed after that: a reader
            sees the one or the other. Without an index, as `place_folder`.
        index: The file that says which belong to it.
        suffix: Of files that may be removed.
    """
    sync_folder(temporary)
    with _alone_in(path.parent):  # else one writer removes what another has just put there
        if path.is_symlink() or not (path / index).is_file():
            _place(temporary, path)
            sync_folder(path.parent)
            return
        kept = {entry.name for entry in temporary.iterdir()}
        for name in kept - {index}:
            (temporary / name).rename(path / name)
        sync_folder(path)
        (temporary / index).replace(path / index)
        sync_folder(path)
        for old in path.iterdir():
            if old.name not in kept and old.suffix == suffix:
                with suppress(OSError):
                    old.unlink()


class DigestWriter:
    """Writes a file and its digest at the same time, the digest in a thread of its own."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hash = xxhash.xxh3_128()
        self._thread = ThreadPoolExecutor(max_workers=1)
        self.num_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()

    def write(self, data: bytes) -> int:
        if len(data) < _PIECE_BYTES:
            self._hash.update(data)
            self._file.write(data)
        else:
            hashed = self._thread.submit(self._hash.update, data)
            try:
                self._file.write(data)
            finally:
                hashed.result()  # which reads the caller's memory
        self.num_bytes += len(data)
        return len(data)

    def flush(self) -> None:
        self._file.flush()

    @property
    def digest(self) -> str:
        return str(self._hash.hexdigest())

    def end_zip(self) -> None:
        """Write the digest of an archive into the archive's comment, which readers skip."""
        comment = _DIGEST_COMMENT + self.digest.encode()
        self._file.seek(-2, os.SEEK_END)  # the length of the comment, which was 0
        self._file.write(len(comment).to_bytes(2, "little") + comment)


def digest_of(file: IO[bytes], num_bytes: int, *, end: bytes = b"") -> str:
    """Return the digest of the next bytes of a file, read in pieces, and of an `end`."""
    digest, piece = xxhash.xxh3_128(), memoryview(bytearray(_PIECE_BYTES))
    while num_bytes:
        count = file.readinto(piece[:num_bytes])  # type: ignore[attr-defined]
        if not count:
            break
        digest.update(piece[:count])
        num_bytes -= count
    digest.update(end)
    return str(digest.hexdigest())


def name_of(file: IO[bytes]) -> str:
    """Return a name for an open file, also after another has taken its place."""
    name = f"/dev/fd/{file.fileno()}"
    return name if Path(name).exists() else file.name


def find_damage(file: IO[bytes]) -> str | None:
    """Return what is wrong with a file of `torch.save`; None if nothing is.

    Ours have a digest. Others have a CRC-32 of every entry, which torch does not compare when it
    reads. A file in torch's old format, or one without checksums, has nothing to compare.
    """
    num_comment = len(_DIGEST_COMMENT) + DIGEST_LENGTH
    num_bytes = file.seek(0, os.SEEK_END) - num_comment
    file.seek(max(0, num_bytes))
    comment = file.read(num_comment)
    if comment.startswith(_DIGEST_COMMENT):
        file.seek(0)
        actual = digest_of(file, num_bytes - 2, end=bytes(2))  # the comment's length was 0
        is_same = comment.endswith(actual.encode()) and file.read(2) == bytes([num_comment, 0])
        return None if is_same else "it differs from its digest"
    file.seek(0)
    return _find_damaged_entry(file) if file.read(len(_ZIP_MAGIC)) == _ZIP_MAGIC else None


def _find_damaged_entry(file: IO[bytes]) -> str | None:
    file.seek(0)
    try:
        with zipfile.ZipFile(file) as archive:
            for entry in archive.infolist():
                # Hazard: torch reads nothing of a folder, and gives memory that nobody wrote.
                if entry.is_dir() or entry.external_attr & _IS_FOLDER:
                    return f"its entry {entry.filename} is a folder"
                if entry.compress_type != zipfile.ZIP_STORED:  # a bomb: torch does not compress
                    return f"its entry {entry.filename} is compressed"
            wrong = archive.testzip()
            if wrong is None or not _has_checksums(archive):
                return None
    except zipfile.BadZipFile:
        return "its end is missing"
    except (NotImplementedError, RuntimeError, ValueError, EOFError, zlib.error) as error:
        return f"its directory is damaged ({error})"
    except OSError as error:
        if error.errno != errno.EINVAL:  # a place that no file has
            raise
        return f"its directory is damaged ({error})"
    return f"its entry {wrong} differs from its checksum"


def _has_checksums(archive: zipfile.ZipFile) -> bool:
    """Return whether one of the smallest entries agrees with its checksum."""
    for entry in sorted(archive.infolist(), key=lambda entry: entry.file_size)[:3]:
        try:
            archive.read(entry)
        except zipfile.BadZipFile:
            continue
        return True
    return False


def checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            value = zlib.crc32(piece, value)
    return value


def sync_folder(folder: Path) -> None:
    """Make a rename durable (on Windows a folder cannot be opened, and need not be)."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_remains(path: Path) -> None:
    """Remove what writers of `path` left behind that were killed; those of living ones stay."""
    start = f".{path.name}."
    with suppress(FileNotFoundError):
        for entry in path.parent.iterdir():
            owner = _OWNER.fullmatch(entry.name.removeprefix(start))
            if entry.name.startswith(start) and owner is not None and _is_gone(owner, entry):
                _remove(entry)


def _is_gone(owner: re.Match[str], entry: Path) -> bool:
    """Return whether the process is gone that a name was made by."""
    host, number, process = owner["host"], int(owner["number"]), owner["process"]
    if host != _HOST or sys.platform == "win32":
        with suppress(FileNotFoundError):
            return time.time() - entry.stat().st_mtime > _MOST_SECONDS
        return False
    if number == os.getpid():
        return process != _PROCESS  # a container may give each of its processes the same number
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def _beside(path: Path) -> Path:
    owner = f"{_HOST}-{os.getpid()}-{_PROCESS}"
    return path.with_name(f".{path.name}.{owner}-{secrets.token_hex(4)}{_MARK}")


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Put files in their places while no other process or thread does so in the same folder."""
    if sys.platform == "win32":
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _moved_aside(path: Path) -> Iterator[None]:
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.old")
    path.rename(aside)
    try:
        yield
    except BaseException:
        aside.rename(path)
        raise
    _remove(aside)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
