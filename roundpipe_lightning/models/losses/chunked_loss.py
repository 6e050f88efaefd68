"""The computation behind `linear_cross_entropy`: one pass over chunks of tokens.

```
tokens of a chunk ─► logits of a part of the vocabulary ─► running maximum and sums ─► losses
                       │ kept, or made again where there are several parts
                       └─► softmax - target, in place ─► added to the gradients' sums
```
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from roundpipe_lightning.errors import ConfigurationError

__all__ = ["ChunkSizes", "LossSpec", "LossSweep", "chunk_sizes", "kept_rows", "logit_bytes"]

DEFAULT_CHUNK_BYTES = 128 * 2**20
"""Device memory for one chunk of logits."""

_MIN_TOKENS = 32  # fewer would make thin matrix products; the vocabulary is cut instead
_SOFTMAX_BYTES = 4  # the softmax is computed in float32
_SLICE_BYTES = 16 * 2**20  # of a 16-bit product that is added to a float32 sum


@dataclass(frozen=True, kw_only=True)
class LossSpec:
    """The loss to compute, beside its tensors.

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


@dataclass(frozen=True, kw_only=True)
class ChunkSizes:
    """Sizes of the part of the logits that is held at a time.

    Attributes:
        tokens: Rows of a chunk.
        classes: Columns of a chunk; less than the vocabulary only where few rows are too large,
            because every column is then computed twice.
    """

    tokens: int
    classes: int


def logit_bytes(*, compute_bytes: int, softcapped: bool = False) -> int:
    """Return the most bytes that one logit of a chunk takes; a soft cap's slope is kept, too."""
    wide = max(compute_bytes, _SOFTMAX_BYTES)
    return wide * (2 if softcapped else 1) + (compute_bytes if compute_bytes < wide else 0)


def chunk_sizes(
    *, num_tokens: int, vocabulary: int, bytes_per_logit: int, chunk_bytes: int
) -> ChunkSizes:
    """Return the largest chunk within a budget, cut so that the chunks are about equal.

    Args:
        num_tokens: Rows of logits, at least 1.
        vocabulary: Columns.
        bytes_per_logit: See `logit_bytes`.
        chunk_bytes: The budget. Where it is too small for one logit, the chunk is one logit.
    """
    logits = max(1, chunk_bytes // bytes_per_logit)
    tokens = min(num_tokens, max(logits // vocabulary, min(_MIN_TOKENS, logits)))
    classes = min(vocabulary, max(1, logits // tokens))
    return ChunkSizes(tokens=_evenly(num_tokens, tokens), classes=_evenly(vocabulary, classes))


def _evenly(total: int, part: int) -> int:
    """Return the size of equal parts, no more of them than parts of this size, no part larger."""
    num_parts = -(-total // part)
    return -(-total // num_parts)


def kept_rows(targets: Tensor, ignore_index: int) -> Tensor:
    """Return the indices of the labels that count; on the meta device, which has no values, all."""
    if targets.is_meta:
        return torch.arange(targets.numel(), device=targets.device)
    return (targets != ignore_index).nonzero().squeeze(1)


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
    """Sums of a chunk's logits that the loss needs, added up part by part of the vocabulary.

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
    """Return a mask of the targets in a part of the vocabulary, and columns to gather by."""
    inside = (targets >= 0) & (targets < num_classes)
    return inside, targets.clamp(0, num_classes - 1).unsqueeze(1)


def multiplies_narrow(hidden: Tensor) -> bool:
    """Return whether the weight's gradient is made of 16-bit products, added up in float32.

    Processors multiply them slowly, and the wide ones are there.
    """
    return hidden.dtype.itemsize < torch.float32.itemsize and hidden.device.type != "cpu"


class LossSweep:
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
        spec: LossSpec,
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
        kept = kept_rows(self._targets, self._spec.ignore_index)
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
