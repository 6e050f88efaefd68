"""A worker on an accelerator: whatever `torch.accelerator` finds.

Compute is the stream that is current where the device is made (the default one), which all threads
share, so that the order of launches is the order of execution, a tensor that user code keeps may be
used in any later turn, and memory that is given back is free at once. Each worker has streams of
its own for its copies.

What PyTorch has for every kind of device is asked of `torch.accelerator`, `torch.Stream` and
`torch.Event`. What a kind may lack is asked for once (`Runtime`): without streams everything is
part of one queue; without figures of memory nobody counts. What only CUDA and ROCm have is in
`CudaRuntime`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

from roundpipe_lightning.engine.device.base import CopyQueue, Device
from roundpipe_lightning.engine.device.events import Callback, DoneEvent, Event
from roundpipe_lightning.planning.cost.traffic import MOST_IN_USE
from roundpipe_lightning.planning.model.hardware import WORKSPACE_BYTES


def _ability(attempt: Callable[[Any], None]) -> functools.cached_property[bool]:
    """Whether a backend does what is tried; PyTorch's word for "not" is RuntimeError."""

    def can(runtime: Runtime) -> bool:
        try:
            attempt(runtime)
        except (RuntimeError, AttributeError, TypeError):
            return False
        return True

    return functools.cached_property(can)


class Runtime:
    """What an accelerator can do. It asks that device only: no other one gets a context."""

    new_stream: Callable[[torch.device], Any] = torch.Stream  # makes a stream of a device
    new_event: Callable[[torch.device], Any] = torch.Event  # makes an event of a device
    # returns the calling thread's stream of a device
    current_stream: Callable[[torch.device], Any] = staticmethod(torch.accelerator.current_stream)

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @_ability
    def has_streams(self) -> None:
        """Whether copies can run beside compute, and the host wait for their events."""
        with torch.accelerator.device_index(self.device.index):
            stream, event = self.new_stream(self.device), self.new_event(self.device)
            event.record(stream)
            event.synchronize()

    @_ability
    def records_streams(self) -> None:
        """Whether the allocator can be told of a second stream that uses a tensor."""
        stream = torch.accelerator.current_stream(self.device)
        torch.empty(1, device=self.device).record_stream(stream)

    @_ability
    def synchronizes(self) -> None:
        with torch.accelerator.device_index(self.device.index):
            torch.accelerator.synchronize(self.device)

    @_ability
    def has_timed_events(self) -> None:
        with torch.accelerator.device_index(self.device.index):
            first, last = _timed_event(self.device), _timed_event(self.device)
            last.synchronize()
        first.elapsed_time(last)

    @_ability
    def counts_memory(self) -> None:
        torch.accelerator.get_memory_info(self.device)
        torch.accelerator.memory_allocated(self.device)

    def generators(self) -> tuple[torch.Generator, ...]:
        module, index = torch.get_device_module(self.device), self.device.index
        getattr(module, "init", lambda: None)()  # before it CUDA has none
        return tuple(getattr(module, "default_generators", ()))[index : index + 1]

    def fraction(self) -> float:
        module = torch.get_device_module(self.device)
        found = getattr(module, "get_per_process_memory_fraction", None)
        return 1.0 if found is None else float(found(self.device))

    def lock_pages(self, buffer: Tensor) -> int | None:
        """Page-lock a buffer; return 0, the runtime's error, or None where it cannot be done."""

    def unlock_pages(self, pointer: int) -> None:
        """Undo `lock_pages`."""

    def is_page_locked(self, tensor: Tensor) -> bool:  # noqa: ARG002 - where there are locks
        return False

    def bound_workspaces(self, num_threads: int) -> None:
        """Let the matrix products of so many threads take no more than the plan reserves."""

    def reaches(self, other: torch.device) -> bool:
        return self.device == other


class CudaRuntime(Runtime):
    """CUDA and ROCm: page locks for memory that is there, peer copies, sleeping waits."""

    new_stream = torch.cuda.Stream
    # Only the backend's own class can let a waiting thread sleep.
    new_event = staticmethod(lambda _device: torch.cuda.Event(blocking=True))
    current_stream = staticmethod(torch.cuda.current_stream)

    _FOR_ALL_DEVICES = 1  # cudaHostRegisterPortable

    def lock_pages(self, buffer: Tensor) -> int:
        register = torch.cuda.cudart().cudaHostRegister
        return int(register(buffer.data_ptr(), buffer.nbytes, self._FOR_ALL_DEVICES))

    def unlock_pages(self, pointer: int) -> None:
        torch.cuda.cudart().cudaHostUnregister(pointer)

    def is_page_locked(self, tensor: Tensor) -> bool:
        return tensor.is_pinned()

    def bound_workspaces(self, num_threads: int) -> None:
        # cuBLAS keeps 8 to 32 MiB for each thread. PyTorch 2.11 reads the environment alone, and
        # what is set there (for deterministic products, say) stays.
        if "CUBLAS_WORKSPACE_CONFIG" in os.environ:
            return
        with torch.accelerator.device_index(self.device.index):
            # cuBLASLt's lies in cuBLAS's: PyTorch warns, in a product, where it is to be larger.
            for name in ("cublaslt_workspace_size", "cublas_workspace_size"):
                size = getattr(torch.backends.cuda, name, None)
                if size is not None and num_threads * size() > WORKSPACE_BYTES:
                    size(WORKSPACE_BYTES // num_threads)

    def reaches(self, other: torch.device) -> bool:
        if self.device == other or "ROUNDPIPE_NO_PEER_COPIES" in os.environ:
            return self.device == other
        return other.type == "cuda" and torch.cuda.can_device_access_peer(self.device, other)


@functools.cache
def runtime_of(device: torch.device) -> Runtime:
    return (CudaRuntime if device.type == "cuda" else Runtime)(device)


class CompletionThread:
    """Waits for the events of one stream in their order, and calls back.

    Its thread sleeps in the driver. Without it every transfer queue would have to ask again and
    again whether what its copies wait for has been computed. Each stream has one: behind a long
    upload nobody would hear that a boundary is made.
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


@dataclass(eq=False, repr=False)
class StreamEvent(Event):
    """A moment on an accelerator's stream."""

    raw: Any  # the backend's event, recorded
    _: KW_ONLY
    name: str
    device: torch.device
    # calls back for the events of the stream on which it was recorded
    completions: CompletionThread

    @property
    def is_done(self) -> bool:
        with torch.accelerator.device_index(self.device.index):
            return bool(self.raw.query())

    def wait(self) -> None:
        # A thread that has named no device would make its driver's context on device 0.
        with torch.accelerator.device_index(self.device.index):
            self.raw.synchronize()

    def when_done(self, callback: Callback) -> None:
        self.completions.watch(self, callback)


class AcceleratorDevice(Device):
    """A worker on an accelerator, for example `torch.device("cuda", 1)`; an index is required.

    Args:
        device: The accelerator.
        queue_name: Name of a compute stream of its own; empty: the default stream.
    """

    def __init__(self, device: torch.device, *, queue_name: str = "") -> None:
        self.queue_name = queue_name
        if device.index is None:
            raise ValueError(f"device={device} needs an index, for example '{device.type}:0'.")
        self.name = str(device)
        self.torch_device = device
        self.runtime = runtime_of(device)
        self._pinned: dict[int, int] = {}
        self._told_of_locks = False
        self._num_steps = 0
        self._lock = threading.Lock()
        self._streams: dict[CopyQueue | torch.device, Any] = {}
        self._completions: dict[CopyQueue | None, CompletionThread] = {}  # None: compute's

    def upload(self, tensor: Tensor, wait: Callable[[Event], None] | None = None) -> Tensor:
        if tensor.layout is torch.strided:
            return super().upload(tensor, wait)
        return tensor.detach().to(self.torch_device)

    def download(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to("cpu")

    def holds(self, tensor: Tensor) -> bool:
        return tensor.device == self.torch_device or (
            tensor.dim() == 0 and tensor.device.type == "cpu"
        )

    def close(self) -> None:
        with self._lock:
            completions, self._completions = self._completions, {}
            self._streams.clear()
        for thread in completions.values():
            thread.close()

    @functools.cached_property
    def _compute(self) -> Any:
        if self.queue_name:
            with torch.accelerator.device_index(self.torch_device.index):
                return self.runtime.new_stream(self.torch_device)
        found: list[Any] = []
        ask = functools.partial(self.runtime.current_stream, self.torch_device)
        thread = threading.Thread(target=lambda: found.append(ask()))
        thread.start()
        thread.join()
        return found[0]

    def _stream(self, use: CopyQueue | torch.device) -> Any:
        """Return a stream of this device's queue, or one of another device for copies from it."""
        with self._lock:
            if use not in self._streams:
                device = self.torch_device if isinstance(use, CopyQueue) else use
                with torch.accelerator.device_index(device.index):
                    self._streams[use] = self.runtime.new_stream(device)
            return self._streams[use]

    def reaches(self, other: Device) -> bool:
        return self.runtime.reaches(other.torch_device)

    def with_own_queue(self) -> Device:
        if not (self.runtime.has_streams and self.runtime.records_streams):
            return self
        return AcceleratorDevice(self.torch_device, queue_name="user code")

    def share(self, tensor: Tensor) -> None:
        tensor.record_stream(self._compute)

    def _recorded(self, queue: CopyQueue | None, name: str) -> StreamEvent:
        raw = self.runtime.new_event(self.torch_device)
        raw.record(self._compute if queue is None else self._stream(queue))
        with self._lock:
            if queue not in self._completions:
                self._completions[queue] = CompletionThread(f"roundpipe-completion-{self.name}")
            completions = self._completions[queue]
        return StreamEvent(raw, name=name, device=self.torch_device, completions=completions)

    def allocate(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.torch_device)

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        if not self.runtime.records_streams:
            # Compute launched so far may still use the memory: uploads wait for that.
            with self.activate():
                tensor = torch.empty(shape, dtype=dtype, device=self.torch_device)
                if self.runtime.has_streams:
                    upload = self._stream(CopyQueue.UPLOAD)
                    self._let_wait(upload, self.mark_event("memory is free"))
            return tensor
        compute = self._compute
        with _on(self._stream(CopyQueue.UPLOAD)):
            tensor = torch.empty(shape, dtype=dtype, device=self.torch_device)
        tensor.record_stream(compute)
        return tensor

    def copy(
        self, dst: Tensor, src: Tensor, *, queue: CopyQueue, after: Sequence[Event] = ()
    ) -> Event:
        if not self.runtime.has_streams:
            with self.activate():
                return super().copy(dst, src, queue=queue, after=after)
        stream = self._stream(queue)
        with contextlib.ExitStack() as contexts:
            if src.device not in (self.torch_device, dst.device) and src.device.type != "cpu":
                # PyTorch copies on the present stream of the source's device, in order with that
                # of the target's: that is not to be the one on which the source's device computes.
                contexts.enter_context(_on(self._stream(src.device)))
            contexts.enter_context(_on(stream))
            contexts.enter_context(torch.no_grad())
            for event in after:
                self._let_wait(stream, event)
            dst.copy_(src, non_blocking=True)
            return self._recorded(queue, f"{queue.value} on {self.name}")

    def await_event(self, event: Event) -> None:
        """Let the device's default stream wait; the host waits until the copy has been issued."""
        with self._current():
            self._let_wait(self._compute if self.runtime.has_streams else None, event)

    @staticmethod
    def _let_wait(stream: Any, event: Event) -> None:
        issued = event.issued()
        if isinstance(issued, StreamEvent):  # others have happened when they are known
            stream.wait_event(issued.raw)

    def mark_event(self, name: str) -> Event:
        if not self.runtime.has_streams:
            return DoneEvent(name)  # what is launched after it runs after it, copies too
        with self._current():
            return self._recorded(None, name)

    def activate(self) -> contextlib.AbstractContextManager[Any]:
        return _on(self._compute) if self.runtime.has_streams else self._current()

    def _current(self) -> contextlib.AbstractContextManager[Any]:
        return torch.accelerator.device_index(self.torch_device.index)

    def expect_threads(self, num_threads: int) -> None:
        # Autograd's thread and the Trainer's compute here, too.
        self.runtime.bound_workspaces(num_threads + 2)

    def generators(self) -> tuple[torch.Generator, ...]:
        return (torch.default_generator, *self.runtime.generators())

    def pin(self, buffer: Tensor) -> None:
        """Register the buffer with the driver: exactly its bytes, not the next power of two.

        It must have its pages for itself, see `device/host_memory.py`.
        """
        if buffer.numel() == 0:
            return
        with self._current():
            code = self.runtime.lock_pages(buffer)
        if not code:
            if code is not None:
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

    def _forget_error(self) -> None:
        """Raise and catch the driver's pending error here: else the next launch raises it."""
        with contextlib.suppress(RuntimeError):
            torch.empty(1, device=self.torch_device).fill_(0.0)

    def unpin(self, buffer: Tensor) -> None:
        if self._pinned.pop(buffer.data_ptr(), None) is not None:
            with self._current():
                self.runtime.unlock_pages(buffer.data_ptr())

    def is_page_locked(self, tensor: Tensor) -> bool:
        return self.runtime.is_page_locked(tensor)

    @property
    def page_locked_bytes(self) -> int:
        return sum(self._pinned.values())

    def has_spare_memory(self) -> bool:
        """Return whether a fifth was never in use; not in the first step, whose peak is to come."""
        peak = self.peak_bytes()
        if self._num_steps < 2 or peak is None:
            return False
        total = torch.accelerator.get_memory_info(self.torch_device)[1]
        return peak < MOST_IN_USE * total * self.runtime.fraction()

    def synchronize(self) -> None:
        with self._current():
            if self.runtime.synchronizes:
                torch.accelerator.synchronize(self.torch_device)
            elif self.runtime.has_streams:
                with self._lock:
                    streams = [self._compute, *self._streams.values()]
                for stream in streams:
                    stream.synchronize()

    def start_clock(self) -> None:
        self.synchronize()
        self._num_steps += 1
        super().start_clock()
        self._base = self.mark()

    def mark(self) -> Any:
        if not self.runtime.has_timed_events:
            return super().mark()
        with self.activate():
            return _timed_event(self.torch_device)

    def await_mark(self, mark: Any) -> None:
        if self.runtime.has_timed_events:
            with self._current():
                mark.synchronize()

    def seconds(self, mark: Any) -> float:
        if not self.runtime.has_timed_events:
            return super().seconds(mark)
        return float(self._base.elapsed_time(mark)) / 1e3

    def peak_bytes(self) -> int | None:
        if not self.runtime.counts_memory:
            return None
        return int(torch.accelerator.max_memory_allocated(self.torch_device))

    def reset_peak_bytes(self) -> None:
        if self.runtime.counts_memory:
            torch.accelerator.reset_peak_memory_stats(self.torch_device)


@contextlib.contextmanager
def _on(stream: Any) -> Iterator[None]:
    """Make a stream, and its device, those on which the calling thread launches its work.

    `with stream:` keeps what was before in the stream's object, which several threads share.
    """
    with torch.accelerator.device_index(stream.device_index):
        before = torch.accelerator.current_stream(stream.device_index)
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)


def _timed_event(device: torch.device) -> Any:
    event = torch.Event(device, enable_timing=True)
    event.record()
    return event


def begin_read(tensor: Tensor) -> Callable[[], Any] | None:
    """Send a tensor's values to the host; what is returned waits for them, and for no later work.

    None on the host, and where a device has no events.
    """
    if hasattr(tensor, "begin_read"):  # on an emulated device
        return tensor.begin_read()  # type: ignore[no-any-return]
    if tensor.device.type == "cpu" or not (runtime := runtime_of(tensor.device)).has_streams:
        return None
    host, event = tensor.to("cpu", non_blocking=True), runtime.new_event(tensor.device)
    event.record(runtime.current_stream(tensor.device))

    def read() -> Any:
        event.synchronize()
        return host.tolist()

    return read


def all_reach(devices: Sequence[torch.device]) -> bool:
    """Whether each of some devices copies from every other one's memory; no where none is."""
    return bool(devices) and all(
        runtime_of(here).reaches(there) for here, there in permutations(devices, 2)
    )


def generators_in_use() -> list[torch.Generator]:
    """Return the default generators of the accelerators, if any of them is in use."""
    kind = torch.accelerator.current_accelerator()
    module = None if kind is None else torch.get_device_module(kind)
    is_used = module is not None and getattr(module, "is_initialized", lambda: True)()
    return list(getattr(module, "default_generators", ())) if is_used else []
