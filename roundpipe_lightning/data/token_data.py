"""The common part of the data modules: reading, splitting, batching, resuming."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, DistributedSampler
from typing_extensions import override

from roundpipe_lightning.data.records import Record, RecordFiles, RecordSource
from roundpipe_lightning.data.samples import Padding, Row, Sample, TooLong
from roundpipe_lightning.errors import ConfigurationError, DataError

log = logging.getLogger(__name__)

Files = Sequence[str] | RecordSource
"""Paths, folders and patterns, or an object that has records."""


@dataclass(frozen=True, kw_only=True)
class FileOptions:
    """Options for splitting, cutting and batching samples.

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
        least = {"seq_len": 2, "batch_size": 1, "pad_to_multiple_of": 1, "num_workers": 0}
        for name, minimum in least.items():
            value = getattr(self, name)
            if value < minimum:
                raise ConfigurationError(f"data.{name}={value} must be at least {minimum}.")
        if not 0 < self.validation_share < 1:
            raise ConfigurationError(
                f"data.validation_share={self.validation_share} must lie between 0 and 1."
            )
        known = [policy.value for policy in TooLong]
        if self.too_long not in known:
            raise ConfigurationError(
                f"data.too_long={self.too_long!r} is not one of {', '.join(known)}."
            )

    @property
    def policy(self) -> TooLong:
        return TooLong(self.too_long)


class TokenDataModule(LightningDataModule):
    """Rows of tokens in memory, for training and for validation.

    A subclass sets both in `setup`. The order of the training rows depends on the seed and the
    epoch alone. Validation rows stay in their order, and are what is tested and predicted as well.

    Args:
        options: How samples are split, cut and batched.

    Attributes:
        train_rows: Rows to train on, a list or a `Dataset`; None before `setup`.
        validation_rows: Rows to validate on; None before `setup`.
    """

    drops_last_validation_batch = False
    """Whether a smaller last batch of validation rows is left out."""

    def __init__(self, options: FileOptions) -> None:
        super().__init__()
        self.options = options
        self.train_rows: Any = None
        self.validation_rows: Any = None

    @property
    @abstractmethod
    def num_tokens(self) -> int:
        """Size that a model's vocabulary must have at least."""

    @property
    def seq_len(self) -> int:
        """Tokens of a row at most."""
        return self.options.seq_len

    @property
    def batch_size(self) -> int:
        """Rows of a batch."""
        return self.options.batch_size

    def train_dataloader(self) -> DataLoader[Any]:
        assert self.train_rows is not None, "Lightning calls setup first"
        # an order by the seed and the epoch alone; Lightning's own strategies may have processes
        number, rank = (1, 0)
        if self.trainer is not None:
            number, rank = self.trainer.world_size, self.trainer.global_rank
        order: DistributedSampler[Any] = DistributedSampler(
            self.train_rows, num_replicas=number, rank=rank, seed=self.options.seed
        )
        return self._loader(self.train_rows, sampler=order, drop_last=True)

    def val_dataloader(self) -> DataLoader[Any]:
        assert self.validation_rows is not None, "Lightning calls setup first"
        return self._loader(self.validation_rows, drop_last=self.drops_last_validation_batch)

    def _loader(self, rows: Any, **settings: Any) -> DataLoader[Any]:
        return DataLoader(
            rows,
            batch_size=self.batch_size,
            num_workers=self.options.num_workers,
            collate_fn=self.collate(),
            persistent_workers=self.options.num_workers > 0,
            **settings,
        )

    def test_dataloader(self) -> DataLoader[Any]:
        return self.val_dataloader()

    def predict_dataloader(self) -> DataLoader[Any]:
        return self.val_dataloader()

    def collate(self) -> Callable[[list[Row]], Any] | None:
        """Function that makes a batch of rows; None stacks their tensors."""
        return None


class FileDataModule(TokenDataModule):
    """Samples of files, tokenised in `setup`. Batches are padded to their longest row.

    The kinds of data differ in how a record becomes rows: see `encode` and `arrange`.

    Args:
        files: The samples: paths of JSON lines, CSV, Parquet and text files, folders, patterns; or
            an object that has records.
        tokenizer: Has its `name` and loads it: `roundpipe_lightning.modules.TokenizerSource`.
        options: The fields of `FileOptions`; `seq_len` and `batch_size` among them.

    Raises:
        ConfigurationError: A setting is out of its range.
    """

    def __init__(self, *, files: Files, tokenizer: Any, **options: Any) -> None:
        super().__init__(FileOptions(**options))
        self.files = as_source(files)
        self.tokenizer_source = tokenizer
        self.skipped: Counter[str] = Counter()
        self._tokenizer: Any = None

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
    def tokenizer(self) -> Any:
        """The tokenizer, loaded when it is first asked for."""
        if self._tokenizer is None:
            self._tokenizer = self.tokenizer_source.load()
        return self._tokenizer

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer in messages."""
        return repr(self.tokenizer_source.name or "bytes")

    @property
    @override
    def num_tokens(self) -> int:
        return len(self.tokenizer)

    @property
    def pad_token_id(self) -> int:
        """Token that fills rows up.

        Raises:
            ConfigurationError: The tokenizer has none.
        """
        tokenizer = self.tokenizer
        if tokenizer.pad_token_id is None:
            end = tokenizer.eos_token
            hint = f", such as its end-of-text token {end!r}" if end else ""
            raise ConfigurationError(
                f"The tokenizer {self.tokenizer_name} has no pad token, so samples of different "
                "lengths make no batch. Set data.tokenizer.pad_token to a token of its vocabulary"
                f"{hint}."
            )
        return int(tokenizer.pad_token_id)

    def skip(self, reason: str) -> None:
        """Count a sample that is left out."""
        self.skipped[reason] += 1

    def fit_length(self, sample: Sample, *, place: str) -> Sample | None:
        """Bring a sample within `seq_len` tokens; None: it is to be left out, and was counted.

        Raises:
            DataError: It is too long, and such samples are refused.
        """
        fitting = self.options.policy.apply(sample, limit=self.seq_len, place=place)
        if fitting is None:
            self.skip(f"longer than data.seq_len={self.seq_len} tokens")
        return fitting

    @override
    def setup(self, stage: str | None = None) -> None:
        """Read and tokenise all files, once.

        Raises:
            DataError: A sample cannot be read or used.
            ConfigurationError: There are too few samples for one batch.
        """
        if self.train_rows is not None:
            return
        self.collate()  # a tokenizer that cannot pad is refused before anything is read
        train = self.encode_all(self.files)
        if self.options.validation_files is None:
            train, validation = _split(train, share=self.options.validation_share)
        else:
            validation = self.encode_all(as_source(self.options.validation_files))
        rows = self.arrange(train)
        if len(rows) < self.batch_size:
            raise ConfigurationError(
                f"The {len(train)} training samples make {len(rows)} rows, less than one batch of "
                f"data.batch_size={self.batch_size}. Give more samples or lower data.batch_size."
            )
        self.train_rows, self.validation_rows = rows, self.arrange(validation)

    @override
    def collate(self) -> Callable[[list[Row]], Any]:
        return Padding(pad_token=self.pad_token_id, multiple_of=self.options.pad_to_multiple_of)

    def encode_all(self, source: RecordSource) -> list[Any]:
        """Samples of all records, those that are left out counted and logged.

        Raises:
            DataError: A record cannot be read or used, or there is none that can.
        """
        self.skipped.clear()
        records = (record for part in source.parts() for record in source.read(part))
        samples = [sample for record in records if (sample := self.encode(record)) is not None]
        for reason, count in self.skipped.items():
            log.warning("%d of %d samples left out: %s", count, len(samples) + count, reason)
        if not samples:
            reasons = ", ".join(f"{count} {reason}" for reason, count in self.skipped.items())
            raise DataError(
                f"{', '.join(source.parts())}: there is no sample that can be used"
                f"{f' ({reasons})' if reasons else ''}."
            )
        return samples


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
    parts: tuple[list[Any], list[Any]] = ([], [])
    for index, sample in enumerate(samples):
        parts[index in taken].append(sample)
    return parts
