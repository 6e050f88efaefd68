"""Who looks at parameters while the optimizer's step is still being made waits for it.

On one device whoever reads a parameter between two batches finds the step done: moving averages,
histograms, schedulers, collate functions, samplers. Here the step may still run. So for the time
of a training every trained parameter has a class of its own. Torch calls its `__torch_function__`
for whatever is done with the parameter:

```
user's code   weight.norm() ─▶ watched ─ from the Trainer's thread, by code that is not ours?
                                 │  yes: wait for the step
                                 ▼
                               the operation itself
```

What is no value (shapes, dtypes, names) waits for nothing. Threads of ours, and this package's own
code in the Trainer's thread, pass. The optimizer's state is a dictionary that does the same.

A view that somebody keeps (`weight.data`, `state_dict()` without a clone) is not watched. So after
code was given a parameter's memory, uses of the memory are counted when the next step is submitted:
as long as a view is kept, every step is waited for.

A hook around the backward pass is there to look at gradients, or to find no parameter stepped. So
gradients wait for one that is neither Lightning's nor of this package, unless its class says
`requires_optimizer_sync = False`. Hooks that look at parameters at other times need no rule. With
`requires_optimizer_sync = True` in a class all steps are waited for.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import inspect
import os
import sys
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from pathlib import Path
from types import FrameType
from typing import Any

import lightning
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import OnExceptionCheckpoint, StochasticWeightAveraging
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer


class Access(Enum):
    """What code looks at."""

    VALUES = "parameters"
    GRADIENT = "gradients"
    ADDRESS = "the address of a parameter"
    STATE = "the optimizer's state"
    ZEROING = "gradients, to let them go"
    FORK = "parameters, which a new process has as they are"


_PACKAGE = Path(__file__).parents[2]
_FOLDERS = ("engine", "strategy", "checkpoint", "optim", "models/work")
_LIGHTNING = str(Path(lightning.__file__).parent) + os.sep
_OURS = (
    *(str(_PACKAGE / name) + os.sep for name in _FOLDERS),
    str(_PACKAGE / "precision.py"),
    # Clipping, a loss scaler, checkpoints.
    *(str(Path(_LIGHTNING, "pytorch", name)) + os.sep for name in ("plugins", "strategies")),
)
_PASSED_OVER = (
    str(Path(torch.__file__).parent) + os.sep,
    *(str(module.__file__) for module in (contextlib, copy, functools)),
    __file__,
)
_ZEROES = [inspect.unwrap(kind.zero_grad).__code__ for kind in (nn.Module, Optimizer)]

_VALUE_ATTRIBUTES = frozenset(("data", "T", "H", "mT", "mH", "real", "imag"))
_WITHOUT_VALUES = frozenset(
    (
        *("size", "dim", "ndimension", "numel", "nelement", "stride", "element_size"),
        *("storage_offset", "is_contiguous", "is_floating_point", "is_complex"),
        *("is_signed", "is_same_size", "get_device", "register_hook", "requires_grad_"),
        *("register_post_accumulate_grad_hook", "retain_grad", "is_shared", "is_pinned"),
        *("has_names", "__len__", "__hash__"),
    )
)
"""Names of functions. Every other one is taken to look at values."""


class ParameterWatch:
    """Watches trained parameters, and optimizers' state, in the thread that makes it.

    Args:
        on_access: Called before code that is not ours looks at something: at what, the frame of
            that code, and the parameter, if there is one. It waits for the step.
        heeds_others: Whether it is called in other threads, too.

    Attributes:
        was_touched: Whether values may have been written to since this was set to False.
        may_be_kept: Whether somebody may keep a view of a parameter's memory.
        sees_all: Whether all that the optimizers have can be watched.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        *,
        on_access: Callable[[Access, FrameType, Tensor | None], None],
        heeds_others: bool = False,
    ) -> None:
        self.was_touched = self.may_be_kept = False
        self.sees_all, self._heeds_others = True, heeds_others
        self._optimizers = optimizers
        self._on_access = on_access
        self._thread = threading.get_ident()
        self._classes: dict[type, type] = {}
        self._watched: dict[nn.Parameter, type] = {}
        self._num_uses: Counter[int] = Counter()
        self._handles = [
            optimizer.register_load_state_dict_pre_hook(lambda *_: self.note(Access.STATE))
            for optimizer in optimizers
        ]
        _watches.add(self)

    def watch(self) -> None:
        """Watch what the optimizers have now: parameters and state may be new."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter not in self._watched:
                        self._begin(parameter)
            if type(optimizer.state) is defaultdict:
                optimizer.state = _WatchedState(optimizer.state, self)
            self.sees_all &= isinstance(optimizer.state, _WatchedState)

    def _begin(self, parameter: Tensor) -> None:
        kind = type(parameter)
        # Of one that comes later nobody knows how often its memory is in use.
        self.sees_all &= isinstance(parameter, nn.Parameter) and not self._num_uses
        if isinstance(parameter, nn.Parameter):
            self._watched[parameter] = kind
            parameter.__class__ = self._class_for(kind)

    def count_uses(self) -> None:
        """Count the uses of the parameters' memory; called when nobody else can have a view."""
        self._num_uses = self._uses()

    def close(self) -> None:
        _watches.discard(self)
        for handle in self._handles:
            handle.remove()
        for parameter, kind in self._watched.items():
            parameter.__class__ = kind
        self._watched.clear()
        for optimizer in self._optimizers:
            if isinstance(optimizer.state, _WatchedState):
                optimizer.state = optimizer.state.plain()

    def views_are_kept(self) -> bool:
        """Return whether somebody keeps a view of a parameter; the engine must be idle."""
        if self.may_be_kept and self._uses() != self._num_uses:
            gc.collect()  # views in cycles that nobody knows any more
        self.may_be_kept = self.may_be_kept and self._uses() != self._num_uses
        return self.may_be_kept

    def _uses(self) -> Counter[int]:
        storages = (p.untyped_storage()._cdata for p in self._watched)  # noqa: SLF001
        return Counter({c: torch._C._storage_Use_Count(c) for c in set(storages)})  # noqa: SLF001

    def _class_for(self, kind: type) -> type:
        if kind in self._classes:
            return self._classes[kind]

        def watched(
            _: type, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
        ) -> Any:
            what = _looked_at(func)
            if what is not None:
                self.note(what, args[0] if args and isinstance(args[0], Tensor) else None)
            return kind.__torch_function__(func, types, args, kwargs or {})  # type: ignore[attr-defined]

        namespace = {
            "__torch_function__": classmethod(watched),
            "__deepcopy__": _deepcopy_plain,
            "__module__": kind.__module__,
            "__qualname__": kind.__qualname__,
            "watched_as": kind,
        }
        self._classes[kind] = type(kind)(kind.__name__, (kind,), namespace)
        return self._classes[kind]

    def note(self, what: Access, parameter: Tensor | None = None) -> None:
        """Let whoever looks at something wait, if it is not our own code."""
        is_other = threading.get_ident() != self._thread
        if is_other and not self._heeds_others:
            return
        frame, is_zeroing = _code_that_looks()
        if frame is None:
            return
        if what is Access.GRADIENT and is_zeroing:
            what = Access.ZEROING
        if what is Access.VALUES and not is_other:
            self.was_touched = self.may_be_kept = True
        self._on_access(what, frame, parameter)

    def before_fork(self) -> None:
        """Wait: a process that is forked, a loader's say, has the memory as it is now."""
        if threading.get_ident() == self._thread:
            self._on_access(Access.FORK, sys._getframe(1), None)  # noqa: SLF001


_watches: weakref.WeakSet[ParameterWatch] = weakref.WeakSet()


def _before_fork() -> None:
    for watch in list(_watches):
        watch.before_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork)


class _WatchedState(defaultdict[Tensor, Any]):
    """An optimizer's state, whose entries others may be changing."""

    def __init__(self, state: defaultdict[Tensor, Any], watch: ParameterWatch) -> None:
        super().__init__(state.default_factory, state)
        self._watch = watch

    def plain(self) -> defaultdict[Tensor, Any]:
        return defaultdict(self.default_factory, super().items())

    def _looked_into(name: str) -> Any:  # type: ignore[misc]  # noqa: N805 - makes methods
        inner = getattr(defaultdict, name)

        def method(self: _WatchedState, *args: Any) -> Any:
            self._watch.note(Access.STATE)
            return inner(self, *args)

        return method

    for _name in ("__getitem__", "__iter__", "get", "items", "values", "pop", "popitem", "clear"):
        locals()[_name] = _looked_into(_name)

    def __copy__(self) -> Any:
        self._watch.note(Access.STATE)
        return self.plain()

    def copy(self) -> Any:
        return self.__copy__()

    def __reduce__(self) -> Any:
        return self.__copy__().__reduce__()


def _deepcopy_plain(parameter: Any, memo: dict[int, Any]) -> Any:
    if id(parameter) not in memo:
        _ = parameter.data  # waits
        kind = type(parameter)
        parameter.__class__ = kind.watched_as
        try:
            parameter.__deepcopy__(memo)
        finally:
            parameter.__class__ = kind
    return memo[id(parameter)]


def _looked_at(func: Any) -> Access | None:
    """Return what a function of torch looks at; None: no values."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        attribute = func.__self__.__name__
        if attribute == "grad":
            return Access.GRADIENT
        return Access.VALUES if attribute in _VALUE_ATTRIBUTES else None
    if name == "data_ptr":
        return Access.ADDRESS
    return None if name in _WITHOUT_VALUES else Access.VALUES


def _code_that_looks() -> tuple[FrameType | None, bool]:
    """Return the frame that called torch, or us, and whether through `zero_grad`.

    There is none if that is our own code.
    """
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - no public way to ask
    is_zeroing = False
    while frame is not None and frame.f_code.co_filename.startswith(_PASSED_OVER):
        is_zeroing |= frame.f_code in _ZEROES
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename.startswith(_OURS):
        return None, False
    return frame, is_zeroing


def describe_code(frame: FrameType) -> str:
    """Return the hook or function, with its place, through which code came to look."""
    stops = (*_OURS, *(str(Path(_LIGHTNING, "pytorch", n)) for n in ("trainer", "loops")))
    found, outer = frame, frame.f_back
    while outer is not None and not outer.f_code.co_filename.startswith(stops):
        if not outer.f_code.co_filename.startswith(_PASSED_OVER):
            found = outer
        outer = outer.f_back
    owner = found.f_locals.get("self")
    name = "" if owner is None else f"{type(owner).__name__}."
    place = f"{Path(found.f_code.co_filename).name}:{found.f_lineno}"
    return f"{name}{found.f_code.co_name} ({place})"


_HOOKS = """
    on_before_zero_grad optimizer_zero_grad on_before_backward backward on_after_backward
    on_before_optimizer_step configure_gradient_clipping clip_gradients on_exception
""".split()
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


def _any_needs(trainer: Trainer, *hooks: str) -> bool:
    return any(needs_gradients(owner, hook) for owner in _owners(trainer) for hook in hooks)


def reads_before_zeroing(trainer: Trainer) -> bool:
    return _any_needs(trainer, *_HOOKS[:2])


def always_wait(trainer: Trainer) -> bool:
    return any(
        getattr(owner, "requires_optimizer_sync", None) is True for owner in _owners(trainer)
    )


def reads_before_backward(trainer: Trainer) -> bool:
    """Return whether somebody would see, or change, what is added to `.grad` before `backward`."""
    return (
        _any_needs(trainer, "on_before_backward", "backward", "on_exception")
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
