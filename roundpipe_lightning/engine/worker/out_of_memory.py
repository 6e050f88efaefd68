"""A device without memory: what held it, where, and which settings would have needed less.

What a device's allocator says ("tried to allocate 512 MiB") does not help somebody who has never
chosen the stages. While the failed action's tensors are still alive, its thread puts together what
is known about them, and raises that, with the allocator's error as its cause:

```
block ── torch.OutOfMemoryError ──▶ memory_explained ──▶ DeviceMemoryError ──▶ the step stops, once
                                       │ weights, gradients, boundaries as counted by the worker,
                                       └ the rest from the allocator's figures
```
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from roundpipe_lightning.engine.device.accelerator import AcceleratorDevice
from roundpipe_lightning.engine.device.base import Device
from roundpipe_lightning.errors import DeviceMemoryError
from roundpipe_lightning.planning.schedule.plan import Plan
from roundpipe_lightning.planning.schedule.stages import RecomputePolicy, Stage, StageKind

_WORDS = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
_LIMITS = {
    StageKind.FORWARD: "forward",
    StageKind.FUSED: "fused",
    StageKind.BACKWARD: "backward",
}
_GIB = 2**30
_LARGE_SHARE = 0.1  # of the device's memory


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, DeviceMemoryError):
        return False  # explained already
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _WORDS)


@dataclass(frozen=True, kw_only=True)
class AllocatorFigures:
    """Figures of a device's allocator and driver, in bytes."""

    total_bytes: int  # the device's memory
    free_bytes: int  # what nobody has
    allocated_bytes: int  # in tensors of this process
    reserved_bytes: int  # held by this process's allocator, tensors included

    @classmethod
    def read(cls, device: Device) -> AllocatorFigures | None:
        if not isinstance(device, AcceleratorDevice) or not device.runtime.counts_memory:
            return None
        where = device.torch_device
        free, total = torch.accelerator.get_memory_info(where)
        return cls(
            total_bytes=total,
            free_bytes=free,
            allocated_bytes=torch.accelerator.memory_allocated(where),
            reserved_bytes=torch.accelerator.memory_reserved(where),
        )


@dataclass(frozen=True, kw_only=True)
class HeldMemory:
    """Memory that a worker held, in bytes, by its own count."""

    # of the stage's blocks, of those that stay or are uploaded for the next stage, and what is set
    # aside for them and their gradients
    weights: int = 0
    gradients: int = 0  # of these weights
    outside: int = 0  # parameters that user code outside the blocks uses
    boundaries: int = 0  # what the microbatch brought to the stage or keeps for a later one

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.outside + self.boundaries


class MemoryHolder(Protocol):
    """A worker, as far as memory goes."""

    device: Device

    def held_memory(self, *, boundaries: int) -> HeldMemory:
        """Return the bytes in use there now."""


@dataclass(eq=False)
class Shortage:
    """A worker that ran out of memory. Made at that moment, while the tensors are alive."""

    worker: MemoryHolder
    workers: Sequence[MemoryHolder]  # all of them, some of which may share its device
    place: str  # the stage, microbatch and worker, for messages
    plan: Plan
    stage: Stage | None = None  # None where it happened between the actions
    boundaries: int = 0

    def __post_init__(self) -> None:
        self.device = self.worker.device
        self.held = self.worker.held_memory(boundaries=self.boundaries)
        self.workers_on_device = sum(w.device.name == self.device.name for w in self.workers)

    def explain(self, error: BaseException) -> str:
        """Return a text: the error, the memory by kind, and settings that need less."""
        figures = AllocatorFigures.read(self.device)
        lines = [
            f"{_in_lightnings_words(error)} in {self.place}. {_first_sentences(error)}",
            *self._holders(figures),
            "Settings that need less, the first ones without other results:",
            *(f"  - {text}" for text in self._remedies(figures)),
        ]
        return "\n".join(lines)

    def _holders(self, figures: AllocatorFigures | None) -> Iterator[str]:
        held = self.held
        parts = {
            "weights, of this stage and the next": held.weights,
            "gradients of the stage": held.gradients,
            "parameters used outside the blocks": held.outside,
            "boundaries of the microbatch": held.boundaries,
        }
        if figures is None:
            yield f"{self.device.name} held, as counted by the worker:"
        else:
            unused = figures.reserved_bytes - figures.allocated_bytes
            others = figures.total_bytes - figures.free_bytes - figures.reserved_bytes
            parts["activations and other tensors"] = figures.allocated_bytes - held.total
            parts["kept by the allocator, unused"] = unused
            parts["other processes and the driver"] = others
            parts["free"] = figures.free_bytes
            yield f"{self.device.name} has {figures.total_bytes / _GIB:.2f} GiB:"
        for name, num_bytes in parts.items():
            yield f"  {max(0, num_bytes) / _GIB:8.2f} GiB {name}"
        if figures is None:
            yield "  (activations are not counted on this device)"

    def _remedies(self, figures: AllocatorFigures | None) -> Iterator[str]:
        plan, count = self.plan, self.plan.num_microbatches
        yield (
            f"RoundPipeStrategy(num_microbatches={2 * count}) in place of {count}, up to the "
            "samples of a batch: activations and boundaries halve"
        )
        if plan.recompute is not RecomputePolicy.FULL:
            yield (
                f"RoundPipeStrategy(recompute='full') in place of {plan.recompute.value!r}: less "
                "is kept for the backward pass"
            )
        stages = plan.partition.stages() if self.stage is None else (self.stage,)
        largest = max(stages, key=lambda stage: len(stage.blocks))
        num_blocks = len(largest.blocks)
        if num_blocks > 1:
            limits = f"{{'limits': {{'{_LIMITS[largest.kind]}': {num_blocks - 1}}}}}"
            yield (
                f"RoundPipeStrategy(hints={limits}): fewer blocks in such a stage, which has "
                f"{num_blocks} now"
            )
        copies = not self.device.shares_host_memory
        if plan.weight_slots > 1 and copies:
            yield "RoundPipeStrategy(hints=PartitionHints(weight_slots=1)): weights of one stage"
        if any(plan.resident) and copies:
            yield "RoundPipeStrategy(hints=PartitionHints(resident=0)): no weights that stay"
        if self.workers_on_device > 1:
            yield (
                f"RoundPipeStrategy(workers_per_device=1) in place of {self.workers_on_device}: "
                "nobody to share the device with"
            )
        if self.stage is not None and self.stage.kind is StageKind.FUSED:
            yield "RoundPipeStrategy(loss='fused'): logits are never whole"
        yield from self._other_remedies(figures)

    def _other_remedies(self, figures: AllocatorFigures | None) -> Iterator[str]:
        yield "Trainer(precision='bf16-mixed') or 'bf16-true' in place of '32-true'"
        if figures is None:
            return
        large = _LARGE_SHARE * figures.total_bytes
        if figures.reserved_bytes - figures.allocated_bytes > large:
            yield (
                "PYTORCH_ALLOC_CONF=expandable_segments:True in the environment: the allocator "
                "keeps less that it cannot use"
            )
        if figures.total_bytes - figures.free_bytes - figures.reserved_bytes > large:
            yield "end the other processes on the device (nvidia-smi lists them)"
        yield (
            "RoundPipeStrategy(hardware=...) with a smaller device_bytes than "
            f"{figures.total_bytes}: the planner leaves more free"
        )


def _in_lightnings_words(error: BaseException) -> str:
    """The words by which Lightning's batch-size scaler knows such an error."""
    text = str(error)
    if "can't allocate memory" in text or isinstance(error, MemoryError):
        return "Out of host memory (DefaultCPUAllocator: can't allocate memory)"
    return "Out of device memory (CUDA out of memory)"


def _first_sentences(error: BaseException, count: int = 2) -> str:
    sentences = str(error).strip().splitlines()[0].split(". ") if str(error).strip() else []
    said = ". ".join(sentences[:count]).rstrip(".")
    return f"The allocator says: {said}." if said else "The allocator says nothing more."


@contextmanager
def memory_explained(shortage: Callable[[], Shortage]) -> Iterator[None]:
    """Turn a device's lack of memory in the body into an error that explains it.

    Args:
        shortage: Describes the moment; called while the body's tensors are alive.

    Raises:
        DeviceMemoryError: The body ran out of memory; its error is the cause.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise DeviceMemoryError(shortage().explain(error)) from error
