"""Splits a batch of tensors into microbatches of neighbouring rows.

Only batches that can be read in one way are split: dicts, tuples, lists and dataclasses of tensors
whose first dimension is the batch's. All others run whole, `microbatching="blocks"`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from roundpipe_lightning.engine.capture.trees import map_leaves
from roundpipe_lightning.errors import BatchError

_SHARED = (str, bytes, bool, int, float, type(None))
_REMEDY = "Set microbatching='blocks', or leave it out: the step then runs on the whole batch."


def split_batch(batch: Any, num_microbatches: int) -> list[Any]:
    """Cut a batch into microbatches, whose sizes differ by one at most, larger ones first.

    Numbers, strings and None go to every microbatch; tensors are sliced without a copy.

    Args:
        batch: Containers of tensors, nested at will.
        num_microbatches: How many; 1 returns `[batch]`, whatever it is.

    Raises:
        BatchError: If the batch has fewer rows than microbatches, or other leaves.
    """
    if num_microbatches == 1:
        return [batch]
    size = batch_size_of(batch)
    if size < num_microbatches:
        raise BatchError(
            f"A batch of {size} rows cannot be split into {num_microbatches} microbatches. "
            f"{_REMEDY} Or drop the last batch of an epoch (DataLoader(drop_last=True))."
        )

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
