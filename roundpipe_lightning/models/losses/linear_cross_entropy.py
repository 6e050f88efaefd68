"""Cross-entropy of a linear layer whose outputs are never there as a whole.

```
hidden (N, H) ─ rows n ─► logits (n, V) ─► softmax ─► losses of n rows
                              │
                              └─► gradient of the logits (n, V), in their place
                                    ├─► gradient of hidden, n rows
                                    └─► added to the gradient of weight (V, H), float32
```

The gradients are computed with the losses, chunk by chunk, so nothing is recomputed backward: the
backward pass only multiplies them by the loss's own gradient. Where even a few rows are too large,
the vocabulary is cut, too; a first sweep over its parts then finds the log-sum-exp with a running
maximum (Milakov and Gimelshein: Online normalizer calculation for softmax, arXiv 1805.02867).

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
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from roundpipe_lightning.errors import ConfigurationError, DataError
from roundpipe_lightning.models.losses.loss_memory import (
    DEFAULT_CHUNK_BYTES,
    chunk_sizes,
    logit_bytes,
)

__all__ = ["linear_cross_entropy"]

Reduction = Literal["mean", "sum", "none"]

_SLICE_BYTES = 16 * 2**20  # of a 16-bit product that is added to a float32 sum


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
    kept = targets[_kept_rows(targets, ignore_index)]
    _check_labels(kept, vocabulary=weight.shape[0])
    spec = _LossSpec(
        ignore_index=ignore_index,
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
        all_ignored=not kept.numel(),
    )
    if reduction == "none":
        losses: Tensor = _LossPerToken.apply(spec, rows, weight, bias, targets)  # type: ignore[no-untyped-call]
        return losses.view(labels.shape)
    total: Tensor = _SummedLoss.apply(spec, rows, weight, bias, targets)  # type: ignore[no-untyped-call]
    if reduction == "sum":
        return total
    if num_items is None:
        return total / kept.numel()
    return total / (num_items.to(total.device) if isinstance(num_items, Tensor) else num_items)


@dataclass(frozen=True, kw_only=True)
class _LossSpec:
    """What is computed, beside the tensors.

    Attributes:
        dtype: Of the matrix products.
        needs_gradient: Whether hidden, weight and bias do.
        all_ignored: Whether no token has a target.
    """

    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float | None
    scale: float
    chunk_bytes: int
    dtype: torch.dtype
    needs_gradient: tuple[bool, ...]
    all_ignored: bool

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing <= 1:
            raise ConfigurationError(
                f"label_smoothing={self.label_smoothing}: give a share from 0 to 1."
            )
        if not self.z_loss >= 0:
            raise ConfigurationError(f"z_loss={self.z_loss}: give a weight of 0 or more.")
        if self.softcap is not None and not self.softcap > 0:
            raise ConfigurationError(
                f"softcap={self.softcap}: give the largest size of a logit, more than 0, or None."
            )
        if self.chunk_bytes < 1:
            raise ConfigurationError(
                f"chunk_bytes={self.chunk_bytes}: give the bytes of a chunk of logits, 1 or more."
            )


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


def _check_labels(targets: Tensor, *, vocabulary: int) -> None:
    if targets.numel() == 0 or targets.is_meta:
        return
    lowest, highest = (int(x) for x in targets.aminmax())
    for label in (lowest, highest):
        if not 0 <= label < vocabulary:
            place = int((targets == label).nonzero()[0])
            raise DataError(
                f"Label {label} (number {place + 1} of those that are not ignored) is outside the "
                f"vocabulary of {vocabulary}. Labels are 0 to {vocabulary - 1}, or ignore_index."
            )


def _kept_rows(targets: Tensor, ignore_index: int) -> Tensor:
    """Return the indices of the labels that count; on the meta device, which has no values, all."""
    if targets.is_meta:
        return torch.arange(targets.numel(), device=targets.device)
    return (targets != ignore_index).nonzero().squeeze(1)


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


class _SummedLoss(torch.autograd.Function):
    """Sum of the losses; its gradients are there when the forward pass has ended.

    They are handed out by the first backward pass. A second one (`retain_graph=True` before it)
    computes them again.
    """

    @staticmethod
    def forward(ctx: Any, spec: _LossSpec, *tensors: Tensor | None) -> Tensor:
        ctx.spec = spec
        ctx.save_for_backward(*tensors)
        losses, ctx.gradients = _Sweep(spec, *tensors).run()  # type: ignore[arg-type]
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        _refuse_second_derivative()
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            _, gradients = _Sweep(ctx.spec, *ctx.saved_tensors).run()
        # The mean over no tokens is not a number, its gradients are zero.
        factor = torch.where(gradient.isfinite(), gradient, 0) if ctx.spec.all_ignored else gradient
        return None, *gradients.times(factor), None


class _LossPerToken(torch.autograd.Function):
    """One loss per token; their gradients weigh the tokens, so all is computed again backward."""

    @staticmethod
    def forward(ctx: Any, spec: _LossSpec, *tensors: Tensor | None) -> Tensor:
        ctx.spec = spec
        ctx.save_for_backward(*tensors)
        no_gradients = replace(spec, needs_gradient=(False,) * 3)
        losses, _ = _Sweep(no_gradients, *tensors).run()  # type: ignore[arg-type]
        return losses

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        _refuse_second_derivative()
        _, gradients = _Sweep(ctx.spec, *ctx.saved_tensors, token_weights=gradient).run()
        return None, *gradients.times(None), None


def _refuse_second_derivative() -> None:
    if torch.is_grad_enabled():
        raise ConfigurationError(
            "linear_cross_entropy has no second derivative, but its backward pass runs with "
            "create_graph=True. Use torch.nn.functional.cross_entropy on the logits; under the "
            "strategy, RoundPipeStrategy(loss='eager')."
        )


# --- the computation ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Gradients:
    """Sums of the gradients of hidden, weight and bias, and the types they are to have."""

    sums: Sequence[Tensor | None]
    dtypes: Sequence[torch.dtype | None]

    def times(self, factor: Tensor | None) -> list[Tensor | None]:
        """Multiply all of them, in place, and cast them."""
        scaled = [x if x is None or factor is None else x.mul_(factor) for x in self.sums]
        pairs = zip(scaled, self.dtypes, strict=True)
        return [None if x is None or dtype is None else x.to(dtype) for x, dtype in pairs]


@dataclass(frozen=True, kw_only=True)
class _Chunk:
    """Some of the tokens.

    Attributes:
        tokens: Which ones.
        hidden: Their hidden states, in the type of the products, shape (n, H).
        targets: Their labels, shape (n).
        log_sum_exp: Of their logits, shape (n, 1).
    """

    tokens: Tensor
    hidden: Tensor
    targets: Tensor
    log_sum_exp: Tensor


class _RunningSums:
    """What the loss needs of a chunk's logits, gathered part by part of the vocabulary.

    Args:
        like: Gives the number of tokens and the device.
        dtype: Of the sums.
    """

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        self._maximum = like.new_full(like.shape, -math.inf, dtype=dtype)
        self.exponentials = like.new_zeros(like.shape, dtype=dtype)
        self.targets = like.new_zeros(like.shape, dtype=dtype)
        self.all = like.new_zeros(like.shape, dtype=dtype)

    def add(self, logits: Tensor, targets: Tensor, *, keep: bool, sum_all: bool) -> Tensor:
        """Take in a part of the vocabulary.

        Args:
            logits: Shape (tokens, classes of the part). Overwritten, unless they are kept.
            targets: Labels counted from the part's first class; others are outside.
            keep: Whether the logits are still needed.
            sum_all: Whether their sum is needed.

        Returns:
            exp(logits - maximum so far).
        """
        inside, local = _inside(targets, logits.shape[1])
        self.targets = torch.where(inside, logits.gather(1, local).squeeze(1), self.targets)
        if sum_all:
            self.all += logits.sum(1)
        maximum = torch.maximum(self._maximum, logits.amax(1))
        self.exponentials *= (self._maximum - maximum).exp()
        self._maximum = maximum
        shift = maximum.unsqueeze(1)
        exponentials = (logits - shift if keep else logits.sub_(shift)).exp_()
        self.exponentials += exponentials.sum(1)
        return exponentials

    @property
    def log_sum_exp(self) -> Tensor:
        return self._maximum + self.exponentials.log()


def _inside(targets: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Return which targets are in a part of the vocabulary, and columns to gather by."""
    inside = (targets >= 0) & (targets < num_classes)
    return inside, targets.clamp(0, num_classes - 1).unsqueeze(1)


def multiplies_narrow(hidden: Tensor) -> bool:
    """Return whether the weight's gradient is made of 16-bit products, added up in float32.

    Processors multiply them slowly, and the wide ones are there.
    """
    return hidden.dtype.itemsize < torch.float32.itemsize and hidden.device.type != "cpu"


class _Sweep:
    """One pass over the chunks of tokens.

    Args:
        spec: What is computed.
        hidden: Shape (N, H).
        weight: Shape (V, H).
        bias: Shape (V), or None.
        targets: Shape (N).
        token_weights: What each token's gradient is multiplied by, shape (N), or None.
    """

    def __init__(
        self,
        spec: _LossSpec,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        *,
        token_weights: Tensor | None = None,
    ) -> None:
        self._spec = spec
        self._hidden, self._targets, self._token_weights = hidden, targets, token_weights
        self._wide = torch.promote_types(spec.dtype, torch.float32)
        self._weight = weight.to(spec.dtype)
        self._bias = None if bias is None else bias.to(spec.dtype)
        self._vocabulary = weight.shape[0]
        inputs, sum_dtypes = (hidden, weight, bias), (hidden.dtype, self._wide, self._wide)
        self._hidden_sum, self._weight_sum, self._bias_sum = sums = [
            x.new_zeros(x.shape, dtype=dtype) if x is not None and needed else None
            for x, dtype, needed in zip(inputs, sum_dtypes, spec.needs_gradient, strict=True)
        ]
        self._gradients = _Gradients(
            sums=sums, dtypes=[None if x is None else x.dtype for x in inputs]
        )

    def run(self) -> tuple[Tensor, _Gradients]:
        """Return one loss per token, and the gradients of their (weighted) sum."""
        losses = self._hidden.new_zeros(self._targets.shape, dtype=self._wide)
        kept = _kept_rows(self._targets, self._spec.ignore_index)
        if kept.numel():
            capped = self._spec.softcap is not None
            sizes = chunk_sizes(
                num_tokens=kept.numel(),
                vocabulary=self._vocabulary,
                bytes_per_logit=logit_bytes(
                    compute_bytes=self._spec.dtype.itemsize, softcapped=capped
                ),
                chunk_bytes=self._spec.chunk_bytes,
            )
            with torch.autocast(self._hidden.device.type, enabled=False):
                for tokens in kept.split(sizes.tokens):
                    losses[tokens] = self._run_chunk(tokens, num_classes=sizes.classes)
        return losses, self._gradients

    def _run_chunk(self, tokens: Tensor, *, num_classes: int) -> Tensor:
        """Return the losses of some tokens and add their gradients to the sums."""
        spec = self._spec
        hidden, targets = self._hidden[tokens].to(spec.dtype), self._targets[tokens]
        starts = range(0, self._vocabulary, num_classes)
        parts = [slice(start, min(start + num_classes, self._vocabulary)) for start in starts]
        wanted, capped = any(spec.needs_gradient), spec.softcap is not None
        sums = _RunningSums(targets, self._wide)
        for part in parts:
            logits = self._logits(hidden, part)
            exponentials = sums.add(
                logits,
                targets - part.start,
                keep=capped and wanted and len(parts) == 1,
                sum_all=bool(spec.label_smoothing),
            )
            if len(parts) > 1:
                del logits, exponentials  # before the next part's are made
        chunk = _Chunk(
            tokens=tokens, hidden=hidden, targets=targets, log_sum_exp=sums.log_sum_exp.unsqueeze(1)
        )
        if wanted and len(parts) == 1:
            softmax = exponentials.div_(sums.exponentials.unsqueeze(1))
            self._add_gradients(chunk, parts[0], softmax=softmax, logits=logits)
        elif wanted:
            for part in parts:
                logits = self._logits(hidden, part)
                shifted = logits - chunk.log_sum_exp if capped else logits.sub_(chunk.log_sum_exp)
                self._add_gradients(chunk, part, softmax=shifted.exp_(), logits=logits)
                del logits, shifted
        return self._losses(sums)

    def _logits(self, hidden: Tensor, part: slice) -> Tensor:
        """Return the logits of a part of the vocabulary, in a type wide enough for the softmax."""
        bias = None if self._bias is None else self._bias[part]
        logits = functional.linear(hidden, self._weight[part], bias).to(self._wide)
        if self._spec.scale != 1:
            logits.mul_(self._spec.scale)
        if self._spec.softcap is not None:
            logits.div_(self._spec.softcap).tanh_().mul_(self._spec.softcap)
        return logits

    def _losses(self, sums: _RunningSums) -> Tensor:
        spec, log_sum_exp = self._spec, sums.log_sum_exp
        losses = log_sum_exp - sums.targets
        if spec.label_smoothing:
            mean = sums.all / self._vocabulary
            losses = torch.lerp(losses, log_sum_exp - mean, spec.label_smoothing)
        if spec.z_loss:
            losses = losses + spec.z_loss * log_sum_exp.square()
        return losses

    def _add_gradients(
        self, chunk: _Chunk, part: slice, *, softmax: Tensor, logits: Tensor
    ) -> None:
        """Add what a chunk and a part of the vocabulary give. Overwrites softmax and logits."""
        slopes = self._logit_gradients(chunk, part, softmax=softmax, logits=logits)
        hidden, dtype = chunk.hidden, self._spec.dtype
        narrow = slopes.to(dtype)
        if self._hidden_sum is not None:
            product = narrow @ self._weight[part]
            self._hidden_sum.index_add_(0, chunk.tokens, product.to(self._hidden_sum.dtype))
        if self._bias_sum is not None:
            self._bias_sum[part] += slopes.sum(0)
        if self._weight_sum is None:
            return
        if not multiplies_narrow(hidden):
            self._weight_sum[part].addmm_(slopes.t(), hidden.to(self._wide))
            return
        size = max(1, _SLICE_BYTES // (hidden.shape[1] * dtype.itemsize))
        for columns, total in zip(
            narrow.split(size, 1), self._weight_sum[part].split(size), strict=True
        ):
            total += columns.t() @ hidden

    def _logit_gradients(
        self, chunk: _Chunk, part: slice, *, softmax: Tensor, logits: Tensor
    ) -> Tensor:
        """Return the gradients of the losses by the linear layer's outputs, in softmax's place."""
        spec, slopes = self._spec, softmax
        if spec.z_loss:
            slopes.mul_(1 + 2 * spec.z_loss * chunk.log_sum_exp)
        if spec.label_smoothing:
            slopes.sub_(spec.label_smoothing / self._vocabulary)
        inside, local = _inside(chunk.targets - part.start, slopes.shape[1])
        at_targets = slopes.gather(1, local)
        less = at_targets - (1 - spec.label_smoothing)
        slopes.scatter_(1, local, torch.where(inside.unsqueeze(1), less, at_targets))
        if spec.softcap is not None:
            slopes.mul_(logits.div_(spec.softcap).square_().neg_().add_(1))
        if spec.scale != 1:
            slopes.mul_(spec.scale)
        if self._token_weights is not None:
            slopes.mul_(self._token_weights[chunk.tokens].unsqueeze(1))
        return slopes
