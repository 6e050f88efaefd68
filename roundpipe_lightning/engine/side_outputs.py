"""Side outputs: what a block leaves beside its output, for the tail segment to use.

Router logits and penalties, for example: libraries collect them with hooks or as attributes, and
the tail segment adds them to the loss. A FORWARD stage keeps no graph that their gradient could go
back through, so a result of its functions carries its origin, which the recompute finds again:

```
FORWARD   block 3: the 17th function gives t         t knows (block 3, function 17)
tail      the loss uses t, and gets a leaf instead   leaf.grad
BACKWARD  block 3: the 17th function gives t'        backward([output, t'], [gradient, leaf.grad])
```
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from roundpipe_lightning.errors import CaptureError

_ORIGIN = "_roundpipe_origin"


class Origin(NamedTuple):
    """Where in a microbatch's forward pass a tensor was made.

    Attributes:
        run: The microbatch's side outputs.
        block: Index of the block.
        function: Number of the torch function within the block; 0 are the block's inputs.
        position: Which of the function's results.
    """

    run: SideOutputs
    block: int
    function: int
    position: int


class Watch(Enum):
    """What is done with the results of the functions in a block."""

    NOTHING = "nothing"
    """A graph is kept, or no gradient is wanted."""

    MARK = "mark"
    """They get their origin: a FORWARD stage runs."""

    FIND = "find"
    """Those that the tail segment has used are collected: a BACKWARD stage recomputes."""


class SideOutputs:
    """The side outputs of one microbatch."""

    def __init__(self) -> None:
        self._leaves: dict[Origin, Tensor] = {}
        self._found: dict[Origin, Tensor] = {}
        self._watch = Watch.NOTHING
        self._block = self._num_functions = 0

    @contextmanager
    def block(self, index: int, watch: Watch, taken: Sequence[Tensor]) -> Iterator[None]:
        """Watch over the functions of a block until the end of the context."""
        if watch is Watch.FIND and not any(origin.block == index for origin in self._leaves):
            watch = Watch.NOTHING
        self._watch, self._block, self._num_functions = watch, index, -1
        self.note(list(taken))
        self._num_functions = 0  # whatever was asked about the inputs
        try:
            yield
        finally:
            self._watch = Watch.NOTHING

    def note(self, result: Any) -> None:
        """Take notice of what a torch function has returned."""
        if self._watch is Watch.NOTHING:
            return
        self._num_functions += 1
        results = result if isinstance(result, (tuple, list)) else (result,)
        for position, tensor in enumerate(results):
            if not isinstance(tensor, Tensor):
                continue
            origin = Origin(self, self._block, self._num_functions, position)
            if self._watch is Watch.MARK:
                setattr(tensor, _ORIGIN, origin)
            elif origin in self._leaves:
                self._check_same(tensor, self._leaves[origin])
                self._found[origin] = tensor

    def leaf_for(self, tensor: Tensor) -> Tensor:
        """Return what stands for a tensor in the tail's graph: a leaf if it is a side output."""
        origin: Origin | None = getattr(tensor, _ORIGIN, None)
        if origin is None or origin.run is not self or not torch.is_grad_enabled():
            return tensor
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return tensor
        if origin not in self._leaves:
            self._leaves[origin] = tensor.detach().requires_grad_()
        return self._leaves[origin]

    def used_of(self, blocks: range) -> bool:
        """Say whether the loss depends on side outputs of some blocks."""
        return any(o.block in blocks and leaf.grad is not None for o, leaf in self._leaves.items())

    def take_found(self) -> list[tuple[Tensor, Tensor]]:
        """Return the recomputed side outputs that need a gradient, each with its gradient."""
        found = [
            (tensor, gradient)
            for origin, tensor in self._found.items()
            if tensor.requires_grad and (gradient := self._leaves[origin].grad) is not None
        ]
        self._found.clear()
        return found

    def clear(self) -> None:
        """Forget everything."""
        self._leaves.clear()
        self._found.clear()

    @staticmethod
    def _check_same(tensor: Tensor, leaf: Tensor) -> None:
        if tensor.shape != leaf.shape or tensor.dtype != leaf.dtype:
            raise CaptureError(
                f"The loss uses a tensor {tuple(leaf.shape)} that a block left beside its output, "
                f"but the recompute made {tuple(tensor.shape)} in its place: the block does not "
                "run the same functions with and without gradients. Let it, or detach the tensor."
            )
