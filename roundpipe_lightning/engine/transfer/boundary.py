"""Boundaries: tensors that a turn has made and that later turns take, on other workers perhaps.

Step M5 of docs/design.md.

```
turn on worker 0    h = block(x) ●                      ●  compute has come so far
download of 0                    └─ h to the host ●        landed
upload of 1                                       └─ h to worker 1 ●
turn on worker 1                                                   ○ await, next_block(h)
```

The download begins when the turn ends, and the upload as soon as the next worker is known. A
boundary whose takers are all on devices that reach the one that made it goes there by one copy, or
none where that is the same device, and not to the host as long as there is room.
"""

from __future__ import annotations

import contextlib
from typing import Protocol

import torch
from torch import Tensor

from roundpipe_lightning.engine.device.base import Device, strides_of_copy
from roundpipe_lightning.engine.device.events import Event
from roundpipe_lightning.engine.transfer.copy_queue import Job, Priority
from roundpipe_lightning.engine.transfer.worker_transfers import WaitedFor, WorkerTransfers


class TransferEndpoint(Protocol):
    """A worker, as boundaries see it."""

    @property
    def device(self) -> Device:
        """Its device."""

    @property
    def transfers(self) -> WorkerTransfers | None:
        """Its transfers; None if it computes in host memory."""


class BoundaryTensor:
    """A tensor in flight. Its methods are called by the thread of its microbatch.

    Args:
        maker: The worker whose compute has made it; None if it is on the host.
        keeps: Whether it stays where it is until somebody else asks for it.
        made: When its maker had made it; None: when all compute launched so far is done.
    """

    def __init__(
        self,
        tensor: Tensor,
        maker: TransferEndpoint | None,
        *,
        keeps: bool = False,
        made: Event | None = None,
    ) -> None:
        self.num_bytes = tensor.nbytes
        self._maker = maker
        self._made = made
        self._here: Tensor | None = tensor.detach()
        self._host: Tensor | None = None
        self._landed: Event | None = None
        self._arriving: tuple[TransferEndpoint, Tensor, Event] | None = None
        if maker is None or maker.device.shares_host_memory:
            self._host = self._here
        elif not keeps:
            self._to_host()
            self._here = None

    def _to_host(self) -> Tensor:
        """Begin its way to the host, unless it is under way; return what will have its values."""
        if self._host is None:
            tensor, maker = self._here, self._maker
            assert tensor is not None, "it is still there"
            assert maker is not None, "a worker has made it"
            assert maker.transfers is not None, "the worker moves it"
            flat = maker.transfers.pool.take(tensor.nbytes).view(tensor.dtype)
            host = flat.as_strided(tensor.shape, strides_of_copy(tensor))
            made = self._made or maker.device.mark_event("a boundary is made")
            self._landed = maker.transfers.downloads.submit(
                Job(
                    name="a boundary",
                    priority=Priority.BOUNDARY,
                    pieces=[(host, tensor)],
                    after=[made],
                )
            )
            self._host = host  # now that it will be written
        return self._host

    def release(self) -> None:
        self._here = self._host = self._arriving = None

    def take(self, worker: TransferEndpoint | None) -> Tensor:
        tensor = self.on(worker)
        self.release()
        return tensor

    def send_to(self, worker: TransferEndpoint) -> None:
        """Begin to bring it to a worker that will ask for it next.

        A device without memory, or one that is gone, is not that of the calling thread, whose error
        would name the wrong one: it shows when the worker asks.
        """
        if worker.transfers is not None and not self._is_here(worker):
            with contextlib.suppress(RuntimeError):
                self._send(worker, worker.transfers)

    def _send(self, worker: TransferEndpoint, transfers: WorkerTransfers) -> tuple[Tensor, Event]:
        """Return what will have its values on a worker, and when."""
        if self._arriving is None or self._arriving[0] is not worker:
            source, after = self._source_for(worker)
            flat = worker.device.empty(torch.Size([source.numel()]), source.dtype)
            there = flat.as_strided(source.shape, strides_of_copy(source))
            arrived = transfers.uploads.submit(
                Job(
                    name="a boundary",
                    priority=Priority.BOUNDARY,
                    pieces=[(there, source)],
                    after=after,
                    is_direct=source is self._here,
                )
            )
            self._arriving = (worker, there, arrived)
        return self._arriving[1:]

    def _is_here(self, worker: TransferEndpoint) -> bool:
        if self._here is None or self._maker is None:
            return False
        return worker is self._maker or worker.device.name == self._maker.device.name

    def _source_for(self, worker: TransferEndpoint) -> tuple[Tensor, list[Event]]:
        maker = self._maker
        if self._here is not None and maker is not None and worker.device.reaches(maker.device):
            # The compute that has made it is not that of the worker it goes to.
            self._made = self._made or maker.device.mark_event("a boundary is made")
            return self._here, [self._made]
        return self._to_host(), [] if self._landed is None else [self._landed]

    def on(self, worker: TransferEndpoint | None) -> Tensor:
        """Return the tensor on a worker, or on the host, for compute launched from now on."""
        if worker is not None and self._here is not None and self._is_here(worker):
            return self._here.detach()
        if worker is not None and worker.transfers is not None:
            (there, arrived), self._arriving = self._send(worker, worker.transfers), None
            worker.transfers.await_event(arrived, WaitedFor.BOUNDARIES)
            return there.detach()
        host = self._to_host()
        if self._landed is None:
            return host.detach()
        self._landed.wait()
        return host.clone()  # others take it from there, and a block may write into what it gets
