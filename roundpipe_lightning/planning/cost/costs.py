"""Costs of the actions of a partition, the simulator's input, and of the host beside them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from roundpipe_lightning.errors import PlanError
from roundpipe_lightning.planning.model.profile import ModelProfile
from roundpipe_lightning.planning.schedule.stages import (
    Partition,
    RecomputePolicy,
    Stage,
    StageKind,
)

Floats = npt.NDArray[np.float64]


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

    def times(self, factor: float) -> ActionCost:
        return ActionCost(
            recompute_seconds=factor * self.recompute_seconds,
            compute_seconds=factor * self.compute_seconds,
        )


class UpdateTiming(Enum):
    """Time at which the optimizer runs."""

    AFTER_STEP = "after_step"
    """After all gradients have come down and before the next step begins (synchronous training)."""

    BEHIND_NEXT_STEP = "behind_next_step"
    """While the next step computes with weights that are one step old (asynchronous updates)."""


@dataclass(frozen=True, kw_only=True)
class HostCosts:
    """What a step takes beside its pipeline; all durations in seconds.

    Attributes:
        per_uploaded_byte: For which an upload keeps the host's memory busy.
        per_downloaded_byte: For which a gradient does, the sum that it is added to included.
        first_upload: Of one byte of the first upload, which nothing hides.
        last_download: Of one byte of the last download.
    """

    per_uploaded_byte: float = 0.0
    per_downloaded_byte: float = 0.0
    first_upload: float = 0.0
    last_download: float = 0.0
    optimizer: float = 0.0
    timing: UpdateTiming = UpdateTiming.AFTER_STEP

    @property
    def goes_on(self) -> bool:
        return self.timing is UpdateTiming.BEHIND_NEXT_STEP

    def step_seconds(
        self,
        pipeline: float | Floats,
        *,
        uploaded: float | Floats,
        downloaded: float | Floats,
        edges: float | Floats,
    ) -> Floats:
        """Return the whole step, given its pipeline, its bytes and what nothing hides."""
        host = self.per_uploaded_byte * uploaded + self.per_downloaded_byte * downloaded
        if self.goes_on:
            return np.maximum(pipeline, host + self.optimizer)
        step: Floats = np.maximum(pipeline, host) + edges + self.optimizer
        return step


@dataclass(frozen=True, kw_only=True)
class StageCosts:
    """Costs of every stage of a partition.

    Attributes:
        forward: Per FORWARD stage, in the order of `Partition.forward`.
        backward: Per FUSED and BACKWARD stage, in the order of `Partition.backward`.
        hop_seconds: Time for a boundary or gradient to get from one worker to another.
        route: The way that boundaries take, which the hop is of.
        speeds: How fast every worker is: the costs are those of speed 1. Empty: all are.
    """

    forward: tuple[ActionCost, ...]
    backward: tuple[ActionCost, ...]
    hop_seconds: float = 0.0
    recompute_start: RecomputeStart = RecomputeStart.EARLY
    route: BoundaryRoute = BoundaryRoute.THROUGH_HOST
    speeds: tuple[float, ...] = ()

    def of(self, kind: StageKind, index: int, worker: int = 0) -> ActionCost:
        cost = self.forward[index] if kind is StageKind.FORWARD else self.backward[index]
        return cost.times(1 / self.speeds[worker]) if self.speeds else cost


def stage_costs(
    profile: ModelProfile,
    *,
    partition: Partition,
    hop_seconds: float = 0.0,
    recompute_start: RecomputeStart = RecomputeStart.EARLY,
    recompute: RecomputePolicy = RecomputePolicy.FULL,
    route: BoundaryRoute = BoundaryRoute.THROUGH_HOST,
    speeds: tuple[float, ...] = (),
) -> StageCosts:
    """Add up the blocks of every stage; PlanError if the partition has another number of blocks."""
    if partition.num_blocks != profile.num_blocks:
        raise PlanError(f"'{partition}' does not cut a model of {profile.num_blocks} blocks.")
    costs = [_stage_cost(stage, profile, recompute) for stage in partition.stages()]
    return StageCosts(
        forward=tuple(costs[: partition.num_forward]),
        backward=tuple(costs[partition.num_forward :]),
        hop_seconds=hop_seconds,
        recompute_start=recompute_start,
        route=route,
        speeds=speeds,
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
