"""The hosts of a training: who they are, what they tell each other, what happens when one is lost.

`torch.distributed` with gloo carries it all. Each thread that talks to other hosts has a group of
its own (a `Line`): the operations of a group must begin in the same order on all hosts, and a small
operation would wait for the large ones before it. Nothing waits without end: every operation is
asked again and again whether it is done, and given up when `close` was called or time is up.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from roundpipe_lightning.errors import ConfigurationError, HostError

_POLL = timedelta(seconds=0.5)
_SHORT = timedelta(milliseconds=1)

T = TypeVar("T")


class Hosts:
    """All hosts of a training, as one of them sees it. Made by all at once.

    The default group of torch.distributed must be there.

    Args:
        timeout_seconds: After so long without an answer the others are given up.

    Attributes:
        rank: The number of this host.
        num: How many there are.
        control: For small objects, from the Trainer's thread.
        place: Where in the training this host is, for messages.
    """

    def __init__(self, *, timeout_seconds: float) -> None:
        self.rank, self.num = dist.get_rank(), dist.get_world_size()
        self.place = "before the first step"
        self.is_closed = False
        self._timeout = timeout_seconds
        self.control = Line(self, "step")
        self.gradients = Line(self, "gradients")
        self.weights = Line(self, "weights")

    def check_same(self, what: Mapping[str, Any]) -> None:
        """Refuse hosts that are not set up alike.

        Args:
            what: Names for messages, and what must be equal on all hosts.

        Raises:
            ConfigurationError: Naming the first difference and who has it; on all hosts.
        """
        for host, theirs in enumerate(self.control.objects(dict(what))):
            for name, value in what.items():
                first = theirs.get(name)
                if first != value:
                    raise ConfigurationError(
                        f"Hosts differ: {name} is {_short(value)} on host {self.rank} and "
                        f"{_short(first)} on host {host}. Start the same code with the same "
                        "configuration everywhere; see docs/nodes.md."
                    )

    def close(self) -> None:
        """Wait for nobody any more. Whoever waits in another thread gets a `HostError`."""
        self.is_closed = True

    def wait(self, work: Any, what: str) -> None:
        """Wait for the end of an operation.

        Raises:
            HostError: Another host has ended, or does not answer.
        """
        begun, patience = time.monotonic(), _SHORT
        while True:
            is_over = work.is_completed()  # asked before: it may end while its time runs out
            try:
                work.wait(patience)
            except RuntimeError as error:
                if is_over:
                    raise HostError(
                        f"Host {self.rank} lost another host while it exchanged {what} "
                        f"({self.place}): that one has ended, or its link is down. Its own output "
                        f"says why. ({error})"
                    ) from error
            else:
                return
            if self.is_closed:
                raise HostError(f"The exchange of {what} was given up on host {self.rank}.")
            if time.monotonic() - begun > self._timeout:
                raise HostError(
                    f"Host {self.rank} waited {self._timeout:g} s for others while it exchanged "
                    f"{what} ({self.place}): one of them hangs, or is much slower. "
                    "RoundPipeStrategy(timeout_seconds=...) sets how long."
                )
            patience = _POLL


class Line:
    """A group of all hosts, for one thread.

    Args:
        hosts: All hosts.
        what: What goes over it, for messages.
    """

    def __init__(self, hosts: Hosts, what: str) -> None:
        self._hosts, self._what = hosts, what
        self._group = dist.new_group(backend="gloo")

    def objects(self, value: T) -> list[T]:
        """Return every host's object, by rank. Pickled: between hosts that trust each other.

        Raises:
            HostError: As `Hosts.wait`.
        """
        if self._hosts.is_closed:  # nothing is begun while an error travels
            raise HostError(f"Host {self._hosts.rank} has given up what it does with others.")
        packed = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        num = self._hosts.num
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(num)]
        mine = torch.tensor([packed.numel()])
        self._wait(dist.all_gather(sizes, mine, group=self._group, async_op=True))
        counts = [int(size) for size in sizes]
        taken = self.swap([packed] * num, counts)
        return [pickle.loads(each.numpy().tobytes()) for each in taken]

    def swap(self, given: Sequence[Tensor], sizes: Sequence[int]) -> Sequence[Tensor]:
        """Give every host a tensor, and take one of each.

        Args:
            given: For each host, one-dimensional and of one dtype.
            sizes: Elements of what each host gives to this one.

        Returns:
            What each gave: parts of one new tensor.

        Raises:
            HostError: As `Hosts.wait`.
        """
        taken = given[0].new_empty(sum(sizes))
        sent = torch.cat(list(given))
        counts = [each.numel() for each in given]
        self._wait(
            dist.all_to_all_single(
                taken, sent, list(sizes), counts, group=self._group, async_op=True
            )
        )
        parts: Sequence[Tensor] = taken.split(list(sizes))
        return parts

    def _wait(self, work: Any) -> None:
        self._hosts.wait(work, self._what)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else f"{text[:77]}..."
