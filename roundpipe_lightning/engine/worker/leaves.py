"""Leaves: what replicas of blocks compute with, in place of the user's parameters and buffers.

```
host      parameters ── upload ──▶ leaves ── replicas ── run ──▶ gradients ── download
          buffers    ◀──────────── what a forward pass has written
```

A worker that computes in host memory has them in place (`HostLeaves`); any other has the weights of
its present stage run, and of the next one, in slots that `WeightPrefetcher` fills (`DeviceLeaves`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from roundpipe_lightning.engine.device.base import Device
from roundpipe_lightning.engine.driver.calls import Call
from roundpipe_lightning.engine.driver.outcome import Outcome
from roundpipe_lightning.engine.driver.parameters import class_of
from roundpipe_lightning.engine.driver.snapshot import Snapshot
from roundpipe_lightning.engine.store.block_layout import (
    Layouts,
    Region,
    gradient_dtype,
    sum_wide,
)
from roundpipe_lightning.engine.store.host_store import HostStore
from roundpipe_lightning.engine.transfer.gradient_downloads import OutsideSums
from roundpipe_lightning.engine.transfer.gradient_reduce import FlatGradients, Gradients
from roundpipe_lightning.engine.transfer.weight_prefetch import StageRun, StageWeights
from roundpipe_lightning.engine.transfer.worker_transfers import WaitedFor, WorkerTransfers
from roundpipe_lightning.engine.worker.replica import Replica
from roundpipe_lightning.planning.schedule.stages import Stage, StageKind

Landed: TypeAlias = Callable[[Sequence["Gradients | FlatGradients"]], None]
"""Takes gradients of parameters on the host: of blocks, and of others."""


@dataclass(frozen=True)
class RunBlocks:
    """What a worker runs one after the other: a stage, or a unit of the backward pass.

    Attributes:
        stage: The stage of the plan; None: there is none.
        blocks: The blocks that it may need, each once.
    """

    stage: Stage | None
    blocks: tuple[nn.Module, ...]


class Leaves(ABC):
    """What a worker computes with. Thread: the worker's."""

    def begin_step(self, runs: Sequence[StageRun]) -> None:
        """Begin a step, of which these runs are planned."""

    def refresh(self, generation: int) -> None:
        """Follow parameters that were given other memory: `p.data = values`."""

    @abstractmethod
    def replica_for(self, call: Call, run: RunBlocks) -> Replica:
        """Return a replica of a call's block, in a run."""

    @abstractmethod
    def leaf_of(
        self, parameter: nn.Parameter, *, requires_grad: bool, values: Tensor | None = None
    ) -> nn.Parameter:
        """Return what stands for a parameter outside the blocks, with `values` of user code."""

    def write_back(self, outcome: Outcome) -> None:
        """Bring buffers that a block has written into to the user's module."""

    @abstractmethod
    def take_gradients(self) -> Gradients | None:
        """Take the gradients of a microbatch; None: they are sent at the end of the run."""

    def send_gradients(self, landed: Landed) -> None:
        """Send the gradients of a unit's run to the host; `landed` is called when they are there.

        By any thread.
        """

    def end_run(self, *, has_more: bool) -> None:
        """End a run: all its compute was launched; `has_more`: another of its stage follows."""

    def end_step(self) -> None:
        """Forget the step."""


class HostLeaves(Leaves):
    """Parameters and buffers in place."""

    def __init__(self) -> None:
        self._leaves: dict[tuple[nn.Parameter, bool], nn.Parameter] = {}
        self._replicas: dict[Snapshot, Replica] = {}
        self._used: set[Snapshot] = set()
        self._generation = -1

    def refresh(self, generation: int) -> None:
        if generation > self._generation:
            self._generation = generation
            for (parameter, _), leaf in self._leaves.items():
                if leaf.data_ptr() != parameter.data_ptr():
                    leaf.data = parameter.detach()

    def leaf_of(
        self,
        parameter: nn.Parameter,
        *,
        requires_grad: bool,
        values: Tensor | None = None,  # noqa: ARG002 - they are in place
    ) -> nn.Parameter:
        leaf = self._leaves.get((parameter, requires_grad))
        if leaf is None:
            with torch.inference_mode(mode=False):  # an evaluation may be the first to ask for it
                leaf = leaf_like(parameter, parameter.detach(), requires_grad=requires_grad)
            self._leaves[parameter, requires_grad] = leaf
        return leaf

    def replica_for(self, call: Call, run: RunBlocks) -> Replica:  # noqa: ARG002
        snapshot, saved = call.runner, call.saved_buffers
        if saved is not None:  # a recompute, with the buffers as they were before the call
            return self.new_replica(snapshot, lambda buffer: saved[buffer].clone())
        self._used.add(snapshot)
        if snapshot not in self._replicas:
            self._replicas[snapshot] = self.new_replica(snapshot, lambda buffer: buffer)
        return self._replicas[snapshot]

    def new_replica(self, snapshot: Snapshot, buffer: Callable[[Tensor], Tensor]) -> Replica:
        return Replica(
            snapshot,
            parameter=lambda p: self.leaf_of(p, requires_grad=snapshot.parameters[p]),
            buffer=buffer,
        )

    def take_gradients(self) -> Gradients | None:
        found: Gradients = {}
        for (parameter, _), leaf in self._leaves.items():
            if leaf.grad is not None:
                found[parameter], leaf.grad = leaf.grad, None
        return found

    def end_step(self) -> None:
        self._replicas = {s: r for s, r in self._replicas.items() if s in self._used}
        self._used.clear()


class DeviceLeaves(Leaves):
    """Uploaded weights.

    Args:
        device: Where the worker computes.
        transfers: What it moves.
    """

    def __init__(
        self, device: Device, *, transfers: WorkerTransfers, store: HostStore, layouts: Layouts
    ) -> None:
        self._device, self._transfers = device, transfers
        self._store, self._layouts = store, layouts
        self._planned: deque[StageRun] = deque()
        self._follows_plan = True
        self._weights: StageWeights | None = None  # of the present run
        self._blocks: dict[nn.Module, Region] = {}  # that have run in it
        self._leaves: dict[Region, dict[tuple[nn.Parameter, bool], nn.Parameter]] = {}
        self._replicas: dict[tuple[Snapshot, Region], Replica] = {}
        self._used: set[tuple[Snapshot, Region]] = set()
        self._outside: dict[tuple[nn.Parameter, bool], nn.Parameter] = {}
        self._buffers = BufferCopies(device)

    def begin_step(self, runs: Sequence[StageRun]) -> None:
        self._planned = deque(runs)
        self._follows_plan = bool(runs)

    # Weights of blocks ---------------------------------------------------------------------------

    def replica_for(self, call: Call, run: RunBlocks) -> Replica:
        snapshot: Snapshot = call.runner
        region = self._region_of(snapshot.block, run)
        saved = call.saved_buffers
        if saved is not None:
            return self._new_replica(
                snapshot, region, lambda buffer: self._device.upload(saved[buffer])
            )
        key = (snapshot, region)
        if key not in self._replicas:
            self._replicas[key] = self._new_replica(snapshot, region, self._buffers.of)
        elif snapshot.buffers:
            self._buffers.renew(snapshot.buffers)
        self._used.add(key)
        return self._replicas[key]

    def _region_of(self, block: nn.Module, run: RunBlocks) -> Region:
        if block not in self._blocks:
            if self._weights is None:
                self._begin_run(run.stage)
                self._weights = self._transfers.weights.acquire(run.stage or _UNPLANNED, run.blocks)
            weights = self._weights
            event = weights.events.pop(block, None)
            if event is not None:
                self._transfers.await_event(event, WaitedFor.WEIGHTS)
            self._blocks[block] = weights.regions[block]
        return self._blocks[block]

    def _begin_run(self, stage: Stage | None) -> None:
        """Skip planned runs in which nothing has run; leave the plan for one that it has not."""
        if any(run.stage == stage for run in self._planned):
            while self._planned[0].stage != stage:
                self._planned.popleft()
                self._transfers.weights.release()
        elif self._follows_plan:
            self._follows_plan = False
            self._planned.clear()
            self._transfers.weights.leave_plan()

    def _new_replica(
        self, snapshot: Snapshot, region: Region, buffer: Callable[[Tensor], Tensor]
    ) -> Replica:
        leaves = self._leaves.setdefault(region, {})
        values = region.leaves()

        def leaf_of(parameter: nn.Parameter) -> nn.Parameter:
            key = (parameter, snapshot.parameters[parameter])
            if key not in leaves:
                leaves[key] = leaf = leaf_like(
                    parameter, values[parameter].detach(), requires_grad=key[1]
                )
                if leaf.requires_grad:
                    sum_wide(leaf, gradient_dtype(parameter))
            return leaves[key]

        return Replica(snapshot, parameter=leaf_of, buffer=buffer)

    def end_run(self, *, has_more: bool) -> None:
        if self._weights is None or has_more:
            return
        stage = self._weights.run.stage
        self._weights = None
        self._blocks.clear()
        if self._planned and self._planned[0].stage == stage:
            self._planned.popleft()
        self._transfers.weights.release()

    # Parameters outside the blocks ---------------------------------------------------------------

    def leaf_of(
        self, parameter: nn.Parameter, *, requires_grad: bool, values: Tensor | None = None
    ) -> nn.Parameter:
        if values is None:
            values = self._transfers.weights.outside_values(
                parameter,
                wait=lambda event: self._transfers.await_event(event, WaitedFor.WEIGHTS),
            )
        leaf = self._outside.get((parameter, requires_grad))
        if leaf is None or leaf.data_ptr() != values.data_ptr():
            leaf = leaf_like(parameter, values.detach(), requires_grad=requires_grad)
            if requires_grad:
                sum_wide(leaf, gradient_dtype(parameter))
            if (before := self._outside.get((parameter, requires_grad))) is not None:
                leaf.grad = before.grad
            self._outside[parameter, requires_grad] = leaf
        return leaf

    # Buffers and gradients -----------------------------------------------------------------------

    def write_back(self, outcome: Outcome) -> None:
        self._buffers.write_back(outcome)

    def take_gradients(self) -> Gradients | None:
        return None

    def send_gradients(self, landed: Landed) -> None:
        arrived: list[Gradients | FlatGradients] = [{}, {}]
        left = [0, 1]

        def land(index: int, gradients: Gradients | FlatGradients) -> None:
            arrived[index] = gradients
            left.remove(index)
            if not left:
                landed(arrived)

        outside = self._outside_gradients()
        blocks = self._placed_leaves()
        if outside:
            sums = OutsideSums()
            with torch.no_grad():
                sums.add(outside, {})
            self._transfers.gradients.send_outside(
                sums, landed=lambda g: land(1, g), can_add_rows=lambda _: False
            )
        if not outside:
            land(1, {})
        if not self._transfers.gradients.send_run(blocks, landed=lambda g: land(0, g)):
            # in the thread of the sums, as those that come: `left` has no lock
            self._transfers.gradients.sums.add_later(lambda: land(0, {}))

    def _placed_leaves(self) -> list[tuple[Any, Sequence[nn.Parameter]]]:
        """Return the layouts of the run's blocks, with leaves in the order of their parameters.

        Gradients of a parameter that several blocks have are added up in the leaf of the first.
        """
        found: list[tuple[Any, Sequence[nn.Parameter]]] = []
        first: dict[nn.Parameter, nn.Parameter] = {}
        for region in self._blocks.values():
            known, values = self._leaves.get(region, {}), region.leaves()
            leaves = [known.get((p, True), values[p]) for p in region.layout.parameters]
            if self._store.shared:
                for parameter, leaf in zip(region.layout.parameters, leaves, strict=True):
                    other = first.setdefault(parameter, leaf)
                    if other is not leaf and leaf.grad is not None:
                        with torch.no_grad():
                            other.grad = leaf.grad if other.grad is None else other.grad + leaf.grad
                        leaf.grad = None
            found.append((region.layout, leaves))
        return found

    def _outside_gradients(self) -> Gradients:
        """Take gradients that have no place among those of the run's blocks."""
        leaves = [(p, leaf) for (p, _), leaf in self._outside.items()]
        for region in self._blocks.values():
            leaves += [
                (p, leaf)
                for (p, requires_grad), leaf in self._leaves.get(region, {}).items()
                if requires_grad and p not in region.layout.trained
            ]
        found: Gradients = {}
        for parameter, leaf in leaves:
            if leaf.grad is not None:
                found[parameter], leaf.grad = leaf.grad, None
        return found

    def end_step(self) -> None:
        self._weights = None
        self._blocks.clear()
        self._outside.clear()
        self._replicas = {k: r for k, r in self._replicas.items() if k in self._used}
        self._used.clear()
        regions = {region for _, region in self._replicas}
        self._leaves = {r: leaves for r, leaves in self._leaves.items() if r in regions}
        for leaves in self._leaves.values():  # of a step that was given up
            for leaf in leaves.values():
                leaf.grad = None


_UNPLANNED = Stage(kind=StageKind.BACKWARD, index=0, blocks=range(0))


def unplanned_run(block: nn.Module) -> StageRun:
    return StageRun(stage=_UNPLANNED, blocks=(block,), wanted=(block,))


class BufferCopies:
    """Copies of the user's buffers on a device. Thread: one that computes there."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._copies: dict[Tensor, tuple[Tensor, int]] = {}

    def of(self, buffer: Tensor) -> Tensor:
        if buffer not in self._copies:
            self._copies[buffer] = self._device.upload(buffer.detach()), _version(buffer)
        self.renew([buffer])
        return self._copies[buffer][0]

    def renew(self, buffers: Iterable[Tensor]) -> None:
        """Bring what user code, or another worker, has written since."""
        for buffer in buffers:
            copy, version = self._copies[buffer]
            if version != _version(buffer):
                with torch.no_grad():
                    copy.copy_(self._device.upload(buffer.detach()))
                self._copies[buffer] = copy, _version(buffer)

    def write_back(self, outcome: Outcome) -> None:
        for module, name, values, _ in outcome.written_buffers:
            buffer = vars(module)["_buffers"].get(name)
            if buffer is not None and buffer in self._copies:
                self.take_home(buffer, values)

    def take_home(self, buffer: Tensor, values: Tensor) -> None:
        with torch.no_grad():
            buffer.copy_(self._device.download(values))
        if self._copies[buffer][0] is values:
            self._copies[buffer] = values, _version(buffer)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def leaf_like(parameter: nn.Parameter, values: Tensor, *, requires_grad: bool) -> nn.Parameter:
    """Return a leaf with some values, of the class and with the attributes of a parameter."""
    if type(values) is Tensor:
        leaf: nn.Parameter = Tensor._make_subclass(class_of(parameter), values, requires_grad)  # noqa: SLF001
        leaf.__dict__.update(parameter.__dict__)
        return leaf
    # A class that wraps values keeps its own: those of emulated devices do.
    leaf = nn.Parameter(values, requires_grad=requires_grad)
    for name, value in parameter.__dict__.items():
        leaf.__dict__.setdefault(name, value)
    return leaf
