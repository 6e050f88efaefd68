"""Texts with a class in files."""

from collections.abc import Sequence
from typing import Any

import torch
from typing_extensions import override

from roundpipe_lightning.data.records import Record
from roundpipe_lightning.data.samples import Row, Sample, as_row
from roundpipe_lightning.data.token_data import FileDataModule
from roundpipe_lightning.errors import ConfigurationError, DataError


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
