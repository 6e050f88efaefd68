"""Texts in files: cut into windows of which every token is learned, or each with a class."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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

    Raises:
        ConfigurationError: A setting is out of its range.
    """

    kinds = ("text",)

    def __init__(
        self,
        *,
        keep_apart: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.keep_apart = keep_apart

    @property
    def packs_documents(self) -> bool:
        """Whether several documents share a row and must not see each other."""
        return self.keep_apart

    @override
    def encode(self, record: Record) -> list[Sample]:
        text = self.content(record).text
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
    """A text as tokens, with the token that ends it.

    Raises:
        ConfigurationError: The tokenizer has no such token.
    """
    if tokenizer.eos_token_id is None:
        raise ConfigurationError(
            f"The tokenizer {name} has no end-of-text token, so texts cannot be told apart. Set "
            "eos_token in its tokenizer_config.json."
        )
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return Sample.of([*ids, tokenizer.eos_token_id])


def cut_windows(samples: Iterable[Sample], *, seq_len: int, keep_apart: bool) -> Iterator[Row]:
    """Lay texts end to end and cut them into windows; tokens after the last whole one are left out.

    Args:
        samples: The texts.
        seq_len: Tokens of a window.
        keep_apart: Whether positions start anew with every text, so that transformers keeps the
            attention of each to itself.
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
        classes: Names of the classes, in the order of their numbers. A label is a name or a number.
        field: Field of a record that has the text.
        label_field: Field of a record that has the class.
        options: The other arguments of `FileDataModule`.

    Raises:
        ConfigurationError: A setting is out of its range.
    """

    def __init__(
        self,
        *,
        classes: Sequence[str],
        field: str = "text",
        label_field: str = "label",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if len(classes) < 2 or len(set(classes)) < len(classes):
            raise ConfigurationError(
                f"data.classes={list(classes)}: name at least two classes, no name twice."
            )
        self.classes = tuple(classes)
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
        if label in self.classes:
            return self.classes.index(label)
        if (
            isinstance(label, int)
            and not isinstance(label, bool)
            and label in range(len(self.classes))
        ):
            return label
        raise DataError(
            f"{record.place}: the field {self.label_field!r} is {label!r}, which is neither one of "
            f"data.classes ({', '.join(self.classes)}) nor the number of one."
        )
