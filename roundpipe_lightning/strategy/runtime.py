"""An engine that is open for one module, the plans it runs, and the batch that is in flight."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any, TypeAlias

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.optim import Optimizer

from roundpipe_lightning.engine.capture.compiled import BlockCompiler
from roundpipe_lightning.engine.capture.randomness import mix, seeded
from roundpipe_lightning.engine.chain.chain import BlockStack
from roundpipe_lightning.engine.device.base import Device
from roundpipe_lightning.engine.device.events import UpdateAborted
from roundpipe_lightning.engine.engine import Engine
from roundpipe_lightning.engine.exchange.exchange import Exchange
from roundpipe_lightning.engine.exchange.hosts import Hosts
from roundpipe_lightning.engine.microbatch import loss_of
from roundpipe_lightning.engine.steps import StepOutputs, StepResult
from roundpipe_lightning.engine.store.block_layout import fingerprint
from roundpipe_lightning.engine.update.updater import Updater, update_units
from roundpipe_lightning.engine.whole_batch import ManualStep
from roundpipe_lightning.errors import StepModeError
from roundpipe_lightning.models.blocks import find_stacks
from roundpipe_lightning.models.losses.lazy_logits import FusedLosses, LossFusion
from roundpipe_lightning.planning.report.step_record import StepRecord, WorkerState
from roundpipe_lightning.precision import RoundPipePrecision
from roundpipe_lightning.strategy import compat
from roundpipe_lightning.strategy.hosts.data import GlobalBatch, HostPart, num_rows_of, own_draws
from roundpipe_lightning.strategy.logging import (
    LentMetrics,
    LogCall,
    host_log,
    log_means,
    log_noted,
    logged_from,
)
from roundpipe_lightning.strategy.microbatching import (
    Contents,
    MicrobatchedBatch,
    ModeChoice,
    outside_reader,
    shared_contents,
)
from roundpipe_lightning.strategy.options import Options, upload_dtype_of
from roundpipe_lightning.strategy.planning.inputs import PlanEvent, Planned, num_values
from roundpipe_lightning.strategy.planning.planner import StepPlanner
from roundpipe_lightning.strategy.step import InFlightBatch, loss_of_batch
from roundpipe_lightning.strategy.updates import parameter_watch
from roundpipe_lightning.strategy.updates.parameter_watch import ParameterWatch

PlanListener: TypeAlias = Callable[[PlanEvent], None]
"""Called in the Trainer's thread with each plan that is about to be run."""

StepListener: TypeAlias = Callable[[StepRecord], None]
"""Called in the Trainer's thread with each training step when it has ended."""

_MOST_OVERLAPPED = 16
"""Windows in a row whose last batch is not waited for: between batches memory is made anew."""


class NoBlocksWarning(UserWarning):
    """No stack of blocks was found in the module, so it runs as one stage."""


class PipelineRuntime:
    """From the strategy's set-up to its teardown; what it found out can be read afterwards, too.

    The engine opens with the first batch: what the training needs is known then, and checked.

    Args:
        precision: Gives the microbatch threads their context and the loss its scale.
        optimizers: The optimizers of a training; none for an evaluation.
        overlaps_on_host: Whether the optimizer's steps are made while other things go on where
            workers and optimizer share the processor; elsewhere they are.
        hosts: All hosts, where several have a part of each batch.
        step_listeners: Called with training steps that have ended, as early as that is known.

    Attributes:
        plan: The plan in use, that of the largest batch so far; before the first batch, one for the
            number of microbatches that was asked for.
        compiler: What compiles the blocks; None where they run as they are.
        updater: Steps the optimizer beside everything else; None before the first batch, or where
            nothing is overlapped.
        overlaps_updates: Whether the optimizer's steps are made while other things go on.
        is_stale: Whether a step computes with the values from before the last update.
        defers_update: Whether the optimizer's step after the present batch may wait for its end.
        watch: Knows who looks at parameters; None where nothing is overlapped.
        spent: Parameters whose gradients belong to a step that was made or submitted.
        in_flight: The batch whose gradients are still to come.

    Raises:
        PlanError: The given plan is for another model or another number of workers, a hint cannot
            be kept, or the machine cannot hold the model. Nothing has been allocated then.
    """

    _is_plain = False
    """Whether steps go forward as a whole before they go backward."""

    def __init__(  # noqa: PLR0913 - all but one keyword-only
        self,
        module: LightningModule,
        *,
        devices: Sequence[Device],
        precision: RoundPipePrecision,
        options: Options,
        computes_on_host: bool,
        optimizers: Sequence[Optimizer] = (),
        overlaps_on_host: bool = False,
        hosts: Hosts | None = None,
        plan_listeners: Sequence[PlanListener] = (),
        step_listeners: Sequence[StepListener] = (),
    ) -> None:
        self._module = module
        self.hosts = hosts
        self._devices = tuple(devices)
        self._precision = precision
        self._options = options
        self._optimizers = tuple(optimizers)
        dtype = upload_dtype_of(options, precision)
        self._upload_dtype = dtype if module.automatic_optimization else None
        self._stacks = find_stacks(module, options.block_names)
        if not self._stacks:
            warnings.warn(
                f"No stack of blocks was found in {type(module).__name__}: it trains as one stage, "
                "which every worker needs as a whole. Name the list of its layers, for example "
                "RoundPipeStrategy(blocks='model.layers').",
                category=NoBlocksWarning,
                stacklevel=2,
            )
        trainer = module.trainer
        self.planner = StepPlanner(
            module,
            stacks=self._stacks,
            devices=devices,
            computes_on_host=computes_on_host,
            precision=precision,
            options=options,
            optimizers=optimizers,
            num_nodes=1 if hosts is None else hosts.num,
            accumulates=trainer.accumulate_grad_batches != 1,
            clips=bool(trainer.gradient_clip_val),
            plain=self._is_plain,
        )
        self.plan = self.planner.first_plan()
        shares_memory = [device.shares_host_memory for device in devices]
        self._on_host, self._moves = all(shares_memory), not any(shares_memory)
        self.compiler = BlockCompiler() if options.compile else None
        self.is_stale = options.update == "async"
        self.overlaps_updates = (
            bool(optimizers)
            and module.automatic_optimization
            and (self.is_stale or overlaps_on_host or not self._on_host or hosts is not None)
        )
        self.updater: Updater | None = None
        self._begin_update: Callable[[Updater], None] | None = None
        self.defers_update = False
        self.watch: ParameterWatch | None = None
        self.spent: Sequence[Tensor] = ()
        self.in_flight: InFlightBatch | None = None
        self.last: InFlightBatch | None = None
        self._engine: Engine | None = None
        self._peak_device_bytes = 0
        self._previous: dict[nn.Parameter, Tensor] = {}  # from a checkpoint
        # Of an ended training: with what the next step would compute, and the parameters' marks.
        self._left: dict[nn.Parameter, tuple[Tensor, Any]] = {}
        self._num_overlapped = 0  # windows in a row
        self._assumed_rates = computes_on_host and self.planner.machine.name == "cpu"
        self._plan_listeners = plan_listeners
        self._step_listeners = step_listeners
        self._fusion = None if options.loss == "eager" else LossFusion(options.loss)
        self._metrics = LentMetrics(module, in_place=self._on_host)
        self._choice = ModeChoice(module, self._stacks, options)

    # The engine ----------------------------------------------------------------------------------

    def _open_engine(self) -> Engine:
        if self._engine is not None:
            return self._engine
        engine = Engine(
            self._module,
            stack=self._stacks,
            devices=self._devices,
            plan=self.plan,
            chain=self.planner.chain,
            timeout_seconds=self._options.timeout_seconds,
            compiler=self.compiler,
            upload_dtype=self._upload_dtype,
            trust_rows=self._options.trust_rows,
            apart=self._metrics.metrics,
        )
        with torch.inference_mode(mode=False):  # else the parameters could not be trained
            self._engine = engine.__enter__()
        engine.forms.contents = partial(shared_contents, self._module)
        engine.forms.read_outside = outside_reader()
        if self.overlaps_updates:
            units = update_units(self._module, self.blocks, shared=engine.store.shared)
            exchange = None if self.hosts is None else Exchange(self.hosts)
            self.updater = Updater(engine.store, units, stale=self.is_stale, exchange=exchange)
            if engine.store.copies is not None and exchange is None:
                engine.store.copies.written_by(self._optimizers)
            self.updater.restore(self._previous)
            self._previous = {}
            if self.watch is not None:
                self.watch.count_uses()
            if self.hosts is not None:
                self.hosts.control.serve = self.updater.make_whole
            begin, self._begin_update = self._begin_update, None
            if begin is not None:
                begin(self.updater)
        return engine

    def begin_update(self, begin: Callable[[Updater], None]) -> None:
        """Begin an update before its gradients come; of the first batch when the engine opens."""
        if self.updater is None:
            self._begin_update = begin
        else:
            begin(self.updater)

    @property
    def stacks(self) -> Sequence[BlockStack]:
        return self._stacks

    def end_step(self, error: BaseException | None = None, *, failed: bool = False) -> None:
        """Note that a batch's backward pass has run, or never will."""

    @property
    def blocks(self) -> dict[str, nn.Module]:
        return {n: b for s in self._stacks for n, b in zip(s.names, s.blocks, strict=True)}

    def close(self) -> None:
        updater, self.updater = self.updater, None
        if updater is not None:
            with suppress(Exception):  # of an update that nobody joined for
                previous = updater.previous_values()
                self._left = {p: (values, fingerprint(p)) for p, values in previous.items()}
            updater.close()
        self._peak_device_bytes = self.peak_device_bytes
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    # What others may look at ---------------------------------------------------------------------

    @property
    def last_step(self) -> StepRecord | None:
        """The record of the last training step that has ended; None before the first."""
        if self.last is None:
            return None
        return self.last.record(
            num_devices=len(self._devices) / self._options.workers_per_device,
            assumed_rates=self._assumed_rates,
        )

    @property
    def worker_states(self) -> list[WorkerState]:
        return [] if self._engine is None else self._engine.worker_states()

    @property
    def peak_device_bytes(self) -> int:
        workers = () if self._engine is None else self._engine.workers
        return max((worker.peak_bytes() for worker in workers), default=self._peak_device_bytes)

    @property
    def fused_losses(self) -> FusedLosses | None:
        return None if self._fusion is None else self._fusion.report

    # A training batch ----------------------------------------------------------------------------

    def training_step(self, batch: Any, *arguments: Any) -> STEP_OUTPUT:
        """Run a batch; its gradients wait in the returned loss until that is run backward.

        Args:
            batch: What the user's `training_step` is called with, on the host.

        Returns:
            What one call of `training_step` on the full batch would have returned.
        """
        if not self._module.automatic_optimization:
            return self._manual_step(batch, *arguments)
        trains = not compat.skips_backward(self._module.trainer)
        self._cast_again()
        if trains:  # every hook that may look at them has been called
            for parameter in self.spent:
                parameter.grad = None
            self.spent = ()
        output: STEP_OUTPUT = None
        ended: InFlightBatch | None = None
        with nullcontext() if trains else self._newest(), suppress(UpdateAborted):
            output, ended = self._microbatched_step(batch, arguments, trains=trains)
        if self.updater is not None:
            self.updater.join()  # raises what an update was given up for
        if ended is not None:
            self._batch_ended(ended, has_trained=trains and output is not None)
        return output

    def _microbatched_step(
        self, batch: Any, arguments: Sequence[Any], *, trains: bool
    ) -> tuple[STEP_OUTPUT, InFlightBatch | None]:
        """Run `training_step` on the microbatches; return what it gives, and the batch if it ended.

        A batch that has not ended is in flight then.
        """
        while True:
            cut = self._choice.begin(
                batch,
                arguments,
                count=self.planner.num_microbatches,
                is_whole=self._engine is not None and bool(self._engine.forms.whole),
                fusion=self._fusion,
                trains=trains,
            )
            cut.notes = self.hosts is not None
            try:
                present, known, logged, whole = self._run(cut, arguments, trains=trains)
            except StepModeError as error:
                if not self._choice.falls_back(batch, error):
                    raise
                continue
            break
        cut.end(self._module)
        size, output = None, known.outputs[0]["output"]
        shares, losses = cut.shares, list(known.losses)
        if whole is not None:
            present.weigh(whole.share)
            logged, size = whole.logged, whole.num_rows
            shares, losses = whole.shares, whole.losses
        loss = loss_of_batch(losses, shares)
        if len(losses) > 1:
            log_means(
                logged,
                shares=shares,
                losses=losses,
                log=self._module.log,
                batch_size=size,
                syncs=whole is not None,
                is_proven=cut.is_proven,
            )
        if len(cut.parts) > 1:
            output = loss
        ended = present.is_over or loss is None
        if ended:
            result: StepResult = present.end()
            cut.warn_of_changes(result.changed)
            if cut.contents is not None and loss is not None:
                self._choose(cut.contents, batch, arguments, result)
            if loss is not None and trains:
                loss = present.with_gradients(loss, result.gradients)
        elif loss is not None:
            self.in_flight = present
            loss = present.without_gradients(loss)
        if isinstance(output, Mapping) and loss is not None:
            return {**output, "loss": loss}, present if ended else None
        return loss, present if ended else None

    def _run(
        self, cut: MicrobatchedBatch, arguments: Sequence[Any], *, trains: bool
    ) -> tuple[InFlightBatch, StepOutputs, Sequence[Sequence[LogCall]], GlobalBatch | None]:
        """Run the parts of a batch until the user's steps have returned, or to the end.

        Other hosts are told of it as soon as the user's steps have returned.
        """
        is_one, hosts = len(cut.parts) == 1, self.hosts
        if hosts is not None:
            steps = self._module.trainer.global_step
            hosts.place = f"batch {self._batch_number}, after {steps} optimizer steps"
        calls: list[list[LogCall]] = [[] for _ in cut.parts]
        used: list[Any] = []
        scale = self._precision.loss_scale / self._module.trainer.accumulate_grad_batches
        planned = self._plan_for(cut, arguments)
        engine = self._open_engine()
        overlaps = trains and cut.contents is None and self._may_overlap()
        engine.forms.looks = cut.contents is not None

        seed = mix(torch.initial_seed(), self._batch_number)  # before a host has draws of its own
        noted = calls[0] if hosts is None else []
        step_of = self._step_of(
            "training_step",
            arguments,
            is_one=is_one,
            before_read=partial(log_noted, host_log(self._module), noted),
        )

        def call(view: Any, part: Any, index: int) -> Any:  # in the part's thread
            with cut.running(index):
                output = step_of(view, part)
            compat.check_output(output)
            cut.check_output(output)
            returned: dict[str, Any] = {
                "loss": loss_of(output),
                "logged": calls[index],
                "targets": cut.targets,
                "output": None,
            }
            if is_one:
                used.append(part)
                returned |= {"output": output, "metrics": self._metrics.states()}
            return returned

        logs = [host_log(self._module, into=each, is_part=True) for each in calls]
        if is_one:
            into = None if self._on_host and hosts is None else calls[0]
            logs = [host_log(self._module, into=into, syncs=hosts is not None)]

        def log(*args: Any, **kwargs: Any) -> None:
            if not used:  # else a block's recompute logs once more
                logs[cut.part](*args, **kwargs)

        with (
            self._metrics.lent(log, is_whole=is_one),
            nullcontext() if hosts is None else own_draws(hosts, self._batch_number),
        ):
            # A host has as many microbatches as its part of the batch gives.
            before = [] if hosts is None else hosts.control.objects(cut.num_microbatches)
            self._add_up(trains=trains)
            step = engine.begin_step(
                cut.parts,
                call,
                plan=planned.plan,
                loss_scales=[share * scale for share in cut.shares],
                backward=trains,
                joined=cut.joined,
                step_seed=seed,
                first_microbatch=0 if hosts is None else sum(before[: hosts.rank]),
                thread_context=self._precision.thread_context,
                outside=cut.outside,
                verify=cut.check_targets if cut.checks else None,
                writes_nothing=cut.is_proven,
            )
            try:
                self.synchronize(has_next=True)
            except BaseException:
                with suppress(Exception):
                    step.result()
                raise
            whole = None if hosts is None else self._joined(cut, step.returned(), hosts)
            known = step.outputs() if overlaps else step.result()
            if is_one:
                self._metrics.put_back(known.outputs[0]["metrics"])
        logged = [part["logged"] for part in known.outputs]
        if is_one and hosts is None and logged[0]:
            with logged_from(self._module, used[0]):
                log_noted(self._module.log, logged[0])
        present = InFlightBatch(
            step, planned=planned, num_values=sum(map(num_values, cut.parts)), backward_scale=scale
        )
        return present, known, logged, whole

    def _joined(self, cut: MicrobatchedBatch, known: StepOutputs, hosts: Hosts) -> GlobalBatch:
        """Put a batch together with what other hosts have of it; gradients may leave then."""
        part = HostPart(
            batch_number=self._batch_number,
            averages_over=cut.averages_over([part["targets"] for part in known.outputs]),
            num_rows=num_rows_of(cut.parts),
            shares=cut.shares,
            losses=list(known.losses),
            logged=[part["logged"] for part in known.outputs],
            is_asked=hosts.is_asked_to_stop,
        )
        whole = GlobalBatch(part, hosts)
        if self.updater is not None:
            self.updater.weigh(whole.share)
        return whole

    @property
    def _batch_number(self) -> int:
        return self._module.trainer.fit_loop.epoch_loop.batch_progress.total.ready

    def _choose(
        self, before: Contents, batch: Any, arguments: Sequence[Any], result: StepResult
    ) -> None:
        assert self._engine is not None
        reason = "it writes into attributes or buffers of modules" if result.wrote else ""
        if self._engine.forms.whole:
            name, why = next(iter(self._engine.forms.whole.items()))
            reason = f"block {name!r} runs on the whole batch: {why}"
        self._choice.decide(
            batch,
            arguments,
            before,
            num_microbatches=self.planner.num_microbatches,
            divided={form.lead for form in self._engine.forms.known.values() if form is not None},
            reason=reason,
        )

    def _plan_for(self, cut: MicrobatchedBatch, arguments: Sequence[Any]) -> Planned:
        """Return the plan for a batch and show it if the batch is the largest so far."""
        planned = self.planner.planned(
            cut.parts[0], arguments, count=cut.num_microbatches, joined=cut.joined
        )
        if self._plan_listeners:
            event = self.planner.event_of(planned, assumed_rates=self._assumed_rates)
            if event is not None:
                for listener in self._plan_listeners:
                    listener(event)
        plan = planned.plan
        if self._engine is not None and self._engine.chain is not self.planner.chain:
            self._engine.plan_for(self.planner.chain, plan)
            self.plan = plan
        if self.last is None or plan.num_microbatches >= self.plan.num_microbatches:
            self.plan = plan
        return planned

    # The batch in flight -------------------------------------------------------------------------

    def _may_overlap(self) -> bool:
        """Return whether nobody looks at the present batch's gradients before the next batch's."""
        trainer = self._module.trainer
        accumulates = compat.is_accumulating(trainer)
        defers = self.defers_update and self._moves and self._num_overlapped < _MOST_OVERLAPPED
        # Without a watch, who looks at gradients or writes weights in between would not wait.
        is_seen = self.watch is None or any(parameter_watch.gradient_hooks(trainer))
        if is_seen or not (accumulates or defers):
            self._num_overlapped = 0
            return False
        self._num_overlapped += not accumulates
        return True

    def _add_up(self, *, trains: bool) -> None:
        """Have the batch's gradients added to `.grad` before `backward` asks, where they may be."""
        trainer = self._module.trainer
        adds = trains and not (
            compat.begins_window(trainer)  # `.grad` is not zeroed yet
            or (self.is_stale and not compat.is_accumulating(trainer))  # the update takes `.grad`
            or type(self._precision) is not RoundPipePrecision
            or parameter_watch.reads_before_backward(trainer)
        )
        if self.updater is not None:
            self.updater.add_up(adds=adds)

    def synchronize(self, *, has_next: bool = False) -> None:
        """Wait for the batch in flight, if any, and hand out its gradients; raises its error."""
        batch, self.in_flight = self.in_flight, None
        if batch is not None and batch.hand_out(has_next=has_next):
            self._batch_ended(batch, has_trained=True)
        if has_next and self.updater is not None:
            self.updater.weigh(1.0 if self.hosts is None else None)

    @property
    def is_update_pending(self) -> bool:
        in_flight = self.in_flight is not None and self.in_flight.has_run_backward
        return in_flight or (self.updater is not None and not self.updater.is_joined)

    def finish_update(self) -> None:
        """Wait for the batch in flight, if its loss was run backward, and for its update.

        Raises what one of them has failed with, once.
        """
        if self.in_flight is not None and self.in_flight.has_run_backward:
            self.synchronize()
        if self.updater is not None:
            self.updater.join()

    def make_whole(self) -> None:
        """Wait for the update, and have all values here of which other hosts own a part.

        One host may call this alone: others take part when they next tell of something.
        """
        self.finish_update()
        if self.hosts is not None and self._engine is not None and self._engine.store.in_part:
            self.hosts.control.ask()

    @property
    def divides_parameters(self) -> bool:
        """Whether each of several hosts has a part of the parameters between two steps."""
        has_copies = self._upload_dtype is not None and self._moves
        return self.hosts is not None and has_copies

    @property
    def is_dividing(self) -> bool:
        """Whether hosts that have a part of the parameters wait for this one's gradients."""
        return self.divides_parameters and self.updater is not None and self.updater.is_awaited

    def _batch_ended(self, batch: InFlightBatch, *, has_trained: bool) -> None:
        """Call listeners, and let the planner know how long the step took."""
        self.last = batch
        if self._step_listeners:
            record = self.last_step
            assert record is not None
            for listener in self._step_listeners:
                listener(record)
        if not has_trained:
            return
        assert batch.timeline is not None
        assert batch.chain is not None
        if self.planner.take_chain(batch.chain):
            return  # the next step has a plan of its own
        self.planner.learn(
            batch.planned, batch.timeline, remaining_steps=_num_batches_left(self._module.trainer)
        )
        if self.plan is batch.plan:
            self.plan = batch.planned.plan

    # A batch that is not split -------------------------------------------------------------------

    def _manual_step(self, batch: Any, *arguments: Any) -> STEP_OUTPUT:
        """Run a `training_step` that steps its optimizers itself, on the full batch."""
        if self._on_host:
            return self._module.training_step(batch, *arguments)
        engine = self._open_engine()
        device = engine.workers[0].device
        call = self._step_of("training_step", arguments)
        names = {block: name for name, block in self.blocks.items()}
        step = ManualStep(
            self._module,
            blocks=list(names),
            device=device,
            apart=self._metrics.metrics,
            watched=lambda block: engine.forms.watched(block, names[block]),
        )
        with (
            self._metrics.lent(host_log(self._module)),
            # Checkpoints have the host's generators only; so a resumed run draws the same numbers.
            seeded(
                [each for each in device.generators() if each is not torch.default_generator],
                mix(torch.initial_seed(), self._batch_number),
            ),
        ):
            output: STEP_OUTPUT = step.run_step(call, batch)
        return output

    def evaluate(self, step_name: str, batch: Any, *arguments: Any) -> Any:
        """Run an evaluation step on the full batch, in this thread, on the newest parameters."""
        self.synchronize()
        with self._newest():
            self._cast_again()
            engine = self._open_engine()
            log = host_log(self._module, syncs=self.hosts is not None)
            with self._metrics.lent(log):
                call = self._step_of(step_name, arguments)
                return engine.evaluate(call, batch, outside=self._fusion)

    def _step_of(
        self,
        step_name: str,
        arguments: Sequence[Any],
        *,
        is_one: bool = True,
        **options: Callable[[], None],
    ) -> Callable[[Any, Any], Any]:
        """Return what calls a step of a view, with a batch or, if it is not one, a part of it.

        Options are as of `logged_from`.
        """

        def call(view: Any, here: Any) -> Any:
            with logged_from(self._module, here, **options) if is_one else nullcontext():
                output = getattr(view, step_name)(here, *arguments)
            return output if self._fusion is None else self._fusion.materialized(output)

        return call

    def _newest(self) -> AbstractContextManager[None]:
        return nullcontext() if self.updater is None else self.updater.latest()

    def _cast_again(self) -> None:
        """Mark 16-bit copies as old where others may have written to the weights.

        PyTorch counts writes, but for those through `parameter.data` and of compiled kernels.
        """
        copies, watch = None if self._engine is None else self._engine.store.copies, self.watch
        if copies is not None and (watch is None or watch.was_touched):
            copies.forget()
        if watch is not None:
            watch.was_touched = watch.may_be_kept

    # In a checkpoint -----------------------------------------------------------------------------

    def previous_parameters(self) -> dict[str, Tensor]:
        """Return the parameters of the next step where they are not those of the module."""
        if self.updater is not None:
            previous = dict(self.updater.previous_values())
        else:  # as long as the parameters are those that the training has made
            if any(fingerprint(p) != mark for p, (_, mark) in self._left.items()):
                self._left = {}
            previous = {p: values for p, (values, _) in self._left.items()}
        return {n: previous[p] for n, p in self._module.named_parameters() if p in previous}

    def load_previous_parameters(self, state: Mapping[str, Tensor]) -> None:
        if self.overlaps_updates and self.is_stale:
            known = dict(self._module.named_parameters())
            self._previous = {known[name]: values for name, values in state.items()}
            if self.updater is not None:
                self.updater.restore(self._previous)

    def state_dict(self) -> dict[str, Any]:
        """Return the state from which a resumed training plans and compiles again."""
        state = self.planner.state_dict()
        if self.compiler is not None:
            state["compiler"] = self.compiler.state_dict()
        state["microbatching"] = self._choice.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.planner.load_state_dict(state)
        self._choice.load_state_dict(state.get("microbatching", {}))
        if self.compiler is not None and "compiler" in state:
            self.compiler.load_state_dict(state["compiler"])


def _num_batches_left(trainer: Trainer) -> int | None:
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
