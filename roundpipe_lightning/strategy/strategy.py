"""`Trainer(strategy="roundpipe")`: one process, N stateless workers, all state in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, NoReturn, TypeVar

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor

from roundpipe_lightning.engine.device.accelerator import AcceleratorDevice
from roundpipe_lightning.engine.device.base import CpuDevice, Device
from roundpipe_lightning.models.losses.lazy_logits import FusedLosses, LossMode
from roundpipe_lightning.models.weights import MicrobatchWeight
from roundpipe_lightning.planning.model.profile import ModelProfile
from roundpipe_lightning.planning.report.step_record import StepRecord
from roundpipe_lightning.planning.schedule.plan import Plan
from roundpipe_lightning.planning.schedule.timeline import Timeline
from roundpipe_lightning.precision import RoundPipePrecision
from roundpipe_lightning.strategy import checks, compat
from roundpipe_lightning.strategy.accelerator import with_workers
from roundpipe_lightning.strategy.checkpointing import CheckpointingStrategy
from roundpipe_lightning.strategy.options import (
    HardwareSource,
    HintSource,
    Options,
    PlanSource,
)
from roundpipe_lightning.strategy.plan_listeners import PlanWatcher, StepWatcher
from roundpipe_lightning.strategy.runtime import NoBlocksWarning, Session

__all__ = ["NoBlocksWarning", "RoundPipeStrategy"]

T = TypeVar("T")


class RoundPipeStrategy(CheckpointingStrategy):
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
        microbatch_weight: What a microbatch's share in the loss follows: `"tokens"`, `"samples"`,
            `"auto"` (tokens where there are labels, else samples) or a function of the microbatch.
        loss: `"auto"`: a microbatch's cross-entropy is computed without whole logits where these
            would be larger than 256 MiB in float32; then the result differs in rounding. `"eager"`
            never does that, `"fused"` wherever it can.
        hardware: The machine: a `HardwareSpec`, the name of one (`"rtx4090x8"`) or the path of a
            file. `"auto"`: the one at hand; its accelerators are measured once, of a processor only
            the memory counts. Memory is checked before anything is allocated.
        timeout_seconds: After so many seconds without progress a step is given up with a report.
        workers_per_device: Workers that share each device.
        hints: What is settled about the stages of a plan that is made: `PartitionHints`, or a
            mapping with the keys of `conf/partition`.
        replan: Whether a plan that was made is improved from measured times while training runs.
        trial_run: Whether `training_step` is run once without values, on a copy of the module, to
            learn what it computes. Without, plans follow from the parameters alone.
        compile: Whether blocks run compiled (`torch.compile`) from the second step on, once per
            kind of block. Results then differ in rounding.
        exclude_frozen_parameters: Whether checkpoints leave out what is not trained. The module
            must then build its base by itself, in `__init__` or `configure_model`, before one is
            loaded; another base is refused.
        upload_dtype: For `Trainer(precision="bf16-mixed")`, `"bf16"`: blocks' matrices are rounded
            on the host, once per update, and uploaded in half the bytes; see docs/precision.md.
            `"fp16"` with `16-mixed`. None: they are uploaded as they are.
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

    def __init__(  # noqa: PLR0913 - all keyword-only, each a setting of its own
        self,
        *,
        num_microbatches: int | Literal["auto"] = "auto",
        plan: PlanSource = "auto",
        update: str = "exact",
        check_gradients: bool = False,
        recompute: str = "auto",
        blocks: str | Sequence[str] | None = None,
        microbatch_weight: MicrobatchWeight = "auto",
        loss: LossMode = "auto",
        hardware: HardwareSource = "auto",
        timeout_seconds: float = 600.0,
        workers_per_device: int = 1,
        hints: HintSource = None,
        replan: bool = True,
        trial_run: bool = True,
        compile: bool = False,  # noqa: A002 - the word that Lightning users know
        exclude_frozen_parameters: bool = False,
        upload_dtype: str | None = None,
        gradient_dtype: str | None = None,
        stochastic_rounding: bool = False,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        self._stochastic_rounding = stochastic_rounding
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self._options = Options(
            num_microbatches=num_microbatches,
            plan=plan,
            update=update,
            check_gradients=check_gradients,
            recompute=recompute,
            blocks=blocks,
            microbatch_weight=microbatch_weight,
            loss=loss,
            hardware=hardware,
            timeout_seconds=timeout_seconds,
            workers_per_device=workers_per_device,
            hints=hints,
            replan=replan,
            trial_run=trial_run,
            compile=compile,
            upload_dtype=upload_dtype,
            gradient_dtype=gradient_dtype,
        )
        self.exclude_frozen_parameters = exclude_frozen_parameters
        """Whether checkpoints leave out what is not trained."""
        self.num_nodes = 1
        """Set by the Trainer to its flag; anything but 1 is refused."""
        self._given_plan = self._options.load_plan()
        self._session: Session | None = None
        self._fit_session: Session | None = None
        self.plan_watchers: list[PlanWatcher] = []
        """Called in the Trainer's thread with each plan that is about to be run."""
        self.step_watchers: list[StepWatcher] = []
        """Called in the Trainer's thread with each training step when it has ended.

        Nothing waits for that: with batches in flight it is after the next one has begun.
        """

    def __repr__(self) -> str:
        """Say which Lightning it is for: another one shows this in its refusal."""
        name = f"{type(self).__module__}.{type(self).__qualname__}"
        return f"<{name}, a strategy for lightning.pytorch.Trainer>"

    @property
    def _precision(self) -> NoReturn:
        """Fabric, and nobody else, asks a strategy for this."""
        checks.refuse_fabric()

    # What others may look at ---------------------------------------------------------------------

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        return len(self.parallel_devices or ()) * self._options.workers_per_device

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches of a full batch, as far as it is known."""
        if self.plan is not None:
            return self.plan.num_microbatches
        wanted = self._wanted_microbatches
        return max(1, 2 * self.num_workers) if wanted == "auto" else wanted

    @property
    def _wanted_microbatches(self) -> int | Literal["auto"]:
        plan = self._given_plan
        return self._options.num_microbatches if plan is None else plan.num_microbatches

    @property
    def plan(self) -> Plan | None:
        """The plan in use, that of the largest batch so far; None before the first set-up.

        Until the first batch it is one that follows from the parameters.
        """
        return self._seen.plan if self._seen else None

    @property
    def profile(self) -> ModelProfile | None:
        """The model as the planner sees it; None before the first set-up."""
        return self._seen.profile if self._seen else None

    @property
    def last_plan(self) -> Plan | None:
        """The plan of the last training step, whose end is waited for; None before the first."""
        return self._seen.synchronized().last_plan if self._seen else None

    @property
    def last_timeline(self) -> Timeline | None:
        """When every action of the last training step ran, whose end is waited for; None before."""
        return self._seen.synchronized().last_timeline if self._seen else None

    @property
    def last_step(self) -> StepRecord | None:
        """What is known of the last training step; None before the first."""
        return self._seen.last_step if self._seen else None

    @property
    def is_in_flight(self) -> bool:
        """Whether the backward pass of the last batch still runs; asking does not wait for it."""
        return self._seen is not None and self._seen.is_in_flight

    @property
    def peak_device_bytes(self) -> int | None:
        """The most memory in use on one worker; None before the first set-up."""
        return self._seen.peak_device_bytes if self._seen else None

    @property
    def fused_losses(self) -> FusedLosses | None:
        """What became of logits that were put off; None with `loss="eager"` and before a set-up."""
        return self._seen.fused_losses if self._seen else None

    @property
    def _seen(self) -> Session | None:
        """The last session that trained, else the last one; evaluation after fit hides nothing."""
        return self._fit_session or self._session

    # One process, as far as Lightning is concerned -----------------------------------------------

    @property
    def root_device(self) -> torch.device:
        """The host: that is where the masters, the batches and the optimizer are."""
        return torch.device("cpu")

    @property
    def world_size(self) -> int:
        """One process."""
        return 1

    @property
    def global_rank(self) -> int:
        """The one process's, whatever a cluster's environment knows."""
        return 0

    @property
    def local_rank(self) -> int:
        """The one process's."""
        return 0

    @property
    def node_rank(self) -> int:
        """The one machine's."""
        return 0

    @property
    def is_distributed(self) -> bool:
        """Never: data is not divided among processes."""
        return False

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Every sample goes to this process."""
        return {"num_replicas": 1, "rank": 0}

    def model_to_device(self) -> None:
        """Leave the module in host memory."""

    def reduce(self, tensor: Any, *_: Any, **__: Any) -> Any:
        """Return the value of the one process."""
        return tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002, ARG002, FBT001, FBT002 - Lightning's signature
        """Return the decision of the one process."""
        return decision

    def all_gather(self, tensor: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return the tensor of the one process."""
        return tensor

    def barrier(self, *_: Any, **__: Any) -> None:
        """There is nobody to wait for."""

    def broadcast(self, obj: T, src: int = 0) -> T:  # noqa: ARG002 - Lightning's signature
        """Return the object of the one process."""
        return obj

    # Plugins that the strategy imposes -----------------------------------------------------------

    @property
    def precision_plugin(self) -> RoundPipePrecision:
        """The precision; Lightning's own plugins are replaced by ours with the same precision."""
        plugin = self._precision_plugin
        return plugin if isinstance(plugin, RoundPipePrecision) else RoundPipePrecision()

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        rounds = self._stochastic_rounding
        self._precision_plugin = (
            None
            if plugin is None
            else RoundPipePrecision.from_lightning(plugin, stochastic_rounding=rounds)
        )

    @property
    def accelerator(self) -> Accelerator | None:
        """Lightning's accelerator; the one for CUDA also knows the workers' devices."""
        return self._accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Accelerator) -> None:
        self._accelerator = with_workers(accelerator, lambda: self.parallel_devices or ())

    # Set-up and teardown -------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        """Check the Trainer's flags: this is the last the Trainer does with a strategy it makes."""
        checks.check_trainer_flags(
            num_nodes=self.num_nodes,
            syncs_batchnorm=compat.syncs_batchnorm(self),
            environment=self.cluster_environment,
            devices=self.parallel_devices or (),
        )

    def setup_environment(self) -> None:
        """Prepare the devices; nothing is to be done for CPU workers."""
        if self._computes_on_host:
            return
        assert self.accelerator is not None
        for device in reversed(self.parallel_devices or ()):  # the first one stays the current one
            self.accelerator.setup_device(device)

    def setup(self, trainer: Trainer) -> None:
        """Check the module, make its optimizers and a first plan."""
        if trainer.state.fn == TrainerFn.FITTING:
            self._session = self._fit_session = None  # an earlier run's batches say nothing
            self._resume.begin()
            checks.check_module(self._module, num_microbatches=self._wanted_microbatches)
            checks.tell_of_compiled_modules(self._module)
        super().setup(trainer)
        options = self._options
        if not self._module.automatic_optimization:
            options = replace(options, num_microbatches=1)
        devices = self._devices()
        if not all(device.shares_host_memory for device in devices):
            checks.check_steps(self._module, trainer.state.fn)
        self._session = Session(
            self._module,
            devices=devices,
            precision=self.precision_plugin,
            options=options,
            given_plan=self._given_plan,
            computes_on_host=self._computes_on_host,
            optimizers=self.optimizers if trainer.state.fn == TrainerFn.FITTING else (),
            overlaps_on_host=self._overlaps_on_host,
            watchers=self.plan_watchers,
            step_watchers=self.step_watchers,
        )
        if trainer.state.fn == TrainerFn.FITTING:
            self._fit_session = self._session
            self._begin_updates(self._session, options=options)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Make the optimizers and refuse those that cannot work."""
        self._begin_gradients(self._options)
        with checks.several_optimizers_explained(self._module):
            super().setup_optimizers(trainer)
        if self._module.automatic_optimization:
            checks.check_optimizers(self.optimizers)

    def join_updates(self) -> None:
        """Wait for the gradients of the last batch, too, where its backward pass is in flight."""
        if self._session is not None:
            self._session.synchronize()
        super().join_updates()

    def on_train_end(self) -> None:
        """Leave the gradients of a window that was not filled, as on one device."""
        if self._session is not None:
            self._session.synchronize()
        super().on_train_end()

    def teardown(self) -> None:
        """Close the engine, then let Lightning clean up."""
        if self._session is not None:
            self._session.close()
        # Lightning would bring the module to the host, which it has not left: tensors without
        # values, say, could not come, and that would hide the error that names them.
        module, self._lightning_module = self._lightning_module, None
        try:
            super().teardown()
        finally:
            self._lightning_module = module

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def _computes_on_host(self) -> bool:
        return all(device.type == "cpu" for device in self.parallel_devices or ())

    def _devices(self) -> list[Device]:
        """Make the workers' devices: neighbouring workers are on different ones."""
        devices = (self.parallel_devices or []) * self._options.workers_per_device
        self.precision_plugin.compute_device_type = devices[0].type
        return [
            CpuDevice(index) if device.type == "cpu" else AcceleratorDevice(device)
            for index, device in enumerate(devices)
        ]

    # Steps ---------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Run the microbatches of a batch through the engine."""
        with self.precision_plugin.train_step_context():
            assert self._session is not None
            return self._session.training_step(*args, *kwargs.values())

    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Run a validation batch as one."""
        with self.precision_plugin.val_step_context():
            output: STEP_OUTPUT = self._evaluate("validation_step", *args, **kwargs)
        return output

    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Run a test batch as one."""
        with self.precision_plugin.test_step_context():
            output: STEP_OUTPUT = self._evaluate("test_step", *args, **kwargs)
        return output

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a prediction batch as one."""
        with self.precision_plugin.predict_step_context():
            return self._evaluate("predict_step", *args, **kwargs)

    def _evaluate(self, step_name: str, *args: Any, **kwargs: Any) -> Any:
        assert self._session is not None
        return self._session.evaluate(step_name, *args, *kwargs.values())
