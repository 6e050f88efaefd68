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

from roundpipe_lightning.planning.costs import ActionCost, StageCosts, stage_costs
from roundpipe_lightning.planning.hardware import HardwareSpec
from roundpipe_lightning.planning.profile import ModelProfile
from roundpipe_lightning.planning.roundrobin import round_robin_schedule
from roundpipe_lightning.planning.stages import Partition, Stage
from roundpipe_lightning.planning.storage import ParameterStorage
from roundpipe_lightning.planning.timeline import Timeline
from roundpipe_lightning.planning.transfers import simulate_transfers, stage_bytes


class UpdateTiming(Enum):
    """When the optimizer runs."""

    AFTER_STEP = "after_step"
    """When all gradients have come down and before the next step begins (synchronous training)."""

    BEHIND_NEXT_STEP = "behind_next_step"
    """While the next step computes with weights that are one step old (asynchronous updates)."""


@dataclass(frozen=True, kw_only=True)
class PipelineLayout:
    """How a step's microbatches travel.

    Attributes:
        partition: The stages.
        num_microbatches: Microbatches of an optimizer step.
        round_size: Microbatches that travel together.
        team_size: Workers that share a stage.
    """

    partition: Partition
    num_microbatches: int
    round_size: int
    team_size: int = 1


@dataclass(frozen=True, kw_only=True)
class StepPrediction:
    """How long an optimizer step takes, and of what.

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
    def idle_share(self) -> float:
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
    """Predict an optimizer step.

    Args:
        profile: The model on this machine, for one microbatch, parameters of 16 bits.
        hardware: The machine.
        layout: How the microbatches travel.
        num_trainable: Trainable parameters.
        storage: What is kept for each parameter.
        timing: When the optimizer runs.

    Raises:
        PlanError: The layout does not fit the model or the machine.
    """
    run = _Run(profile=profile, hardware=hardware, layout=layout, storage=storage)
    optimizer = hardware.host_seconds(num_trainable * storage.update_bytes)
    uploaded, downloaded = run.moved_bytes
    host = run.host_seconds
    one = run.timeline(num_batches=1)
    if timing is UpdateTiming.AFTER_STEP:
        pipeline = one.makespan_seconds + run.edge_seconds
        step = max(pipeline, host + run.edge_seconds) + optimizer
    else:
        pipeline = run.timeline(num_batches=2).makespan_seconds - one.makespan_seconds
        step = max(pipeline, host + optimizer)
    return StepPrediction(
        step_seconds=step,
        pipeline_seconds=pipeline,
        optimizer_seconds=optimizer,
        host_seconds=host,
        compute_seconds=one.busy_seconds / one.num_workers,
        uploaded_bytes=uploaded,
        downloaded_bytes=downloaded,
    )


@dataclass(frozen=True, kw_only=True)
class _Run:
    """The simulations of one layout."""

    profile: ModelProfile
    hardware: HardwareSpec
    layout: PipelineLayout
    storage: ParameterStorage

    @property
    def stored(self) -> ModelProfile:
        """The model as it is uploaded."""
        return self.storage.stored(self.profile)

    @property
    def moved_bytes(self) -> tuple[float, float]:
        """Weights that go up in a step, and gradients that come down."""
        layout = self.layout
        visits = -(-layout.num_microbatches // layout.round_size) * layout.team_size
        moved = [
            stage_bytes(self.stored, stage=stage, partition=layout.partition)
            for stage in layout.partition.stages()
        ]
        uploaded = visits * sum(each.weight_bytes for each in moved)
        return float(uploaded), float(visits * sum(each.gradient_bytes for each in moved))

    @property
    def host_seconds(self) -> float:
        """Transfers and sums of gradients, as the host's memory carries them."""
        uploaded, downloaded = self.moved_bytes
        transfers = self.storage.transfer_seconds(
            uploaded_bytes=uploaded, downloaded_bytes=downloaded, hardware=self.hardware
        )
        return transfers + self.hardware.host_seconds(self.storage.sum_bytes(downloaded))

    @property
    def edge_seconds(self) -> float:
        """The first stage's upload and the last one's download, which nothing hides."""
        stages = self.layout.partition.stages()
        first, last = (
            stage_bytes(self.stored, stage=stage, partition=self.layout.partition)
            for stage in (stages[0], stages[-1])
        )
        links = self.storage.links(self.hardware)
        return links.upload_seconds(first.weight_bytes) + links.download_seconds(
            last.gradient_bytes
        )

    def timeline(self, *, num_batches: int) -> Timeline:
        """Simulate some batches in one stream."""
        layout = self.layout
        schedule = round_robin_schedule(
            layout.partition,
            num_workers=self.hardware.num_devices,
            num_microbatches=num_batches * layout.num_microbatches,
            round_size=layout.round_size,
            team_size=layout.team_size,
        )
        return simulate_transfers(
            schedule,
            partition=layout.partition,
            costs=self._costs(),
            profile=self.stored,
            hardware=self.storage.links(self.hardware),
        )

    def _costs(self) -> StageCosts:
        """What stages cost, the expansion of compressed weights spread over a round."""
        partition = self.layout.partition
        boundary = max((block.boundary_bytes for block in self.profile.blocks), default=0)
        costs = stage_costs(
            self.profile,
            partition=partition,
            hop_seconds=self.hardware.download_seconds(boundary)
            + self.hardware.upload_seconds(boundary),
        )
        extra = [self._expansion(stage) for stage in partition.stages()]
        return replace(
            costs,
            forward=_longer(costs.forward, extra[: partition.num_forward]),
            backward=_longer(costs.backward, extra[partition.num_forward :]),
        )

    def _expansion(self, stage: Stage) -> float:
        blocks = [self.profile.blocks[index] for index in stage.blocks]
        seconds = sum(self.storage.expanded_seconds(block, self.hardware) for block in blocks)
        return seconds * self.layout.team_size / self.layout.round_size


def _longer(costs: tuple[ActionCost, ...], extra: list[float]) -> tuple[ActionCost, ...]:
    return tuple(
        replace(cost, compute_seconds=cost.compute_seconds + seconds)
        for cost, seconds in zip(costs, extra, strict=True)
    )
