"""What the modules here have in common: how their model is built and how it is optimized."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.modules.schedule import WarmupCosine
from roundpipe_lightning.modules.source import ModelSource

OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]
"""Makes the optimizer from the parameters, e.g. `functools.partial(torch.optim.AdamW, lr=1e-3)`."""


class AdapterMaker(Protocol):
    """Puts adapters into a model, such as `roundpipe_lightning.modules.Adapters`."""

    def apply(self, model: PreTrainedModel, *, task: str) -> Any:
        """Return the model with adapters, all else frozen.

        Args:
            model: The base.
            task: What it is for, as peft spells it: `CAUSAL_LM`, `SEQ_CLS`.
        """


def build_model(source: ModelSource, *, adapters: AdapterMaker | None, task: str) -> Any:
    """The model of a source, with its adapters if there are any.

    Args:
        source: The architecture and its weights.
        adapters: Puts adapters in; None: every parameter is trained.
        task: What the model is for, as peft spells it.
    """
    model = source.build()
    return model if adapters is None else adapters.apply(model, task=task)


def require_built(model: Any) -> Any:
    """The model, or an error if there is none yet.

    Raises:
        ConfigurationError: `configure_model` was not called.
    """
    if model is None:
        raise ConfigurationError(
            "The model is not built yet. A Trainer builds it; without one, call "
            "configure_model() first."
        )
    return model


def optimize(
    module: LightningModule, *, optimizer: OptimizerFactory, scheduler: WarmupCosine | None
) -> OptimizerLRScheduler:
    """The optimizer over the parameters that are trained, and its scheduler, per step.

    Args:
        module: Its parameters that require a gradient are trained.
        optimizer: Makes the optimizer.
        scheduler: Learning rate over the run; None keeps the optimizer's.

    Raises:
        ConfigurationError: No parameter requires a gradient.
    """
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not trained:
        raise ConfigurationError(
            "No parameter of the model is trained: every one has requires_grad=False. "
            "Unfreeze some, or validate and test instead (train=false)."
        )
    made = optimizer(trained)
    if scheduler is None:
        return made
    schedule = scheduler.attach(made, run_steps=module.trainer.estimated_stepping_batches)
    return {"optimizer": made, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
