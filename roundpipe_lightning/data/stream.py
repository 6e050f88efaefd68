"""Samples that are read while training goes on: for more of them than memory holds.

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

from roundpipe_lightning.data.records import Record, RecordSource, is_in_share, passes
from roundpipe_lightning.data.samples import Sample
from roundpipe_lightning.errors import CheckpointError

Batch = dict[str, Tensor]
State = dict[str, Any]


@dataclass(kw_only=True, eq=False)
class RowStream(IterableDataset[tuple[int, State, Batch]]):
    """Batches of a stream of records, each with the place where the next one begins.

    The parts (files) are taken in an order drawn from the seed and the epoch. Records are read in
    runs of neighbours, and each run is shuffled as a whole, by a permutation that depends on the
    seed, the epoch and the run's number alone: so a place in the stream is a few whole numbers.
    Processes that prepare batches share the stream by runs: of N processes the first takes runs 0,
    N, 2 N, ... Each has rows of its own.

    Attributes:
        source: The records.
        reader: The data module that makes samples and batches of them (`encode`, `take`,
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
        for run, used, record in chain([(start["run"], start["used"], None)], records):
            if record is not None:
                samples += self.reader.encode(record)
            rows, samples = self.reader.take(samples)
            while rows:
                rest = [(s.input_ids.tolist(), s.labels.tolist()) for s in samples]
                yield number, {"run": run, "used": used, "rest": rest}, stack(rows)
                rows, samples = self.reader.take(samples)

    def _records(self, first: int, *, step: int, used: int) -> Iterator[tuple[int, int, Record]]:
        """Records of every `step`-th run in their shuffled order, with how many of it were used.

        Args:
            first: Number of the first run.
            step: How many runs on the next one is.
            used: Records of the first run that are left out.
        """
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
