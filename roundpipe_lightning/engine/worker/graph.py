"""One microbatch of a unit: its calls with one graph, and that graph's backward pass.

```
boundary (leaf) ──▶ call 7 ──▶ call 8 ──▶ outputs      run, or recomputed
user's tensor (leaf) ──┘   parameters (leaves) ──┘
gradients of the leaves ◀──────── gradients of the outputs
```
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec

from roundpipe_lightning.engine.driver.calls import Call, Output, join_parts, rows_of
from roundpipe_lightning.engine.driver.forms import Rows

RunCall = Callable[..., tuple[list[Any], TreeSpec]]
"""Runs a call on its arguments for a part; returns its results, flattened."""


def part_of(source: Tensor | Output, rows: Rows | None, call: Call, part: int) -> Tensor:
    """Return a call's part of an argument, without a graph."""
    split = call.split
    if isinstance(source, Tensor):
        return rows_of(source.detach(), rows, split, part)
    if len(source.call.split) == len(split):
        values = source.parts[part]
        assert values is not None, "the call was ready"
        return values
    parts = [values for values in source.parts if values is not None]
    return rows_of(join_parts(parts, source.form.rows), rows, split, part)


@dataclass(eq=False)
class UnitGradients:
    """Gradients of what a unit was given, for a part."""

    outputs: dict[Output, Tensor]
    tensors: dict[tuple[Call, int], Tensor]


class UnitGraph:
    """The graph of a unit's calls for a part. Thread: that of the worker that runs them."""

    def __init__(self, part: int, run_call: RunCall) -> None:
        self._part, self._run_call = part, run_call
        self._results: dict[Call, list[Tensor]] = {}
        self._leaves: dict[Output, Tensor] = {}
        self._tensors: dict[tuple[Call, int], Tensor] = {}

    def run(self, call: Call) -> tuple[list[Any], TreeSpec]:
        """Run a call, with a graph; return its results, flattened."""
        leaves, structure = self._run_call(call, self._part, self._values_for(call))
        self._results[call] = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return leaves, structure

    def _values_for(self, call: Call) -> Callable[[Tensor | Output, Rows | None], Tensor]:
        positions = {id(tensor): index for index, tensor in enumerate(call.real_tensors)}

        def values(source: Tensor | Output, rows: Rows | None) -> Tensor:
            if isinstance(source, Output):
                if source.call in self._results:
                    return self._result(source)
                if source not in self._leaves:
                    leaf = part_of(source, rows, call, self._part).detach()
                    self._leaves[source] = leaf.requires_grad_(source.requires_grad)
                return self._leaves[source]
            if id(source) not in positions:
                return part_of(source, rows, call, self._part)
            key = (call, positions[id(source)])
            if key not in self._tensors:
                leaf = part_of(source, rows, call, self._part).detach()
                self._tensors[key] = leaf.requires_grad_()
            return self._tensors[key]

        return values

    def _result(self, output: Output) -> Tensor:
        assert output.call.outputs is not None, "its sizes are known"
        return self._results[output.call][output.call.outputs.index(output)]

    def run_backward(self, gradients: Mapping[Output, Tensor]) -> UnitGradients:
        """Run it backward; the gradients of parameters are on their leaves then."""
        roots, arriving = [], []
        for output, gradient in gradients.items():
            root = self._result(output)
            if root.requires_grad:
                roots.append(root)
                arriving.append(gradient.to(root.dtype))
        if roots:
            torch.autograd.backward(roots, arriving)
        return UnitGradients(
            {o: leaf.grad for o, leaf in self._leaves.items() if leaf.grad is not None},
            {key: leaf.grad for key, leaf in self._tensors.items() if leaf.grad is not None},
        )


class HostLeaves:
    """The leaves that a CPU worker computes with: parameters in place. Thread: the worker's."""

    def __init__(self) -> None:
        self._leaves: dict[tuple[nn.Parameter, bool], nn.Parameter] = {}

    def leaf_of(self, parameter: nn.Parameter, requires_grad: bool) -> nn.Parameter:  # noqa: FBT001
        leaf = self._leaves.get((parameter, requires_grad))
        if leaf is None or leaf.data_ptr() != parameter.data_ptr():
            with torch.inference_mode(mode=False):  # an evaluation may be the first to ask for it
                leaf = leaf_like(parameter, parameter.detach(), requires_grad=requires_grad)
            self._leaves[parameter, requires_grad] = leaf
        return leaf

    def take_gradients(self) -> dict[nn.Parameter, Tensor]:
        found: dict[nn.Parameter, Tensor] = {}
        for (parameter, _), leaf in self._leaves.items():
            if leaf.grad is not None:
                found[parameter], leaf.grad = leaf.grad, None
        return found


def leaf_like(parameter: nn.Parameter, values: Tensor, *, requires_grad: bool) -> nn.Parameter:
    """Return a leaf with some values, of the class and with the attributes of a parameter."""
    leaf: nn.Parameter = Tensor._make_subclass(type(parameter), values, requires_grad)  # noqa: SLF001
    leaf.__dict__.update(parameter.__dict__)
    return leaf
