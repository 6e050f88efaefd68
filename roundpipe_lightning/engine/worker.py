"""A worker: one device, stateless between stages.

While a worker runs consecutive actions of one stage, the stage's blocks are *resident*: uploaded
once, used by every microbatch of the round, their gradients downloaded at the end of it.

```
schedule of a worker    F2.0 F2.1 F2.2 | B3.0 B3.1 B3.2 | ...
resident                upload F2 ─── drop  upload B3 ─── gradients down, drop
```
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from roundpipe_lightning.engine.device import Device
from roundpipe_lightning.engine.gradients import GradientLedger, Gradients
from roundpipe_lightning.engine.stack import BlockStack
from roundpipe_lightning.engine.store import HostStore
from roundpipe_lightning.engine.view import LazyTable, ViewClasses, ViewMaker, put, write_through
from roundpipe_lightning.engine.writes import ModuleWrites
from roundpipe_lightning.errors import CaptureError
from roundpipe_lightning.planning.stages import Stage, StageKind


class PlacedBuffers:
    """The buffers of views on one device, and the way back for what the forward pass wrote.

    Args:
        device: Where the views compute.
        keep_writes: Whether writes are the user's (forward) or an echo of them (recompute).
    """

    def __init__(self, device: Device, *, keep_writes: bool) -> None:
        self._device = device
        self._keep_writes = keep_writes
        self._placed: dict[Tensor, tuple[Tensor, int]] = {}

    def place(self, buffer: Tensor) -> Tensor:
        """Return what stands for a host buffer here; the same tensor every time."""
        if buffer not in self._placed:
            if not self._device.shares_host_memory:
                with torch.inference_mode(buffer.is_inference()):  # else nobody counts its writes
                    placed = self._device.upload(buffer)
            else:
                placed = buffer if self._keep_writes else buffer.clone()
            self._placed[buffer] = (placed, placed._version)
        return self._placed[buffer][0]

    def write_back(
        self,
        views: Mapping[nn.Module, nn.Module],
        *,
        owner_of: Callable[[Tensor], Device] | None = None,
    ) -> bool:
        """Bring buffers that changed here to the host, and those that were assigned anew.

        Args:
            views: Views by their originals.
            owner_of: Says where an assigned tensor is, if it may be elsewhere than here.

        Returns:
            Whether there was anything to bring.
        """
        if not self._keep_writes:
            return False
        wrote = False
        for original, view in views.items():
            placed = [b for b in original.buffers(recurse=False) if b in self._placed]
            wrote |= self._bring_home(placed)
            table: LazyTable[Tensor] = view.__dict__["_buffers"]
            for name, value in table.take_assigned().items():
                present = self._placed.get(original.__dict__["_buffers"].get(name))
                if present is not None and value is present[0]:
                    continue  # `self.count += 1` assigns what it has written into
                owner = self._device if owner_of is None or value is None else owner_of(value)
                host = None if value is None else owner.download(value)
                original.__dict__["_buffers"][name] = host
                wrote = True
        return wrote

    def _bring_home(self, buffers: Sequence[Tensor]) -> bool:
        """Download the buffers of one module if one of them has changed.

        All of them, because batch normalisation writes its running statistics behind the back of
        the version counter; only its count of batches tells.
        """
        if not any(self._placed[b][0]._version != self._placed[b][1] for b in buffers):
            return False
        for buffer in buffers:
            placed = self._placed[buffer][0]
            if not self._device.shares_host_memory:
                with torch.no_grad():
                    buffer.copy_(self._device.download(placed))
            self._placed[buffer] = (placed, placed._version)
        return True


class ResidentStage:
    """A stage's blocks on a worker, with a leaf for every parameter.

    Args:
        stage: The stage.
        stack: The blocks.
        store: The parameters.
        device: Where to.
        classes: The classes of views.
    """

    def __init__(
        self,
        stage: Stage,
        *,
        stack: BlockStack,
        store: HostStore,
        device: Device,
        classes: ViewClasses,
    ) -> None:
        self.stage = stage
        self._stack = stack
        self._device = device
        self._microbatches: list[int] = []
        self._leaves: dict[nn.Parameter, nn.Parameter] = {}
        self._buffers = PlacedBuffers(device, keep_writes=stage.kind is not StageKind.BACKWARD)
        # All at once: what is done while a block runs is counted as the block's (side_outputs.py).
        for index in stage.blocks:
            for parameter, value in store.upload_block(index, device).items():
                self._add_leaf(parameter, value)
            for buffer in stack.blocks[index].buffers():
                self._buffers.place(buffer)
        self.num_bytes = sum(leaf.nbytes for leaf in self._leaves.values())
        self._writes: list[tuple[nn.Module, str, Any]] = []
        self._maker = ViewMaker(
            parameter=self._leaf,
            buffer=self._buffers.place,
            classes=classes,
            write=self._write,
        )

    def _add_leaf(self, parameter: nn.Parameter, value: Tensor) -> None:
        if parameter not in self._leaves:
            wanted = parameter.requires_grad and self.stage.kind is not StageKind.FORWARD
            self._leaves[parameter] = nn.Parameter(value, requires_grad=wanted)

    def _leaf(self, parameter: nn.Parameter) -> nn.Parameter:
        if parameter not in self._leaves:
            raise CaptureError(
                f"A block has a parameter of shape {tuple(parameter.shape)} that it did not have "
                "when training began: a module replaces its parameters while it runs (peft's LoRA "
                "on nn.MultiheadAttention does). Adapt other layers, linear ones say."
            )
        return self._leaves[parameter]

    def block(self, index: int) -> nn.Module:
        """Return the stand-in for a block: the same code, with parameters that are here."""
        return self._maker.view_of(self._stack.blocks[index])

    def _write(self, module: nn.Module, name: str, value: Any) -> None:
        if self.stage.kind is not StageKind.BACKWARD:  # a recompute's writes are an echo
            write_through(module, name, value)
            self._writes.append((module, name, value))

    @contextmanager
    def written(self, writes: ModuleWrites) -> Iterator[None]:
        """Let the blocks see what a microbatch's user code has written, until the context ends."""
        before = []
        for module, attributes in writes:
            view = self._maker.view_of(module)
            for name, value in attributes.items():
                here = self._maker.view_of(value) if isinstance(value, nn.Module) else value
                before.append((view, name, put(view, name, here)))
        try:
            yield
        finally:
            for view, name, value in reversed(before):
                put(view, name, value)

    def take_writes(self) -> list[tuple[nn.Module, str, Any]]:
        """Return the attributes that the blocks have written since the last call."""
        writes, self._writes = self._writes, []
        return writes

    def leaf_of(self, parameter: nn.Parameter) -> nn.Parameter | None:
        """Return what stands for a parameter here; None if the stage does not have it."""
        return self._leaves.get(parameter)

    def end_forward(self) -> bool:
        """Bring back what a forward pass wrote into buffers; say whether it was anything."""
        return self._buffers.write_back(self._maker.made)

    def end_backward(self, microbatch: int) -> None:
        """Note that a microbatch's gradients have been added to the leaves."""
        self._microbatches.append(microbatch)

    def take_gradients(self) -> tuple[Sequence[int], Gradients]:
        """Download what the leaves have accumulated, and for which microbatches."""
        found = [(p, leaf) for p, leaf in self._leaves.items() if leaf.grad is not None]
        gradients: list[Any] = [leaf.grad for _, leaf in found]
        host = self._device.download_all(gradients)
        for _, leaf in found:
            leaf.grad = None
        microbatches, self._microbatches = sorted(self._microbatches), []
        return microbatches, {p: g for (p, _), g in zip(found, host, strict=True)}

    def close(self) -> None:
        """Break the circles between views and their maker, so that memory is free at once."""
        self._maker.close()
        self._leaves.clear()


class Worker:
    """One device and what is resident on it. Its methods are called by the thread whose turn it is.

    Args:
        index: Number of the worker.
        device: Its device.
        store: The parameters.
        stack: The blocks; None if the model has no stack.
        classes: The classes of views.
    """

    def __init__(
        self,
        index: int,
        *,
        device: Device,
        store: HostStore,
        stack: BlockStack | None,
        classes: ViewClasses,
    ) -> None:
        self.index = index
        self.device = device
        self._store = store
        self._stack = stack
        self._classes = classes
        self._resident: ResidentStage | None = None
        self._outside: dict[nn.Parameter, Tensor] = {}
        self._outside_bytes = 0
        self._peak_bytes = 0

    def __str__(self) -> str:
        """Number and device, for people."""
        return f"worker {self.index} ({self.device.name})"

    def resident(self, stage: Stage) -> ResidentStage:
        """Return the stage, uploading it unless it is here already."""
        if self._resident is None or self._resident.stage != stage:
            assert self._stack is not None, "a stage with blocks needs a stack"
            self._evict()
            self._resident = ResidentStage(
                stage,
                stack=self._stack,
                store=self._store,
                device=self.device,
                classes=self._classes,
            )
            self.count_bytes(0)
        return self._resident

    def _evict(self) -> None:
        if self._resident is not None:
            self._resident.close()
            self._resident = None

    def end_backward(
        self,
        stage: Stage,
        *,
        microbatch: int,
        ledger: GradientLedger,
        is_last: bool,
        outside: Collection[nn.Parameter],
    ) -> None:
        """Send gradients home: of every microbatch where that is free, else of the whole round.

        Args:
            stage: The FUSED or BACKWARD stage that has ended.
            microbatch: Of which microbatch.
            ledger: Where to.
            is_last: Whether the worker's next action is of another stage.
            outside: Parameters that the user's code has used outside the stages: their gradients
                are summed per microbatch first.
        """
        resident = self._resident
        if resident is None or resident.stage != stage:  # nothing was computed in this turn
            ledger.add_stage(stage.index, [microbatch], {})
            return
        resident.end_backward(microbatch)
        if not (is_last or self.device.shares_host_memory):
            return
        microbatches, gradients = resident.take_gradients()
        known = self._store.shared
        shared = {p: g for p, g in gradients.items() if p in known or p in outside}
        for parameter in shared:
            del gradients[parameter]
        if shared:
            ledger.add_shared(microbatch, shared)
        ledger.add_stage(stage.index, microbatches, gradients)

    def outside(self, parameter: nn.Parameter) -> Tensor:
        """Return the values of a parameter that user code outside the blocks asks for."""
        if parameter not in self._outside:
            self._outside[parameter] = self.device.upload(parameter)
            self._outside_bytes += parameter.nbytes
        return self._outside[parameter]

    def count_bytes(self, num_bytes: int) -> None:
        """Note that `num_bytes` of boundaries are in use beside what is resident."""
        resident = 0 if self._resident is None else self._resident.num_bytes
        self._peak_bytes = max(self._peak_bytes, resident + self._outside_bytes + num_bytes)

    def peak_bytes(self) -> int:
        """Most bytes in use: the allocator's figure, else weights and boundaries as counted."""
        measured = self.device.peak_bytes()
        return self._peak_bytes if measured is None else measured

    def clear(self) -> None:
        """Drop everything that belongs to the step."""
        self._evict()
        self._outside = {}
        self._outside_bytes = 0
