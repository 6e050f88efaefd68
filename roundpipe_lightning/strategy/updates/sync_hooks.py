"""Hooks that gradients must wait for: those that Lightning calls with all of them there.

A hook around the backward pass is there to look at gradients, or to find no parameter stepped. So
one that is neither Lightning's nor of this package takes part, unless its class says
`requires_optimizer_sync = False`. Hooks that look at parameters at other times need no rule
(`parameter_watch.py`). With `requires_optimizer_sync = True` in a class all steps are waited for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import OnExceptionCheckpoint, StochasticWeightAveraging
from torch.nn.modules.batchnorm import _BatchNorm

_HOOKS = (
    "on_before_zero_grad",
    "optimizer_zero_grad",
    "on_before_backward",
    "backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "clip_gradients",
    "on_exception",
)
"""Hooks between the forward pass and the step, and that which comes when it fails."""

_KNOWN = ("lightning.", "roundpipe_lightning.")


def _owners(trainer: Trainer) -> list[Any]:
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return [*callbacks, trainer.lightning_module, *([] if data is None else [data])]


def needs_gradients(owner: Any, hook: str) -> bool:
    if hook in vars(owner):  # a function put into the object, as LambdaCallback does
        return True
    defining = next((c for c in type(owner).__mro__ if hook in vars(c)), None)
    if defining is None:
        return False
    is_known = defining.__module__.startswith(_KNOWN)
    return bool(vars(defining).get("requires_optimizer_sync", not is_known))


def reads_before_zeroing(trainer: Trainer) -> Iterator[bool]:
    for owner in _owners(trainer):
        yield from (needs_gradients(owner, hook) for hook in _HOOKS[:2])


def always_wait(trainer: Trainer) -> bool:
    return any(
        getattr(owner, "requires_optimizer_sync", None) is True for owner in _owners(trainer)
    )


def reads_before_backward(trainer: Trainer) -> bool:
    """Return whether somebody would see, or change, what is added to `.grad` before `backward`."""
    hooks = ("on_before_backward", "backward", "on_exception")
    return (
        any(needs_gradients(owner, hook) for owner in _owners(trainer) for hook in hooks)
        or any(isinstance(owner, OnExceptionCheckpoint) for owner in _owners(trainer))
        or any(True for _ in _parameters_with_hooks(trainer))
    )


def gradient_hooks(trainer: Trainer) -> Iterator[str]:
    """Yield what is to find all gradients and no parameter stepped, for messages."""
    for owner in _owners(trainer):
        name = type(owner).__name__
        yield from (f"{hook} of {name}" for hook in _HOOKS if needs_gradients(owner, hook))
        if getattr(owner, "requires_optimizer_sync", None) is True:
            yield f"{name}.requires_optimizer_sync"
        saves = getattr(owner, "save_on_exception", False)
        if saves or isinstance(owner, OnExceptionCheckpoint):
            yield f"on_exception of {name}, which saves"
        if isinstance(owner, StochasticWeightAveraging) and any(
            isinstance(module, _BatchNorm) for module in trainer.lightning_module.modules()
        ):
            yield f"the last pass of {name}, which steps with the gradients of the batch before it"
    yield from (f"a hook of the parameter {name!r}" for name in _parameters_with_hooks(trainer))


def _parameters_with_hooks(trainer: Trainer) -> Iterator[str]:
    for name, parameter in trainer.lightning_module.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:  # noqa: SLF001
            yield name
