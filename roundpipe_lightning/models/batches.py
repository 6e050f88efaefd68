"""Splits a batch of tensors into microbatches of neighbouring rows, and counts what is in it.

Only batches that can be read in one way are split: dicts, tuples, lists and dataclasses of tensors
whose first dimension is the batch's. All others run whole, `microbatching="blocks"`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from roundpipe_lightning.engine.capture.trees import map_leaves, map_tensors, tensors_in
from roundpipe_lightning.errors import BatchError

_IDS, _MASK, _LABELS = "input_ids", "attention_mask", "labels"
_IGNORED = -100  # the label that cross-entropy leaves out by default
_SHARED = (str, bytes, bool, int, float, type(None))
_REMEDY = "Set microbatching='blocks', or leave it out: the step then runs on the whole batch."


def split_batch(batch: Any, num_microbatches: int) -> list[Any]:
    """Cut a batch into microbatches, whose sizes differ by one at most, larger ones first.

    Numbers, strings and None go to every microbatch; tensors are sliced without a copy. One
    microbatch is the batch, whatever it is. BatchError: it has other leaves.
    """
    if num_microbatches == 1:
        return [batch]
    batch_size_of(batch)

    def cut(leaf: Any, part: int) -> Any:
        return leaf.tensor_split(num_microbatches)[part] if isinstance(leaf, Tensor) else leaf

    return [map_leaves(partial(cut, part=part), batch) for part in range(num_microbatches)]


def batch_size_of(batch: Any) -> int:
    """Return the rows of a batch; BatchError if its tensors differ in them or it holds others."""
    sizes: set[int] = set()

    def look(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.dim():
            sizes.add(len(leaf))
        elif not isinstance(leaf, _SHARED):
            shape = " without dimensions" if isinstance(leaf, Tensor) else ""
            raise BatchError(
                f"The batch holds a {type(leaf).__name__}{shape}, which cannot be split into "
                f"microbatches. {_REMEDY}"
            )
        return leaf

    map_leaves(look, batch)
    if len(sizes) != 1:
        found = f"first dimensions of {sorted(sizes)}" if sizes else "no tensors"
        raise BatchError(f"The batch has {found}: it cannot be split into microbatches. {_REMEDY}")
    return sizes.pop()


@dataclass(frozen=True, kw_only=True)
class BatchCounts:
    """Counts of a batch: its first dimension, `input_ids` that are not padding, labels that count.

    None where a batch has nothing of the kind.
    """

    samples: int | None
    tokens: int | None
    targets: int | None


def count_batch(batch: Any, *, tokens: Callable[[Any], float] | None = None) -> BatchCounts:
    """Count a batch's samples, tokens and targets; `tokens` counts those of other forms.

    Tokens are the positions of `input_ids`, and of every key that ends in `_input_ids`, where the
    `attention_mask` of the same prefix and shape is not 0; all of them without such a mask.
    """
    try:
        samples: int | None = batch_size_of(batch)
    except BatchError:
        samples = None
    targets = targets_of_rows(batch)
    return BatchCounts(
        samples=samples,
        tokens=_count_tokens(batch) if tokens is None else int(tokens(batch)),
        targets=None if targets is None else int(targets.sum()),
    )


def targets_of_rows(batch: Any) -> Tensor | None:
    """Return how many targets each row of a batch for a language model has.

    These are labels that are not -100. Causal language models shift the labels inside, so that the
    first one of a sequence is never a target. That is decided from the data: where the labels equal
    `input_ids` wherever they are not -100, the first column is left out. Labels that differ from
    the inputs (shifted before, masked words, classes per token) count in full.

    Returns:
        Whole numbers, shape (rows,); None for a batch without whole-number `labels` and `input_ids`
        of one shape and two dimensions.
    """
    entries = batch if isinstance(batch, Mapping) else {}
    labels, inputs = entries.get(_LABELS), entries.get(_IDS)
    if not (isinstance(labels, Tensor) and isinstance(inputs, Tensor)):
        return None
    if labels.dim() != 2 or labels.shape != inputs.shape:
        return None
    if labels.is_floating_point() or labels.is_complex():
        return None
    counted = labels != _IGNORED
    if not (counted & (labels != inputs)).any():
        counted = counted[:, 1:]
    return counted.sum(1)


def _count_tokens(batch: Any) -> int | None:
    counts = []
    for key, ids in batch.items() if isinstance(batch, Mapping) else ():
        is_ids = isinstance(key, str) and (key == _IDS or key.endswith(f"_{_IDS}"))
        if is_ids and isinstance(ids, Tensor):
            mask = batch.get(key.removesuffix(_IDS) + _MASK)
            has_mask = isinstance(mask, Tensor) and mask.shape == ids.shape
            counts.append(int(mask.count_nonzero()) if has_mask else ids.numel())
    return sum(counts) if counts else None


def length_of(batch: Any) -> int | None:
    """Return the number of positions of a batch's sequences; None where that is unknown.

    It is the second dimension that all tensors of whole numbers share (tokens, labels, masks); with
    none of these, of the tensors with three dimensions (features of every position).
    """
    tensors = tensors_in(batch)
    lengths = {t.shape[1] for t in tensors if t.dim() == 2 and not t.is_floating_point()}
    if not lengths:
        lengths = {tensor.shape[1] for tensor in tensors if tensor.dim() == 3}
    return lengths.pop() if len(lengths) == 1 else None


def shortened(batch: Any, length: int) -> Any:
    """Return a batch that has a length with its first positions only, in every dimension but one.

    The first dimension, that of the samples, is kept.
    """
    whole = length_of(batch)

    def cut(tensor: Tensor) -> Tensor:
        for dim in range(1, tensor.dim()):
            if tensor.shape[dim] == whole:
                tensor = tensor.narrow(dim, 0, length)
        return tensor

    return map_tensors(cut, batch)
