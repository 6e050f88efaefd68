"""Segments: the pieces of a microbatch's graph that user code makes between the blocks.

```
calls        0 1 2          3 4            5 (fused)
segments   0       1            2
           head    middle       tail, with the fused blocks
```

A segment's graph begins at leaves; docs/engine.md (cuts) says when it runs backward.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from roundpipe_lightning.engine.capture.placeholder import WRITTEN, LazyTensor
from roundpipe_lightning.engine.capture.torch_functions import nodes_of, version_of
from roundpipe_lightning.engine.capture.trees import map_tensors
from roundpipe_lightning.engine.chain.values import BlockCall, Given, Source, Sources, Value
from roundpipe_lightning.engine.worker.turns import MicrobatchTurns
from roundpipe_lightning.engine.worker.user_code import UserCode
from roundpipe_lightning.errors import CaptureError, GlueError

USED_ELSEWHERE = (
    "Block {!r} made a tensor that {} gets by another way than its arguments (a closure, a global "
    "or an attribute): its gradient would be lost. Hand it to the block as an argument."
)

_MADE_IN = "roundpipe_made_in"
"""Attribute of a copy that was made later than what it copies: the segment of that."""

_NUM_USES = "roundpipe_num_uses"
"""Attribute of a leaf: how many tensors shared its memory when it was made."""

_TWO_NAMES = (
    "`{}` writes into a tensor that the step has known since before block {!r} was called, by a "
    "view (`part = x[:, :4]`) or as what the view is of: the other would not see the change. Write "
    "by `x[:, :4] = ...`, take the view after the write, or work on a copy (`x = x.clone()`)."
)


@dataclass(kw_only=True, eq=False)
class Segment:
    """A piece of user code."""

    start: int  # how many calls were made before it
    first_node: int  # number of its first autograd node
    is_fused: bool = False  # whether it runs in the FUSED stage's turn, whose blocks are part of it
    # whether blocks without a graph have run since: who takes what they made needs a segment of its
    # own
    is_closed: bool = False
    leaves: dict[Source, Tensor] = field(default_factory=dict)  # what stands for what it takes


@dataclass(eq=False)
class Segments:
    """The user code of one microbatch between the blocks; at the start the head segment alone."""

    calls: Sequence[BlockCall]  # the calls of blocks so far; grows while the user's code runs
    _: KW_ONLY
    user: UserCode
    turns: MicrobatchTurns
    sources: Sources
    backward: bool

    def __post_init__(self) -> None:
        self.code_ran = False  # whether user code has computed since the last call
        self.number = 0  # of the last one
        self.last = Segment(start=0, first_node=0, is_fused=not self.turns.in_forward_stage)
        self._all = [self.last]
        self._thread = threading.get_ident()
        self.copied: list[Value] = []  # those of which user code has a copy
        # copies of earlier segments, which views of the user's may hold
        self._earlier_copies: list[tuple[weakref.ref[Tensor], Value]] = []
        # given without a graph since the last call, with the blocks' names
        self.bare: list[tuple[Tensor, str]] = []

    def __getitem__(self, number: int) -> Segment:
        return self._all[number]

    def open_next(self) -> None:
        # copies that the user's code has not written into are forgotten
        for value in self.copied:
            if value.copy is not None and not value.is_written:
                self._earlier_copies.append((weakref.ref(value.copy), value))
                value.copy = None
        self.copied = [value for value in self.copied if value.copy is not None]
        self.number += 1
        self.last = Segment(
            start=len(self.calls), first_node=_next_node(), is_fused=not self.turns.in_forward_stage
        )
        self._all.append(self.last)

    def made_in(self, tensor: Tensor) -> int:
        node = tensor.grad_fn
        if node is None or _MADE_IN in vars(tensor):
            return int(vars(tensor).get(_MADE_IN, 0))
        number = node._sequence_nr()  # noqa: SLF001
        return max(i for i, segment in enumerate(self._all) if segment.first_node <= number)

    def is_earlier(self, tensor: Tensor) -> bool:
        if len(self._all) == 1 or tensor.grad_fn is None:
            return False
        return tensor.grad_fn._sequence_nr() < self.last.first_node  # noqa: SLF001

    def materialize(self, value: Value) -> Tensor:
        """Return the tensor that the user's code computes with in place of a value.

        Where it needs a gradient, the blocks before it and those after it are recomputed apart.
        """
        self._check_use(value)
        if value.needs_gradient:
            self.code_ran = True
            if value.segment is None and value.call >= self.last.start:
                self.open_next()
        with self.user.suspended():
            return self.for_user(value)

    def detached(self, value: Value) -> Tensor:
        self._check_use(value)
        with self.user.suspended():
            tensor = self.sources.here(value.latest)
        self.bare.append((tensor, value.block_name))
        return tensor

    def _check_use(self, value: Value) -> None:
        if value.in_object:
            raise CaptureError(
                f"A tensor that block {value.block_name!r} has put into an object (a cache, say) "
                "is used by another block or after the blocks: its gradient would be lost. In "
                "training do without the object (`use_cache=False` for transformers models)."
            )
        ended = not self._all
        if not ended and (self._thread != threading.get_ident() or self.user.runs_a_block):
            inside = self.user.runs_a_block
            reader = f"block {self.calls[-1].name!r}" if inside else "another microbatch"
            raise CaptureError(USED_ELSEWHERE.format(value.block_name, reader))
        if ended or (value.here is None and value.host is None):
            raise CaptureError(
                f"An output of block {value.block_name!r} is used after its step has ended. Keep "
                "a detached copy (`x.detach()`) instead."
            )

    def for_user(self, value: Value) -> Tensor:
        """Return a value as part of the last segment's graph, always the same tensor of it."""
        is_own = value.copy_segment == self.number or value.is_written
        if value.copy is None or not is_own:
            if value.segment == self.number and value.here is not None:
                tensor = value.here
            elif self.backward:
                tensor = self.sources.leaf(self.last.leaves, value)
            else:
                tensor = self.sources.here(value)
            self.copied.append(value)
            # User code may write into a block's output: a leaf would refuse, and others read it.
            value.copy = tensor.clone() if tensor.is_leaf else tensor
            value.copy_segment, value.copy_version = self.number, version_of(value.copy)
        return value.copy

    def as_written(self, given: Given) -> Given:
        """Return what a block is given, with the copies that were written into in their place."""
        self.bare.clear()
        if not any(value.is_written for value in self.copied):
            return given
        swapped: Given = map_tensors(
            lambda x: x.value.copy if isinstance(x, LazyTensor) and x.value.is_written else x, given
        )
        return swapped

    def side_output_used(self, call: int) -> None:
        """Let the code that uses a side output be a segment after the call that has left it.

        That segment then runs backward before the call is recomputed, as for an output.
        """
        self.code_ran = True
        if self.calls[call].segment is None and call >= self.last.start:
            with self.user.suspended():
                self.open_next()

    def cut(self, tensor: Tensor, *, writer: str = "") -> Tensor:
        """Return a leaf of this segment for a lazy tensor or a tensor of an earlier segment.

        So the graph of the segment ends there. What was made before goes backward once, when all
        its gradients are there, as in one plain backward. What a function, the `writer`, writes
        into (a loss that is added up) stays itself, and gets the leaf's values and graph.
        """
        if isinstance(tensor, LazyTensor):
            value: Value = tensor.value
            if not writer and not torch.is_grad_enabled():
                return value.detached()
            with torch.enable_grad():
                tensor = value.materialize()
            if writer and any(ref() is not None for ref, v in self._earlier_copies if v is value):
                raise CaptureError(_TWO_NAMES.format(writer, self.calls[-1].name))
        if writer:
            self._check_written(tensor, writer)
        if not torch.is_grad_enabled() or not self.is_earlier(tensor):
            return tensor
        if not writer:
            leaf = self.sources.leaf(self.last.leaves, tensor)
            vars(leaf).setdefault(_NUM_USES, _num_uses(leaf))
            return leaf
        if not tensor._is_view():  # noqa: SLF001 - a view cannot leave its graph
            with self.user.suspended():
                before = tensor.clone()
                vars(before)[_MADE_IN] = self.made_in(tensor)
                tensor.detach_().copy_(self.sources.leaf(self.last.leaves, before, stays=True))
        return tensor

    def _check_written(self, tensor: Tensor, writer: str) -> None:
        with self.user.suspended():
            base = tensor._base if tensor._is_view() else tensor  # noqa: SLF001 - nobody else says so
            found = [segment.leaves[base] for segment in self._all if base in segment.leaves]
            if (
                any(base is leaf for leaf in self.last.leaves.values())
                or any(base is ref() and value.has_lazy for ref, value in self._earlier_copies)
                or any(_NUM_USES in vars(x) and _num_uses(x) > vars(x)[_NUM_USES] for x in found)
            ):
                raise CaptureError(_TWO_NAMES.format(writer, self.calls[-1].name))
            for bare, block in self.bare:
                if torch._C._is_alias_of(bare, tensor):  # type: ignore[attr-defined]  # noqa: SLF001
                    raise GlueError(WRITTEN.format(writer, block))

    def check_gradients(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor] | None = None
    ) -> None:
        """Refuse gradients of outputs where some would be missing.

        Those of `inputs`, which `torch.autograd.grad` asks for, where the code after the last block
        has not made these; `backward` of outputs (no inputs), where blocks would miss gradients, or
        trained parameters get some.
        """
        nodes = set(nodes_of(outputs))
        trained = self.user.leaves.values() if self.backward and inputs is None else ()
        leaves = (*self.last.leaves.values(), *trained)
        if not any(t.requires_grad and get_gradient_edge(t).node in nodes for t in leaves):
            return
        if inputs is None:
            raise CaptureError(
                "training_step calls backward() on what trained parameters or blocks have made, "
                "which the Trainer does after training_step. Leave the call out, or set "
                "self.automatic_optimization = False."
            )
        inside = all(t.grad_fn is not None and not self.is_earlier(t) for t in inputs)
        if self.number and not inside:
            raise CaptureError(
                "torch.autograd.grad(...) asks for a gradient through blocks that are recomputed: "
                "they run backward only after the user's code, whose graph ends at the last block. "
                "Set RoundPipeStrategy(recompute='none'), ask for gradients of what was made "
                "after the blocks, or make the term part of the loss."
            )

    def clear(self) -> None:
        for segment in self._all:
            segment.leaves.clear()
        self._all.clear()
        self.copied.clear()
        self._earlier_copies.clear()
        self.bare.clear()


def rows_to_come(roots: Sequence[Tensor], leaves: Sequence[Tensor]) -> dict[Tensor, Tensor]:
    """Return the rows of leaves to which the graph of some tensors gives gradients.

    A leaf is left out if it may get more than an embedding's rows.
    """
    rows: dict[Tensor, list[Tensor]] = {leaf: [] for leaf in leaves}
    for root in roots:
        rows.pop(root, None)
    for node in nodes_of(roots):
        for following, _ in node.next_functions:
            leaf = getattr(following, "variable", None)
            if leaf is None or leaf not in rows:
                continue
            if node.name() != "EmbeddingBackward0" or node._saved_sparse:  # noqa: SLF001
                del rows[leaf]
                continue
            with contextlib.suppress(RuntimeError):  # freed: it has run
                rows[leaf].append(node._saved_indices.flatten())  # noqa: SLF001
    none = torch.empty(0, dtype=torch.int64)
    return {leaf: torch.cat(found) if found else none for leaf, found in rows.items()}


def _num_uses(tensor: Tensor) -> int:
    """Return how many tensors share a tensor's memory."""
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata))  # noqa: SLF001


def _next_node() -> int:
    """Return a number that is above those of all of this thread's autograd nodes."""
    with torch.enable_grad():
        node = torch.zeros((), requires_grad=True).clone().grad_fn
    assert node is not None, "the clone of a tensor that requires a gradient has one"
    return node._sequence_nr()  # noqa: SLF001
