"""The common part of the modules here: building and optimizing their model."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.modules.adapters import Adapters
from roundpipe_lightning.modules.source import ModelSource

OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]
"""Makes the optimizer from the parameters, e.g. `functools.partial(torch.optim.AdamW, lr=1e-3)`."""

SchedulerFactory = Callable[..., Any]
"""Makes the learning rate's schedule from the optimizer: a partial of one of torch or transformers.

Where it takes `num_training_steps` and has none, it is given the optimizer steps of the run.
"""


class TransformersModule(LightningModule):
    """Training of a model of transformers: ordinary Lightning code, which knows no pipelines.

    Args:
        source: The architecture and where its weights come from. The model is built in
            `configure_model`, that is in the place and dtype the Trainer's strategy asks for.
        optimizer: Makes the optimizer from the parameters that are trained.
        scheduler: Makes the schedule of the learning rate; None keeps the optimizer's.
        adapters: Puts adapters into the model; None trains every parameter.

    Attributes:
        model: The model; None before `configure_model`.
    """

    task: ClassVar[str] = "CAUSAL_LM"
    """Task of the model, as peft spells it."""

    whole_batches: ClassVar[bool] = False
    """Whether the loss is of a whole batch, or its tensors have no rows in common to split by."""

    def __init__(
        self,
        source: ModelSource,
        *,
        optimizer: OptimizerFactory,
        scheduler: SchedulerFactory | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        super().__init__()
        if scheduler is not None:
            _check_schedule(scheduler)
        self.source = source
        self.optimizer_factory = optimizer
        self.scheduler = scheduler
        self.adapters = adapters
        self.model: PreTrainedModel | None = None

    @property
    def built_model(self) -> Any:
        """The model; ConfigurationError: `configure_model` was not called."""
        if self.model is None:
            raise ConfigurationError(
                "The model is not built yet. A Trainer builds it; without one, call "
                "configure_model() first."
            )
        return self.model

    def configure_model(self) -> None:
        if self.model is None:
            self.model = self.build_model(self.source)

    def build_model(self, source: ModelSource) -> Any:
        model = source.build()
        return model if self.adapters is None else self.adapters.apply(model, task=self.task)

    def example_batch(self, sequences: int, seq_len: int) -> Any:
        """A batch as the data gives it, for plans that are made before there is data.

        Args:
            sequences: Samples of the batch.
            seq_len: Tokens of each.
        """
        raise ConfigurationError(
            f"{type(self).__name__} cannot be planned before it has data: define "
            f"example_batch(sequences={sequences}, seq_len={seq_len}), which returns a batch as "
            "training_step takes it."
        )

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """The optimizer over the parameters that are trained, and its schedule, per step.

        Raises:
            ConfigurationError: No parameter requires a gradient, or the schedule has no end.
        """
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        if not trained:
            raise ConfigurationError(
                "No parameter of the model is trained: every one has requires_grad=False. "
                "Unfreeze some, or validate and test instead (train=false)."
            )
        optimizer = self.optimizer_factory(trained)
        if self.scheduler is None:
            return optimizer
        options: dict[str, Any] = {}
        length = _default_of(self.scheduler, "num_training_steps")
        warmup = _default_of(self.scheduler, "num_warmup_steps")
        is_share = isinstance(warmup, float) and 0 < warmup < 1
        if is_share and length == -1:  # a schedule without an end, whose beginning is a share
            length = None
        if length in (None, inspect.Parameter.empty):
            num_steps = self.trainer.estimated_stepping_batches
            if math.isinf(num_steps):
                raise ConfigurationError(
                    "The run has no end (max_steps=-1 and max_epochs=-1), so the length of the "
                    "schedule is unknown. Set scheduler.num_training_steps, trainer.max_steps or "
                    "trainer.max_epochs."
                )
            length = int(num_steps)
            if _default_of(self.scheduler, "num_training_steps") != -1:
                options["num_training_steps"] = length
        if is_share:
            options["num_warmup_steps"] = math.ceil(warmup * length)
        schedule = self.scheduler(optimizer, **options)
        if length > 0 and isinstance(schedule, LambdaLR):
            schedule.lr_lambdas = [_held_after(rate, length) for rate in schedule.lr_lambdas]
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _default_of(function: Callable[..., Any], name: str) -> Any:
    parameter = inspect.signature(function).parameters.get(name)
    return -1 if parameter is None else parameter.default


def _held_after(rate: Callable[[int], float], length: int) -> Callable[[int], float]:
    """A rate by step that never rises after its end, as the cosines of transformers do."""
    end = min(rate(length - 1), rate(length))  # some schedules end one step before the others
    return lambda step: rate(step) if step < length else min(end, rate(step))


def _check_schedule(scheduler: SchedulerFactory) -> None:
    """Refuse unknown arguments, and figures that transformers' schedules take without a word."""
    given = getattr(scheduler, "keywords", {})
    taken = inspect.signature(getattr(scheduler, "func", scheduler)).parameters
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in taken.values())
    for name in () if takes_any else given:
        if name not in taken:
            raise ConfigurationError(
                f"scheduler.{name} is not an argument of the schedule, which takes "
                f"{', '.join(taken)}."
            )
    for name, least, most in (
        ("num_warmup_steps", 0, math.inf),
        ("num_training_steps", 1, math.inf),
        ("min_lr_rate", 0.0, 1.0),
    ):
        value = given.get(name)
        if value is not None and not (isinstance(value, (int, float)) and least <= value <= most):
            limits = f"at least {least}" if math.isinf(most) else f"between {least} and {most}"
            raise ConfigurationError(f"scheduler.{name}={value} must be {limits}.")
