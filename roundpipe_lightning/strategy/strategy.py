"""`Trainer(strategy="roundpipe")`: one process, N stateless workers, all state in host memory."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial, partialmethod, wraps
from typing import Any, Literal, ParamSpec, TypeVar, cast

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator, CPUAccelerator
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.optim import Optimizer

from roundpipe_lightning.checkpoint.compatibility import (
    FROZEN_KEY,
    check_optimizer_options,
    check_optimizer_states,
    check_versions,
    describe_frozen,
    load_state,
    reading,
    split_frozen,
)
from roundpipe_lightning.checkpoint.io import RoundPipeAsyncCheckpointIO, RoundPipeCheckpointIO
from roundpipe_lightning.engine.device.accelerator import AcceleratorDevice
from roundpipe_lightning.engine.device.base import CpuDevice, Device
from roundpipe_lightning.engine.device.threads import add_note
from roundpipe_lightning.engine.exchange.hosts import Hosts
from roundpipe_lightning.engine.update.hosts_update import LatePart
from roundpipe_lightning.errors import CheckpointError, ConfigurationError
from roundpipe_lightning.models.losses.lazy_logits import FusedLosses, LossMode
from roundpipe_lightning.optim import HostAdamW
from roundpipe_lightning.planning.model.profile import ModelProfile
from roundpipe_lightning.planning.report.step_record import StepRecord, WorkerState
from roundpipe_lightning.planning.schedule.plan import Plan
from roundpipe_lightning.strategy import checks, compat
from roundpipe_lightning.strategy.hosts import agreement, data, launch
from roundpipe_lightning.strategy.hosts.data import BatchShares, divide_memory
from roundpipe_lightning.strategy.one_process import OneProcessStrategy
from roundpipe_lightning.strategy.one_step import OneStepRuntime
from roundpipe_lightning.strategy.options import (
    GradientFormat,
    HardwareSource,
    HintSource,
    Options,
    PlanSource,
)
from roundpipe_lightning.strategy.planning.inputs import find_machine, rate_name, widest_dtype
from roundpipe_lightning.strategy.resume.resume import ResumePoint
from roundpipe_lightning.strategy.runtime import (
    NoBlocksWarning,
    PipelineRuntime,
    PlanListener,
    StepListener,
)
from roundpipe_lightning.strategy.step import InFlightBatch
from roundpipe_lightning.strategy.updates import parameter_watch
from roundpipe_lightning.strategy.updates.optimizer_sync import OptimizerSync

__all__ = ["NoBlocksWarning", "RoundPipeStrategy"]

CHECKPOINT_KEY = "roundpipe"
CHECKPOINT_VERSION = 4
PREVIOUS_KEY = "previous_parameters"
"""Key of the parameters that the next step computes with, where the module has newer ones."""

SHARES_KEY = "host_shares"
"""Key of what hosts get of each batch, if that was measured."""

P = ParamSpec("P")
T = TypeVar("T")


def _without_stop_iteration(method: Callable[P, T]) -> Callable[P, T]:
    """Turn a `StopIteration` into an error: Lightning takes it for the end of the loader."""

    @wraps(method)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(*args, **kwargs)
        except StopIteration as error:
            if checks.takes_iterator(cast("RoundPipeStrategy", args[0])._module):  # noqa: SLF001
                raise  # it is the end of the loader
            refused = RuntimeError("StopIteration was raised, by code that is no iterator.")
            for note in getattr(error, "__notes__", ()):
                add_note(refused, note)
            raise refused from error

    return wrapped


class RoundPipeStrategy(OneProcessStrategy):
    """Trains through the round-robin pipeline; `Trainer(strategy="roundpipe")` has the defaults.

    The process is one, the workers are `Trainer(devices=N)` times `workers_per_device`. Parameters,
    gradients and optimizer state stay in host memory as ordinary tensors of the module.

    Args:
        num_microbatches: Into how many parts a training batch is split. `"auto"` is twice the
            number of workers, but not more than the batch has samples; a smaller last batch then
            runs with fewer. With a number of your own, a smaller batch is an error.
        plan: A `Plan`, the path of a saved one, or `"auto"`: made for the model, the machine and
            the shape of the batches, see docs/planning.md.
        update: `"exact"`: the results are those of plain synchronous training. `"async"`: every
            step computes with parameters that are one update older, see docs/updates.md.
        check_gradients: Whether a step is refused whose gradients are not finite, and block and
            parameter are named; `Trainer(detect_anomaly=True)` asks for it, too.
        recompute: `"full"`: BACKWARD stages run their blocks again. `"selective"`: all but fused
            attention, whose outputs are kept from the forward pass. `"none"`: the fused stage has
            all blocks, so nothing runs twice and every worker needs the memory for it. `"auto"`:
            what is faster, as predicted, and fits.
        blocks: Dotted name or names of the module lists that are the blocks; None finds them.
        loss: `"auto"`: a microbatch's cross-entropy is computed without whole logits where these
            would be larger than 256 MiB in float32; then the result differs in rounding. `"eager"`
            never does that, `"fused"` wherever it can.
        microbatching: `"blocks"`: `training_step` runs once, on the whole batch, and microbatches
            exist inside the calls of blocks: losses, logs and state are those of one device.
            `"step"`: it runs once per microbatch, which is faster; the same only where the loss is
            a mean over samples, or over the targets that `cross_entropy` counts. `"auto"`: `"step"`
            where that is proven.
        trust_rows: Whether blocks are run on pieces of the batch without a look whether its rows
            are independent.
        hardware: The machine: a `HardwareSpec`, the name of one (`"rtx4090x8"`) or the path of a
            file. `"auto"`: the one at hand; its accelerators are measured once, of a processor only
            the memory counts. Memory is checked before anything is allocated.
        timeout_seconds: After so many seconds without progress a step is given up with a report.
        host_share: On several hosts, how much of each batch this one gets, beside the numbers of
            the others: its tokens per second, say. `"auto"`: as fast as its devices are.
            `"measured"`: the same, and from about the tenth batch on by what was measured.
        memory_share: On several hosts, this one's part of masters, sums of gradients and
            optimizer's state, between 0 and 1; all hosts' are 1 together. `"auto"`: as much each.
        workers_per_device: Workers that share each device.
        hints: Constraints on the stages of a plan that is made: `PartitionHints`, or a
            mapping with the keys of `conf/partition`.
        replan: Whether a plan that was made is improved from measured times while training runs.
        dry_run: Whether `training_step` is run once without values, on a copy of the module, to
            learn what it computes. Without, plans follow from the parameters alone.
        compile: Whether blocks run compiled (`torch.compile`) from the second step on, once per
            kind of block. Results then differ in rounding.
        exclude_frozen_parameters: Whether checkpoints leave out what is not trained. The module
            must then build its base by itself, in `__init__` or `configure_model`, before one is
            loaded; another base is refused.
        upload_dtype: With `Trainer(precision="bf16-mixed")`, `"bf16"`: matrices of blocks, and of
            an LM head that is not tied, are rounded on the host, once per update, and uploaded in
            half the bytes, where autocast would round them; see docs/precision.md. `"fp16"` with
            `16-mixed`. `"auto"`: as the precision is. None: they are uploaded as they are.
        gradient_dtype: What gradients are summed up in on the host, over rounds and batches:
            `"fp32"` or `"bf16"`; None: the parameters' dtype. See docs/updates.md.
        stochastic_rounding: For `Trainer(precision="bf16-true")`: the optimizer steps in float32
            and its results are rounded to bfloat16 without bias, see docs/precision.md.
        accelerator: Set by the Trainer.
        parallel_devices: Set by the Trainer.
        cluster_environment: Set by the Trainer.
        checkpoint_io: How checkpoints are written; None is `RoundPipeCheckpointIO`.
        precision_plugin: None takes `Trainer(precision=...)`.

    Raises:
        ConfigurationError: A setting cannot work.
    """

    strategy_name = "roundpipe"

    _overlaps_on_host = False
    """Whether `update="exact"` overlaps on CPU workers, too, which have no cores left for it."""

    def __init__(  # noqa: PLR0913 - all keyword-only, each a setting of its own
        self,
        *,
        num_microbatches: int | Literal["auto"] = "auto",
        plan: PlanSource = "auto",
        update: str = "exact",
        check_gradients: bool = False,
        recompute: str = "auto",
        blocks: str | Sequence[str] | None = None,
        loss: LossMode = "auto",
        microbatching: str = "auto",
        trust_rows: bool = False,
        hardware: HardwareSource = "auto",
        timeout_seconds: float = 600.0,
        host_share: float | Literal["auto", "measured"] = "auto",
        memory_share: float | Literal["auto"] = "auto",
        workers_per_device: int = 1,
        hints: HintSource = None,
        replan: bool = True,
        dry_run: bool = True,
        compile: bool = False,  # noqa: A002 - the word that Lightning users know
        exclude_frozen_parameters: bool = False,
        upload_dtype: str | None = "auto",
        gradient_dtype: str | None = None,
        stochastic_rounding: bool = False,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        given = locals()
        self.options = Options(**{field.name: given[field.name] for field in fields(Options)})
        self.stochastic_rounding = stochastic_rounding
        self._given: dict[str, Any] = {
            "accelerator": accelerator,
            "parallel_devices": parallel_devices,
            "cluster_environment": cluster_environment,
            "checkpoint_io": checkpoint_io,
            "precision_plugin": precision_plugin,
        }
        self._begin()
        self.exclude_frozen_parameters = exclude_frozen_parameters
        """Whether checkpoints leave out what is not trained."""
        self.host_settings: dict[str, Any] = {}
        """Settings by name that must be the same on all hosts, besides those that are known."""
        self.plan_listeners: list[PlanListener] = []
        """Called in the Trainer's thread with each plan that is about to be run."""
        self.step_listeners: list[StepListener] = []
        """Called in the Trainer's thread with each training step when it has ended.

        Nothing waits for that: with batches in flight it is after the next one has begun.
        """

    def _begin(self) -> None:
        """Set what belongs to one Trainer as it is before there is one."""
        super().__init__(**self._given)
        self._set_down()
        self.num_nodes, self.world_size, self._rank = 1, 1, 0
        self._hosts = None

    def _set_down(self) -> None:
        """Set what a set-up makes as it is before there is one."""
        self._runtime: PipelineRuntime | None = None
        self._fit_runtime: PipelineRuntime | None = None
        self._optimizer_sync: OptimizerSync | None = None
        self._gradient_format: GradientFormat | None = None
        self._resume = ResumePoint()
        self._loaded: dict[str, Any] | None = None
        self._late_parts: list[LatePart] = []
        self._host_shares: BatchShares | None = None
        self._come_late = False  # what other hosts have of a checkpoint
        self._has_failed = False
        self._num_threads: int | None = None
        self._is_set_up = False  # the end of background work is certain to be waited for

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what a set-up has made: threads and memory belong to this object alone."""
        copied = object.__new__(type(self))
        copied.__dict__.update(vars(self))
        copied._set_down()
        state: dict[str, Any] = super(RoundPipeStrategy, copied).__getstate__()
        return state

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    # What others may look at ---------------------------------------------------------------------

    @property
    def num_workers(self) -> int:
        return len(self.parallel_devices or ()) * self.options.workers_per_device

    @property
    def num_microbatches(self) -> int:
        if self.plan is not None:
            return self.plan.num_microbatches
        wanted = self._wanted_microbatches
        return max(1, 2 * self.num_workers) if wanted == "auto" else wanted

    @property
    def _wanted_microbatches(self) -> int | Literal["auto"]:
        plan = self.options.given_plan
        return self.options.num_microbatches if plan is None else plan.num_microbatches

    @property
    def plan(self) -> Plan | None:
        """The plan in use, that of the largest batch so far; None before the first set-up.

        Until the first batch it is one that follows from the parameters.
        """
        return self._seen.plan if self._seen else None

    @property
    def profile(self) -> ModelProfile | None:
        """The model as the planner sees it; None before the first set-up."""
        return self._seen.planner.profile if self._seen else None

    @property
    def last_step(self) -> StepRecord | None:
        """Record of the last training step, whose end is waited for; None before."""
        return self._seen.last_step if self._seen and self._last else None

    @property
    def is_in_flight(self) -> bool:
        """Whether the backward pass of the last batch still runs; asking does not wait for it."""
        return self._seen is not None and self._seen.in_flight is not None

    @property
    def worker_states(self) -> list[WorkerState]:
        """What every worker does at this moment, to any thread; empty where no step runs."""
        return self._seen.worker_states if self._seen else []

    @property
    def peak_device_bytes(self) -> int | None:
        """The most memory in use on one worker; None before the first set-up."""
        return self._seen.peak_device_bytes if self._seen else None

    @property
    def fused_losses(self) -> FusedLosses | None:
        return self._seen.fused_losses if self._seen else None

    @property
    def _seen(self) -> PipelineRuntime | None:
        """The last one that trained, else the last one; evaluation after fit hides nothing."""
        return self._fit_runtime or self._runtime

    @property
    def _last(self) -> InFlightBatch | None:
        if self._seen is None:
            return None
        self._seen.synchronize()
        return self._seen.last

    @property
    def _accelerator(self) -> Accelerator | None:
        """Accelerator that `__init__` was given; Lightning asks for it when a Trainer is made.

        So a strategy object serves several Trainers, one after the other: nothing else says when
        the next one begins, and what the last one has set would look like the user's own settings.
        """
        checks.check_trainer_is_alone(is_alone=not self._is_set_up)
        self._begin()
        given: Accelerator | None = self._given["accelerator"]
        return given

    @_accelerator.setter
    def _accelerator(self, accelerator: Accelerator | None) -> None:
        self._trainers_accelerator = accelerator

    # Set-up and teardown -------------------------------------------------------------------------

    def _devices(self) -> list[Device]:
        devices = (self.parallel_devices or []) * self.options.workers_per_device
        self.precision_plugin.compute_device_type = devices[0].type
        return [
            CpuDevice(index) if device.type == "cpu" else AcceleratorDevice(device)
            for index, device in enumerate(devices)
        ]

    def _speed(self) -> float:
        """Operations per second of this host's devices."""
        devices, options = self.parallel_devices or [], self.options
        machine = find_machine(
            options.hardware,
            num_workers=len(devices),
            workers_per_device=1,
            computes_on_host=self._computes_on_host,
            accelerators=[device for device in devices if device.type != "cpu"],
        )
        dtype = self.precision_plugin.autocast_dtype or widest_dtype(self._module)
        return machine.operations_per_second(rate_name(machine, dtype))

    def setup(self, trainer: Trainer) -> None:
        connected = compat.parallel_devices(trainer)
        checks.check_trainer_is_alone(is_alone=connected is self.parallel_devices)
        fits = trainer.state.fn == TrainerFn.FITTING
        module, options = self._module, self.options
        self._num_threads = torch.get_num_threads()
        if (
            isinstance(trainer.accelerator, CPUAccelerator)
            and self.num_workers >= self._num_threads
        ):
            # CPU workers take every core. Intra-op threads of this thread that wait for one another
            # there cost far more than they save: steps took four times as long on two cores.
            torch.set_num_threads(1)
        if fits:
            self._runtime = self._fit_runtime = None  # an earlier run's batches say nothing
            self._resume = ResumePoint()
            checks.check_module(
                module,
                num_microbatches=self._wanted_microbatches,
                microbatching=options.microbatching,
                update=options.update,
            )
            checks.tell_of_compiled_modules(module)
        self._is_set_up = True
        if self.num_nodes > 1:
            self._check_on_hosts(trainer)
        super().setup(trainer)
        if not module.automatic_optimization:
            options = replace(options, num_microbatches=1)
        devices = self._devices()
        if not all(device.shares_host_memory for device in devices):
            checks.check_steps(module, trainer.state.fn)
        self._runtime = self._runtime_class(devices)(
            module,
            devices=devices,
            precision=self.precision_plugin,
            options=options,
            computes_on_host=self._computes_on_host,
            optimizers=self.optimizers if fits else (),
            overlaps_on_host=self._overlaps_on_host,
            hosts=self._hosts,
            plan_listeners=self.plan_listeners,
            step_listeners=self.step_listeners,
        )
        if fits:
            self._fit_runtime = self._runtime
            self._optimizer_sync = OptimizerSync(
                module,
                optimizers=self.optimizers,
                runtime=self._runtime,
                precision=self.precision_plugin,
                check_gradients=options.check_gradients or compat.detects_anomalies(trainer),
                is_writing=lambda: self._writer is not None,
            )

    def _runtime_class(self, devices: Sequence[Device]) -> type[PipelineRuntime]:
        on_host = all(device.shares_host_memory for device in devices)
        runs_once = os.environ.get("ROUNDPIPE_ONE_STEP") and self.options.update == "exact"
        if on_host and runs_once and self._hosts is None and not self.options.compile:
            return OneStepRuntime
        return PipelineRuntime

    def setup_environment(self) -> None:
        super().setup_environment()
        if self.num_nodes > 1:
            assert self.cluster_environment is not None
            self._hosts = launch.connect(
                self.cluster_environment,
                rank=self._rank,
                num_nodes=self.num_nodes,
                timeout_seconds=self.options.timeout_seconds,
            )
            self._hosts.watch.trains = True

    def _check_on_hosts(self, trainer: Trainer) -> None:
        """Refuse what does not work on several hosts yet."""
        self._divides_data = not compat.divides_no_data(trainer)
        assert self._hosts is not None
        self._hosts.travels = partial(agreement.ending_exception, trainer)
        self._host_shares = BatchShares(
            self._hosts, self.options, speed=self._speed, epoch=lambda: trainer.current_epoch
        )
        divide_memory(self._hosts, self.options)
        if self.options.host_share == "measured":
            if not self._divides_data:
                raise ConfigurationError(
                    "host_share='measured' with Trainer(use_distributed_sampler=False): you divide "
                    "the samples yourself. Leave one of the two out."
                )
            self.step_listeners.append(self._host_shares.step_ended)
        if trainer.state.fn == TrainerFn.PREDICTING:
            raise ConfigurationError("predict() does not work on several hosts: set num_nodes=1.")
        if trainer.state.fn == TrainerFn.FITTING:
            self._hosts.is_asked_to_stop = self._hosts.stops = False
            compat.defer_sigterm(trainer, partial(setattr, self._hosts, "is_asked_to_stop", True))
            agreement.check_supported(
                self._module,
                options=self.options,
                precision=self.precision_plugin,
                checks_gradients=self.options.check_gradients or compat.detects_anomalies(trainer),
                hooks=parameter_watch.gradient_hooks(trainer),
            )
        else:  # this host ends before its next batch, and the others lose it
            compat.defer_sigterm(trainer, partial(compat.stop_after_batch, trainer))

    def setup_optimizers(self, trainer: Trainer) -> None:
        precision = self.precision_plugin
        self._gradient_format = GradientFormat(self.options, precision)
        self._gradient_format.begin(self._module)
        with checks.several_optimizers_explained(self._module):
            super().setup_optimizers(trainer)
        checks.check_optimizers(
            self._module, self.optimizers, update=self.options.update, precision=precision
        )
        if self.num_nodes > 1:
            agreement.check_optimizers(self.optimizers)
        widened = [o for o in self.optimizers if precision.widens(o)]
        self._gradient_format.check(self.optimizers, widened=widened)

    def on_exception(self, exception: BaseException) -> None:
        """Let the last step end; what the optimizer raises besides is not the cause."""
        self._has_failed = True
        if self._hosts is not None:  # nobody is waited for: others cannot know of the error
            is_agreed = isinstance(exception, SIGTERMException) and self._optimizer_sync is not None
            self._hosts.close(exception, is_agreed=is_agreed)
        if self._runtime is not None:
            with contextlib.suppress(Exception):
                self._runtime.end_step(exception)
        with contextlib.suppress(Exception):
            self.join_updates()
        super().on_exception(exception)

    def teardown(self) -> None:
        """Close the engine, give the Trainer its callbacks back, then let Lightning clean up.

        Raises:
            CheckpointError: A checkpoint could not be written in the background.
        """
        if self._runtime is not None:
            self._runtime.close()
        if self._host_shares is not None and self._host_shares.step_ended in self.step_listeners:
            self.step_listeners.remove(self._host_shares.step_ended)
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)
            self._num_threads = None
        self._resume.end()
        self._loaded = None
        sync, self._optimizer_sync = self._optimizer_sync, None
        if sync is not None:
            sync.close()
        if self._gradient_format is not None:
            self._gradient_format.end()
        for optimizer in self.optimizers:
            if isinstance(optimizer, HostAdamW):
                optimizer.close()  # its threads; the state stays
        has_failed, self._has_failed, self._is_set_up = self._has_failed, False, False
        # Lightning would bring the module to the host, which it has not left: tensors without
        # values, say, could not come, and that would hide the error that names them.
        module, self._lightning_module = self._lightning_module, None
        try:
            super().teardown()
        except CheckpointError as error:
            if not has_failed:
                raise
            warnings.warn(f"A checkpoint was lost besides: {error}", stacklevel=2)
        finally:
            self._lightning_module = module
            if self._hosts is not None:
                self._hosts.watch.trains = False
            if has_failed and self._hosts is not None:
                self._hosts = None
                launch.disconnect()  # the others notice at once

    # Batches -------------------------------------------------------------------------------------

    def process_dataloader(self, dataloader: object) -> object:
        """Give loaders of training batches a position that can be saved."""
        trainer = self._module.trainer
        if trainer.sanity_checking:
            self._resume.sanity_check_begins()
        if self._hosts is not None and self._divides_data:
            assert self._host_shares is not None
            dataloader = data.divided(
                dataloader, self._hosts, self._host_shares, trains=trainer.training
            )
        return self._resume.train_loader(dataloader) if trainer.training else dataloader

    def on_train_start(self) -> None:
        """Go on where the checkpoint was written, if one was loaded."""
        super().on_train_start()
        self._resume.training_begins(self._module.trainer)
        if self._hosts is not None:
            agreement.check_same(
                self._hosts,
                self._module.trainer,
                self.options,
                settings={
                    "the form of checkpoints": getattr(self.checkpoint_io, "form", None),
                    **self.host_settings,
                },
            )

    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        if self._module.trainer.training:
            self._resume.batch_begins(self._module.trainer)
        return super().batch_to_device(batch, device, dataloader_idx)

    @_without_stop_iteration
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        with self.precision_plugin.train_step_context():
            assert self._runtime is not None
            if self._host_shares is not None:
                self._host_shares.batch_begins(args[0])
            output = self._runtime.training_step(*args, *kwargs.values())
            if self._host_shares is not None:
                self._host_shares.measure(self._runtime.synchronize)
            if self._hosts is not None and self._hosts.stops:
                compat.stop_after_batch(self._module.trainer)
            return output

    @_without_stop_iteration
    def _evaluate(self, step_name: str, context: str, *args: Any, **kwargs: Any) -> Any:
        assert self._runtime is not None
        given = (*args, *kwargs.values())
        self._evaluated = f"{step_name} {[each for each in given[1:] if isinstance(each, int)]}"
        try:
            with getattr(self.precision_plugin, context)():
                return self._runtime.evaluate(step_name, *given)
        finally:
            self._evaluated = ""

    validation_step = partialmethod(_evaluate, "validation_step", "val_step_context")
    test_step = partialmethod(_evaluate, "test_step", "test_step_context")
    predict_step = partialmethod(_evaluate, "predict_step", "predict_step_context")

    def on_validation_start(self) -> None:
        super().on_validation_start()
        if not self._module.trainer.sanity_checking:
            self._resume.validation_begins()

    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        if self._runtime is not None and self._module.automatic_optimization:
            self._runtime.end_step()
        self._resume.gradients_were_added()

    # Updates -------------------------------------------------------------------------------------

    @property
    def _writer(self) -> RoundPipeAsyncCheckpointIO | None:
        """What writes a checkpoint meanwhile, and reads parameters where they are."""
        io = self._checkpoint_io
        if isinstance(io, RoundPipeAsyncCheckpointIO) and not io.snapshots.is_idle:
            return io
        return None

    @_without_stop_iteration
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        lightnings = super().optimizer_step

        def computed() -> Any:
            loss = closure()
            if (writer := self._writer) is not None:  # it went on during the batch
                parameters = (p for p in self._module.parameters() if not p.requires_grad)
                writer.release(unchanged=[p.untyped_storage() for p in parameters])
            return loss

        def make(closure: Callable[[], Any]) -> Any:
            return lightnings(optimizer, closure, model, **kwargs)

        if self._optimizer_sync is None or not self._module.automatic_optimization:
            return make(computed)
        return self._optimizer_sync.step(optimizer, computed, make=make, has_arguments=bool(kwargs))

    def join_updates(self) -> None:
        """Wait for the optimizer: parameters and its state are then those after the last step.

        Raises:
            Exception: What the optimizer has raised, once, or the batch that it waited for.
        """
        if self._runtime is not None:
            self._runtime.synchronize()
        if self._optimizer_sync is not None:
            self._optimizer_sync.join()

    def on_train_end(self) -> None:
        """Leave the gradients of a window that was not filled, as on one device."""
        self.join_updates()
        if self._runtime is not None:
            self._runtime.make_whole()
        super().on_train_end()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        self.join_updates()
        if self._hosts is None:
            return super().optimizer_state(optimizer)
        updater = None if self._runtime is None else self._runtime.updater
        if updater is None or updater.hosts is None:
            raise CheckpointError(
                "On several hosts the optimizer's state can be saved while a training runs only: "
                "by ModelCheckpoint, or in on_train_end. save_checkpoint(weights_only=True) works."
            )
        self._hosts.control.objects(None)  # a callback's `state_dict` may have read parameters
        state, parts = updater.hosts.whole_state(optimizer, comes_late=self._come_late)
        self._late_parts += parts
        return state

    def _may_come_late(self) -> bool:
        """Whether values may come while they are written: nobody looks at them before."""
        trainer: Any = self._module.trainer
        idle = (LightningModule.on_save_checkpoint, Callback.on_save_checkpoint)
        hooks = (self._module, *trainer.callbacks)
        found = (each.on_save_checkpoint for each in hooks)  # in the object itself, perhaps
        looks = any(getattr(hook, "__func__", None) not in idle for hook in found)
        return type(self.checkpoint_io) is RoundPipeCheckpointIO and not looks

    def lightning_module_state_dict(self) -> dict[str, Any]:
        self.join_updates()
        updater = None if self._runtime is None else self._runtime.updater
        self._late_parts = []
        if self._runtime is not None and self._hosts is not None and updater is not None:
            self._come_late = all(self._hosts.control.objects(self._may_come_late()))
            if not self._come_late:
                self._runtime.make_whole()
        if self._runtime is not None and self._runtime.watch is not None:
            self._runtime.watch.may_be_kept = True  # by who is given the checkpoint
        state = super().lightning_module_state_dict()
        return split_frozen(self._module, state)[0] if self.exclude_frozen_parameters else state

    # Saving --------------------------------------------------------------------------------------

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        """Write a plain Lightning checkpoint, with optimizer states also what resuming needs."""
        module, runtime = self._module, self._seen
        if self._hosts is not None:
            progress = module.trainer.fit_loop.epoch_loop.batch_progress.current
            if compat.is_accumulating(module.trainer) and progress.ready:
                raise CheckpointError(
                    "Several hosts cannot save between the batches of an accumulation window yet. "
                    "Save when the optimizer has stepped: with every_n_train_steps or at its end."
                )
        if self.exclude_frozen_parameters:
            _, frozen = split_frozen(module, module.state_dict())
            if frozen:
                checkpoint = {**checkpoint, FROZEN_KEY: describe_frozen(module, frozen)}
        if runtime is not None and "optimizer_states" in checkpoint:
            checkpoint = {
                **checkpoint,
                CHECKPOINT_KEY: {
                    "format_version": CHECKPOINT_VERSION,
                    **self._resume.state(module.trainer),
                    "planning": runtime.state_dict(),
                    PREVIOUS_KEY: runtime.previous_parameters(),
                    SHARES_KEY: self._host_shares and self._host_shares.state(),
                },
            }
        if self._hosts is None:
            self._write_alone(checkpoint, filepath, storage_options)
        else:
            self._write_on_hosts(self._hosts, checkpoint, filepath, storage_options)

    def _write_alone(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any) -> None:
        io = self.checkpoint_io
        if not isinstance(io, RoundPipeAsyncCheckpointIO):
            super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
            return
        io.save_checkpoint(checkpoint, filepath, storage_options, steady=self._steady_memory())
        if not self._is_set_up or _some_logger_reads(self._module.trainer):
            io.wait()

    def _write_on_hosts(
        self, hosts: Hosts, checkpoint: dict[str, Any], filepath: Any, storage_options: Any
    ) -> None:
        """Write a checkpoint to which each host brings what it has, when it is to be written.

        If it could not be written, a CheckpointError is raised on all hosts, so that all may go on.
        """
        io, updater = self.checkpoint_io, None if self._runtime is None else self._runtime.updater
        hosts.control.objects(None)  # hooks that read parameters, which brings them, are over
        late, self._late_parts = self._late_parts, []
        if updater is not None:
            late += updater.late_values()
        if isinstance(io, RoundPipeCheckpointIO) and io.writes_parts(filepath, storage_options):
            values = updater.hosts.owned_values() if updater and updater.hosts else []
            io.save_part(
                checkpoint,
                filepath,
                owned=[*values, *(part.owned for part in late if part.owned is not None)],
                rank=hosts.rank,
                share=hosts.control.objects,
            )
            return
        if self.is_global_zero:
            try:
                self._write_with_parts(hosts, late, checkpoint, filepath, storage_options)
            except CheckpointError as error:
                hosts.control.objects(str(error))
                raise
            hosts.control.objects(None)
            return
        while True:
            asked: Any = hosts.control.objects(None)[0]
            if not isinstance(asked, int):
                break
            late[asked].bring()
        if asked is not None:
            raise CheckpointError(f"On host 0: {asked}")

    def _write_with_parts(
        self,
        hosts: Hosts,
        late: Sequence[LatePart],
        checkpoint: dict[str, Any],
        filepath: Any,
        storage_options: Any,
    ) -> None:
        """Write a checkpoint on host 0."""
        numbers = {part.storage._cdata: number for number, part in enumerate(late)}  # noqa: SLF001 - torch's key for a storage

        def bring(number: int) -> None:
            hosts.control.objects(number)
            late[number].bring()

        @contextlib.contextmanager
        def take(storage: torch.UntypedStorage) -> Iterator[torch.UntypedStorage]:
            number = numbers.get(storage._cdata)  # noqa: SLF001
            if number is not None:
                bring(number)
            try:
                yield storage
            finally:
                if number is not None:
                    late[number].release()

        io: Any = self.checkpoint_io
        if late and storage_options is None and io.save_taken(checkpoint, filepath, take=take):
            return
        for number in range(len(late)):
            bring(number)
        self._write_alone(checkpoint, filepath, storage_options)
        for part in late:
            part.release()

    def _steady_memory(self) -> list[torch.UntypedStorage]:
        """Memory that only an optimizer step changes; none where a callback changes weights."""
        averaging = (StochasticWeightAveraging, WeightAveraging)
        callbacks: Any = self._module.trainer.callbacks  # type: ignore[attr-defined]
        if any(isinstance(callback, averaging) for callback in callbacks):
            return []
        states = (state for optimizer in self.optimizers for state in optimizer.state.values())
        held = [value for state in states for value in state.values() if isinstance(value, Tensor)]
        tensors = [*self._module.parameters(), *held]
        return [value.untyped_storage() for value in tensors if value.device.type == "cpu"]

    # Loading -------------------------------------------------------------------------------------

    def load_checkpoint(
        self,
        checkpoint_path: Any,
        weights_only: bool | None = None,  # noqa: FBT001 - Lightning's signature
    ) -> dict[str, Any]:
        """Read a checkpoint; what is trained is about to be replaced.

        Returns:
            Lightning's entries, which hooks are given. Our own waits for the optimizers.

        Raises:
            CheckpointError: It cannot be read, or a newer version wrote it.
        """
        if self._runtime is not None and self._runtime.updater is not None:
            self._runtime.updater.forget()
            self._runtime.make_whole()
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
        check_versions(checkpoint, path=checkpoint_path, form=CHECKPOINT_VERSION)
        self._loaded = checkpoint.pop(CHECKPOINT_KEY, None)
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:  # noqa: FBT001, FBT002 - Lightning's signature
        """Restore the module; the base that a checkpoint leaves out must be there already.

        Raises:
            CheckpointError: The checkpoint is of another model, or the base is another one.
        """
        # `setup` would convert it later: values in 64 bits would pass through 32.
        module = self.precision_plugin.convert_module(self._module)
        load_state(module, checkpoint, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the optimizers and, if the checkpoint has it, what else a resumed run needs.

        Raises:
            CheckpointError: The optimizers are others than the checkpoint's.
        """
        check_optimizer_states(self.optimizers, checkpoint["optimizer_states"])
        with reading("optimizer_states"):
            super().load_optimizer_state_dict(checkpoint)
        check_optimizer_options(self.optimizers)
        ours, self._loaded = self._loaded, None
        if ours is None:
            return
        with reading(f"entry '{CHECKPOINT_KEY}'"):
            self._resume.load(self._module.trainer, ours, checkpoint.get("loops", {}))
            if self._host_shares is not None:
                self._host_shares.load(ours.get(SHARES_KEY))
            if self._runtime is None:
                return
            if ours.get("planning") is not None:
                self._runtime.load_state_dict(ours["planning"])
            self._runtime.load_previous_parameters(ours.get(PREVIOUS_KEY, {}))


def _some_logger_reads(trainer: Trainer) -> bool:
    known = (CSVLogger, TensorBoardLogger)
    return any(
        type(logger).after_save_checkpoint is not Logger.after_save_checkpoint
        for logger in trainer.loggers
        if not isinstance(logger, known)
    )
