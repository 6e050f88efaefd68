"""The one place where the engine meets a device.

A device works off three queues, each in its order: *compute*, *upload* and *download*.

```
compute     ■■■■■■■■■■■■■■■│■■■■■■■■■■■■■■■■■■    what threads launch while it is active
                 mark_event ●      ○ await_event
upload      ── copy ── copy ──────▶●               `copy(..., queue=UPLOAD)`
download                        ── copy ──▶        `copy(..., queue=DOWNLOAD, after=[●])`
```

`copy`, `mark_event` and `await_event` are what transfers are made of (docs/engine.md). `upload`,
`download` and `bring` are for single tensors of user code.
Three backends stand behind the facade:

- `CpuDevice`: computes where the model lives, so nothing is copied. Real results, the default.
- `AcceleratorDevice` (`device/accelerator.py`): CUDA or ROCm through `torch.accelerator`.
- `EmulatedDevice` (`emulation/server.py`): CPU tensors that carry a device's tag and refuse to mix.

A worker owns one device; several workers may share the hardware behind it.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import Enum
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from roundpipe_lightning.engine.device.events import DoneEvent, Event


class CopyQueue(Enum):
    """A device's queues for copies."""

    UPLOAD = "upload"  # to the device: from the host, or from another device
    DOWNLOAD = "download"  # from the device to the host


class Device(ABC):
    """A place where a worker computes."""

    name: str  # what errors and timelines call it, e.g. `cuda:1`
    torch_device: torch.device  # what `self.device` says inside a view of the user's module
    # whether host tensors can be used in place. Then uploads and downloads are the identity, and
    # gradients are collected per microbatch, in order.
    shares_host_memory: bool = False
    # devices of one name and one queue of it order their compute by themselves
    queue_name: str = ""
    chunk_bytes: int = 2**24  # longest copy that a more urgent one cannot overtake
    can_compile: bool = True  # whether `torch.compile` works for its tensors
    # gives so many page-locked bytes, through which uploads of other memory go: they would stop the
    # host
    staging: Callable[[int], Tensor] | None = None

    def upload(self, tensor: Tensor, wait: Callable[[Event], None] | None = None) -> Tensor:
        """Return a host tensor's values here, without a graph.

        The copy is made beside compute, which waits for it by `wait`, if given. A page-locked
        source must not change before it has been made.
        """
        must_stage = self.staging is not None and not self.is_page_locked(tensor)
        return self._copied(self.snapshot(tensor) if must_stage else tensor, wait=wait)

    def snapshot(self, tensor: Tensor) -> Tensor:
        """Return a copy of a host tensor, which may change before an upload has read it."""
        if self.staging is None or tensor.layout is not torch.strided:
            return tensor.detach().clone()
        flat = self.staging(tensor.nbytes).view(tensor.dtype)
        return flat.as_strided(tensor.shape, strides_of_copy(tensor)).copy_(tensor.detach())

    def is_page_locked(self, tensor: Tensor) -> bool:  # noqa: ARG002 - for others
        """Return whether copies of a host tensor to here do not stop the host."""
        return False

    @abstractmethod
    def download(self, tensor: Tensor) -> Tensor:
        """Return a tensor's values on the host, without a graph; waits for them."""

    @abstractmethod
    def holds(self, tensor: Tensor) -> bool:
        """Return whether an operation here can use the tensor as it is."""

    def bring(self, tensor: Tensor, source: Device) -> Tensor:
        """Bring a tensor of another device, or of the host, to here, differentiably.

        `Tensor.to` between devices would let the compute of each wait for the other's.
        """
        brought: Tensor = _Brought.apply(tensor, source, self)  # type: ignore[no-untyped-call]
        return brought

    def _received(self, tensor: Tensor, source: Device) -> Tensor:
        if source.shares_host_memory:
            # The host waits: user code may write into the source next, a weight of a manual step.
            return self.upload(tensor, wait=lambda event: event.wait())
        if tensor.layout is not torch.strided:
            return self.upload(source.download(tensor))
        return self._copied(tensor, after=[source.mark_event("a tensor is made")])

    def _copied(
        self,
        tensor: Tensor,
        *,
        after: Sequence[Event] = (),
        wait: Callable[[Event], None] | None = None,
    ) -> Tensor:
        flat = self.empty(torch.Size([tensor.numel()]), tensor.dtype)
        there = flat.as_strided(tensor.shape, strides_of_copy(tensor))
        done = self.copy(there, tensor.detach(), queue=CopyQueue.UPLOAD, after=after)
        (wait or self.await_event)(done)
        kept = [tensor]  # until the copy has been made
        done.when_done(kept.clear)
        return there

    def close(self) -> None:
        """Give back threads and streams. The device can be used again."""

    def allocate(self, num_bytes: int) -> Tensor:
        """Return a flat buffer of bytes in this device's memory, for slots and staging.

        Whoever reuses it orders the uses by events.
        """
        return self.empty(torch.Size([num_bytes]), torch.uint8)

    @abstractmethod
    def empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return a tensor that the upload queue is to fill, and compute to read after that.

        When it is freed, its memory is used again only after all compute launched until then.
        """

    def copy(
        self, dst: Tensor, src: Tensor, *, queue: CopyQueue, after: Sequence[Event] = ()
    ) -> Event:
        """Give one copy to a queue, after those before it and after some events; return its end.

        One of the two tensors, of one shape and dtype, is on this device. Both must stay as they
        are until the event that is returned is done. This default copies at once, in the calling
        thread, after waiting for the events.
        """
        for event in after:
            event.wait()
        with torch.no_grad():
            dst.copy_(src)
        return DoneEvent(f"{queue.value} on {self.name}")

    def await_event(self, event: Event) -> None:
        """Let compute that the calling thread launches from now on wait for an event."""
        event.issued().wait()

    def mark_event(self, name: str) -> Event:
        """Return an event that is done when all compute launched so far is done."""
        return DoneEvent(name)

    def reaches(self, other: Device) -> bool:
        """Return whether tensors of another device come here without the host, by one copy at most.

        `copy` to here then takes them as sources.
        """
        return self.name == other.name

    def with_own_queue(self) -> Device:
        """Return the same device with a compute queue of its own, where it can have several."""
        return self

    def share(self, tensor: Tensor) -> None:
        """Note that compute of this queue uses a tensor that another queue of the device has made.

        Its memory is used again only after what this queue has launched until the tensor is freed.
        """

    def put(self, parameter: nn.Parameter, values: Tensor) -> Tensor:
        """Let a parameter have values here; return what is to be put back: those it had."""
        before = parameter.data
        parameter.data = values
        return before

    def put_back(self, parameter: nn.Parameter, before: Tensor) -> None:
        parameter.data = before

    def has_spare_memory(self) -> bool:
        return True

    def activate(self) -> contextlib.AbstractContextManager[Any]:
        """Make this the device on which the calling thread launches its work."""
        return contextlib.nullcontext()

    def thread_context(self) -> contextlib.AbstractContextManager[Any]:
        """Prepare a thread for work on this device and others of its kind."""
        return contextlib.nullcontext()

    def expect_threads(self, num_threads: int) -> None:
        """Prepare for so many threads of microbatches that compute here."""

    def generators(self) -> tuple[torch.Generator, ...]:
        """Return the process-wide random generators that operations here draw from."""
        return (torch.default_generator,)

    def pin(self, buffer: Tensor) -> None:
        """Page-lock a host buffer, where that makes copies faster."""

    def unpin(self, buffer: Tensor) -> None:
        """Undo `pin`."""

    @property
    def page_locked_bytes(self) -> int:
        return 0

    def synchronize(self) -> None:
        """Wait for all work here. Called between steps only."""

    def start_clock(self) -> None:
        """Begin the time scale of `mark` and `seconds`."""
        self._clock_start = perf_counter()

    def mark(self) -> Any:
        """Note the moment at which all work launched so far is done."""
        return perf_counter()

    def await_mark(self, mark: Any) -> None:
        """Wait until a mark's moment has come."""

    def seconds(self, mark: Any) -> float:
        """Return a mark's time since `start_clock`, when its moment has come."""
        return float(mark) - self._clock_start

    def peak_bytes(self) -> int | None:
        """Return the most memory that was in use since the start; None where nobody counts."""
        return None

    def reset_peak_bytes(self) -> None:
        """Begin to count `peak_bytes` anew."""


class _Brought(torch.autograd.Function):
    """A copy on another device, whose gradient takes the same way back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, source: Device, target: Device) -> Tensor:
        ctx.devices = source, target
        return target._received(tensor, source)  # noqa: SLF001 - the same module

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        source, target = ctx.devices
        return source.bring(gradient, target), None, None


def strides_of_copy(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides of a copy without gaps, as `Tensor.to` makes it."""
    if tensor.is_contiguous():
        return tensor.stride()
    form = torch.empty_strided(tensor.shape, tensor.stride(), device="meta")
    return torch.empty_like(form).stride()


class CpuDevice(Device):
    """A worker on the processor: host memory is its memory."""

    shares_host_memory = True

    def __init__(self, index: int = 0) -> None:
        self.name = f"cpu:{index}"
        self.torch_device = torch.device("cpu")

    def upload(self, tensor: Tensor, wait: object = None) -> Tensor:  # noqa: ARG002 - it is there
        return tensor.detach()

    def download(self, tensor: Tensor) -> Tensor:
        return tensor.detach()

    def holds(self, tensor: Tensor) -> bool:  # noqa: ARG002 - the facade's signature
        return True

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def _received(self, tensor: Tensor, source: Device) -> Tensor:
        return source.download(tensor)
