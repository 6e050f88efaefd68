"""The way that boundaries and their gradients take between the stages of a plan.

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

from collections.abc import Iterable

from roundpipe_lightning.planning.cost.costs import BoundaryRoute
from roundpipe_lightning.planning.cost.device_memory import Footprint
from roundpipe_lightning.planning.model.hardware import HardwareSpec
from roundpipe_lightning.planning.model.profile import ModelProfile
from roundpipe_lightning.planning.schedule.dependencies import stage_dependencies
from roundpipe_lightning.planning.schedule.layout import PipelineLayout
from roundpipe_lightning.planning.schedule.recompute import RecomputePolicy
from roundpipe_lightning.planning.schedule.schedule import Action, Schedule
from roundpipe_lightning.planning.schedule.stages import Partition, Stage, StageKind

MOST_IN_USE = 0.8
"""Share of a device's memory in use, below which tensors stay on it that could wait on the host."""

_ROUNDS_UNDER_WAY = 2


def boundary_route(footprint: Footprint, layout: PipelineLayout) -> BoundaryRoute:
    """Return the way that boundaries take in a layout.

    Args:
        footprint: The model on the machine.
        layout: How the microbatches travel.
    """
    hardware = footprint.hardware
    is_alone = footprint.num_teams(layout) == 1  # no microbatch ever changes its worker
    if hardware.shares_host_memory or not (hardware.devices_reach_each_other or is_alone):
        return BoundaryRoute.THROUGH_HOST
    need = footprint.most_bytes(layout) + _staying_bytes(footprint, layout)
    has_room = need < MOST_IN_USE * hardware.device_bytes
    return BoundaryRoute.DIRECT if has_room else BoundaryRoute.GRADIENTS_DIRECT


def hop_seconds(hardware: HardwareSpec, num_bytes: float, *, route: BoundaryRoute) -> float:
    """Return how long a boundary takes from one worker to another.

    A direct copy is taken to be as fast as an upload. Where gradients alone go directly, they too
    are taken to need a boundary's time.

    Args:
        hardware: The machine.
        num_bytes: Size of the boundary.
        route: Its way.
    """
    upload = hardware.upload_seconds(num_bytes)
    if route is BoundaryRoute.DIRECT:
        return upload
    return hardware.download_seconds(num_bytes) + upload


def _staying_bytes(footprint: Footprint, layout: PipelineLayout) -> float:
    """Return what stays on the worker that keeps the most, of the rounds that are under way."""
    partition, profile = layout.partition, footprint.profile
    made = [
        partition.num_readers(stage) * footprint.boundary_bytes
        + _attention_bytes(profile, stage, layout.recompute)
        for stage in partition.stages()
    ]
    teams, count = footprint.num_teams(layout), len(made)
    rounds = _ROUNDS_UNDER_WAY if layout.goes_on or layout.num_batches > 1 else 1
    most = 0
    for first in range(min(teams, layout.num_rounds)):
        kept = [0] * teams
        for turn in range(first * count, (first + rounds) * count):
            kept[turn % teams] += made[turn % count]
        most = max(most, *kept)
    return -(-layout.round_size // layout.team_size) * most


def _attention_bytes(profile: ModelProfile, stage: Stage, recompute: RecomputePolicy) -> int:
    """Return the attention outputs that a stage keeps for one microbatch's recompute."""
    if recompute is not RecomputePolicy.SELECTIVE or stage.kind is not StageKind.FORWARD:
        return 0
    return sum(profile.blocks[block].attention_bytes for block in stage.blocks)


class DirectCopies:
    """Counts what workers of a schedule get by a copy from another one's device.

    Args:
        schedule: Every worker's actions.
        partition: The stages.
        profile: What boundaries and attention outputs weigh.
        recompute: Whether attention outputs are kept.
        route: What goes directly.
    """

    def __init__(
        self,
        schedule: Schedule,
        *,
        partition: Partition,
        profile: ModelProfile,
        recompute: RecomputePolicy,
        route: BoundaryRoute,
    ) -> None:
        self._partition = partition
        self._profile = profile
        self._keeps_attention = recompute is RecomputePolicy.SELECTIVE
        self._is_all = route is BoundaryRoute.DIRECT
        self._boundary_bytes = max((block.boundary_bytes for block in profile.blocks), default=0)
        self._workers = {
            (action.kind, action.stage, action.microbatch): action.worker
            for row in schedule.workers
            for action in row
        }

    def num_bytes(self, stage: Stage, actions: Iterable[Action]) -> int:
        """Return the bytes of a visit's copies: what was made on its own worker needs none."""
        makers = self._makers(stage)
        return sum(
            size
            for action in actions
            for kind, index, size in makers
            if self._workers[kind, index, action.microbatch] != action.worker
        )

    def _makers(self, stage: Stage) -> list[tuple[StageKind, int, int]]:
        """Return the stages whose results a stage takes directly, and how large they are."""
        rules = stage_dependencies(stage.kind, stage.index, self._partition)
        found = [
            (kind, index, self._boundary_bytes)
            for kind, index, _ in rules
            if self._is_all or kind is not StageKind.FORWARD
        ]
        if not (self._is_all and self._keeps_attention and stage.kind is StageKind.BACKWARD):
            return found
        for maker in self._partition.stages()[: self._partition.num_forward]:
            both = set(maker.blocks).intersection(stage.blocks)
            size = sum(self._profile.blocks[block].attention_bytes for block in both)
            if size:
                found.append((maker.kind, maker.index, size))
        return found


__all__ = ["MOST_IN_USE", "DirectCopies", "boundary_route", "hop_seconds"]
