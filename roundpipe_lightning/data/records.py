"""Records in files and data sets: JSON, CSV, Parquet, plain text, the Hugging Face hub.

JSON and CSV are read here and not by `datasets`, so that a broken line is named by its number.
"""

from __future__ import annotations

import csv
import json
import lzma
import math
import re
import zlib
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TextIO
from unittest.mock import patch

from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

from roundpipe_lightning.errors import ConfigurationError, DataError
from roundpipe_lightning.models.weight_files import reach_options

_HUB_NAME = re.compile(r"(?P<path>[\w.-]+/[\w.-]+)(/(?P<name>[\w.-]+))?(:(?P<split>[\w\[\]%:]+))?")
_COMPRESSED = (".gz", ".bz2", ".xz")
_LISTS = ("data", "train", "rows", "examples", "instances")
"""Fields of a JSON object that may hold the records of a file."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """One sample as a file (`part`) has it; `place` is for messages: `chat.jsonl, line 3`.

    `error` is why it cannot be read, where the file goes on behind it.
    """

    fields: Mapping[str, Any]
    place: str
    part: str = ""
    error: DataError | None = None

    def get(self, name: str) -> Any:
        """The value of a field; DataError: the record has no such field."""
        if name not in self.fields:
            known = ", ".join(map(repr, self.fields)) or "none"
            raise DataError(f"{self.place}: there is no field {name!r}. The fields are {known}.")
        return self.fields[name]

    def text(self, name: str) -> str:
        """The text of a field; DataError: it has none, or nothing but blanks."""
        value = self.get(name)
        if not isinstance(value, str):
            raise DataError(
                f"{self.place}: the field {name!r} is {_kind(value)}, where a text is needed."
            )
        if not value.strip():
            raise DataError(
                f"{self.place}: the field {name!r} is empty. Remove the sample or give it a text."
            )
        check_text(value, place=self.place)
        return value


def check_text(value: Any, *, place: str) -> None:
    """Raise a DataError if a text in a value is too long, or has half of a character.

    JSON can write the latter, where a text was cut between the two escapes of an emoji.
    """
    if isinstance(value, Mapping):
        value = [*value, *value.values()]
    if isinstance(value, str):
        if len(value) > LONGEST_TEXT and not value.startswith("data:"):  # an image
            raise DataError(
                f"{place}: a text has {len(value):,} characters, and at most {LONGEST_TEXT:,} are "
                "read, since tokenising takes much memory. Split it into several records."
            )
        try:
            value.encode()
        except UnicodeEncodeError as error:
            around = value[max(0, error.start - 20) : error.end + 20]
            raise DataError(
                f"{place}: a text has half of a character, a lone surrogate: {around!a}. Mend "
                "or remove the record."
            ) from error
    elif isinstance(value, Sequence) and not isinstance(value, bytes):
        for each in value:
            check_text(each, place=place)


class RecordSource(Protocol):
    """Anything that has records in a fixed order, in one or several parts."""

    def parts(self) -> Sequence[str]:
        """Names of the parts: files, for instance. None of them is opened."""

    def read(self, part: str) -> Iterator[Record]:
        """Records of a part in their order."""


def passes(source: RecordSource) -> list[tuple[str, float]]:
    """The parts in an epoch: a part of weight 2.5 comes twice whole, then with half its records."""
    weights: Mapping[str, float] = getattr(source, "weights", {})
    found = []
    for part in source.parts():
        weight = weights.get(part, 1.0)
        found += [(part, 1.0)] * math.floor(weight)
        found += [(part, weight % 1)] * (weight % 1 > 0)
    return found


def is_in_share(index: int, share: float) -> bool:
    """Whether a record is in an evenly spaced share of its part."""
    return math.floor((index + 1) * share) > math.floor(index * share)


@dataclass(frozen=True, kw_only=True)
class RecordFiles:
    """Records in files of this machine, and in data sets of the Hugging Face hub.

    How a file is read follows from its suffix: `.jsonl` (one JSON object per line), `.json` (a list
    of objects, or objects one after another), `.csv` and `.tsv` (the first line names the fields,
    with commas, semicolons or tabs between them),
    `.parquet`, `.txt` and `.md` (the whole file is the field `text` of one record). Any but
    Parquet may be compressed: `.jsonl.gz`.

    Attributes:
        paths: Files, folders (all files in them that can be read), glob patterns and names on the
            hub (`owner/name`, `owner/name/configuration:split`). As a mapping, each with its
            weight: how many times its records come in an epoch.
        keep_errors: Whether a line that cannot be read becomes a record with its `error`; else the
            error is raised.

    Raises:
        ConfigurationError: There are no paths, or a weight is not above 0; and in `parts`: nothing
            is there, its suffix is unknown, or two paths have it.
    """

    paths: Sequence[str] | Mapping[str, float] | str = field(default_factory=tuple)
    keep_errors: bool = False

    def __post_init__(self) -> None:
        if not self.paths:
            raise ConfigurationError("data files: there are none. Name one, such as chat.jsonl.")
        if isinstance(self.paths, str):
            object.__setattr__(self, "paths", (self.paths,))
        given: list[tuple[str, Any]] = self._given
        for path, weight in given:
            if isinstance(weight, str) or not 0 < weight < math.inf:
                raise ConfigurationError(
                    f"data.files: the weight of {path} is {weight!r}. It says how many times the "
                    "records come in an epoch: 1, 2, 0.5."
                )

    @property
    def _given(self) -> list[tuple[str, float]]:
        if isinstance(self.paths, Mapping):
            return list(self.paths.items())
        return [(path, 1.0) for path in self.paths]

    @property
    def weights(self) -> dict[str, float]:
        """How many times the records of each part come in an epoch."""
        found: dict[str, float] = {}
        for path, weight in self._given:
            for part in _files(path):
                if part in found:
                    raise ConfigurationError(
                        f"data files: {part} is named twice. Name it once; its weight says how "
                        f"many times its records come in an epoch: data.files={{{part}: 2}}."
                    )
                found[part] = weight
        return found

    def parts(self) -> tuple[str, ...]:
        """Paths of all files, those of a folder or a pattern sorted by name."""
        return tuple(self.weights)

    def read(self, part: str) -> Iterator[Record]:
        """Records of a file; DataError, which names the line: it cannot be read."""
        path = Path(part)
        if not path.exists():
            yield from _hub_records(part)
            return
        try:
            for fields, place in _READERS[suffix_of(path)](path):
                if isinstance(fields, DataError):
                    if not self.keep_errors:
                        raise fields
                    yield Record(fields={}, place=f"{path}{place}", part=part, error=fields)
                    continue
                if len(fields) > _MOST_FIELDS:
                    raise DataError(
                        f"{path}{place}: this record has {len(fields):,} fields, and at most "
                        f"{_MOST_FIELDS:,} are read. Mend the file."
                    )
                yield Record(fields=fields, place=f"{path}{place}", part=part)
        except UnicodeDecodeError as error:
            with _open(path, mode="rb") as file:
                lines = enumerate(file, start=1)
                line, raw = next(x for x in lines if x[1].decode(errors="ignore").encode() != x[1])
            coding = "utf-16" if raw.startswith((BOM_UTF16_LE, BOM_UTF16_BE)) else "latin1"
            raise DataError(
                f"{path}, line {line}: this is not a text in UTF-8 ({error.reason}). Convert the "
                f"file: iconv -f {coding} -t utf-8 {path}"
            ) from error
        except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
            raise DataError(f"{path}: this file cannot be read: {error}.") from error
        except MemoryError as error:
            raise DataError(
                f"{path}: this file does not fit in memory. Split it, or convert it to .jsonl or "
                ".parquet, of which a part is read at a time."
            ) from error


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

        # a hub that does not answer is asked for half a minute
        is_offline = datasets.config.HF_HUB_OFFLINE or (
            "/" in self.path and bool(reach_options(self.path))
        )
        with patch.object(datasets.config, "HF_HUB_OFFLINE", is_offline):
            rows = datasets.load_dataset(self.path, split=part, **self.options)
        for index, fields in enumerate(rows):
            yield Record(fields=fields, place=f"{self.path}, {part}, row {index}", part=part)


def _hub_records(part: str) -> Iterator[Record]:
    named = _HUB_NAME.fullmatch(part)
    assert named is not None, "checked by _files"
    options = {} if named["name"] is None else {"name": named["name"]}
    source = DatasetRecords(path=named["path"], split=named["split"] or "train", options=options)
    try:
        for record in source.read(source.split):
            yield Record(fields=record.fields, place=record.place, part=part)
    except (OSError, ValueError, RuntimeError) as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise DataError(
            f"{part!r} is no file here, and as a data set of the hub it cannot be loaded "
            f"({lines[0] if lines else type(error).__name__}). Look at the spelling "
            "(owner/name/configuration:split); log in (`hf auth login`) if it is private or gated; "
            "without a network, copy its files here and name them."
        ) from error


def suffix_of(path: Path) -> str:
    """What kind of file it is, however it is compressed."""
    name = path.name.lower()
    packed = next((end for end in _COMPRESSED if name.endswith(end)), "")
    return Path(name.removesuffix(packed)).suffix


def _files(path: str) -> list[str]:
    place = Path(path).expanduser()
    if place.is_file():
        files = [place]
    elif place.is_dir():
        files = sorted(f for f in place.rglob("*") if suffix_of(f) in _READERS and f.is_file())
    else:
        files = sorted(Path(place.anchor).glob(str(place.relative_to(place.anchor))))
        files = [file for file in files if file.is_file()]
    known = ", ".join(_READERS)
    if not files and _HUB_NAME.fullmatch(path) and suffix_of(place) not in _READERS:
        return [path]
    if not files:
        raise ConfigurationError(
            f"data files: nothing is found at {path!r} (looked in {Path.cwd()}). Name a file, a "
            f"folder, a pattern or a data set of the hub (owner/name); known suffixes are {known}."
        )
    for file in files:
        if suffix_of(file) not in _READERS:
            raise ConfigurationError(
                f"data files: {str(file)!r} has a suffix that is not known. Known are {known}, "
                "each with .gz as well."
            )
    return [str(file) for file in files]


def _open(path: Path, **options: Any) -> Any:
    # not fsspec.open, which reads another file where a name has :: in it
    return LocalFileSystem().open(str(path.absolute()), compression="infer", **options)


_MOST_FIELDS = 10_000
_LONGEST_LINE = 2**28  # characters: what a compressed file unpacks to has no other end
LONGEST_TEXT = 10_000_000
"""Most characters of a text; tokenising one takes up to 250 times its size of memory."""


Fields = tuple[Mapping[str, Any] | DataError, str]
"""The fields of a record, or why it cannot be read, and where it stands in its file."""


def _json_lines(path: Path) -> Iterator[Fields]:
    with _open(path, mode="rt", newline="\n", encoding="utf-8-sig") as file:
        lines = iter(lambda: file.readline(_LONGEST_LINE + 1), "")
        for number, line in enumerate(lines, start=1):
            if len(line) > _LONGEST_LINE:
                raise DataError(
                    f"{path}, line {number}: this line has more than {_LONGEST_LINE:,} characters. "
                    "Split the record into several."
                )
            line = line.lstrip("\ufeff")  # of a file that was put behind another one
            if line.strip():
                place = f", line {number}"
                if number == 1 and line.lstrip()[:1] == "[":  # a list under this name
                    yield from _json(path)
                    return
                try:
                    value = json.loads(line)
                except (ValueError, RecursionError) as error:
                    value = DataError(
                        f"{path}{place}: this is not JSON ({error}): {line[:60].rstrip()!r}. Each "
                        "line of a .jsonl file is one JSON object; mend or remove this one."
                    )
                yield _object(value, f"{path}{place}"), place


def _json(path: Path) -> Iterator[Fields]:
    """A list of objects, an object with such a list, or objects one after another."""
    with _open(path, mode="rt", encoding="utf-8-sig") as file:
        text = file.read()
    space, decoder = re.compile(r"[\s,\ufeff]*"), json.JSONDecoder()

    def after_space(at: int) -> int:
        found = space.match(text, at)
        return found.end() if found else at

    at = after_space(0)
    in_list = text[at : at + 1] == "["
    begin = at = after_space(at + in_list)
    line, last, seen, number = 1, 0, 0, 0
    while at < len(text) and not (in_list and text[at] == "]"):
        line, seen = line + text.count("\n", seen, at), at
        number += 1
        place = f", line {line}" + (f", item {number}" if line == last else "")
        last = line
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}{place}: this is not JSON ({error}). Mend the file.") from error
        at = after_space(at)
        lists = [value.get(name) for name in _LISTS] if isinstance(value, dict) else []
        inner = next((each for each in lists if isinstance(each, list)), None)
        if in_list or inner is None or seen > begin or at < len(text):
            yield _object(value, f"{path}{place}"), place
        else:  # an object with the list in it
            for index, item in enumerate(inner, start=1):
                yield _object(item, f"{path}, item {index}"), f", item {index}"


def _object(value: Any, place: str) -> Mapping[str, Any] | DataError:
    if isinstance(value, (dict, DataError)):
        return value
    return DataError(
        f"{place}: this is {_kind(value)}, where a JSON object is needed, such as "
        '{"text": "..."}.'
    )


def _comma_separated(path: Path) -> Iterator[Fields]:
    csv.field_size_limit(2**31 - 1)  # a book in a field is no mistake
    file: TextIO
    with _open(path, mode="rt", newline="", encoding="utf-8-sig") as file:
        names = file.readline()
        file.seek(0)
        reader = csv.DictReader(file, delimiter=max(",;\t", key=names.count), strict=True)
        begin = 1
        try:
            fieldnames = ", ".join(map(repr, reader.fieldnames or ()))
            begin = reader.line_num + 1
            for fields in reader:
                row: Mapping[str, Any] | DataError = fields
                if None in fields or None in fields.values():
                    row = DataError(
                        f"{path}, line {reader.line_num}: this line has not as many fields as the "
                        f"first one, which names {fieldnames}. Quote fields that have a comma in "
                        "them."
                    )
                yield row, f", line {reader.line_num}"
                begin = reader.line_num + 1
        except csv.Error as error:
            raise DataError(
                f"{path}, line {begin}: the row that begins here cannot be read ({error}). A field "
                'that begins with a quote ends with one, and quotes in it are doubled: "a ""b"" c".'
            ) from error


def _parquet(path: Path) -> Iterator[Fields]:
    """Rows, read a group at a time."""
    from pyarrow import ArrowException, parquet  # half a second

    try:
        batches = parquet.ParquetFile(path).iter_batches(batch_size=1000)
        rows = (row for batch in batches for row in batch.to_pylist())
        for index, fields in enumerate(rows):
            yield fields, f", row {index}"
    except ArrowException as error:
        raise DataError(f"{path}: this is no Parquet file ({error}).") from error


def _whole_text(path: Path) -> Iterator[Fields]:
    with _open(path, mode="rt", encoding="utf-8-sig") as file:
        yield {"text": file.read()}, ""


_READERS: Mapping[str, Callable[[Path], Iterator[Fields]]] = {
    ".jsonl": _json_lines,
    ".json": _json,
    ".csv": _comma_separated,
    ".tsv": _comma_separated,
    ".parquet": _parquet,
    ".txt": _whole_text,
    ".md": _whole_text,
}


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false"}
    if value is None:
        return "null"
    return names.get(type(value), f"a value of type {type(value).__name__}")
