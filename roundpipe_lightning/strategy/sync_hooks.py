"""Whose hooks may look at parameters between an optimizer's step and the next batch.

Lightning calls hooks of callbacks and of the module there: moving averages, histograms, weight
clipping. Such a hook must find the step done. Lightning's own callbacks that only count, print,
compare metrics or save (which waits by itself) need not wait; every other one is waited for, unless
the class that defines the hook says `reads_parameters = False`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer, callbacks

WAITING_HOOKS = (
    "on_train_batch_end",
    "on_train_batch_start",
    "on_train_epoch_start",
    "on_train_epoch_end",
)
"""Hooks before which a reader of theirs has the step waited for."""

_AT_ONCE = (
    "optimizer_step",
    "lr_scheduler_step",
    "on_validation_model_zero_grad",
    "on_validation_model_eval",
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
)
"""Hooks of the module, and of the data module, that nothing of ours comes right before."""

_WITH_GRADIENTS = ("on_before_zero_grad", "optimizer_zero_grad")

_AROUND_BACKWARD = (
    "on_before_backward",
    "backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "clip_gradients",
    "on_exception",
)
"""Hooks between the forward pass and the step, and that which comes when it fails."""

_EVERY = tuple(name for name in dir(callbacks.Callback) if name.startswith("on_"))

_ELSEWHERE = (
    *("on_fit_", "on_train_start", "on_train_end", "on_load_checkpoint"),
    *("on_sanity_check_", "on_validation_", "on_test_", "on_predict_"),
)
"""How the names of hooks begin that do not come between two training batches without an evaluation
between them."""

_BETWEEN = tuple(name for name in _EVERY if not name.startswith(_ELSEWHERE))

_HARMLESS = frozenset(
    (
        *callbacks.Callback.__mro__,
        *LightningModule.__mro__,
        *LightningDataModule.__mro__,
        callbacks.BatchSizeFinder,
        callbacks.Checkpoint,
        callbacks.DeviceStatsMonitor,
        callbacks.EarlyStopping,
        callbacks.GradientAccumulationScheduler,
        callbacks.LearningRateFinder,
        callbacks.LearningRateMonitor,
        callbacks.ModelCheckpoint,
        callbacks.ModelSummary,
        callbacks.ProgressBar,
        callbacks.RichModelSummary,
        callbacks.RichProgressBar,
        callbacks.ThroughputMonitor,
        callbacks.Timer,
        callbacks.TQDMProgressBar,
    )
)


def may_read(owner: Any, hook: str) -> bool:
    """Say whether a hook of a callback, a module or a data module may look at parameters."""
    if hook in vars(owner):  # a function put into the object, as LambdaCallback does
        return True
    defining = next((c for c in type(owner).__mro__ if hook in vars(c)), None)
    if defining is None or defining in _HARMLESS:
        return False
    return bool(vars(defining).get("reads_parameters", True))


def may_write(trainer: Trainer, *, between_batches: bool = False) -> bool:
    """Say whether a hook may write to parameters.

    Args:
        trainer: Knows the callbacks and the module.
        between_batches: Whether only hooks between two training batches are asked about, with no
            evaluation between them.
    """
    hooks = _BETWEEN if between_batches else _EVERY
    return any(True for _ in readers(trainer, (*WAITING_HOOKS, *_AT_ONCE, *hooks)))


def readers(trainer: Trainer, hooks: Iterable[str]) -> Iterator[tuple[Any, str]]:
    """Give every owner of one of the hooks that may look at parameters, and the hook."""
    owners = [*trainer.callbacks, trainer.lightning_module]  # type: ignore[attr-defined]
    for hook in hooks:
        yield from ((owner, hook) for owner in owners if may_read(owner, hook))


def readers_at_once(trainer: Trainer) -> Iterator[tuple[Any, str]]:
    """Give the hooks that a step must be waited for before `optimizer_step` returns."""
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    owners = [trainer.lightning_module, *([] if data is None else [data])]
    for hook in _AT_ONCE:
        yield from ((owner, hook) for owner in owners if may_read(owner, hook))


def sees_every_gradient(trainer: Trainer) -> bool:
    """Say whether all gradients, or a step that is half made, may be looked at before its end."""
    if may_read_gradients(trainer) or any(True for _ in readers(trainer, _AROUND_BACKWARD)):
        return True
    every: Any = trainer.callbacks  # type: ignore[attr-defined]
    if any(getattr(callback, "save_on_exception", False) for callback in every):
        return True
    return any(
        parameter._backward_hooks or parameter._post_accumulate_grad_hooks  # noqa: SLF001
        for parameter in trainer.lightning_module.parameters()
    )


def may_read_gradients(trainer: Trainer) -> bool:
    """Say whether a hook between a step and the next `zero_grad` may look at `.grad`."""
    every = (*WAITING_HOOKS, *_AT_ONCE, *_WITH_GRADIENTS, "on_validation_start", "on_train_end")
    return any(True for _ in readers(trainer, every))
