"""What each host gets of the data: its share of batches whose indices all hosts draw alike.

Hosts are to a batch what microbatches are to a host: losses and logs are means with the shares of
what the losses average over, targets where `cross_entropy` counts them, else samples. These shares
are known when the user's steps have returned, so gradients are multiplied by them afterwards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from copy import copy
from dataclasses import dataclass
from itertools import chain
from statistics import median
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from roundpipe_lightning.engine.capture.randomness import mix, seeded
from roundpipe_lightning.engine.exchange.hosts import Hosts
from roundpipe_lightning.errors import BatchError, ConfigurationError, DataError, HostError
from roundpipe_lightning.models.batches import batch_size_of
from roundpipe_lightning.planning.cost.predict import split_samples
from roundpipe_lightning.planning.report.step_record import StepRecord
from roundpipe_lightning.strategy.logging import LogCall
from roundpipe_lightning.strategy.options import Options

_ALIKE = 1.1  # hosts get as much of a batch if none is faster by this factor: measured speeds vary
_ROUNDED = 1e-2  # parts that were written down

_FIRST, _LAST = 4, 10
"""Batches that are measured, counted from 1; those before warm up, or run other plans."""


class BatchShares:
    """Every host's share of each batch; the same on all hosts.

    With `host_share="measured"` the first batches of a training are shared by the devices' speed,
    then by what each host has needed for its part of them. Batches that loaders have asked for
    already stay as they are, so the change comes with the same batch on all hosts:

    ```
    trained on      1 2 3 4 5 6 7 8 9 10
    asked for       1 2 3 4 5 6 7 8 9 10 11 12     measured: all say how far they are
    shares          of devices ──────────────▶│ measured, from 13 on
    ```

    Args:
        speed: Returns the operations per second of this host's devices.
    """

    def __init__(
        self,
        hosts: Hosts,
        options: Options,
        *,
        speed: Callable[[], float],
        epoch: Callable[[], int],
    ) -> None:
        self._hosts, self._epoch = hosts, epoch
        self._rows, self._rates = deque[int](), list[float]()
        given = options.host_share
        self._is_to_measure = self._measures = given == "measured"
        self.num_drawn = 0
        """Global batches that loaders of this host have asked for in this epoch."""
        named = isinstance(given, (int, float))
        told = hosts.control.objects((given if not named else "", given if named else speed()))
        if len({word for word, _ in told}) > 1:
            raise ConfigurationError(
                "host_share is a number on some hosts, on others it is 'auto' or 'measured': set "
                "the same on all hosts, or a number on each."
            )
        shares = shares_of([float(number) for _, number in told], alike=1.0 if named else _ALIKE)
        self._state: dict[str, Any] = {"before": shares, "shares": shares, "start": 0, "epoch": 0}
        self._tell()

    def of(self, number: int) -> Sequence[float]:
        """Return the shares of a batch of this epoch, by rank."""
        changes_later = self._state["epoch"] == self._epoch() and number < self._state["start"]
        found: Sequence[float] = self._state["before" if changes_later else "shares"]
        return found

    def state(self) -> Mapping[str, Any] | None:
        """Return what `load` takes; None: nothing was measured."""
        return self._state if self._measures and not self._is_to_measure else None

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Go on with the shares of a checkpoint, if it has some of as many hosts."""
        if self._is_to_measure and state is not None and len(state["shares"]) == self._hosts.num:
            self._state, self._is_to_measure = dict(state), False
            self._tell()

    def batch_begins(self, batch: Any) -> None:
        """Begin to measure a batch of this host; BatchError: nothing shows how large it is."""
        if self._is_to_measure:
            self._rows.append(batch_size_of(batch))

    def step_ended(self, record: StepRecord) -> None:
        """Take the time of a batch: of the busiest worker, without what it waits for."""
        if not self._rows:
            return
        busy = [sum(entry.busy_seconds for entry in row) for row in record.timeline.rows()]
        self._rates.append(self._rows.popleft() / max(*busy, 1e-9))

    def measure(self, synchronize: Callable[[], None]) -> None:
        """Share by measured speed, if the present batch is the last of those; waits for its end."""
        if not self._is_to_measure or len(self._rates) + len(self._rows) < _LAST:
            return
        synchronize()
        self._rows.clear()
        told = self._hosts.control.objects((self.rate(), self.num_drawn))
        shares = shares_of([rate for rate, _ in told], alike=_ALIKE)
        self._state = {
            "before": self._state["shares"],
            "shares": shares,
            "start": max(drawn for _, drawn in told),
            "epoch": self._epoch(),
        }
        self._is_to_measure = False
        rates = ", ".join(f"{rate:.4g}" for rate, _ in told)
        rank_zero_info(f"roundpipe: hosts compute {rates} samples/s.")
        self._tell()

    def rate(self) -> float:
        """Return the samples that this host computes in a second."""
        return median(self._rates[_FIRST - 1 :])

    def _tell(self) -> None:
        if len(set(self._state["shares"])) > 1:
            texts = ", ".join(f"{share:.1%}" for share in self._state["shares"])
            rank_zero_info(f"roundpipe: hosts get {texts} of each batch (host_share).")


def divide_memory(hosts: Hosts, options: Options) -> None:
    """Settle every host's part of what they divide; all call this."""
    told = hosts.control.objects(options.memory_share)
    parts = [part for part in told if not isinstance(part, str)]
    if parts and (len(parts) < hosts.num or abs(sum(parts) - 1) > _ROUNDED):
        with suppress(HostError):  # nobody ends before all have what they compare
            hosts.control.objects(None)
        raise ConfigurationError(
            f"memory_share is {', '.join(map(str, told))} on the hosts: give each its part, so "
            "that they are 1 together, or leave it out on all."
        )
    hosts.parts = parts or [1 / hosts.num] * hosts.num


class HostBatches:
    """This host's part of each global batch: its share of every `num` lists of a batch sampler.

    So hosts of 8 samples train on the batches of one host of 16. What is left over at the end of
    a training's epoch is shared out, too; in an evaluation the first hosts take it.
    """

    def __init__(self, lists: Any, hosts: Hosts, shares: BatchShares, *, trains: bool) -> None:
        self._lists, self._hosts, self._trains = lists, hosts, trains
        self._shares = shares

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_lists"], name)

    @property
    def _drops(self) -> bool:
        return self._trains and bool(getattr(self._lists, "drop_last", False))

    def __len__(self) -> int:
        whole, left = divmod(len(self._lists), self._hosts.num)
        if self._trains:
            return whole + (left > 0 and not self._drops)
        return whole + (self._hosts.rank < left)

    def __iter__(self) -> Iterator[list[Any]]:
        hosts = self._hosts
        state = torch.default_generator.get_state()
        torch.default_generator.set_state(hosts.control.objects(state)[0])  # draws the order
        group: list[list[Any]] = []
        is_checked = False
        number = 0  # of the global batch
        for indices in self._lists:
            group.append(list(indices))
            if len(group) == hosts.num:
                shares, number = self._shares.of(number), number + 1
                self._note(number)
                if not is_checked:
                    hosts.check_same({"the order of the data, which a sampler drew,": group})
                is_checked = True
                is_even = len(set(shares)) == 1
                yield group[hosts.rank] if is_even else self._part(list(chain(*group)), shares)
                group = []
        if not self._trains:
            yield from group[hosts.rank : hosts.rank + 1]
        elif group and not self._drops:
            left = [index for indices in group for index in indices]
            if len(left) < hosts.num:
                raise DataError(
                    f"The last batch of the epoch has {len(left)} samples for {hosts.num} hosts. "
                    "Set drop_last=True in the DataLoader, or another batch_size."
                )
            self._note(number + 1)
            yield self._part(left, self._shares.of(number))

    def _note(self, number: int) -> None:
        if self._trains:
            self._shares.num_drawn = number

    def _part(self, samples: list[Any], shares: Sequence[float]) -> list[Any]:
        sizes = split_samples(len(samples), shares)
        start = sum(sizes[: self._hosts.rank])
        return samples[start : start + sizes[self._hosts.rank]]


def divided(loader: Any, hosts: Hosts, shares: BatchShares, *, trains: bool) -> Any:
    """Return a loader of this host's part of the batches; the user's stays as it is.

    One with a `DistributedSampler` is divided already.
    """
    if isinstance(getattr(loader, "sampler", None), DistributedSampler):
        return loader
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        raise ConfigurationError(
            f"{type(loader).__name__} gives no indices, so its samples cannot be divided among "
            "hosts. Use a DataLoader of a data set with indices; or divide the samples yourself, "
            "equally many batches for every host, and set Trainer(use_distributed_sampler=False)."
        )
    if loader.batch_sampler is None:
        raise ConfigurationError(
            "DataLoader(batch_size=None) on several hosts: batches cannot be divided by indices. "
            "Set a batch_size or a batch_sampler."
        )
    mine = copy(loader)
    vars(mine).update(
        batch_sampler=HostBatches(loader.batch_sampler, hosts, shares, trains=trains),
        _iterator=None,
    )
    if not trains and len(loader) < hosts.num:
        raise ConfigurationError(
            f"{len(loader)} batches to evaluate for {hosts.num} hosts: some would have none. Set a "
            "smaller batch_size in the DataLoader."
        )
    return mine


def num_rows_of(parts: Sequence[Any]) -> int | None:
    """Return the samples of parts of a batch; None where nothing shows them."""
    try:
        return sum(map(batch_size_of, parts))
    except BatchError:
        return None


@dataclass(frozen=True, kw_only=True)
class HostPart:
    """What a host tells the others of its part of a batch; lists are by microbatch.

    Attributes:
        num_rows: Samples; None where nothing shows them.
        is_asked: Whether a signal asked the host to stop.
    """

    batch_number: int
    averages_over: Sequence[float]
    num_rows: int | None
    shares: Sequence[float]
    losses: Sequence[Tensor | None]
    logged: Sequence[Sequence[LogCall]]
    is_asked: bool


class GlobalBatch:
    """A whole batch. Every host makes one for the same batch.

    Attributes:
        share: This host's share of the loss.
        num_rows: Samples of all hosts; None where nothing shows them.
        shares: Of all hosts' microbatches.
        losses: Theirs.
        logged: Their calls of `self.log`.
    """

    def __init__(self, mine: HostPart, hosts: Hosts) -> None:
        parts = hosts.control.objects(mine)
        for host, part in enumerate(parts):
            if part.batch_number != mine.batch_number:
                raise HostError(
                    f"Host {host} is at batch {part.batch_number}, host {hosts.rank} at batch "
                    f"{mine.batch_number}: they were given different numbers of batches."
                )
        _check_terms(parts)
        shares = shares_of([part.averages_over[-1] for part in parts])
        rows = [part.num_rows for part in parts]
        self.share = shares[hosts.rank]
        self.num_rows = None if None in rows else sum(row or 0 for row in rows)
        self.shares = [
            share * own for share, part in zip(shares, parts, strict=True) for own in part.shares
        ]
        self.losses = [loss for part in parts for loss in part.losses]
        hosts.stops = any(part.is_asked for part in parts)
        self.logged = [calls for part in parts for calls in part.logged]


def own_draws(hosts: Hosts, batch_number: int) -> AbstractContextManager[None]:
    """Let the process's generator draw other numbers on every host, while user code runs.

    Host 0's goes on as on one host. The others' go back, and are set to its state by each epoch.
    """
    own = [torch.default_generator] if hosts.rank else []
    return seeded(own, mix(torch.initial_seed(), batch_number, hosts.rank))


def _check_terms(parts: Sequence[HostPart]) -> None:
    """Warn where a loss has means over different things: there is one share for all of it."""
    terms = [torch.tensor(part.averages_over, dtype=torch.float64) for part in parts]
    if len({len(each) for each in terms}) > 1:
        differ = True
    else:
        shares = torch.stack(terms)
        shares = shares / shares.sum(0)
        differ = not torch.allclose(shares, shares[:, -1:].expand_as(shares), equal_nan=True)
    if differ:
        rank_zero_warn(
            "The loss is a sum of means over different numbers of targets: hosts weigh by the "
            "last one, so the others differ from one host's. See docs/nodes.md."
        )


def shares_of(counts: Sequence[float], *, alike: float = 1.0) -> Sequence[float]:
    """Return shares of counts in their sum; equal ones where all are 0, or within a factor."""
    total = sum(counts) if max(counts) >= alike * min(counts) else 0
    return [count / total if total else 1 / len(counts) for count in counts]
