"""Cross-entropy of a linear layer whose outputs are never there as a whole.

```
hidden (N, H) ─ rows n ─► logits (n, V) ─► softmax ─► losses of n rows
                              │
                              └─► gradient of the logits (n, V), in their place
                                    ├─► gradient of hidden, n rows
                                    └─► added to the gradient of weight (V, H), float32
```

The gradients are computed with the losses, chunk by chunk, so nothing is recomputed backward: the
backward pass only multiplies them by the loss's own gradient.

With logits z of a token with label t, of V classes:

    z      = scale * (hidden @ weight.T + bias), then softcap * tanh(z / softcap)
    L      = log(sum_j exp(z_j))
    loss   = (1 - e) * (L - z_t) + e * (L - mean_j z_j) + w * L^2
    d z_j  = softmax(z)_j * (1 + 2 w L) - (1 - e) * [j = t] - e / V

where e is the label smoothing and w the weight of the z-loss.

PyTorch 2.13 brought `torch.nn.functional.linear_cross_entropy`. It has no soft cap, scale or
z-loss, does not chunk with label smoothing, computes the rows that are ignored, and is not in
PyTorch 2.11.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from roundpipe_lightning.errors import ConfigurationError, DataError
from roundpipe_lightning.models.losses.chunked_loss import DEFAULT_CHUNK_BYTES, LossSpec, LossSweep

__all__ = ["linear_cross_entropy"]

Reduction = Literal["mean", "sum", "none"]


def linear_cross_entropy(  # noqa: PLR0913 - all but three keyword-only
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    scale: float = 1.0,
    num_items: float | Tensor | None = None,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
) -> Tensor:
    """Return `cross_entropy(linear(hidden, weight, bias), labels)` without holding the logits.

    Gradients equal those of the plain loss to rounding. Under autocast the products are in its
    type, the softmax and the sum of the weight's gradient in float32 (float64 for float64).

    Args:
        hidden: The last hidden states, shape (..., H).
        weight: The output projection, shape (V, H), perhaps tied to the embedding.
        labels: Whole numbers from 0 to V - 1, or `ignore_index`; shape (...). They are not shifted.
        bias: Shape (V), or None.
        ignore_index: The label of tokens that are not predicted; their logits are not computed.
        reduction: `"mean"` over the tokens that are not ignored (not a number where there are
            none, with gradients of zero, as PyTorch's), `"sum"`, or `"none"`: one loss per token,
            0 for ignored ones. `"none"` computes the logits again in the backward pass.
        label_smoothing: Share of the target that is spread evenly over the vocabulary, 0 to 1.
        z_loss: Weight of the squared log-sum-exp that is added to each token's loss (PaLM,
            arXiv 2204.02311, section 5).
        softcap: The logits become `softcap * tanh(logits / softcap)` (Gemma 2, arXiv 2408.00118).
        scale: The logits are multiplied by it, before the soft cap.
        num_items: What `"mean"` divides by in place of the number of tokens: that of all
            microbatches, say.
        chunk_bytes: Device memory for one chunk of logits.

    Returns:
        The loss in nats, float32 or float64: a scalar, or for `"none"` of the shape of `labels`.

    Raises:
        ConfigurationError: Shapes or types do not fit, or an option cannot work.
        DataError: A label is outside the vocabulary.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ConfigurationError(f"reduction={reduction!r}: set 'mean', 'sum' or 'none'.")
    if num_items is not None and reduction != "mean":
        raise ConfigurationError(
            f"num_items={num_items} with reduction={reduction!r}: it is what 'mean' divides by. "
            "Set reduction='mean', or leave num_items out."
        )
    _check_shapes(hidden, weight, labels, bias=bias)
    rows, targets = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1).long()
    kept = _kept_rows(targets, ignore_index, vocabulary=weight.shape[0])
    spec = LossSpec(
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        softcap=softcap,
        scale=scale,
        chunk_bytes=chunk_bytes,
        dtype=_product_dtype(hidden),
        needs_gradient=tuple(
            x is not None and x.requires_grad and torch.is_grad_enabled()
            for x in (hidden, weight, bias)
        ),
        summed=reduction != "none",
    )
    loss: Tensor = _Loss.apply(spec, rows, weight, bias, targets, kept)  # type: ignore[no-untyped-call]
    if reduction == "none":
        return loss.view(labels.shape)
    if reduction == "sum":
        return loss
    if num_items is None:  # the mean over no tokens is not a number, its gradients are zero
        return loss / kept.numel() if kept.numel() else loss + math.nan
    return loss / (num_items.to(loss.device) if isinstance(num_items, Tensor) else num_items)


# --- checks ---------------------------------------------------------------------------------------


def _check_shapes(hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None) -> None:
    if weight.dim() != 2 or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[-1]:
        raise ConfigurationError(
            f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} do not fit: give "
            "hidden of shape (..., H) and weight of shape (V, H)."
        )
    if labels.shape != hidden.shape[:-1]:
        raise ConfigurationError(
            f"labels {tuple(labels.shape)} do not fit hidden {tuple(hidden.shape)}: give one label "
            f"per token, shape {tuple(hidden.shape[:-1])}."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ConfigurationError(
            f"bias {tuple(bias.shape)} does not fit weight {tuple(weight.shape)}: give one of "
            f"shape {tuple(weight.shape[:1])}."
        )
    if labels.is_floating_point() or labels.is_complex() or labels.dtype is torch.bool:
        raise ConfigurationError(
            f"labels of type {labels.dtype}: give the numbers of classes as whole numbers (int64)."
        )
    if not hidden.is_floating_point():
        raise ConfigurationError(f"hidden of type {hidden.dtype}: give floating-point numbers.")
    if hidden.dtype != weight.dtype and not _autocasts(hidden.device.type):
        raise ConfigurationError(
            f"hidden of type {hidden.dtype} and weight of type {weight.dtype}: cast one of them, "
            "or run under autocast."
        )


def _kept_rows(targets: Tensor, ignore_index: int, *, vocabulary: int) -> Tensor:
    """Return the indices of the labels that count; on the meta device, which has no values, all.

    The host waits for the device once: for how many there are and the range of their values.
    """
    if targets.is_meta or targets.numel() == 0:
        return torch.arange(targets.numel(), device=targets.device)
    counts = targets != ignore_index
    inside = targets.where(counts, 0).aminmax()
    num_kept, *ends = torch.stack([counts.sum(), *inside]).tolist()
    rows = counts.logical_not().argsort(stable=True)[:num_kept]
    for label in ends:
        if not 0 <= label < vocabulary:
            place = targets[rows].tolist().index(label)
            raise DataError(
                f"Label {label} (number {place + 1} of those that are not ignored) is outside the "
                f"vocabulary of {vocabulary}. Labels are 0 to {vocabulary - 1}, or ignore_index."
            )
    return rows


def _autocasts(device_type: str) -> bool:
    # Autocast knows nothing of the meta device.
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def _product_dtype(hidden: Tensor) -> torch.dtype:
    """Return the type of the matrix products: autocast's, as it takes hold of a linear layer."""
    device_type = hidden.device.type
    if _autocasts(device_type) and hidden.dtype is not torch.float64:
        return torch.get_autocast_dtype(device_type)
    return hidden.dtype


# --- autograd -------------------------------------------------------------------------------------


class _Loss(torch.autograd.Function):
    """The losses of all tokens, or their sum.

    The gradients of the sum are there when the forward pass has ended. They are handed out by the
    first backward pass; a second one (`retain_graph=True` before it) computes them again. Those of
    single losses weigh the tokens, so all is computed again backward.
    """

    @staticmethod
    def forward(ctx: Any, spec: LossSpec, *tensors: Tensor | None) -> Tensor:
        ctx.spec, ctx.gradients = spec, None
        ctx.save_for_backward(*tensors)
        if spec.summed:
            losses, ctx.gradients = LossSweep(spec, *tensors).run()  # type: ignore[arg-type]
            return losses.sum()
        no_gradients = replace(spec, needs_gradient=(False,) * 3)
        return LossSweep(no_gradients, *tensors).run()[0]  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        _refuse_second_derivative()
        spec, inputs = ctx.spec, ctx.saved_tensors
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            weights = None if spec.summed else gradient
            _, gradients = LossSweep(spec, *inputs, token_weights=weights).run()
        return (
            None,
            *(
                None
                if sums is None
                else (sums.mul_(gradient) if spec.summed else sums).to(_gradient_dtype(x))
                for x, sums in zip(inputs, gradients, strict=False)
            ),
            None,
            None,
        )


def _gradient_dtype(tensor: Tensor) -> torch.dtype:
    """Return what autograd expects: a leaf may sum up wider numbers than it has."""
    return (tensor.grad_dtype if tensor.is_leaf else None) or tensor.dtype


def _refuse_second_derivative() -> None:
    if torch.is_grad_enabled():
        raise ConfigurationError(
            "linear_cross_entropy has no second derivative, but its backward pass runs with "
            "create_graph=True. Use torch.nn.functional.cross_entropy on the logits; under the "
            "strategy, RoundPipeStrategy(loss='eager')."
        )
