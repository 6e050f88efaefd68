"""A training batch: what goes into the engine, and what Lightning gets of it.

Steps M1, M10 and M11 of docs/design.md.

```
batch ─ split ─► microbatches ─► engine.begin_step ─┬─► losses, outputs ─► merged: one loss
                                                    ├─► logs, metrics ───► merged, replayed
                                                    └─► gradients ───────► with backward()
```

The engine computes loss *and* gradients in one go, inside `training_step`. Lightning's closure
wants the gradients later, after its `zero_grad`, and through `loss.backward()`. So `training_step`
returns a loss with a graph of one node, which keeps the precomputed gradients until then:

```
engine ──► gradients ───┐
                        ▼
parameters ───► [one node] ──► loss ──► / accumulate_grad_batches ──► * loss scale
     ▲               │                                                     │
     └─ .grad, hooks ┘  the gradients, times what arrives  ◄────────── backward()
                        divided by what was expected
```

Accumulation into `.grad`, parameter hooks, `on_after_backward`, gradient scaling and clipping thus
see exactly what they see on one device. Where nobody looks before the next batch, the gradients may
come later than `backward()`: the node notes what arrives, the batch is in flight, and
`InFlightBatch.hand_out` does the rest when the gradients are there.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.optim import Optimizer

from roundpipe_lightning.engine.chain.chain import Chain
from roundpipe_lightning.engine.steps import Step, StepResult
from roundpipe_lightning.engine.update.updater import Updater
from roundpipe_lightning.planning.report.step_record import EngineCounters, StepRecord
from roundpipe_lightning.planning.schedule.schedule import Timeline
from roundpipe_lightning.strategy.logging import weighted_mean
from roundpipe_lightning.strategy.planning.inputs import Planned

_TWICE = (
    "The loss of a roundpipe step was run backward a second time; its gradients were "
    "computed once, inside the step, and are gone. Call backward() once per "
    "training_step."
)


_SCALED = (
    "backward() got {:g} times the loss of training_step. Its gradients were computed inside the "
    "step and are multiplied now: hooks on tensors and modules have seen them as they were. Where "
    "a hook looks at their size, multiply the loss in training_step."
)
_ROUNDING = 1e-3


class InFlightBatch:
    """A training batch, from its first microbatch until its gradients are handed out.

    Args:
        num_values: Values in the batch's tensors: work is in proportion to them.
        backward_scale: The factor between the loss and what will be run backward: the loss scale
            divided by `accumulate_grad_batches`.

    Attributes:
        plan: What is run of it.
        timeline: When every action ran; known when the batch has ended, like all below.
    """

    def __init__(
        self, step: Step, *, planned: Planned, num_values: int, backward_scale: float
    ) -> None:
        self.planned, self.plan = planned, planned.plan
        self.clips: list[Callable[[], None]] = []
        self.timeline: Timeline | None = None
        self.chain: Chain | None = None
        self.counters = EngineCounters()
        self.clock_seconds: float | None = None
        self._step: Step | None = step
        self._num_values = num_values
        self._backward_scale = backward_scale
        self._loss = torch.zeros(())
        self._arrived: Tensor | None = None
        self._share = 1.0
        self._update: tuple[Updater, Optimizer] | None = None
        self._sums: dict[nn.Parameter, Tensor] = {}

    @property
    def has_run_backward(self) -> bool:
        return self._arrived is not None

    @property
    def is_over(self) -> bool:
        return self._step is None or self._step.is_over

    # In the Trainer's thread, in this order ------------------------------------------------------

    def end(self) -> StepResult:
        assert self._step is not None
        result = self._step.result()
        self.timeline, self.chain = result.timeline, result.chain
        traffic, self.clock_seconds = result.traffic, result.clock_seconds
        self.counters = EngineCounters(
            uploaded_bytes=sum(each.uploaded_bytes for each in traffic),
            downloaded_bytes=sum(each.downloaded_bytes for each in traffic),
            upload_wait_seconds=sum(each.weights_wait_seconds for each in traffic),
            boundary_wait_seconds=sum(each.boundaries_wait_seconds for each in traffic),
        )
        self._step = None
        return result

    def weigh(self, share: float) -> None:
        self._share = share

    def with_gradients(self, loss: Tensor, gradients: Mapping[nn.Parameter, Tensor]) -> Tensor:
        return loss_with_gradients(
            loss,
            gradients=gradients if self._share else {},  # of a mean over nothing: no numbers
            backward_scale=self._backward_scale,
            share=self._share,
        )

    def without_gradients(self, loss: Tensor) -> Tensor:
        """Return the loss of a batch in flight: its backward pass asks for gradients to come."""
        self._loss = loss
        return _attach(self.take, loss)

    def take(self, arriving: Tensor) -> tuple[Tensor, ...]:
        """Note the gradient that arrives at the loss; no parameter gets one now."""
        if self._arrived is not None:
            raise RuntimeError(_TWICE)
        self._arrived = arriving.detach().clone()
        return ()

    def defer_update(self, updater: Updater, optimizer: Optimizer) -> None:
        """Submit an optimizer's step, made when the gradients are there, with its options of now.

        Gradients of earlier batches of its window are taken along: Lightning may drop `.grad`.
        """
        self._update = updater, optimizer
        members = (p for group in optimizer.param_groups for p in group["params"])
        self._sums = {p: p.grad for p in members if p.grad is not None}
        for parameter in self._sums:
            parameter.grad = None
        updater.defer(optimizer)

    def hand_out(self, *, has_next: bool) -> bool:
        """Do with the gradients what `backward()`, clipping and `optimizer.step` are to do.

        Raises what its backward pass has raised. Return whether the batch has ended well; it has
        not where its step was given up.
        """
        assert self._step is not None
        if self._step.was_given_up:
            return False
        gradients = self.end().gradients
        for parameter, sums in self._sums.items():
            parameter.grad = sums
        if self._arrived is not None:
            with torch.inference_mode(mode=False), torch.enable_grad():  # in an evaluation, maybe
                loss = self.with_gradients(self._loss.clone(), gradients)
                del gradients  # what nobody else has becomes `.grad` without a copy
                loss.backward(self._arrived)
        for clip in self.clips:
            clip()
        if self._update is not None:
            updater, optimizer = self._update
            updater.keep([optimizer], is_read=has_next)
            updater.submit(optimizer, release_gradients=has_next)
        self._sums, self._update, self._loss = {}, None, torch.zeros(())
        return True

    def record(self, *, num_devices: float, assumed_rates: bool) -> StepRecord:
        """Return the record of a batch that has ended, on devices that the workers share."""
        assert self.timeline is not None
        planned, job = self.planned, self.planned.job
        operations = planned.operations_of(self.plan)
        known = planned.knows_activations and planned.size > 0
        rate = job.hardware.matrix_rates.of(job.dtype)
        return StepRecord(
            plan=self.plan,
            timeline=self.timeline,
            counters=self.counters,
            clock_seconds=self.clock_seconds,
            operations=operations * (self._num_values / planned.size) if known else None,
            operations_per_token=None if planned.knows_activations else operations,
            peak_operations_per_second=None if assumed_rates else rate * num_devices,
        )


def loss_with_gradients(
    loss: Tensor,
    *,
    gradients: Mapping[nn.Parameter, Tensor],
    backward_scale: float,
    share: float = 1.0,
) -> Tensor:
    """Return `loss` with a graph whose backward hands out gradients that are known already.

    Args:
        loss: The value of the loss, a scalar without a graph.
        gradients: Gradient of `loss * backward_scale` for every parameter that got one; host
            tensors that nobody else uses.
        backward_scale: As for `InFlightBatch`.
        share: What they are multiplied by: this host's share of the batch.

    Returns:
        A scalar that requires a gradient.
    """
    held = [tuple(gradients.values())]

    def take(arriving: Tensor) -> tuple[Tensor, ...]:
        """Give the gradients away, rescaled where the loss was multiplied by something else."""
        if not held:
            raise RuntimeError(_TWICE)
        own = held.pop()
        ratio = arriving / torch.full_like(arriving, backward_scale)
        factor = ratio.item()
        if abs(factor - 1.0) > _ROUNDING:
            warnings.warn(_SCALED.format(factor), stacklevel=2)
        factor *= share
        if factor == 1.0:
            return own
        # In place: a second set would be as large as the model. Sparse ones would seem uncoalesced.
        return tuple(g * factor if g.is_sparse else g.mul_(factor) for g in own)

    return _attach(take, loss, *gradients)


def _attach(
    take: Callable[[Tensor], tuple[Tensor, ...]], loss: Tensor, *parameters: nn.Parameter
) -> Tensor:
    """Let `take` give the parameters' gradients for the gradient that arrives at the loss."""
    # The anchor gives the loss a graph even where no parameter got a gradient.
    anchor = torch.zeros((), dtype=loss.dtype, device=loss.device, requires_grad=True)
    result: Tensor = _PrecomputedGradients.apply(take, loss, anchor, *parameters)  # type: ignore[no-untyped-call]
    return result


class _PrecomputedGradients(torch.autograd.Function):
    """The one node of the graph."""

    @staticmethod
    def forward(
        ctx: Any,
        take: Callable[[Tensor], tuple[Tensor, ...]],
        loss: Tensor,
        anchor: Tensor,  # noqa: ARG004 - an input because it requires a gradient
        *parameters: Tensor,  # noqa: ARG004 - inputs because they are given gradients
    ) -> Tensor:
        ctx.take = take
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, arriving: Tensor) -> Any:
        return (None, None, None, *ctx.take(arriving))


def loss_of_batch(losses: Sequence[Tensor | None], shares: Sequence[float]) -> Tensor | None:
    """Weigh the microbatches' losses into the batch's; those that returned None count as zero.

    Returns:
        A host scalar of at least float32 precision, or None if no microbatch returned a loss.
    """
    first = next((loss for loss in losses if loss is not None), None)
    if first is None:
        return None
    values = [torch.zeros_like(first) if loss is None else loss for loss in losses]
    mean: Tensor = weighted_mean(values, weights=shares)
    return mean.to(torch.promote_types(mean.dtype, torch.float32))
