"""One training batch: split, run through the engine, and put together again for Lightning.

```
batch ─ split ─► microbatches ─► engine.step ─► losses, gradients ─► one loss, ready for backward()
                                      │
                                      └─► logs and metric states, per microbatch ─► merged, replayed
```
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor

from roundpipe_lightning.engine.capture.randomness import mix
from roundpipe_lightning.engine.capture.trees import children_of
from roundpipe_lightning.engine.chain.chain import Chain
from roundpipe_lightning.engine.device.base import Device
from roundpipe_lightning.engine.engine import Engine
from roundpipe_lightning.engine.manual import ManualStep
from roundpipe_lightning.engine.steps import Step, StepResult
from roundpipe_lightning.errors import BatchError
from roundpipe_lightning.models.batches import (
    batch_size_of,
    merge_outputs,
    rows_of_parts,
    split_batch,
    split_parts,
)
from roundpipe_lightning.models.losses.lazy_logits import FusedLosses, LossFusion, LossMode
from roundpipe_lightning.models.weights import MicrobatchWeight, microbatch_weights
from roundpipe_lightning.planning.report.step_record import EngineCounters
from roundpipe_lightning.planning.schedule.plan import Plan
from roundpipe_lightning.planning.schedule.timeline import Timeline
from roundpipe_lightning.precision import RoundPipePrecision
from roundpipe_lightning.strategy import compat
from roundpipe_lightning.strategy.logged_batch import LoggedBatch
from roundpipe_lightning.strategy.logging import LogRecorder, OwnLog, replay_logs, weighted_mean
from roundpipe_lightning.strategy.metrics import MetricStandIns
from roundpipe_lightning.strategy.plan_listeners import counters_of
from roundpipe_lightning.strategy.precomputed_gradients import LaterGradients, loss_with_gradients


class WaitingStep(Protocol):
    """An optimizer's step that waits for the gradients of a batch."""

    def expect(self) -> None:
        """Hear that they are about to be added to `.grad`."""

    def submit(self, *, has_next: bool) -> None:
        """Hear that they have been.

        Args:
            has_next: Whether the next batch has begun.
        """


@dataclass(kw_only=True)
class _InFlight:
    """A batch whose gradients are to come.

    Attributes:
        step: The engine's step.
        plan: Its plan.
        gradients: Where they go.
        waiting: The optimizer's step, if that comes next.
    """

    step: Step
    plan: Plan
    gradients: LaterGradients
    waiting: WaitingStep | None = None


class MicrobatchedStep:
    """Runs `training_step` on the microbatches of a batch.

    Args:
        module: The user's module, attached to its trainer.
        engine: Returns the open engine of the module.
        on_host: Whether the workers compute in host memory.
        precision: Gives the microbatch threads their context and the loss its scale.
        plan_for: Returns the plan for the microbatches of a batch and the step's other arguments.
        num_microbatches: How many; fewer for a batch of fewer samples if `shrinks`.
        shrinks: Whether a small batch is run with fewer microbatches instead of being refused.
        weight: How much a microbatch counts in the loss.
        loss: Which losses are computed without whole logits.
        may_overlap: Returns whether the gradients of the present batch may come when the next has
            begun.
        ended: Called when all of a batch is known, its gradients included.

    Attributes:
        plan: The plan of the last step.
        timeline: When every action of the last step ran.
        chain: The calls of blocks that the last step made.
        counters: What the engine has counted in the last step.
        clock_seconds: `StepResult.clock_seconds` of the last step.
    """

    def __init__(  # noqa: PLR0913 - all keyword-only
        self,
        module: LightningModule,
        *,
        engine: Callable[[], Engine],
        on_host: bool,
        precision: RoundPipePrecision,
        plan_for: Callable[[Sequence[Any], Sequence[Any]], Plan],
        num_microbatches: int,
        shrinks: bool,
        weight: MicrobatchWeight,
        loss: LossMode,
        may_overlap: Callable[[], bool],
        ended: Callable[[], None],
    ) -> None:
        self._module = module
        self._engine = engine
        self._on_host = on_host
        self._precision = precision
        self._plan_for = plan_for
        self._num_microbatches = num_microbatches
        self._shrinks = shrinks
        self._weight = weight
        self._may_overlap = may_overlap
        self._ended = ended
        self._in_flight: _InFlight | None = None
        self._fusion = None if loss == "eager" else LossFusion(loss)
        self._metrics = MetricStandIns(module, in_place=on_host)
        self._own_log = OwnLog(module)
        self.plan: Plan | None = None
        self.timeline: Timeline | None = None
        self.chain: Chain | None = None
        self.counters = EngineCounters()
        self.clock_seconds: float | None = None

    def run(self, batch: Any, *arguments: Any) -> STEP_OUTPUT:
        """Run one batch; the gradients wait in the returned loss until its backward.

        Args:
            batch: What `training_step` is called with, on the host.
            *arguments: Its other arguments (`batch_idx`).

        Returns:
            What one call of `training_step` on the full batch would have returned.

        Raises:
            BatchError: The batch cannot be split.
            ConfigurationError: A metric was used in a way that has no meaning for microbatches.
        """
        trainer = self._module.trainer
        microbatches = self._split(batch)
        shares = self._shares(batch, microbatches)
        backward = not compat.skips_backward(trainer)
        backward_scale = self._precision.loss_scale / trainer.accumulate_grad_batches
        recorders, logged = [LogRecorder() for _ in microbatches], LoggedBatch(batch)
        plan = self._plan_for(microbatches, arguments)
        engine = self._engine()
        overlaps = backward and self._may_overlap()
        with (
            self._metrics.for_microbatches(shares) as stand_ins,
            _host_generator_seeded(self._batch_number),
            self._own_log.recorded(),
        ):
            step = engine.begin_step(
                microbatches,
                partial(
                    _call_training_step,
                    arguments=arguments,
                    fusion=self._fusion,
                    own_log=self._own_log,
                    logged=logged,
                ),
                plan=plan,
                loss_scales=[share * backward_scale for share in shares],
                backward=backward,
                thread_context=self._precision.thread_context,
                overrides=lambda microbatch: {"log": recorders[microbatch]},
                stand_ins=stand_ins,
                outside=self._fusion,
            )
            self._synchronize_before(step)
            known = step.outputs() if overlaps else step.result()
        logged.use(self._module)
        replay_logs(
            recorders,
            shares=shares,
            losses=known.losses,
            log=self._module.log,
            metric_of=self._metrics.original,
        )
        loss = _reported_loss(known.losses, shares)
        if step.is_over or loss is None:
            result = step.result()
            self._note(result, plan)
            if loss is not None and backward:
                loss = loss_with_gradients(
                    loss, gradients=result.gradients, backward_scale=backward_scale
                )
        else:
            later = LaterGradients(loss, backward_scale=backward_scale)
            self._in_flight = _InFlight(step=step, plan=plan, gradients=later)
            loss = later.loss
        return _output(loss, known.outputs, microbatches=microbatches, shares=shares)

    def _synchronize_before(self, step: Step) -> None:
        """Synchronize the batch before one that has begun; let that end if it fails."""
        try:
            self.synchronize(has_next=True)
        except BaseException:
            with suppress(Exception):
                step.result()
            raise

    @property
    def is_in_flight(self) -> bool:
        """Whether the gradients of the last batch are still to come."""
        return self._in_flight is not None

    def before_gradients(self, step: WaitingStep) -> None:
        """Have an optimizer's step made when the gradients of the batch in flight are there."""
        assert self._in_flight is not None, "a batch is in flight"
        self._in_flight.waiting = step

    def synchronize(self, *, has_next: bool = False) -> None:
        """Wait for the end of the batch in flight, if there is one, and hand its gradients out.

        Args:
            has_next: Whether the next batch has begun.

        Raises:
            Exception: Whatever its backward pass has raised.
        """
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is None or in_flight.step.was_given_up:
            return
        result = in_flight.step.result()
        if in_flight.waiting is not None:
            in_flight.waiting.expect()
        in_flight.gradients.hand_out(result.gradients)
        if in_flight.waiting is not None:
            in_flight.waiting.submit(has_next=has_next)
        self._note(result, in_flight.plan)
        self._ended()

    def _note(self, result: StepResult, plan: Plan) -> None:
        self.plan, self.timeline, self.chain = plan, result.timeline, result.chain
        self.counters, self.clock_seconds = counters_of(result), result.clock_seconds

    def run_manual(self, batch: Any, *arguments: Any) -> STEP_OUTPUT:
        """Run a `training_step` that steps its optimizers itself, on the full batch.

        Args:
            batch: What it is called with, on the host.
            *arguments: Its other arguments (`batch_idx`).
        """
        if self._on_host:
            return self._module.training_step(batch, *arguments)
        recorder, engine, logged = LogRecorder(), self._engine(), LoggedBatch(batch)
        device = engine.workers[0].device

        def call(view: Any, here: Any) -> Any:
            output = view.training_step(here, *arguments)
            logged.note(here)
            return output

        blocks = [block for stack in engine.stacks for block in stack.blocks]
        with self._metrics.lent() as stand_ins, self._device_generators_seeded(device):
            output: STEP_OUTPUT = ManualStep(self._module, blocks=blocks, device=device).run(
                call, batch, overrides={"log": recorder}, stand_ins=stand_ins
            )
        logged.use(self._module)
        self._replay(recorder)
        return output

    @contextmanager
    def _device_generators_seeded(self, device: Device) -> Iterator[None]:
        """Seed a device's own generators for one step: from the run's seed and the batch's number.

        Checkpoints have the host's generators only; so a resumed run draws the same numbers.
        """
        host, number = torch.default_generator, self._batch_number
        own = [generator for generator in device.generators() if generator is not host]
        states = [generator.get_state() for generator in own]
        for generator in own:
            generator.manual_seed(mix(host.initial_seed(), number))
        try:
            yield
        finally:
            for generator, state in zip(own, states, strict=True):
                generator.set_state(state)

    @property
    def _batch_number(self) -> int:
        """Number of the training batch that runs, over all epochs."""
        return self._module.trainer.fit_loop.epoch_loop.batch_progress.total.ready

    def _replay(self, recorder: LogRecorder) -> None:
        """Log what one step on the full batch has logged."""
        replay_logs(
            [recorder],
            shares=[1.0],
            losses=[None],
            log=self._module.log,
            metric_of=self._metrics.original,
        )

    @property
    def fused_losses(self) -> FusedLosses | None:
        """What became of logits that were put off; None where none are."""
        return None if self._fusion is None else self._fusion.report

    def evaluate(self, step_name: str, batch: Any, *arguments: Any) -> Any:
        """Run `validation_step`, `test_step` or `predict_step` on the full batch, in this thread.

        Args:
            step_name: Which one.
            batch: What it is called with, on the host.
            *arguments: Its other arguments (`batch_idx`, `dataloader_idx`).
        """
        self.synchronize()
        recorder, engine, logged = LogRecorder(), self._engine(), LoggedBatch(batch)
        with self._metrics.lent() as stand_ins:
            output = engine.evaluate(
                partial(
                    _call_evaluation_step,
                    step_name=step_name,
                    arguments=arguments,
                    fusion=self._fusion,
                    logged=logged,
                ),
                batch,
                overrides={"log": recorder},
                stand_ins=stand_ins,
                outside=self._fusion,
            )
        logged.use(self._module)
        self._replay(recorder)
        return output

    def _split(self, batch: Any) -> Sequence[Any]:
        count = self._num_microbatches
        if count > 1 and self._has_uneven_parts(batch):
            if self._shrinks:
                common = math.gcd(*rows_of_parts(batch).values())
                count = max(n for n in range(1, count + 1) if common % n == 0)
            return split_parts(batch, count) if count > 1 else [batch]
        if self._shrinks and count > 1:
            count = min(count, max(1, batch_size_of(batch)))
        return split_batch(batch, count) if count > 1 else [batch]

    def _has_uneven_parts(self, batch: Any) -> bool:
        """Whether several loaders have given a part each, with rows of different numbers."""
        loader = compat.combined_loader(self._module.trainer)
        num_loaders = 1 if loader is None else len(loader.flattened)
        if num_loaders < 2 or len(list(children_of(batch))) != num_loaders:
            return False
        return len(set(rows_of_parts(batch).values())) > 1

    def _shares(self, batch: Any, microbatches: Sequence[Any]) -> Sequence[float]:
        """Return every microbatch's share in the loss."""
        count = len(microbatches)
        even = not callable(self._weight) and count > 1 and self._has_uneven_parts(batch)
        if count == 1 or even:
            return (1.0 / count,) * count
        return microbatch_weights(microbatches, self._weight)


def _rows(microbatch: Any) -> int:
    """Count the samples; parts of several loaders have no number in common, so it is 0 then."""
    try:
        return batch_size_of(microbatch)
    except BatchError:
        return 0


def _call_training_step(
    view: Any,
    microbatch: Any,
    index: int,
    *,
    arguments: Sequence[Any],
    fusion: LossFusion | None,
    own_log: OwnLog,
    logged: LoggedBatch,
) -> Any:
    """Call the user's code on a view; runs in the microbatch's thread."""
    with own_log.of(view.log):
        output = view.training_step(microbatch, *arguments)
    if index == 0:
        logged.note(microbatch)
    if fusion is not None:
        output = fusion.materialized(output)
    if isinstance(output, Mapping) and output.get("loss") is None:
        raise MisconfigurationException(
            "In automatic_optimization, when `training_step` returns a dict, the 'loss' key needs "
            "to be present"
        )
    return output


def _call_evaluation_step(
    view: Any,
    batch: Any,
    *,
    step_name: str,
    arguments: Sequence[Any],
    fusion: LossFusion | None,
    logged: LoggedBatch,
) -> Any:
    """Call the user's code on a view of the module."""
    output = getattr(view, step_name)(batch, *arguments)
    logged.note(batch)
    return output if fusion is None else fusion.materialized(output)


@contextmanager
def _host_generator_seeded(batch_number: int) -> Iterator[None]:
    """Seed torch's host generator for one step, and put it back as it was.

    The step draws its seed from that generator. Seeded by the run's seed and the number of the
    batch, the draw is the same after a resume; put back, the generator shuffles the data as on one
    device.
    """
    generator = torch.default_generator
    before = generator.get_state()
    generator.manual_seed(mix(generator.initial_seed(), batch_number))
    try:
        yield
    finally:
        generator.set_state(before)


def _reported_loss(losses: Sequence[Tensor | None], shares: Sequence[float]) -> Tensor | None:
    """Weigh the microbatches' losses into the batch's; those that returned None count as zero.

    Returns:
        A host scalar of at least float32 precision, or None if no microbatch returned a loss.
    """
    present = [
        (loss, share) for loss, share in zip(losses, shares, strict=True) if loss is not None
    ]
    if not present:
        return None
    weights = [share for _, share in present]
    mean: Tensor = weighted_mean([loss for loss, _ in present], weights=weights)
    mean = mean.to(torch.promote_types(mean.dtype, torch.float32))
    return mean if len(present) == len(losses) else mean * sum(weights)


def _output(
    loss: Tensor | None,
    outputs: Sequence[Any],
    *,
    microbatches: Sequence[Any],
    shares: Sequence[float],
) -> STEP_OUTPUT:
    """Put together what the microbatches returned."""
    if loss is None:
        return None
    kept = [index for index, output in enumerate(outputs) if isinstance(output, Mapping)]
    keys = dict.fromkeys(key for index in kept for key in outputs[index])
    merged = {key: _merge_key(key, outputs, microbatches, shares) for key in keys if key != "loss"}
    return {**merged, "loss": loss} if kept else loss


def _merge_key(
    key: str, outputs: Sequence[Any], microbatches: Sequence[Any], shares: Sequence[float]
) -> Any:
    """Put together one value of the dictionaries that microbatches returned."""
    having = [
        i for i, output in enumerate(outputs) if isinstance(output, Mapping) and key in output
    ]
    if len(microbatches) == 1:
        return outputs[0][key]
    return merge_outputs(
        [outputs[index][key] for index in having],
        sizes=[_rows(microbatches[index]) for index in having],
        weights=[shares[index] for index in having],
    )
