"""Costs of the actions of a partition, in seconds: the simulator's input."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from roundpipe_lightning.errors import PlanError
from roundpipe_lightning.planning.model.profile import ModelProfile
from roundpipe_lightning.planning.schedule.stages import (
    Partition,
    RecomputePolicy,
    Stage,
    StageKind,
)


class RecomputeStart(Enum):
    """Earliest begin of the recompute of a BACKWARD action."""

    EARLY = "early"
    """As soon as its worker is free: accelerators, where it is queued before the gradient's
    event."""

    WITH_GRADIENT = "with_gradient"
    """Once the gradient has arrived: workers that run an action in one go, such as CPU workers."""


class BoundaryRoute(Enum):
    """Route of boundaries between devices."""

    THROUGH_HOST = "through_host"
    """Nothing."""

    GRADIENTS_DIRECT = "gradients_direct"
    """Gradients; for boundaries there is no room."""

    DIRECT = "direct"
    """Boundaries, kept attention outputs and gradients."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ActionCost:
    """Duration of a stage for one microbatch.

    Attributes:
        recompute_seconds: The part that needs no gradient; 0 but for BACKWARD stages.
        compute_seconds: The rest.
    """

    recompute_seconds: float = 0.0
    compute_seconds: float

    def __post_init__(self) -> None:
        if not (self.recompute_seconds >= 0 and self.compute_seconds >= 0):
            raise PlanError(f"{self} must not be negative.")

    @property
    def seconds(self) -> float:
        return self.recompute_seconds + self.compute_seconds


@dataclass(frozen=True, kw_only=True)
class StageCosts:
    """Costs of every stage of a partition.

    Attributes:
        forward: Per FORWARD stage, in the order of `Partition.forward`.
        backward: Per FUSED and BACKWARD stage, in the order of `Partition.backward`.
        hop_seconds: Time for a boundary or gradient to get from one worker to another.
        recompute_start: When a recompute may begin.
        route: The way that boundaries take, which the hop is of.
    """

    forward: tuple[ActionCost, ...]
    backward: tuple[ActionCost, ...]
    hop_seconds: float = 0.0
    recompute_start: RecomputeStart = RecomputeStart.EARLY
    route: BoundaryRoute = BoundaryRoute.THROUGH_HOST

    def of(self, kind: StageKind, index: int) -> ActionCost:
        return self.forward[index] if kind is StageKind.FORWARD else self.backward[index]

    @property
    def work_seconds(self) -> float:
        """All stages together: what one microbatch costs without any waiting."""
        return sum(cost.seconds for cost in (*self.forward, *self.backward))


def stage_costs(
    profile: ModelProfile,
    *,
    partition: Partition,
    hop_seconds: float = 0.0,
    recompute_start: RecomputeStart = RecomputeStart.EARLY,
    recompute: RecomputePolicy = RecomputePolicy.FULL,
    route: BoundaryRoute = BoundaryRoute.THROUGH_HOST,
) -> StageCosts:
    """Add up the blocks of every stage.

    Raises:
        PlanError: If the partition is for another number of blocks.
    """
    if partition.num_blocks != profile.num_blocks:
        raise PlanError(f"'{partition}' does not cut a model of {profile.num_blocks} blocks.")
    costs = [_stage_cost(stage, profile, recompute) for stage in partition.stages()]
    return StageCosts(
        forward=tuple(costs[: partition.num_forward]),
        backward=tuple(costs[partition.num_forward :]),
        hop_seconds=hop_seconds,
        recompute_start=recompute_start,
        route=route,
    )


def _stage_cost(stage: Stage, profile: ModelProfile, policy: RecomputePolicy) -> ActionCost:
    blocks = [profile.blocks[index] for index in stage.blocks]
    head, tail = profile.head, profile.tail
    forward = sum(block.forward_seconds for block in blocks)
    backward = sum(block.backward_seconds for block in blocks)
    head_forward = head.forward_seconds if stage.has_head_forward else 0.0
    head_backward = head.backward_seconds if stage.has_head_backward else 0.0
    if stage.kind is StageKind.FORWARD:
        return ActionCost(compute_seconds=forward + head_forward)
    if stage.kind is StageKind.FUSED:
        both = tail.forward_seconds + tail.backward_seconds
        return ActionCost(compute_seconds=forward + backward + both + head_forward + head_backward)
    recompute = sum(block.seconds_to_recompute(policy) for block in blocks)
    return ActionCost(recompute_seconds=recompute, compute_seconds=backward + head_backward)
