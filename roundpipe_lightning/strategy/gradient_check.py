"""Looks for gradients that are not finite, before an optimizer spreads them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer

from roundpipe_lightning.errors import GradientError
from roundpipe_lightning.optim.finite import all_finite


def check_gradients(
    optimizer: Optimizer, *, module: LightningModule, blocks: Iterable[str]
) -> None:
    """Refuse a step with gradients that are not finite.

    Args:
        optimizer: Whose step.
        module: Names the parameters.
        blocks: Names of the blocks.

    Raises:
        GradientError: Naming the parameter nearest to the loss, and its block.
    """
    members = {p for group in optimizer.param_groups for p in group["params"]}
    wrong = [
        (name, parameter.grad)
        for name, parameter in module.named_parameters()
        if parameter in members and parameter.grad is not None and not all_finite(parameter.grad)
    ]
    if not wrong:
        return
    name, gradient = wrong[-1]  # the module has them in the order of the forward pass, mostly
    owner = next((block for block in blocks if name.startswith(f"{block}.")), None)
    where = f"{name!r}, which is in no block," if owner is None else f"{name!r} (block {owner!r})"
    others = f" So have {len(wrong) - 1} parameters before it." if len(wrong) > 1 else ""
    trainer = module.trainer
    raise GradientError(
        f"The gradient of {where} has {_num_wrong(gradient)} values of {gradient.numel()} that are "
        f"not finite (NaN or infinite), in batch {trainer.fit_loop.batch_idx} of epoch "
        f"{trainer.current_epoch}.{others} The optimizer has not stepped: the parameters are those "
        "of before this batch. Look at its data and at the loss; a lower learning rate, a warm-up "
        "or precision='bf16-mixed' in place of a 16-bit one often help."
    )


def _num_wrong(gradient: Tensor) -> int:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return values.numel() - int(torch.isfinite(values).sum())
