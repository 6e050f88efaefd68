"""Clipping of gradients that the optimizer's own thread makes, a parameter at a time.

The largest norm needs all gradients: but each one's norm is measured when it has come, while the
backward pass still runs. What is left to do when the last one has come is to add up the norms. The
factor is applied to a gradient right before its parameter is stepped. The bits are those of
`torch.nn.utils.clip_grad_norm_` and `clip_grad_value_`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor
from torch.optim import Optimizer

_SMALL = 1e-6  # what torch adds to the norm


def late_clipping(
    optimizer: Optimizer,
    limit: float,
    algorithm: GradClipAlgorithmType,
    *,
    norm_of: Callable[[Tensor], Tensor],
) -> Callable[[Tensor], Any] | None:
    """Return what clips a gradient in place; None where torch's own function must do it.

    Args:
        optimizer: Whose gradients, which are all there.
        limit: Of the norm, or of the magnitude of values.
    """
    members = [p for group in optimizer.param_groups for p in group["params"]]
    members = [p for p in members if p.grad is not None]
    kinds = {(p.grad.dtype, p.grad.device.type, p.grad.layout) for p in members}
    if len(kinds) != 1 or kinds.pop()[1:] != ("cpu", torch.strided):
        return None  # torch goes by kinds
    if GradClipAlgorithmType(algorithm) is GradClipAlgorithmType.VALUE:
        return values_clip(limit)
    total = torch.linalg.vector_norm(torch.stack([norm_of(p) for p in members]))
    factor = torch.clamp(limit / (total + _SMALL), max=1.0)
    return lambda gradient: gradient.mul_(factor)


def values_clip(limit: float) -> Callable[[Tensor], Any]:
    """Return what clips the values of a gradient in place."""
    return lambda gradient: gradient.clamp_(min=-limit, max=limit)
