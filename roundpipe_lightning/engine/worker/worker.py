"""A worker: one device, stateless between stages.

While a worker runs consecutive actions of one stage, the stage's blocks are *resident*: uploaded
once, used by every microbatch of the round, their gradients downloaded at the end of it. A block
that a step calls without a plan for it is *streamed*: here while it runs, beside what is resident.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from roundpipe_lightning.engine.capture.view import ViewClasses
from roundpipe_lightning.engine.device.base import Device
from roundpipe_lightning.engine.device.events import Event
from roundpipe_lightning.engine.store.host_store import HostStore
from roundpipe_lightning.engine.transfer.gradient_downloads import OutsideSums
from roundpipe_lightning.engine.transfer.gradient_reduce import (
    FlatGradients,
    GradientReducer,
    Gradients,
    Rows,
)
from roundpipe_lightning.engine.transfer.weight_prefetch import StageWeights
from roundpipe_lightning.engine.transfer.worker_transfers import WaitedFor, WorkerTransfers
from roundpipe_lightning.engine.worker.loaded_blocks import ResidentBlocks
from roundpipe_lightning.planning.report.step_record import WorkerState
from roundpipe_lightning.planning.schedule.stages import Stage, StageKind


@dataclass(eq=False)
class Worker:
    """One device and what is resident on it. Called by the thread whose turn it is."""

    index: int
    _: KW_ONLY
    device: Device
    store: HostStore
    classes: ViewClasses
    transfers: WorkerTransfers | None = None  # what it moves; None if it computes in host memory

    def __post_init__(self) -> None:
        self._resident: ResidentBlocks | None = None
        self._stage: Stage | None = None  # whose blocks are resident
        self._brought: Sequence[nn.Module] | None = None  # the last of them that were asked for
        self._streamed_bytes = 0
        self._outside: dict[nn.Parameter, Tensor] = {}
        self._kept_leaves: dict[nn.Parameter, nn.Parameter] = {}  # as of `ResidentBlocks.kept`
        self._outside_sums: dict[WorkerTransfers, OutsideSums] = {}
        self._peak_bytes = 0

    def __str__(self) -> str:
        return f"worker {self.index} ({self.device.name})"

    def resident(
        self, stage: Stage, blocks: Sequence[nn.Module], *, refuses: bool = False
    ) -> ResidentBlocks:
        """Return the needed blocks of a stage, uploading those that are not here already.

        `refuses` as of `PlacedBuffers`.
        """
        if self._resident is not None and blocks is self._brought:
            return self._resident
        if self._resident is None or self._stage != stage:
            self._evict()
            weights = None
            if self.transfers is not None:
                weights = self.transfers.weights.acquire(stage, blocks)
            kept = self._kept_leaves if self.device.shares_host_memory else {}
            self._resident = self._new_resident(stage.kind, weights, refuses=refuses, kept=kept)
            self._stage = stage
        elif self.transfers is not None:
            self.transfers.weights.acquire(stage, blocks)
        self._resident.bring(blocks)
        self._brought = blocks
        self.count_bytes(0)
        return self._resident

    @contextmanager
    def streamed(
        self, block: nn.Module, kind: StageKind, *, refuses: bool = False
    ) -> Iterator[ResidentBlocks]:
        """Upload one block until the end of the context, beside what is resident.

        `kind` is FORWARD, or BACKWARD for its recompute; `refuses` as of `PlacedBuffers`.
        """
        blocks = self._new_resident(kind, refuses=refuses)
        try:
            blocks.bring([block])
            self._streamed_bytes = blocks.num_bytes
            self.count_bytes(0)
            yield blocks
        finally:
            self._streamed_bytes = 0
            blocks.close()

    def _new_resident(
        self, kind: StageKind, weights: StageWeights | None = None, **options: Any
    ) -> ResidentBlocks:
        return ResidentBlocks(
            kind,
            store=self.store,
            device=self.device,
            classes=self.classes,
            weights=weights,
            await_upload=self._await_weights,
            **options,
        )

    def _await_weights(self, event: Event) -> None:
        assert self.transfers is not None, "who uploads ahead has transfers"
        self.transfers.await_event(event, WaitedFor.WEIGHTS)

    def upload(self, tensor: Tensor) -> Tensor:
        """Return a host tensor's values here; compute waits behind the weights of its stage."""
        return self.device.upload(tensor, None if self.transfers is None else self._await_weights)

    def end_forward(self, stage: Stage) -> bool:
        if self._resident is None or self._stage != stage:
            return False
        return self._resident.end_forward()

    def _evict(self) -> None:
        if self._resident is not None:
            self._resident.close()
            self._resident = self._stage = self._brought = None

    def end_backward(
        self,
        stage: Stage,
        *,
        microbatch: int,
        reducer: GradientReducer,
        is_last: bool,
        outside: Set[nn.Parameter],
    ) -> None:
        """Send gradients to the host: of every microbatch where that is free, else of a round.

        A microbatch `is_last` if the worker's next action is of another stage. Of parameters that
        are used `outside` the stages, too, gradients are summed per microbatch first.
        """
        reducer.note_elsewhere(outside)
        resident = self._resident
        if resident is None or self._stage != stage:  # nothing was computed in this turn
            reducer.add_stage(stage.index, [microbatch], {})
            return
        resident.microbatches.append(microbatch)
        if not (is_last or self.device.shares_host_memory):
            return
        microbatches, resident.microbatches = sorted(resident.microbatches), []
        known = self.store.shared
        if self.transfers is None:
            gradients = resident.take_gradients()
            elsewhere = {*known, *outside}
            shared = [p for p in gradients if p in elsewhere] if elsewhere else ()
            if shared:
                reducer.reserve_shared(microbatch)({p: gradients.pop(p) for p in shared})
            reducer.add_stage(stage.index, microbatches, gradients)
            return
        blocks = resident.placed()
        several = {p for layout, _ in blocks for p in layout.trained if p in known or p in outside}
        add_reserved = reducer.reserve_shared(microbatch) if several else None

        def landed(gradients: FlatGradients | None) -> None:
            if add_reserved is not None:
                add_reserved({} if gradients is None else gradients.take(several))
            reducer.add_stage(stage.index, microbatches, gradients or {})

        if not self.transfers.gradients.send_run(blocks, landed=landed):
            landed(None)

    def end_stage_run(self) -> None:
        if self.transfers is not None:
            self._evict()
            self.transfers.weights.release()

    def end_turns(self, step: object) -> None:
        self._evict()
        if self.transfers is not None:
            self.transfers.end_turns(step)

    def outside(self, parameter: nn.Parameter) -> Tensor:
        if self.transfers is not None:
            return self.transfers.weights.outside_values(
                parameter, wait=self._await_weights, is_first=self._resident is None
            )
        if parameter not in self._outside:
            # A version of its own: a write into another parameter counts for their whole buffer.
            self._outside[parameter] = self.device.upload(self.store.value(parameter)).data
        return self._outside[parameter]

    def whole_values(self, parameter: nn.Parameter, rounded: Tensor) -> Tensor:
        return self.store.whole_values(parameter, rounded, device=self.device)

    def rewrite(self, parameter: nn.Parameter, values: Tensor) -> bool:
        return self.store.rewrite(parameter, self.device.download(values.detach()))

    def renew(self, parameter: nn.Parameter, values: Tensor) -> None:
        if parameter in self.store.rewritten and not self.device.shares_host_memory:
            with self.device.activate():
                # It may be written into again before the upload is made.
                values.copy_(self.device.upload(self.device.snapshot(parameter)))

    def add_outside(self, transfers: WorkerTransfers, gradients: Gradients, rows: Rows) -> None:
        """Add gradients of such parameters to those of the present stage run.

        They were made on a worker with these transfers, and are taken over. Of some only `rows` are
        not zero.
        """
        with torch.no_grad():
            self._outside_sums.setdefault(transfers, OutsideSums()).add(gradients, rows)

    def send_outside(self, *, reducer: GradientReducer, last: int) -> None:
        """Send what `add_outside` has summed up, at the end of a run: with `last`."""
        for transfers, sums in self._outside_sums.items():
            transfers.gradients.send_outside(
                sums,
                landed=reducer.reserve_shared(last),
                can_add_rows=partial(reducer.can_add_rows, microbatch=last),
            )
        self._outside_sums = {}

    def count_bytes(self, num_bytes: int) -> None:
        """Note that `num_bytes` of boundaries are in use beside what is resident."""
        resident = 0 if self._resident is None else self._resident.num_bytes
        if self.transfers is not None:
            resident = self.transfers.num_bytes
        outside = sum(parameter.nbytes for parameter in self._outside)
        in_use = resident + self._streamed_bytes + outside + num_bytes
        self._peak_bytes = max(self._peak_bytes, in_use)

    def held_memory(self, *, boundaries: int) -> dict[str, int]:
        """Return the bytes in use here, by what has them, for messages.

        Boundaries are what the microbatch brought to the stage or keeps for a later one.
        """
        resident = self._resident
        weights = 0 if resident is None else resident.num_bytes
        outside = sum(parameter.nbytes for parameter in self._outside)
        if self.transfers is not None:
            outside = self.transfers.weights.outside_bytes
            weights = self.transfers.num_bytes - outside
        return {
            # of the stage's blocks, of those that stay or are uploaded for the next stage, and what
            # is set aside for them and their gradients
            "weights, of this stage and the next": self._streamed_bytes + weights,
            "gradients of the stage": 0 if resident is None else resident.gradient_bytes,
            "parameters used outside the blocks": outside,
            "boundaries of the microbatch": boundaries,
        }

    def state(self, state: WorkerState) -> WorkerState:
        moved = self.transfers
        queues = (0, 0) if moved is None else (moved.uploads.num_jobs, moved.downloads.num_jobs)
        return replace(
            state, num_uploads=queues[0], num_downloads=queues[1], bytes=self.peak_bytes()
        )

    def peak_bytes(self) -> int:
        """Most bytes in use: the allocator's figure, else weights and boundaries as counted."""
        measured = self.device.peak_bytes()
        return self._peak_bytes if measured is None else measured

    def clear(self) -> None:
        self._evict()
        self._outside, self._outside_sums = {}, {}
