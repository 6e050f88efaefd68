"""One training batch: split, run through the engine, and put together again for Lightning.

```
batch ─ split ─► microbatches ─► engine.step ─► losses, gradients ─► one loss, ready for backward()
                                      │
                                      └─► logs and metric states, per microbatch ─► merged, replayed
```
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor

from roundpipe_lightning._lightning.commit import loss_with_gradients
from roundpipe_lightning._lightning.logs import LogRecorder, replay_logs, weighted_mean
from roundpipe_lightning._lightning.metrics import MetricStandIns
from roundpipe_lightning.engine.chain import Chain
from roundpipe_lightning.engine.engine import Engine
from roundpipe_lightning.engine.randomness import mix
from roundpipe_lightning.models.batches import batch_size_of, merge_outputs, split_batch
from roundpipe_lightning.models.deferred_logits import FusedLosses, LossFusion, LossMode
from roundpipe_lightning.models.weights import MicrobatchWeight, microbatch_weights
from roundpipe_lightning.planning.plan import Plan
from roundpipe_lightning.planning.timeline import Timeline
from roundpipe_lightning.precision import RoundPipePrecision


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

    Attributes:
        plan: The plan of the last step.
        timeline: When every action of the last step ran.
        chain: The calls of blocks that the last step made.
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
    ) -> None:
        self._module = module
        self._engine = engine
        self._precision = precision
        self._plan_for = plan_for
        self._num_microbatches = num_microbatches
        self._shrinks = shrinks
        self._weight = weight
        self._fusion = None if loss == "own" else LossFusion(loss)
        self._metrics = MetricStandIns(module, in_place=on_host)
        self.plan: Plan | None = None
        self.timeline: Timeline | None = None
        self.chain: Chain | None = None

    def run(self, batch: Any, *arguments: Any) -> STEP_OUTPUT:
        """Run one batch; the gradients wait in the returned loss until its backward.

        Args:
            batch: What `training_step` is called with, on the host.
            *arguments: Its other arguments (`batch_idx`).

        Returns:
            What one call of `training_step` on the full batch would have returned.

        Raises:
            BatchError: The batch cannot be split.
            ConfigurationError: A metric was used that cannot be merged.
        """
        trainer = self._module.trainer
        microbatches = self._split(batch)
        count = len(microbatches)
        shares = microbatch_weights(microbatches, self._weight) if count > 1 else (1.0,)
        backward = not trainer.fit_loop._skip_backward  # noqa: SLF001 - SWA's pass for BatchNorm
        backward_scale = self._precision.loss_scale / trainer.accumulate_grad_batches
        recorders = [LogRecorder() for _ in microbatches]
        self.plan = self._plan_for(microbatches, arguments)
        engine = self._engine()
        with (
            self._metrics.for_microbatches(count) as stand_ins,
            _host_generator_seeded(trainer.fit_loop.epoch_loop.batch_progress.total.ready),
        ):
            result = engine.step(
                microbatches,
                partial(_call_training_step, arguments=arguments, fusion=self._fusion),
                plan=self.plan,
                loss_scales=[share * backward_scale for share in shares],
                backward=backward,
                thread_context=self._precision.thread_context,
                overrides=lambda microbatch: {"log": recorders[microbatch]},
                stand_ins=stand_ins,
                outside=self._fusion,
            )
        self.timeline, self.chain = result.timeline, result.chain
        replay_logs(
            recorders,
            shares=shares,
            losses=result.losses,
            log=self._module.log,
            metric_of=self._metrics.original,
        )
        loss = _reported_loss(result.losses, shares)
        if loss is not None and backward:
            loss = loss_with_gradients(
                loss, gradients=result.gradients, backward_scale=backward_scale
            )
        return _output(loss, result.outputs, microbatches=microbatches, shares=shares)

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
        recorder, engine = LogRecorder(), self._engine()
        with self._metrics.lent() as stand_ins:
            output = engine.evaluate(
                partial(
                    _call_evaluation_step,
                    step_name=step_name,
                    arguments=arguments,
                    fusion=self._fusion,
                ),
                batch,
                overrides={"log": recorder},
                stand_ins=stand_ins,
                outside=self._fusion,
            )
        replay_logs(
            [recorder],
            shares=[1.0],
            losses=[None],
            log=self._module.log,
            metric_of=self._metrics.original,
        )
        return output

    def _split(self, batch: Any) -> Sequence[Any]:
        count = self._num_microbatches
        if self._shrinks and count > 1:
            count = min(count, max(1, batch_size_of(batch)))
        return split_batch(batch, count) if count > 1 else [batch]


def _call_training_step(
    view: Any,
    microbatch: Any,
    index: int,  # noqa: ARG001 - the engine's signature
    *,
    arguments: Sequence[Any],
    fusion: LossFusion | None,
) -> Any:
    """Call the user's code on a view; runs in the microbatch's thread."""
    output = view.training_step(microbatch, *arguments)
    if fusion is not None:
        output = fusion.settled(output)
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
) -> Any:
    """Call the user's code on a view of the module."""
    output = getattr(view, step_name)(batch, *arguments)
    return output if fusion is None else fusion.settled(output)


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
        sizes=[batch_size_of(microbatches[index]) for index in having],
        weights=[shares[index] for index in having],
    )
