"""Losses of lazy hidden states: one a token, made per microbatch, on all workers.

```
hidden (lazy) [B, T, H] ──▶ linear_cross_entropy, per microbatch ──▶ losses (lazy) [B, T]
labels [B, T] ──────────────┘                                          │ gathered: a number a token
loss = losses.sum() / number of counted labels ◀───────────────────────┘
```
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from roundpipe_lightning.engine.driver.forms import CallForm, TensorForm
from roundpipe_lightning.engine.driver.lazy import LazyTensor, gathered
from roundpipe_lightning.engine.driver.operations import RowOperation
from roundpipe_lightning.models.losses.linear_cross_entropy import linear_cross_entropy

__all__ = ["posted_cross_entropy"]


def posted_cross_entropy(
    hidden: LazyTensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    **options: Any,
) -> Tensor:
    """Return `linear_cross_entropy` of lazy hidden states; see there for the other options.

    Args:
        hidden: Shape (..., H), with the batch's rows in one of the leading dimensions.
        weight: Shape (V, H).
        labels: Shape (...), as the leading dimensions of `hidden`.
        bias: Shape (V), or None.
        reduction: `"mean"`, `"sum"` or `"none"`.
    """
    losses_of: Callable[..., Tensor] = partial(
        linear_cross_entropy, reduction="none", ignore_index=ignore_index, **options
    )
    rows = hidden.rows
    if rows is None or rows.dim == hidden.dim() - 1 or hidden.was_written:
        losses = losses_of(gathered(hidden), weight, labels, bias=bias)
    else:
        leaves, structure = tree_flatten(((hidden, weight, labels), {"bias": bias}))
        places = tuple(rows if x is hidden or x is labels else None for x in leaves)
        dtype = torch.float64 if hidden.dtype is torch.float64 else torch.float32
        form = TensorForm.of_batch(labels.shape, dtype, rows)
        _, one_result = tree_flatten(0)
        operation = RowOperation(
            name="cross_entropy", form=CallForm(places, (form,), one_result), function=losses_of
        )
        losses = hidden.output.call.step.post_rows(operation, leaves, structure)
    if reduction == "none":
        return losses
    total = losses.sum()
    if reduction == "sum":
        return total
    num_counted = (labels != ignore_index).sum()
    return total / num_counted if bool(num_counted) else total + math.nan
