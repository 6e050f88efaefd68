"""Records in files and data sets: JSON lines, CSV, Parquet, plain text, the Hugging Face hub.

JSON lines and CSV are read here and not by `datasets`, so that one file may hold records of several
forms and a broken line is named by its number.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from roundpipe_lightning.errors import ConfigurationError, DataError


@dataclass(frozen=True, kw_only=True)
class Record:
    """One sample as a file has it.

    Attributes:
        fields: The sample's fields by name.
        place: Where it stands, for messages: `chat.jsonl, line 3`.
    """

    fields: Mapping[str, Any]
    place: str

    def get(self, name: str) -> Any:
        """The value of a field.

        Raises:
            DataError: The record has no such field.
        """
        if name not in self.fields:
            known = ", ".join(map(repr, self.fields)) or "none"
            raise DataError(f"{self.place}: there is no field {name!r}. The fields are {known}.")
        return self.fields[name]

    def text(self, name: str) -> str:
        """The text of a field.

        Raises:
            DataError: The record has no such field, or no text or nothing but blanks in it.
        """
        value = self.get(name)
        if not isinstance(value, str):
            raise DataError(
                f"{self.place}: the field {name!r} is {_kind(value)}, where a text is needed."
            )
        if not value.strip():
            raise DataError(
                f"{self.place}: the field {name!r} is empty. Remove the sample or give it a text."
            )
        return value


class RecordSource(Protocol):
    """Anything that has records in a fixed order, in one or several parts."""

    def parts(self) -> Sequence[str]:
        """Names of the parts: files, for instance. None of them is opened."""

    def read(self, part: str) -> Iterator[Record]:
        """Records of a part in their order."""


@dataclass(frozen=True, kw_only=True)
class RecordFiles:
    """Records in files of this machine.

    How a file is read follows from its suffix: `.jsonl` (one JSON object per line), `.csv` (the
    first line names the fields), `.parquet`, `.txt` and `.md` (the whole file is the field `text`
    of one record).

    Attributes:
        paths: Files, folders (all files in them that can be read) and glob patterns.

    Raises:
        ConfigurationError: There are no paths; and in `parts`: nothing is there, or its suffix is
            unknown.
    """

    paths: Sequence[str] | str = field(default_factory=tuple)

    def __post_init__(self) -> None:
        if not self.paths:
            raise ConfigurationError("data files: there are none. Name one, such as chat.jsonl.")
        if isinstance(self.paths, str):
            object.__setattr__(self, "paths", (self.paths,))

    def parts(self) -> tuple[str, ...]:
        """Paths of all files, those of a folder or a pattern sorted by name."""
        found = [str(file) for path in self.paths for file in _files(path)]
        return tuple(dict.fromkeys(found))

    def read(self, part: str) -> Iterator[Record]:
        """Records of a file.

        Raises:
            DataError: The file cannot be read; the message names the line.
        """
        path = Path(part)
        return _READERS[path.suffix.lower()](path)


@dataclass(frozen=True, kw_only=True)
class DatasetRecords:
    """Records of a data set of the `datasets` library.

    Attributes:
        path: Name on the hub, or a local folder or file type that `datasets.load_dataset` takes.
        split: Part of the data set: `train`, `train[:90%]`, ...
        options: Further arguments of `load_dataset`: `data_files`, `name`, `streaming=True`, ...
    """

    path: str
    split: str = "train"
    options: Mapping[str, Any] = field(default_factory=dict)

    def parts(self) -> tuple[str, ...]:
        return (self.split,)

    def read(self, part: str) -> Iterator[Record]:
        import datasets  # takes a second, and few need it

        rows = datasets.load_dataset(self.path, split=part, **self.options)
        for index, fields in enumerate(rows):
            yield Record(fields=fields, place=f"{self.path}, {part}, row {index}")


# --- files ----------------------------------------------------------------------------------------


def _files(path: str) -> list[Path]:
    place = Path(path).expanduser()
    if place.is_file():
        files = [place]
    elif place.is_dir():
        files = sorted(f for f in place.rglob("*") if f.suffix.lower() in _READERS and f.is_file())
    else:
        files = sorted(Path(place.anchor).glob(str(place.relative_to(place.anchor))))
        files = [file for file in files if file.is_file()]
    known = ", ".join(_READERS)
    if not files:
        raise ConfigurationError(
            f"data files: nothing is found at {path!r} (looked in {Path.cwd()}). Name a file, a "
            f"folder or a pattern; known suffixes are {known}."
        )
    for file in files:
        if file.suffix.lower() not in _READERS:
            raise ConfigurationError(
                f"data files: {str(file)!r} has a suffix that is not known. Known are {known}."
            )
    return files


def _json_lines(path: Path) -> Iterator[Record]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                place = f"{path}, line {number}"
                yield Record(fields=_json_object(line, place=place), place=place)


def _json_object(line: bytes, *, place: str) -> Mapping[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as error:  # of JSON and of UTF-8
        shown = line[:60].decode(errors="replace").rstrip()
        raise DataError(
            f"{place}: this is not JSON ({error}): {shown!r}. Each line of a .jsonl file is one "
            "JSON object; mend or remove this one."
        ) from error
    if not isinstance(value, dict):
        raise DataError(
            f"{place}: this is {_kind(value)}, where a JSON object is needed, such as "
            '{"text": "..."}.'
        )
    return value


def _comma_separated(path: Path) -> Iterator[Record]:
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        for fields in reader:
            place = f"{path}, line {reader.line_num}"
            if None in fields or None in fields.values():
                raise DataError(
                    f"{place}: this line has not as many fields as the first one, which names "
                    f"{', '.join(map(repr, reader.fieldnames or ()))}. Quote fields that have a "
                    "comma in them."
                )
            yield Record(fields=fields, place=place)


def _parquet(path: Path) -> Iterator[Record]:
    """Rows, read a group at a time and copied into no cache."""
    source = DatasetRecords(path="parquet", options={"data_files": str(path), "streaming": True})
    for index, record in enumerate(source.read("train")):
        yield Record(fields=record.fields, place=f"{path}, row {index}")


def _whole_text(path: Path) -> Iterator[Record]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: this is not a text in UTF-8 ({error}).") from error
    yield Record(fields={"text": text}, place=str(path))


_READERS: Mapping[str, Callable[[Path], Iterator[Record]]] = {
    ".jsonl": _json_lines,
    ".csv": _comma_separated,
    ".parquet": _parquet,
    ".txt": _whole_text,
    ".md": _whole_text,
}


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false"}
    if value is None:
        return "null"
    return names.get(type(value), f"a value of type {type(value).__name__}")
