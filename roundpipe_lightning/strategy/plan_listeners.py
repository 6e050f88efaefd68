"""What callbacks may ask of a running training: its plans in words, and the step that has run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from roundpipe_lightning.engine.steps import StepResult
from roundpipe_lightning.planning.model.work import Operations, microbatch_operations
from roundpipe_lightning.planning.report.description import PlanDescription
from roundpipe_lightning.planning.report.step_record import EngineCounters, StepRecord
from roundpipe_lightning.planning.schedule.plan import Plan
from roundpipe_lightning.planning.schedule.timeline import Timeline
from roundpipe_lightning.planning.search.fit import TrainingJob
from roundpipe_lightning.strategy.options import Options
from roundpipe_lightning.strategy.planned import Planned


@dataclass(frozen=True, kw_only=True)
class PlanNews:
    """A plan that is about to be run for the first time.

    Attributes:
        description: The plan, what it is for and what it needs.
        replaced: The plan that was run before for such batches; None for the first one.
        knows_step: Whether the step's code was measured. Otherwise durations and device memory
            follow from the parameters alone.
        assumed_rates: Whether the machine's rates are assumed, not measured or given.
        measured_steps: Steps for such batches that have been measured.
        times_are_measured: Whether the prediction follows from them, not from the machine's rates.
    """

    description: PlanDescription
    replaced: Plan | None
    knows_step: bool
    assumed_rates: bool
    measured_steps: int
    times_are_measured: bool


PlanWatcher: TypeAlias = Callable[[PlanNews], None]

StepWatcher: TypeAlias = Callable[[StepRecord], None]
"""Told of a training step when it has ended."""


class PlanWatch:
    """Tells watchers of plans, each time that another one is about to be run.

    Args:
        watchers: Called in the Trainer's thread, before the step.
        assumed_rates: Whether the machine's rates are assumed.
    """

    def __init__(self, watchers: Sequence[PlanWatcher], *, assumed_rates: bool) -> None:
        self._watchers = watchers
        self._assumed_rates = assumed_rates
        self._told: list[tuple[TrainingJob, Plan]] = []

    def running(self, planned: Planned) -> None:
        """Note that a plan is about to be run."""
        if not self._watchers:
            return
        before = [plan for job, plan in self._told if job is planned.job]
        if before and before[-1] is planned.plan:
            return
        self._told = [pair for pair in self._told if pair[0] is not planned.job]
        self._told.append((planned.job, planned.plan))
        measured = planned.measured
        news = PlanNews(
            description=PlanDescription.of(
                planned.plan,
                job=planned.job,
                profile=measured.profile() if measured.is_ready else None,
            ),
            replaced=before[-1] if before else None,
            knows_step=planned.knows_activations,
            assumed_rates=self._assumed_rates,
            measured_steps=measured.num_steps,
            times_are_measured=measured.is_ready,
        )
        for watcher in self._watchers:
            watcher(news)


def rates_are_assumed(options: Options, *, computes_on_host: bool) -> bool:
    """Say whether a machine's rates were neither measured nor given, as those of CPU workers."""
    return computes_on_host and options.hardware == "auto"


def counters_of(result: StepResult) -> EngineCounters:
    """Add up what the workers have moved in a step, and how long they waited for it."""
    traffic = result.traffic
    return EngineCounters(
        uploaded_bytes=sum(each.uploaded_bytes for each in traffic),
        downloaded_bytes=sum(each.downloaded_bytes for each in traffic),
        upload_wait_seconds=sum(each.weights_wait_seconds for each in traffic),
        boundary_wait_seconds=sum(each.boundaries_wait_seconds for each in traffic),
    )


def record_of(
    planned: Planned,
    *,
    plan: Plan,
    timeline: Timeline,
    num_values: int,
    counters: EngineCounters,
    clock_seconds: float | None,
    workers_per_device: int,
    assumed_rates: bool,
) -> StepRecord:
    """Return the record of a step that has run.

    Args:
        planned: What was planned for its batch.
        plan: What was run of it.
        timeline: When its actions ran.
        num_values: Values in the batch's tensors: work is in proportion to them.
        counters: What the engine has counted.
        clock_seconds: `StepRecord.clock_seconds`.
        workers_per_device: Workers that share a device, so its rate.
        assumed_rates: Whether the machine's rates are assumed.
    """
    job = planned.job
    operations = _operations(planned, plan)
    known = planned.knows_activations and planned.size > 0
    num_devices = plan.num_workers / workers_per_device
    rate = job.hardware.matrix_rates.of(job.dtype)
    return StepRecord(
        plan=plan,
        timeline=timeline,
        counters=counters,
        clock_seconds=clock_seconds,
        operations=operations * (num_values / planned.size) if known else None,
        operations_per_token=None if planned.knows_activations else operations,
        peak_operations_per_second=None if assumed_rates else rate * num_devices,
    )


def _operations(planned: Planned, plan: Plan) -> Operations:
    """Operations of a microbatch, counted once per plan."""
    if planned.operations is None or planned.operations[0] is not plan:
        job = planned.job
        counted = microbatch_operations(
            job.work, shape=job.shape, partition=plan.partition, recompute=plan.recompute
        )
        planned.operations = (plan, counted)
    return planned.operations[1]
