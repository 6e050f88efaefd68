"""Predicts the time of an optimizer step: the pipeline, its transfers, the optimizer, the network.

The pipeline's part is simulated; docs/planning.md (seconds on a machine) has the formulas of the
whole step. The search minimises the same: `HostCosts` has it for one step and for arrays of them.

Each of n hosts sends, and receives, (n-1)/n of the gradients of all trained parameters, and as
much of their new values. A block's gradients leave as soon as its backward pass has ended; its new
values come back while the next step's forward pass begins.

```
compute    F F F F B B B B B B B B B B B B │ F F F F
network            g7 g6 g5 w7 g4 w6 ..    │ .. w0 w1
```

Where blocks are stepped one by one, all of it may go on beside the step. Where clipping has the
optimizer wait for all gradients, these go on beside the backward pass, and the new values beside
the next forward pass. Accumulated gradients leave when the last backward pass has ended.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean

from roundpipe_lightning.planning.cost.costs import (
    ActionCost,
    HostCosts,
    RecomputeStart,
    StageCosts,
    UpdateTiming,
    stage_costs,
)
from roundpipe_lightning.planning.cost.device_memory import Footprint
from roundpipe_lightning.planning.cost.simulate import Simulation
from roundpipe_lightning.planning.cost.traffic import (
    StageRun,
    boundary_route,
    hop_seconds,
    worker_stage_runs,
)
from roundpipe_lightning.planning.model.hardware import HardwareSpec
from roundpipe_lightning.planning.model.profile import ModelProfile
from roundpipe_lightning.planning.model.work import BlockWork, ParameterStorage, WorkProfile
from roundpipe_lightning.planning.schedule.plan import PipelineLayout, schedule_of
from roundpipe_lightning.planning.schedule.schedule import Timeline
from roundpipe_lightning.planning.schedule.stages import Stage


@dataclass(frozen=True, kw_only=True)
class StepPrediction:
    """Predicted time of an optimizer step, and its parts.

    Attributes:
        timeline: When every action runs, transfers included.
        step_seconds: From one step to the next.
        pipeline_seconds: The pipeline's part, transfers included.
        optimizer_seconds: The optimizer on the host, beside the next forward pass or the pipeline.
        host_seconds: What else keeps the host's memory busy beside the pipeline: transfers and
            sums of gradients.
        compute_seconds: What the devices compute, spread evenly: a limit.
        uploaded_bytes: Weights, host to devices, all together.
        downloaded_bytes: Gradients, devices to host, all together.
        boundary_bytes: Boundaries, kept attention outputs and their gradients: host to devices,
            devices to host, device to device.
        network_seconds: What the step waits for other hosts (`Exchange`).
    """

    layout: PipelineLayout
    timeline: Timeline
    step_seconds: float
    pipeline_seconds: float
    optimizer_seconds: float
    host_seconds: float
    compute_seconds: float
    uploaded_bytes: float
    downloaded_bytes: float
    boundary_bytes: tuple[float, float, float]
    network_seconds: float = 0.0

    @property
    def bubble_fraction(self) -> float:
        return 1.0 - self.compute_seconds / self.step_seconds


@dataclass(frozen=True, kw_only=True, eq=False)
class StepModel:
    """A model on a machine, of which layouts are asked how long a step takes.

    Attributes:
        profile: The model for one microbatch, parameters of 16 bits.
        storage: What is kept for each parameter; None: the pipeline is all there is.
        hop: Seconds from one worker to another; None: as long as a boundary takes.
    """

    profile: ModelProfile
    hardware: HardwareSpec
    num_trainable: int = 0
    storage: ParameterStorage | None = field(default_factory=ParameterStorage)
    timing: UpdateTiming = UpdateTiming.AFTER_STEP
    recompute_start: RecomputeStart = RecomputeStart.EARLY
    hop: float | None = None

    @cached_property
    def footprint(self) -> Footprint:
        stored = self.profile if self.storage is None else self.storage.stored(self.profile)
        return Footprint(stored, hardware=self.links)

    @cached_property
    def _placed(self) -> ParameterStorage | None:
        return self.storage and self.storage.placed(
            self.profile, num_trainable=self.num_trainable, hardware=self.hardware
        )

    @cached_property
    def links(self) -> HardwareSpec:
        return self.hardware if self._placed is None else self._placed.links(self.hardware)

    @cached_property
    def host(self) -> HostCosts:
        storage, hardware = self._placed, self.hardware
        if storage is None:
            return HostCosts(timing=self.timing)

        def transfer(up: float, down: float) -> float:
            return storage.transfer_seconds(
                uploaded_bytes=up, downloaded_bytes=down, hardware=hardware
            )

        return HostCosts(
            per_uploaded_byte=transfer(1.0, 0.0),
            per_downloaded_byte=transfer(0.0, 1.0) + hardware.host_seconds(storage.sum_bytes(1.0)),
            first_upload=self.links.upload_seconds(1.0),
            last_download=self.links.download_seconds(1.0),
            optimizer=storage.update_seconds(self.num_trainable, hardware) * hardware.owned_part,
            timing=self.timing,
            # on processors both want the same cores
            forward_share=0.0 if hardware.shares_host_memory else self.profile.forward_share(),
        )

    def host_of(self, num_batches: int) -> HostCosts:
        """Return the costs of accumulated batches: an update passes beside the first's forward."""
        return replace(self.host, forward_share=self.host.forward_share / num_batches)

    def predict(self, layout: PipelineLayout) -> StepPrediction:
        """Predict an optimizer step; PlanError if the layout does not fit model or machine."""
        host, costs = self.host_of(layout.num_batches), self.costs(layout)
        runs, timeline = self._simulated(layout, costs)
        pipeline = timeline.makespan_seconds
        each = [run for row in runs for run in row]
        uploaded = float(sum(run.weight_bytes for run in each))
        downloaded = float(sum(run.gradient_bytes for run in each))
        edges = 0.0
        if host.goes_on:
            twice = replace(layout, num_microbatches=2 * layout.num_microbatches)
            more = self._simulated(twice, costs)[1].makespan_seconds - pipeline
            pipeline = max(more, pipeline / 2, _least_period(layout, timeline))
        else:
            # nothing hides the first block's upload and the last stage's download
            first = runs[0][0]
            last = next(run for row in runs for run in row if run.stage.has_head_backward)
            upload = self.host.first_upload * first.weight_bytes / max(1, len(first.stage.blocks))
            edges = upload + self.host.last_download * last.gradient_bytes
        seconds = host.step_seconds(pipeline, uploaded=uploaded, downloaded=downloaded, edges=edges)
        return StepPrediction(
            layout=layout,
            timeline=timeline,
            step_seconds=float(seconds),
            pipeline_seconds=pipeline + edges,
            optimizer_seconds=host.optimizer,
            host_seconds=host.per_uploaded_byte * uploaded + host.per_downloaded_byte * downloaded,
            compute_seconds=timeline.busy_seconds / timeline.num_workers,
            uploaded_bytes=uploaded,
            downloaded_bytes=downloaded,
            boundary_bytes=(
                float(sum(run.input_bytes for run in each)),
                float(sum(run.output_bytes for run in each)),
                float(sum(run.direct_bytes for run in each)),
            ),
        )

    def _simulated(
        self, layout: PipelineLayout, costs: StageCosts
    ) -> tuple[list[list[StageRun]], Timeline]:
        """Return every worker's stage runs, and when their actions run."""
        partition = layout.partition
        schedule = schedule_of(layout, num_workers=self.hardware.num_devices)
        runs = worker_stage_runs(
            schedule,
            partition=partition,
            profile=self.footprint.profile,
            recompute=layout.recompute,
            resident=layout.resident,
            route=costs.route,
        )
        simulation = Simulation(runs, layout=layout, costs=costs, hardware=self.links)
        return runs, simulation.timeline()

    def costs(self, layout: PipelineLayout) -> StageCosts:
        """Costs of the stages, the expansion of compressed weights spread over a round."""
        partition, route = layout.partition, boundary_route(self.footprint, layout)
        hop = self.hop
        if hop is None:
            hop = hop_seconds(self.links, self.footprint.boundary_bytes, route=route)
        costs = stage_costs(
            self.profile,
            partition=partition,
            hop_seconds=hop,
            recompute_start=self.recompute_start,
            recompute=layout.recompute,
            route=route,
            speeds=layout.speeds,
        )
        storage = self.storage
        if storage is None or not any(b.expanded_bytes for b in self.footprint.profile.blocks):
            return costs

        def expanded(cost: ActionCost, stage: Stage) -> ActionCost:
            blocks = [self.profile.blocks[index] for index in stage.blocks]
            seconds = sum(storage.expanded_seconds(block, self.hardware) for block in blocks)
            seconds = seconds * layout.team_size / layout.round_size
            return replace(cost, compute_seconds=cost.compute_seconds + seconds)

        return replace(costs, stages=tuple(map(expanded, costs.stages, partition.stages())))


def _least_period(layout: PipelineLayout, timeline: Timeline) -> float:
    """From step to step at least: the workers of a pipeline take turns, unequal ones do not."""
    busy = [sum(entry.busy_seconds for entry in row) for row in timeline.rows()]
    share = max if layout.speeds else fmean
    teams = layout.teams(len(busy))
    return max(share([busy[worker] for worker in line]) for line in zip(*teams, strict=True))


_LINK_SHARE = 0.9
"""Share of a link's rate that is reached; the rest is headers and pauses between chunks."""


def split_samples(count: int, shares: Sequence[float]) -> list[int]:
    """Divide at least as many samples as there are hosts by shares, one or more for each.

    What rounding leaves goes to the largest remainders.
    """
    free = count - len(shares)
    exact = [free * share / sum(shares) for share in shares]
    sizes = [1 + int(part) for part in exact]
    left = count - sum(sizes)
    for host in sorted(range(len(shares)), key=lambda h: int(exact[h]) - exact[h])[:left]:
        sizes[host] += 1
    return sizes


def _new_bytes(part: BlockWork, num_trainable: int, more: float = 0.0) -> float:
    return num_trainable and num_trainable * (part.parameter_bytes / part.num_parameters + more)


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """What every host sends in a step, and receives.

    Attributes:
        steps_at_end: Whether no block is stepped before all gradients are there, for clipping or
            accumulation.
    """

    work: WorkProfile
    storage: ParameterStorage
    hardware: HardwareSpec
    steps_at_end: bool

    @property
    def _away(self) -> float:
        """How often a byte is sent, or received: either way of gradients, values."""
        part = self.hardware.owned_part
        return max(1 - part, part * (self.hardware.num_nodes - 1))

    @property
    def gradient_bytes(self) -> float:
        return self._away * self.work.num_trainable * self.storage.gradient_bytes

    @property
    def weight_bytes(self) -> float:
        """Blocks and an LM head of its own get the copies that are uploaded.

        Embeddings, and what is tied to them, get their masters, twice as wide.
        """
        work = self.work
        blocks = sum(_new_bytes(block, block.num_trainable) for block in work.blocks)
        head = _new_bytes(work.head, work.head.num_trainable, self.storage.master_bytes / 2)
        with_head = sum(part.num_trainable for part in (*work.blocks, work.head))
        tail = _new_bytes(work.tail, work.num_trainable - with_head)  # without what is tied
        return self._away * (blocks + head + tail)

    @property
    def num_bytes(self) -> float:
        return self.gradient_bytes + self.weight_bytes

    @property
    def seconds(self) -> float:
        """How long the network takes."""
        return self._seconds(self.num_bytes)

    def _seconds(self, num_bytes: float) -> float:
        return num_bytes / (self.hardware.network_bytes_per_second * _LINK_SHARE)

    def share_of_room(self, alone: StepPrediction, profile: ModelProfile) -> float:
        """Return the network's time as a share of what passes beside it; at most 1: it is hidden.

        Args:
            alone: A step of one host.
            profile: The model, for how much of a batch is its forward pass.
        """
        pairs = self._pairs(alone, profile)
        return max(needed / room if room else math.inf for needed, room in pairs)

    def with_network(self, alone: StepPrediction, profile: ModelProfile) -> StepPrediction:
        """Return the step with what of the exchange nothing hides."""
        waits = sum(max(0.0, needed - room) for needed, room in self._pairs(alone, profile))
        return replace(alone, step_seconds=alone.step_seconds + waits, network_seconds=waits)

    def _pairs(self, alone: StepPrediction, profile: ModelProfile) -> list[tuple[float, float]]:
        """Return seconds of the network, each with those of what goes on beside it."""
        if not self.steps_at_end:
            return [(self.seconds, alone.step_seconds)]
        batch = alone.pipeline_seconds / alone.layout.num_batches
        share = profile.forward_share(alone.layout.recompute)
        backward = (1 - share) * batch if alone.layout.num_batches == 1 else 0.0
        return [
            (self._seconds(self.gradient_bytes), backward),
            (self._seconds(self.weight_bytes), share * batch),
        ]
