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
from roundpipe_lightning.models.losses.loss_memory import ChunkSizes, chunk_sizes, logit_bytes
from roundpipe_lightning.models.losses.loss_rows import kept_rows

__all__ = ["Gradients", "Job", "LossOptions", "Sweep"]

_SLICE_BYTES = 16 * 2**20  # of a 16-bit product that is added to a float32 sum


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """The options of `linear_cross_entropy`.

    Raises:
        ConfigurationError: One cannot work.
    """

    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float | None
    scale: float
    chunk_bytes: int

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


@dataclass
class Gradients:
    """Sums of the gradients of hidden, weight and bias; None for what needs none."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    def times(self, factor: Tensor | None, *, of: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Multiply all of them, in place, and give them the types of what they belong to."""
        results: list[Tensor | None] = []
        for gradient, tensor in zip((self.hidden, self.weight, self.bias), of, strict=True):
            if gradient is None or tensor is None:
                results.append(None)
                continue
            scaled = gradient if factor is None else gradient.mul_(factor)
            results.append(scaled.to(tensor.dtype))
        return results


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is computed, beside the tensors.

    Attributes:
        options: Of the loss.
        dtype: Of the matrix products.
        needed: Whether hidden, weight and bias need a gradient.
        has_no_targets: Whether all tokens are ignored.
    """

    options: LossOptions
    dtype: torch.dtype
    needed: tuple[bool, bool, bool]
    has_no_targets: bool


def multiplies_narrow(hidden: Tensor) -> bool:
    """Say whether the weight's gradient comes from products of 16-bit numbers, added up in float32.

    Processors multiply them slowly, and the wide ones are there.
    """
    return hidden.dtype.itemsize < torch.float32.itemsize and hidden.device.type != "cpu"


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
        picked = logits.gather(1, local).squeeze(1)
        self.targets = torch.where(inside, picked, self.targets)
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
        """Of all logits so far."""
        return self._maximum + self.exponentials.log()


def _inside(targets: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Return which targets are in a part of the vocabulary, and columns to gather by."""
    inside = (targets >= 0) & (targets < num_classes)
    return inside, targets.clamp(0, num_classes - 1).unsqueeze(1)


class Sweep:
    """One pass over the chunks of tokens.

    Args:
        job: What is computed.
        hidden: Shape (N, H).
        weight: Shape (V, H).
        bias: Shape (V), or None.
        targets: Shape (N).
        token_weights: What each token's gradient is multiplied by, shape (N), or None.
    """

    def __init__(
        self,
        job: Job,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        *,
        token_weights: Tensor | None = None,
    ) -> None:
        self._job, self._options = job, job.options
        self._hidden, self._targets, self._token_weights = hidden, targets, token_weights
        self._wide = torch.promote_types(job.dtype, torch.float32)
        self._weight = weight.to(job.dtype)
        self._bias = None if bias is None else bias.to(job.dtype)
        self._vocabulary = weight.shape[0]
        hidden_needed, weight_needed, bias_needed = job.needed
        self._gradients = Gradients(
            hidden=hidden.new_zeros(hidden.shape) if hidden_needed else None,
            weight=weight.new_zeros(weight.shape, dtype=self._wide) if weight_needed else None,
            bias=weight.new_zeros(weight.shape[0], dtype=self._wide) if bias_needed else None,
        )

    def run(self) -> tuple[Tensor, Gradients]:
        """Return one loss per token, and the gradients of their (weighted) sum."""
        losses = self._hidden.new_zeros(self._targets.shape, dtype=self._wide)
        kept = kept_rows(self._targets, ignore_index=self._options.ignore_index)
        if kept.numel():
            sizes = self._chunk_sizes(kept.numel())
            with torch.autocast(self._hidden.device.type, enabled=False):
                for tokens in kept.split(sizes.tokens):
                    losses[tokens] = self._run_chunk(tokens, num_classes=sizes.classes)
        return losses, self._gradients

    def _chunk_sizes(self, num_tokens: int) -> ChunkSizes:
        per_logit = logit_bytes(
            compute_bytes=self._job.dtype.itemsize, softcapped=self._options.softcap is not None
        )
        return chunk_sizes(
            num_tokens=num_tokens,
            vocabulary=self._vocabulary,
            bytes_per_logit=per_logit,
            chunk_bytes=self._options.chunk_bytes,
        )

    def _run_chunk(self, tokens: Tensor, *, num_classes: int) -> Tensor:
        """Return the losses of some tokens and add their gradients to the sums."""
        hidden, targets = self._hidden[tokens].to(self._job.dtype), self._targets[tokens]
        starts = range(0, self._vocabulary, num_classes)
        parts = [slice(start, min(start + num_classes, self._vocabulary)) for start in starts]
        wanted = any(self._job.needed)
        sums = _RunningSums(targets, self._wide)
        for part in parts:
            logits = self._logits(hidden, part)
            exponentials = sums.add(
                logits,
                targets - part.start,
                keep=self._caps and wanted and len(parts) == 1,
                sum_all=bool(self._options.label_smoothing),
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
                shifted = (
                    logits - chunk.log_sum_exp if self._caps else logits.sub_(chunk.log_sum_exp)
                )
                self._add_gradients(chunk, part, softmax=shifted.exp_(), logits=logits)
                del logits, shifted
        return self._losses(sums)

    @property
    def _caps(self) -> bool:
        return self._options.softcap is not None

    def _logits(self, hidden: Tensor, part: slice) -> Tensor:
        """Return the logits of a part of the vocabulary, in a type wide enough for the softmax."""
        bias = None if self._bias is None else self._bias[part]
        logits = functional.linear(hidden, self._weight[part], bias).to(self._wide)
        if self._options.scale != 1:
            logits.mul_(self._options.scale)
        if self._options.softcap is not None:
            logits.div_(self._options.softcap).tanh_().mul_(self._options.softcap)
        return logits

    def _losses(self, sums: _RunningSums) -> Tensor:
        options, log_sum_exp = self._options, sums.log_sum_exp
        losses = log_sum_exp - sums.targets
        if options.label_smoothing:
            mean = sums.all / self._vocabulary
            losses = torch.lerp(losses, log_sum_exp - mean, options.label_smoothing)
        if options.z_loss:
            losses = losses + options.z_loss * log_sum_exp.square()
        return losses

    def _add_gradients(
        self, chunk: _Chunk, part: slice, *, softmax: Tensor, logits: Tensor
    ) -> None:
        """Add what a chunk and a part of the vocabulary give. Overwrites softmax and logits."""
        slopes = self._logit_gradients(chunk, part, softmax=softmax, logits=logits)
        sums, hidden, dtype = self._gradients, chunk.hidden, self._job.dtype
        narrow = slopes.to(dtype)
        if sums.hidden is not None:
            product = narrow @ self._weight[part]
            sums.hidden.index_add_(0, chunk.tokens, product.to(sums.hidden.dtype))
        if sums.bias is not None:
            sums.bias[part] += slopes.sum(0)
        if sums.weight is None:
            return
        if not multiplies_narrow(hidden):
            sums.weight[part].addmm_(slopes.t(), hidden.to(self._wide))
            return
        size = max(1, _SLICE_BYTES // (hidden.shape[1] * dtype.itemsize))
        for columns, total in zip(
            narrow.split(size, 1), sums.weight[part].split(size), strict=True
        ):
            total += columns.t() @ hidden

    def _logit_gradients(
        self, chunk: _Chunk, part: slice, *, softmax: Tensor, logits: Tensor
    ) -> Tensor:
        """Return the gradients of the losses by the linear layer's outputs, in softmax's place."""
        options, slopes = self._options, softmax
        if options.z_loss:
            slopes.mul_(1 + 2 * options.z_loss * chunk.log_sum_exp)
        if options.label_smoothing:
            slopes.sub_(options.label_smoothing / self._vocabulary)
        inside, local = _inside(chunk.targets - part.start, slopes.shape[1])
        at_targets = slopes.gather(1, local)
        less = at_targets - (1 - options.label_smoothing)
        slopes.scatter_(1, local, torch.where(inside.unsqueeze(1), less, at_targets))
        if options.softcap is not None:
            slopes.mul_(logits.div_(options.softcap).square_().neg_().add_(1))
        if options.scale != 1:
            slopes.mul_(options.scale)
        if self._token_weights is not None:
            slopes.mul_(self._token_weights[chunk.tokens].unsqueeze(1))
        return slopes
