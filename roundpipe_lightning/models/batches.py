"""Splits a batch of any shape into microbatches, and joins what the microbatches returned."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from roundpipe_lightning.engine.capture.trees import children_of, with_children
from roundpipe_lightning.errors import BatchError

__all__ = ["batch_size_of", "merge_outputs", "rows_of_parts", "split_batch", "split_parts"]


def split_batch(batch: Any, num_microbatches: int) -> list[Any]:
    """Cut a batch into microbatches of neighbouring samples, whose sizes differ by at most one.

    What a batch may be made of:

    - dicts and other mappings, tuples, named tuples, dataclasses, nested at will, and a list as the
      outermost or between them: kept as they are, with their contents split;
    - tensors and arrays with a dimension or more: samples along the first one, sliced without a
      copy;
    - lists inside of the batch: as many elements as samples are split like samples (texts, images
      of different sizes, one dict per sample), lists of tensors that have the samples in their
      first dimension are structure; a list that can be read either way is refused;
    - numbers, strings, None, tensors without dimensions and lists of numbers or strings of another
      length: handed to every microbatch whole.

    Args:
        batch: What the data loader gave.
        num_microbatches: How many; 1 returns `[batch]`, whatever it is.

    Returns:
        The microbatches, first samples first, larger ones first (as `torch.tensor_split`).

    Raises:
        BatchError: If the batch has fewer samples than microbatches, or none that can be counted,
            or leaves that disagree; it names the leaves with their lengths.
    """
    if num_microbatches == 1:
        return [batch]
    size = batch_size_of(batch)
    if size < num_microbatches:
        raise BatchError(
            f"A batch of {size} samples cannot be split into {num_microbatches} microbatches. "
            "If it is the last one of an epoch, drop it with DataLoader(drop_last=True); otherwise "
            f"enlarge the batch or set num_microbatches to {max(size, 1)} or less, or to 'auto'."
        )
    small, num_larger = divmod(size, num_microbatches)
    sizes = [small + (i < num_larger) for i in range(num_microbatches)]
    stops = list(accumulate(sizes))
    return [
        _part(batch, size=size, samples=slice(stop - count, stop), outermost=True)
        for count, stop in zip(sizes, stops, strict=True)
    ]


def batch_size_of(batch: Any) -> int:
    """Return the number of samples in a batch; `split_batch` says what a batch may be made of.

    Raises:
        BatchError: If there is no tensor to count by, or tensors disagree about it.
    """
    leaves = list(_leaves(batch))
    lowest = min((leaf.rank for leaf in leaves), default=0)
    deciding = [leaf for leaf in leaves if leaf.rank == lowest]
    if not deciding:
        raise BatchError(
            f"A batch of type {type(batch).__name__} has no tensor with a batch dimension, so it "
            "cannot be split into microbatches. Return tensors from the collate function, or set "
            "num_microbatches=1."
        )
    if len({leaf.length for leaf in deciding}) > 1:
        raise BatchError(
            "The batch cannot be split into microbatches: its tensors differ in their first "
            f"dimension ({', '.join(map(str, deciding))}). Give all of them one row per sample, "
            "keep what belongs to no sample out of the batch, or set num_microbatches=1."
        )
    return deciding[0].length


def rows_of_parts(batch: Any) -> dict[Any, int]:
    """Return how many samples each part of a batch has that several loaders have filled.

    A loader that is exhausted gives None, which has none and is left out.

    Raises:
        BatchError: If the samples of a part cannot be counted.
    """
    return {key: batch_size_of(part) for key, part in children_of(batch) if part is not None}


def split_parts(batch: Any, num_microbatches: int) -> list[Any]:
    """Cut a batch whose parts come from loaders of their own, each part by itself.

    Every microbatch has the same share of every part, so that means over a part, over all rows and
    sums of such means are those of the batch.

    Args:
        batch: A container with a part per loader.
        num_microbatches: How many.

    Returns:
        The microbatches, each a container like the batch.

    Raises:
        BatchError: If the rows of a part cannot be divided by the number of microbatches.
    """
    rows = rows_of_parts(batch)
    if any(count % num_microbatches for count in rows.values()):
        counted = ", ".join(f"batch[{key!r}]: {count}" for key, count in rows.items())
        raise BatchError(
            f"The loaders of this batch have given parts of different lengths ({counted}), which "
            f"cannot all be divided by {num_microbatches} microbatches. Make their batch sizes "
            f"multiples of {num_microbatches} and drop smaller last batches "
            "(DataLoader(drop_last=True)), or set num_microbatches to a number that divides them, "
            "'auto' or 1."
        )
    children = dict(children_of(batch))
    parts = {
        key: split_batch(part, num_microbatches) if key in rows else [None] * num_microbatches
        for key, part in children.items()
    }
    return [
        with_children(batch, {key: pieces[index] for key, pieces in parts.items()})
        for index in range(num_microbatches)
    ]


# --- counting -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Leaf:
    """A part of a batch that has a length.

    Attributes:
        path: How user code reaches it. length: Its first dimension, or its number of elements.
            rank: How far it is to be believed: 0 a tensor, 1 a tensor in an inner list (which may
            be one list element per sample), 2 a list of strings. The lowest in the batch decide.
    """

    path: str
    length: int
    rank: int

    def __str__(self) -> str:
        return f"{self.path}: {self.length}"


def _leaves(node: Any, path: str = "batch", rank: int = 0) -> Iterator[_Leaf]:
    if isinstance(node, PackedSequence):
        raise BatchError(
            f"{path} is a PackedSequence, which cannot be split into microbatches. "
            "Pack the padded sequences in training_step, or set num_microbatches=1."
        )
    if _is_array(node):
        yield _Leaf(path=path, length=len(node), rank=rank)
    elif _is_texts(node):
        yield _Leaf(path=path, length=len(node), rank=2)
    else:
        for key, child in _children(node):
            inner = isinstance(child, list)
            yield from _leaves(child, path + key, 1 if inner else rank)


def _is_array(node: Any) -> bool:
    """Whether a leaf has samples in a first dimension: a tensor, a NumPy array or the like."""
    shape = getattr(node, "shape", None)
    return isinstance(shape, tuple) and len(shape) > 0


def _is_texts(node: Any) -> bool:
    return isinstance(node, list) and bool(node) and all(isinstance(e, str | bytes) for e in node)


def _children(node: Any) -> Iterator[tuple[str, Any]]:
    """What a container holds, each with the text that leads to it."""
    named = dataclasses.is_dataclass(node) and not isinstance(node, Mapping)
    for key, child in children_of(node):
        yield (f".{key}" if named else f"[{key!r}]"), child


# --- splitting ------------------------------------------------------------------------------------


def _part(node: Any, *, size: int, samples: slice, outermost: bool = False) -> Any:
    """The given samples of a part of the batch."""
    if _is_array(node):
        return node[samples]
    if isinstance(node, list) and (not outermost or _is_texts(node)) and _is_samples(node, size):
        return node[samples]

    children = dict(children_of(node))
    if not children:
        return node
    return with_children(
        node, {key: _part(child, size=size, samples=samples) for key, child in children.items()}
    )


def _is_samples(node: list[Any], size: int) -> bool:
    """Whether a list inside of the batch has one element per sample.

    Raises:
        BatchError: If it can be read both ways, or neither.
    """
    lengths = {leaf.length for leaf in _leaves(node) if leaf.rank < 2}
    structure = lengths == {size}
    if len(node) == size and structure:
        raise BatchError(
            f"The batch has a list of {size} elements whose tensors have {size} rows each: it may "
            f"hold one element per sample, or {size} tensors of the whole batch. Make it one "
            "stacked tensor in the first case, a tuple in the second."
        )
    if len(node) != size and lengths and not structure:
        raise BatchError(
            f"The batch has {size} samples, but also a list of {len(node)} elements whose tensors "
            f"have {_words(lengths)} rows. Give the list one element, or its tensors one row, per "
            "sample, or set num_microbatches=1."
        )
    return len(node) == size and not structure


def _words(lengths: set[int]) -> str:
    return " or ".join(str(length) for length in sorted(lengths))


# --- joining --------------------------------------------------------------------------------------


def merge_outputs(outputs: Sequence[Any], sizes: Sequence[int], weights: Sequence[float]) -> Any:
    """Join what a step returned for each microbatch into what it would return for the batch.

    - all None: None;
    - mappings with the same keys: a dict, joined key by key;
    - tensors whose first dimension is their microbatch's size: one tensor, in the order of the
      samples;
    - floating-point tensors without dimensions, and floats: the weighted mean;
    - all else, tensors that do not fit together included: the list of the values.

    Args:
        outputs: One per microbatch. One alone is returned itself.
        sizes: Samples in each microbatch.
        weights: The microbatches' shares of the loss, which sum to 1; see `microbatch_weights`.
    """
    if len(outputs) == 1:
        return outputs[0]
    if all(output is None for output in outputs):
        return None
    first = outputs[0]
    if all(isinstance(output, Mapping) for output in outputs):
        if all(set(output) == set(first) for output in outputs):
            return {k: merge_outputs([o[k] for o in outputs], sizes, weights) for k in first}
    elif all(isinstance(output, Tensor) for output in outputs):
        if _is_per_sample(outputs, sizes):
            return torch.cat(list(outputs))
        if all(o.dim() == 0 and o.dtype == first.dtype and o.is_floating_point() for o in outputs):
            return _mean(outputs, weights)
    elif all(isinstance(output, float) for output in outputs):
        return _mean(outputs, weights)
    return list(outputs)


def _is_per_sample(outputs: Sequence[Tensor], sizes: Sequence[int]) -> bool:
    first = outputs[0]
    return first.dim() > 0 and all(
        output.shape == (size, *first.shape[1:]) and output.dtype == first.dtype
        for output, size in zip(outputs, sizes, strict=True)
    )


def _mean(values: Sequence[Any], weights: Sequence[float]) -> Any:
    # Without a weight a value has no say, even if it is not a number.
    parts = [value * weight for value, weight in zip(values, weights, strict=True) if weight]
    return sum(parts[1:], start=parts[0]) if parts else values[0]
