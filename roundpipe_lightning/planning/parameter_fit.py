"""Checks a plan against a machine before anything runs, when only parameters are known.

Activations, boundaries and the optimizer's state are not counted, so what is refused could never
run, and what is not refused may still need more: `fit` counts everything.
"""

from __future__ import annotations

from dataclasses import replace

from roundpipe_lightning.errors import PlanError
from roundpipe_lightning.planning.fit import Search, TrainingJob, fit_training
from roundpipe_lightning.planning.hardware import HardwareSpec
from roundpipe_lightning.planning.hints import PartitionHints
from roundpipe_lightning.planning.plan import Plan
from roundpipe_lightning.planning.predict import PipelineLayout
from roundpipe_lightning.planning.profile import BlockProfile, ModelProfile
from roundpipe_lightning.planning.storage import ParameterStorage
from roundpipe_lightning.planning.work import Amount, BlockWork, MicrobatchShape, Work, WorkProfile

_OPERATIONS_PER_SECOND = 1e12  # of no device in particular: only ratios of durations matter


def plan_that_holds_parameters(
    plan: Plan, *, profile: ModelProfile, hardware: HardwareSpec
) -> Plan:
    """Return a plan, or one of smaller stages where the devices are too small for it.

    Args:
        plan: What is wanted; its rounds are kept.
        profile: The model; its sizes are those of parameters as they are uploaded.
        hardware: The machine; every device is a worker.

    Raises:
        PlanError: The parameters and their gradients do not fit, however they are cut.
    """
    job = _job(profile, hardware=hardware, num_microbatches=plan.num_microbatches)
    if job.report(_layout(plan)).fits:
        return plan
    answer = fit_training(replace(job, hints=PartitionHints(round_size=plan.round_size)))
    if answer.planned is None or not answer.fits:
        raise PlanError(_refusal(answer.memory.reason, hardware))
    return answer.planned.plan


def check_plan_holds_parameters(
    plan: Plan, *, profile: ModelProfile, hardware: HardwareSpec
) -> None:
    """Refuse a plan whose parameters and gradients alone do not fit.

    Raises:
        PlanError: They do not; it says what is missing.
    """
    job = _job(profile, hardware=hardware, num_microbatches=plan.num_microbatches)
    memory = job.report(_layout(plan))
    if not memory.fits:
        raise PlanError(_refusal(memory.reason, hardware))


def _refusal(reason: str, hardware: HardwareSpec) -> str:
    return (
        f"The model does not fit {hardware.name}, even without activations and optimizer state. "
        f"{reason} Train fewer parameters, or use a machine with more memory; roundpipe-plan says "
        "which changes make it fit."
    )


def _job(profile: ModelProfile, *, hardware: HardwareSpec, num_microbatches: int) -> TrainingJob:
    """Sizes in bytes: a byte stands for a parameter, its gradient is as large."""
    return TrainingJob(
        work=WorkProfile(
            blocks=tuple(_work(block) for block in profile.blocks),
            head=_work(profile.head),
            tail=_work(profile.tail),
            fingerprint=profile.fingerprint,
            cuts=profile.cuts,
        ),
        hardware=hardware,
        dtype="float32",
        storage=ParameterStorage(master_bytes=0, gradient_bytes=1, optimizer_bytes=0),
        shape=MicrobatchShape(sequences=1, seq_len=1),
        num_microbatches=num_microbatches,
        search=Search.QUICK,
    )


def _work(part: BlockProfile) -> BlockWork:
    def work(seconds: float) -> Work:
        return Work(matrix_operations=Amount(fixed=seconds * _OPERATIONS_PER_SECOND))

    return BlockWork(
        name=part.name,
        forward=work(part.forward_seconds),
        backward=work(part.backward_seconds),
        num_parameters=part.parameter_bytes,
        num_trainable=part.trainable_bytes,
        parameter_bytes=part.parameter_bytes,
        trainable_bytes=part.trainable_bytes,
    )


def _layout(plan: Plan) -> PipelineLayout:
    return PipelineLayout(
        partition=plan.partition,
        num_microbatches=plan.num_microbatches,
        round_size=plan.round_size,
        team_size=plan.team_size,
    )
