"""Whether all numbers of a tensor are finite, in one pass over its memory.

A sum is finite only if all its terms are. So each piece is summed, which is as fast as reading it;
only a piece whose sum is not finite, because of a term or because finite terms add up to too much,
is looked at number by number.
"""

from __future__ import annotations

import torch
from torch import Tensor

_PIECE = 1 << 20


def all_finite(tensor: Tensor) -> bool:
    """Return whether a floating point tensor has neither NaN nor infinities.

    Args:
        tensor: On any device, of any strides, without a graph being made; may be sparse (COO).
    """
    values = tensor.detach()
    if values.is_sparse:
        values = values.coalesce().values()
    flat = values.reshape(-1)
    wide = torch.promote_types(flat.dtype, torch.float32)
    return all(
        bool(torch.isfinite(part.sum(dtype=wide))) or bool(torch.isfinite(part).all())
        for part in flat.split(_PIECE)
    )
