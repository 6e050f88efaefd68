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
from torch import Tensor
from torch.utils._pytree import TreeSpec

from roundpipe_lightning.engine.driver.calls import Call, Output
from roundpipe_lightning.engine.driver.forms import Rows

RunCall = Callable[..., tuple[list[Any], TreeSpec]]
"""Runs a call on its arguments for a part; returns its results, flattened."""


Take = Callable[["Tensor | Output", "Rows | None", Call, int], Tensor]
"""Gives a call's part of an argument, without a graph, where the worker computes."""


@dataclass(eq=False)
class UnitGradients:
    """Gradients of what a unit was given, for a part."""

    outputs: dict[Output, Tensor]
    tensors: dict[tuple[Call, int], Tensor]


class UnitGraph:
    """The graph of a unit's calls for a part. Thread: that of the worker that runs them."""

    def __init__(self, part: int, run_call: RunCall, take: Take) -> None:
        self._part, self._run_call, self._take = part, run_call, take
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
                    leaf = self._take(source, rows, call, self._part).detach()
                    self._leaves[source] = leaf.requires_grad_(source.requires_grad)
                return self._leaves[source]
            if id(source) not in positions:
                return self._take(source, rows, call, self._part)
            key = (call, positions[id(source)])
            if key not in self._tensors:
                leaf = self._take(source, rows, call, self._part).detach()
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
