"""Texts in files: cut into windows of which every token is learned, or each with a class."""

from __future__ import annotations

import hashlib
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import filter as filter_names
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from roundpipe_lightning.data.records import Record
from roundpipe_lightning.data.samples import Padding, Row, Sample, as_row, packed_row
from roundpipe_lightning.data.token_data import FileDataModule
from roundpipe_lightning.errors import ConfigurationError, DataError


class TextDataModule(FileDataModule):
    """Texts, laid end to end and cut into windows of equal length; every token is predicted.

    Args:
        keep_apart: Whether no attention crosses from one text into another in the same window.
        **options: Those of `FileDataModule`: `files`, `tokenizer` (its end-of-text token ends every
            text), `seq_len`, `batch_size` (in windows) and others. No text is too long: a long one
            makes several windows.
    """

    kinds = ("text",)

    def __init__(self, *, keep_apart: bool = True, **options: Any) -> None:
        super().__init__(**options)
        self.keep_apart = keep_apart

    @property
    def packs_documents(self) -> bool:
        """Whether several documents share a row and must not see each other."""
        return self.keep_apart

    @override
    def encode(self, record: Record) -> list[Sample]:
        text = self.forms.read(record).text
        assert text is not None, "the kind of records that is read here"
        return [text_sample(text, self.tokenizer, name=self.tokenizer_name)]

    @override
    def arrange(self, samples: Sequence[Sample]) -> Sequence[Row]:
        return list(cut_windows(samples, seq_len=self.seq_len, keep_apart=self.keep_apart))

    @override
    def take(self, samples: list[Sample]) -> tuple[Sequence[Row], list[Sample]]:
        num_tokens = self.seq_len * self.batch_size
        if sum(map(len, samples)) < num_tokens:
            return [], samples
        full, rest = split_pieces(samples, num_tokens)
        return self.arrange(full), rest

    @override
    def collate(self) -> Padding:
        """Windows are stacked: all are equally long."""
        return Padding(pad_token=0)


def text_sample(text: str, tokenizer: Any, *, name: str) -> Sample:
    """A text as the tokenizer writes it, with the token that ends it, which it must have."""
    if tokenizer.eos_token_id is None:
        raise ConfigurationError(
            f"The tokenizer {name} has no end-of-text token, so texts cannot be told apart. Set "
            "eos_token in its tokenizer_config.json."
        )
    ids = list(tokenizer(text)["input_ids"])
    return Sample.of(
        ids if ids[-1:] == [tokenizer.eos_token_id] else [*ids, tokenizer.eos_token_id]
    )


def cut_windows(samples: Iterable[Sample], *, seq_len: int, keep_apart: bool) -> Iterator[Row]:
    """Lay texts end to end and cut them into windows; tokens after the last whole one are left out.

    With `keep_apart` positions start anew with every text, so that transformers keeps the attention
    of each to itself.
    """
    pieces: list[Sample] = []
    room = seq_len
    for sample in samples:
        start = 0
        while start < len(sample):
            pieces.append(sample[start : start + room])
            start += len(pieces[-1])
            room -= len(pieces[-1])
            if room == 0:
                if keep_apart:
                    yield packed_row(pieces)
                else:
                    ids = torch.cat([piece.input_ids for piece in pieces])
                    yield {"input_ids": ids, "labels": ids.clone()}
                pieces, room = [], seq_len


def split_pieces(pieces: Sequence[Sample], num_tokens: int) -> tuple[list[Sample], list[Sample]]:
    """Cut pieces of text after a number of tokens, in the middle of one if need be."""
    first: list[Sample] = []
    for index, piece in enumerate(pieces):
        room = num_tokens - sum(map(len, first))
        if len(piece) > room:
            head, tail = piece[:room], piece[room:]
            return [*first, *([head] if room else [])], [tail, *pieces[index + 1 :]]
        first.append(piece)
    return first, []


class ClassificationDataModule(FileDataModule):
    """Texts with a class: `{"text": "...", "label": "..."}` per line, or columns of a CSV file.

    Args:
        classes: Names of the classes, in the order of their numbers. A label is a name or, where no
            name is one itself, a number; of two classes false is the first and true the second.
        field: Field of a record that has the text.
        label_field: Field of a record that has the class.
        options: The other arguments of `FileDataModule`.
    """

    def __init__(
        self,
        *,
        classes: Sequence[Any],
        field: str = "text",
        label_field: str = "label",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.classes = tuple(map(_class_name, classes))
        if len(classes) < 2 or len(set(self.classes)) < len(classes):
            raise ConfigurationError(
                f"data.classes={list(classes)}: name at least two classes, no name twice."
            )
        self._numbers = {name: number for number, name in enumerate(self.classes)}
        if not any(re.fullmatch(r"-?\d+|true|false", name) for name in self.classes):
            self._numbers |= {str(number): number for number in range(len(classes))}
            if len(classes) == 2:
                self._numbers |= {"false": 0, "true": 1}
        self.field = field
        self.label_field = label_field

    @override
    def encode(self, record: Record) -> list[Row]:
        label = self._label(record)
        whole = Sample.of(self.tokenizer(record.text(self.field))["input_ids"])
        sample = self.fit_length(whole, place=record.place)
        return [] if sample is None else [{**as_row(sample), "labels": torch.tensor(label)}]

    @override
    def arrange(self, samples: Sequence[Row]) -> Sequence[Row]:
        return samples

    def _label(self, record: Record) -> int:
        label = record.get(self.label_field)
        number = self._numbers.get(_class_name(label))
        if number is None:
            raise DataError(
                f"{record.place}: the field {self.label_field!r} is {label!r}, which is neither "
                f"one of data.classes ({', '.join(self.classes)}) nor the number of one."
            )
        return number


def _class_name(label: Any) -> str:
    """A class as a text, the same for the number 1, 1.0 and the text 1, and for true and True."""
    text = re.sub(r"(?<=\d)\.0+$", "", str(label).strip())
    return text.lower() if text.lower() in ("true", "false") else text


SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests"})
"""Folders that are not read: installed packages and the test suites some systems leave out."""


@dataclass(frozen=True, kw_only=True)
class TextFolder:
    """Records: files of a folder as texts, chosen the same way on every run.

    Files are taken in the order of `find_files`, those to validate on first; no file is in both
    parts. The last one of each part is cut so that its budget holds exactly.

    Attributes:
        folder: Where the files are; None: the running Python's standard library.
        pattern: Glob pattern of the files' names.
        train_bytes: Most bytes to train on.
        validation_bytes: Most bytes to validate on.
        is_validation: Whether these are the texts to validate on.
    """

    folder: str | None = None
    pattern: str = "*.py"
    train_bytes: int = 1_000_000
    validation_bytes: int = 65_536
    is_validation: bool = False

    def __post_init__(self) -> None:
        for name in ("train_bytes", "validation_bytes"):
            if getattr(self, name) < 1:
                raise ConfigurationError(
                    f"data.text.{name}={getattr(self, name)} must be at least 1 byte."
                )

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Bytes that are read of each file."""
        root = Path(self.folder or sysconfig.get_path("stdlib")).expanduser()
        files = find_files(root, pattern=self.pattern)
        left = iter(files)
        validation, train = (
            _within(left, num_bytes) for num_bytes in (self.validation_bytes, self.train_bytes)
        )
        if not train:
            raise ConfigurationError(
                f"{str(root)!r} has too little text: all of its {len(files)} files went into the "
                f"{self.validation_bytes} bytes for validation. Lower data.text.validation_bytes."
            )
        return validation if self.is_validation else train

    def parts(self) -> tuple[str, ...]:
        return tuple(self.sizes)

    def read(self, part: str) -> Iterator[Record]:
        with Path(part).open("rb") as file:
            text = file.read(self.sizes[part]).decode("utf-8-sig", errors="replace")
        if text.strip():
            yield Record(fields={"text": text}, place=part, part=part)


class ByteDataModule(TextDataModule):
    """Texts of a folder that is already on the user's machine, such as Python's own source.

    Nothing is downloaded. `text` says which files are read, and how much of them.
    """

    def __init__(self, *, text: TextFolder, **options: Any) -> None:
        validation = replace(text, is_validation=True)
        super().__init__(files=text, validation_files=validation, keep_apart=False, **options)


def find_files(folder: Path, *, pattern: str) -> list[Path]:
    """Files under `folder` that match `pattern`, in an order that mixes the folders.

    The order is that of a hash of each file's path within `folder`: it depends on nothing else,
    so the same text is read on every run, whatever the seed. ConfigurationError: there is none.
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


def _within(files: Iterator[Path], num_bytes: int) -> dict[str, int]:
    """The next files, up to so many bytes in all, and what is read of each."""
    sizes: dict[str, int] = {}
    while num_bytes > 0 and (path := next(files, None)) is not None:
        sizes[str(path)] = min(num_bytes, path.stat().st_size)
        num_bytes -= sizes[str(path)]
    return sizes
