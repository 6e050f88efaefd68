"""The computation behind `linear_cross_entropy`: one pass over chunks of tokens.

```
tokens of a chunk ─► logits ─► softmax, in place ─► losses
                                   └─► softmax - target, in place ─► added to the gradients' sums
```
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from roundpipe_lightning.errors import ConfigurationError

__all__ = ["LossSpec", "LossSweep", "chunk_tokens", "logit_bytes"]

DEFAULT_CHUNK_BYTES = 128 * 2**20
"""Device memory for one chunk of logits."""

_SOFTMAX_BYTES = 4  # the softmax is computed in float32
_SLICE_BYTES = 16 * 2**20  # of a 16-bit product that is added to a float32 sum


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

    Args:
        num_tokens: Rows of logits, at least 1.
        vocabulary: Columns.
        bytes_per_logit: See `logit_bytes`.
        chunk_bytes: The budget. Where it is too small for one token, the chunk is one token.
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
    """One pass over the chunks of tokens.

    Args:
        hidden: Shape (N, H).
        weight: Shape (V, H).
        bias: Shape (V), or None.
        targets: Shape (N).
        kept: Indices of the rows that count; the others have a loss of 0.
        token_weights: What each token's gradient is multiplied by, shape (N), or None.
    """

    def __init__(
        self,
        spec: LossSpec,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        kept: Tensor,
        *,
        token_weights: Tensor | None = None,
    ) -> None:
        self._spec = spec
        self._hidden, self._targets, self._kept = hidden, targets, kept
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
        losses = self._hidden.new_zeros(self._targets.shape, dtype=self._wide)
        if self._kept.numel():
            size = chunk_tokens(
                num_tokens=self._kept.numel(),
                vocabulary=self._weight.shape[0],
                bytes_per_logit=logit_bytes(
                    compute_bytes=self._spec.dtype.itemsize,
                    softcapped=self._spec.softcap is not None,
                ),
                chunk_bytes=self._spec.chunk_bytes,
            )
            with torch.autocast(self._hidden.device.type, enabled=False):
                for tokens in self._kept.split(size):
                    losses[tokens] = self._run_chunk(tokens)
        return losses, self._sums

    def _run_chunk(self, tokens: Tensor) -> Tensor:
        """Return the losses of some tokens and add their gradients to the sums."""
        spec = self._spec
        hidden = self._hidden[tokens].to(spec.dtype)
        targets = self._targets[tokens].unsqueeze(1)
        logits = self._logits(hidden)
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

    def _logits(self, hidden: Tensor) -> Tensor:
        """Return logits in a type wide enough for the softmax."""
        logits = functional.linear(hidden, self._weight, self._bias).to(self._wide)
        if self._spec.scale != 1:
            logits.mul_(self._spec.scale)
        if self._spec.softcap is not None:
            logits.div_(self._spec.softcap).tanh_().mul_(self._spec.softcap)
        return logits

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
