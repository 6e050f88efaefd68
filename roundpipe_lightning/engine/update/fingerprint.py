"""A number that shows whether values are still the same, whoever has written them.

PyTorch counts writes into a tensor, but not those through `tensor.data`, nor those of compiled
kernels. So the bytes themselves are added up, every word of eight bytes times an odd number of its
own, modulo 2^64: no change of one word leaves the sum as it was, and hardly any other does.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

_CHUNK_BYTES = 2**22
_WORD_BYTES = 8
_MODULUS = 2**64
_FACTOR = 0x9E3779B97F4A7C15  # odd, too


def fingerprint(values: Tensor) -> int:
    """Return a number of 64 bits that follows from the bytes of a tensor's values.

    Args:
        values: On the host, of any dtype. It is read once, in pieces.
    """
    flat = values.detach().contiguous().reshape(-1).view(torch.uint8)
    total = 0
    for chunk in flat.split(_CHUNK_BYTES):
        # A copy begins where words do.
        filled = functional.pad(chunk.clone(), (0, -chunk.numel() % _WORD_BYTES))
        words = filled.view(torch.int64)
        weights = _weights(_CHUNK_BYTES // _WORD_BYTES)[: words.numel()]
        total = total * _FACTOR + int((words * weights).sum())
    return total % _MODULUS


@cache
def _weights(number: int) -> Tensor:
    with torch.inference_mode(mode=False):
        return torch.arange(1, 2 * number, 2)
