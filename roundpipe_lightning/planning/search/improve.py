"""Better stages for a running training, from measured durations.

The number of microbatches, teams and rounds stay: they decide in which order gradients are summed
up, so results do not depend on what was measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from roundpipe_lightning.errors import FitError
from roundpipe_lightning.planning.cost.costs import RecomputeStart
from roundpipe_lightning.planning.model.profile import ModelProfile
from roundpipe_lightning.planning.schedule.plan import Plan
from roundpipe_lightning.planning.schedule.recompute import RecomputePolicy
from roundpipe_lightning.planning.schedule.stages import Partition
from roundpipe_lightning.planning.search.evolve import StageLimits
from roundpipe_lightning.planning.search.fit import TrainingJob
from roundpipe_lightning.planning.search.planner import (
    PlannedTraining,
    PlanningRequest,
    plan_training,
)

LEAST_GAIN = 0.03
"""Share of a step that a new plan has to save to be taken."""


@dataclass(frozen=True, kw_only=True)
class Improvement:
    """A plan whose predicted step is shorter.

    Attributes:
        plan: The new plan.
        before_seconds: Predicted step of the plan in use.
        after_seconds: Predicted step of the new one.
    """

    plan: Plan
    before_seconds: float
    after_seconds: float

    @property
    def gain(self) -> float:
        """Share of the step that is saved."""
        return 1.0 - self.after_seconds / self.before_seconds


def improved_plan(
    plan: Plan,
    *,
    profile: ModelProfile,
    job: TrainingJob,
    planning_seconds: float = 0.0,
    remaining_steps: int | None = None,
) -> Improvement | None:
    """Look for a plan that is worth a change.

    Args:
        plan: The plan in use.
        profile: The model with measured durations.
        job: What the plan was made for: the machine, its memory, the hints.
        planning_seconds: How long the search takes, as far as is known.
        remaining_steps: Steps in which it has to be repaid; None: not known, so no condition.

    Returns:
        None where nothing is to be gained, or too little.
    """
    if job.hints.cuts or plan.recompute is RecomputePolicy.NONE:
        return None
    before = _predicted(plan, profile, job, partitions=(plan.partition,))
    if before is None:
        return None
    possible = before.timeline.makespan_seconds - _least_seconds(plan, profile)
    if possible < LEAST_GAIN * before.timeline.makespan_seconds:
        return None
    if remaining_steps is not None and possible * remaining_steps < planning_seconds:
        return None
    after = _predicted(plan, profile, job, partitions=())
    if after is None:
        return None
    improvement = Improvement(
        plan=after.plan,
        before_seconds=before.timeline.makespan_seconds,
        after_seconds=after.timeline.makespan_seconds,
    )
    return improvement if improvement.gain >= LEAST_GAIN else None


def _least_seconds(plan: Plan, profile: ModelProfile) -> float:
    """A step in which no worker ever waits and no block runs forward twice."""
    return profile.busy_seconds * plan.num_microbatches / plan.num_workers


def _predicted(
    plan: Plan, profile: ModelProfile, job: TrainingJob, *, partitions: tuple[Partition, ...]
) -> PlannedTraining | None:
    """Plan with the teams and rounds that there are; None where no stages fit."""
    try:
        return _planned(plan, profile, job, partitions=partitions)
    except FitError:
        return None


def _planned(
    plan: Plan, profile: ModelProfile, job: TrainingJob, *, partitions: tuple[Partition, ...]
) -> PlannedTraining:
    largest = max(1, profile.num_blocks)
    limits = StageLimits(forward=largest, backward=largest, fused=profile.num_blocks)
    on_host = job.hardware.shares_host_memory
    return plan_training(
        job.storage.stored(profile),
        hardware=job.storage.links(job.hardware),
        request=PlanningRequest(
            num_microbatches=plan.num_microbatches,
            team_sizes=(plan.team_size,),
            round_sizes=(plan.round_size,),
            limits=limits if partitions else job.hints.limited(limits),
            partitions=partitions,
            effort=job.effort,
            recompute=(plan.recompute,),
            weight_slots=(plan.weight_slots,),
            at_most_resident=max(map(len, plan.resident), default=0),
            recompute_start=RecomputeStart.WITH_GRADIENT if on_host else RecomputeStart.EARLY,
        ),
    )


__all__ = ["LEAST_GAIN", "Improvement", "improved_plan"]
