"""Skipping batches by their indices: nothing of what was trained on already is loaded again.

```
saved     constructed ─► iterated ─► first index ─► 0 1 2 3 4 │ 5 6 ...     5 batches handed out
resumed   the same draws from the same random states ──► ─────► 5 6 ...     loaded from here on
```

An epoch's order is drawn by the loader's own sampler, from generators whose states were noted when
it did so. A resumed run puts these states back, lets the sampler draw the same order, drops the
indices of the batches that were trained on, and goes on with the random states of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, Subset, get_worker_info

from roundpipe_lightning.strategy.resume.randomness import (
    HostRandomness,
    LoaderRandomness,
    Randomness,
)


@dataclass(kw_only=True)
class DrawnOrder:
    """Record of an order that was drawn, or of one to be drawn again."""

    constructed: Randomness | None = None  # after the loader's iterator was made
    iterated: Randomness | None = None  # before its sampler was asked for an iterator
    first: Randomness | None = None  # before the first index was drawn
    num_skipped: int = 0  # batches that are not loaded


class RecordedSampler:
    """Stands in for a loader's sampler: notes the randomness of an order, or draws one again.

    Args:
        num_workers: Processes that load; 0: indices are drawn one at a time, as they are needed.
        marks: Whether skipped batches may be announced to the processes, so that every batch is
            loaded by the process that would have loaded it.
    """

    def __init__(
        self, sampler: Any, *, randomness: LoaderRandomness, num_workers: int, marks: bool
    ) -> None:
        self._sampler = sampler
        self._randomness = randomness
        self._num_workers = num_workers
        self.marks = marks
        self.drawn = DrawnOrder()
        self.replayed: DrawnOrder | None = None
        self.is_empty = False
        """Whether there are no indices for now: processes are started, and load nothing yet."""

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        if "_sampler" not in vars(self):  # being copied
            raise AttributeError(name)
        return getattr(self._sampler, name)

    def __iter__(self) -> Iterator[Any]:
        if self.is_empty:
            return iter(())
        # Replayed draws leave the generators as they were: what is drawn next is not theirs.
        replayed, kept = self.replayed, self._randomness.now()
        if replayed is not None and replayed.iterated is not None:
            self._randomness.restore(replayed.iterated)
            self._randomness.restore_samplers(replayed.iterated.samplers)
            indices = iter(self._sampler)
            self._randomness.restore(kept)
        else:
            indices = iter(self._sampler)
        self.drawn = replayed or DrawnOrder(
            constructed=self.drawn.constructed or self._randomness.now(), iterated=kept
        )
        return self._indices(indices, replayed)

    def _indices(self, indices: Iterator[Any], replayed: DrawnOrder | None) -> Iterator[Any]:
        kept = self._randomness.now()
        self.replayed = None
        if replayed is None or replayed.first is None:
            self.drawn.first = kept
            yield from indices
            return
        self._randomness.restore(replayed.first)
        next(islice(indices, replayed.num_skipped, replayed.num_skipped), None)
        if self._num_workers == 0:
            self._randomness.restore(kept)
        elif self.marks:
            yield from ([] for _ in range(replayed.num_skipped % self._num_workers))
        yield from indices


def skips_indices(loader: Any) -> bool:
    return (
        isinstance(loader, DataLoader)
        and type(loader).__iter__ is DataLoader.__iter__
        and not isinstance(loader.dataset, IterableDataset)
    )


def takes_marks(loader: DataLoader[Any]) -> bool:
    """Whether the loader's processes can be given an empty list of indices."""
    dataset = loader.dataset
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return loader.batch_sampler is not None and not hasattr(dataset, "__getitems__")


# In worker processes -----------------------------------------------------------------------------


Stamp = tuple[int, HostRandomness]
"""A process's number, and where its generators stand after it has loaded a batch."""


class StampingCollate:
    """Makes batches in a process and sends along where its generators stand then."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: Any) -> tuple[Any, Stamp | None]:
        if isinstance(samples, list) and not samples:
            return None, None  # the place of a batch that is skipped
        batch, worker, now = self._collate(samples), get_worker_info(), HostRandomness.now()
        assert worker is not None
        # As a numpy array it travels without shared memory.
        return batch, (worker.id, replace(now, torch=now.torch.numpy()))


class RestoringInit:
    """Starts a process with its generators where another one's stood.

    Args:
        init: The loader's own function, or None.
        states: By number of the process.
    """

    def __init__(
        self, init: Callable[[int], Any] | None, states: Mapping[int, HostRandomness]
    ) -> None:
        self._init = init
        self._states = dict(states)

    def __call__(self, worker: int) -> None:
        if self._init is not None:
            self._init(worker)
        if worker in self._states:
            self._states[worker].restore()
