"""A worker on an accelerator: CUDA, ROCm, or whatever `torch.accelerator` finds.

Compute is the device's default stream, which all threads share, so that the order of launches is
the order of execution, a tensor that user code keeps may be used in any later turn, and memory that
is given back is free at once. Each worker has streams of its own for its copies.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import warnings
from collections.abc import Sequence
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

from roundpipe_lightning.engine.device.base import CopyQueue, Device
from roundpipe_lightning.engine.device.events import Callback, Event
from roundpipe_lightning.planning.cost.traffic import MOST_IN_USE


class CompletionThread:
    """Waits for the events of one stream in their order, and calls back.

    Its thread sleeps in the driver. Without it every transfer queue would have to ask again and
    again whether what its copies wait for has been computed.

    Args:
        name: Of its thread.
    """

    def __init__(self, name: str) -> None:
        self._watched: queue.SimpleQueue[tuple[StreamEvent, Callback] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def watch(self, event: StreamEvent, callback: Callback) -> None:
        """Call back when the event has happened, or can no longer happen."""
        self._watched.put((event, callback))

    def _serve(self) -> None:
        while (watched := self._watched.get()) is not None:
            event, callback = watched
            # A failed device raises in its next use, which the callback makes.
            with contextlib.suppress(RuntimeError):
                event.wait()
            callback()
            del watched, event, callback

    def close(self, *, timeout_seconds: float = 10.0) -> None:
        """End the thread; one that hangs in the driver is left behind, a daemon."""
        self._watched.put(None)
        self._thread.join(timeout_seconds)


class StreamEvent(Event):
    """A moment on an accelerator's stream.

    Args:
        raw: The backend's event, recorded.
        name: For messages.
        completions: Calls back for the events of the stream on which it was recorded.
    """

    def __init__(self, raw: Any, *, name: str, completions: CompletionThread) -> None:
        self.raw = raw
        self.name = name
        self._completions = completions

    @property
    def is_done(self) -> bool:
        return bool(self.raw.query())

    def wait(self) -> None:
        self.raw.synchronize()

    def when_done(self, callback: Callback) -> None:
        """Call back once the device has come to it, from the completion thread."""
        self._completions.watch(self, callback)


_FOR_ALL_DEVICES = 1  # cudaHostRegisterPortable


class AcceleratorDevice(Device):
    """A worker on an accelerator.

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
        self._completions: CompletionThread | None = None

    @property
    def _backend(self) -> Any:
        return torch.get_device_module(self.torch_device)

    def upload(self, tensor: Tensor) -> Tensor:
        """Copy a host tensor to here; asynchronous where the host memory is page-locked.

        A page-locked source must not change before the copy has been made.
        """
        return tensor.detach().to(self.torch_device, non_blocking=True)

    def download(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to("cpu")

    def holds(self, tensor: Tensor) -> bool:
        """Return whether the tensor is in this device's memory, or a host number."""
        return tensor.device == self.torch_device or (
            tensor.dim() == 0 and tensor.device.type == "cpu"
        )

    def bring(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.torch_device)

    # ------------------------------------------------------------------------------- transfers

    def close(self) -> None:
        with self._lock:
            completions, self._completions = self._completions, None
            self._streams.clear()
        if completions is not None:
            completions.close()

    def _stream(self, use: CopyQueue | torch.device) -> Any:
        """Return a stream of this device's queue, or one of another device for copies from it."""
        with self._lock:
            if use not in self._streams:
                device = self.torch_device if isinstance(use, CopyQueue) else use
                self._streams[use] = self._backend.Stream(device)
            return self._streams[use]

    def reaches(self, other: Device) -> bool:
        """Ask the driver; where it says no, copies go through the host."""
        return reaches(self.torch_device, other.torch_device)

    def _recorded(self, stream: Any, name: str) -> StreamEvent:
        # Of CUDA only the backend's own class can let a waiting thread sleep.
        kind = self._backend.Event
        raw = kind(blocking=True) if self.torch_device.type == "cuda" else kind()
        raw.record(stream)
        with self._lock:
            if self._completions is None:
                self._completions = CompletionThread(f"roundpipe-completion-{self.name}")
            return StreamEvent(raw, name=name, completions=self._completions)

    def allocate(self, num_bytes: int) -> Tensor:
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
        with self.activate():
            return self._recorded(self._backend.default_stream(self.torch_device), name)

    # --------------------------------------------------------------------------------- compute

    def activate(self) -> contextlib.AbstractContextManager[Any]:
        context: contextlib.AbstractContextManager[Any] = self._backend.stream(
            self._backend.default_stream(self.torch_device)
        )
        return context

    def generators(self) -> tuple[torch.Generator, ...]:
        self._backend.init()  # before it there are none
        return (torch.default_generator, self._backend.default_generators[self.torch_device.index])

    def pin(self, buffer: Tensor) -> None:
        """Register the buffer with the driver: exactly its bytes, not the next power of two.

        It must have its pages for itself, see `device/host_memory.py`.
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
        """Make this device the driver's current one in the body."""
        context: contextlib.AbstractContextManager[Any] = self._backend.device(self.torch_device)
        return context

    def _forget_error(self) -> None:
        """Raise and catch the driver's pending error here: else the next launch raises it."""
        with contextlib.suppress(RuntimeError):
            torch.empty(1, device=self.torch_device).fill_(0.0)

    def unpin(self, buffer: Tensor) -> None:
        pointer = buffer.data_ptr()
        if pointer in self._pinned:
            del self._pinned[pointer]
            with self._current():
                torch.cuda.cudart().cudaHostUnregister(pointer)

    @property
    def page_locked_bytes(self) -> int:
        return sum(self._pinned.values())

    def has_spare_memory(self) -> bool:
        """Return whether a fifth was never in use; not in the first step, whose peak is to come."""
        if self._num_steps < 2:
            return False
        total = self._backend.get_device_properties(self.torch_device).total_memory
        fraction = getattr(self._backend, "get_per_process_memory_fraction", None)
        if fraction is not None:
            total *= fraction(self.torch_device)
        peak = self.peak_bytes()
        return peak is not None and peak < MOST_IN_USE * total

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.torch_device)

    def start_clock(self) -> None:
        self.synchronize()
        self._num_steps += 1
        super().start_clock()
        self._base = self.mark()

    def mark(self) -> Any:
        with self.activate():
            event = torch.Event(self.torch_device, enable_timing=True)
            event.record()
        return event

    def await_mark(self, mark: Any) -> None:
        mark.synchronize()

    def seconds(self, mark: Any) -> float:
        return float(self._base.elapsed_time(mark)) / 1e3

    def peak_bytes(self) -> int | None:
        return int(torch.accelerator.max_memory_allocated(self.torch_device))

    def reset_peak_bytes(self) -> None:
        torch.accelerator.reset_peak_memory_stats(self.torch_device)


def reaches(here: torch.device, there: torch.device) -> bool:
    """Return whether one device copies from another one's memory; from its own it does."""
    if here == there or here.type != "cuda" or there.type != "cuda":
        return here == there
    return torch.cuda.can_device_access_peer(here, there)


def all_reach(devices: Sequence[torch.device]) -> bool:
    """Whether each of some devices copies from every other one's memory; no where none is."""
    return bool(devices) and all(reaches(here, there) for here, there in permutations(devices, 2))
