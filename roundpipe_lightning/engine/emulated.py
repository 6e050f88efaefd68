"""The emulated device: tensors with a device's tag, to find misplaced ones without a GPU.

It computes on the CPU and gives the CPU's bits. An operation on tensors of two devices raises, as
on hardware, forward and backward; see `engine/tagged.py`.
"""

from __future__ import annotations

import contextlib
from typing import Any

from torch import Tensor

from roundpipe_lightning.engine.device import Device
from roundpipe_lightning.engine.placement import device_of
from roundpipe_lightning.engine.tagged import TaggedMode, move, tag, tag_of, untag


class EmulatedDevice(Device):
    """A worker on an emulated device.

    Args:
        index: Number of the device; workers with the same number share it.
    """

    can_compile = False

    def __init__(self, index: int) -> None:
        self.name = f"emulated:{index}"
        self.torch_device = device_of(self.name)

    def upload(self, tensor: Tensor) -> Tensor:
        """Copy a host tensor to here."""
        return tag(tensor.detach(), self.name)

    def download(self, tensor: Tensor) -> Tensor:
        """Copy to the host."""
        return tensor.detach() if tag_of(tensor) is None else untag(tensor.detach())

    def holds(self, tensor: Tensor) -> bool:
        """Say whether the tensor carries this device's tag, or is a host number."""
        return tag_of(tensor) == self.name or (tag_of(tensor) is None and tensor.dim() == 0)

    def move(self, tensor: Tensor) -> Tensor:
        """Copy from any device, differentiably."""
        return move(tensor, self.name)

    def thread_context(self) -> contextlib.AbstractContextManager[Any]:
        """Let factories (`torch.arange(n, device=x.device)`) make tensors with tags."""
        return TaggedMode(self.name)
