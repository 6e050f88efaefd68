"""Registration with Lightning: the strategy's name, and the devices behind its root device."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from lightning.fabric.strategies import STRATEGY_REGISTRY as FABRICS_REGISTRY
from lightning.fabric.strategies.strategy import Strategy as FabricsStrategy
from lightning.pytorch.accelerators import Accelerator, CUDAAccelerator
from lightning.pytorch.strategies import Strategy, StrategyRegistry

from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.strategy.checks import refuse_fabric


def register(strategy: type[Strategy], *, name: str) -> None:
    """Register the strategy's name; doing so twice changes nothing.

    `pytorch_lightning` is a class tree of its own, which cannot use a strategy of `lightning`.
    Where it has been imported, the name is registered there too, with an error that says so. Fabric
    gets the name and the class for the same reason: an instance that it accepts raises the error.

    Args:
        strategy: The class.
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
    foreign = getattr(sys.modules.get("pytorch_lightning.strategies"), "StrategyRegistry", None)
    if foreign is not None and name not in foreign:
        foreign.register(name, _refuse_pytorch_lightning)


def _refuse_pytorch_lightning(**_: Any) -> NoReturn:
    raise ConfigurationError(
        "strategy='roundpipe' works with lightning.pytorch, but this Trainer is "
        "pytorch_lightning's; the two do not mix. Write `import lightning.pytorch as pl` in place "
        "of `import pytorch_lightning as pl`, everywhere."
    )


class WorkersOnCuda(CUDAAccelerator):
    """Gives the memory figures of all workers' devices where it is asked for those of the host.

    `DeviceStatsMonitor` asks for the root device's, which is the host for this strategy.

    Args:
        devices: Returns the devices.
    """

    def __init__(self, devices: Callable[[], Sequence[torch.device]]) -> None:
        super().__init__()
        self._devices = devices

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        """Return figures of one device; for the host, of every device, its name before each."""
        if torch.device(device).type == "cuda":
            return super().get_device_stats(device)
        return {
            f"{each}.{name}": value
            for each in dict.fromkeys(self._devices())
            for name, value in super(WorkersOnCuda, self).get_device_stats(each).items()
        }


def with_workers(
    accelerator: Accelerator | None, devices: Callable[[], Sequence[torch.device]]
) -> Accelerator | None:
    """Return an accelerator that knows the workers' devices; any but Lightning's own as it is.

    Args:
        accelerator: Lightning's.
        devices: Returns the devices.
    """
    return WorkersOnCuda(devices) if type(accelerator) is CUDAAccelerator else accelerator
