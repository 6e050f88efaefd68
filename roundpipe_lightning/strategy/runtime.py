"""An engine that is open for one module, with the plans it runs."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.optim import Optimizer

from roundpipe_lightning.engine.capture.compiled import BlockCompiler
from roundpipe_lightning.engine.device.base import Device
from roundpipe_lightning.engine.device.events import UpdateAborted
from roundpipe_lightning.engine.engine import Engine
from roundpipe_lightning.engine.update.fingerprint import fingerprint
from roundpipe_lightning.engine.update.updater import Updater, update_units
from roundpipe_lightning.models.blocks import find_stacks
from roundpipe_lightning.models.losses.lazy_logits import FusedLosses
from roundpipe_lightning.planning.model.profile import ModelProfile
from roundpipe_lightning.planning.report.step_record import StepRecord
from roundpipe_lightning.planning.schedule.plan import Plan
from roundpipe_lightning.planning.schedule.timeline import Timeline
from roundpipe_lightning.precision import RoundPipePrecision
from roundpipe_lightning.strategy import compat
from roundpipe_lightning.strategy import model_utils as facts
from roundpipe_lightning.strategy import sync_hooks as readers
from roundpipe_lightning.strategy.options import Options
from roundpipe_lightning.strategy.plan_listeners import (
    PlanWatch,
    PlanWatcher,
    StepWatcher,
    rates_are_assumed,
    record_of,
)
from roundpipe_lightning.strategy.planned import Planned
from roundpipe_lightning.strategy.planner import StepPlanner
from roundpipe_lightning.strategy.step import MicrobatchedStep, WaitingStep
from roundpipe_lightning.strategy.transfer_dtypes import upload_dtype_of

_MOST_OVERLAPPED = 16
"""Windows in a row whose last batch is not waited for: between batches memory is made anew."""


class NoBlocksWarning(UserWarning):
    """No stack of blocks was found in the module, so it runs as one stage."""


class ServedLast:
    """What the next step of a training that has ended would compute with.

    Held as long as the parameters are those that the training has made.

    Args:
        served: By parameter.
    """

    def __init__(self, served: Mapping[nn.Parameter, Tensor]) -> None:
        self._served = dict(served)
        self._fingerprints = [fingerprint(parameter) for parameter in served]

    def values(self) -> Mapping[nn.Parameter, Tensor]:
        """Return the values; none once a parameter has been written to."""
        if [fingerprint(parameter) for parameter in self._served] != self._fingerprints:
            self._served, self._fingerprints = {}, []
        return self._served


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
        overlaps_on_host: Whether the optimizer's steps are made while other things go on where
            workers and optimizer share the processor; elsewhere they are.
        watchers: Told of plans that are about to be run.
        step_watchers: Told of training steps that have ended, as early as that is known.

    Attributes:
        plan: The plan in use, that of the largest batch so far; before the first batch, one for the
            number of microbatches that was asked for.
        last_plan: The plan of the last training step.
        last_timeline: When every action of the last training step ran.
        overlaps_updates: Whether the optimizer's steps are made while other things go on.

    Raises:
        PlanError: The given plan is for another model or another number of workers, a hint cannot
            be kept, or the machine cannot hold the model. Nothing has been allocated then.
    """

    def __init__(  # noqa: PLR0913 - all but one keyword-only
        self,
        module: LightningModule,
        *,
        devices: Sequence[Device],
        precision: RoundPipePrecision,
        options: Options,
        given_plan: Plan | None,
        computes_on_host: bool,
        optimizers: Sequence[Optimizer] = (),
        overlaps_on_host: bool = False,
        watchers: Sequence[PlanWatcher] = (),
        step_watchers: Sequence[StepWatcher] = (),
    ) -> None:
        self._module = module
        self._devices = tuple(devices)
        self._timeout_seconds = options.timeout_seconds
        self._compiler = BlockCompiler() if options.compile else None
        self._optimizers = tuple(optimizers)
        self._upload_dtype = upload_dtype_of(options, precision)
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
            devices=devices,
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
        self._moves = not any(device.shares_host_memory for device in devices)
        on_host = all(device.shares_host_memory for device in devices)
        self._stale = options.update == "async"
        self.overlaps_updates = (
            bool(optimizers)
            and module.automatic_optimization
            and (self._stale or overlaps_on_host or not on_host)
        )
        self._updater: Updater | None = None
        self._previous: dict[nn.Parameter, Tensor] = {}  # from a checkpoint
        self._left = ServedLast({})
        self._running: tuple[Planned, int] | None = None  # with the number of the batch's values
        self._in_flight: tuple[Planned, int] | None = None
        self._num_overlapped = 0  # windows in a row
        self._trained_last = False  # since then there was no evaluation
        #: Whether the optimizer's step that comes after the present batch may wait for its end.
        self.defers_update = False
        self._ran: tuple[Planned, int] | None = None
        self._workers_per_device = options.workers_per_device
        self._assumed_rates = rates_are_assumed(options, computes_on_host=computes_on_host)
        self._step_watchers = step_watchers
        self._watch = PlanWatch(watchers, assumed_rates=self._assumed_rates)
        self._step = MicrobatchedStep(
            module,
            engine=self._open_engine,
            on_host=on_host,
            precision=precision,
            plan_for=self._plan_for,
            num_microbatches=self._planner.num_microbatches,
            shrinks=options.num_microbatches == "auto",
            weight=options.microbatch_weight,
            loss=options.loss,
            may_overlap=self._may_overlap,
            ended=self._batch_ended,
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
                compiler=self._compiler,
                upload_dtype=self._upload_dtype,
            )
            with torch.inference_mode(mode=False):  # else the parameters could not be trained
                self._engine = engine.__enter__()
            if self.overlaps_updates:
                units = update_units(self._module, self.blocks, shared=engine.store.shared)
                self._updater = Updater(engine.store, units, stale=self._stale)
                if engine.store.copies is not None:
                    engine.store.copies.written_by(self._optimizers)
                self._updater.restore(self._previous)
                self._previous = {}
        return self._engine

    @property
    def blocks(self) -> dict[str, nn.Module]:
        """The blocks by name."""
        return {n: b for s in self._stacks for n, b in zip(s.names, s.blocks, strict=True)}

    @property
    def updater(self) -> Updater | None:
        """Steps the optimizer beside everything else; None before the first batch, or without."""
        return self._updater

    def close(self) -> None:
        """Join the workers and free what they held. Closing twice is allowed."""
        updater, self._updater = self._updater, None
        if updater is not None:
            with suppress(Exception):  # of an update that nobody joined for
                self._left = ServedLast(updater.served())
            updater.close()
        engine, self._engine = self._engine, None
        if engine is not None:
            self._peak_device_bytes = _peak_bytes(engine)
            engine.close()

    @property
    def profile(self) -> ModelProfile:
        """The model as the planner sees it."""
        return self._planner.profile

    @property
    def last_step(self) -> StepRecord | None:
        """The last training step, when all of it is known; None before the first."""
        self.synchronize()
        return self._record()

    def _record(self) -> StepRecord | None:
        """The last training step that has ended."""
        if self._ran is None or self.last_plan is None or self.last_timeline is None:
            return None
        running, num_values = self._ran
        return record_of(
            running,
            plan=self.last_plan,
            timeline=self.last_timeline,
            num_values=num_values,
            counters=self._step.counters,
            clock_seconds=self._step.clock_seconds,
            workers_per_device=self._workers_per_device,
            assumed_rates=self._assumed_rates,
        )

    @property
    def peak_device_bytes(self) -> int:
        """The most memory in use on one worker."""
        return _peak_bytes(self._engine) if self._engine else self._peak_device_bytes

    @property
    def compiler(self) -> BlockCompiler | None:
        """What compiles the blocks; None where they run as they are."""
        return self._compiler

    @property
    def fused_losses(self) -> FusedLosses | None:
        """What became of logits that were put off; None where none are."""
        return self._step.fused_losses

    def training_step(self, *arguments: Any) -> STEP_OUTPUT:
        """Run a training batch; see `MicrobatchedStep.run` and `run_manual`."""
        if not self._module.automatic_optimization:
            return self._step.run_manual(*arguments)
        output = self._run_updated(*arguments)
        if self._step.is_in_flight:
            self._in_flight = self._running
            return output
        self._ran = self._running
        self._note_ended()
        if output is not None and not compat.skips_backward(self._module.trainer):
            self._learn()
        return output

    def _may_overlap(self) -> bool:
        """Say whether nobody looks at the present batch's gradients before the next batch's."""
        trainer = self._module.trainer
        accumulates = compat.is_accumulating(trainer)
        defers = self.defers_update and self._moves and self._num_overlapped < _MOST_OVERLAPPED
        overlaps = accumulates or defers
        if not overlaps or readers.sees_every_gradient(trainer):
            self._num_overlapped = 0
            return False
        self._num_overlapped += not accumulates
        return True

    @property
    def is_in_flight(self) -> bool:
        """Whether the gradients of the last batch are still to come."""
        return self._step.is_in_flight

    def before_gradients(self, step: WaitingStep) -> None:
        """Have an optimizer's step made when the gradients of the batch in flight are there."""
        self._step.before_gradients(step)

    def synchronize(self) -> None:
        """Wait for the gradients of a batch in flight, if there is one, and hand them out.

        Raises:
            Exception: Whatever its backward pass has raised.
        """
        self._step.synchronize()

    def synchronized(self) -> Session:
        """Return itself, when the last batch has ended."""
        self.synchronize()
        return self

    def _batch_ended(self) -> None:
        """Note the batch whose gradients have come after the next batch had begun."""
        self._ran, self._in_flight = self._in_flight, None
        self._note_ended()
        self._learn()

    def _note_ended(self) -> None:
        """Note what is known of a step that has ended, and tell who wants to know."""
        self.last_plan, self.last_timeline = self._step.plan, self._step.timeline
        record = self._record() if self._step_watchers else None
        if record is not None:
            for watcher in self._step_watchers:
                watcher(record)

    def _run_updated(self, *arguments: Any) -> STEP_OUTPUT:
        """Run a training batch while the optimizer still steps, and wait for it to end."""
        trains = not compat.skips_backward(self._module.trainer)
        output: STEP_OUTPUT = None
        self._cast_again(between_batches=self._trained_last)
        self._trained_last = True
        with nullcontext() if trains else self._newest(), suppress(UpdateAborted):
            output = self._step.run(*arguments)
        if self._updater is not None:
            self._updater.join()  # raises what an update was given up for
        return output

    def evaluate(self, step_name: str, *arguments: Any) -> Any:
        """Run an evaluation batch, on the newest parameters; see `MicrobatchedStep.evaluate`."""
        self._trained_last = False
        with self._newest():
            self._cast_again()
            return self._step.evaluate(step_name, *arguments)

    def _cast_again(self, *, between_batches: bool = False) -> None:
        """Have weights rounded again for the upload where a hook may have written to them.

        PyTorch counts writes, but for those through `parameter.data` and of compiled kernels.
        """
        copies = None if self._engine is None else self._engine.store.copies
        trainer, steps_itself = self._module.trainer, self._updater is None
        if copies is not None and (
            steps_itself or readers.may_write(trainer, between_batches=between_batches)
        ):
            copies.forget()

    def _newest(self) -> AbstractContextManager[None]:
        return nullcontext() if self._updater is None else self._updater.latest()

    def previous_parameters(self) -> dict[str, Tensor]:
        """Return what the next step computes with where that is not what the module has."""
        served = self._left.values() if self._updater is None else self._updater.served()
        return {n: served[p] for n, p in self._module.named_parameters() if p in served}

    def load_previous_parameters(self, state: Mapping[str, Tensor]) -> None:
        """Let the next step compute with what `previous_parameters` returned."""
        if self.overlaps_updates and self._stale:
            known = dict(self._module.named_parameters())
            self._previous = {known[name]: values for name, values in state.items()}
            if self._updater is not None:
                self._updater.restore(self._previous)

    def _plan_for(self, microbatches: Sequence[Any], arguments: Sequence[Any]) -> Plan:
        """Return the plan for a batch and show it if the batch is the largest so far."""
        planned = self._planner.planned(microbatches, arguments)
        self._running = planned, sum(facts.num_values(microbatch) for microbatch in microbatches)
        self._watch.running(planned)
        plan = planned.plan
        if self._engine is not None and self._engine.chain is not self._planner.chain:
            self._engine.plan_for(self._planner.chain, plan)
            self.plan = plan
        if self.last_plan is None or plan.num_microbatches >= self.plan.num_microbatches:
            self.plan = plan
        return plan

    def _learn(self) -> None:
        """Let the planner know how long the step took; it may change the plan."""
        assert self._ran is not None
        (running, _), timeline, chain = self._ran, self.last_timeline, self._step.chain
        assert timeline is not None
        assert chain is not None
        if self._planner.take_chain(chain):
            return  # the next step has a plan of its own
        remaining = _remaining_batches(self._module.trainer)
        self._planner.learn(running, timeline, remaining_steps=remaining)
        if self.plan is self.last_plan:
            self.plan = running.plan

    def state_dict(self) -> dict[str, Any]:
        """Return what the plans and the compiled blocks of a resumed training follow from."""
        state = self._planner.state_dict()
        if self._compiler is not None:
            state["compiler"] = self._compiler.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what `state_dict` returned."""
        self._planner.load_state_dict(state)
        if self._compiler is not None and "compiler" in state:
            self._compiler.load_state_dict(state["compiler"])


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
