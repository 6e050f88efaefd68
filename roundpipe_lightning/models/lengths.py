"""The length of a batch's sequences, and shorter batches of the same shape."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from roundpipe_lightning.engine.capture.trees import map_tensors, tensors_in

__all__ = ["length_of", "shortened"]


def length_of(batch: Any) -> int | None:
    """Return how many positions the sequences of a batch have; None where that cannot be told.

    It is the second dimension that all tensors of whole numbers share (tokens, labels, masks); with
    none of these, of the tensors with three dimensions (features of every position).
    """
    tensors = list(tensors_in(batch))
    lengths = {t.shape[1] for t in tensors if t.dim() == 2 and not t.is_floating_point()}
    if not lengths:
        lengths = {tensor.shape[1] for tensor in tensors if tensor.dim() == 3}
    return lengths.pop() if len(lengths) == 1 else None


def shortened(batch: Any, length: int) -> Any:
    """Return the batch with its first positions only: every dimension of them but the first is cut.

    Args:
        batch: A batch with a length.
        length: How many positions to keep.
    """
    whole = length_of(batch)

    def cut(tensor: Tensor) -> Tensor:
        for dim in range(1, tensor.dim()):
            if tensor.shape[dim] == whole:
                tensor = tensor.narrow(dim, 0, length)
        return tensor

    return map_tensors(cut, batch)
