"""Texts that are read while training goes on: for more of them than memory holds.

`datasets` streams too, but what is in its shuffle buffer is lost when it goes on from a saved
state. Here every record is read once, whenever a run was stopped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from typing_extensions import override

from roundpipe_lightning.data.records import Record, RecordSource
from roundpipe_lightning.data.samples import Padding, Sample
from roundpipe_lightning.data.text import TextDataModule, cut_windows, text_sample
from roundpipe_lightning.data.token_data import Files, as_source
from roundpipe_lightning.errors import CheckpointError, ConfigurationError

Batch = dict[str, Tensor]
State = dict[str, Any]


@dataclass(kw_only=True, eq=False)
class WindowStream(IterableDataset[tuple[int, State, Batch]]):
    """Batches of windows of a stream of texts, each with the place where the next one begins.

    The parts (files) are taken in an order drawn from the seed and the epoch. Records are read in
    runs of neighbours, and each run is shuffled as a whole, by a permutation that depends on the
    seed, the epoch and the run's number alone: so a place in the stream is a few whole numbers.
    Processes that prepare batches share the stream by runs: of N processes the first takes runs 0,
    N, 2 N, ... Each has windows of its own.

    Attributes:
        source: The texts.
        tokenizer: Loads the tokenizer; every process loads its own.
        field: Field of a record that has the text.
        seq_len: Tokens of a window.
        batch_size: Windows of a batch.
        keep_apart: Whether texts in a window do not see each other.
        run_records: Records of a run: how far a record may move, and how many are held in memory.
        seed: Seed of all permutations.
        epoch: Which pass over the texts comes next.
        starts: Where each process begins; empty: at its first run.
    """

    source: RecordSource
    tokenizer: Any
    field: str
    seq_len: int
    batch_size: int
    keep_apart: bool
    run_records: int
    seed: int
    epoch: int = 0
    starts: Sequence[State] = ()

    def __iter__(self) -> Iterator[tuple[int, State, Batch]]:
        worker = get_worker_info()
        number, count = (0, 1) if worker is None else (worker.id, worker.num_workers)
        tokenizer, name = self.tokenizer.load(), repr(self.tokenizer.name or "bytes")
        start: State = self.starts[number] if self.starts else _beginning(number)
        pieces = [Sample.of(ids) for ids in start["rest"]]
        num_tokens = self.seq_len * self.batch_size
        stack = Padding(pad_token=0)
        records = self._records(start["run"], step=count, used=start["used"])
        for run, used, record in chain([(start["run"], start["used"], None)], records):
            if record is not None:
                pieces.append(text_sample(record.text(self.field), tokenizer, name=name))
            while sum(map(len, pieces)) >= num_tokens:
                full, pieces = split_pieces(pieces, num_tokens)
                rows = cut_windows(full, seq_len=self.seq_len, keep_apart=self.keep_apart)
                rest = [piece.input_ids.tolist() for piece in pieces]
                state = {"run": run, "used": used, "rest": rest}
                yield number, state, stack(list(rows))

    def _records(self, first: int, *, step: int, used: int) -> Iterator[tuple[int, int, Record]]:
        """Records of every `step`-th run in their shuffled order, with how many of it were used.

        Args:
            first: Number of the first run.
            step: How many runs on the next one is.
            used: Records of the first run that are left out.
        """
        parts = self.source.parts()
        order = self._permutation(len(parts), self.epoch)
        records = (record for part in order for record in self.source.read(parts[part]))
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

    def __init__(self, stream: WindowStream, *, num_workers: int, num_ahead: int = 1) -> None:
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
        for worker, place, batch in super().__iter__():
            # the first process delivers first: the list begins with the one whose turn it is
            reached[worker] = place
            turn = (worker + 1) % count
            ordered = [*reached[turn:], *reached[:turn]]
            self._history = [*self._history, {"epoch": state["epoch"], "workers": ordered}]
            self._history = self._history[-1 - self.num_ahead :]
            yield batch
        self._history = [{"epoch": self._num_started, "workers": workers}]

    def state_dict(self) -> State:
        """Return the position of the next batch that was not used yet."""
        return self._history[0] if self._history else {}

    def load_state_dict(self, state: State) -> None:
        """Begin the next iteration at a place.

        Raises:
            CheckpointError: It was saved with another number of processes.
        """
        count = max(1, self.num_workers)
        if state and len(state["workers"]) != count:
            raise CheckpointError(
                f"The place in the stream was saved with {len(state['workers'])} processes "
                f"(data.num_workers, 0 counting as 1), and now there are {count}. Use as many."
            )
        self._loaded = state or None


class TextStreamDataModule(TextDataModule):
    """Texts of files of any size, tokenised while training goes on; every token is predicted.

    Like `TextDataModule`, but nothing is held in memory beside a run of records and the texts that
    are validated on. The order is drawn from the seed and the epoch, and a checkpoint goes on with
    the batch that would have come next. The length of an epoch is not known, so the Trainer needs
    `max_steps`.

    Args:
        validation_files: Texts that are validated on.
        run_records: Records that are shuffled among each other.
        options: The other arguments of `TextDataModule`.

    Raises:
        ConfigurationError: A setting is out of its range.
    """

    def __init__(
        self, *, validation_files: Files, run_records: int = 10_000, **options: Any
    ) -> None:
        super().__init__(validation_files=validation_files, **options)
        if run_records < 1:
            raise ConfigurationError(f"data.run_records={run_records} must be at least 1.")
        self.run_records = run_records
        self._validation_source = as_source(validation_files)

    @override
    def setup(self, stage: str | None = None) -> None:
        """Find the files, and read those that are validated on."""
        self.files.parts()
        if self.validation_rows is None:
            self.validation_rows = self.arrange(self.encode_all(self._validation_source))

    @override
    def train_dataloader(self) -> StreamLoader:
        stream = WindowStream(
            source=self.files,
            tokenizer=self.tokenizer_source,
            field=self.field,
            seq_len=self.seq_len,
            batch_size=self.batch_size,
            keep_apart=self.keep_apart,
            run_records=self.run_records,
            seed=self.options.seed,
        )
        return StreamLoader(stream, num_workers=self.options.num_workers)
