"""Plans a training within a machine's memory, says what is missing, and improves a running one.

`plan_training` chooses within the memory of the devices, and here within that of the host, too,
where any plan does. `MemoryModel` says what the choice needs, `StepModel` how long a step takes.

`improved_plan` looks for better stages once durations have been measured. The number of
microbatches, teams and rounds stay: they decide in which order gradients are summed up, so results
do not depend on what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from roundpipe_lightning.errors import FitError
from roundpipe_lightning.planning.cost.costs import RecomputeStart, UpdateTiming
from roundpipe_lightning.planning.cost.memory import MemoryModel, MemoryReport
from roundpipe_lightning.planning.cost.predict import Exchange, StepModel, StepPrediction
from roundpipe_lightning.planning.model.profile import ModelProfile
from roundpipe_lightning.planning.model.work import time_model
from roundpipe_lightning.planning.schedule.plan import PipelineConfig, PipelineLayout, Plan
from roundpipe_lightning.planning.schedule.stages import Partition, RecomputePolicy
from roundpipe_lightning.planning.search.cases import (
    ONES,
    Admits,
    are_held,
    largest_stages,
    limits_within,
    pipeline_configs,
)
from roundpipe_lightning.planning.search.partition import Effort, StageLimits
from roundpipe_lightning.planning.search.planner import PlannedTraining, plan_training
from roundpipe_lightning.planning.search.request import PartitionHints, PlanningRequest

_LEAST_SHORTAGE = 1e-9


@dataclass(frozen=True, kw_only=True)
class TrainingJob(MemoryModel):
    """A model's training on a machine, and the constraints on its plan.

    Attributes:
        dtype: Name of the compute dtype in `MatrixRates`.
        num_batches: Batches that are accumulated before the weights change.
        batch_sequences: Sequences of a batch, where the last microbatch has fewer than the others;
            None: all have as many.
        effort: How long to search per team and round size. `QUICK`: some even stages alone, in
            teams of 1 or of all, to compare jobs with each other or to show that one fits.
        joined: Whether the microbatches are pieces of one batch, as in `PipelineConfig`.
        plain: Whether all microbatches go forward before one goes backward, as in
            `PipelineConfig`.
        accumulates: Whether a step is of several batches, even where one alone is planned.
    """

    dtype: str
    num_microbatches: int
    num_batches: int = 1
    batch_sequences: int | None = None
    hints: PartitionHints = field(default_factory=PartitionHints)
    timing: UpdateTiming = UpdateTiming.AFTER_STEP
    effort: Effort = field(default_factory=Effort)
    joined: bool = False
    plain: bool = False

    @cached_property
    def profile(self) -> ModelProfile:
        return time_model(self.work, hardware=self.hardware, shape=self.shape, dtype=self.dtype)

    @cached_property
    def speeds(self) -> tuple[float, ...]:
        """How fast every device computes a microbatch, relative to `profile`; empty: alike."""
        if not self.hardware.unequal:
            return ()
        alone = self.profile.busy_seconds
        seconds = {
            one: time_model(
                self.work, hardware=one, shape=self.shape, dtype=self.dtype
            ).busy_seconds
            for one in dict.fromkeys(self.hardware.unequal)
        }
        return tuple(alone / seconds[one] for one in self.hardware.unequal)

    @property
    def recompute_start(self) -> RecomputeStart:
        """Begin of a recompute: CPU workers run an action in one go."""
        on_host = self.hardware.shares_host_memory
        return RecomputeStart.WITH_GRADIENT if on_host else RecomputeStart.EARLY

    @property
    def step_tokens(self) -> int:
        """Tokens of an optimizer step of one host."""
        sequences = self.batch_sequences or self.shape.sequences * self.num_microbatches
        return sequences * self.shape.seq_len * self.num_batches

    @property
    def exchange(self) -> Exchange:
        """What this host exchanges with others in a step."""
        return Exchange(
            work=self.work,
            storage=self.storage,
            hardware=self.hardware,
            steps_at_end=self.clips or self.accumulates,
        )

    def predict(
        self, layout: PipelineLayout, *, profile: ModelProfile | None = None
    ) -> StepPrediction:
        """Predict an optimizer step; `profile` is the model with measured durations."""
        profile = self.profile if profile is None else profile
        alone = StepModel(
            profile=profile,
            hardware=self.hardware,
            num_trainable=self.work.num_trainable,
            storage=self.storage,
            timing=self.timing,
            recompute_start=self.recompute_start,
        ).predict(layout)
        return self.exchange.with_network(alone, profile)


@dataclass(frozen=True, kw_only=True)
class FitAnswer:
    """Whether a job fits, and how it is best done.

    Attributes:
        layout: The stages, teams and rounds; the smallest stages where none fit a device.
        planned: The plan; None, with the reason, where a device holds not even the smallest stages.
    """

    job: TrainingJob
    layout: PipelineLayout
    planned: PlannedTraining | None = None
    reason_no_plan: str = ""

    @cached_property
    def memory(self) -> MemoryReport:
        return self.job.report(self.layout)

    @property
    def prediction(self) -> StepPrediction | None:
        return None if self.planned is None else self.planned.prediction

    @property
    def fits(self) -> bool:
        return self.planned is not None and self.memory.fits

    @property
    def optimizer_disk_bytes(self) -> float:
        return self.job.work.num_trainable * self.job.storage.disk_bytes

    @property
    def tokens_per_second(self) -> float:
        """Tokens of an optimizer step of all hosts by its seconds; 0 without a plan."""
        if self.prediction is None:
            return 0.0
        tokens = self.job.step_tokens * self.job.hardware.num_nodes
        return tokens / self.prediction.step_seconds

    @property
    def hidden_tokens(self) -> float | None:
        """Tokens of a step and host from which on no step waits for the network.

        None: it always does, or there is no plan. A step is taken to get longer as its tokens do.
        """
        if self.prediction is None:
            return None
        waits = self.prediction.network_seconds
        alone = replace(self.prediction, step_seconds=self.prediction.step_seconds - waits)
        share = self.job.exchange.share_of_room(alone, self.job.profile)
        return self.job.step_tokens * share if math.isfinite(share) else None

    def on_hosts(self, num_nodes: int) -> FitAnswer:
        """Return the answer with the same plan on another number of hosts."""
        hardware = self.job.hardware
        if num_nodes != hardware.num_nodes:
            hardware = replace(hardware, num_nodes=num_nodes, memory_share=None)
        job = replace(self.job, hardware=hardware)
        planned = self.planned
        if planned is not None:
            planned = replace(planned, prediction=job.predict(planned.prediction.layout))
        return replace(self, job=job, planned=planned)

    @property
    def one_by_one_seconds(self) -> float:
        """A step of accumulated batches that run one after the other; 0 without a plan."""
        if self.prediction is None:
            return 0.0
        one = replace(self.job, num_batches=1)
        layout = replace(self.layout, num_microbatches=one.num_microbatches)
        batch = one.predict(layout)
        rest = batch.step_seconds - batch.pipeline_seconds
        return batch.pipeline_seconds * self.job.num_batches + rest


def fit_training(job: TrainingJob, *others: TrainingJob) -> FitAnswer:
    """Find the fastest plan that fits, or say what is missing.

    `others` is the same job with other numbers of microbatches, to choose from.

    Raises:
        PlanError: A hint cannot be kept.
    """
    jobs = {each.num_microbatches: each for each in (job, *others)}
    for each in jobs.values():
        each.hints.check(
            num_blocks=len(job.work.blocks),
            cuts=job.work.cuts,
            num_devices=job.hardware.num_devices,
            num_microbatches=each.num_microbatches,
        )
    try:
        planned = _plan(jobs)
    except FitError as error:
        return replace(_smallest(job), reason_no_plan=str(error))
    plan = planned.plan
    chosen = jobs[plan.num_microbatches // job.num_batches]
    answer = FitAnswer(job=chosen, layout=plan.layout, planned=planned)
    return answer.on_hosts(job.hardware.num_nodes)


def fits_memory(job: TrainingJob) -> bool:
    """Return whether some stages, teams and rounds fit; quicker than to plan them."""
    if not job.host_may_fit:
        return False
    footprint = job.footprint
    profile = footprint.profile
    if job.hints.cuts:
        limits = job.hints.limited(StageLimits.none(profile.num_blocks))
        wanted = job.hints.partitions(
            job.work.block_names, limits=limits, cuts=job.work.cuts, plain=job.plain
        )
        return any(_fits(job, t.with_stages(p)) for t in _configs(job) for p in wanted)
    for config in _configs(job):
        if _fits(job, config.with_stages(largest_stages(profile, ONES, plain=job.plain))):
            return True
        most = limits_within(footprint, config=config)  # fewer stages, fewer boundaries
        if most is not None:
            largest = largest_stages(profile, job.hints.limited(most), plain=job.plain)
            if _fits(job, config.with_stages(largest)):
                return True
    return False


def holds_block(job: TrainingJob) -> bool:
    """Return whether a device holds a stage of one block, so that there is a plan to predict."""
    if job.hints.cuts or job.hints.recompute == (RecomputePolicy.NONE,):
        return True  # their stages are looked at one by one
    return any(are_held(ONES, footprint=job.footprint, config=config) for config in _configs(job))


def memory_shortage(job: TrainingJob) -> float:
    """Return what the smallest stages lack of device or host, as a share of what there is.

    It is more than 0 if and only if no plan fits.
    """
    lack = _smallest(job).memory.missing_share
    return min(lack, 0.0) if fits_memory(job) else max(lack, _LEAST_SHORTAGE)


def _fits(job: TrainingJob, layout: PipelineLayout) -> bool:
    return job.footprint.fits(layout) and job.host_fits(layout)


def _configs(job: TrainingJob) -> list[PipelineConfig]:
    request = _request(job, (job.num_microbatches,)).without_selective()  # which needs more
    return pipeline_configs(job.hardware, request, num_batches=job.num_batches)


def _plan(jobs: Mapping[int, TrainingJob]) -> PlannedTraining:
    """Choose the plan within the memory of devices and, where that is possible, of the host."""
    job = next(iter(jobs.values()))

    def admits(layout: PipelineLayout) -> bool:
        return jobs[layout.num_microbatches // layout.num_batches].host_fits(layout)

    request = _request(job, tuple(jobs))
    return _planned(job, request, lambda count: jobs[count].profile, admits)


def _planned(
    job: TrainingJob,
    request: PlanningRequest,
    profile: ModelProfile | Callable[[int], ModelProfile],
    admits: Admits | None = None,
) -> PlannedTraining:
    return plan_training(
        profile,
        hardware=job.hardware,
        request=request,
        admits=admits,
        storage=job.storage,
        num_trainable=job.work.num_trainable,
        timing=job.timing,
    )


def _request(job: TrainingJob, counts: tuple[int, ...]) -> PlanningRequest:
    return PlanningRequest(
        num_microbatches=counts,
        num_batches=job.num_batches,
        hints=job.hints,
        effort=job.effort,
        recompute_start=job.recompute_start,
        speeds=job.speeds,
        joined=job.joined,
        plain=job.plain,
    )


def _smallest(job: TrainingJob) -> FitAnswer:
    """The answer where nothing fits: what the smallest stages would need, or the fixed cuts."""
    profile = job.footprint.profile
    partitions = job.hints.partitions(
        job.work.block_names,
        limits=job.hints.limited(ONES),
        cuts=job.work.cuts,
        plain=job.plain,
    ) or (largest_stages(profile, ONES, plain=job.plain),)
    if job.hints.recompute == (RecomputePolicy.NONE,):
        partitions = (Partition.whole(profile.num_blocks, plain=job.plain),)
    layouts = [t.with_stages(partition) for partition in partitions for t in _configs(job)]
    answers = [FitAnswer(job=job, layout=layout) for layout in layouts]
    return min(answers, key=lambda answer: answer.memory.device.total_bytes)


LEAST_GAIN = 0.03
"""Share of a step that a new plan has to save to be taken."""


def improved_plan(
    plan: Plan,
    *,
    profile: ModelProfile,
    job: TrainingJob,
    planning_seconds: float = 0.0,
    remaining_steps: int | None = None,
) -> tuple[PlannedTraining, PlannedTraining] | None:
    """Look for a plan that is worth a change: the one in use as it is predicted, and the new one.

    None where too little is to be gained.

    Args:
        profile: The model with measured durations.
        job: What the plan was made for: the machine, its memory, the hints.
        planning_seconds: How long the search takes, as far as is known.
        remaining_steps: Steps in which it has to be repaid; None: not known, so no condition.
    """
    if job.hints.cuts or plan.recompute is RecomputePolicy.NONE:
        return None
    fixed: Any = {
        "team_size": plan.team_size,
        "round_size": plan.round_size,
        "weight_slots": plan.weight_slots,
        "like_teams": plan.like_teams,
        "shares_backward": plan.shares_backward,
        "recompute": (plan.recompute,),
        "resident": job.hints.resident if plan.resident else 0,
    }
    cuts: Any = {
        "forward": plan.partition.forward,
        "backward": plan.partition.backward,
        "keeps_graphs": plan.partition.keeps_graphs,
    }
    hints = replace(job.hints, **fixed)
    asked = PartitionHints(**fixed, **cuts)
    try:
        one = replace(job, num_batches=1)
        request = _request(one, (plan.num_microbatches,))
        before = _planned(one, replace(request, hints=asked), profile)
        seconds = before.seconds
        # a step in which no worker ever waits and no block runs forward twice
        least = profile.busy_seconds * plan.num_microbatches / plan.num_workers
        possible = seconds - least
        if possible < LEAST_GAIN * seconds:
            return None
        if remaining_steps is not None and possible * remaining_steps < planning_seconds:
            return None
        after = _planned(one, replace(request, hints=hints), profile)
    except FitError:  # no stages fit
        return None
    return (before, after) if after.seconds <= (1 - LEAST_GAIN) * seconds else None
