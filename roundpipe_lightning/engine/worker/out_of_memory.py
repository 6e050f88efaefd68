"""A device without memory: what held it, where, and which settings would have needed less.

While the failed action's tensors are still alive, its thread puts together what is known about
them, and raises that, with the allocator's error as its cause:

```
block ── torch.OutOfMemoryError ──▶ memory_explained ──▶ DeviceMemoryError ──▶ the step stops, once
                                       │ weights, gradients, boundaries as counted by the worker,
                                       └ the rest from the allocator's figures
```
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from roundpipe_lightning.engine.device.accelerator import AcceleratorDevice
from roundpipe_lightning.engine.worker.worker import Worker
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


_UNUSED = "kept by the allocator, unused"
_OTHERS = "other processes and the driver"


@dataclass(eq=False)
class Shortage:
    """A worker that ran out of memory. Made at that moment, while the tensors are alive."""

    worker: Worker
    workers: Sequence[Worker]  # all of them, some of which may share its device
    place: str  # the stage, microbatch and worker, for messages
    plan: Plan
    stage: Stage | None = None  # None where it happened between the actions
    boundaries: int = 0

    def __post_init__(self) -> None:
        self.device = self.worker.device
        self.held = self.worker.held_memory(boundaries=self.boundaries)
        self.workers_on_device = sum(w.device.name == self.device.name for w in self.workers)

    def explain(self, error: BaseException) -> str:
        total, parts = self._memory()
        text = str(error).strip()
        is_host = "can't allocate memory" in text or isinstance(error, MemoryError)
        # the words by which Lightning's batch-size scaler knows such an error
        kind = (
            "Out of host memory (DefaultCPUAllocator: can't allocate memory)"
            if is_host
            else "Out of device memory (CUDA out of memory)"
        )
        said = ". ".join(text.partition("\n")[0].split(". ")[:2]).rstrip(".")
        said = f"The allocator says: {said}." if said else "The allocator says nothing more."
        has = "held, as counted by the worker:"
        lines = [
            f"{kind} in {self.place}. {said}",
            f"{self.device.name} {has if total is None else f'has {total / _GIB:.2f} GiB:'}",
            *(f"  {max(0, num_bytes) / _GIB:8.2f} GiB {name}" for name, num_bytes in parts.items()),
            *(["  (activations are not counted on this device)"] if total is None else []),
            "Settings that need less, the first ones without other results:",
            *(f"  - {text}" for text in (*self._remedies(), *_other_remedies(total, parts))),
        ]
        return "\n".join(lines)

    def _memory(self) -> tuple[int | None, dict[str, int]]:
        """Return the device's bytes, None if nobody counts, and who has how many of them."""
        device, held = self.device, self.held
        if not isinstance(device, AcceleratorDevice) or not device.runtime.counts_memory:
            return None, held
        free, total = torch.accelerator.get_memory_info(device.torch_device)
        allocated = torch.accelerator.memory_allocated(device.torch_device)  # in tensors
        reserved = torch.accelerator.memory_reserved(device.torch_device)  # tensors included
        return total, {
            **held,
            "activations and other tensors": allocated - sum(held.values()),
            _UNUSED: reserved - allocated,
            _OTHERS: total - free - reserved,
            "free": free,
        }

    def _remedies(self) -> Iterator[str]:
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


def _other_remedies(total: int | None, parts: Mapping[str, int]) -> Iterator[str]:
    yield "Trainer(precision='bf16-mixed') or 'bf16-true' in place of '32-true'"
    if total is None:
        return
    if parts[_UNUSED] > _LARGE_SHARE * total:
        yield (
            "PYTORCH_ALLOC_CONF=expandable_segments:True in the environment: the allocator "
            "keeps less that it cannot use"
        )
    if parts[_OTHERS] > _LARGE_SHARE * total:
        yield "end the other processes on the device (nvidia-smi lists them)"
    yield (
        f"RoundPipeStrategy(hardware=...) with a smaller device_bytes than {total}: the planner "
        "leaves more free"
    )


@contextmanager
def memory_explained(shortage: Callable[[], Shortage]) -> Iterator[None]:
    """Turn a device's lack of memory in the body into a DeviceMemoryError that explains it.

    The `shortage` describes the moment, while the body's tensors are alive.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise DeviceMemoryError(shortage().explain(error)) from error
