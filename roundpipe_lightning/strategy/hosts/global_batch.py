"""A batch that several hosts have parts of: what each part weighs, what the whole one gave.

Hosts are to a batch what microbatches are to a host: losses and logs are means with the shares of
what the losses average over, targets where `cross_entropy` counts them, else samples. The shares
are known when the user's steps have returned, so gradients are multiplied by them afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from roundpipe_lightning.engine.capture.randomness import mix
from roundpipe_lightning.engine.exchange.hosts import Hosts
from roundpipe_lightning.errors import BatchError, HostError
from roundpipe_lightning.models.batches import batch_size_of
from roundpipe_lightning.strategy.logging import LogCall
from roundpipe_lightning.strategy.microbatching import MicrobatchedBatch


@dataclass(frozen=True, kw_only=True)
class HostPart:
    """What a host tells the others of its part of a batch.

    Attributes:
        batch_number: Of the batch.
        averages_over: As `MicrobatchedBatch.averages_over`.
        num_rows: Samples; None where nothing shows them.
        shares: Of the microbatches in the part.
        losses: Theirs.
        logged: Their calls of `self.log`.
        is_asked: Whether a signal asked the host to stop.
    """

    batch_number: int
    averages_over: Sequence[float]
    num_rows: int | None
    shares: Sequence[float]
    losses: Sequence[Tensor | None]
    logged: Sequence[Sequence[LogCall]]
    is_asked: bool

    @classmethod
    def of(
        cls,
        cut: MicrobatchedBatch,
        losses: Sequence[Tensor | None],
        logged: Sequence[Sequence[LogCall]],
        *,
        batch_number: int,
        is_asked: bool,
    ) -> HostPart:
        """Describe a part whose steps have returned."""
        try:
            num_rows: int | None = sum(map(batch_size_of, cut.parts))
        except BatchError:
            num_rows = None
        return cls(
            batch_number=batch_number,
            averages_over=cut.averages_over(),
            num_rows=num_rows,
            shares=cut.shares,
            losses=losses,
            logged=logged,
            is_asked=is_asked,
        )


class GlobalBatch:
    """A whole batch. Every host makes one for the same batch.

    Args:
        mine: This host's part.
        hosts: All hosts.

    Attributes:
        share: This host's share of the loss.
        num_rows: Samples of all hosts; None where nothing shows them.
        shares: Of all hosts' microbatches.
        losses: Theirs.
        logged: Their calls of `self.log`.

    Raises:
        HostError: Another host is at another batch, or lost.
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


@contextmanager
def own_draws(hosts: Hosts, batch_number: int) -> Iterator[None]:
    """Let the process's generator draw other numbers on every host, while user code runs.

    Host 0's goes on as on one host. The others' go back, and are set to its state by each epoch.
    """
    if hosts.rank == 0:
        yield
        return
    generator = torch.default_generator
    before = generator.get_state()
    generator.manual_seed(mix(generator.initial_seed(), batch_number, hosts.rank))
    try:
        yield
    finally:
        generator.set_state(before)


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


def shares_of(counts: Sequence[float]) -> Sequence[float]:
    """Return the shares of counts in their sum; equal ones where all are 0."""
    total = sum(counts)
    return [count / total if total else 1 / len(counts) for count in counts]
