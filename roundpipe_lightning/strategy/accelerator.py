"""Lightning's accelerator for CUDA, told that the Trainer's root device is the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator, CUDAAccelerator
from typing_extensions import override


class WorkersOnCuda(CUDAAccelerator):
    """Gives the memory figures of all workers' devices where it is asked for those of the host.

    `DeviceStatsMonitor` asks for the root device's, which is the host for this strategy.

    Args:
        devices: Returns the devices.
    """

    def __init__(self, devices: Callable[[], Sequence[torch.device]]) -> None:
        super().__init__()
        self._devices = devices

    @override
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
