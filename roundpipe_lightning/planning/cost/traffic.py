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

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from roundpipe_lightning.planning.cost.costs import BoundaryRoute
from roundpipe_lightning.planning.cost.device_memory import Footprint
from roundpipe_lightning.planning.model.hardware import HardwareSpec
from roundpipe_lightning.planning.model.profile import BlockProfile, ModelProfile
from roundpipe_lightning.planning.schedule.plan import PipelineLayout
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
    made = [
        partition.num_readers(stage) * footprint.boundary_bytes
        + _attention_bytes(profile, stage, layout.recompute)
        for stage in partition.stages()
    ]
    teams, count = footprint.num_teams(layout), len(made)
    rounds = _ROUNDS_IN_FLIGHT if layout.goes_on or layout.num_batches > 1 else 1
    most = 0
    for first in range(min(teams, layout.num_rounds)):
        kept = [0] * teams
        for turn in range(first * count, (first + rounds) * count):
            kept[turn % teams] += made[turn % count]
        most = max(most, *kept)
    return layout.most_members(footprint.hardware.num_devices) * most


def _attention_bytes(profile: ModelProfile, stage: Stage, recompute: RecomputePolicy) -> int:
    if recompute is not RecomputePolicy.SELECTIVE or stage.kind is not StageKind.FORWARD:
        return 0
    return sum(profile.blocks[block].attention_bytes for block in stage.blocks)


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
        inputs, outputs = min(stage.index, 1), max(partition.num_readers(stage), 1)
    elif stage.kind is StageKind.FUSED:
        inputs, outputs = min(partition.num_forward, 1), min(partition.num_backward, 1)
    else:
        inputs, outputs = 2, int(not stage.has_head_backward)
    attention = 0
    if recompute is RecomputePolicy.SELECTIVE:
        attention = sum(profile.blocks[block].attention_bytes for block in stage.blocks)
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
    sizes = {
        stage: stage_bytes(profile, stage=stage, partition=partition, recompute=recompute)
        for stage in partition.stages()
    }
    rows = []
    for worker, actions in enumerate(schedule.workers):
        runs = []
        blocks = set(resident[worker]) if resident else set()
        fresh: set[int] = set()
        for (kind, index), group in groupby(actions, key=lambda each: (each.kind, each.stage)):
            stage = partition.stage(kind, index)
            each, some = sizes[stage], tuple(group)
            staying = [profile.blocks[block] for block in blocks.intersection(stage.blocks)]
            again = blocks.intersection(stage.blocks) - fresh
            weight_bytes = each.weight_bytes - sum(block.parameter_bytes for block in staying)
            parts = [profile.blocks[block] for block in again]  # gradients may be wider
            weight_bytes += sum(min(part.trainable_bytes, part.parameter_bytes) for part in parts)
            fresh |= again
            runs.append(
                replace(
                    each,
                    actions=some,
                    weight_bytes=weight_bytes,
                    input_bytes=len(some) * each.input_bytes,
                    output_bytes=len(some) * each.output_bytes,
                )
            )
        rows.append(runs)
    if route is BoundaryRoute.THROUGH_HOST:
        return rows
    boundary = max((block.boundary_bytes for block in profile.blocks), default=0)
    makers = {stage: _makers(stage, partition, profile, recompute, route) for stage in sizes}
    return [
        [_directly(run, makers[run.stage], schedule, boundary, route) for run in row]
        for row in rows
    ]


def _makers(
    stage: Stage,
    partition: Partition,
    profile: ModelProfile,
    recompute: RecomputePolicy,
    route: BoundaryRoute,
) -> list[tuple[StageKind, int, int]]:
    """Return the stages whose results a stage takes directly, and how large they are."""
    is_all = route is BoundaryRoute.DIRECT
    boundary = max((block.boundary_bytes for block in profile.blocks), default=0)
    found = [
        (kind, index, boundary)
        for kind, index, _ in stage_dependencies(stage.kind, stage.index, partition)
        if is_all or kind is not StageKind.FORWARD
    ]
    if is_all and recompute is RecomputePolicy.SELECTIVE and stage.kind is StageKind.BACKWARD:
        for maker in partition.stages()[: partition.num_forward]:
            both = set(maker.blocks).intersection(stage.blocks)
            size = sum(profile.blocks[block].attention_bytes for block in both)
            found += [(maker.kind, maker.index, size)] if size else []
    return found


def _directly(
    run: StageRun,
    makers: Sequence[tuple[StageKind, int, int]],
    schedule: Schedule,
    boundary_bytes: int,
    route: BoundaryRoute,
) -> StageRun:
    """Take from a stage run what does not pass the host; what its own worker made needs no copy."""
    direct = sum(
        size
        for action in run.actions
        for kind, index, size in makers
        if schedule.worker_of(ActionKey(kind, index, action.microbatch)) != action.worker
    )
    if route is BoundaryRoute.DIRECT:
        return replace(run, input_bytes=0, output_bytes=0, direct_bytes=direct)
    if run.stage.kind is StageKind.BACKWARD:
        inputs = run.input_bytes - len(run.actions) * boundary_bytes  # the gradient
        return replace(run, input_bytes=inputs, output_bytes=0, direct_bytes=direct)
    outputs = 0 if run.stage.kind is StageKind.FUSED else run.output_bytes
    return replace(run, output_bytes=outputs)
