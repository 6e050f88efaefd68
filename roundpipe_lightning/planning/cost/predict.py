"""Predicts the time of an optimizer step: the pipeline, its transfers, and the optimizer.

The pipeline's part is simulated. The host adds every gradient that comes down to a sum
(`sum_bytes`), and its optimizer reads and writes `update_bytes` for every trainable parameter. What
is copied to and from the devices passes its memory, too:

    host               = transfers + sums
    AFTER_STEP         step = max(pipeline, filled and drained, host)
                              + first upload + last download + optimizer
    BEHIND_NEXT_STEP   step = max(pipeline in a continuous stream, host + optimizer)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

from roundpipe_lightning.planning.cost.costs import ActionCost, StageCosts, stage_costs
from roundpipe_lightning.planning.cost.device_memory import Footprint
from roundpipe_lightning.planning.cost.simulate import simulate_transfers
from roundpipe_lightning.planning.cost.traffic import (
    StageRun,
    boundary_route,
    hop_seconds,
    stage_bytes,
    worker_stage_runs,
)
from roundpipe_lightning.planning.model.hardware import HardwareSpec
from roundpipe_lightning.planning.model.profile import ModelProfile
from roundpipe_lightning.planning.model.storage import ParameterStorage
from roundpipe_lightning.planning.schedule.plan import PipelineLayout
from roundpipe_lightning.planning.schedule.round_robin import schedule_of
from roundpipe_lightning.planning.schedule.schedule import Schedule
from roundpipe_lightning.planning.schedule.stages import Stage
from roundpipe_lightning.planning.schedule.timeline import Timeline


class UpdateTiming(Enum):
    """Time at which the optimizer runs."""

    AFTER_STEP = "after_step"
    """After all gradients have come down and before the next step begins (synchronous training)."""

    BEHIND_NEXT_STEP = "behind_next_step"
    """While the next step computes with weights that are one step old (asynchronous updates)."""


@dataclass(frozen=True, kw_only=True)
class StepPrediction:
    """Predicted time of an optimizer step, and its parts.

    Attributes:
        step_seconds: From one step to the next.
        pipeline_seconds: The pipeline's part, transfers included.
        optimizer_seconds: The optimizer on the host, behind the pipeline or after it.
        host_seconds: What else keeps the host's memory busy beside the pipeline: transfers and
            sums of gradients.
        compute_seconds: What the devices compute, spread evenly: a limit.
        uploaded_bytes: Weights, host to devices, all together.
        downloaded_bytes: Gradients, devices to host, all together.
    """

    step_seconds: float
    pipeline_seconds: float
    optimizer_seconds: float
    host_seconds: float
    compute_seconds: float
    uploaded_bytes: float
    downloaded_bytes: float

    @property
    def bubble_fraction(self) -> float:
        """Share of the devices' time in which they do not compute."""
        return 1.0 - self.compute_seconds / self.step_seconds


def predict_step(
    profile: ModelProfile,
    *,
    hardware: HardwareSpec,
    layout: PipelineLayout,
    num_trainable: int,
    storage: ParameterStorage,
    timing: UpdateTiming,
) -> StepPrediction:
    """Predict an optimizer step; the profile is that of one microbatch, parameters of 16 bits.

    Raises:
        PlanError: The layout does not fit the model or the machine.
    """
    step = _Step(profile=profile, hardware=hardware, layout=layout, storage=storage)
    optimizer = hardware.host_seconds(num_trainable * storage.update_bytes)
    uploaded, downloaded = step.moved_bytes
    transfers = storage.transfer_seconds(
        uploaded_bytes=uploaded, downloaded_bytes=downloaded, hardware=hardware
    )
    host = transfers + hardware.host_seconds(storage.sum_bytes(downloaded))
    one = step.timeline(num_batches=1)
    if timing is UpdateTiming.AFTER_STEP:
        edges = step.edge_seconds
        pipeline = one.makespan_seconds + edges
        seconds = max(pipeline, host + edges) + optimizer
    else:
        pipeline = step.timeline(num_batches=2).makespan_seconds - one.makespan_seconds
        seconds = max(pipeline, host + optimizer)
    return StepPrediction(
        step_seconds=seconds,
        pipeline_seconds=pipeline,
        optimizer_seconds=optimizer,
        host_seconds=host,
        compute_seconds=one.busy_seconds / one.num_workers,
        uploaded_bytes=uploaded,
        downloaded_bytes=downloaded,
    )


@dataclass(frozen=True, kw_only=True)
class _Step:
    """The simulations of one layout."""

    profile: ModelProfile
    hardware: HardwareSpec
    layout: PipelineLayout
    storage: ParameterStorage

    @cached_property
    def stored(self) -> ModelProfile:
        """The model as it is uploaded."""
        return self.storage.stored(self.profile)

    @cached_property
    def _runs(self) -> list[list[StageRun]]:
        return worker_stage_runs(
            self._schedule(num_batches=1),
            partition=self.layout.partition,
            profile=self.stored,
            resident=self.layout.resident,
        )

    @property
    def moved_bytes(self) -> tuple[float, float]:
        """Weights that go up in a step, and gradients that come down."""
        runs = [run for row in self._runs for run in row]
        uploaded = sum(run.weight_bytes for run in runs)
        return float(uploaded), float(sum(run.gradient_bytes for run in runs))

    @property
    def edge_seconds(self) -> float:
        """The first block's upload and the last stage's download, which nothing hides."""
        partition, first = self.layout.partition, self._runs[0][0]
        last = stage_bytes(self.stored, stage=partition.stages()[-1], partition=partition)
        links = self.storage.links(self.hardware)
        first_block = first.weight_bytes / max(1, len(first.stage.blocks))
        return links.upload_seconds(first_block) + links.download_seconds(last.gradient_bytes)

    def timeline(self, *, num_batches: int) -> Timeline:
        layout = self.layout
        return simulate_transfers(
            self._schedule(num_batches=num_batches),
            partition=layout.partition,
            costs=self._costs(),
            profile=self.stored,
            hardware=self.storage.links(self.hardware),
            weight_slots=layout.weight_slots,
            resident=layout.resident,
            recompute=layout.recompute,
        )

    def _schedule(self, *, num_batches: int) -> Schedule:
        count, workers = num_batches * self.layout.num_microbatches, self.hardware.num_devices
        return schedule_of(self.layout, num_workers=workers, num_microbatches=count)

    def _costs(self) -> StageCosts:
        """Costs of the stages, the expansion of compressed weights spread over a round."""
        layout, partition = self.layout, self.layout.partition
        footprint = Footprint(self.stored, hardware=self.hardware)
        route = boundary_route(footprint, layout)
        costs = stage_costs(
            self.profile,
            partition=partition,
            hop_seconds=hop_seconds(self.hardware, footprint.boundary_bytes, route=route),
            recompute=layout.recompute,
            route=route,
        )

        def expanded(cost: ActionCost, stage: Stage) -> ActionCost:
            blocks = [self.profile.blocks[index] for index in stage.blocks]
            seconds = sum(self.storage.expanded_seconds(block, self.hardware) for block in blocks)
            seconds = seconds * layout.team_size / layout.round_size
            return replace(cost, compute_seconds=cost.compute_seconds + seconds)

        stages = partition.stages()
        return replace(
            costs,
            forward=tuple(map(expanded, costs.forward, stages)),
            backward=tuple(map(expanded, costs.backward, stages[partition.num_forward :])),
        )
