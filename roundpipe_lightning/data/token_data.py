"""The common part of the data modules: reading, splitting, batching, resuming."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningDataModule
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.utils.data import DataLoader, DistributedSampler
from typing_extensions import override

from roundpipe_lightning.data.forms import Forms
from roundpipe_lightning.data.records import Record, RecordFiles, RecordSource, is_in_share, passes
from roundpipe_lightning.data.samples import (
    IGNORED,
    Padding,
    Row,
    RowStream,
    Sample,
    StreamLoader,
    TooLong,
)
from roundpipe_lightning.errors import ConfigurationError, DataError
from roundpipe_lightning.planning.report.description import count_text

log = logging.getLogger(__name__)

Files = Sequence[str] | Mapping[str, float] | RecordSource
"""Paths, folders, patterns and hub names, with weights as a mapping; or an object with records."""


@dataclass(frozen=True, kw_only=True)
class FileOptions:
    """Options for splitting, cutting and batching samples.

    Attributes:
        seq_len: Tokens of a sample, or of a packed row, at most.
        batch_size: Samples or packed rows of a batch, before it is split into microbatches.
        validation_files: Where the validation samples are; None: some of `files` are taken.
        validation_share: Share of the samples of `files` that is validated on and not trained on;
            0: there is no validation.
        test_files: Where the samples to test on are; None: those to validate on.
        too_long: What becomes of longer samples: `refuse`, `drop`, `cut_end` or `cut_start`.
        bad_records: What becomes of records that cannot be used: `refuse` ends with the first ten
            of them and their number, `skip` leaves them out and says so.
        drop_last: Whether rows that fill no batch at the end of an epoch are left out.
        pad_to_multiple_of: The length of a batch is a multiple of this.
        seed: Seed of the order of the training samples. Which samples are validated on does not
            depend on it.
        num_workers: Processes that prepare batches; 0: none.
        fields: What the records call a field, by the name that it has in a known form.
        streaming: Whether training samples are read and tokenised while training goes on. The
            Trainer needs `max_steps` then, and `validation_files` must be given.
        run_records: Records of a stream that are shuffled among each other.

    Raises:
        ConfigurationError: A figure is out of its range.
    """

    seq_len: int
    batch_size: int
    validation_files: Files | None = None
    validation_share: float = 0.1
    test_files: Files | None = None
    too_long: str = TooLong.REFUSE.value
    bad_records: str = "refuse"
    drop_last: bool = False
    pad_to_multiple_of: int = 8
    seed: int = 0
    num_workers: int = 0
    fields: Mapping[str, str] | None = None
    streaming: bool = False
    run_records: int = 10_000

    def __post_init__(self) -> None:
        least = {"seq_len": 2, "batch_size": 1, "pad_to_multiple_of": 1, "num_workers": 0}
        least |= {"run_records": 1, "seed": 0}
        for name, minimum in least.items():
            value = getattr(self, name)
            if not isinstance(value, int) or value < minimum:
                raise ConfigurationError(
                    f"data.{name}={value} must be a whole number of at least {minimum}."
                )
        if not 0 <= self.validation_share < 1:
            raise ConfigurationError(
                f"data.validation_share={self.validation_share} must be 0 (no validation) or "
                "more, and less than 1."
            )
        for name in ("streaming", "drop_last"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigurationError(f"data.{name}={getattr(self, name)}: give true or false.")
        if self.bad_records not in ("refuse", "skip"):
            raise ConfigurationError(f"data.bad_records={self.bad_records!r}: give refuse or skip.")
        known = [policy.value for policy in TooLong]
        if self.too_long not in known:
            raise ConfigurationError(
                f"data.too_long={self.too_long!r} is not one of {', '.join(known)}."
            )
        if self.streaming and self.validation_files is None and self.validates:
            raise ConfigurationError(
                "data.streaming=true reads the training samples as it goes and can set none aside: "
                "name data.validation_files, or set data.validation_share=0."
            )

    @property
    def validates(self) -> bool:
        return self.validation_files is not None or self.validation_share > 0

    @property
    def policy(self) -> TooLong:
        return TooLong(self.too_long)


class FileDataModule(LightningDataModule):
    """Samples of files, tokenised in `setup`. Batches are padded to their longest row.

    The kinds of data differ in how a record becomes rows: see `encode` and `arrange`. The order of
    the training rows depends on the seed and the epoch alone. Validation rows stay in their order.
    They are what is tested and predicted as well, unless `test_files` are given.

    Args:
        files: The samples: what `RecordFiles` takes, or an object that has records.
        tokenizer: Has its `name` and loads it: `roundpipe_lightning.modules.TokenizerSource`.
        options: The fields of `FileOptions`; `seq_len` and `batch_size` among them.

    Attributes:
        train_rows: Rows to train on, a list or a `Dataset`; None before `setup`.
        validation_rows: Rows to validate on; None before `setup`.
        test_rows: Rows to test on; None before `setup`.
        summary: What the files have, and what of it is left out, in a line.
    """

    kinds: ClassVar[Sequence[str]] = ()
    """Kinds of records that are learned from, see `Forms`."""

    def __init__(self, *, files: Files, tokenizer: Any, **options: Any) -> None:
        super().__init__()
        self.options = FileOptions(**options)
        self.train_rows: Any = None
        self.validation_rows: Any = None
        self.test_rows: Any = None
        if self.options.streaming and type(self).take is FileDataModule.take:
            raise ConfigurationError(
                "data.streaming=true is for data=chat and data=text. Leave it out."
            )
        self.forms = Forms(kinds=self.kinds, names=self.options.fields or {})
        self.files = self._source(files)
        self.tokenizer_source = tokenizer
        self.skipped: Counter[str] = Counter()
        self.left_out: list[str] = []
        self.summary = ""
        self._tokenizer: Any = None

    @property
    def seq_len(self) -> int:
        return self.options.seq_len

    @property
    def batch_size(self) -> int:
        return self.options.batch_size

    @abstractmethod
    def encode(self, record: Record) -> Sequence[Any]:
        """Make samples of a record, or raise a DataError.

        With none it is left out, and counted in `skipped` by reason.
        """

    @abstractmethod
    def arrange(self, samples: Sequence[Any]) -> Sequence[Row]:
        """Make rows of samples."""

    def take(self, samples: list[Sample]) -> tuple[Sequence[Row], list[Sample]]:
        """Make the rows of a batch of the first samples of a stream, as soon as there are enough.

        Return them, none if there are not enough, and the samples that are left.
        """
        raise NotImplementedError

    @property
    def tokenizer(self) -> Any:
        if self._tokenizer is None:
            self._tokenizer = self.tokenizer_source.load()
        return self._tokenizer

    @property
    def tokenizer_name(self) -> str:
        return repr(self.tokenizer_source.name or "bytes")

    @property
    def num_tokens(self) -> int:
        """Size that a model's vocabulary must have at least."""
        return len(self.tokenizer)

    @property
    def pad_token_id(self) -> int:
        """Token that fills rows up; ConfigurationError: the tokenizer has none."""
        tokenizer = self.tokenizer
        if tokenizer.pad_token_id is None:
            end = tokenizer.eos_token
            hint = f", such as '{end}': 'data.tokenizer.pad_token=\"{end}\"'" if end else ""
            raise ConfigurationError(
                f"The tokenizer {self.tokenizer_name} has no pad token, so samples of different "
                "lengths make no batch. Set data.tokenizer.pad_token to a token of its vocabulary"
                f"{hint}."
            )
        return int(tokenizer.pad_token_id)

    def fit_length(self, sample: Sample, *, place: str) -> Sample | None:
        """Bring a sample within `seq_len` tokens; None: it is to be left out, and was counted."""
        fitting = self.options.policy.apply(sample, limit=self.seq_len, place=place)
        if fitting is None:
            self.skipped[f"longer than data.seq_len={self.seq_len} tokens"] += 1
        return fitting

    @override
    def setup(self, stage: str | None = None) -> None:
        """Read and tokenise all files, once; DataError: a sample cannot be used."""
        if self.train_rows is not None:
            return
        self.collate()  # a tokenizer that cannot pad is refused before anything is read
        given = self.options.validation_files
        if self.options.streaming:
            self.files.parts()  # that they are there
            train: dict[str, list[Any]] = {}
            figures = "read while training goes on"
        else:
            train = self.encode_all(self.files)
        own = 0
        if given is not None:
            validation = self.encode_all(self._source(given))
        elif self.options.streaming:
            validation = {}
        else:
            train, validation = _split(train, share=self.options.validation_share)
            own = sum(map(len, validation.values()))
        rows: Sequence[Row] = ()
        if not self.options.streaming:
            rows, figures = self._rows_to_train(train)
        self.train_rows, self.validation_rows = rows, self._rows_to_validate(validation)
        tests = self.options.test_files
        self.test_rows = self.validation_rows
        if tests is not None:
            self.test_rows = self._rows_to_validate(self.encode_all(self._source(tests)))
        if own:
            figures += f"; {count_text(own, 'sample')} of these files set aside to validate on"
        self._report(figures)

    def _rows_to_train(self, train: Mapping[str, Sequence[Any]]) -> tuple[Sequence[Row], str]:
        """The rows, and how many there are of what."""
        samples = [
            sample
            for part, share in passes(self.files)
            for index, sample in enumerate(train.get(part, ()))
            if is_in_share(index, share)
        ]
        rows = self.arrange(samples)
        if len(rows) < self.batch_size:
            raise ConfigurationError(
                f"The {len(samples)} training samples make {len(rows)} rows, less than one batch "
                f"of data.batch_size={self.batch_size}. Give more samples or lower data.batch_size."
            )
        figures = f"{count_text(len(samples), 'sample')} in {_summary(rows)}"
        rest = len(rows) % self.batch_size
        if self.options.drop_last and rest:
            figures += f"; the last {rest} of an epoch left out (data.drop_last=true)"
        return rows, figures

    def _rows_to_validate(self, samples: Mapping[str, Sequence[Any]]) -> Sequence[Row]:
        rows = self.arrange(list(chain.from_iterable(samples.values())))
        if samples and not rows:
            raise ConfigurationError(
                "The validation texts are shorter than one window of "
                f"data.seq_len={self.seq_len} tokens. Give more, or lower data.seq_len."
            )
        return rows

    def _report(self, figures: str) -> None:
        """Say which form the files have, of many files by example, and what is in them."""
        named: dict[str, list[str]] = defaultdict(list)
        for part, (form, _, unread) in self.forms.found.items():
            named[f"{form.name}{unread and f'; not read: {unread}'}"].append(part)
        few = {form: ", ".join(parts[:2]) for form, parts in named.items()}
        forms = (
            f"{few[form]}{f' and {len(parts) - 2} more' if len(parts) > 2 else ''} ({form})"
            for form, parts in named.items()
        )
        encoder = vars(self).get("_encoder")  # of conversations, once there was one
        remark = "" if encoder is None else encoder.remark
        if encoder is not None and encoder.misses_ends:
            log.warning(
                "The chat template marks no token that ends an answer, so the model will not learn "
                "to stop. Put {{ eos_token }} before its {% endgeneration %}."
            )
        left_out = "".join(f"; {text}" for text in self.left_out)
        named_forms = "; ".join(forms) or ", ".join(self.files.parts()[:2])
        self.summary = f"Data: {named_forms}; {figures}{left_out}{remark}."
        rank_zero_info(self.summary)

    def train_dataloader(self) -> DataLoader[Any]:
        if not self.options.streaming:
            # by the seed and the epoch alone; Lightning's own strategies may have processes
            number, rank = (1, 0)
            if self.trainer is not None:
                number, rank = self.trainer.world_size, self.trainer.global_rank
            order: DistributedSampler[Any] = DistributedSampler(
                self.train_rows, num_replicas=number, rank=rank, seed=self.options.seed
            )
            drop_last = self.options.drop_last
            return self._loader(self.train_rows, sampler=order, drop_last=drop_last)
        reader = copy(self)
        reader.trainer = None  # processes that prepare batches have a reader, and no Trainer
        options = self.options
        stream = RowStream(
            source=self.files, reader=reader, run_records=options.run_records, seed=options.seed
        )
        return StreamLoader(stream, num_workers=options.num_workers)

    def val_dataloader(self) -> DataLoader[Any] | list[Any]:
        return self._loader(self.validation_rows) if self.options.validates else []

    def test_dataloader(self) -> DataLoader[Any] | list[Any]:
        is_given = self.options.test_files is not None
        return self._loader(self.test_rows) if is_given else self.val_dataloader()

    predict_dataloader = test_dataloader

    def _loader(self, rows: Any, **settings: Any) -> DataLoader[Any]:
        assert rows is not None, "Lightning calls setup first"
        return DataLoader(
            rows,
            batch_size=self.batch_size,
            num_workers=self.options.num_workers,
            collate_fn=self.collate(),
            persistent_workers=self.options.num_workers > 0,
            **settings,
        )

    def collate(self) -> Callable[[list[Row]], Any]:
        """Function that makes a batch of rows."""
        return Padding(pad_token=self.pad_token_id, multiple_of=self.options.pad_to_multiple_of)

    def samples_of(self, record: Record, *, errors: list[DataError] | None = None) -> Sequence[Any]:
        """Samples of a record, none if it is left out.

        If the record cannot be used, that is added to `errors`; a DataError without them.
        """
        try:
            if record.error is not None:
                raise record.error
            return self.encode(record)
        except (DataError, RecursionError) as reason:
            error = reason if isinstance(reason, DataError) else None
            error = error or DataError(f"{record.place}: the record is nested too deeply.")
            if errors is None:
                raise error from reason
            errors.append(error)
            return []

    def encode_all(self, source: RecordSource) -> dict[str, list[Any]]:
        """Samples of all records by part, those that are left out counted and said."""
        self.skipped.clear()
        errors: list[DataError] = []
        samples = {
            part: [
                sample
                for record in source.read(part)
                for sample in self.samples_of(record, errors=errors)
            ]
            for part in source.parts()
        }
        if errors and self.options.bad_records == "refuse":
            if len(errors) == 1:
                raise errors[0]
            way_out = "Mend or remove them, or leave them out: data.bad_records=skip."
            raise DataError(f"{_first(errors)}\n{way_out}")
        if errors:
            log.warning("Left out (data.bad_records=skip): %s", _first(errors))
            self.skipped["that cannot be used"] += len(errors)
        num_samples = sum(map(len, samples.values()))
        whole = num_samples + sum(self.skipped.values())
        for reason, count in self.skipped.items():
            self.left_out.append(f"{count:,} of {whole:,} samples left out: {reason}")
            if count > whole * _FEW:
                log.warning("%s (%.0f %%).", self.left_out[-1], 100 * count / whole)
        if not num_samples:
            reasons = ", ".join(f"{count} {reason}" for reason, count in self.skipped.items())
            raise DataError(
                f"{', '.join(source.parts())}: there is no sample that can be used"
                f"{f' ({reasons})' if reasons else ''}."
            )
        return samples

    def _source(self, files: Files) -> RecordSource:
        source = as_source(files)
        # broken lines come as records, so that all of them are counted
        return replace(source, keep_errors=True) if isinstance(source, RecordFiles) else source


_FEW = 0.05
"""Share of the samples up to which no warning is given of those that are left out."""


def _first(errors: Sequence[DataError], most: int = 10) -> str:
    """How many records cannot be used, and why the first ones cannot."""
    lines = [f"{count_text(len(errors), 'record')} cannot be used:", *map(str, errors[:most])]
    more = [f"and {len(errors) - most} more"] if len(errors) > most else []
    return "\n".join([*lines, *more])


def as_source(files: Files | None) -> RecordSource:
    if files is None or isinstance(files, (Sequence, Mapping)):
        return RecordFiles(paths=files or ())
    return files


def _summary(rows: Sequence[Row]) -> str:
    """How many tokens there are, and how many of them are learned."""
    num_tokens = sum(row["input_ids"].numel() for row in rows)
    learned = sum(int((row["labels"] != IGNORED).sum()) for row in rows)
    figures = f"{count_text(len(rows), 'row')}, {num_tokens:,} tokens"
    has_targets = rows[0]["labels"].shape == rows[0]["input_ids"].shape
    return f"{figures}, {learned / num_tokens:.0%} of them learned" if has_targets else figures


def _split(
    parts: Mapping[str, Sequence[Any]], *, share: float
) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
    """Take a share of the samples out, always the same ones of the same number of samples."""
    if not share:
        return {part: list(inside) for part, inside in parts.items()}, {}
    samples = [(part, sample) for part, inside in parts.items() for sample in inside]
    num_taken = max(1, round(len(samples) * share))
    if num_taken >= len(samples):
        raise ConfigurationError(
            f"{count_text(len(samples), 'sample')} cannot be split for training and validation. "
            "Give more, or name data.validation_files."
        )
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(0)).tolist()
    taken = set(order[:num_taken])
    split: tuple[dict[str, list[Any]], dict[str, list[Any]]]
    split = (defaultdict(list), defaultdict(list))
    for index, (part, sample) in enumerate(samples):
        split[index in taken][part].append(sample)
    return split
