"""Whose hooks may look at parameters between an optimizer's step and the next batch.

Lightning calls hooks of callbacks and of the module there: moving averages, histograms, weight
clipping. Such a hook must find the step done. Lightning's own callbacks that only count, print,
compare metrics or save (which waits by itself) need not wait; every other one is waited for, unless
the class that defines the hook says `requires_optimizer_sync = False`.

The same goes for data that is made in the Trainer's process: rollouts of a policy, replay buffers
that ask the model, samplers that look for hard samples. On one device they see the parameters after
the last step, because nothing else runs while a batch is fetched. Such a data set has to know the
module, so that is what is looked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from types import CellType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer, callbacks
from torch import Tensor, nn

from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.strategy import compat

WAITING_HOOKS = (
    "on_train_batch_end",
    "on_train_batch_start",
    "on_train_epoch_start",
    "on_train_epoch_end",
)
"""Hooks before which whoever has one that may look at parameters waits for the step."""

_MODULE_HOOKS = (
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
"""Prefixes of hooks that do not come between two training batches without an evaluation
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


def needs_sync(owner: Any, hook: str) -> bool:
    """Return whether a hook of a callback, a module or a data module may look at parameters."""
    if hook in vars(owner):  # a function put into the object, as LambdaCallback does
        return True
    defining = next((c for c in type(owner).__mro__ if hook in vars(c)), None)
    if defining is None or defining in _HARMLESS:
        return False
    if "reads_parameters" in vars(defining):
        raise ConfigurationError(
            f"{defining.__name__}.reads_parameters is called requires_optimizer_sync now."
        )
    return bool(vars(defining).get("requires_optimizer_sync", True))


def may_write(trainer: Trainer, *, between_batches: bool = False) -> bool:
    """Return whether a hook may write to parameters.

    Args:
        trainer: Knows the callbacks and the module.
        between_batches: Whether only hooks between two training batches are asked about, with no
            evaluation between them.
    """
    hooks = _BETWEEN if between_batches else _EVERY
    return any(True for _ in hooks_that_sync(trainer, (*WAITING_HOOKS, *_MODULE_HOOKS, *hooks)))


def hooks_that_sync(trainer: Trainer, hooks: Iterable[str]) -> Iterator[tuple[Any, str]]:
    """Yield every owner of one of the hooks that may look at parameters, and the hook."""
    owners = [*trainer.callbacks, trainer.lightning_module]  # type: ignore[attr-defined]
    for hook in hooks:
        yield from ((owner, hook) for owner in owners if needs_sync(owner, hook))


def module_hooks_that_sync(trainer: Trainer) -> Iterator[tuple[Any, str]]:
    """Yield the hooks that a step must be waited for before `optimizer_step` returns."""
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    owners = [trainer.lightning_module, *([] if data is None else [data])]
    for hook in _MODULE_HOOKS:
        yield from ((owner, hook) for owner in owners if needs_sync(owner, hook))


def sees_every_gradient(trainer: Trainer) -> bool:
    """Return whether all gradients, or a step that is half made, may be looked at early."""
    if may_read_gradients(trainer) or any(True for _ in hooks_that_sync(trainer, _AROUND_BACKWARD)):
        return True
    every: Any = trainer.callbacks  # type: ignore[attr-defined]
    if any(getattr(callback, "save_on_exception", False) for callback in every):
        return True
    return any(
        parameter._backward_hooks or parameter._post_accumulate_grad_hooks  # noqa: SLF001
        for parameter in trainer.lightning_module.parameters()
    )


def may_read_gradients(trainer: Trainer) -> bool:
    """Return whether a hook between a step and the next `zero_grad` may look at `.grad`."""
    every = (
        *WAITING_HOOKS,
        *_MODULE_HOOKS,
        *_WITH_GRADIENTS,
        "on_validation_start",
        "on_train_end",
    )
    return any(True for _ in hooks_that_sync(trainer, every))


# Data --------------------------------------------------------------------------------------------

_MOST_STEPS = 3
"""Over how many objects a data set may know the module: its agent, the agent's policy."""

_MOST_ITEMS = 16
"""Most items of a container that are looked at: samples need not be."""


def data_that_syncs(trainer: Trainer) -> Iterator[Any]:
    """Yield the data sets and samplers of the training that may look at parameters.

    Args:
        trainer: A trainer that fits a module.
    """
    combined = compat.combined_loader(trainer)
    for loader in () if combined is None else combined.flattened:
        if getattr(loader, "num_workers", 0):
            continue  # processes of their own, with a copy of the module
        names = ("dataset", "sampler", "batch_sampler")
        owners = [getattr(loader, name) for name in names if hasattr(loader, name)] or [loader]
        for index, owner in enumerate(owners):
            others = owners[:index]  # samplers have the data set, to know its length
            if _knows(owner, trainer.lightning_module, steps=_MOST_STEPS, but_not=others):
                yield owner


def _knows(value: Any, module: nn.Module, *, steps: int, but_not: Sequence[Any]) -> bool:
    """Return whether an object is a part of the module or has one, over some steps."""
    if isinstance(value, nn.Module):
        return any(value is part for part in module.modules())
    if isinstance(value, Tensor):
        return any(value is parameter for parameter in module.parameters())
    if steps < 0 or isinstance(value, type | ModuleType | Trainer):
        return False
    if any(value is other for other in but_not):
        return False
    if not getattr(type(value), "requires_optimizer_sync", True):
        return False
    parts = _parts(value)
    return any(_knows(part, module, steps=steps - 1, but_not=but_not) for part in parts)


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, FunctionType):
        yield from map(_content, value.__closure__ or ())
    elif isinstance(value, partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, GeneratorType):
        yield from () if value.gi_frame is None else value.gi_frame.f_locals.values()
    elif isinstance(value, dict):
        yield from islice(value.values(), _MOST_ITEMS)
    elif isinstance(value, list | tuple | set | frozenset):
        yield from islice(value, _MOST_ITEMS)
    else:
        yield from list(getattr(value, "__dict__", {}).values())


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing is in it yet
        return None
