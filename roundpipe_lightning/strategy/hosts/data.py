"""What each host gets of the data: batches whose indices all hosts draw alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from itertools import chain
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from roundpipe_lightning.engine.exchange.hosts import Hosts
from roundpipe_lightning.errors import ConfigurationError, DataError
from roundpipe_lightning.planning.cost.predict import split_samples
from roundpipe_lightning.strategy.hosts.shares import BatchShares


class HostBatches:
    """This host's part of each global batch: its share of every `num` lists of a batch sampler.

    So hosts of 8 samples train on the batches of one host of 16. What is left over at the end of
    a training's epoch is shared out, too; in an evaluation the first hosts take it.

    Args:
        lists: Yields lists of indices, on every host the same ones.
        hosts: All hosts.
        shares: Of each batch, by rank.
        trains: Whether every host needs a part of what is left over.
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
    """Return a loader of this host's part of the batches.

    Args:
        loader: The user's; it stays as it is. One with a `DistributedSampler` is divided already.
        hosts: All hosts.
        shares: Of each batch, by rank.
        trains: Whether it is for training.

    Raises:
        ConfigurationError: It cannot be divided by its indices.
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
