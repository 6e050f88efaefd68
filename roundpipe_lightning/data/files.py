"""What the data modules for files have in common: reading, splitting, batching."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader
from typing_extensions import override

from roundpipe_lightning.data.loader import ResumableLoader, SeededOrder
from roundpipe_lightning.data.records import Record, RecordFiles, RecordSource
from roundpipe_lightning.data.samples import Padding, Row, Rows, TooLong, pad_token_of
from roundpipe_lightning.errors import ConfigurationError, DataError

log = logging.getLogger(__name__)

Files = Sequence[str] | RecordSource
"""Paths, folders and patterns, or an object that has records."""


class TokenizerMaker(Protocol):
    """Loads a tokenizer, such as `roundpipe_lightning.modules.TokenizerSource`."""

    @property
    def name(self) -> str | None:
        """What it is called; None: it needs no name."""

    def load(self) -> Any:
        """The tokenizer, as transformers has it."""


@dataclass(frozen=True, kw_only=True)
class FileOptions:
    """How the samples of files are split, cut and batched.

    Attributes:
        seq_len: Tokens of a sample, or of a packed row, at most.
        batch_size: Samples or packed rows of a batch, before it is split into microbatches.
        validation_files: Where the validation samples are; None: some of `files` are taken.
        validation_share: Share of the samples of `files` that is validated on and not trained on.
        too_long: What becomes of longer samples: `refuse`, `drop`, `cut_end` or `cut_start`.
        pad_to_multiple_of: The length of a batch is a multiple of this.
        seed: Seed of the order of the training samples. Which samples are validated on does not
            depend on it.
        num_workers: Processes that prepare batches; 0: none.

    Raises:
        ConfigurationError: A figure is out of its range.
    """

    seq_len: int
    batch_size: int
    validation_files: Files | None = None
    validation_share: float = 0.1
    too_long: str = TooLong.REFUSE.value
    pad_to_multiple_of: int = 8
    seed: int = 0
    num_workers: int = 0

    def __post_init__(self) -> None:
        for name, least in (
            ("seq_len", 2),
            ("batch_size", 1),
            ("pad_to_multiple_of", 1),
            ("num_workers", 0),
        ):
            if getattr(self, name) < least:
                raise ConfigurationError(
                    f"data.{name}={getattr(self, name)} must be at least {least}."
                )
        if not 0 < self.validation_share < 1:
            raise ConfigurationError(
                f"data.validation_share={self.validation_share} must lie between 0 and 1."
            )
        TooLong.parse(self.too_long)

    @property
    def policy(self) -> TooLong:
        """What becomes of samples that are too long."""
        return TooLong(self.too_long)


class TokenDataModule(LightningDataModule):
    """What a model and a person may ask of tokenised data.

    Args:
        options: How samples are split, cut and batched.
    """

    def __init__(self, options: FileOptions) -> None:
        super().__init__()
        self.options = options

    @property
    @abstractmethod
    def tokenizer(self) -> Any:
        """The tokenizer, loaded when it is first asked for."""

    @property
    def num_tokens(self) -> int:
        """Size that a model's vocabulary must have at least."""
        return len(self.tokenizer)

    @property
    def seq_len(self) -> int:
        """Tokens of a row at most."""
        return self.options.seq_len

    @property
    def batch_size(self) -> int:
        """Rows of a batch."""
        return self.options.batch_size

    @abstractmethod
    def val_dataloader(self) -> DataLoader[Any]:
        """Batches of validation rows, always the same."""

    def test_dataloader(self) -> DataLoader[Any]:
        """The validation rows: this data has no third part."""
        return self.val_dataloader()

    def predict_dataloader(self) -> DataLoader[Any]:
        """The validation rows."""
        return self.val_dataloader()


class FileDataModule(TokenDataModule):
    """Samples of files, tokenised in `setup` and held in memory.

    The kinds of data differ in how a record becomes rows: see `encode` and `arrange`. The order of
    the training rows depends on the seed and the epoch alone, and a checkpoint goes on in the
    middle of an epoch. Batches are padded to their longest row.

    Args:
        files: The samples.
        tokenizer: Loads the tokenizer.
        options: How samples are split, cut and batched.
    """

    def __init__(self, files: Files, *, tokenizer: TokenizerMaker, options: FileOptions) -> None:
        super().__init__(options)
        self.files = as_source(files)
        self.tokenizer_source = tokenizer
        self.skipped: Counter[str] = Counter()
        self._tokenizer: Any = None
        self._train: Rows | None = None
        self._validation: Rows | None = None

    @abstractmethod
    def encode(self, record: Record) -> Any | None:
        """Make a sample of a record; None leaves it out, and `skip` says why.

        Raises:
            DataError: The record cannot be used.
        """

    @abstractmethod
    def arrange(self, samples: Sequence[Any]) -> Sequence[Row]:
        """Make rows of samples."""

    @property
    @override
    def tokenizer(self) -> Any:
        """The tokenizer, loaded when it is first asked for."""
        if self._tokenizer is None:
            self._tokenizer = self.tokenizer_source.load()
        return self._tokenizer

    @property
    def tokenizer_name(self) -> str:
        """What the tokenizer is called in messages."""
        return repr(self.tokenizer_source.name or "bytes")

    @property
    def pad_token_id(self) -> int:
        """Token that fills rows up.

        Raises:
            ConfigurationError: The tokenizer has none.
        """
        return pad_token_of(self.tokenizer, name=self.tokenizer_name)

    def skip(self, reason: str) -> None:
        """Count a sample that is left out."""
        self.skipped[reason] += 1

    @override
    def setup(self, stage: str | None = None) -> None:
        """Read and tokenise all files, once.

        Raises:
            DataError: A sample cannot be read or used.
            ConfigurationError: There are too few samples for one batch.
        """
        if self._train is not None:
            return
        self.collate()  # a tokenizer that cannot pad is refused before anything is read
        train = self.encode_all(self.files)
        if self.options.validation_files is None:
            train, validation = _split(train, share=self.options.validation_share)
        else:
            validation = self.encode_all(as_source(self.options.validation_files))
        rows = Rows(self.arrange(train))
        if len(rows) < self.batch_size:
            raise ConfigurationError(
                f"The {len(train)} training samples make {len(rows)} rows, less than one batch of "
                f"data.batch_size={self.batch_size}. Give more samples or lower data.batch_size."
            )
        self._train, self._validation = rows, Rows(self.arrange(validation))

    def train_dataloader(self) -> ResumableLoader:
        """Batches of training rows in the epoch's own order."""
        assert self._train is not None, "Lightning calls setup first"
        return ResumableLoader(
            self._train,
            order=SeededOrder(len(self._train), seed=self.options.seed),
            batch_size=self.batch_size,
            num_workers=self.options.num_workers,
            collate=self.collate(),
        )

    @override
    def val_dataloader(self) -> DataLoader[Any]:
        """Batches of validation rows, always the same; the last one may be smaller."""
        assert self._validation is not None, "Lightning calls setup first"
        return self.batches(self._validation)

    def batches(self, rows: Rows) -> DataLoader[Any]:
        """Batches of rows in their order; the last one may be smaller."""
        return DataLoader(
            rows,
            batch_size=self.batch_size,
            num_workers=self.options.num_workers,
            collate_fn=self.collate(),
            persistent_workers=self.options.num_workers > 0,
        )

    def collate(self) -> Callable[[list[Row]], Any]:
        """What makes a batch of rows."""
        return Padding(pad_token=self.pad_token_id, multiple_of=self.options.pad_to_multiple_of)

    def encode_all(self, source: RecordSource) -> list[Any]:
        """Samples of all records, those that are left out counted and logged.

        Raises:
            DataError: A record cannot be read or used, or there is none that can.
        """
        self.skipped.clear()
        samples = [
            sample for record in all_records(source) if (sample := self.encode(record)) is not None
        ]
        for reason, count in self.skipped.items():
            log.warning("%d of %d samples left out: %s", count, len(samples) + count, reason)
        if not samples:
            reasons = ", ".join(f"{count} {reason}" for reason, count in self.skipped.items())
            raise DataError(
                f"{', '.join(source.parts())}: there is no sample that can be used"
                f"{f' ({reasons})' if reasons else ''}."
            )
        return samples


def all_records(source: RecordSource) -> Iterator[Record]:
    """Records of all parts, one part after the other."""
    for part in source.parts():
        yield from source.read(part)


def as_source(files: Files) -> RecordSource:
    """The records of paths, or of what has records already."""
    return files if not isinstance(files, Sequence) else RecordFiles(paths=files)


def _split(samples: Sequence[Any], *, share: float) -> tuple[list[Any], list[Any]]:
    """Take a share of the samples out, always the same ones of the same number of samples."""
    num_taken = max(1, round(len(samples) * share))
    if num_taken >= len(samples):
        raise ConfigurationError(
            f"{len(samples)} samples are too few for training and validation. Give more, or name "
            "data.validation_files."
        )
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(0)).tolist()
    taken = set(order[:num_taken])
    return (
        [sample for index, sample in enumerate(samples) if index not in taken],
        [sample for index, sample in enumerate(samples) if index in taken],
    )
