"""A training as it is configured: what `train.py` and `roundpipe-plan` share.

```
configuration ─▶ Job: words filled in, machine, model, strategy
                  ├─▶ planner: on a model without values: memory, plans, predictions
                  └─▶ build.py: data, Trainer, callbacks
```

No device is touched, and no weights are drawn or read.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import StrategyRegistry
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

from roundpipe_lightning.cli.objects import (
    build,
    call,
    choice,
    read_adapters,
    read_hardware,
    size_of,
    whole,
)
from roundpipe_lightning.engine.chain.chain import BlockStack, Chain
from roundpipe_lightning.engine.device.base import CpuDevice
from roundpipe_lightning.engine.microbatch import loss_of
from roundpipe_lightning.errors import BatchError, ConfigurationError, HardwareError
from roundpipe_lightning.models.blocks import find_stacks
from roundpipe_lightning.models.losses.lazy_logits import LossFusion, are_large
from roundpipe_lightning.models.work.alike import one_of_each_kind
from roundpipe_lightning.models.work.work_profile import (
    causal_lm_call,
    parameter_work,
    work_profile,
)
from roundpipe_lightning.modules import Adapters, ModelSource
from roundpipe_lightning.modules.language import CausalLanguageModule
from roundpipe_lightning.planning.model.hardware import HardwareSpec, network_rate
from roundpipe_lightning.planning.model.work import MicrobatchShape, WorkProfile
from roundpipe_lightning.planning.search.fit import (
    FitAnswer,
    TrainingJob,
    fit_training,
    holds_block,
)
from roundpipe_lightning.planning.search.request import PartitionHints
from roundpipe_lightning.precision import SUPPORTED_PRECISIONS, RoundPipePrecision
from roundpipe_lightning.strategy.options import GradientFormat, Options
from roundpipe_lightning.strategy.planning.dry_run import SilentMetric
from roundpipe_lightning.strategy.planning.inputs import StepWork, find_machine, storage_of
from roundpipe_lightning.strategy.planning.planner import StepPlanner
from roundpipe_lightning.strategy.strategy import RoundPipeStrategy

_MOST_SEQUENCES = 8
"""Sequences of a microbatch that are tried where the number of microbatches is not given."""


class Job:
    """A training as it is configured.

    Args:
        config: The composed configuration, see `conf/train.yaml`; it is not changed.
        models: Models of other jobs, which this one shares where it has the same.

    Attributes:
        config: The configuration with a value for every word `auto` but those that the strategy
            itself takes.
        source: The model.
        strategy: The strategy; None for one of Lightning's own.
        hardware: The machine; `"auto"`: the one at hand.
        num_devices: Devices, each with a worker or several; 0 where that is left to Lightning.
        computes_on_host: Whether the devices are CPU workers.
    """

    def __init__(self, config: DictConfig, *, models: dict[str, MetaModel] | None = None) -> None:
        check_numbers(config)
        self._given = config
        self._models = {} if models is None else models
        self.config = config = config.copy()
        spec = read_hardware(config)
        self.computes_on_host = self._choose_accelerator(spec)
        self.num_devices = self._choose_devices(spec)
        self.hardware = self._choose_hardware(spec)
        self._complete()
        self.source: ModelSource = build(config.model)
        self.strategy = self.new_strategy()
        if self.strategy is not None:
            name = config.trainer.precision
            if name not in SUPPORTED_PRECISIONS:
                near = difflib.get_close_matches(str(name), SUPPORTED_PRECISIONS, n=1, cutoff=0.7)
                bits = "bf16" if "bf" in str(name) else re.sub(r"\D", "", str(name))
                near += sorted(one for one in SUPPORTED_PRECISIONS if one.startswith(f"{bits}-"))
                raise ConfigurationError(
                    f"trainer.precision={name} is not one of {', '.join(SUPPORTED_PRECISIONS)}."
                    + (f" The nearest is {near[0]}." if near else "")
                )
            self.strategy.precision_plugin = RoundPipePrecision(name)
        self._check()

    def _choose_accelerator(self, spec: HardwareSpec | None) -> bool:
        """Set `trainer.accelerator` where a machine is named; return whether CPUs compute."""
        trainer = self.config.trainer
        kind, there = trainer.accelerator, torch.accelerator.is_available()
        if spec is not None:
            meant = "cpu" if spec.shares_host_memory else "gpu"
            if kind == "auto":
                trainer.accelerator = meant
            elif (kind == "cpu") != (meant == "cpu"):
                raise ConfigurationError(
                    f"hardware={spec.name} computes on {meant}s, but trainer.accelerator={kind}: "
                    "drop one of the two."
                )
            return spec.shares_host_memory
        if kind not in ("auto", "cpu") and not there:
            raise HardwareError(
                f"hardware={choice('hardware')}: this machine has no accelerator. Train with "
                "hardware=cpu; or plan for a machine by name, such as hardware=rtx4090x8 "
                "(conf/hardware has them all), or by its figures: hardware=path/to/mine.yaml."
            )
        return kind == "cpu" or not there

    def _choose_devices(self, spec: HardwareSpec | None) -> int:
        """Set `trainer.devices` where it is auto; for CPU workers it is `hardware.cpu_workers`.

        Only round-robin workers share one process; for Lightning's own strategies, where every CPU
        device would be a process, `auto` is left to Lightning.
        """
        trainer = self.config.trainer
        devices: Any = trainer.devices
        if isinstance(devices, DictConfig):  # the number of each device by name
            devices = trainer.devices = sum(devices.values())
        if devices == "auto" and is_roundpipe(trainer.get("strategy", "auto")):
            if self.computes_on_host:
                count = whole("hardware.cpu_workers", self.config.hardware.cpu_workers)
                devices = trainer.devices = count
            elif spec is not None:
                devices = trainer.devices = spec.num_devices
        if isinstance(devices, str) and devices not in ("auto", "-1"):
            if not re.fullmatch(r"[\d, ]+", devices):
                raise ConfigurationError(f"trainer.devices={devices}: give a number, or auto.")
            return len(devices.split(","))
        if isinstance(devices, int) and devices != -1:
            return whole("trainer.devices", devices)
        if OmegaConf.is_list(devices):
            return len(devices)
        return torch.accelerator.device_count() if not self.computes_on_host else 0

    def _choose_hardware(self, spec: HardwareSpec | None) -> HardwareSpec | Literal["auto"]:
        """The machine with the memory that the configuration gives it."""
        hardware = self.config.hardware
        sizes: dict[str, Any] = {
            "host_bytes": size_of("hardware.host_memory", hardware.get("host_memory")),
            "device_bytes": size_of("hardware.device_memory", hardware.get("device_memory")),
        }
        num_nodes, network = self.num_nodes, self.config.get("network")
        if num_nodes > 1:
            sizes["num_nodes"] = num_nodes
            share = OmegaConf.select(self.config, "trainer.strategy.memory_share")
            sizes["memory_share"] = None if share == "auto" else share
        rate = None if network is None else network_rate(network)
        if num_nodes > 1 or spec is not None:
            sizes["network_bytes_per_second"] = rate
        if spec is None:
            given_bytes = size_of("hardware.host_bytes", hardware.get("host_bytes"))
            sizes["host_bytes"] = sizes["host_bytes"] or given_bytes
            sizes["disk_bytes_per_second"] = hardware.get("disk_bytes_per_second")
        given = {name: size for name, size in sizes.items() if size is not None}
        if spec is None and not given:
            return "auto"
        if spec is None:
            spec = find_machine(
                "auto",
                num_workers=max(1, self.num_devices),
                workers_per_device=1,
                computes_on_host=self.computes_on_host,
            )
        if self.computes_on_host and self.num_devices:
            spec = replace(spec, num_devices=self.num_devices, devices_per_root=self.num_devices)
            given.setdefault("device_bytes", given.get("host_bytes", spec.device_bytes))
        return replace(spec, **given)

    def _complete(self) -> None:
        """Choose number formats where they are auto, and the dtype of a frozen base."""
        trainer, model = self.config.trainer, self.config.model
        if trainer.get("precision") == "auto":
            mixed = "bf16-mixed" if self._computes_in_bfloat16() else "16-mixed"
            trainer.precision = "32-true" if self.computes_on_host else mixed
        precision, strategy = trainer.get("precision"), trainer.get("strategy")
        if isinstance(strategy, DictConfig):
            module = getattr(build(self.config.module), "func", None)
            is_whole = getattr(module, "whole_batches", False)
            if strategy.get("microbatching", "") is None:
                strategy.microbatching = "blocks" if is_whole else "step"
            if is_whole and strategy.get("microbatching") == "step":
                raise ConfigurationError(
                    "trainer.strategy.microbatching=step splits batches, and what this module "
                    "learns is of a whole one. Leave it out, or set blocks."
                )
        has_own = model.get("frozen_weights") == "mmap" or model.get("frozen_bits", 16) < 16
        is_open = model.get("dtype", "") is None and not has_own
        if self.is_adapted and precision == "bf16-mixed" and is_open:
            model.dtype = "bfloat16"  # a frozen base needs no masters in float32

    def _computes_in_bfloat16(self) -> bool:
        if isinstance(self.hardware, HardwareSpec):
            return self.hardware.matrix_rates.bfloat16 is not None
        supported = getattr(torch.cuda, "is_bf16_supported", lambda **_: True)
        return not torch.cuda.is_available() or bool(supported(including_emulation=False))

    def new_strategy(self) -> RoundPipeStrategy | None:
        """The strategy as configured; None for one of Lightning's own."""
        config = self.config.trainer.get("strategy", "auto")
        if not is_roundpipe(config):
            return None
        if isinstance(config, DictConfig):
            make: Any = build(config, _partial_=True)  # Hydra would take a machine for settings
        else:
            make = StrategyRegistry[str(config)]["strategy"]
        strategy: RoundPipeStrategy = call("trainer.strategy", make, hardware=self.hardware)
        return strategy

    @property
    def options(self) -> Options:
        assert self.strategy is not None
        return self.strategy.options

    @property
    def precision(self) -> RoundPipePrecision:
        if self.strategy is None:
            name = self.config.trainer.get("precision")
            return RoundPipePrecision(name if name in SUPPORTED_PRECISIONS else "32-true")
        return self.strategy.precision_plugin

    @property
    def seq_len(self) -> int:
        return whole("data.seq_len", self.config.data.get("seq_len"))

    @property
    def batch_size(self) -> int:
        return whole("data.batch_size", self.config.data.get("batch_size"))

    @property
    def num_nodes(self) -> int:
        number = self.config.trainer.get("num_nodes", 1)
        return 1 if number == "auto" else whole("trainer.num_nodes", number)  # nobody launched it

    @property
    def num_batches(self) -> int:
        name = "accumulate_grad_batches"
        return whole(f"trainer.{name}", self.config.trainer.get(name, 1))

    @property
    def is_adapted(self) -> bool:
        """Whether adapters are trained and the model is frozen."""
        return self.config.peft is not None and self.config.peft.get("_target_") is not None

    @property
    def num_microbatches(self) -> int | None:
        """Parts of a batch; None: they are to be chosen."""
        count = self.options.num_microbatches
        if self.options.given_plan is not None:
            return self.options.given_plan.num_microbatches
        return None if count == "auto" else count

    @property
    def longest_position(self) -> int | None:
        """Positions that the model knows; None where it has no such limit."""
        limit = getattr(
            self.source.load_config().get_text_config(), "max_position_embeddings", None
        )
        return limit if isinstance(limit, int) else None

    def new_module(self) -> LightningModule:
        """The module that is trained; its model is built by `configure_model`."""
        return self._module(scheduler=build(self.config.scheduler))

    def _module(self, *, scheduler: Any) -> LightningModule:
        config = self.config
        module: LightningModule = call(
            "module",
            build(config.module),
            self.source,
            optimizer=build(config.optimizer),
            scheduler=scheduler,
            adapters=read_adapters(config.peft),
        )
        return module

    def _check(self) -> None:
        """Refuse a batch that cannot be split, and sequences that the model cannot take."""
        data = self.config.data
        seq_len = None if data.get("seq_len") is None else self.seq_len
        size = None if data.get("batch_size") is None else self.batch_size
        _ = self.num_batches
        for name in ("max_steps", "max_epochs"):
            whole(f"trainer.{name}", self.config.trainer.get(name, -1), least=-1)
        trainer = self.config.trainer
        whole("trainer.log_every_n_steps", trainer.get("log_every_n_steps") or 0, least=0)
        whole("trainer.num_sanity_val_steps", trainer.get("num_sanity_val_steps") or 0, least=-1)
        if trainer.get("deterministic") not in (None, False, True, "warn"):
            raise ConfigurationError(
                f"trainer.deterministic={trainer.deterministic}: give true, false or warn."
            )
        if trainer.get("val_check_interval") == 0:
            raise ConfigurationError(
                "trainer.val_check_interval=0: give a number above 0, or null."
            )
        limits = (f"limit_{name}_batches" for name in ("train", "val", "test", "predict"))
        for name in ("gradient_clip_val", *limits):
            if isinstance(given := trainer.get(name), str):
                raise ConfigurationError(f"trainer.{name}={given}: give a number.")
        count = None if self.strategy is None else self.num_microbatches
        if count is not None and size is not None and count > size:
            if self.options.given_plan is not None:
                raise BatchError(
                    f"partition.plan={self.options.plan} is for {count} microbatches, more than "
                    f"the {size} windows of data.batch_size={size}: it was made for another batch. "
                    "Set that data.batch_size, or partition=auto."
                )
            raise BatchError(
                f"partition.num_microbatches={count} is more than the data.batch_size={size} "
                "windows of a batch. Lower the one or raise the other."
            )
        longest = self.longest_position
        is_asked = self.config.get("longest", False)
        if longest is not None and seq_len is not None and seq_len > longest and not is_asked:
            raise ConfigurationError(
                f"data.seq_len={seq_len} is longer than the {longest} positions of the model "
                "(max_position_embeddings). Lower data.seq_len, choose another model, or let its "
                "rotary positions reach further: model.config_changes, see Longer contexts in "
                "docs/finetuning.md."
            )

    @cached_property
    def planner(self) -> StepPlanner:
        """Plans this training on the machine, as the strategy will."""
        with self._gradient_format():
            return StepPlanner(
                self.model.module,
                stacks=self.model.stacks,
                devices=[CpuDevice(index) for index in range(self.num_workers)],
                computes_on_host=self.computes_on_host,
                precision=self.precision,
                options=replace(self.options, hardware=self.hardware),
                optimizers=self._optimizers(),
                accumulates=self.num_batches > 1,
                clips=bool(self.config.trainer.get("gradient_clip_val")),
                parameter_work=self.model.parameter_work,
            )

    @contextmanager
    def _gradient_format(self) -> Iterator[None]:
        """Give the model's parameters, which jobs share, gradients in this one's dtype."""
        gradients = GradientFormat(self.options, self.precision)
        gradients.begin(self.model.module)
        try:
            yield
        finally:
            gradients.end()

    @property
    def num_workers(self) -> int:
        return self.num_devices * self.options.workers_per_device

    @property
    def machine(self) -> HardwareSpec:
        """What is planned for, every worker a device."""
        return self.planner.machine

    @cached_property
    def model(self) -> MetaModel:
        """The module without values; RoundPipeError: it cannot be built so."""
        config, options = self.config, self.options if self.strategy else None
        groups = {name: config.get(name) for name in ("model", "module", "peft")}
        text = OmegaConf.to_yaml(OmegaConf.create(groups, parent=config), resolve=True)
        names = None if options is None else options.block_names
        key = repr((text, names, config.trainer.get("precision")))
        if key not in self._models:
            module = self._module_without_values()
            self._models[key] = MetaModel(
                module=module,
                stacks=find_stacks(module, names),
                compute_dtype=self.precision.autocast_dtype,
            )
        return self._models[key]

    def _module_without_values(self) -> LightningModule:
        # A plan has no use for a schedule; those of transformers take up to a second to import.
        module: Any = self._module(scheduler=None)
        if getattr(module, "adapters", None) is not None:  # what is saved are values
            module.adapters = _WithoutValues(config=module.adapters.config)
        if getattr(module, "pad_token_id", 0) is None:
            module.pad_token_id = 0  # the data's, which is not there
        try:
            with self.precision.module_init_context(), torch.device("meta"):
                module.configure_model()
        except RuntimeError as error:
            raise ConfigurationError(
                f"The model cannot be built without weights, so it cannot be planned ({error}). "
                "With adapters, choose peft=lora, whose layers can."
            ) from error
        result: LightningModule = module
        return result

    def training(self, num_microbatches: int, *, seq_len: int | None = None) -> TrainingJob:
        """The planner's view of this training, with so many microbatches."""
        is_joined = self.options.microbatching == "blocks"
        sequences = self.batch_size if is_joined else -(-self.batch_size // num_microbatches)
        shape = MicrobatchShape(sequences=sequences, seq_len=seq_len or self.seq_len)
        work = self.model.work(fused=self._fuses(shape))
        step = StepWork(work=work, knows_activations=True)
        planner = self.planner
        with self._gradient_format():
            job = planner.job(
                step.pieces(num_microbatches) if is_joined else step,
                num_microbatches,
                shape=shape,
                num_batches=self.num_batches,
                batch_sequences=self.batch_size,
                is_full=True,
            )
        return self._with_given_plan(job)

    def _fuses(self, shape: MicrobatchShape) -> bool:
        """Return whether training computes the loss of such a microbatch without whole logits."""
        vocabulary = self.source.load_config().get_text_config().vocab_size
        loss = self.options.loss
        return loss == "fused" or (loss == "auto" and are_large(shape.tokens, vocabulary))

    def microbatch_counts(self) -> list[int]:
        """Numbers of microbatches to choose from: one sequence each, or more for every device."""
        if self.num_microbatches is not None:
            return [self.num_microbatches]
        hints = self.options.partition_hints
        fewest = max(hints.team_size or 1, hints.round_size or 1)
        fewest = min(max(fewest, self.num_workers), self.batch_size)
        sizes = (2**power for power in range(_MOST_SEQUENCES.bit_length()))
        counts = dict.fromkeys(-(-self.batch_size // size) for size in sizes)
        return [count for count in counts if count >= fewest] or [self.batch_size]

    def answer(self) -> FitAnswer:
        """The best plan over all numbers of microbatches that are to be chosen from."""
        first, *others = self.microbatch_counts()
        job = self.training(first)
        # Larger microbatches need more; the first one's answer says what is missing.
        return fit_training(job, *map(self.training, others if holds_block(job) else ()))

    @cached_property
    def first_job(self) -> TrainingJob:
        """The planner's view before anything is measured: parameters, not activations."""
        return self._with_given_plan(self.planner.first_job)

    def _with_given_plan(self, job: TrainingJob) -> TrainingJob:
        """The job with everything fixed that a plan fixes, where one was given."""
        plan = self.options.given_plan
        return job if plan is None else replace(job, hints=PartitionHints.of_plan(plan))

    @property
    def num_bytes(self) -> float:
        """Bytes of parameters, gradients and optimizer state on one device."""
        parameters = list(self.model.module.parameters())
        storage = storage_of(self._optimizers())
        each = storage.gradient_bytes + storage.optimizer_bytes
        trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
        return sum(parameter.nbytes for parameter in parameters) + each * trained

    def _optimizers(self) -> list[Optimizer]:
        parameters = self.model.module.parameters()
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        if not (trained and self.config.train):
            return []
        try:
            optimizer: Optimizer = build(self.config.optimizer)(trained)
        except (TypeError, ValueError) as error:
            given = self.config.optimizer.items()
            text = str(error)
            # A message of torch's may name neither the setting nor its value: words are suspects.
            wrong = [k for k, v in given if re.search(rf"\b{k}\b|'{re.escape(str(v))}'", text)]
            wrong = wrong or [k for k, v in given if isinstance(v, str) and k != "_target_"]
            settings = ", ".join(f"optimizer.{k}={self.config.optimizer[k]}" for k in wrong)
            raise ConfigurationError(f"{settings}: {text}" if settings else text) from error
        return [optimizer]

    def with_microbatches(self) -> Job:
        """This job with a number of microbatches, the best one where it was left open."""
        if self.strategy is None or self.num_microbatches is not None:
            return self
        try:
            answer = self.answer()
        except ConfigurationError:  # code that needs values: the strategy chooses
            return self
        return self.with_changes({"partition.num_microbatches": answer.job.num_microbatches})

    def with_changes(self, changes: Mapping[str, Any]) -> Job:
        """This job with other settings.

        Args:
            changes: Values by dotted key; None for a key removes a setting.
        """
        config = self._given.copy()
        OmegaConf.set_struct(config, False)
        for key, value in changes.items():
            OmegaConf.update(config, key, value, merge=False)
        return Job(config, models=self._models)


_MOST = {
    **dict.fromkeys(("trainer.devices", "hardware.cpu_workers"), 4096),
    **dict.fromkeys(("optimizer.num_threads", "data.num_workers"), 4096),
    "hardware.workers_per_device": 64,
    "nodes": 100_000,
    **dict.fromkeys(("partition.num_microbatches", "partition.round_size"), 1_000_000),
    "partition.team_size": 4096,
    **dict.fromkeys(("data.batch_size", "trainer.accumulate_grad_batches"), 10_000_000),
    "data.seq_len": 1_000_000_000,
    "model.architecture.num_hidden_layers": 10_000,
    **dict.fromkeys(
        (f"model.architecture.{name}" for name in ("hidden_size", "intermediate_size", "head_dim")),
        10_000_000,
    ),
    "model.architecture.vocab_size": 1_000_000_000,
    "model.architecture.num_experts": 100_000,
}
"""Numbers beyond which no machine goes: threads, lists and tensors are made of them at once."""


def check_numbers(config: DictConfig) -> None:
    """Refuse numbers that no machine has, before anything is made of them."""
    for key, most in _MOST.items():
        value = OmegaConf.select(config, key)
        if isinstance(value, (int, float)) and not -most <= value <= most:
            raise ConfigurationError(f"{key}={value}: give {most:,} or less.")


class _WithoutValues(Adapters):
    """Adapters of which nobody asks for values: blocks that are alike get copies of one."""

    def apply(self, model: Any, *, task: str = "CAUSAL_LM") -> Any:
        is_each = type(self.config).__name__ == "LoraConfig" and not any(
            re.search(r"\d", str(getattr(self.config, name, None)))
            for name in _NAMES_OF_LAYERS  # a layer's number
        )
        with one_of_each_kind(model) if is_each else nullcontext():
            return super().apply(model, task=task)


_NAMES_OF_LAYERS = (
    *("target_modules", "exclude_modules", "modules_to_save", "target_parameters"),
    *("layers_to_transform", "layer_replication", "rank_pattern", "alpha_pattern"),
)


def is_roundpipe(strategy: Any) -> bool:
    name = strategy.get("_target_", "") if isinstance(strategy, Mapping) else str(strategy)
    return "roundpipe" in name.lower()


@dataclass(kw_only=True, eq=False)
class MetaModel:
    """A module on the meta device, and what it does, measured when it is first asked for.

    Attributes:
        compute_dtype: What autocast computes in; None: what the parameters are.
    """

    module: LightningModule
    stacks: Sequence[BlockStack]
    compute_dtype: torch.dtype | None
    _works: dict[bool, WorkProfile] = field(default_factory=dict)
    parameter_work: Callable[[nn.Module, Chain], WorkProfile] = field(
        default_factory=lambda: cache(parameter_work)
    )

    def work(self, *, fused: bool) -> WorkProfile:
        """Work of a microbatch as a function of its shape, measured when first asked for."""
        if fused not in self._works:
            metrics = [part for part in self.module.modules() if isinstance(part, Metric)]
            reads_once = fused and isinstance(self.module, CausalLanguageModule)
            self._works[fused] = work_profile(
                self.module,
                Chain.from_stacks(self.stacks),
                call=(lambda root, *size: causal_lm_call(root.model, *size))
                if reads_once
                else self._call,
                compute_dtype=self.compute_dtype,
                fusion=LossFusion("fused") if fused and not reads_once else None,
                settings={"log": lambda *_, **__: None, "_device": torch.device("meta")},
                replaced=[(metric, SilentMetric()) for metric in metrics],
            )
        return self._works[fused]

    def _call(self, root: Any, sequences: int, seq_len: int) -> Tensor:
        with torch.device("meta"):
            loss = loss_of(root.training_step(root.example_batch(sequences, seq_len)))
        assert loss is not None, "our modules return one"
        return loss
