"""The one place where the engine meets a device.

Everything else in the engine says *upload*, *download*, *activate* and *mark*; what these mean on a
processor, a GPU or an emulated server is decided here. Three backends stand behind the facade:

- `CpuDevice`: computes where the model lives, so nothing is copied. Real results, the default.
- `AcceleratorDevice`: CUDA or ROCm through `torch.accelerator`. All its work is on the device's
  current stream, which every thread shares, so that the order of launches is the order of
  execution.
- `EmulatedDevice` (`engine/emulated.py`): CPU tensors that carry a device's tag and refuse to mix.

A worker owns one device; several workers may share the hardware behind it.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


class Device(ABC):
    """A place where a worker computes.

    Attributes:
        name: What errors and timelines call it, e.g. `cuda:1`.
        torch_device: What `self.device` says inside a view of the user's module.
        shares_host_memory: Whether host tensors can be used in place. Then uploads and downloads
            are the identity, and gradients are collected per microbatch, in order.
    """

    name: str
    torch_device: torch.device
    shares_host_memory: bool = False

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

    def synchronize(self) -> None:
        """Wait for all work here. Called between steps only."""

    def start_clock(self) -> None:
        """Begin the time scale of `mark` and `seconds`."""
        self._clock_start = time.perf_counter()

    def mark(self) -> Any:
        """Note the moment at which all work launched so far is done."""
        return time.perf_counter()

    def seconds(self, mark: Any) -> float:
        """Return a mark's time since `start_clock`. Call it after `synchronize`."""
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
        self._pinned: set[int] = set()

    def upload(self, tensor: Tensor) -> Tensor:
        """Copy a host tensor to here; asynchronous where the host memory is page-locked.

        The source must not change before the step has ended: only parameters are page-locked, and
        they change between steps.
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

    def activate(self) -> contextlib.AbstractContextManager[Any]:
        """Make this the thread's current device."""
        backend = torch.get_device_module(self.torch_device)
        context: contextlib.AbstractContextManager[Any] = backend.device(self.torch_device.index)
        return context

    def generators(self) -> tuple[torch.Generator, ...]:
        """Return the host's generator and this device's."""
        backend = torch.get_device_module(self.torch_device)
        return (torch.default_generator, backend.default_generators[self.torch_device.index])

    def pin(self, buffer: Tensor) -> None:
        """Register the buffer with the driver: exactly its bytes, not the next power of two."""
        if buffer.numel() == 0 or self.torch_device.type != "cuda":
            return
        code = int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0))
        if code:
            warnings.warn(
                f"Page-locking {buffer.nbytes / 2**30:.2f} GiB of host memory failed (code "
                f"{code}); copies to {self.name} will be slower. Raise the limit of locked memory "
                "(`ulimit -l`).",
                stacklevel=2,
            )
            return
        self._pinned.add(buffer.untyped_storage().data_ptr())

    def unpin(self, buffer: Tensor) -> None:
        """Give the registration back."""
        pointer = buffer.untyped_storage().data_ptr()
        if pointer in self._pinned:
            self._pinned.remove(pointer)
            torch.cuda.cudart().cudaHostUnregister(pointer)

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.accelerator.synchronize(self.torch_device)

    def start_clock(self) -> None:
        """Begin the time scale at a moment when the device is idle."""
        self.synchronize()
        super().start_clock()
        self._base = self.mark()

    def mark(self) -> Any:
        """Record a timing event on the device's stream."""
        with self.activate():
            event = torch.Event(self.torch_device, enable_timing=True)
            event.record()
        return event

    def seconds(self, mark: Any) -> float:
        """Return the device's own time between the clock's start and the mark."""
        return float(self._base.elapsed_time(mark)) / 1e3

    def peak_bytes(self) -> int | None:
        """Return the allocator's high-water mark."""
        return int(torch.accelerator.max_memory_allocated(self.torch_device))

    def reset_peak_bytes(self) -> None:
        """Set the allocator's high-water mark to what is in use."""
        torch.accelerator.reset_peak_memory_stats(self.torch_device)


@contextlib.contextmanager
def divided_intra_op_threads(devices: Sequence[Device]) -> Iterator[int]:
    """Share the process's intra-op threads among the CPU workers.

    Yields:
        The number of intra-op threads per worker; a thread that computes for one sets it for
        itself.
    """
    total = torch.get_num_threads()
    num_cpu_workers = sum(device.shares_host_memory for device in devices)
    try:
        yield max(1, total // num_cpu_workers) if num_cpu_workers > 1 else total
    finally:
        if torch.get_num_threads() != total or num_cpu_workers > 1:
            torch.set_num_threads(total)
