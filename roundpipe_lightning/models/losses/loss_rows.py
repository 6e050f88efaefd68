"""What a loss asks its tensors for, answered on the meta device, too, where there are no values."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["autocasts", "kept_rows"]


def kept_rows(targets: Tensor, *, ignore_index: int) -> Tensor:
    """Return the indices of the labels that count; on the meta device, of all.

    Args:
        targets: Labels, of one dimension.
        ignore_index: Stands for none.
    """
    if targets.is_meta:
        return torch.arange(targets.numel(), device=targets.device)
    return (targets != ignore_index).nonzero().squeeze(1)


def autocasts(device_type: str) -> bool:
    """Say whether autocast is on for a type of device; it knows nothing of the meta device."""
    return device_type != "meta" and torch.is_autocast_enabled(device_type)
