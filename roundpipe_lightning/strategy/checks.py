"""Refuses what cannot work with the strategy, with a ConfigurationError before training starts.

Lightning stays silent about most of these and would compute something else. Every message names the
flag and the way out. Here are also the registrations with Lightning: of the strategy's name, and of
what Lightning's other class tree and Fabric say to it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader
from types import ModuleType
from typing import Any, NoReturn

import torch
from lightning.fabric.strategies import STRATEGY_REGISTRY as FABRICS_REGISTRY
from lightning.fabric.strategies.strategy import Strategy as FabricsStrategy
from lightning.pytorch import LightningModule
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.strategies import ParallelStrategy, Strategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.optim import Optimizer

from roundpipe_lightning.engine.capture.view import is_compiled, is_rebound
from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.precision import RoundPipePrecision
from roundpipe_lightning.strategy import compat

_STEPS: Mapping[TrainerFn | None, Sequence[str]] = {
    None: (),
    TrainerFn.FITTING: ("training_step", "validation_step"),
    TrainerFn.VALIDATING: ("validation_step",),
    TrainerFn.TESTING: ("test_step",),
    TrainerFn.PREDICTING: ("predict_step",),
}


def takes_iterator(module: LightningModule, *steps: str) -> bool:
    """Return whether one of a module's steps fetches its batches itself; all if none is named."""
    return any(
        is_param_in_hook_signature(getattr(module, step), "dataloader_iter", explicit=True)
        for step in steps or {step for steps in _STEPS.values() for step in steps}
    )


def check_trainer_flags(strategy: ParallelStrategy) -> None:
    """Refuse flags of the Trainer that cannot work; `launch.check_launch` looks at processes."""
    if compat.syncs_batchnorm(strategy):
        raise ConfigurationError(
            "sync_batchnorm=True: microbatches pass through a layer one after the other, so its "
            "statistics cannot be taken over all of them. Set Trainer(sync_batchnorm=False), and "
            "num_microbatches=1 if the statistics of the full batch matter."
        )


def check_trainer_is_alone(*, is_alone: bool) -> None:
    """Raise a ConfigurationError if another Trainer was made with the object, or runs with it."""
    if not is_alone:
        raise ConfigurationError(
            "Two Trainers have the same RoundPipeStrategy object. It serves several one after the "
            "other: make the next Trainer when the one before has ended, or give each Trainer a "
            "RoundPipeStrategy(...) of its own."
        )


def check_module(
    module: LightningModule, *, num_microbatches: int | str, microbatching: str, update: str
) -> None:
    """Refuse ways of training that cannot be cut into microbatches, or stepped later."""
    splits = microbatching == "step"
    if splits and takes_iterator(module, "training_step"):
        raise ConfigurationError(
            f"{type(module).__name__}.training_step(dataloader_iter) fetches its batches itself, "
            "so microbatching='step' cannot split them. Leave it out, or write "
            "training_step(batch, batch_idx)."
        )
    if splits and not module.automatic_optimization and num_microbatches not in ("auto", 1):
        raise ConfigurationError(
            f"{type(module).__name__} sets automatic_optimization=False and "
            f"num_microbatches={num_microbatches}: its training_step steps one or several "
            "optimizers itself, which several microbatches cannot do at once. Set "
            "RoundPipeStrategy(num_microbatches=1) or leave it out, or use automatic optimization "
            "(one optimizer; gradient clipping and accumulation are flags of the Trainer)."
        )
    if not module.automatic_optimization and update == "async":
        raise ConfigurationError(
            f"update='async': {type(module).__name__} sets automatic_optimization=False and "
            "steps its optimizers itself, so nothing can be stepped later. Leave update out, "
            "or use automatic optimization."
        )


def check_steps(module: LightningModule, what: TrainerFn | None) -> None:
    """Refuse functions in place of steps that get past the views of the module.

    On CPU workers they are right, if slow: parameters and buffers lie where the module has them.
    """
    for name in _STEPS[what]:
        step = vars(module).get(name)
        if step is not None and not is_rebound(step, module):
            kind = type(module).__name__
            raise ConfigurationError(
                f"{kind}.{name} was replaced on the object by a function that is not bound to it. "
                "It would run the module itself and not the part of it that is on a device: no "
                "block would run in its stage. Write a function whose first argument is the module "
                f"and bind it, module.{name} = types.MethodType(function, module), or override "
                f"{name} in a subclass."
            )


def tell_of_compiled_modules(module: LightningModule) -> None:
    compiled = [name for name, part in module.named_modules() if is_compiled(part)]
    if compiled:
        rank_zero_info(
            f"roundpipe: {compiled[0]!r}{' and others' if len(compiled) > 1 else ''} went through "
            "torch.compile, but a microbatch runs the module that was compiled as it is. "
            "RoundPipeStrategy(compile=True) compiles the blocks."
        )


@contextmanager
def several_optimizers_explained(module: LightningModule) -> Iterator[None]:
    """Say with Lightning's error about several optimizers what they need here besides."""
    try:
        yield
    except RuntimeError as error:
        if "multiple optimizers" not in str(error):
            raise
        raise ConfigurationError(
            f"{type(module).__name__}.configure_optimizers returned several optimizers. Return "
            "one, with a parameter group for each part of the model, or set "
            "automatic_optimization=False and step them in training_step, which then runs with one "
            "microbatch."
        ) from error


def check_optimizers(
    module: LightningModule,
    optimizers: Sequence[Optimizer],
    *,
    update: str,
    precision: RoundPipePrecision,
) -> None:
    """Refuse optimizers that cannot step here."""
    for optimizer in optimizers:
        kind = type(optimizer)
        if any(group.get("capturable") for group in optimizer.param_groups):
            raise ConfigurationError(
                f"{kind.__name__}(capturable=True) steps on an accelerator only, and "
                "with strategy='roundpipe' parameters are stepped in host memory. Leave "
                "capturable out; fused=True is the fast form there."
            )
        closure = inspect.signature(kind.step).parameters.get("closure")
        needs_closure = closure is not None and closure.default is inspect.Parameter.empty
        steps_later = update == "async" or precision.scaler is not None
        if (
            needs_closure
            and module.automatic_optimization
            and (steps_later or precision.widens(optimizer))
        ):
            raise ConfigurationError(
                f"{kind.__name__} evaluates the loss within its step, which update='async', "
                "precision='16-mixed' and stochastic_rounding=True make without it. Leave these "
                "out, or return an optimizer whose step needs no closure (AdamW, SGD, ...)."
            )


def refuse_fabric(**_: Any) -> NoReturn:
    """Raise a ConfigurationError that says why Fabric cannot use the strategy."""
    raise ConfigurationError(
        "Fabric(strategy='roundpipe'): with Fabric your own loop calls the model and then "
        "backward(), but a roundpipe step computes losses and gradients in one go, from the "
        "training_step of a LightningModule, which it runs once per microbatch. Put the loop's "
        "body into a training_step and use lightning.pytorch.Trainer(strategy='roundpipe'), or "
        "give Fabric another strategy."
    )


# `pytorch_lightning` is Lightning's code as a class tree of its own: replaced or refused here. A
# strategy, a Trainer and a LightningModule must be of one tree, and this package's is `lightning`.
_REPLACEMENTS = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}
_REGISTRY = "pytorch_lightning.strategies"


def register(strategy: type[Strategy], *, name: str) -> None:
    """Register the name of `Trainer(strategy=...)`; doing so twice changes nothing.

    `pytorch_lightning` gets the name, too, with an error that says what to do. Fabric gets the name
    and the class for the same reason: an instance that it accepts raises the error.
    """
    if name not in StrategyRegistry:
        StrategyRegistry.register(
            name,
            strategy,
            description="Round-robin pipeline over stateless workers, model state in host memory",
        )
    if name not in FABRICS_REGISTRY:
        FABRICS_REGISTRY.register(name, refuse_fabric)
    FabricsStrategy.register(strategy)
    if _REGISTRY in sys.modules:
        _register(sys.modules[_REGISTRY], name)
    elif not any(isinstance(finder, _Registering) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Registering(name))


class WorkersOnCuda(CUDAAccelerator):
    """Gives the memory figures of all workers' devices where it is asked for those of the host.

    `DeviceStatsMonitor` asks for the root device's, which is the host for this strategy.
    """

    def __init__(self, devices: Callable[[], Sequence[torch.device]]) -> None:
        super().__init__()
        self._devices = devices

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        """Return figures of one device; for the host, of every device, its name before each."""
        if torch.device(device).type != "cpu":
            return super().get_device_stats(device)
        return {
            f"{each}.{name}": value
            for each in dict.fromkeys(self._devices())
            for name, value in super(WorkersOnCuda, self).get_device_stats(each).items()
        }


def replace_pytorch_lightning() -> None:
    """Let `import pytorch_lightning` mean `lightning.pytorch`, for libraries that import it.

    To be called before they are imported. Calling it twice changes nothing.

    Raises:
        ConfigurationError: `pytorch_lightning` was imported before.
    """
    for name, replacement in _REPLACEMENTS.items():
        if name in sys.modules and sys.modules[name] is not sys.modules.get(replacement):
            raise ConfigurationError(
                f"{name} has been imported already. Call replace_pytorch_lightning() at the top of "
                "the program, before it and every library that uses it are imported."
            )
    if not any(isinstance(finder, _Replacing) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Replacing())


def _register(strategies: ModuleType, name: str) -> None:
    registry = strategies.StrategyRegistry
    if name not in registry:
        registry.register(name, _refuse)


def _refuse(**_: Any) -> NoReturn:
    raise ConfigurationError(
        "strategy='roundpipe' works with lightning.pytorch, but this Trainer is "
        "pytorch_lightning's; the two do not mix. Write `import lightning.pytorch as pl` in place "
        "of `import pytorch_lightning as pl`, everywhere. Where a library imports it, begin the "
        "program with `import roundpipe_lightning` and "
        "`roundpipe_lightning.replace_pytorch_lightning()`, before the library is imported."
    )


class _Replacing(MetaPathFinder, Loader):
    """Finds the modules of `lightning` under their other names."""

    def find_spec(self, fullname: str, *_: Any) -> ModuleSpec | None:
        top, dot, rest = fullname.partition(".")
        replacement = _REPLACEMENTS.get(top)
        if replacement is None or find_spec(replacement + dot + rest) is None:
            return None
        return spec_from_loader(fullname, self)

    def exec_module(self, module: ModuleType) -> None:
        top, dot, rest = module.__name__.partition(".")
        sys.modules[module.__name__] = import_module(_REPLACEMENTS[top] + dot + rest)


class _Registering(MetaPathFinder, Loader):
    """Registers a strategy's name as soon as there is a registry."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(self, fullname: str, *_: Any) -> ModuleSpec | None:
        if fullname != _REGISTRY:
            return None
        sys.meta_path.remove(self)
        return spec_from_loader(fullname, self)

    def exec_module(self, module: ModuleType) -> None:
        del sys.modules[module.__name__]
        sys.modules[module.__name__] = strategies = import_module(module.__name__)
        _register(strategies, self._name)
