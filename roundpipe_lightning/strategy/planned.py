"""A plan and what it was made for, for batches of one shape."""

from __future__ import annotations

from dataclasses import dataclass

from roundpipe_lightning.planning.model.measured import MeasuredProfile
from roundpipe_lightning.planning.model.profile import ModelProfile
from roundpipe_lightning.planning.model.work import Operations, time_model
from roundpipe_lightning.planning.schedule.plan import Plan
from roundpipe_lightning.planning.search.fit import TrainingJob

_FIRST_LOOK = 5
"""Steps after which measured times are looked at; then after twice as many, and so on."""


@dataclass(kw_only=True)
class Planned:
    """A plan and what it was made for.

    Attributes:
        plan: The plan in use for batches like this one.
        job: What was planned.
        size: Values in the largest microbatch's tensors; 0: before the first batch.
        measured: How long its blocks take, as far as that has been measured.
        knows_activations: Whether the job's work is that of the step, not of its parameters alone.
        planning_seconds: How long the search took.
        next_look: Steps after which a better plan is looked for.
        operations: Of a microbatch with one of its plans, where they were asked for.
    """

    plan: Plan
    job: TrainingJob
    size: int
    measured: MeasuredProfile
    knows_activations: bool
    planning_seconds: float = 0.0
    next_look: int = _FIRST_LOOK
    operations: tuple[Plan, Operations] | None = None


def make_planned(plan: Plan, job: TrainingJob, *, knows_activations: bool) -> Planned:
    """Return a plan that nothing has been measured of yet.

    Args:
        plan: The plan.
        job: What it is for.
        knows_activations: Whether the job's work is that of the step.
    """
    return Planned(
        plan=plan,
        job=job,
        size=0,
        measured=MeasuredProfile(timed_profile(job)),
        knows_activations=knows_activations,
    )


def timed_profile(job: TrainingJob) -> ModelProfile:
    """Return a job's model with durations on its machine."""
    return time_model(job.work, hardware=job.hardware, shape=job.shape, dtype=job.dtype)
