"""An engine that is open for one module, with the plans it runs."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch.nn.modules.batchnorm import _BatchNorm

from roundpipe_lightning._lightning.options import Options
from roundpipe_lightning._lightning.training import MicrobatchedStep
from roundpipe_lightning.engine.device import Device
from roundpipe_lightning.engine.engine import Engine
from roundpipe_lightning.errors import PlanError
from roundpipe_lightning.models.blocks import find_blocks
from roundpipe_lightning.models.profile import profile_module
from roundpipe_lightning.planning.default import default_plan
from roundpipe_lightning.planning.parameter_fit import (
    check_plan_holds_parameters,
    plan_that_holds_parameters,
)
from roundpipe_lightning.planning.plan import Plan
from roundpipe_lightning.planning.timeline import Timeline
from roundpipe_lightning.precision import RoundPipePrecision


class NoBlocksWarning(UserWarning):
    """No stack of blocks was found in the module, so it runs as one stage."""


class Session:
    """From the strategy's set-up to its teardown; what it found out can be read afterwards, too.

    Args:
        module: The user's module, attached to its trainer.
        devices: One per worker.
        precision: The precision plugin.
        options: The strategy's settings.
        given_plan: The user's own plan, or None.

    Attributes:
        profile: The model as the planner sees it.
        plan: The plan of the largest batch so far; before the first batch, of the number of
            microbatches that was asked for.
        last_plan: The plan of the last training step.
        last_timeline: When every action of the last training step ran.

    Raises:
        PlanError: The given plan is for another model or another number of workers, or the machine
            that is named cannot hold the model. Nothing has been allocated then.
    """

    def __init__(
        self,
        module: LightningModule,
        *,
        devices: Sequence[Device],
        precision: RoundPipePrecision,
        options: Options,
        given_plan: Plan | None,
    ) -> None:
        self._num_workers = len(devices)
        self._keeps_statistics = any(isinstance(m, _BatchNorm) for m in module.modules())
        stack = find_blocks(module, options.block_names)
        if stack is None:
            warnings.warn(
                f"No stack of blocks was found in {type(module).__name__}: it trains as one stage, "
                "which every worker needs as a whole. Name the list of its layers, for example "
                "RoundPipeStrategy(blocks='model.layers').",
                category=NoBlocksWarning,
                stacklevel=2,
            )
        self.profile = profile_module(module, stack)
        self._hardware = options.load_hardware(num_workers=len(devices))
        self._plans: dict[int, Plan] = {}
        if given_plan is not None:
            self._check_plan(given_plan)
            self._plans[given_plan.num_microbatches] = given_plan
        wanted = options.num_microbatches
        if given_plan is not None:
            wanted = given_plan.num_microbatches
        elif wanted == "auto":
            wanted = 2 * self._num_workers
        self.plan = self._plan_for(wanted)
        self.last_plan: Plan | None = None
        self.last_timeline: Timeline | None = None
        self._peak_device_bytes = 0
        self._engine: Engine | None = Engine(
            module,
            stack=stack,
            devices=devices,
            plan=self.plan,
            timeout_seconds=options.timeout_seconds,
        ).__enter__()
        self._step = MicrobatchedStep(
            module,
            engine=self._engine,
            precision=precision,
            plan_for=self._plan_for,
            num_microbatches=wanted,
            shrinks=options.num_microbatches == "auto",
            weight=options.microbatch_weight,
        )

    def close(self) -> None:
        """Join the workers and free what they held. Closing twice is allowed."""
        engine, self._engine = self._engine, None
        if engine is not None:
            self._peak_device_bytes = _peak_bytes(engine)
            engine.close()

    @property
    def peak_device_bytes(self) -> int:
        """The most memory in use on one worker."""
        return _peak_bytes(self._engine) if self._engine else self._peak_device_bytes

    def training_step(self, *arguments: Any) -> STEP_OUTPUT:
        """Run a training batch; see `MicrobatchedStep.run`."""
        output = self._step.run(*arguments)
        plan = self._step.plan
        assert plan is not None
        if self.last_plan is None or plan.num_microbatches > self.plan.num_microbatches:
            self.plan = plan
        self.last_plan, self.last_timeline = plan, self._step.timeline
        return output

    def evaluate(self, step_name: str, *arguments: Any) -> Any:
        """Run an evaluation batch; see `MicrobatchedStep.evaluate`."""
        return self._step.evaluate(step_name, *arguments)

    def _check_plan(self, plan: Plan) -> None:
        if plan.num_workers != self._num_workers:
            raise PlanError(
                f"The plan is for {plan.num_workers} workers, but Trainer(devices=...) and "
                f"workers_per_device give {self._num_workers}. Change one of them, or set "
                "plan='auto'."
            )
        plan.check_model(self.profile.fingerprint, block_names=self.profile.block_names)
        if self._hardware is not None:
            check_plan_holds_parameters(plan, profile=self.profile, hardware=self._hardware)

    def _plan_for(self, num_microbatches: int) -> Plan:
        """Return the plan for a number of microbatches, made once."""
        if num_microbatches not in self._plans:
            self._plans[num_microbatches] = self._new_plan(num_microbatches)
        return self._plans[num_microbatches]

    def _new_plan(self, num_microbatches: int) -> Plan:
        """Make a plan; for a machine that is named, one that it can hold.

        Raises:
            PlanError: The machine cannot hold the model's parameters.
        """
        plan = default_plan(
            self.profile,
            num_workers=self._num_workers,
            num_microbatches=num_microbatches,
            # Running statistics are written in the order of the microbatches.
            round_sizes=[num_microbatches] if self._keeps_statistics else (),
        )
        if self._hardware is None:
            return plan
        return plan_that_holds_parameters(plan, profile=self.profile, hardware=self._hardware)


def _peak_bytes(engine: Engine) -> int:
    return max((worker.peak_bytes() for worker in engine.workers), default=0)
