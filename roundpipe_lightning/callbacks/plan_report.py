"""The plan of a training, in words, before it is run."""

from __future__ import annotations

from collections.abc import Callable

from lightning.pytorch import LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_info

from roundpipe_lightning.callbacks.listening import Listening
from roundpipe_lightning.planning.report.description import (
    count_text,
    machine_line,
    memory_lines,
    model_line,
)
from roundpipe_lightning.planning.schedule.plan import Plan
from roundpipe_lightning.strategy.planning.inputs import PlanEvent


class PlanReport(Listening):
    """Prints what is planned before the first step runs, and again when the plan changes.

    Stages, teams, rounds and microbatches; what device and host need of their memory, by kind,
    against what there is; the predicted step and idle share; and what may need attention. Batches
    of another shape have plans of their own: of those a few lines are printed.

    Args:
        write: Takes the text; None logs it as Lightning logs its own, on rank zero.

    Attributes:
        texts: What has been written in this fit, the first first.
    """

    _needs_roundpipe = True

    def __init__(self, *, write: Callable[[str], object] | None = None) -> None:
        self._write = write or rank_zero_info
        self._precision = ""
        self.texts: list[str] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            self.texts = []
            self._precision = str(trainer.precision)

    def _take(self, event: PlanEvent) -> None:
        if event.replaced is not None:
            lines = _change_lines(event, event.replaced)
        elif self.texts:
            lines = _other_shape_lines(event)
        else:
            lines = _first_lines(event, precision=self._precision)
        text = "\n".join(lines)
        self.texts.append(text)
        self._write(text)


def _first_lines(event: PlanEvent, *, precision: str) -> list[str]:
    described = event.description
    plan, job = described.plan, described.job
    return [
        f"The plan of this training, on {machine_line(job.hardware)}",
        model_line(job.work, precision=precision),
        (
            f"Batch: {count_text(plan.num_microbatches, 'microbatch')} on "
            f"{count_text(plan.num_workers, 'worker')}"
        ),
        *described.plan_lines(),
        "Memory",
        *memory_lines(described.memory),
        *_step_lines(event),
        *_warning_lines(event),
    ]


def _other_shape_lines(event: PlanEvent) -> list[str]:
    plan = event.description.plan
    return [
        (
            f"The plan for batches of another shape, in "
            f"{count_text(plan.num_microbatches, 'microbatch')}"
        ),
        *event.description.plan_lines()[:4],
        *_step_lines(event),
    ]


def _change_lines(event: PlanEvent, before: Plan) -> list[str]:
    return [
        f"The plan changes after {count_text(event.planned.measured.num_steps, 'measured step')}",
        f"  from {before.partition}",
        f"  to   {event.description.plan.partition}",
        *_step_lines(event),
    ]


def _step_lines(event: PlanEvent) -> list[str]:
    measured, described = event.planned.measured, event.description
    if not (event.planned.knows_activations or measured.is_ready):
        return [
            (
                "Predicted step: unknown, because training_step cannot be run without values. "
                "Measured times will improve the plan."
            )
        ]
    source = ""
    if measured.is_ready:
        source = f" (from {count_text(measured.num_steps, 'measured step')})"
    elif event.assumed_rates:
        source = " (at assumed rates; measured times will replace them)"
    prediction = described.prediction
    line = (
        f"Predicted step: {prediction.step_seconds:.4g} s{source}, of which the optimizer "
        f"{prediction.optimizer_seconds:.3g} s; workers wait "
        f"{max(0.0, prediction.bubble_fraction):.1%}"
    )
    on_host = described.job.hardware.shares_host_memory
    return [line] if on_host else [line, described.moved_line()]


def _warning_lines(event: PlanEvent) -> list[str]:
    found = [
        (
            "Activations are not counted in the memory above: training_step cannot be run without "
            "values (dry_run)."
        )
    ]
    if event.planned.knows_activations:
        found = event.description.warnings()
    return [f"Note: {text}" for text in found]
