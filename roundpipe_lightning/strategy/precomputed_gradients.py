"""Hands the gradients of a finished step to autograd, so that all after it is Lightning's own.

The engine computes loss *and* gradients in one go, inside `training_step`. Lightning's closure
wants them later, after its `zero_grad`, and through `loss.backward()`. So `training_step` returns a
loss with a graph of one node, which keeps the gradients until then:

```
engine.step ──► gradients ─┐
                           ▼
parameters ──────────► [commit] ──► loss ──► / accumulate_grad_batches ──► * loss scale
     ▲                     │                                                    │
     └── .grad, hooks ◄────┘  the held gradients,  ◄────────────────────── backward()
                              times what arrives / what was expected
```

Accumulation into `.grad`, parameter hooks, `on_after_backward`, gradient scaling and clipping thus
see exactly what they see on one device. Where nobody looks before the next batch, the gradients may
come later than `backward()`: `LaterGradients` notes what arrives and hands them out then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_TWICE = (
    "The loss of a roundpipe step was run backward a second time; its gradients were "
    "computed once, inside the step, and are gone. Call backward() once per "
    "training_step."
)


def loss_with_gradients(
    loss: Tensor, *, gradients: Mapping[nn.Parameter, Tensor], backward_scale: float
) -> Tensor:
    """Return `loss` with a graph whose backward hands out gradients that are known already.

    Args:
        loss: The value of the loss, a scalar without a graph.
        gradients: Gradient of `loss * backward_scale` for every parameter that got one; host
            tensors that nobody else uses.
        backward_scale: The factor between the loss and what will be run backward: the loss scale
            divided by `accumulate_grad_batches`.

    Returns:
        A scalar that requires a gradient.
    """
    held = _HeldGradients(gradients, backward_scale)
    # The anchor gives the loss a graph even where no parameter got a gradient.
    anchor = torch.zeros((), dtype=loss.dtype, device=loss.device, requires_grad=True)
    result: Tensor = _Commit.apply(held, loss, anchor, *held.parameters)  # type: ignore[no-untyped-call]
    return result


class LaterGradients:
    """The gradients of a step that has not ended when its loss is run backward.

    Args:
        loss: The value of the loss, a scalar without a graph.
        backward_scale: As for `loss_with_gradients`.

    Attributes:
        loss: A scalar that requires a gradient.
    """

    def __init__(self, loss: Tensor, *, backward_scale: float) -> None:
        self._value = loss
        self._backward_scale = backward_scale
        self._noted = _NotedArrival()
        anchor = torch.zeros((), dtype=loss.dtype, device=loss.device, requires_grad=True)
        self.loss: Tensor = _Commit.apply(self._noted, loss, anchor)  # type: ignore[no-untyped-call]

    def hand_out(self, gradients: Mapping[nn.Parameter, Tensor]) -> None:
        """Do what `backward()` would have done, if it was called.

        Args:
            gradients: As for `loss_with_gradients`.
        """
        if self._noted.arriving is None:
            return
        with torch.inference_mode(mode=False), torch.enable_grad():  # an evaluation may be begun
            loss = loss_with_gradients(
                self._value.clone(), gradients=gradients, backward_scale=self._backward_scale
            )
            loss.backward(self._noted.arriving)


class _NotedArrival:
    """What arrives at a loss whose gradients are to come."""

    def __init__(self) -> None:
        self.arriving: Tensor | None = None

    def take(self, arriving: Tensor) -> tuple[Tensor, ...]:
        """Note it; no parameter gets a gradient now."""
        if self.arriving is not None:
            raise RuntimeError(_TWICE)
        self.arriving = arriving.detach().clone()
        return ()


class _HeldGradients:
    """Gradients between the step that made them and the backward that asks for them, once."""

    def __init__(self, gradients: Mapping[nn.Parameter, Tensor], backward_scale: float) -> None:
        self.parameters = tuple(gradients)
        self._gradients: tuple[Tensor, ...] | None = tuple(gradients.values())
        self._backward_scale = backward_scale

    def take(self, arriving: Tensor) -> tuple[Tensor, ...]:
        """Give the gradients away, rescaled where the loss was multiplied by something unforeseen.

        Args:
            arriving: Gradient with respect to the loss that `training_step` returned, a scalar.
        """
        if self._gradients is None:
            raise RuntimeError(_TWICE)
        gradients, self._gradients = self._gradients, None
        ratio = arriving / torch.full_like(arriving, self._backward_scale)
        if ratio.item() == 1.0:
            return gradients
        return tuple(gradient * ratio.to(gradient.dtype) for gradient in gradients)


class _Commit(torch.autograd.Function):
    """The one node of the graph."""

    @staticmethod
    def forward(
        ctx: Any,
        held: _HeldGradients | _NotedArrival,
        loss: Tensor,
        anchor: Tensor,  # noqa: ARG004 - an input because it requires a gradient
        *parameters: Tensor,  # noqa: ARG004 - inputs because they are given gradients
    ) -> Tensor:
        ctx.held = held
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, arriving: Tensor) -> Any:
        return (None, None, None, *ctx.held.take(arriving))
