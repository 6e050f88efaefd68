"""A worker: one device, stateless between stages.

While a worker runs consecutive actions of one stage, the stage's blocks are *resident*: uploaded
once, used by every microbatch of the round, their gradients downloaded at the end of it.

```
schedule of a worker    F2.0 F2.1 F2.2 | B3.0 B3.1 B3.2 | ...
resident                upload F2 ─── drop  upload B3 ─── gradients down, drop
```

A block that a step calls without a plan for it is *streamed*: here while it runs, beside what is
resident.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from roundpipe_lightning.engine.device import Device
from roundpipe_lightning.engine.gradients import GradientLedger
from roundpipe_lightning.engine.resident import ResidentBlocks
from roundpipe_lightning.engine.store import HostStore
from roundpipe_lightning.engine.view import ViewClasses
from roundpipe_lightning.planning.stages import Stage, StageKind


class Worker:
    """One device and what is resident on it. Its methods are called by the thread whose turn it is.

    Args:
        index: Number of the worker.
        device: Its device.
        store: The parameters.
        classes: The classes of views.
    """

    def __init__(
        self,
        index: int,
        *,
        device: Device,
        store: HostStore,
        classes: ViewClasses,
    ) -> None:
        self.index = index
        self.device = device
        self._store = store
        self._classes = classes
        self._resident: ResidentBlocks | None = None
        self._stage: Stage | None = None  # whose blocks are resident
        self._streamed_bytes = 0
        self._outside: dict[nn.Parameter, Tensor] = {}
        self._outside_bytes = 0
        self._peak_bytes = 0

    def __str__(self) -> str:
        """Number and device, for people."""
        return f"worker {self.index} ({self.device.name})"

    def resident(self, stage: Stage, blocks: Sequence[nn.Module]) -> ResidentBlocks:
        """Return the blocks of a stage, uploading those that are not here already.

        Args:
            stage: The stage.
            blocks: Those of its blocks that are needed.
        """
        if self._resident is None or self._stage != stage:
            self._evict()
            self._resident = self._new_resident(stage.kind)
            self._stage = stage
        self._resident.bring(blocks)
        self.count_bytes(0)
        return self._resident

    @contextmanager
    def streamed(self, block: nn.Module, kind: StageKind) -> Iterator[ResidentBlocks]:
        """Upload one block until the end of the context, beside what is resident.

        Args:
            block: The block.
            kind: FORWARD, or BACKWARD for its recompute.
        """
        blocks = self._new_resident(kind)
        try:
            blocks.bring([block])
            self._streamed_bytes = blocks.num_bytes
            self.count_bytes(0)
            yield blocks
        finally:
            self._streamed_bytes = 0
            blocks.close()

    def _new_resident(self, kind: StageKind) -> ResidentBlocks:
        return ResidentBlocks(kind, store=self._store, device=self.device, classes=self._classes)

    def end_forward(self, stage: Stage) -> bool:
        """Bring back what a stage wrote into buffers; say whether it was anything."""
        if self._resident is None or self._stage != stage:
            return False
        return self._resident.end_forward()

    def _evict(self) -> None:
        if self._resident is not None:
            self._resident.close()
            self._resident = self._stage = None

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
        if resident is None or self._stage != stage:  # nothing was computed in this turn
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
        in_use = resident + self._streamed_bytes + self._outside_bytes + num_bytes
        self._peak_bytes = max(self._peak_bytes, in_use)

    def peak_bytes(self) -> int:
        """Most bytes in use: the allocator's figure, else weights and boundaries as counted."""
        measured = self.device.peak_bytes()
        return self._peak_bytes if measured is None else measured

    def clear(self) -> None:
        """Drop everything that belongs to the step."""
        self._evict()
        self._outside = {}
        self._outside_bytes = 0
