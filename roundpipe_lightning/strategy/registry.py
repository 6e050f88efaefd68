"""Registration with Lightning: the strategy's name, and the devices behind its root device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.fabric.strategies import STRATEGY_REGISTRY as FABRICS_REGISTRY
from lightning.fabric.strategies.strategy import Strategy as FabricsStrategy
from lightning.pytorch.accelerators import Accelerator, CUDAAccelerator
from lightning.pytorch.strategies import Strategy, StrategyRegistry

from roundpipe_lightning.strategy.checks import refuse_fabric
from roundpipe_lightning.strategy.pytorch_lightning import register_refusal


def register(strategy: type[Strategy], *, name: str) -> None:
    """Register the strategy's name; doing so twice changes nothing.

    `pytorch_lightning` gets the name, too, with an error that says what to do. Fabric gets the name
    and the class for the same reason: an instance that it accepts raises the error.

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
    register_refusal(name)


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
    """Return an accelerator that knows the workers' devices; any but Lightning's own as it is.

    Args:
        accelerator: Lightning's.
        devices: Returns the devices.
    """
    return WorkersOnCuda(devices) if type(accelerator) is CUDAAccelerator else accelerator
