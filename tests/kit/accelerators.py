from typing import Any

import pytest
import torch
from lightning.pytorch.accelerators import Accelerator

from roundpipe_lightning.engine.device.accelerator import AcceleratorDevice
from roundpipe_lightning.engine.device.base import Device

KIND = torch.accelerator.current_accelerator(check_available=True)
NUM = 0 if KIND is None else torch.accelerator.device_count()

needs_one = pytest.mark.skipif(NUM < 1, reason="needs an accelerator; torch finds none")
needs_two = pytest.mark.skipif(NUM < 2, reason=f"needs two accelerators; torch finds {NUM}")
needs_cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU of CUDA or ROCm; torch finds none"
)


def device(index: int = 0) -> torch.device:
    assert KIND is not None
    return torch.device(KIND.type, index)


def workers(num: int, *, num_devices: int = 1) -> list[Device]:
    return [AcceleratorDevice(device(index % num_devices)) for index in range(num)]


class AnyAccelerator(Accelerator):
    """Lightning's face of a kind that it does not know itself: a PrivateUse1 backend, say."""

    def setup_device(self, device: torch.device) -> None:
        torch.accelerator.set_device_index(device.index)

    def teardown(self) -> None:
        """Leave the device as it is."""

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        del device
        return {}

    @staticmethod
    def parse_devices(devices: Any) -> list[int]:
        return list(range(devices)) if isinstance(devices, int) else list(devices)

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        return [device(index) for index in devices]

    @staticmethod
    def auto_device_count() -> int:
        return NUM

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return "any"


def for_trainer() -> Any:
    return "gpu" if KIND is not None and KIND.type == "cuda" else AnyAccelerator()
