"""Position of the training data in an epoch, for loaders that do not report it themselves.

Batches are skipped by their indices: nothing that was trained on already is loaded again.

```
saved     constructed ─► iterated ─► first index ─► 0 1 2 3 4 │ 5 6 ...     5 batches handed out
resumed   the same draws from the same random states ──► ─────► 5 6 ...     loaded from here on
```

An epoch's order is drawn by the loader's own sampler, from generators whose states were noted when
it did so. A resumed run puts these states back, lets the sampler draw the same order, drops the
indices of the batches that were trained on, and goes on with the random states of the checkpoint.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Subset, get_worker_info

from roundpipe_lightning.strategy.compat import set_sampler_epoch
from roundpipe_lightning.strategy.resume.randomness import (
    LoaderRandomness,
    State,
    host_now,
    host_state,
    set_host_state,
)


@dataclass(kw_only=True)
class DrawnOrder:
    """Record of an order that was drawn, or of one to be drawn again."""

    constructed: State | None = None  # after the loader's iterator was made
    iterated: State | None = None  # before its sampler was asked for an iterator
    first: State | None = None  # before the first index was drawn
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
            self._randomness.restore_samplers(replayed.iterated["samplers"])
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


def takes_marks(loader: DataLoader[Any]) -> bool:
    """Whether the loader's processes can be given an empty list of indices."""
    dataset = loader.dataset
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return loader.batch_sampler is not None and not hasattr(dataset, "__getitems__")


# In worker processes -----------------------------------------------------------------------------


Stamp = tuple[int, State]
"""A process's number, and where its generators stand after it has loaded a batch."""


class StampingCollate:
    """Makes batches in a process and sends along where its generators stand then."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: Any) -> tuple[Any, Stamp | None]:
        if isinstance(samples, list) and not samples:
            return None, None  # the place of a batch that is skipped
        batch, worker, now = self._collate(samples), get_worker_info(), host_state()
        assert worker is not None
        # As a numpy array it travels without shared memory.
        return batch, (worker.id, {**now, "torch": now["torch"].numpy()})


class RestoringInit:
    """Starts processes, each with its generators where another one's stood, after `init`."""

    def __init__(self, init: Callable[[int], Any] | None, states: Mapping[int, State]) -> None:
        self._init = init
        self._states = dict(states)

    def __call__(self, worker: int) -> None:
        if self._init is not None:
            self._init(worker)
        if worker in self._states:
            set_host_state(self._states[worker])


_MOST_AHEAD = 2


class SlowResumeWarning(UserWarning):
    """Batches that were trained on are loaded again and dropped: their loader has no state."""


class PositionedLoader:
    """A loader of training batches that can go on in the middle of an epoch.

    It stands in for the user's loader, any iterable without a `state_dict`, whose attributes it
    has. The loader is changed only while an iterator is made.

    Args:
        waits: Whether the first iteration waits for `resume` or its first batch, because a
            checkpoint has been loaded.
    """

    def __init__(self, loader: Any, *, waits: bool) -> None:
        vars(self)["position"] = LoaderPosition(loader, waits=waits)
        vars(self)["loader"] = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["loader"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["loader"], name, value)

    def __delattr__(self, name: str) -> None:
        delattr(vars(self)["loader"], name)

    @property  # type: ignore[misc]  # isinstance() is to find the user's class
    def __class__(self) -> type:
        return type(vars(self)["loader"])

    def __reduce_ex__(self, _: Any) -> Any:
        """Copy and pickle the user's loader: a position belongs to one training."""
        return copy, (vars(self)["loader"],)

    def __len__(self) -> int:
        return len(vars(self)["loader"])

    def __iter__(self) -> Iterator[Any]:
        iteration: Iterator[Any] = vars(self)["position"].iterate()
        return iteration


def position_of(loader: Any) -> LoaderPosition | None:
    return vars(loader)["position"] if type(loader) is PositionedLoader else None


class LoaderPosition(Iterator[Any]):
    """Position of the iteration over a loader, and that iteration: there is one at a time."""

    def __init__(self, loader: Any, *, waits: bool) -> None:
        self.loader = loader
        self.randomness = LoaderRandomness(loader)
        self.sampler = None
        if (
            isinstance(loader, DataLoader)
            and type(loader).__iter__ is DataLoader.__iter__
            and not isinstance(loader.dataset, IterableDataset)
        ):
            self.sampler = RecordedSampler(
                loader.sampler if loader.batch_sampler is None else loader.batch_sampler,
                randomness=self.randomness,
                num_workers=loader.num_workers,
                marks=takes_marks(loader),
            )
        self._workers: dict[int, State] = {}
        self._waits = waits
        self._place: Mapping[str, Any] | None = None  # to go on from
        self.siblings: Sequence[LoaderPosition] = ()
        """All loaders of a batch: those that wait begin together, in order, as they always do."""
        self.close()

    @property
    def _keeps_workers(self) -> bool:
        return self.sampler is not None and bool(self.loader.persistent_workers)

    @property
    def _is_stamped(self) -> bool:
        return self.sampler is not None and bool(self.loader.num_workers)

    @property
    def is_open(self) -> bool:
        return self._inner is not None

    def close(self) -> None:
        """Let go of the loader's iterator: its processes end."""
        self._inner: Iterator[Any] | None = None
        self.is_asked = False
        self._constructed: State | None = None
        self._num_asked = 0
        self._num_before_processes = 0
        self._history: deque[tuple[Any, ...]] = deque(maxlen=_MOST_AHEAD)
        self._stamps: deque[tuple[int, State | None]] = deque(maxlen=_MOST_AHEAD)

    def iterate(self) -> Iterator[Any]:
        self.close()
        if not self._keeps_workers:
            self._workers = {}
        if self._place is None and not self._waits:
            self.open()
        self._waits, self.is_asked = False, True
        return self

    def __next__(self) -> Any:
        if self._inner is None:
            for position in self.siblings or (self,):
                if position.is_asked and not position.is_open:
                    position.open()
        assert self._inner is not None
        self._history.append(host_now())
        self._num_asked += 1
        if not self._is_stamped:
            return next(self._inner)
        stamp = None
        while stamp is None:
            batch, stamp = next(self._inner)
        worker, state = stamp
        self._stamps.append((worker, self._workers.get(worker)))
        self._workers[worker] = {**state, "torch": torch.from_numpy(state["torch"].copy())}
        return batch

    def before_fetch(self, num_fetched: int) -> State | None:
        is_known = len(self._history) >= num_fetched
        return host_state(self._history[-num_fetched]) if is_known else None

    def state(self, *, num_ahead: int, is_over: bool) -> dict[str, Any]:
        """Return the state for `resume`, as tensors, numbers and tuples.

        Args:
            num_ahead: Batches that were asked for and not trained on.
            is_over: Whether the epoch is done with its data, so that a new iteration comes next.
        """
        now = self.randomness.now()
        state: dict[str, Any] = {"own": now["own"], "samplers": now["samplers"]}
        if not self.is_open and self._place is None:
            return state
        if is_over:
            return {**state, **self._processes(0)} if self._keeps_workers else state
        state["samplers"] = {}  # their states are part of the order that is drawn again
        if self._place is not None:  # resumed, and not gone on yet
            return {**state, **{k: value for k, value in self._place.items() if k != "epoch"}}
        drawn = DrawnOrder() if self.sampler is None else self.sampler.drawn
        before = self.before_fetch(num_ahead) if self.sampler is None and num_ahead else None
        return {
            **state,
            **self._processes(num_ahead),
            "num_batches": max(0, self._num_asked - num_ahead),
            "turn": self._num_asked - num_ahead - self._num_before_processes,
            "iterated": drawn.iterated,
            "first": drawn.first,
            "before_fetch": before,
        }

    def _processes(self, num_ahead: int) -> dict[str, Any]:
        """Return the states in which the loader's processes began, and their present ones."""
        workers = dict(self._workers)
        constructed = self._constructed if self.sampler is None else self.sampler.drawn.constructed
        assert constructed is not None
        undone = list(self._stamps)[len(self._stamps) - num_ahead :] if num_ahead else []
        for worker, before in reversed(undone):
            workers.pop(worker)
            if before is not None:
                workers[worker] = before
        return {"constructed": constructed, "workers": workers}

    def resume(self, state: Mapping[str, Any], *, epoch: int) -> None:
        """Go on from `state`: the present iteration, or if it has begun the next one."""
        self.randomness.restore_own(state["own"])
        self.randomness.restore_samplers(state["samplers"])
        # Without this entry it is the beginning of an epoch like any other.
        self._place = {**state, "epoch": epoch} if "constructed" in state else None

    def open(self) -> None:
        """Make the loader's own iterator, at the place to go on from if there is one."""
        place, self._place, self.siblings = self._place, None, ()
        sampler = self.sampler
        if sampler is not None and getattr(self.loader, "_iterator", None) is None:
            sampler.drawn = DrawnOrder()
        if place is None:
            if sampler is None:
                self._constructed = self.randomness.now()
            self._inner = self._iterator()
            return
        kept = self.randomness.now()
        set_sampler_epoch(self.loader, place["epoch"])
        self._constructed = place["constructed"]
        self.randomness.restore(place["constructed"])
        self._workers = dict(place["workers"])
        if "num_batches" in place:
            self._open_inside(place)
            self.randomness.restore(kept)
        else:  # processes that outlive an epoch start where they stood at its end
            assert sampler is not None
            sampler.is_empty = True
            self._iterator()
            sampler.is_empty = False
            sampler.drawn = DrawnOrder(constructed=self._constructed)
            self.randomness.restore(kept)
            self._inner = self._iterator()
        if place.get("before_fetch") is not None:
            set_host_state(place["before_fetch"])

    def _open_inside(self, state: Mapping[str, Any]) -> None:
        self._num_asked = state["num_batches"]
        sampler = self.sampler
        if sampler is None:
            self._inner = self._iterator()
            self._skip(self._num_asked)
            return
        if not sampler.marks and self._is_stamped:  # the first process loads the next batch
            self._num_before_processes, count = self._num_asked, self.loader.num_workers
            workers, turn = self._workers, state["turn"]
            self._workers = {(old - turn) % count: workers[old] for old in workers}
        sampler.replayed = DrawnOrder(
            constructed=self._constructed,
            iterated=state["iterated"],
            first=state["first"],
            num_skipped=self._num_asked,
        )
        self._inner = self._iterator()

    def _skip(self, num_batches: int) -> None:
        if num_batches:
            warnings.warn(
                f"The training batches come from {type(self.loader).__name__}, which has no state "
                f"and no indices: the {num_batches} batches of this epoch that were trained on are "
                "loaded again and dropped. Give it state_dict() and load_state_dict() to go on at "
                "once.",
                category=SlowResumeWarning,
                stacklevel=2,
            )
        assert self._inner is not None
        for _ in range(num_batches):
            next(self._inner, None)

    def _iterator(self) -> Iterator[Any]:
        sampler, loader = self.sampler, self.loader
        if sampler is None:
            return iter(loader)
        parts: dict[str, Any] = {
            "sampler" if loader.batch_sampler is None else "batch_sampler": sampler
        }
        if self._is_stamped:
            parts["collate_fn"] = StampingCollate(loader.collate_fn)
            parts["worker_init_fn"] = RestoringInit(loader.worker_init_fn, self._workers)
        with _replaced(loader, parts):
            return iter(loader)


@contextmanager
def _replaced(loader: DataLoader[Any], parts: Mapping[str, Any]) -> Iterator[None]:
    """Give a loader other parts for a while; it refuses to be given them the ordinary way."""
    attributes = vars(loader)
    kept = {name: attributes[name] for name in parts}
    attributes.update(parts)
    try:
        yield
    finally:
        attributes.update(kept)
