"""Calls: what the driver posts and the workers run, once per microbatch.

```
Call 3 (layers.1)      arguments   Output of call 2, mask             one tuple of leaves
                       outputs     hidden                             one `Output` per tensor
                       parts       [0] [1] [2] [3]                    one per microbatch
```

A call that mixes rows has one part: the whole batch. Where the parts of a call and of what it takes
differ, they are joined or cut on the worker that runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_unflatten

from roundpipe_lightning.engine.driver.context import CallContext
from roundpipe_lightning.engine.driver.forms import CallForm, Rows, TensorForm
from roundpipe_lightning.engine.transfer.parts import JoinedParts, Part, Place

if TYPE_CHECKING:
    from roundpipe_lightning.engine.driver.route import StageCalls, Unit
    from roundpipe_lightning.engine.driver.step import Step

Split = tuple[int, ...]
"""Rows of every part of a call."""


def split_rows(num_rows: int, num_parts: int) -> Split:
    """Return the rows of the parts; fewer parts where there are fewer rows than parts."""
    rows, remainder = divmod(num_rows, num_parts)
    sizes = (rows + (index < remainder) for index in range(num_parts))
    return tuple(size for size in sizes if size) or (0,)


def rows_of(tensor: Tensor, rows: Rows | None, split: Split, part: int) -> Tensor:
    """Return the part of a whole batch's tensor that belongs to a microbatch."""
    if rows is None or len(split) == 1:
        return tensor
    start = sum(split[:part]) * rows.repeat
    return tensor.narrow(rows.dim, start, split[part] * rows.repeat)


def join_parts(parts: Sequence[Tensor], rows: Rows | None) -> Tensor:
    """Return the whole batch's tensor; without rows all parts are equal."""
    if rows is None or len(parts) == 1:
        return parts[0]
    return torch.cat(tuple(parts), rows.dim)


class Output:
    """A tensor that a call makes.

    Thread: the driver makes it, workers fill `parts` and `gradients`. Guarded by: `Step.changed`.

    Attributes:
        parts: Its values, for each part of its call; None before they are made, and when nobody
            needs them any more.
        num_readers: For each part, posted calls that have not taken it yet, and units whose
            recompute will take it.
        is_open: Whether user code has its lazy tensor still.
        was_taken: Whether another call takes it, past the values that user code sees.
        gradients: For each part, what has arrived of its gradient, by the number of the unit that
            gave it.
    """

    def __init__(self, call: Call, form: TensorForm, *, requires_grad: bool) -> None:
        self.call = call
        self.form = form
        self.requires_grad = requires_grad
        self.shape = form.shape_for(call.num_rows)
        num_parts = len(call.split)
        self.parts: list[Part | None] = [None] * num_parts
        self.num_readers = [0] * num_parts
        self.is_open = True
        self.was_taken = False
        self.gradients: list[dict[int, Part | JoinedParts]] = [{} for _ in range(num_parts)]

    def count_reader(self, change: int) -> None:
        """Note that a reader of all parts has come, or has gone."""
        for part in range(len(self.parts)):
            self.count_part_reader(part, change)

    def count_part_reader(self, part: int, change: int) -> None:
        self.num_readers[part] += change
        self.drop_unread(part)

    def drop_unread(self, part: int) -> None:
        """Drop the values of a part that nobody will read any more."""
        if not (self.is_open or self.num_readers[part]):
            self.parts[part] = None


@dataclass(kw_only=True, eq=False)
class Call:
    """A call of a block, or of an operation that keeps rows apart.

    Thread: the driver makes it; workers read it and hand results over by `Step.keep_results`.

    Attributes:
        number: Its place among the calls of the step.
        runner: A `Snapshot` of the block, or a `RowOperation`.
        arguments: The leaves of `(args, kwargs)`: an `Output`, a tensor, or a plain value.
        read_parameters: The parameters that it computes with.
        parameters: Those of them that require a gradient.
        generation: Of the memory of parameters, when it was posted.
        has_gradient: Whether it stands in the driver's graph.
        num_left: How many of its parts have not run yet.
        real_tensors: Tensors of user code among the arguments that require a gradient.
        outputs: The tensors that it makes; None: their sizes are not known yet.
        first_results: Leaves, structure and number of rows of its first part, once it has run.
        early_results: Leaves of parts that ran before the sizes were known, and where they ran.
        split: Rows of every part.
        sources: Outputs of other calls among the arguments, each once.
        refusal: Why it cannot run on workers, as its first part has shown.
        saved_buffers: Values of the block's buffers before it wrote into them, for the recompute.
    """

    step: Step
    number: int
    name: str
    runner: Any
    arguments: tuple[Any, ...]
    structure: TreeSpec
    form: CallForm
    context: CallContext
    num_rows: int
    split: Split
    read_parameters: tuple[nn.Parameter, ...]
    parameters: frozenset[nn.Parameter]
    generation: int
    has_gradient: bool = False
    real_tensors: tuple[Tensor, ...] = ()
    outputs: tuple[Output, ...] | None = None
    stage: StageCalls | None = None
    unit: Unit | None = None
    first_results: tuple[Sequence[Any], TreeSpec, int] | None = None
    early_results: dict[int, tuple[Sequence[Any], Place]] = field(default_factory=dict)
    saved_buffers: dict[Tensor, Tensor] | None = None
    refusal: str = ""

    def __post_init__(self) -> None:
        self.sources = tuple(dict.fromkeys(x for x in self.arguments if isinstance(x, Output)))
        self.num_left = len(self.split)
        self._versions = [x._version for x in self.arguments if _has_version(x)]
        self._parameter_versions = _versions_of(self.read_parameters)

    def tensors_with_gradient(self) -> tuple[Tensor, ...]:
        """Return the tensors of user code that require a gradient, each once."""
        found = {
            id(x): x
            for x in self.arguments
            if isinstance(x, Tensor) and x.requires_grad and not isinstance(x, nn.Parameter)
        }
        return tuple(found.values())

    def rows_of(self, tensor: Tensor) -> Rows | None:
        """Return where a tensor that it was given has the rows."""
        return next(
            rows
            for leaf, rows in zip(self.arguments, self.form.arguments, strict=True)
            if leaf is tensor
        )

    def arguments_for(
        self, values: Callable[[Any, Rows | None], Tensor]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return args and kwargs for a microbatch; `values` gives the part of a tensor leaf."""
        leaves = [
            values(leaf, rows)
            if isinstance(leaf, Tensor | Output)
            else (leaf if is_plain(leaf) or not self.has_gradient else deepcopy(leaf))
            for leaf, rows in zip(self.arguments, self.form.arguments, strict=True)
        ]
        args, kwargs = tree_unflatten(leaves, self.structure)
        return args, kwargs

    def check_unwritten(self) -> None:
        """Raise if user code has written into a tensor after it gave it to the call."""
        versions = iter(self._versions)
        for leaf in self.arguments:
            if _has_version(leaf) and leaf._version != next(versions):
                raise RuntimeError(
                    f"A tensor of shape {tuple(leaf.shape)} was changed in place after it was "
                    f"given to {self.name!r}, which may not have read it yet. Write into a copy: "
                    "tensor = tensor.clone()."
                )

    def drop_first_tensors(self) -> None:
        """Keep the plain values of the first results alone: `Output.parts` has the tensors."""
        assert self.first_results is not None
        leaves, structure, num_rows = self.first_results
        plain = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.first_results = (plain, structure, num_rows)

    def release(self) -> None:
        """Let go of what it was given, and of what refers to it: the step has ended."""
        self.arguments = self.sources = self.real_tensors = self.read_parameters = ()
        self.parameters = frozenset()
        self.outputs = self.stage = self.unit = self.saved_buffers = self.first_results = None

    def check_parameters(self) -> None:
        """Raise if a parameter has been written since the call was posted."""
        versions = _versions_of(self.read_parameters)
        if versions == self._parameter_versions:
            return
        expected = zip(self.read_parameters, versions, self._parameter_versions, strict=True)
        for parameter, present, version in expected:
            if present != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an "
                    f"inplace operation: a parameter of {self.name!r} of shape "
                    f"{tuple(parameter.shape)} is at version {present}; expected "
                    f"version {version} instead. Change it after the backward pass, or clone it."
                )


_PLAIN = (
    type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size,
    torch.memory_format, torch.layout, type, nn.Module, slice, type(Ellipsis),
)  # fmt: skip


def is_plain(leaf: Any) -> bool:
    """Return whether a leaf can be given to several runs of a block as it is."""
    return isinstance(leaf, _PLAIN) or callable(leaf)


def _versions_of(parameters: Sequence[nn.Parameter]) -> list[int]:
    try:
        return [parameter._version for parameter in parameters]
    except RuntimeError:  # nobody counts the writes of inference tensors
        return [0 if p.is_inference() else p._version for p in parameters]


def _has_version(leaf: Any) -> bool:
    return (
        isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter) and not leaf.is_inference()
    )
