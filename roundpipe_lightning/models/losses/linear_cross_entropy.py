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
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from roundpipe_lightning.engine.device.accelerator import begin_read
from roundpipe_lightning.errors import ConfigurationError, DataError

__all__ = ["linear_cross_entropy"]

DEFAULT_CHUNK_BYTES = 128 * 2**20
"""Device memory for one chunk of logits."""

_SOFTMAX_BYTES = 4  # the softmax is computed in float32
_SLICE_BYTES = 16 * 2**20  # of a 16-bit product that is added to a float32 sum

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
    rows = hidden.reshape(-1, hidden.shape[-1])
    targets = _Targets(labels.reshape(-1).long(), ignore_index, vocabulary=weight.shape[0])
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
    loss: Tensor = _Loss.apply(spec, targets, rows, weight, bias)  # type: ignore[no-untyped-call]
    if reduction == "none":
        return loss.view(labels.shape)
    if reduction == "sum":
        return loss
    if num_items is None:  # the mean over no tokens is not a number, its gradients are zero
        num_kept = targets.kept.numel()
        return loss / num_kept if num_kept else loss + math.nan
    return loss / (num_items.to(loss.device) if isinstance(num_items, Tensor) else num_items)


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


class _Targets:
    """The labels of all rows, those that count in `order` before the others.

    How many count and the range of their values comes to the host while the device computes what
    was launched before `kept` is asked for. That is the one wait: without it ignored rows would be
    computed, too (docs/benchmarks/measurements.md). On the meta device all count.
    """

    def __init__(self, labels: Tensor, ignore_index: int, *, vocabulary: int) -> None:
        self.labels, self._vocabulary = labels, vocabulary
        self.are_waited_for = False
        if labels.is_meta or labels.numel() == 0:
            self.order = self.kept = torch.arange(labels.numel(), device=labels.device)
            return
        counts = labels != ignore_index
        inside = labels.where(counts, 0).aminmax()
        seen = torch.stack([counts.sum(), *inside])
        read = begin_read(seen)
        self._read, self.are_waited_for = read or seen.tolist, read is not None
        self.order = counts.logical_not().argsort(stable=True)

    @cached_property
    def kept(self) -> Tensor:
        """The indices of the labels that count."""
        num_kept, *ends = self._read()
        rows = self.order[:num_kept]
        for label in ends:
            if not 0 <= label < self._vocabulary:
                place = self.labels[rows].tolist().index(label)
                raise DataError(
                    f"Label {label} (number {place + 1} of those that are not ignored) is outside "
                    f"the vocabulary of {self._vocabulary}. Labels are 0 to "
                    f"{self._vocabulary - 1}, or ignore_index."
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


class _Loss(torch.autograd.Function):
    """The losses of all tokens, or their sum.

    The gradients of the sum are there when the forward pass has ended. They are handed out by the
    first backward pass; a second one (`retain_graph=True` before it) computes them again. Those of
    single losses weigh the tokens, so all is computed again backward.
    """

    @staticmethod
    def forward(ctx: Any, spec: LossSpec, targets: _Targets, *tensors: Tensor | None) -> Tensor:
        ctx.spec, ctx.targets, ctx.gradients = spec, targets, None
        ctx.save_for_backward(*tensors, targets.labels)
        if spec.summed:
            losses, ctx.gradients = LossSweep(spec, targets, *tensors).run()  # type: ignore[arg-type]
            return losses.sum()
        no_gradients = replace(spec, needs_gradient=(False,) * 3)
        return LossSweep(no_gradients, targets, *tensors).run()[0]  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise ConfigurationError(
                "linear_cross_entropy has no second derivative, but its backward pass runs with "
                "create_graph=True. Use torch.nn.functional.cross_entropy on the logits; under the "
                "strategy, RoundPipeStrategy(loss='eager')."
            )
        spec, (*inputs, _) = ctx.spec, ctx.saved_tensors  # which raises if one was written into
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            weights = None if spec.summed else gradient
            sweep = LossSweep(spec, ctx.targets, *inputs, token_weights=weights)
            _, gradients = sweep.run()
        return (
            None,
            None,
            *(
                None
                if sums is None
                else (sums.mul_(gradient) if spec.summed else sums).to(_gradient_dtype(x))
                for x, sums in zip(inputs, gradients, strict=True)
            ),
        )


def _gradient_dtype(tensor: Tensor) -> torch.dtype:
    """Return what autograd expects: a leaf may sum up wider numbers than it has."""
    return (tensor.grad_dtype if tensor.is_leaf else None) or tensor.dtype


@dataclass(frozen=True, kw_only=True)
class LossSpec:
    """The loss to compute, beside its tensors."""

    label_smoothing: float
    z_loss: float
    softcap: float | None
    scale: float
    chunk_bytes: int
    dtype: torch.dtype
    needs_gradient: tuple[bool, ...]  # whether hidden, weight and bias do
    summed: bool  # whether the losses of the tokens are added up

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


def logit_bytes(*, compute_bytes: int, softcapped: bool = False) -> int:
    """Return the most bytes that one logit of a chunk takes; a soft cap's slope is kept, too."""
    wide = max(compute_bytes, _SOFTMAX_BYTES)
    return wide * (2 if softcapped else 1) + (compute_bytes if compute_bytes < wide else 0)


def chunk_tokens(
    *, num_tokens: int, vocabulary: int, bytes_per_logit: int, chunk_bytes: int
) -> int:
    """Return the tokens of the largest chunk within a budget, cut so that chunks are about equal.

    It is one token at least, however small the budget; of bytes per logit see `logit_bytes`.
    """
    most = min(num_tokens, max(1, chunk_bytes // (bytes_per_logit * vocabulary)))
    num_chunks = -(-num_tokens // most)
    return -(-num_tokens // num_chunks)


def multiplies_narrow(hidden: Tensor) -> bool:
    """Return whether the weight's gradient is made of 16-bit products, added up in float32.

    Processors multiply them slowly, and the wide ones are there.
    """
    return hidden.dtype.itemsize < torch.float32.itemsize and hidden.device.type != "cpu"


class LossSweep:
    """One pass over chunks of tokens; shapes: hidden (N, H), weight (V, H), bias (V).

    Args:
        targets: N labels; the rows of those that do not count have a loss of 0.
        token_weights: What each token's gradient is multiplied by, shape (N), or None.
    """

    def __init__(
        self,
        spec: LossSpec,
        targets: _Targets,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *,
        token_weights: Tensor | None = None,
    ) -> None:
        self._spec, self._targets, self._hidden = spec, targets, hidden
        self._token_weights = token_weights
        self._wide = torch.promote_types(spec.dtype, torch.float32)
        # As it is if it can be: under the strategy it may be rounded, and is not read otherwise.
        self._weight = weight if weight.dtype is spec.dtype else weight.to(spec.dtype)
        self._bias = None if bias is None else bias.to(spec.dtype)
        inputs, sum_dtypes = (hidden, weight, bias), (hidden.dtype, self._wide, self._wide)
        self._hidden_sum, self._weight_sum, self._bias_sum = self._sums = [
            hidden.new_zeros(x.shape, dtype=dtype) if x is not None and needed else None
            for x, dtype, needed in zip(inputs, sum_dtypes, spec.needs_gradient, strict=True)
        ]

    def run(self) -> tuple[Tensor, list[Tensor | None]]:
        """Return one loss per token, and the gradients of their (weighted) sum.

        The gradients are those of hidden, weight and bias; wider than these where they are sums.
        """
        targets = self._targets
        losses = self._hidden.new_zeros(targets.order.shape, dtype=self._wide)
        if not targets.order.numel():
            return losses, self._sums
        size = chunk_tokens(
            num_tokens=targets.order.numel(),
            vocabulary=self._weight.shape[0],
            bytes_per_logit=logit_bytes(
                compute_bytes=self._spec.dtype.itemsize, softcapped=self._spec.softcap is not None
            ),
            chunk_bytes=self._spec.chunk_bytes,
        )
        with torch.autocast(self._hidden.device.type, enabled=False):
            # The device computes them, needed or not, while the host waits for what counts.
            first = self._logits(targets.order[:size]) if targets.are_waited_for else None
            for tokens in targets.kept.split(size):
                losses[tokens] = self._run_chunk(tokens, first)
                first = None
        return losses, self._sums

    def _run_chunk(self, tokens: Tensor, made: tuple[Tensor, Tensor] | None) -> Tensor:
        """Return the losses of some tokens and add their gradients to the sums."""
        spec = self._spec
        hidden, logits = (x[: len(tokens)] for x in made or self._logits(tokens))
        targets = self._targets.labels[tokens].unsqueeze(1)
        at_targets = logits.gather(1, targets)
        mean = logits.mean(1, keepdim=True) if spec.label_smoothing else None
        highest = logits.amax(1, keepdim=True)
        has_gradients = any(spec.needs_gradient)
        is_needed = has_gradients and spec.softcap is not None  # for the cap's slope
        softmax = (logits - highest if is_needed else logits.sub_(highest)).exp_()
        total = softmax.sum(1, keepdim=True)
        log_sum_exp = highest + total.log()
        losses = log_sum_exp - at_targets
        if mean is not None:
            losses = torch.lerp(losses, log_sum_exp - mean, spec.label_smoothing)
        if spec.z_loss:
            losses = losses + spec.z_loss * log_sum_exp.square()
        if has_gradients:
            slopes = softmax.div_(total)
            if spec.z_loss:
                slopes.mul_(1 + 2 * spec.z_loss * log_sum_exp)
            if spec.label_smoothing:
                slopes.sub_(spec.label_smoothing / logits.shape[1])
            slopes.scatter_add_(1, targets, torch.full_like(at_targets, spec.label_smoothing - 1))
            if spec.softcap is not None:
                slopes.mul_(logits.div_(spec.softcap).square_().neg_().add_(1))
            if spec.scale != 1:
                slopes.mul_(spec.scale)
            if self._token_weights is not None:
                slopes.mul_(self._token_weights[tokens].unsqueeze(1))
            self._add_gradients(tokens, hidden, slopes)
        return losses.squeeze(1)

    def _logits(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return hidden states of tokens, and logits in a type wide enough for the softmax."""
        hidden = self._hidden[tokens].to(self._spec.dtype)
        logits = functional.linear(hidden, self._weight, self._bias).to(self._wide)
        if self._spec.scale != 1:
            logits.mul_(self._spec.scale)
        if self._spec.softcap is not None:
            logits.div_(self._spec.softcap).tanh_().mul_(self._spec.softcap)
        return hidden, logits

    def _add_gradients(self, tokens: Tensor, hidden: Tensor, slopes: Tensor) -> None:
        narrow = slopes.to(hidden.dtype)
        if self._hidden_sum is not None:
            product = narrow @ self._weight
            self._hidden_sum.index_add_(0, tokens, product.to(self._hidden_sum.dtype))
        if self._bias_sum is not None:
            self._bias_sum += slopes.sum(0)
        if self._weight_sum is None:
            return
        if not multiplies_narrow(hidden):
            self._weight_sum.addmm_(slopes.t(), hidden.to(self._wide))
            return
        size = max(1, _SLICE_BYTES // (hidden.shape[1] * hidden.dtype.itemsize))
        for columns, total in zip(narrow.split(size, 1), self._weight_sum.split(size), strict=True):
            total += columns.t() @ hidden
