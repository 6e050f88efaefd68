"""The gradient ledger: sums gradients on the host in the order of the microbatches.

Floating-point addition is not associative, so a sum that depends on who finished first would make
the result depend on the number of workers. Contributions that arrive early wait for their turn:

    arrives   m=0   m=2 (waits)   m=1          sum  ((g0 + g1) + g2)

This is the order, to the bit, in which a plain loop over the same microbatches accumulates.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor, nn

Gradients: TypeAlias = dict[nn.Parameter, Tensor]

T = TypeVar("T", bound=Tensor)


def fold(sums: dict[T, Tensor], contribution: dict[T, Tensor]) -> None:
    """Add a contribution to running sums, in place; new entries are taken over, not copied."""
    old, new = [], []
    for parameter, gradient in contribution.items():
        if parameter not in sums:
            sums[parameter] = gradient
        elif sums[parameter].is_sparse:  # in this order PyTorch adds any two layouts
            sums[parameter] = gradient + sums[parameter]
        elif gradient.is_sparse:
            sums[parameter] = sums[parameter] + gradient
        else:
            old.append(sums[parameter])
            new.append(gradient)
    if old:
        torch._foreach_add_(old, new)


class Account:
    """The sums of one stage, or of all that is used outside the blocks.

    Args:
        num_microbatches: How many microbatches contribute, each exactly once.
    """

    def __init__(self, num_microbatches: int) -> None:
        self._lock = threading.Lock()
        self._missing = list(range(num_microbatches))
        self._held: dict[int, tuple[Sequence[int], Gradients]] = {}
        self.sums: Gradients = {}

    def add(self, microbatches: Sequence[int], gradients: Gradients) -> None:
        """Add what some microbatches contribute together.

        Args:
            microbatches: Their indices, ascending; a device that sums over a round gives several.
            gradients: Host tensors, which the ledger takes over. May be empty.
        """
        with self._lock:
            self._held[microbatches[0]] = (microbatches, gradients)
            while self._missing and self._missing[0] in self._held:
                done, contribution = self._held.pop(self._missing[0])
                fold(self.sums, contribution)
                self._missing = [m for m in self._missing if m not in done]


class GradientLedger:
    """All gradients of one step, on the host.

    Args:
        num_microbatches: Number of microbatches.
        num_stages: Number of FUSED and BACKWARD stages.
    """

    def __init__(self, *, num_microbatches: int, num_stages: int) -> None:
        self._stages = tuple(Account(num_microbatches) for _ in range(num_stages))
        self._shared = Account(num_microbatches)
        self._pending: tuple[Gradients, ...] = tuple({} for _ in range(num_microbatches))

    def add_stage(self, stage: int, microbatches: Sequence[int], gradients: Gradients) -> None:
        """Add gradients of parameters that only this stage uses.

        Args:
            stage: Index in the backward partition.
            microbatches: Which microbatches they are of, ascending.
            gradients: Host tensors, taken over.
        """
        self._stages[stage].add(microbatches, gradients)

    def add_shared(self, microbatch: int, gradients: Gradients) -> None:
        """Add gradients of parameters with several uses; they are summed per microbatch first."""
        fold(self._pending[microbatch], gradients)

    def close_microbatch(self, microbatch: int) -> None:
        """Say that a microbatch contributes nothing more."""
        self._shared.add([microbatch], self._pending[microbatch])

    def sums(self) -> Gradients:
        """Return the sums, after all microbatches are closed. Call it once."""
        total: Gradients = {}
        for account in (*self._stages, self._shared):
            fold(total, account.sums)
        return total
