"""Side outputs: what a block leaves beside its output, for the tail segment to use.

Router logits and penalties, for example; see docs/engine.md.

```
FORWARD   block 3: the 17th function gives t         t knows (block 3, function 17)
tail      the loss uses t, and gets a leaf instead   leaf.grad
BACKWARD  block 3: the 17th function gives t'        backward([output, t'], [gradient, leaf.grad])
```
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from roundpipe_lightning.errors import CaptureError

ORIGIN = "_roundpipe_origin"

_PAST_ARGUMENTS = (
    "{} made a tensor that block {!r} gets by another way than its arguments (a closure, a global "
    "or an attribute): its gradient would be lost, and another microbatch's values could take its "
    "place. Hand it to the block as an argument."
)


class Origin(NamedTuple):
    """Place in a microbatch's forward pass where a tensor was made."""

    run: SideOutputs
    block: int
    function: int  # number of the torch function within the block; 0 are the block's inputs
    position: int  # which of the function's results


class _Mark(ref[Tensor]):
    """The origin of one tensor: where a subclass gives it to another tensor, that one has none."""

    __slots__ = ("place",)

    place: tuple[SideOutputs, int, int, int]  # an `Origin`'s, which takes longer to make

    def __deepcopy__(self, memo: object) -> None:
        return None


class Watch(Enum):
    """Treatment of the results of the functions in a block."""

    UNWATCHED = "unwatched"  # no block runs, or no gradient is wanted
    NOTHING = "nothing"  # a graph is kept
    MARK = "mark"  # results get their origin: a FORWARD stage runs

    FIND = "find"
    """Results that the tail segment has used are collected: a BACKWARD stage recomputes."""


_SILENT = (Watch.UNWATCHED, Watch.NOTHING)


class SideOutputs:
    """The side outputs of one microbatch."""

    def __init__(self) -> None:
        #: Called with the number of a call when code after it first uses a side output of it.
        self.on_use: Callable[[int], None] = lambda call: None
        self._leaves: dict[Origin, Tensor] = {}
        self._leaks: dict[Origin, tuple[str, torch.Size, torch.dtype]] = {}
        self._found: dict[Origin, Tensor] = {}
        self._marked: list[_Mark] = []
        #: Whether `check` and `observe` have something to do.
        self.looks_at_arguments = self.looks_at_results = False
        self.marks = False  # whether results get their origin
        self._block = self._num_functions = 0
        self._name = ""

    def begin_block(self, number: int, watch: Watch, taken: Sequence[Tensor], *, name: str) -> None:
        """Watch over the functions of a block, and what it takes, until `end_block`."""
        if watch is Watch.FIND and not any(
            origin.block == number for origin in (*self._leaves, *self._leaks)
        ):
            watch = Watch.NOTHING
        self.marks, self._block, self._num_functions = watch is Watch.MARK, number, -1
        self._name = name
        self.looks_at_arguments = watch is not Watch.UNWATCHED
        self.looks_at_results = watch not in _SILENT
        if self.looks_at_results:
            self.observe(list(taken))
        self._num_functions = 0  # whatever was asked about the inputs

    def end_block(self) -> None:
        self.looks_at_arguments = self.looks_at_results = self.marks = False

    def observe(self, result: Any) -> None:
        """Look at what a function gave, where `looks_at_results`."""
        self._num_functions += 1
        if self.marks and type(result) is Tensor:
            self._mark(result, 0)
            return
        results = result if isinstance(result, (tuple, list)) else (result,)
        for position, tensor in enumerate(results):
            if not isinstance(tensor, Tensor):
                continue
            if self.marks:
                if not isinstance(tensor, nn.Parameter):  # which all microbatches of a round have
                    self._mark(tensor, position)
                continue
            origin = Origin(self, self._block, self._num_functions, position)
            taken = self._leaks.get(origin)
            # What is kept from the first call on (a table) is not made again: others have its
            # number.
            if taken and tensor.requires_grad and (tensor.shape, tensor.dtype) == taken[1:]:
                raise CaptureError(_PAST_ARGUMENTS.format(f"Block {self._name!r}", taken[0]))
            if origin in self._leaves:
                self._check_same(tensor, self._leaves[origin])
                self._found[origin] = tensor

    def _mark(self, tensor: Tensor, position: int) -> None:
        mark = _Mark(tensor)
        mark.place = self, self._block, self._num_functions, position
        setattr(tensor, ORIGIN, mark)
        self._marked.append(mark)

    def check(self, args: Iterable[Any]) -> None:
        """Look at what a block's function takes, also in lists, where `looks_at_arguments`."""
        if not self.looks_at_arguments:
            return
        for arg in args:
            if isinstance(arg, Tensor):
                self.check_tensor(arg)
            elif isinstance(arg, (list, tuple)):
                self.check(arg)

    def check_tensor(self, tensor: Tensor) -> None:
        """Take notice of a tensor that reaches a block's function past the block's arguments.

        What another block has made may be a constant that is kept for all (a table of positions):
        whether it needs a gradient is seen when that block is recomputed. What code outside the
        blocks has made, with a graph, is refused.
        """
        mark: _Mark | None = getattr(tensor, ORIGIN, None)
        if mark is not None and mark() is tensor:
            run, block, _, _ = mark.place
            if run is not self or block != self._block:
                run.note_leak(Origin(*mark.place), tensor, self._name)
        elif self.marks and tensor.grad_fn is not None and not torch.is_grad_enabled():
            raise CaptureError(_PAST_ARGUMENTS.format("Code outside the blocks", self._name))

    def note_leak(self, origin: Origin, tensor: Tensor, name: str) -> None:
        self._leaks[origin] = (name, tensor.shape, tensor.dtype)

    def leaf_for(self, tensor: Tensor) -> Tensor:
        """Return the tensor to use in the tail's graph: a leaf for a side output."""
        mark: _Mark | None = getattr(tensor, ORIGIN, None)
        origin = Origin(*mark.place) if mark is not None and mark() is tensor else None
        if origin is None or origin.run is not self or not torch.is_grad_enabled():
            return tensor
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return tensor
        if origin not in self._leaves:
            self.on_use(origin.block)
            self._leaves[origin] = tensor.detach().requires_grad_()
        return self._leaves[origin]

    @property
    def calls_with_leaves(self) -> set[int]:
        return {origin.block for origin in self._leaves}

    def is_used(self, call: int) -> bool:
        return any(o.block == call and leaf.grad is not None for o, leaf in self._leaves.items())

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
        self.on_use = lambda call: None
        self._leaves.clear()
        self._leaks.clear()
        self._found.clear()
        for mark in self._marked:  # buffers and what attributes hold live on, and may be pickled
            tensor = mark()
            if tensor is not None and tensor.__dict__.get(ORIGIN) is mark:
                delattr(tensor, ORIGIN)
        self._marked.clear()

    @staticmethod
    def _check_same(tensor: Tensor, leaf: Tensor) -> None:
        if tensor.shape != leaf.shape or tensor.dtype != leaf.dtype:
            raise CaptureError(
                f"The loss uses a tensor {tuple(leaf.shape)} that a block left beside its output, "
                f"but the recompute made {tuple(tensor.shape)} in its place: the block does not "
                "run the same functions with and without gradients. Let it, or detach the tensor."
            )
