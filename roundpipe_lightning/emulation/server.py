"""An emulated server: devices whose queues take time, on a machine that has none.

What is computed is computed at once, in the thread that launches it, after what it must wait for;
`EmulatedServer.work` says how long the device takes for it. Copies are made by the server's clock
when their time is up. So the host runs ahead of the devices, and a copy that waits for too little
brings wrong numbers: until it is made its target holds what was there before, or not-a-numbers
(`poison`). What no wrong number shows is for the checker (`race_checker.py`): memory that is
overwritten while a device would still be reading it. docs/emulation.md has an example.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from roundpipe_lightning.emulation.placement import device_of
from roundpipe_lightning.emulation.race_checker import ProtocolChecker, Stamp, WatchedOperations
from roundpipe_lightning.emulation.tagged_tensor import (
    TaggedTensor,
    on_hardware,
    raw_of,
    swap,
    tag,
    tag_of,
    tagged_mode,
    untag,
)
from roundpipe_lightning.emulation.timing import (
    ComputeQueue,
    Copy,
    EmulatedEvent,
    EmulatedTiming,
    HostClock,
    HostMemory,
    LinkQueue,
    ServerClock,
)
from roundpipe_lightning.engine.device.base import CopyQueue, Device
from roundpipe_lightning.engine.device.events import Event


class EmulatedDevice(Device):
    """A worker on an emulated device; workers with the same number share it."""

    can_compile = False

    def __init__(self, index: int) -> None:
        self.name = f"emulated:{index}"
        self.torch_device = device_of(self.name)

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return tag(torch.empty(shape, dtype=dtype), self.name)

    def download(self, tensor: Tensor) -> Tensor:
        return tensor.detach() if tag_of(tensor) is None else untag(tensor.detach())

    def holds(self, tensor: Tensor) -> bool:
        return tag_of(tensor) == self.name or (tag_of(tensor) is None and tensor.dim() == 0)

    def thread_context(self) -> contextlib.AbstractContextManager[Any]:
        """Let factories (`torch.arange(n, device=x.device)`) make tensors with tags."""
        return tagged_mode()

    def put(self, parameter: nn.Parameter, values: Tensor) -> Tensor:
        here = values.detach()
        if tag_of(here) is None:  # a server without tags
            return super().put(parameter, here)
        requires_grad, here._is_param = parameter.requires_grad, True  # noqa: SLF001
        swap(parameter, here)
        parameter.requires_grad_(requires_grad)
        return here

    def put_back(self, parameter: nn.Parameter, before: Tensor) -> None:
        if tag_of(parameter) is None:
            super().put_back(parameter, before)
            return
        before.requires_grad_(parameter.requires_grad)
        swap(parameter, before)


_SHORT_BYTES = 2**16

_memmove = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
)


class EmulatedServer:
    """Devices that share a host's memory. A context manager: leaving it joins their clock's thread.

    Args:
        timing: What takes how long; by default nothing takes time.
        poison: Whether targets of copies and new buffers hold not-a-numbers until they are filled.
        tags: Whether tensors refuse to mix. Without, they are plain ones, and cost the host less.
        chunk_bytes: Longest copy that a more urgent one cannot overtake; None: that of hardware.
        speeds: How fast each device computes; None: all at speed 1.
    """

    def __init__(
        self,
        num_devices: int,
        *,
        timing: EmulatedTiming | None = None,
        checker: ProtocolChecker | None = None,
        poison: bool = False,
        tags: bool = True,
        chunk_bytes: int | None = None,
        speeds: Sequence[float] | None = None,
    ) -> None:
        self.speeds = (1.0,) * num_devices if speeds is None else tuple(speeds)
        self.chunk_bytes = chunk_bytes
        self.timing = EmulatedTiming() if timing is None else timing
        self.checker = checker
        self.poison = poison
        self.tags = tags
        self.host = HostClock()  # the time of the host's threads
        self.clock = ServerClock("clock of the emulated server")  # does what is due
        self.memory = HostMemory(self.timing.host_bytes_per_second)
        self.page_locked: dict[int, int] = {}
        self._active = threading.local()
        self.devices = tuple(self._device(index) for index in range(num_devices))

    def _device(self, index: int) -> ServedDevice:
        return ServedDevice(index, server=self)

    def __enter__(self) -> EmulatedServer:
        return self

    def __exit__(self, *_: object) -> None:
        for device in self.devices:
            device.close()
        self.clock.close()

    def move(self, tensor: Tensor, target: str | None, make: Callable[[], Tensor]) -> Tensor:
        """Let queues wait as for `Tensor.to`, from device to device or (None) the host.

        Between devices each one's compute waits for the other's. The host waits for a copy of
        memory that is not page-locked, and the copy for all compute before it.
        """
        devices = [self._device_named(n) for n in {tag_of(tensor), target} if n is not None]
        end = max((device.compute.mark() for device in devices), default=0.0)
        for device in devices:
            seconds = tensor.nbytes / self.timing.upload_bytes_per_second
            device.compute.occupy(seconds, after=end)
            if len(devices) == 1:
                device.mark_event("a copy of the host").wait()
        if self.checker is None or len(devices) < 2:
            return make()
        lines = [device.line for device in devices]
        for line in lines:
            self.checker.begin(line, [self.checker.stamp(other) for other in lines])
        what = f"Tensor.to in {threading.current_thread().name}"
        self.checker.access(raw_of(tensor), line=line, writes=False, what=what)
        with torch._C._DisableTorchDispatch():  # noqa: SLF001 - known here
            made = make()
        self.checker.computes_in(raw_of(made), line)
        self.checker.access(raw_of(made), line=line, writes=True, what=what)
        for other in lines:
            self.checker.wait(other, self.checker.stamp(line))
        return made

    def _device_named(self, name: str | None) -> ServedDevice:
        """Return a device by its name: with the queue on which the calling thread computes."""
        active = self.active_device
        if active is not None and active.name == name:
            return active
        return next(device for device in self.devices if device.name == name)

    def begin_read(self, tensor: Tensor) -> Callable[[], Any]:
        """Return what waits for all compute before now, and then gives a tensor's values."""
        device = self._device_named(tag_of(tensor))
        made, values = device.mark_event("a number is read"), raw_of(tensor).tolist()

        def read() -> Any:
            made.wait()
            return values

        return read

    def run_backward(self, run: Callable[[], Any]) -> Any:
        """Run a backward pass in the autograd thread of the calling thread's device.

        A pass that begins inside another one stays in its thread, as with PyTorch.
        """
        if getattr(self._active, "is_autograd", False):
            return run()
        device = self.current_device
        modes = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]

        def run_there() -> Any:
            self._active.is_autograd = True
            with contextlib.ExitStack() as stack:
                for context in (self.activated(device), on_hardware(self), *modes):
                    stack.enter_context(context)
                return run()

        return device.autograd.submit(run_there).result()

    @contextlib.contextmanager
    def activated(self, device: ServedDevice) -> Iterator[None]:
        before = self.active_device
        self._active.device = device
        try:
            yield
        finally:
            self._active.device = before

    def is_page_locked(self, tensor: Tensor) -> bool:
        start = tensor.data_ptr()
        if start in self.page_locked:
            return True
        locked = list(self.page_locked.items())
        return any(first <= start < first + size for first, size in locked)

    @property
    def current_device(self) -> ServedDevice:
        return self.active_device or self.devices[0]

    @property
    def active_device(self) -> ServedDevice | None:
        return getattr(self._active, "device", None)

    def launch(self, seconds: float) -> None:
        device = self.current_device
        if self.timing.launch_seconds:
            end = time.thread_time() + self.timing.launch_seconds
            while time.thread_time() < end:  # with the interpreter's lock
                pass
        if seconds:
            device.compute.launch(seconds / device.speed)

    def work(self, tensor: Tensor, *, forward_seconds: float, backward_seconds: float) -> Tensor:
        """Let the device compute for so long whenever a tensor's gradient passes here, or itself.

        Return the same values; what uses them has this time behind it.
        """
        if not torch.is_grad_enabled():  # no gradient will pass: no node of a graph for it
            self.launch(forward_seconds)
            return tensor.view_as(tensor)
        result: Tensor = _Work.apply(tensor, self.launch, forward_seconds, backward_seconds)  # type: ignore[no-untyped-call]
        return result


class _Work(torch.autograd.Function):
    """Nothing but time."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        launch: Callable[[float], None],
        forward_seconds: float,
        backward_seconds: float,
    ) -> Tensor:
        ctx.launch, ctx.seconds = launch, backward_seconds
        launch(forward_seconds)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.launch(ctx.seconds)
        return gradient, None, None, None


class ServedDevice(EmulatedDevice):
    """A device of an emulated server."""

    def __init__(self, index: int, *, server: EmulatedServer, queue_name: str = "") -> None:
        super().__init__(index)
        self.server, self._index, self.queue_name = server, index, queue_name
        self.speed = server.speeds[index]
        if not server.tags:
            self.torch_device = torch.device("cpu")
        if server.chunk_bytes is not None:
            self.chunk_bytes = server.chunk_bytes
        self.compute = ComputeQueue(
            host=server.host, delay=server.timing.delays(f"compute of {self.name}")
        )
        of_queue = f" for {queue_name}" if queue_name else ""
        self.line = f"the compute queue of {self.name}{of_queue}"
        timing = server.timing
        self._links = {
            queue: LinkQueue(
                bytes_per_second=rate,
                copy_seconds=timing.copy_seconds,
                memory=server.memory,
                clock=server.clock,
                delay=timing.delays(f"{queue.value} of {self.name}"),
            )
            for queue, rate in (
                (CopyQueue.UPLOAD, timing.upload_bytes_per_second),
                (CopyQueue.DOWNLOAD, timing.download_bytes_per_second),
            )
        }
        self._num_buffers = 0

    def with_own_queue(self) -> Device:
        return ServedDevice(self._index, server=self.server, queue_name="user code")

    @functools.cached_property
    def autograd(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, f"autograd of {self.name}")

    def close(self) -> None:
        """Make the copies that are left, and join the threads; they start when needed."""
        self.server.clock.close()
        autograd: ThreadPoolExecutor | None = self.__dict__.pop("autograd", None)
        if autograd is not None:
            autograd.shutdown()

    def download(self, tensor: Tensor) -> Tensor:
        """Copy to the host, and wait for that; part of the compute queue."""
        if self.server.tags and tag_of(tensor) is None:
            return tensor.detach()
        self.compute.occupy(tensor.nbytes / self.server.timing.download_bytes_per_second)
        self.mark_event(f"download from {self.name}").wait()
        return super().download(tensor) if self.server.tags else tensor.detach().clone()

    def holds(self, tensor: Tensor) -> bool:
        return super().holds(tensor) if self.server.tags else True

    def allocate(self, num_bytes: int) -> Tensor:
        raw = torch.empty(num_bytes, dtype=torch.uint8)
        if (checker := self.server.checker) is not None:
            self._num_buffers += 1
            checker.name(raw, f"buffer {self._num_buffers} of {self.name}")
            checker.begin(self.line)  # as an allocator gives it: compute may still use it
            checker.access(raw, line=self.line, writes=True, what="what had it before")
        return self._placed(raw)

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return self._placed(torch.empty(shape, dtype=dtype))

    def _placed(self, raw: Tensor) -> Tensor:
        if self.server.poison:
            poison(raw)
        if self.server.checker is not None:
            self.server.checker.computes_in(raw, self.line)
        return TaggedTensor(raw, self.name) if self.server.tags else raw

    def copy(
        self, dst: Tensor, src: Tensor, *, queue: CopyQueue, after: Sequence[Event] = ()
    ) -> Event:
        target, source = _values_of(dst), _values_of(src)
        events = [event.issued() for event in after]
        name = f"{queue.value} on {self.name}"
        event = self._event(name, self._checked(queue, dst, src, events))

        def begin() -> None:
            if self.server.poison:
                poison(target)

        self._links[queue].put(
            Copy(
                num_bytes=self._num_timed_bytes(queue, src),
                issued_seconds=self.server.host.now(),
                after=events,
                begin=begin,
                copy=lambda: _copy(target, source),
                event=event,
            )
        )
        is_known = self.server.tags  # which tensors are the host's
        if is_known and not all(tag_of(t) or self.server.is_page_locked(t) for t in (dst, src)):
            event.hold()  # as with CUDA; the checker does not count on it
        return event

    def reaches(self, other: Device) -> bool:
        known = isinstance(other, ServedDevice) and other.server is self.server
        is_direct = self.server.timing.direct_bytes_per_second is not None
        return super().reaches(other) or (known and is_direct)

    def _num_timed_bytes(self, queue: CopyQueue, src: Tensor) -> int:
        """Return the bytes with the link time of a copy, which may come from another device."""
        timing = self.server.timing
        direct, link = timing.direct_bytes_per_second, timing.upload_bytes_per_second
        if direct is None or queue is not CopyQueue.UPLOAD or tag_of(src) is None:
            return src.nbytes
        return round(src.nbytes * link / direct) if math.isfinite(link) else src.nbytes

    def _checked(self, queue: CopyQueue, dst: Tensor, src: Tensor, after: Sequence[Event]) -> Stamp:
        checker = self.server.checker
        if checker is None:
            return {}
        of_queue = f" for {self.queue_name}" if self.queue_name else ""
        line = f"the {queue.value} queue of {self.name}{of_queue}"
        checker.begin(line, [event.stamp for event in after if isinstance(event, EmulatedEvent)])
        what = f"{queue.value} in {threading.current_thread().name}"
        checker.access(raw_of(src), line=line, writes=False, what=what)
        checker.access(raw_of(dst), line=line, writes=True, what=what)
        return checker.stamp(line)

    def await_event(self, event: Event) -> None:
        """Let compute wait, and with it the calling thread, which computes at once."""
        issued = event.issued()
        if not isinstance(issued, EmulatedEvent):
            issued.wait()
            return
        issued.hold()
        if self.server.checker is not None:
            self.server.checker.wait(self.line, issued.stamp)

    def mark_event(self, name: str) -> Event:
        """Return the end of what was launched so far."""
        checker = self.server.checker
        event = self._event(name, {} if checker is None else checker.stamp(self.line))
        event.finish(self.compute.mark())
        return event

    def _event(self, name: str, stamp: Stamp) -> EmulatedEvent:
        server = self.server
        return EmulatedEvent(
            name, host=server.host, clock=server.clock, checker=server.checker, stamp=stamp
        )

    def pin(self, buffer: Tensor) -> None:
        """Let copies from and to a host buffer not stop the host; the checker learns its name."""
        self.server.page_locked[buffer.data_ptr()] = buffer.nbytes
        if self.server.checker is not None:
            self.server.checker.name(buffer, f"a host buffer of {buffer.nbytes} bytes")

    def is_page_locked(self, tensor: Tensor) -> bool:
        return self.server.is_page_locked(tensor)

    def unpin(self, buffer: Tensor) -> None:
        self.server.page_locked.pop(buffer.data_ptr(), None)

    @contextlib.contextmanager
    def activate(self) -> Iterator[None]:
        with self.server.activated(self):
            yield

    @contextlib.contextmanager
    def thread_context(self) -> Iterator[None]:
        """Let factories make tensors with tags, and the checker see every operation."""
        with contextlib.ExitStack() as contexts:
            if self.server.tags:
                contexts.enter_context(super().thread_context())
                contexts.enter_context(on_hardware(self.server))
            if self.server.checker is not None:
                lines = {device.name: device.line for device in self.server.devices}
                lines[self.name] = self.line
                watched = WatchedOperations(
                    self.server.checker, lines, is_unnamed=lambda: self.server.active_device is None
                )
                contexts.enter_context(watched)
            yield

    def synchronize(self) -> None:
        self.mark_event(f"end of {self.name}").wait()

    def start_clock(self) -> None:
        """Begin the time scale, when the device is idle."""
        self.synchronize()
        self.server.host.restart()
        self.compute.restart()
        super().start_clock()

    def mark(self) -> float:
        return self.compute.mark()


def _values_of(tensor: Tensor) -> Tensor:
    raw = raw_of(tensor)
    return raw.detach() if raw.requires_grad else raw


def _copy(target: Tensor, source: Tensor) -> None:
    if (
        target.nbytes == source.nbytes <= _SHORT_BYTES
        and target.dtype is source.dtype
        and target.shape == source.shape
        and target.is_contiguous()
        and source.is_contiguous()
    ):
        # A link does not wait for Python's lock: keep it, where `copy_` would give it away.
        _memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
        return
    with torch.inference_mode(target.is_inference()), torch.no_grad():
        target.copy_(source)


def poison(tensor: Tensor) -> None:
    """Fill a tensor with what no computation gives: not-a-numbers, or all bits set."""
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(float("nan"))
        elif tensor.dtype is torch.bool:
            tensor.fill_(True)
        else:
            tensor.fill_(255 if tensor.dtype is torch.uint8 else -1)
