"""The one place where the engine meets a device.

A device works off three queues, each in its order: *compute*, *upload* and *download*.

```
compute     ■■■■■■■■■■■■■■■│■■■■■■■■■■■■■■■■■■    what threads launch while it is active
                 mark_event ●      ○ await_event
upload      ── copy ── copy ──────▶●               `copy(..., queue=UPLOAD)`
download                        ── copy ──▶        `copy(..., queue=DOWNLOAD, after=[●])`
```

`copy`, `mark_event` and `await_event` are what transfers are made of (docs/engine.md). `upload`,
`download` and `move` are for single tensors of user code: they are part of the compute queue. Three
backends stand behind the facade:

- `CpuDevice`: computes where the model lives, so nothing is copied. Real results, the default.
- `AcceleratorDevice`: CUDA or ROCm through `torch.accelerator`. Compute is the device's default
  stream, which all threads share, so that the order of launches is the order of execution, a tensor
  that user code keeps may be used in any later turn, and memory that is given back is free at once.
  Each worker has streams of its own for its copies.
- `EmulatedDevice` (`engine/emulated.py`): CPU tensors that carry a device's tag and refuse to mix.

A worker owns one device; several workers may share the hardware behind it.
"""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from roundpipe_lightning.engine.events import DoneEvent, Event
from roundpipe_lightning.engine.streams import CompletionWatcher, StreamEvent

_FOR_ALL_DEVICES = 1  # cudaHostRegisterPortable
_MOST_IN_USE = 0.8  # of an accelerator's memory, for tensors to stay that need not


class CopyQueue(Enum):
    """A device's queues for copies."""

    UPLOAD = "upload"
    """To the device: from the host, or from another device."""

    DOWNLOAD = "download"
    """From the device to the host."""


class Device(ABC):
    """A place where a worker computes.

    Attributes:
        name: What errors and timelines call it, e.g. `cuda:1`.
        torch_device: What `self.device` says inside a view of the user's module.
        shares_host_memory: Whether host tensors can be used in place. Then uploads and downloads
            are the identity, and gradients are collected per microbatch, in order.
        can_compile: Whether `torch.compile` works for its tensors.
        chunk_bytes: Longest copy that a more urgent one cannot overtake.
    """

    name: str
    torch_device: torch.device
    shares_host_memory: bool = False
    chunk_bytes: int = 2**24
    can_compile: bool = True

    @abstractmethod
    def upload(self, tensor: Tensor) -> Tensor:
        """Return a host tensor's values here, without a graph."""

    @abstractmethod
    def download(self, tensor: Tensor) -> Tensor:
        """Return a tensor's values on the host, without a graph; waits for them."""

    @abstractmethod
    def holds(self, tensor: Tensor) -> bool:
        """Say whether the tensor can be used by an operation here as it is."""

    @abstractmethod
    def move(self, tensor: Tensor) -> Tensor:
        """Bring a tensor from anywhere to here, differentiably."""

    # ------------------------------------------------------------------------------- transfers

    def close(self) -> None:
        """Give back threads and streams. The device can be used again."""

    def allocate(self, num_bytes: int) -> Tensor:
        """Return a flat buffer of bytes in this device's memory, for slots and staging.

        Whoever reuses it orders the uses by events.
        """
        return self.upload(torch.empty(num_bytes, dtype=torch.uint8))

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return a tensor that the upload queue is to fill, and compute to read after that.

        When it is freed, its memory is used again only after all compute launched until then.
        """
        return self.upload(torch.empty(shape, dtype=dtype))

    def copy(
        self,
        dst: Tensor,
        src: Tensor,
        *,
        queue: CopyQueue,
        after: Sequence[Event] = (),
    ) -> Event:
        """Give one copy to a queue. It is made after the copies before it and after some events.

        Both tensors must stay as they are until the event that is returned is done. This default
        copies at once, in the calling thread, after waiting for the events.

        Args:
            dst: Where to.
            src: Of the same shape and dtype; one of the two is on this device.
            queue: Which queue.
            after: What it waits for.

        Returns:
            The end of the copy.
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
        """Say whether tensors of another device come here without the host, by one copy at most.

        `copy` to here then takes them as sources.
        """
        return self.name == other.name

    def has_spare_memory(self) -> bool:
        """Say whether tensors may stay here that could also wait on the host."""
        return True

    # --------------------------------------------------------------------------------- compute

    def activate(self) -> contextlib.AbstractContextManager[Any]:
        """Make this the device on which the calling thread launches its work."""
        return contextlib.nullcontext()

    def thread_context(self) -> contextlib.AbstractContextManager[Any]:
        """Prepare a thread for work on this device and others of its kind."""
        return contextlib.nullcontext()

    def generators(self) -> tuple[torch.Generator, ...]:
        """Return the process-wide random generators that operations here draw from."""
        return (torch.default_generator,)

    def pin(self, buffer: Tensor) -> None:
        """Page-lock a host buffer, where that makes copies faster."""

    def unpin(self, buffer: Tensor) -> None:
        """Undo `pin`."""

    @property
    def page_locked_bytes(self) -> int:
        """Bytes of host memory that are page-locked for copies to here."""
        return 0

    def synchronize(self) -> None:
        """Wait for all work here. Called between steps only."""

    def start_clock(self) -> None:
        """Begin the time scale of `mark` and `seconds`."""
        self._clock_start = time.perf_counter()

    def mark(self) -> Any:
        """Note the moment at which all work launched so far is done."""
        return time.perf_counter()

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

    def download_all(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Download several tensors of this device, in one copy per dtype.

        Returns:
            Host tensors of the same shapes, views of one flat buffer per dtype.
        """
        groups: dict[torch.dtype, list[int]] = {}
        for index, tensor in enumerate(tensors):
            groups.setdefault(tensor.dtype, []).append(index)
        results: dict[int, Tensor] = {}
        for indices in groups.values():
            flat = self.download(torch.cat([tensors[i].detach().reshape(-1) for i in indices]))
            parts = flat.split([tensors[i].numel() for i in indices])
            for i, part in zip(indices, parts, strict=True):
                results[i] = part.view(tensors[i].shape)
        return [results[i] for i in range(len(tensors))]


class CpuDevice(Device):
    """A worker on the processor: host memory is its memory.

    Args:
        index: Number among the CPU workers, for the name.
    """

    shares_host_memory = True

    def __init__(self, index: int = 0) -> None:
        self.name = f"cpu:{index}"
        self.torch_device = torch.device("cpu")

    def upload(self, tensor: Tensor) -> Tensor:
        """Return the tensor itself, without its graph."""
        return tensor.detach()

    def download(self, tensor: Tensor) -> Tensor:
        """Return the tensor itself, without its graph."""
        return tensor.detach()

    def holds(self, tensor: Tensor) -> bool:  # noqa: ARG002 - the facade's signature
        """Every tensor of a CPU run is here."""
        return True

    def move(self, tensor: Tensor) -> Tensor:
        """Return the tensor itself."""
        return tensor

    def download_all(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors themselves, without their graphs."""
        return [tensor.detach() for tensor in tensors]


class AcceleratorDevice(Device):
    """A worker on an accelerator: CUDA, ROCm, or whatever `torch.accelerator` finds.

    Args:
        device: For example `torch.device("cuda", 1)`; an index is required.
    """

    def __init__(self, device: torch.device) -> None:
        if device.index is None:
            raise ValueError(f"device={device} needs an index, for example '{device.type}:0'.")
        self.name = str(device)
        self.torch_device = device
        self._pinned: dict[int, int] = {}
        self._told_of_locks = False
        self._num_steps = 0
        self._lock = threading.Lock()
        self._streams: dict[CopyQueue | torch.device, Any] = {}
        self._watcher: CompletionWatcher | None = None

    @property
    def _backend(self) -> Any:
        return torch.get_device_module(self.torch_device)

    def upload(self, tensor: Tensor) -> Tensor:
        """Copy a host tensor to here; asynchronous where the host memory is page-locked.

        A page-locked source must not change before the copy has been made.
        """
        return tensor.detach().to(self.torch_device, non_blocking=True)

    def download(self, tensor: Tensor) -> Tensor:
        """Copy to the host and wait for the copy."""
        return tensor.detach().to("cpu")

    def holds(self, tensor: Tensor) -> bool:
        """Say whether the tensor is in this device's memory, or a host number."""
        return tensor.device == self.torch_device or (
            tensor.dim() == 0 and tensor.device.type == "cpu"
        )

    def move(self, tensor: Tensor) -> Tensor:
        """Copy from any device, differentiably."""
        return tensor.to(self.torch_device)

    # ------------------------------------------------------------------------------- transfers

    def close(self) -> None:
        """End the watcher's thread and give the streams back."""
        with self._lock:
            watcher, self._watcher = self._watcher, None
            self._streams.clear()
        if watcher is not None:
            watcher.close()

    def _stream(self, use: CopyQueue | torch.device) -> Any:
        """Return a stream of this device's queue, or one of another device for copies from it."""
        with self._lock:
            if use not in self._streams:
                device = self.torch_device if isinstance(use, CopyQueue) else use
                self._streams[use] = self._backend.Stream(device)
            return self._streams[use]

    def reaches(self, other: Device) -> bool:
        """Ask the driver; where it says no, copies go through the host."""
        here, there = self.torch_device, other.torch_device
        if here == there or here.type != "cuda" or there.type != "cuda":
            return here == there
        return torch.cuda.can_device_access_peer(here, there)

    def _recorded(self, stream: Any, name: str) -> StreamEvent:
        # Of CUDA only the backend's own class can let a waiting thread sleep.
        kind = self._backend.Event
        raw = kind(blocking=True) if self.torch_device.type == "cuda" else kind()
        raw.record(stream)
        with self._lock:
            if self._watcher is None:
                self._watcher = CompletionWatcher(f"roundpipe-watcher-{self.name}")
            return StreamEvent(raw, name=name, watcher=self._watcher)

    def allocate(self, num_bytes: int) -> Tensor:
        """Return a flat buffer of bytes."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.torch_device)

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return a tensor of the upload stream's memory, which compute will read."""
        with self._backend.stream(self._stream(CopyQueue.UPLOAD)):
            tensor = torch.empty(shape, dtype=dtype, device=self.torch_device)
        tensor.record_stream(self._backend.default_stream(self.torch_device))
        return tensor

    def copy(
        self, dst: Tensor, src: Tensor, *, queue: CopyQueue, after: Sequence[Event] = ()
    ) -> Event:
        """Give a copy to a stream. It does not wait for the host where that is page-locked."""
        stream = self._stream(queue)
        with contextlib.ExitStack() as contexts:
            if src.device not in (self.torch_device, dst.device) and src.device.type != "cpu":
                # PyTorch copies on the present stream of the source's device, in order with that
                # of the target's: that is not to be the one on which the source's device computes.
                contexts.enter_context(self._backend.stream(self._stream(src.device)))
            contexts.enter_context(self._backend.stream(stream))
            contexts.enter_context(torch.no_grad())
            for event in after:
                self._let_wait(stream, event)
            dst.copy_(src, non_blocking=True)
            return self._recorded(stream, f"{queue.value} on {self.name}")

    def await_event(self, event: Event) -> None:
        """Let the device's default stream wait; the host waits until the copy has been issued."""
        self._let_wait(self._backend.default_stream(self.torch_device), event)

    @staticmethod
    def _let_wait(stream: Any, event: Event) -> None:
        issued = event.issued()
        if isinstance(issued, StreamEvent):
            stream.wait_event(issued.raw)
        else:
            issued.wait()

    def mark_event(self, name: str) -> Event:
        """Record an event on the device's default stream."""
        with self.activate():
            return self._recorded(self._backend.default_stream(self.torch_device), name)

    # --------------------------------------------------------------------------------- compute

    def activate(self) -> contextlib.AbstractContextManager[Any]:
        """Make this the thread's current device, and its default stream the current one."""
        context: contextlib.AbstractContextManager[Any] = self._backend.stream(
            self._backend.default_stream(self.torch_device)
        )
        return context

    def generators(self) -> tuple[torch.Generator, ...]:
        """Return the host's generator and this device's."""
        self._backend.init()  # before it there are none
        return (torch.default_generator, self._backend.default_generators[self.torch_device.index])

    def pin(self, buffer: Tensor) -> None:
        """Register the buffer with the driver: exactly its bytes, not the next power of two.

        It must have its pages for itself, see `engine/pages.py`.
        """
        if buffer.numel() == 0 or self.torch_device.type != "cuda":
            return
        with self._current():
            runtime = torch.cuda.cudart()
            code = int(runtime.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, _FOR_ALL_DEVICES))
        if not code:
            self._pinned[buffer.data_ptr()] = buffer.nbytes
            return
        self._forget_error()
        if not self._told_of_locks:
            self._told_of_locks = True
            warnings.warn(
                f"Page-locking {buffer.nbytes / 2**30:.2f} GiB of host memory failed (code "
                f"{code}); copies to {self.name} will be slower. Raise the limit of locked memory "
                "(`ulimit -l`).",
                stacklevel=2,
            )

    def _current(self) -> contextlib.AbstractContextManager[Any]:
        """Have the driver's calls of the body made for this device, not for the first one."""
        context: contextlib.AbstractContextManager[Any] = self._backend.device(self.torch_device)
        return context

    def _forget_error(self) -> None:
        """Have a refusal raised and caught here: the driver tells whoever launches next of it."""
        with contextlib.suppress(RuntimeError):
            torch.empty(1, device=self.torch_device).fill_(0.0)

    def unpin(self, buffer: Tensor) -> None:
        """Give the registration back."""
        pointer = buffer.data_ptr()
        if pointer in self._pinned:
            del self._pinned[pointer]
            with self._current():
                torch.cuda.cudart().cudaHostUnregister(pointer)

    @property
    def page_locked_bytes(self) -> int:
        """Bytes of host memory that were registered with the driver."""
        return sum(self._pinned.values())

    def has_spare_memory(self) -> bool:
        """Say whether a fifth was never in use; not in the first step, whose peak is to come."""
        if self._num_steps < 2:
            return False
        total = self._backend.get_device_properties(self.torch_device).total_memory
        fraction = getattr(self._backend, "get_per_process_memory_fraction", None)
        if fraction is not None:
            total *= fraction(self.torch_device)
        peak = self.peak_bytes()
        return peak is not None and peak < _MOST_IN_USE * total

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.accelerator.synchronize(self.torch_device)

    def start_clock(self) -> None:
        """Begin the time scale at a moment when the device is idle."""
        self.synchronize()
        self._num_steps += 1
        super().start_clock()
        self._base = self.mark()

    def mark(self) -> Any:
        """Record a timing event on the device's stream."""
        with self.activate():
            event = torch.Event(self.torch_device, enable_timing=True)
            event.record()
        return event

    def await_mark(self, mark: Any) -> None:
        """Wait for the event."""
        mark.synchronize()

    def seconds(self, mark: Any) -> float:
        """Return the device's own time between the clock's start and the mark."""
        return float(self._base.elapsed_time(mark)) / 1e3

    def peak_bytes(self) -> int | None:
        """Return the allocator's high-water mark."""
        return int(torch.accelerator.max_memory_allocated(self.torch_device))

    def reset_peak_bytes(self) -> None:
        """Set the allocator's high-water mark to what is in use."""
        torch.accelerator.reset_peak_memory_stats(self.torch_device)
