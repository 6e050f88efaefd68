"""Traffic of a step between host and devices, and the route of boundaries.

A *stage run* is some actions of one stage in a row on one worker. Its weights are uploaded once
before it, but for those of blocks that stay on the worker (`Plan.resident`): of these only the
trainable part is uploaded, at the block's first run of the step, because it has changed since the
last one.

```
through the host    worker 0 ──download──▶ host ──upload──▶ worker 1
direct              worker 0 ──────────copy───────────────▶ worker 1      nothing, on one worker
```

A gradient is taken by the next stage and goes directly wherever devices reach each other. A
boundary waits for the BACKWARD stage that starts from it, so it goes directly only where it can
stay on the device that made it until then: where there is room. The engine has room as long as a
fifth of a device's memory has never been in use (`MOST_IN_USE`), and asks that of each boundary
when it is made; on paper a plan has room for all of them or for none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from roundpipe_lightning.planning.cost.costs import BoundaryRoute
from roundpipe_lightning.planning.cost.device_memory import Footprint
from roundpipe_lightning.planning.model.hardware import HardwareSpec
from roundpipe_lightning.planning.model.profile import BlockProfile, ModelProfile
from roundpipe_lightning.planning.schedule.plan import PipelineLayout, stage_turns
from roundpipe_lightning.planning.schedule.schedule import (
    Action,
    ActionKey,
    Schedule,
    stage_dependencies,
)
from roundpipe_lightning.planning.schedule.stages import (
    Partition,
    RecomputePolicy,
    Stage,
    StageKind,
)

MOST_IN_USE = 0.8
"""Share of a device's memory in use, below which tensors stay on it that could wait on the host."""

_ROUNDS_IN_FLIGHT = 2


def boundary_route(footprint: Footprint, layout: PipelineLayout) -> BoundaryRoute:
    """Return the way that boundaries take in a layout."""
    hardware = footprint.hardware
    is_alone = footprint.num_teams(layout) == 1  # no microbatch ever changes its worker
    if hardware.shares_host_memory or not (hardware.devices_reach_each_other or is_alone):
        return BoundaryRoute.THROUGH_HOST
    need = footprint.most_bytes(layout) + _staying_bytes(footprint, layout)
    has_room = need < MOST_IN_USE * hardware.device_bytes
    return BoundaryRoute.DIRECT if has_room else BoundaryRoute.GRADIENTS_DIRECT


def hop_seconds(hardware: HardwareSpec, num_bytes: float, *, route: BoundaryRoute) -> float:
    """Return the seconds of a boundary's way from one worker to another.

    A direct copy is taken to be as fast as an upload. Where gradients alone go directly, they too
    are taken to need a boundary's time.
    """
    upload = hardware.upload_seconds(num_bytes)
    if route is BoundaryRoute.DIRECT:
        return upload
    return hardware.download_seconds(num_bytes) + upload


def _staying_bytes(footprint: Footprint, layout: PipelineLayout) -> float:
    """Return what stays on the worker that keeps the most, of the rounds that are in flight."""
    partition, profile = layout.partition, footprint.profile
    made = {
        stage: partition.num_readers(stage) * footprint.boundary_bytes
        + _attention_bytes(profile, stage.blocks, layout.recompute)
        * (stage.kind is StageKind.FORWARD and not stage.keeps_graph)
        for stage in partition.stages()
    }
    teams = footprint.num_teams(layout)
    rounds = _ROUNDS_IN_FLIGHT if layout.goes_on or layout.num_batches > 1 else 1
    firsts = range(min(teams, layout.num_rounds))
    kept = {(first, team): 0 for first in firsts for team in range(teams)}
    for index, stage, turn in stage_turns(layout, num_rounds=len(firsts) + rounds - 1):
        for first in firsts:
            if first <= index < first + rounds:
                kept[first, (turn or 0) % teams] += made[stage]
    return layout.most_members(footprint.hardware.num_devices) * max(kept.values())


def _attention_bytes(
    profile: ModelProfile, blocks: Iterable[int], recompute: RecomputePolicy
) -> int:
    if recompute is not RecomputePolicy.SELECTIVE:
        return 0
    return sum(profile.blocks[block].attention_bytes for block in blocks)


@dataclass(frozen=True, kw_only=True)
class StageRun:
    """A run of actions of one stage on one worker, and what all of them move.

    Attributes:
        weight_bytes: Parameters, once per stage run.
        gradient_bytes: Gradients of trainable parameters, once per stage run; 0 for FORWARD.
        input_bytes: Boundaries, gradients and kept attention outputs that the actions need, by way
            of the host.
        output_bytes: What of these they hand on.
        direct_bytes: What the actions need from other devices, by one copy.
    """

    stage: Stage
    actions: tuple[Action, ...] = ()
    weight_bytes: int
    gradient_bytes: int
    input_bytes: int
    output_bytes: int
    direct_bytes: int = 0


def stage_parts(profile: ModelProfile, stage: Stage) -> list[BlockProfile]:
    """Return the blocks and segments whose weights a stage needs.

    A head that is not trained has no backward pass, so the last stage does not need its weights.
    """
    parts = [profile.blocks[block] for block in stage.blocks]
    if stage.has_head_forward or (stage.has_head_backward and profile.head.trainable_bytes):
        parts.append(profile.head)
    if stage.has_tail:
        parts.append(profile.tail)
    return parts


def stage_bytes(
    profile: ModelProfile,
    *,
    stage: Stage,
    partition: Partition,
    recompute: RecomputePolicy = RecomputePolicy.FULL,
) -> StageRun:
    """Add up what a stage moves for one action; SELECTIVE moves attention's outputs, too."""
    parts = stage_parts(profile, stage)
    boundary = max((block.boundary_bytes for block in profile.blocks), default=0)
    if stage.kind is StageKind.FORWARD:
        is_last = stage.has_tail  # it hands no boundary on
        inputs, outputs = min(stage.index, 1), max(partition.num_readers(stage), 1 - is_last)
    elif stage.kind is StageKind.FUSED:
        inputs, outputs = min(partition.num_forward, 1), min(partition.num_backward, 1)
    else:
        # the first one's gradient, that of token losses, is small
        inputs = 2 - stage.has_tail - stage.keeps_graph
        outputs = int(not stage.has_head_backward)
    kept = () if stage.keeps_graph else stage.blocks
    attention = _attention_bytes(profile, kept, recompute)
    trains = stage.kind is not StageKind.FORWARD
    return StageRun(
        stage=stage,
        weight_bytes=sum(part.parameter_bytes for part in parts),
        gradient_bytes=sum(part.trainable_bytes for part in parts) if trains else 0,
        input_bytes=inputs * boundary + attention * (stage.kind is StageKind.BACKWARD),
        output_bytes=outputs * boundary + attention * (stage.kind is StageKind.FORWARD),
    )


def worker_stage_runs(
    schedule: Schedule,
    *,
    partition: Partition,
    profile: ModelProfile,
    recompute: RecomputePolicy = RecomputePolicy.FULL,
    resident: Sequence[Sequence[int]] = (),
    route: BoundaryRoute = BoundaryRoute.THROUGH_HOST,
) -> list[list[StageRun]]:
    """Return every worker's stage runs in order."""
    stages = partition.stages()
    sizes = {
        stage: stage_bytes(profile, stage=stage, partition=partition, recompute=recompute)
        for stage in stages
    }
    boundary = max((block.boundary_bytes for block in profile.blocks), default=0)
    makers = {stage: _makers(stage, partition, profile, recompute, route) for stage in stages}

    def run_of(stage: Stage, actions: tuple[Action, ...], weight_bytes: int) -> StageRun:
        each = sizes[stage]
        inputs, outputs = len(actions) * each.input_bytes, len(actions) * each.output_bytes
        if route is BoundaryRoute.DIRECT:
            inputs = outputs = 0
        elif route is BoundaryRoute.GRADIENTS_DIRECT and stage.kind is not StageKind.FORWARD:
            inputs -= len(actions) * boundary * (stage.kind is StageKind.BACKWARD)  # the gradient
            outputs = 0
        direct = sum(
            size  # what the own worker made needs no copy
            for action in actions
            for kind, index, size in makers[stage]
            if schedule.worker_of(ActionKey(kind, index, action.microbatch)) != action.worker
        )
        return replace(
            each,
            actions=actions,
            weight_bytes=weight_bytes,
            input_bytes=inputs,
            output_bytes=outputs,
            direct_bytes=direct,
        )

    rows = []
    for worker, actions in enumerate(schedule.workers):
        runs = []
        blocks = set(resident[worker]) if resident else set()
        fresh: set[int] = set()
        for (kind, index), group in groupby(actions, key=lambda each: (each.kind, each.stage)):
            stage = partition.stage(kind, index)
            staying = blocks.intersection(stage.blocks)
            parts = [profile.blocks[block] for block in staying - fresh]
            weight_bytes = sizes[stage].weight_bytes
            weight_bytes -= sum(profile.blocks[block].parameter_bytes for block in staying)
            # gradients may be wider
            weight_bytes += sum(min(part.trainable_bytes, part.parameter_bytes) for part in parts)
            fresh |= staying
            if stage.keeps_graph and kind is StageKind.BACKWARD:
                weight_bytes = 0  # they are there since the stage before
            runs.append(run_of(stage, tuple(group), weight_bytes))
        rows.append(runs)
    return rows


def _makers(
    stage: Stage,
    partition: Partition,
    profile: ModelProfile,
    recompute: RecomputePolicy,
    route: BoundaryRoute,
) -> list[tuple[StageKind, int, int]]:
    """Return the stages whose results a stage takes directly, and how large they are."""
    if route is BoundaryRoute.THROUGH_HOST:
        return []
    is_all = route is BoundaryRoute.DIRECT
    boundary = max((block.boundary_bytes for block in profile.blocks), default=0)
    found = [
        (kind, index, boundary)
        for kind, index, is_barrier in stage_dependencies(stage.kind, stage.index, partition)
        if (is_all or kind is not StageKind.FORWARD) and not is_barrier
    ]
    for maker in partition.stages()[: partition.num_forward]:
        both = set(maker.blocks).intersection(stage.blocks)
        size = _attention_bytes(profile, both, recompute)
        if is_all and size and stage.kind is StageKind.BACKWARD:
            found.append((maker.kind, maker.index, size))
    return found
