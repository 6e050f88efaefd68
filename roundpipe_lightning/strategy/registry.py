"""Registration with Lightning: the strategy's name, and the devices behind its root device."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader
from types import ModuleType
from typing import Any, NoReturn

import torch
from lightning.fabric.strategies import STRATEGY_REGISTRY as FABRICS_REGISTRY
from lightning.fabric.strategies.strategy import Strategy as FabricsStrategy
from lightning.pytorch.accelerators import Accelerator, CUDAAccelerator
from lightning.pytorch.strategies import Strategy, StrategyRegistry

from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.strategy.checks import refuse_fabric

# `pytorch_lightning` is Lightning's code as a class tree of its own: replaced or refused here. A
# strategy, a Trainer and a LightningModule must be of one tree, and this package's is `lightning`.
_REPLACEMENTS = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}
_REGISTRY = "pytorch_lightning.strategies"


def register(strategy: type[Strategy], *, name: str) -> None:
    """Register the strategy's name; doing so twice changes nothing.

    `pytorch_lightning` gets the name, too, with an error that says what to do. Fabric gets the name
    and the class for the same reason: an instance that it accepts raises the error.

    Args:
        name: What `Trainer(strategy=...)` calls it.
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
    register_refusal(name)


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


def with_workers(
    accelerator: Accelerator | None, devices: Callable[[], Sequence[torch.device]]
) -> Accelerator | None:
    return WorkersOnCuda(devices) if type(accelerator) is CUDAAccelerator else accelerator


# `pytorch_lightning` ------------------------------------------------------------------------------


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


def register_refusal(name: str) -> None:
    """Have `pytorch_lightning.Trainer(strategy=name)` say what to do, now or once imported."""
    if _REGISTRY in sys.modules:
        _register(sys.modules[_REGISTRY], name)
    elif not any(isinstance(finder, _Registering) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Registering(name))


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

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
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

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        if fullname != _REGISTRY:
            return None
        sys.meta_path.remove(self)
        return spec_from_loader(fullname, self)

    def exec_module(self, module: ModuleType) -> None:
        del sys.modules[module.__name__]
        sys.modules[module.__name__] = strategies = import_module(module.__name__)
        _register(strategies, self._name)
