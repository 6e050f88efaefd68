"""Backward passes that are differentiated again: `create_graph=True`.

Workers give gradients as values. For a gradient penalty or a step of MAML the gradients need a
graph, so the driver runs the calls once more itself, on the whole batch, and goes backward through
them call by call:

```
call 0        x ── alias ─▶ h0                  aliases: what a call was given. A gradient stops
call 1                      h0 ── alias ─▶ h1   at the aliases of its own call, and goes on from
                                                there when autograd reaches the call in front
```

The graph of these runs is PyTorch's own, down to the parameters and the tensors of user code: later
backward passes go through it without calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from roundpipe_lightning.engine.driver.calls import Call, Output, join_parts, rows_of
from roundpipe_lightning.engine.driver.forms import Rows

RunPart = Callable[..., Sequence[Any]]
"""Runs a call for a part in the driver's thread: `(call, part, values, parameter)`, where `values`
gives the part of an argument and `parameter` what stands for a parameter of the block."""


@dataclass(eq=False)
class _CallGraph:
    """A call that was run with a graph.

    Attributes:
        aliases: What it was given: an output, a parameter, or a tensor of user code by its `id`.
        outputs: What it has made of the whole batch.
    """

    aliases: dict[Any, Tensor] = field(default_factory=dict)
    outputs: dict[Output, Tensor] = field(default_factory=dict)


@dataclass(eq=False)
class _Gradients:
    """What a backward pass has given so far."""

    task: int
    outputs: dict[Output, Tensor] = field(default_factory=dict)
    parameters: dict[nn.Parameter, Tensor] = field(default_factory=dict)


class DoubleBackward:
    """Runs calls backward with a graph. Thread: that which calls `backward`."""

    def __init__(self, run_part: RunPart) -> None:
        self._run_part = run_part
        self._graphs: dict[Call, _CallGraph] = {}
        self._gradients = _Gradients(task=-1)

    def add_gradient(self, output: Output, gradient: Tensor) -> None:
        _add(self._present_gradients().outputs, output, gradient)

    def run_call(self, call: Call, *, with_parameters: bool) -> list[Tensor | None]:
        """Run a call backward; return the gradients of its tensors of user code."""
        gradients = self._present_gradients()
        graph = self._graph_of(call)
        roots = {o: x for o, x in graph.outputs.items() if x.requires_grad}
        arrived = {o: gradients.outputs.pop(o) for o in roots if o in gradients.outputs}
        aliases = {
            key: alias
            for key, alias in graph.aliases.items()
            if with_parameters or not isinstance(key, nn.Parameter)
        }
        found: dict[Any, Tensor | None] = {}
        if arrived and aliases:
            values = torch.autograd.grad(
                [roots[output] for output in arrived],
                list(aliases.values()),
                list(arrived.values()),
                create_graph=True,
                allow_unused=True,
            )
            found = dict(zip(aliases, values, strict=True))
        for key, gradient in found.items():
            if gradient is not None and isinstance(key, Output):
                _add(gradients.outputs, key, gradient)
            elif gradient is not None and isinstance(key, nn.Parameter):
                _add(gradients.parameters, key, gradient)
        return [found.get(id(tensor)) for tensor in call.real_tensors]

    def parameter_gradients(self, parameters: Sequence[nn.Parameter]) -> list[Tensor | None]:
        found = self._present_gradients().parameters
        return [found.pop(parameter, None) for parameter in parameters]

    def release(self) -> None:
        self._graphs.clear()
        self._gradients = _Gradients(task=-1)

    def _present_gradients(self) -> _Gradients:
        task = torch._C._current_graph_task_id()  # noqa: SLF001
        if self._gradients.task != task:
            self._gradients = _Gradients(task)
        return self._gradients

    def _graph_of(self, call: Call) -> _CallGraph:
        needed, waiting = {call}, [call]
        while waiting:
            for source in waiting.pop().sources:
                if source.call not in needed and source.call not in self._graphs:
                    needed.add(source.call)
                    waiting.append(source.call)
        for ancestor in sorted(needed, key=lambda c: c.number):
            if ancestor not in self._graphs:
                self._graphs[ancestor] = self._run(ancestor)
        return self._graphs[call]

    def _run(self, call: Call) -> _CallGraph:
        graph = _CallGraph()
        real = set(map(id, call.real_tensors))

        def alias_of(key: Any, tensor: Tensor) -> Tensor:
            if key not in graph.aliases:
                graph.aliases[key] = tensor.view_as(tensor)
            return graph.aliases[key]

        def parameter(tensor: nn.Parameter) -> Tensor:
            return alias_of(tensor, tensor) if tensor in call.parameters else tensor.detach()

        def values(source: Tensor | Output, rows: Rows | None, part: int) -> Tensor:
            if isinstance(source, nn.Parameter):
                return parameter(source)
            if isinstance(source, Output):
                whole = self._graphs[source.call].outputs[source]
                whole = alias_of(source, whole) if whole.requires_grad else whole
            else:
                whole = alias_of(id(source), source) if id(source) in real else source.detach()
            return rows_of(whole, rows, call.split, part)

        assert call.outputs is not None, "the forward pass has ended"
        parts = [
            [
                leaf
                for leaf in self._run_part(
                    call, part, lambda x, rows, part=part: values(x, rows, part), parameter
                )
                if isinstance(leaf, Tensor)
            ]
            for part in range(len(call.split))
        ]
        for output, tensors in zip(call.outputs, zip(*parts, strict=True), strict=True):
            graph.outputs[output] = join_parts(tensors, output.form.rows)
        return graph


def _add(sums: dict[Any, Tensor], key: Any, gradient: Tensor) -> None:
    sums[key] = sums[key] + gradient if key in sums else gradient
