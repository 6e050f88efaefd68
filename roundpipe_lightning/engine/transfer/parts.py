"""Parts: tensors that workers and user code make, and that others take, elsewhere perhaps.

```
worker 0      h = block(x) ●                             its own next call takes h as it is
download of 0              └─ h to the host ●            when the microbatch ends, if others read
upload of 1                                 └─ h to worker 1 ●
worker 1                                                     ○ await, next_block(h)
```

Places that reach each other's memory copy directly, and a place with another queue of the same
device takes the tensor itself, by an event.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from roundpipe_lightning.engine.device.base import CpuDevice, Device, strides_of_copy
from roundpipe_lightning.engine.device.events import Event
from roundpipe_lightning.engine.transfer.copy_queue import Job, Priority
from roundpipe_lightning.engine.transfer.worker_transfers import WaitedFor, WorkerTransfers


@dataclass(eq=False)
class Place:
    """Where a worker computes, or user code. All that compute in host memory share `HOST`.

    Attributes:
        transfers: What moves tensors to it and from it; None: it computes in host memory.
        versions: Versions of parameters when they were put here for a step.
    """

    device: Device
    transfers: WorkerTransfers | None = None
    versions: dict[nn.Parameter, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.is_host = self.transfers is None
        self.lock = threading.Lock()  # guards the parts that are made here

    def was_written(self, parameter: nn.Parameter) -> bool:
        """Return whether code has written into a parameter since it was put here."""
        return self.versions.get(parameter, parameter._version) != parameter._version

    def mark(self, name: str) -> Event | None:
        """Return the end of all compute launched here so far; None in host memory."""
        return None if self.is_host else self.device.mark_event(name)

    def await_event(self, event: Event) -> None:
        """Let compute launched here from now on wait."""
        assert self.transfers is not None, "host memory has no queues"
        self.transfers.await_event(event, WaitedFor.BOUNDARIES)

    def upload(self, tensor: Tensor) -> Tensor:
        """Return a host tensor's values here."""
        return self.device.upload(tensor)


HOST = Place(CpuDevice())


class Part:
    """A tensor that a place has made. Thread: any. Guarded by: the lock of its maker.

    Args:
        made: When its maker had made it; None: when all compute launched so far is done.
    """

    __slots__ = ("_copies", "_here", "_host", "_landed", "_made", "_maker")

    def __init__(self, tensor: Tensor, maker: Place, made: Event | None = None) -> None:
        self._here: Tensor | None = tensor
        self._maker, self._made = maker, made
        self._host: Tensor | None = tensor if maker.is_host else None
        self._landed: Event | None = None
        self._copies: dict[Place, tuple[Tensor, Event]] | None = None

    def on(self, place: Place) -> Tensor:
        """Return the tensor at a place, for compute launched there from now on."""
        here = self._here
        if here is not None and place is self._maker:
            return here
        if place.is_host:
            return self._on_host()
        maker = self._maker
        with maker.lock:
            here = self._here
            is_near = not maker.is_host and place.device.name == maker.device.name
            if here is None or not is_near:
                there, arrived = self._copy_to(place)
            elif place.device.queue_name != maker.device.queue_name:
                there, arrived = here, self._made_event()
            else:
                return here
        place.await_event(arrived)
        if there is here:
            place.device.share(there)
        return there

    def cut(self, take: Callable[[Tensor], Tensor]) -> Part:
        """Return a part of it."""
        assert self._here is not None, "nobody has sent it home yet"
        return Part(take(self._here), self._maker, self._made)

    def _on_host(self) -> Tensor:
        with self._maker.lock:
            host, landed = self._to_host(), self._landed
        if landed is not None:
            landed.wait()
        return host

    def send_home(self) -> None:
        """Begin its way to the host; its maker's memory is free when that has ended."""
        if not self._maker.is_host:
            with self._maker.lock:
                self._to_host()
                self._here = None

    def leave(self, place: Place) -> None:
        """Drop the copy at a place: what is launched there later does not read it."""
        if self._copies is not None:
            with self._maker.lock:
                self._copies.pop(place, None)

    def _made_event(self) -> Event:
        if self._made is None:
            self._made = self._maker.device.mark_event("a part is made")
        return self._made

    def _to_host(self) -> Tensor:
        if self._host is None:
            tensor, transfers = self._here, self._maker.transfers
            assert tensor is not None, "it is still there"
            assert transfers is not None, "it is on a device"
            flat = transfers.pool.take(tensor.nbytes).view(tensor.dtype)
            host = flat.as_strided(tensor.shape, strides_of_copy(tensor))
            self._landed = transfers.downloads.submit(
                _job([(host, tensor)], after=[self._made_event()])
            )
            self._host = host
        return self._host

    def _copy_to(self, place: Place) -> tuple[Tensor, Event]:
        if self._copies is None:
            self._copies = {}
        if place not in self._copies:
            maker, source, after = self._maker, self._here, []
            is_direct = (
                source is not None and not maker.is_host and place.device.reaches(maker.device)
            )
            if is_direct:
                after = [self._made_event()]
            else:
                source = self._to_host()
                after = [] if self._landed is None else [self._landed]
            assert source is not None
            assert place.transfers is not None, "it is on a device"
            with torch.inference_mode(mode=False):  # else the queue could not write into it
                flat = place.device.empty(torch.Size([source.numel()]), source.dtype)
                there = flat.as_strided(source.shape, strides_of_copy(source))
            job = _job([(there, source)], after=after, is_direct=is_direct)
            self._copies[place] = there, place.transfers.uploads.submit(job)
        return self._copies[place]


def _job(
    pieces: list[tuple[Tensor, Tensor]], *, after: list[Event], is_direct: bool = False
) -> Job:
    return Job(
        name="a boundary",
        priority=Priority.BOUNDARY,
        pieces=pieces,
        after=after,
        is_direct=is_direct,
    )


class JoinedParts:
    """A tensor of the whole batch, of which parts come one after the other.

    Args:
        join: Puts the values of the parts together, by their numbers.
    """

    def __init__(self, join: Callable[[dict[int, Tensor]], Tensor]) -> None:
        self._join = join
        self.parts: dict[int, Part] = {}

    def on(self, place: Place) -> Tensor:
        return self._join({index: self.parts[index].on(place) for index in sorted(self.parts)})

    def leave(self, place: Place) -> None:
        for part in self.parts.values():
            part.leave(place)
