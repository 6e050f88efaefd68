"""Memory in which a thread converts the piece it works on; small enough for the cache."""

from __future__ import annotations

import torch
from torch import Tensor


class Scratch:
    """float32 memory that is handed out piece by piece, and taken back all at once.

    Args:
        num_elements: How much there is; what is asked for beyond it is allocated.
    """

    def __init__(self, num_elements: int) -> None:
        self._memory = torch.empty(num_elements, dtype=torch.float32)
        self._used = 0

    def take(self, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return memory for so many numbers, until `clear`."""
        start, stop = self._used, self._used + count
        if dtype is not torch.float32 or stop > self._memory.numel():
            return torch.empty(count, dtype=dtype)
        self._used = stop
        return self._memory[start:stop]

    def clear(self) -> None:
        """Take everything back."""
        self._used = 0
