"""What a batch has: samples, tokens and targets, for figures of speed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from roundpipe_lightning.errors import BatchError
from roundpipe_lightning.models.batches import batch_size_of
from roundpipe_lightning.models.weights import count_targets

__all__ = ["BatchCounts", "count_batch"]

_IDS, _MASK = "input_ids", "attention_mask"


@dataclass(frozen=True, kw_only=True)
class BatchCounts:
    """How much a batch has of what is counted; None where it has nothing of the kind.

    Attributes:
        samples: Length of the first dimension.
        tokens: Positions of `input_ids` that are not padding.
        targets: Labels that the loss averages over.
    """

    samples: int | None
    tokens: int | None
    targets: int | None


def count_batch(batch: Any, *, tokens: Callable[[Any], float] | None = None) -> BatchCounts:
    """Count a batch's samples, tokens and targets.

    Tokens are the positions of `input_ids`, and of every key that ends in `_input_ids`, where the
    `attention_mask` of the same prefix and shape is not 0; all of them without such a mask.

    Args:
        batch: A batch, as the data loader gives it.
        tokens: Counts the tokens of a batch of another form.
    """
    try:
        samples: int | None = batch_size_of(batch)
    except BatchError:
        samples = None
    return BatchCounts(
        samples=samples,
        tokens=_tokens(batch) if tokens is None else int(tokens(batch)),
        targets=count_targets(batch),
    )


def _tokens(batch: Any) -> int | None:
    if not isinstance(batch, Mapping):
        return None
    found = [_real_positions(batch, key, value) for key, value in batch.items() if _is_ids(key)]
    counts = [count for count in found if count is not None]
    return sum(counts) if counts else None


def _is_ids(key: Any) -> bool:
    return isinstance(key, str) and (key == _IDS or key.endswith(f"_{_IDS}"))


def _real_positions(batch: Mapping[str, Any], key: str, ids: Any) -> int | None:
    if not isinstance(ids, Tensor):
        return None
    mask = batch.get(key.removesuffix(_IDS) + _MASK)
    if isinstance(mask, Tensor) and mask.shape == ids.shape:
        return int(mask.count_nonzero())
    return ids.numel()
