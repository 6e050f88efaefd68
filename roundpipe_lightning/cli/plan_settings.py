"""Settings of `roundpipe-plan`: a configuration turned into the planner's terms."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from roundpipe_lightning.cli.build import build, read_adapters
from roundpipe_lightning.engine.device.probe import probe_hardware
from roundpipe_lightning.errors import ConfigurationError, HardwareError, PlanError
from roundpipe_lightning.models.blocks import find_blocks
from roundpipe_lightning.models.work.work_profile import causal_lm_call, work_profile
from roundpipe_lightning.modules import Adapters, CausalLanguageModule, ModelSource
from roundpipe_lightning.optim.state import StatePlace
from roundpipe_lightning.planning.model.hardware import (
    HardwareSpec,
    hardware_from_mapping,
    load_hardware,
)
from roundpipe_lightning.planning.model.storage import ParameterStorage, WeightStorage
from roundpipe_lightning.planning.model.work import MicrobatchShape, WorkProfile
from roundpipe_lightning.planning.schedule.plan import Plan
from roundpipe_lightning.planning.schedule.stages import RecomputePolicy
from roundpipe_lightning.planning.search.fit import TrainingJob
from roundpipe_lightning.planning.search.request import PartitionHints
from roundpipe_lightning.strategy.planning.inputs import state_bytes_per_parameter

_MOST_SEQUENCES = 8
"""Sequences of a microbatch that are tried where the number of microbatches is not given."""


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Number formats, in bytes.

    Attributes:
        name: As `Trainer(precision=...)` takes it.
        dtype: Name of the compute dtype.
        master_bytes: Of a trainable parameter's master beside the copy that is uploaded.
        gradient_bytes: Of a gradient on the host.
    """

    name: str
    dtype: str
    master_bytes: int
    gradient_bytes: int

    @property
    def state_dtype(self) -> torch.dtype:
        """Dtype of the parameters that the optimizer steps."""
        return torch.float32 if self.master_bytes else getattr(torch, self.dtype)


PRECISIONS = {
    precision.name: precision
    for precision in (
        Precision(name="32-true", dtype="float32", master_bytes=0, gradient_bytes=4),
        Precision(name="bf16-true", dtype="bfloat16", master_bytes=0, gradient_bytes=2),
        Precision(name="16-true", dtype="float16", master_bytes=0, gradient_bytes=2),
        Precision(name="bf16-mixed", dtype="bfloat16", master_bytes=4, gradient_bytes=4),
        Precision(name="16-mixed", dtype="float16", master_bytes=4, gradient_bytes=4),
    )
}


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """A training that is to be planned.

    Attributes:
        source: The model.
        adapters: What is trained beside it; None: every parameter is trained.
        optimizer: Makes the optimizer from parameters.
        blocks: Names of the blocks; None: they are found.
        hardware: The machine.
        precision: Number formats.
        seq_len: Tokens of a sequence.
        batch_size: Sequences of a batch.
        num_batches: Batches that are accumulated.
        num_microbatches: Parts of a batch; None: the planner chooses.
        hints: Constraints on the stages.
        frozen_bits: Of a parameter that is not trained.
        weights: Where the weights lie that are uploaded.
        eager_loss: Whether the model's own loss is measured instead of a fused one.
        given_plan: The saved plan that the hints are those of; None: there is none.

    Raises:
        ConfigurationError: A figure is out of its range.
    """

    source: ModelSource
    adapters: Adapters | None
    optimizer: functools.partial[Any]
    blocks: tuple[str, ...] | None
    hardware: HardwareSpec
    precision: Precision
    seq_len: int
    batch_size: int
    num_batches: int
    num_microbatches: int | None
    hints: PartitionHints
    frozen_bits: int = 16
    weights: WeightStorage = WeightStorage.PAGE_LOCKED
    eager_loss: bool = False
    given_plan: Plan | None = None

    def __post_init__(self) -> None:
        counts = (
            ("data.seq_len", self.seq_len),
            ("data.batch_size", self.batch_size),
            ("trainer.accumulate_grad_batches", self.num_batches),
            ("partition.num_microbatches", self.num_microbatches),
        )
        for name, value in counts:
            if value is not None and value < 1:
                raise ConfigurationError(f"{name}={value} must be 1 or more.")
        if self.num_microbatches is not None and self.num_microbatches > self.batch_size:
            raise ConfigurationError(
                f"partition.num_microbatches={self.num_microbatches} is more than the "
                f"data.batch_size={self.batch_size} windows of a batch. Lower the one or raise the "
                "other."
            )

    @property
    def longest_position(self) -> int | None:
        """Positions that the model knows; None where it has no such limit."""
        config = self.source.load_config().get_text_config()
        limit = getattr(config, "max_position_embeddings", None)
        return limit if isinstance(limit, int) else None

    def microbatch_counts(self) -> list[int]:
        """Numbers of microbatches to choose from: one sequence each, or more for every device."""
        if self.num_microbatches is not None:
            return [self.num_microbatches]
        fewest = min(self.hardware.num_devices, self.batch_size)
        sizes = (2**power for power in range(_MOST_SEQUENCES.bit_length()))
        counts = dict.fromkeys(-(-self.batch_size // size) for size in sizes)
        return [count for count in counts if count >= fewest]


class JobMaker:
    """Makes jobs of settings; measures every model once."""

    def __init__(self) -> None:
        self._measured: dict[tuple[Any, ...], WorkProfile] = {}
        self._state_places: dict[torch.dtype, StatePlace] = {}

    def work(self, settings: PlanSettings) -> WorkProfile:
        """Measure a model on the meta device.

        Raises:
            RoundPipeError: The model cannot be built or measured, or is not the given plan's.
        """
        key = (settings.adapters, settings.precision.dtype, settings.eager_loss, settings.blocks)
        if key not in self._measured:
            self._measured[key] = _measure(settings)
        work = self._measured[key]
        if settings.given_plan is not None:
            names = tuple(block.name for block in work.blocks)
            settings.given_plan.check_model(work.fingerprint, block_names=names)
        return work

    def first_job(self, settings: PlanSettings) -> TrainingJob:
        """Return the job with the first number of microbatches that the settings leave."""
        return self.job(settings, num_microbatches=settings.microbatch_counts()[0])

    def job(self, settings: PlanSettings, *, num_microbatches: int) -> TrainingJob:
        precision = settings.precision
        dtype = precision.state_dtype
        if dtype not in self._state_places:
            self._state_places[dtype] = _state_place(settings.optimizer, dtype)
        storage = ParameterStorage(
            weights=settings.weights,
            master_bytes=precision.master_bytes,
            gradient_bytes=precision.gradient_bytes,
            optimizer_bytes=self._state_places[dtype].memory_bytes,
            disk_bytes=self._state_places[dtype].disk_bytes,
            frozen_bits=settings.frozen_bits,
        )
        sequences = -(-settings.batch_size // num_microbatches)
        return TrainingJob(
            work=self.work(settings),
            hardware=settings.hardware,
            dtype=precision.dtype,
            storage=storage,
            shape=MicrobatchShape(sequences=sequences, seq_len=settings.seq_len),
            num_microbatches=num_microbatches,
            num_batches=settings.num_batches,
            batch_sequences=settings.batch_size,
            hints=settings.hints,
        )


def _measure(settings: PlanSettings) -> WorkProfile:
    """Build the module that would be trained, without weights, and count what it does."""
    module = CausalLanguageModule(settings.source, optimizer=settings.optimizer)
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, settings.precision.dtype))
    try:
        with torch.device("meta"):
            module.model = dataclasses.replace(settings.source, weights="random").build()
            if settings.adapters is not None:
                adapters = dataclasses.replace(settings.adapters, adapter=None)
                module.model = _adapted(module.model, adapters)  # type: ignore[assignment]
    finally:
        torch.set_default_dtype(before)
    names = list(settings.blocks) if settings.blocks is not None else None
    stack = find_blocks(module, names)
    return work_profile(module, stack, call=_eager_loss if settings.eager_loss else _fused_loss)


def _adapted(model: Any, adapters: Adapters) -> nn.Module:
    """Put adapters into a model without weights.

    Raises:
        ConfigurationError: They ask for values when they are made, or do not go with the model.
    """
    try:
        return adapters.apply(model)
    except RuntimeError as error:
        raise ConfigurationError(
            f"peft={adapters.method} cannot be planned: peft cannot make its layers without "
            f"weights ({error}). Plan peft=lora instead, for a similar number of parameters."
        ) from error


def _fused_loss(module: nn.Module, sequences: int, seq_len: int) -> Tensor:
    model: nn.Module = module.model  # type: ignore[assignment]
    return causal_lm_call(model, sequences, seq_len)


def _eager_loss(module: nn.Module, sequences: int, seq_len: int) -> Tensor:
    tokens = torch.zeros((sequences, seq_len), dtype=torch.long, device="meta")
    loss: Tensor = module({"input_ids": tokens, "labels": tokens}).loss
    return loss


def _state_place(optimizer: functools.partial[Any], dtype: torch.dtype) -> StatePlace:
    """Bytes of optimizer state per parameter: what its class says, or a small matrix is stepped."""
    says = getattr(optimizer.func, "planned_state_place", None)
    if says is not None:
        place: StatePlace = says(**optimizer.keywords)
        return place
    size = state_bytes_per_parameter(optimizer, dtype)
    return StatePlace(memory_bytes=size, disk_bytes=0.0)


# --- from a configuration ---------------------------------------------------------------------


def read_settings(config: DictConfig) -> PlanSettings:
    """Turn a composed configuration into settings.

    Raises:
        RoundPipeError: A setting cannot work.
    """
    hints, num_microbatches = config.partition, config.partition.num_microbatches
    given: Any = OmegaConf.to_container(hints, resolve=True)
    for key in ("plan", "num_microbatches", "blocks"):  # they are no hints
        given.pop(key, None)
    adapters = read_adapters(config.peft)
    _check_word("loss", config.loss, ("fused", "eager"))
    _check_word("weights", config.weights, [storage.value for storage in WeightStorage])
    _check_word("trainer.precision", config.trainer.precision, PRECISIONS)
    blocks = hints.blocks
    settings = PlanSettings(
        source=build(config.model),
        adapters=adapters,
        optimizer=build(config.optimizer),
        blocks=None if blocks is None else (blocks,) if isinstance(blocks, str) else tuple(blocks),
        hardware=_hardware(config),
        precision=PRECISIONS[config.trainer.precision],
        seq_len=_whole("data.seq_len", config.data.get("seq_len")),
        batch_size=_whole("data.batch_size", config.data.get("batch_size")),
        num_batches=_whole(
            "trainer.accumulate_grad_batches", config.trainer.get("accumulate_grad_batches", 1)
        ),
        num_microbatches=(
            None
            if num_microbatches == "auto"
            else _whole("partition.num_microbatches", num_microbatches)
        ),
        hints=PartitionHints.from_mapping(given),
        frozen_bits=16 if adapters is None else int(config.peft.frozen_bits),
        weights=WeightStorage(config.weights),
        eager_loss=config.loss == "eager",
    )
    return settings if hints.plan == "auto" else _with_plan(settings, Plan.load(hints.plan))


def _whole(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigurationError(f"{name}={value!r}: give a whole number.")
    return value


def _check_word(name: str, value: object, known: Iterable[str]) -> None:
    known = list(known)
    if value not in known:
        near = difflib.get_close_matches(str(value), known, n=1, cutoff=0.4)
        hint = f" The nearest is {near[0]}." if near else ""
        if (name, value) == ("loss", "own"):
            hint = " It is called eager now."
        raise ConfigurationError(f"{name}={value} is not one of {', '.join(known)}.{hint}")


def _hardware(config: DictConfig) -> HardwareSpec:
    if config.hardware_file is not None:
        return load_hardware(config.hardware_file)
    name = "hardware"
    if HydraConfig.initialized():
        name = str(HydraConfig.get().runtime.choices.get("hardware", name))
    figures = OmegaConf.to_container(config.hardware, resolve=True)
    assert isinstance(figures, dict)
    if "device_name" not in figures and not isinstance(figures.get("devices"), dict):
        return _probed(config.hardware, name=name)
    try:
        return hardware_from_mapping({"name": name, **{str(k): v for k, v in figures.items()}})
    except HardwareError as error:
        raise HardwareError(f"hardware={name}: {error}") from error


def _probed(config: DictConfig, *, name: str) -> HardwareSpec:
    """Measure the machine that this runs on, or take what was measured before."""
    spec = probe_hardware(num_workers=config.get("cpu_workers"))
    if config.get("accelerator") == "gpu" and spec.shares_host_memory:
        raise HardwareError(
            f"hardware={name}: this machine has no accelerator. Name the machine that is meant, "
            "such as hardware=rtx4090x8 (conf/hardware has them all), or describe it: "
            "hardware_file=path/to/mine.yaml."
        )
    return spec


def _with_plan(settings: PlanSettings, plan: Plan) -> PlanSettings:
    """Fix everything that a saved plan fixes."""
    taken = settings.hints.keys_given()
    if taken:
        raise PlanError(
            f"partition.plan fixes the stages, teams and rounds, but there is a hint beside it "
            f"({', '.join(taken)}): drop one of the two."
        )
    if plan.num_workers != settings.hardware.num_devices:
        raise PlanError(
            f"The plan is for {plan.num_workers} workers, but {settings.hardware.name} has "
            f"{settings.hardware.num_devices} devices. Choose another machine or make a new plan."
        )
    hints = PartitionHints(
        forward=plan.partition.forward,
        backward=plan.partition.backward,
        team_size=plan.team_size,
        round_size=plan.round_size,
        recompute=None if plan.recompute is RecomputePolicy.FULL else (plan.recompute,),
        weight_slots=plan.weight_slots,
    )
    if settings.num_microbatches not in (None, plan.num_microbatches):
        raise PlanError(
            f"partition.num_microbatches={settings.num_microbatches}, but the plan is for "
            f"{plan.num_microbatches}: drop one of the two."
        )
    return dataclasses.replace(
        settings, hints=hints, num_microbatches=plan.num_microbatches, given_plan=plan
    )
