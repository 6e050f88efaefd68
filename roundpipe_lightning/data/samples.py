"""Samples as token ids: cut to length, packed into rows, padded into batches."""

from __future__ import annotations

import bisect
import enum
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from roundpipe_lightning.data.records import Record, RecordSource, is_in_share, passes
from roundpipe_lightning.errors import CheckpointError, DataError

log = logging.getLogger(__name__)

IGNORED = -100
"""Label of a position that is not to be predicted."""

Row = Mapping[str, Tensor]
"""Tensors of one sample by name; the last dimension of those that have one is the tokens."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """One text as tokens: `input_ids`, int64, of shape (tokens,), and `labels`.

    Labels are the same ids, -100 where nothing is to be predicted; the first one always is.
    """

    input_ids: Tensor
    labels: Tensor

    @classmethod
    def of(cls, ids: Sequence[int], *, targets: Sequence[bool] | None = None) -> Sample:
        """A sample of token ids; `targets` are to be predicted, without them all but the first."""
        tokens = torch.tensor(ids, dtype=torch.int64)
        labels = tokens.clone()
        if targets is not None:
            labels[~torch.tensor(targets, dtype=torch.bool)] = IGNORED
        labels[:1] = IGNORED  # nothing comes before it
        return cls(input_ids=tokens, labels=labels)

    @property
    def num_targets(self) -> int:
        return int((self.labels != IGNORED).sum())

    def __len__(self) -> int:
        return len(self.input_ids)

    def __getitem__(self, tokens: slice) -> Sample:
        labels = self.labels[tokens].clone()
        labels[:1] = IGNORED
        return Sample(input_ids=self.input_ids[tokens], labels=labels)


class TooLong(str, enum.Enum):
    """Treatment of a sample that is longer than the limit.

    It is an error that names the sample, is left out (how many were is logged), or is cut.
    """

    REFUSE = "refuse"
    DROP = "drop"
    CUT_END = "cut_end"
    CUT_START = "cut_start"

    def apply(self, sample: Sample, *, limit: int, place: str) -> Sample | None:
        """Bring a sample within a number of tokens; None: it is to be left out."""
        if len(sample) <= limit:
            return sample
        if self is TooLong.REFUSE:
            raise DataError(
                f"{place}: the sample has {len(sample)} tokens, more than data.seq_len={limit}. "
                "Raise data.seq_len up to what the model allows, or set data.too_long to drop "
                "(leave such samples out), cut_end or cut_start."
            )
        if self is TooLong.DROP:
            return None
        return sample[:limit] if self is TooLong.CUT_END else sample[len(sample) - limit :]


def as_row(sample: Sample) -> Row:
    return {
        "input_ids": sample.input_ids,
        "labels": sample.labels,
        "attention_mask": torch.ones_like(sample.input_ids),
    }


def packed_rows(samples: Iterable[Sample], *, seq_len: int) -> list[Row]:
    """Lay whole samples side by side in as few rows as a simple rule finds.

    The longest sample first, each into the row that it leaves the least room in (best fit
    decreasing, which needs at most 11/9 of the fewest rows possible and one more). Positions start
    anew with every sample: that is how transformers tells documents apart and keeps the attention
    of each to itself. There is no attention mask, which would switch this off.
    """
    bins: list[list[Sample]] = []
    room: list[tuple[int, int]] = []  # tokens that are free, and the row, ascending
    for sample in sorted(samples, key=len, reverse=True):
        place = bisect.bisect_left(room, (len(sample), -1))
        free, index = room.pop(place) if place < len(room) else (seq_len, len(bins))
        if index == len(bins):
            bins.append([])
        bins[index].append(sample)
        bisect.insort(room, (free - len(sample), index))
    return [packed_row(row) for row in bins]


def first_rows(
    samples: Sequence[Sample], *, num_rows: int, seq_len: int
) -> tuple[list[list[Sample]], list[Sample]]:
    """Fill rows with the first samples of a stream, each into the first row that has room.

    Args:
        seq_len: Tokens of a row at most; 0: one sample in each.

    Returns:
        The rows, once a sample fits into none of them, and the samples from that one on; before,
        no row and all samples.
    """
    rows: list[list[Sample]] = [[] for _ in range(num_rows)]
    free = [seq_len] * num_rows
    for index, sample in enumerate(samples):
        fitting = (n for n in range(num_rows) if not rows[n] or len(sample) <= free[n])
        place = next(fitting, None)
        if place is None:
            return rows, list(samples[index:])
        rows[place].append(sample)
        free[place] -= len(sample)
    return [], list(samples)


def packed_row(samples: Sequence[Sample]) -> Row:
    """Samples side by side in one row, each with positions of its own."""
    return {
        "input_ids": torch.cat([sample.input_ids for sample in samples]),
        "labels": torch.cat([sample.labels for sample in samples]),
        "position_ids": torch.cat([torch.arange(len(sample)) for sample in samples]),
    }


@dataclass(frozen=True, kw_only=True)
class Padding:
    """Makes a batch of rows of different lengths: pads them at their end and stacks them.

    Attributes:
        pad_token: Token id that fills `input_ids`.
        multiple_of: The batch is as long as its longest row, rounded up to a multiple of this.

    Padding has the label -100 and the attention mask 0. In rows that have positions (packed ones)
    it is a document of its own, which counts from 0.
    """

    pad_token: int
    multiple_of: int = 1

    def __call__(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        """Stack rows into tensors of shape (rows, ..., tokens)."""
        longest = max(row["input_ids"].shape[-1] for row in rows)
        length = -(-longest // self.multiple_of) * self.multiple_of
        return {
            name: torch.stack([self._padded(name, row[name], length) for row in rows])
            for name in rows[0]
        }

    def _padded(self, name: str, values: Tensor, length: int) -> Tensor:
        if values.dim() == 0:  # one value for the whole sample, such as its class
            return values
        missing = length - values.shape[-1]
        if name == "position_ids":
            return torch.cat([values, torch.arange(missing)])
        fill = {"input_ids": self.pad_token, "labels": IGNORED}.get(name, 0)
        return torch.nn.functional.pad(values, (0, missing), value=fill)


Batch = dict[str, Tensor]
State = dict[str, Any]


@dataclass(kw_only=True, eq=False)
class RowStream(IterableDataset[tuple[int, State, Batch]]):
    """Batches of a stream of records, each with the place where the next one begins.

    The parts (files) are taken in an order drawn from the seed and the epoch. Records are read in
    runs of neighbours, and each run is shuffled as a whole, by a permutation that depends on the
    seed, the epoch and the run's number alone: so a place in the stream is a few whole numbers.
    Processes that prepare batches share the stream by runs: of N processes the first takes runs 0,
    N, 2 N, ... Each has rows of its own. What is left at the end of an epoch is a smaller batch,
    unless the process has made no other.

    Attributes:
        source: The records.
        reader: The data module that makes samples and batches of them (`samples_of`, `take`,
            `collate`); every process has its own.
        run_records: Records of a run: how far a record may move, and how many are held in memory.
        seed: Seed of all permutations.
        epoch: Which pass over the records comes next.
        starts: Where each process begins; empty: at its first run.
    """

    source: RecordSource
    reader: Any
    run_records: int
    seed: int
    epoch: int = 0
    starts: Sequence[State] = ()

    def __iter__(self) -> Iterator[tuple[int, State, Batch]]:
        worker = get_worker_info()
        number, count = (0, 1) if worker is None else (worker.id, worker.num_workers)
        start: State = self.starts[number] if self.starts else _beginning(number)
        samples = [
            Sample(input_ids=torch.tensor(ids), labels=torch.tensor(labels))
            for ids, labels in start["rest"]
        ]
        stack = self.reader.collate()
        records = self._records(start["run"], step=count, used=start["used"])
        run, used, has_batch = start["run"], start["used"], start != _beginning(number)
        for run, used, record in chain([(start["run"], start["used"], None)], records):
            if record is not None:
                samples += self._encoded(record)
            rows, samples = self.reader.take(samples)
            while rows:
                rest = [(s.input_ids.tolist(), s.labels.tolist()) for s in samples]
                yield number, {"run": run, "used": used, "rest": rest}, stack(rows)
                rows, samples = self.reader.take(samples)
                has_batch = True
        last, size = list(self.reader.arrange(samples)) if samples else [], self.reader.batch_size
        if len(last) >= size or (last and has_batch and not self.reader.options.drop_last):
            for begin in range(0, len(last), size):  # packed anew, they may be a row more
                yield number, {"run": run, "used": used, "rest": []}, stack(last[begin:][:size])

    def _encoded(self, record: Record) -> Sequence[Any]:
        skips = self.reader.options.bad_records == "skip"
        errors: list[DataError] = []
        samples: Sequence[Any] = self.reader.samples_of(record, errors=errors if skips else None)
        for error in errors:
            log.warning("Left out (data.bad_records=skip): %s", error)
        return samples

    def _records(self, first: int, *, step: int, used: int) -> Iterator[tuple[int, int, Record]]:
        """Records of every `step`-th run in their shuffled order, with how many of it were used."""
        parts = passes(self.source)
        order = self._permutation(len(parts), self.epoch)
        records = (
            record
            for part, share in (parts[place] for place in order)
            for index, record in enumerate(self.source.read(part))
            if is_in_share(index, share)
        )
        run = 0
        while held := list(islice(records, self.run_records)):
            if run >= first and (run - first) % step == 0:
                places = self._permutation(len(held), self.epoch, run)
                for place in range(used, len(held)):
                    yield run, place + 1, held[places[place]]
                used = 0
            run += 1

    def _permutation(self, length: int, *key: int) -> list[int]:
        """A permutation that is the same for the same key."""
        seed = self.seed
        for number in key:
            seed = seed * 1_000_003 + number + 1
        generator = torch.Generator().manual_seed(seed % (1 << 62))
        return torch.randperm(length, generator=generator).tolist()


def _beginning(number: int) -> State:
    """Return the state in which a process begins: at its first run."""
    return {"run": number, "used": 0, "rest": []}


class StreamLoader(DataLoader[Any]):
    """Batches of a stream, which go on from a checkpoint with the batch that would have come next.

    Every iteration is an epoch of its own. Lightning's Trainer asks a loader without a length for
    one batch more than it trains on, so what `state_dict` gives is the place before that one.

    Args:
        stream: The batches.
        num_workers: Processes that prepare batches; 0 prepares them in the Trainer's.
        num_ahead: Batches that the reader holds without having used them: 1 for Lightning's
            Trainer, 0 for a loop of one's own.
    """

    def __init__(self, stream: RowStream, *, num_workers: int, num_ahead: int = 1) -> None:
        super().__init__(stream, batch_size=None, num_workers=num_workers)
        self.stream = stream
        self.num_ahead = num_ahead
        self._num_started = 0
        self._loaded: State | None = None
        self._history: list[State] = []

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        count = max(1, self.num_workers)
        workers = [_beginning(number) for number in range(count)]
        state: State = self._loaded or {"epoch": self._num_started, "workers": workers}
        self._loaded = None
        self.stream.epoch, self.stream.starts = state["epoch"], state["workers"]
        self._num_started = state["epoch"] + 1
        self._history, reached = [state], list(state["workers"])
        is_empty = state["workers"] == workers
        for worker, place, batch in super().__iter__():
            # the first process delivers first: the list begins with the one whose turn it is
            reached[worker] = place
            turn = (worker + 1) % count
            ordered = [*reached[turn:], *reached[:turn]]
            self._history = [*self._history, {"epoch": state["epoch"], "workers": ordered}]
            self._history = self._history[-1 - self.num_ahead :]
            is_empty = False
            yield batch
        if is_empty:  # or a training would go through epoch after epoch without a step
            shared = f" in each of the {count} processes (data.num_workers)" if count > 1 else ""
            raise DataError(
                f"{', '.join(self.stream.source.parts()[:2])}: the records of a whole epoch make "
                f"no batch{shared}. Give more, or lower data.batch_size or data.run_records."
            )
        self._history = [{"epoch": self._num_started, "workers": workers}]

    def state_dict(self) -> State:
        """Return the position of the next batch that was not used yet."""
        return self._history[0] if self._history else {}

    def load_state_dict(self, state: State) -> None:
        """Begin the next iteration at a place."""
        count = max(1, self.num_workers)
        if state and len(state["workers"]) != count:
            raise CheckpointError(
                f"The place in the stream was saved with {len(state['workers'])} processes "
                f"(data.num_workers, 0 counting as 1), and now there are {count}. Use as many."
            )
        self._loaded = state or None
