"""Learns what a training step computes by running it once without values.

The user's `training_step` may log, ask its Trainer, count, and draw random numbers. In a trial it
runs on a copy (`models.meta_copy`) whose `log` says nothing, whose metrics keep nothing and whose
Trainer can be read only, as far as plain values go; random generators are put back afterwards. What
cannot be run so is estimated from the parameters instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from roundpipe_lightning.engine.chain.chain import BlockStack
from roundpipe_lightning.errors import ConfigurationError, RoundPipeError
from roundpipe_lightning.models.losses.lazy_logits import LossFusion, LossMode
from roundpipe_lightning.models.work.work_profile import StepProfile, step_profile
from roundpipe_lightning.strategy.resume.random_state import random_state, set_random_state

_PLAIN = (bool, int, float, str, type(None))


class TrialFailedError(ConfigurationError):
    """A step cannot be run without values; the message says why."""


def try_step(
    module: LightningModule,
    stack: BlockStack | None,
    *,
    microbatch: Any,
    arguments: Sequence[Any],
    compute_dtype: torch.dtype | None,
    loss: LossMode,
) -> StepProfile:
    """Run `training_step` once without values and return what it does.

    Args:
        module: The user's module, attached to its trainer.
        stack: Its blocks.
        microbatch: What the step is called with.
        arguments: The step's other arguments.
        compute_dtype: What autocast computes in; None: what the parameters are.
        loss: Which losses are computed without whole logits.

    Raises:
        TrialFailedError: It cannot be run so.
    """

    def run(dtype: torch.dtype | None) -> StepProfile:
        return step_profile(
            module,
            stack,
            microbatch=microbatch,
            call=lambda root, batch: root.training_step(batch, *arguments),
            compute_dtype=dtype,
            fusion=None if loss == "eager" else LossFusion(loss),
            settings=_settings(module),
            replaced=list(_replaced(module)),
        )

    before = random_state()
    try:
        if compute_dtype is not None:
            # Code that makes tensors of its own meets a cast model with the wrong dtype.
            with contextlib.suppress(Exception):
                return run(compute_dtype)
        return run(None)
    except Exception as error:
        raise TrialFailedError(_reason(error)) from error
    finally:
        set_random_state(before)


def _reason(error: Exception) -> str:
    """Say in few words why a step could not be run: what its own code met, if it met something."""
    source = error.__cause__ if isinstance(error, RoundPipeError) and error.__cause__ else error
    text = str(source).rstrip(".")
    return text if isinstance(source, RoundPipeError) else f"{type(source).__name__}: {text}"


def _settings(module: LightningModule) -> Mapping[str, Any]:
    """What the copy of the module has for what reaches out of the module."""

    def say_nothing(*_: Any, **__: Any) -> None:
        """Stand in for `log`, `log_dict` and `print`."""

    return {
        "_trainer": _ReadOnlyTrainer(module.trainer),
        "_device": torch.device("meta"),
        **dict.fromkeys(("log", "log_dict", "print"), say_nothing),
    }


def _replaced(module: LightningModule) -> Iterator[tuple[object, object]]:
    yield module.trainer, _ReadOnlyTrainer(module.trainer)
    for child in module.modules():
        if isinstance(child, (Metric, MetricCollection)):
            yield child, _SilentMetric()


class _ReadOnlyTrainer:
    """Gives the plain values of a Trainer (`current_epoch`, `global_step`) and nothing else."""

    def __init__(self, trainer: Trainer) -> None:
        object.__setattr__(self, "_trainer", trainer)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._trainer, name)
        if isinstance(value, _PLAIN):
            return value
        raise ConfigurationError(f"The step uses the Trainer's {name}.")

    def __setattr__(self, name: str, value: Any) -> None:
        raise ConfigurationError(f"The step sets the Trainer's {name}.")


class _SilentMetric(nn.Module):
    """Takes whatever a metric takes, keeps nothing and gives a number."""

    def forward(self, *_: Any, **__: Any) -> Tensor:
        """Stand in for `metric(...)`."""
        return torch.zeros((), device="meta")

    def compute(self) -> Tensor:
        """Stand in for the metric's value."""
        return torch.zeros((), device="meta")

    def update(self, *_: Any, **__: Any) -> None:
        """Keep nothing."""

    def reset(self) -> None:
        """There is nothing to forget."""
