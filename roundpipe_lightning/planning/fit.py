"""Plans a training within a machine's memory, and says what is missing where it does not fit.

Teams and rounds decide how much a device holds beside its stage (the boundaries of the round's
other microbatches), so each of them has stage limits of its own: the most blocks per stage with
which `MemoryModel` still fits. Within them `plan_training` finds the fastest plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property

from roundpipe_lightning.errors import PlanError
from roundpipe_lightning.planning.costs import RecomputeStart
from roundpipe_lightning.planning.cuts import call_lengths, cuts_before, reversed_cuts
from roundpipe_lightning.planning.hardware import HardwareSpec
from roundpipe_lightning.planning.hints import PartitionHints
from roundpipe_lightning.planning.memory import MemoryModel, MemoryReport
from roundpipe_lightning.planning.partition import greedy_cuts
from roundpipe_lightning.planning.planner import PlannedTraining, PlanningRequest, plan_training
from roundpipe_lightning.planning.predict import (
    PipelineLayout,
    StepPrediction,
    UpdateTiming,
    predict_step,
)
from roundpipe_lightning.planning.search import Effort, StageLimits
from roundpipe_lightning.planning.stages import Partition
from roundpipe_lightning.planning.storage import ParameterStorage
from roundpipe_lightning.planning.work import MicrobatchShape, WorkProfile, time_model

_ONES = StageLimits(forward=1, fused=0, backward=1)
"""The smallest stages."""


class Search(Enum):
    """How thoroughly to look for stages."""

    FULL = "full"
    """As thoroughly as the planner does."""

    QUICK = "quick"
    """Even stages alone, as large as they may be or half of it, in teams of 1 or of all: to compare
    jobs with each other, or to show that one fits."""


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """What is trained on which machine, and what is settled about the plan.

    Attributes:
        work: The model.
        hardware: The machine.
        dtype: Name of the compute dtype in `MatrixRates`.
        storage: What is kept for each parameter.
        shape: One microbatch.
        num_microbatches: Microbatches of a batch.
        num_batches: Batches that are accumulated before the weights change.
        hints: What the user has settled.
        timing: When the optimizer runs.
        search: How thoroughly to look for stages.
        effort: How long to search per team and round size, where the search is full.
    """

    work: WorkProfile
    hardware: HardwareSpec
    dtype: str
    storage: ParameterStorage
    shape: MicrobatchShape
    num_microbatches: int
    num_batches: int = 1
    hints: PartitionHints = field(default_factory=PartitionHints)
    timing: UpdateTiming = UpdateTiming.AFTER_STEP
    search: Search = Search.FULL
    effort: Effort = field(default_factory=Effort)

    @cached_property
    def memory(self) -> MemoryModel:
        """What plans for this job need."""
        return MemoryModel(work=self.work, hardware=self.hardware, storage=self.storage)

    @property
    def step_microbatches(self) -> int:
        """Microbatches of an optimizer step."""
        return self.num_microbatches * self.num_batches

    def report(self, layout: PipelineLayout) -> MemoryReport:
        """Return what a layout needs."""
        return self.memory.report(layout, shape=self.shape)

    def predict(self, layout: PipelineLayout) -> StepPrediction:
        """Predict an optimizer step of a layout."""
        profile = time_model(self.work, hardware=self.hardware, shape=self.shape, dtype=self.dtype)
        return predict_step(
            profile,
            hardware=self.hardware,
            layout=layout,
            num_trainable=self.work.num_trainable,
            storage=self.storage,
            timing=self.timing,
        )


@dataclass(frozen=True, kw_only=True)
class FitAnswer:
    """Whether a job fits, and how it is best done.

    Attributes:
        job: What was asked.
        layout: The stages, teams and rounds; the smallest stages where none fit a device.
        memory: What they need.
        planned: The plan; None where a device cannot hold even the smallest stages.
        prediction: How long an optimizer step takes; None without a plan.
    """

    job: TrainingJob
    layout: PipelineLayout
    memory: MemoryReport
    planned: PlannedTraining | None
    prediction: StepPrediction | None

    @property
    def fits(self) -> bool:
        """Whether there is a plan, and memory for it."""
        return self.planned is not None and self.memory.fits

    @property
    def tokens_per_second(self) -> float:
        """Tokens of an optimizer step by its seconds; 0 without a plan."""
        if self.prediction is None:
            return 0.0
        tokens = self.job.shape.tokens * self.job.step_microbatches
        return tokens / self.prediction.step_seconds


def fit_training(job: TrainingJob) -> FitAnswer:
    """Find the fastest plan that fits, or say what is missing.

    Raises:
        PlanError: A hint cannot be kept.
    """
    job.hints.check(
        num_blocks=len(job.work.blocks),
        num_devices=job.hardware.num_devices,
        num_microbatches=job.num_microbatches,
    )
    answers = [
        _plan(job, request)
        for request in (_fixed_requests(job) if job.hints.cuts else _requests(job))
    ]
    if not answers:
        return _smallest(job)
    return min(answers, key=lambda answer: (not answer.fits, -answer.tokens_per_second))


def fits_memory(job: TrainingJob) -> bool:
    """Say whether some stages, teams and rounds fit; quicker than to plan them."""
    smallest = _even(job, _ONES)
    reports = [
        job.report(_layout(job, smallest, round_size=round_size, team_size=team_size))
        for team_size, round_size in _shapes(job)
    ]
    if all(report.device.missing_bytes for report in reports):
        return False
    if any(report.fits for report in reports):
        return True
    for (limits, round_size), teams in _by_limits(job).items():  # fewer stages, fewer boundaries
        largest = _even(job, limits)
        layouts = (_layout(job, largest, round_size=round_size, team_size=team) for team in teams)
        if any(job.report(layout).fits for layout in layouts):
            return True
    return False


def stage_limits_within(job: TrainingJob, *, round_size: int, team_size: int) -> StageLimits | None:
    """Return the most blocks per stage with which every device can hold its part.

    Args:
        job: What is trained.
        round_size: Microbatches of a round.
        team_size: Workers of a team.

    Returns:
        The limits; None where stages of one block do not fit.
    """

    def holds(forward: int, fused: int, backward: int) -> bool:
        limits = StageLimits(forward=forward, fused=fused, backward=backward)
        layout = _layout(job, _even(job, limits), round_size=round_size, team_size=team_size)
        return not job.report(layout).device.missing_bytes

    if not holds(1, 0, 1):
        return None
    num_blocks = len(job.work.blocks)
    most = max(num_blocks, 1)
    forward = _largest(lambda n: holds(n, 0, 1), least=1, most=most)
    backward = _largest(lambda n: holds(1, 0, n), least=1, most=most)
    fused = _largest(lambda n: holds(1, n, 1), least=0, most=num_blocks)
    while not holds(forward, fused, backward):  # neighbours share a device's two slots
        if forward > max(backward, fused):
            forward -= 1
        elif fused > backward:
            fused -= 1
        elif backward > 1:
            backward -= 1
        else:
            forward, fused = max(forward - 1, 1), max(fused - 1, 0)
    return StageLimits(forward=forward, fused=fused, backward=backward)


def _largest(holds: Callable[[int], bool], *, least: int, most: int) -> int:
    """The largest number that holds, of which `least` does: by doubling, then by bisection."""
    stride = 1
    while least + stride <= most and holds(least + stride):
        least, stride = least + stride, 2 * stride
    most = min(most, least + stride - 1)
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if holds(middle) else (least, middle - 1)
    return least


def _by_limits(job: TrainingJob) -> dict[tuple[StageLimits, int], list[int]]:
    """Team sizes by the stage limits and the round size that they go with."""
    groups: dict[tuple[StageLimits, int], list[int]] = {}
    for team_size, round_size in _shapes(job):
        limits = stage_limits_within(job, round_size=round_size, team_size=team_size)
        if limits is not None:
            groups.setdefault((job.hints.limited(limits), round_size), []).append(team_size)
    return groups


def _shapes(job: TrainingJob) -> Iterator[tuple[int, int]]:
    """Team and round sizes to choose from."""
    hints, num_devices = job.hints, job.hardware.num_devices
    divisors = [size for size in range(1, num_devices + 1) if num_devices % size == 0]
    if job.search is Search.QUICK:
        divisors = sorted({1, num_devices})
    teams = divisors if hints.team_size is None else [hints.team_size]
    rounds = {job.num_microbatches, min(num_devices, job.num_microbatches)}
    for team_size in teams:
        for round_size in sorted(rounds) if hints.round_size is None else [hints.round_size]:
            if team_size <= round_size:
                yield team_size, round_size


def _requests(job: TrainingJob) -> Iterator[PlanningRequest]:
    """One request for all teams that have the same stage limits."""
    for (limits, round_size), teams in _by_limits(job).items():
        request = _request(job, limits, teams=tuple(teams), round_size=round_size)
        if job.search is Search.QUICK:
            half = StageLimits(
                forward=-(-limits.forward // 2),
                fused=limits.fused // 2,
                backward=-(-limits.backward // 2),
            )
            even = dict.fromkeys((_even(job, limits), _even(job, half)))
            request = replace(request, partitions=tuple(even))
        yield request


def _fixed_requests(job: TrainingJob) -> Iterator[PlanningRequest]:
    """Requests for the cuts that are fixed, as far as the devices hold them."""
    num_blocks = len(job.work.blocks)
    largest = max(num_blocks, 1)
    limits = job.hints.limited(StageLimits(forward=largest, fused=num_blocks, backward=largest))
    for team_size, round_size in _shapes(job):
        layouts = (
            _layout(job, partition, round_size=round_size, team_size=team_size)
            for partition in job.hints.partitions(
                job.work.block_names, limits=limits, cuts=job.work.cuts
            )
        )
        held = tuple(
            layout.partition for layout in layouts if not job.report(layout).device.missing_bytes
        )
        if held:
            request = _request(job, limits, teams=(team_size,), round_size=round_size)
            yield replace(request, partitions=held)


def _request(
    job: TrainingJob, limits: StageLimits, *, teams: tuple[int, ...], round_size: int
) -> PlanningRequest:
    on_host = job.hardware.shares_host_memory
    return PlanningRequest(
        num_microbatches=job.num_microbatches,
        num_batches=job.num_batches,
        team_sizes=teams,
        round_sizes=(round_size,),
        limits=limits,
        effort=job.effort,
        recompute_start=RecomputeStart.WITH_GRADIENT if on_host else RecomputeStart.EARLY,
    )


def _plan(job: TrainingJob, request: PlanningRequest) -> FitAnswer:
    """Plan within the limits, and look at what the plan needs."""
    profile = time_model(job.work, hardware=job.hardware, shape=job.shape, dtype=job.dtype)
    planned = plan_training(
        job.storage.stored(profile), hardware=job.storage.links(job.hardware), request=request
    )
    plan = planned.plan
    layout = _layout(job, plan.partition, round_size=plan.round_size, team_size=plan.team_size)
    return FitAnswer(
        job=job,
        layout=layout,
        memory=job.report(layout),
        planned=planned,
        prediction=job.predict(layout),
    )


def _smallest(job: TrainingJob) -> FitAnswer:
    """The answer where nothing fits: what the smallest stages would need, or the fixed cuts."""
    wanted = job.hints.partitions(
        job.work.block_names, limits=job.hints.limited(_ONES), cuts=job.work.cuts
    )
    partitions = wanted or (_even(job, _ONES),)
    layouts = [
        _layout(job, partition, round_size=round_size, team_size=team_size)
        for partition in partitions
        for team_size, round_size in _shapes(job)
    ]
    if not layouts:
        raise PlanError(
            f"No team size goes with partition.round_size={job.hints.round_size} and "
            f"{job.num_microbatches} microbatches: a round has at least one microbatch per worker "
            "of a team, and at most the whole batch."
        )
    reports = [(job.report(layout), layout) for layout in layouts]
    memory, layout = min(reports, key=lambda pair: pair[0].device.total_bytes)
    return FitAnswer(job=job, layout=layout, memory=memory, planned=None, prediction=None)


def _layout(
    job: TrainingJob, partition: Partition, *, round_size: int, team_size: int
) -> PipelineLayout:
    return PipelineLayout(
        partition=partition,
        num_microbatches=job.step_microbatches,
        round_size=round_size,
        team_size=team_size,
    )


def _even(job: TrainingJob, limits: StageLimits) -> Partition:
    """Stages as large as the limits and the model's cuts allow."""
    num_blocks, cuts = len(job.work.blocks), job.work.cuts
    fused = min(limits.fused, sum(call_lengths(num_blocks, cuts)[-1:]))
    rest = num_blocks - fused
    forward = greedy_cuts([1.0] * rest, limit=limits.forward, cuts=cuts_before(rest, cuts))
    backward = greedy_cuts([1.0] * rest, limit=limits.backward, cuts=reversed_cuts(rest, cuts))
    return Partition(forward=forward, backward=(fused, *backward))


__all__ = [
    "FitAnswer",
    "Search",
    "TrainingJob",
    "fit_training",
    "fits_memory",
    "stage_limits_within",
]
