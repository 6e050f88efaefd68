"""The nodes by which calls stand in the driver's autograd graph.

```
parameters ──▶ ParameterNode ─ token ─┐
                                      ▼
embedded h ───────────────────▶ CallNode 0 ─ token ─▶ CallNode 1 ─ token ─▶ CallNode 2
                                      │                     │                    │
                                      ▼                     ▼                    ▼
                                  LazyNode              LazyNode             LazyNode ─▶ losses
                                                                                           │
                                                        loss ◀─ sum ◀─ values ◀─ GatherNode
```

Tokens are on the CPU: PyTorch runs nodes of the CPU in the thread that called `backward`, and those
of each accelerator in a thread of its own. A `CallNode` may therefore wait for workers, whose own
backward passes need the threads of the accelerators. It waits only where it was given a tensor that
wants a gradient. The gradients of parameters come last: every `CallNode` of the pass has then been
reached, so that no worker waits for the driver.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from roundpipe_lightning.engine.driver.calls import Call, Output, join_parts
from roundpipe_lightning.engine.driver.lazy import LazyTensor

if TYPE_CHECKING:
    from roundpipe_lightning.engine.driver.step import Step


class ParameterNode(torch.autograd.Function):
    """Gives the parameters what the workers have summed up of their gradients."""

    @staticmethod
    def forward(ctx: Any, step: Step, *parameters: nn.Parameter) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.step, ctx.parameters = step, parameters
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:  # noqa: ARG004
        return (None, *ctx.step.parameter_gradients(ctx.parameters))


class CallNode(torch.autograd.Function):
    """A call. Takes what it was given, and gives a token."""

    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        num_tokens: int,
        *inputs: Tensor,  # noqa: ARG004
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.num_tokens = call, num_tokens
        token = torch.zeros(())
        # Freed by a backward pass that does not retain the graph: a second one raises as usual.
        ctx.save_for_backward(token)
        return token

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        _ = ctx.saved_tensors
        tensors = ctx.call.step.run_call_backward(ctx.call)
        return (None, None, *([gradient] * ctx.num_tokens), *tensors)


class LazyNode(torch.autograd.Function):
    """Makes the lazy tensor of an output; keeps the gradient that user code gives it."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, output: Output, device: torch.device) -> Tensor:  # noqa: ARG004
        ctx.set_materialize_grads(False)
        ctx.output = output
        return LazyTensor.wrap(output, device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        if gradient is not None:
            ctx.output.call.step.add_user_gradient(ctx.output, gradient)
        return torch.zeros(()), None, None


class GatherNode(torch.autograd.Function):
    """The values of a lazy tensor.

    Its backward pass runs in the thread of a device, where nothing may wait: it passes the gradient
    on, and no more.
    """

    @staticmethod
    def forward(ctx: Any, lazy: LazyTensor, *parts: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.num_parts = len(parts)
        values = join_parts(parts, lazy.rows)
        return values.clone() if any(values is part for part in parts) else values

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        return gradient, *([None] * ctx.num_parts)


def apply(node: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    """Add a node to the driver's graph; return what it makes."""
    # Not the class's own `apply`, which gives a function of user code the values of lazy tensors.
    plain: Any = super(torch.autograd.Function, node)
    result: Tensor = plain.apply(*arguments)
    return result
