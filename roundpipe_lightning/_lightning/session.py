"""An engine that is open for one module, with the plans it runs."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch.optim import Optimizer

from roundpipe_lightning._lightning.options import Options
from roundpipe_lightning._lightning.planning import Planned, StepPlanner
from roundpipe_lightning._lightning.training import MicrobatchedStep
from roundpipe_lightning.engine.device import Device
from roundpipe_lightning.engine.engine import Engine
from roundpipe_lightning.models.blocks import find_stacks
from roundpipe_lightning.models.deferred_logits import FusedLosses
from roundpipe_lightning.planning.plan import Plan
from roundpipe_lightning.planning.profile import ModelProfile
from roundpipe_lightning.planning.timeline import Timeline
from roundpipe_lightning.precision import RoundPipePrecision


class NoBlocksWarning(UserWarning):
    """No stack of blocks was found in the module, so it runs as one stage."""


class Session:
    """From the strategy's set-up to its teardown; what it found out can be read afterwards, too.

    The engine opens with the first batch: what the training needs is known then, and checked.

    Args:
        module: The user's module, attached to its trainer.
        devices: One per worker.
        precision: The precision plugin.
        options: The strategy's settings.
        given_plan: The user's own plan, or None.
        computes_on_host: Whether the Trainer's devices are CPU workers.
        optimizers: The optimizers of a training; none for an evaluation.

    Attributes:
        plan: The plan in use, that of the largest batch so far; before the first batch, one for the
            number of microbatches that was asked for.
        last_plan: The plan of the last training step.
        last_timeline: When every action of the last training step ran.

    Raises:
        PlanError: The given plan is for another model or another number of workers, a hint cannot
            be kept, or the machine cannot hold the model. Nothing has been allocated then.
    """

    def __init__(
        self,
        module: LightningModule,
        *,
        devices: Sequence[Device],
        precision: RoundPipePrecision,
        options: Options,
        given_plan: Plan | None,
        computes_on_host: bool,
        optimizers: Sequence[Optimizer] = (),
    ) -> None:
        self._module = module
        self._devices = tuple(devices)
        self._timeout_seconds = options.timeout_seconds
        self._stacks = find_stacks(module, options.block_names)
        if not self._stacks:
            warnings.warn(
                f"No stack of blocks was found in {type(module).__name__}: it trains as one stage, "
                "which every worker needs as a whole. Name the list of its layers, for example "
                "RoundPipeStrategy(blocks='model.layers').",
                category=NoBlocksWarning,
                stacklevel=2,
            )
        self._planner = StepPlanner(
            module,
            stacks=self._stacks,
            num_workers=len(devices),
            computes_on_host=computes_on_host,
            precision=precision,
            options=options,
            given_plan=given_plan,
            optimizers=optimizers,
        )
        self.plan = self._planner.first_plan()
        self.last_plan: Plan | None = None
        self.last_timeline: Timeline | None = None
        self._peak_device_bytes = 0
        self._engine: Engine | None = None
        self._running: Planned | None = None
        self._step = MicrobatchedStep(
            module,
            engine=self._open_engine,
            on_host=all(device.shares_host_memory for device in devices),
            precision=precision,
            plan_for=self._plan_for,
            num_microbatches=self._planner.num_microbatches,
            shrinks=options.num_microbatches == "auto",
            weight=options.microbatch_weight,
            loss=options.loss,
        )

    def _open_engine(self) -> Engine:
        """Return the engine, opened when it is first needed."""
        if self._engine is None:
            engine = Engine(
                self._module,
                stack=self._stacks,
                devices=self._devices,
                plan=self.plan,
                chain=self._planner.chain,
                timeout_seconds=self._timeout_seconds,
            )
            with torch.inference_mode(mode=False):  # else the parameters could not be trained
                self._engine = engine.__enter__()
        return self._engine

    def close(self) -> None:
        """Join the workers and free what they held. Closing twice is allowed."""
        engine, self._engine = self._engine, None
        if engine is not None:
            self._peak_device_bytes = _peak_bytes(engine)
            engine.close()

    @property
    def profile(self) -> ModelProfile:
        """The model as the planner sees it."""
        return self._planner.profile

    @property
    def peak_device_bytes(self) -> int:
        """The most memory in use on one worker."""
        return _peak_bytes(self._engine) if self._engine else self._peak_device_bytes

    @property
    def fused_losses(self) -> FusedLosses | None:
        """What became of logits that were put off; None where none are."""
        return self._step.fused_losses

    def training_step(self, *arguments: Any) -> STEP_OUTPUT:
        """Run a training batch; see `MicrobatchedStep.run`."""
        output = self._step.run(*arguments)
        self.last_plan, self.last_timeline = self._step.plan, self._step.timeline
        if output is not None and not self._module.trainer.fit_loop._skip_backward:  # noqa: SLF001
            self._learn()
        return output

    def evaluate(self, step_name: str, *arguments: Any) -> Any:
        """Run an evaluation batch; see `MicrobatchedStep.evaluate`."""
        return self._step.evaluate(step_name, *arguments)

    def _plan_for(self, microbatches: Sequence[Any], arguments: Sequence[Any]) -> Plan:
        """Return the plan for a batch and show it if the batch is the largest so far."""
        self._running = self._planner.planned(microbatches, arguments)
        plan = self._running.plan
        if self._engine is not None and self._engine.chain is not self._planner.chain:
            self._engine.plan_for(self._planner.chain, plan)
            self.plan = plan
        if self.last_plan is None or plan.num_microbatches >= self.plan.num_microbatches:
            self.plan = plan
        return plan

    def _learn(self) -> None:
        """Let the planner know how long the step took; it may change the plan."""
        running, timeline, chain = self._running, self.last_timeline, self._step.chain
        assert running is not None
        assert timeline is not None
        assert chain is not None
        if self._planner.take_chain(chain):
            return  # the next step has a plan of its own
        remaining = _remaining_batches(self._module.trainer)
        self._planner.learn(running, timeline, remaining_steps=remaining)
        if self.plan is self.last_plan:
            self.plan = running.plan

    def state_dict(self) -> dict[str, Any]:
        """Return what the plans of a resumed training follow from."""
        return self._planner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what `state_dict` returned."""
        self._planner.load_state_dict(state)


def _remaining_batches(trainer: Trainer) -> int | None:
    """Batches that are left to train on; None where nothing limits them."""
    limits: list[float] = []
    if trainer.max_steps >= 0:
        left = trainer.max_steps - trainer.global_step
        limits.append(left * trainer.accumulate_grad_batches)
    if trainer.max_epochs is not None and trainer.max_epochs >= 0:
        epochs = trainer.max_epochs - trainer.current_epoch
        limits.append(epochs * trainer.num_training_batches)
    least = min(limits, default=math.inf)
    return int(least) if math.isfinite(least) else None


def _peak_bytes(engine: Engine) -> int:
    return max((worker.peak_bytes() for worker in engine.workers), default=0)
