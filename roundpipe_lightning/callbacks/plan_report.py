"""The plan of a training, in words, before it is run."""

from __future__ import annotations

from collections.abc import Callable

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_info

from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.planning.report.description import (
    count_text,
    machine_line,
    memory_lines,
    model_line,
)
from roundpipe_lightning.planning.schedule.plan import Plan
from roundpipe_lightning.strategy.plan_listeners import PlanNews
from roundpipe_lightning.strategy.strategy import RoundPipeStrategy


class PlanReport(Callback):
    """Prints what is planned before the first step runs, and again when the plan changes.

    Stages, teams, rounds and microbatches; what device and host need of their memory, by kind,
    against what there is; the predicted step and idle share; and what may need attention. Batches
    of another shape have plans of their own: of those a few lines are printed.

    Args:
        write: Takes the text; None logs it as Lightning logs its own, on rank zero.

    Attributes:
        texts: What has been written in this fit, the first first.
    """

    def __init__(self, *, write: Callable[[str], object] | None = None) -> None:
        self._write = write or rank_zero_info
        self._precision = ""
        self.texts: list[str] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:  # noqa: ARG002
        """Ask the strategy to be told of plans.

        Raises:
            ConfigurationError: The strategy is not roundpipe's, which alone has a plan.
        """
        strategy = trainer.strategy
        if not isinstance(strategy, RoundPipeStrategy):
            raise ConfigurationError(
                f"PlanReport needs Trainer(strategy='roundpipe'), found "
                f"{type(strategy).__name__}. Leave the callback out, or change the strategy."
            )
        self._leave(strategy)  # an earlier run may have failed before its teardown
        if stage == "fit":
            self.texts = []
            self._precision = strategy.precision_plugin.precision
            strategy.plan_watchers.append(self._tell)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:  # noqa: ARG002
        """Watch no longer."""
        if isinstance(trainer.strategy, RoundPipeStrategy):
            self._leave(trainer.strategy)

    def _leave(self, strategy: RoundPipeStrategy) -> None:
        if self._tell in strategy.plan_watchers:
            strategy.plan_watchers.remove(self._tell)

    def _tell(self, news: PlanNews) -> None:
        if news.replaced is not None:
            lines = _change_lines(news, news.replaced)
        elif self.texts:
            lines = _other_shape_lines(news)
        else:
            lines = _first_lines(news, precision=self._precision)
        text = "\n".join(lines)
        self.texts.append(text)
        self._write(text)


def _first_lines(news: PlanNews, *, precision: str) -> list[str]:
    described = news.description
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
        *_step_lines(news),
        *_warning_lines(news),
    ]


def _other_shape_lines(news: PlanNews) -> list[str]:
    plan = news.description.plan
    return [
        (
            f"The plan for batches of another shape, in "
            f"{count_text(plan.num_microbatches, 'microbatch')}"
        ),
        *news.description.plan_lines()[:4],
        *_step_lines(news),
    ]


def _change_lines(news: PlanNews, before: Plan) -> list[str]:
    return [
        f"The plan changes after {count_text(news.measured_steps, 'measured step')}",
        f"  from {before.partition}",
        f"  to   {news.description.plan.partition}",
        *_step_lines(news),
    ]


def _step_lines(news: PlanNews) -> list[str]:
    """How long a step should take, as far as that is known."""
    if not (news.knows_step or news.times_are_measured):
        return [
            (
                "Predicted step: unknown, because training_step cannot be run without values. "
                "Measured times will improve the plan."
            )
        ]
    prediction = news.description.prediction
    if news.times_are_measured:
        source = f" (from {count_text(news.measured_steps, 'measured step')})"
    elif news.assumed_rates:
        source = " (at assumed rates; measured times will replace them)"
    else:
        source = ""
    lines = [
        (
            f"Predicted step: {prediction.step_seconds:.4g} s{source}, of which the optimizer "
            f"{prediction.optimizer_seconds:.3g} s; workers wait "
            f"{max(0.0, prediction.idle_share):.1%}"
        )
    ]
    if not news.description.job.hardware.shares_host_memory:
        lines.append(news.description.moved_line())
    return lines


def _warning_lines(news: PlanNews) -> list[str]:
    described = news.description
    found = described.warnings() if news.knows_step else []
    if not news.knows_step:
        found.append(
            "Activations are not counted in the memory above: training_step cannot be run without "
            "values (trial_run)."
        )
    return [f"Note: {text}" for text in found]
