"""The strategy's own settings, checked once, and the dtypes that two of them ask for."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from roundpipe_lightning.engine.store.block_layout import gradient_dtype
from roundpipe_lightning.engine.update.partial_step import reason_not_with_gradients
from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.models.losses.lazy_logits import LossMode
from roundpipe_lightning.planning.model.hardware import HardwareSpec, load_hardware
from roundpipe_lightning.planning.schedule.plan import Plan
from roundpipe_lightning.planning.schedule.stages import RecomputePolicy
from roundpipe_lightning.planning.search.request import PartitionHints
from roundpipe_lightning.precision import RoundPipePrecision

PlanSource: TypeAlias = Plan | str | os.PathLike[str]
"""A plan, the path of a saved one, or `"auto"`."""

HardwareSource: TypeAlias = HardwareSpec | str | os.PathLike[str]
"""A machine, the name of one or the path of a file, or `"auto"`: the one at hand."""

HintSource: TypeAlias = PartitionHints | Mapping[str, Any] | None
"""Hints, or a mapping with the keys of `conf/partition` (`forward`, `limits`, `team_size`, ...)."""

_KNOWN_WORDS: Mapping[str, Sequence[str | None]] = {
    "update": ("exact", "async"),
    "upload_dtype": ("auto", "bf16", "fp16", None),
    "gradient_dtype": ("fp32", "bf16", None),
    "recompute": ("auto", *(policy.value for policy in RecomputePolicy)),
    "loss": ("auto", "fused", "eager"),
    "microbatching": ("auto", "blocks", "step"),
}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the strategy; `RoundPipeStrategy` explains them."""

    num_microbatches: int | Literal["auto"]
    plan: PlanSource
    update: str
    check_gradients: bool
    recompute: str
    blocks: str | Sequence[str] | None
    hardware: HardwareSource
    timeout_seconds: float
    host_share: float | Literal["auto", "measured"] = "auto"
    memory_share: float | Literal["auto"] = "auto"
    loss: LossMode = "auto"
    microbatching: str = "auto"
    trust_rows: bool = False
    workers_per_device: int
    hints: HintSource = None
    replan: bool = True
    dry_run: bool = True
    compile: bool = False
    upload_dtype: str | None = "auto"
    gradient_dtype: str | None = None

    def __post_init__(self) -> None:
        count: object = self.num_microbatches
        if count != "auto" and not (isinstance(count, int) and count >= 1):
            raise ConfigurationError(
                f"num_microbatches={count!r}: give a whole number of 1 or more, or 'auto'."
            )
        workers: object = self.workers_per_device
        if not isinstance(workers, int) or isinstance(workers, bool) or workers < 1:
            raise ConfigurationError(
                f"workers_per_device={self.workers_per_device!r}: give a whole number of 1 or more."
            )
        seconds: object = self.timeout_seconds
        if not (isinstance(seconds, (int, float)) and seconds > 0):
            raise ConfigurationError(
                f"timeout_seconds={self.timeout_seconds!r}: give the seconds without progress "
                "after which a step is given up, more than 0."
            )
        share: Any = self.host_share
        if share not in ("auto", "measured") and not (
            isinstance(share, (int, float)) and share > 0
        ):
            raise ConfigurationError(
                f"host_share={share!r}: give a number above 0, such as this host's tokens per "
                "second, 'auto' or 'measured'."
            )
        part: Any = self.memory_share
        if part != "auto" and not (isinstance(part, (int, float)) and 0 < part <= 1):
            raise ConfigurationError(
                f"memory_share={part!r}: give this host's part of the optimizer's state, a number "
                "between 0 and 1, or 'auto'."
            )
        if not isinstance(self.plan, (Plan, str, os.PathLike)):
            raise ConfigurationError(
                f"plan={self.plan!r}: give a Plan, the path of a saved one, or 'auto'."
            )
        if self._given_hints() != PartitionHints() and self.plan != "auto":
            raise ConfigurationError(
                "hints fix a part of the plan that is made, but plan=... gives all of it: drop "
                "one of the two."
            )
        self._check_names()
        _ = self.partition_hints, self.given_plan  # read once, to have them refused here

    def _check_names(self) -> None:
        for name, known in _KNOWN_WORDS.items():
            value = getattr(self, name)
            if value not in known:
                *others, last = map(repr, known)
                raise ConfigurationError(f"{name}={value!r}: set {', '.join(others)} or {last}.")
        if self.compile and self.recompute == RecomputePolicy.SELECTIVE.value:
            raise ConfigurationError(
                "compile=True with recompute='selective': compiled code has no single operations "
                "whose outputs could be kept. Set recompute='full', 'none' or 'auto', or leave "
                "compile out."
            )
        if not isinstance(self.hardware, (HardwareSpec, str, os.PathLike)):
            raise ConfigurationError(
                f"hardware={self.hardware!r}: give a HardwareSpec, the name of a machine, the path "
                "of a file, or 'auto'."
            )
        if self.hardware != "auto" and not isinstance(self.hardware, HardwareSpec):
            load_hardware(self.hardware)

    @property
    def block_names(self) -> list[str] | None:
        if self.blocks is None:
            return None
        return [self.blocks] if isinstance(self.blocks, str) else list(self.blocks)

    @property
    def partition_hints(self) -> PartitionHints:
        """Return the user's hints about the stages, `recompute` included."""
        hints = self._given_hints()
        if self.recompute == "auto" or hints.recompute is not None:
            return hints
        return replace(hints, recompute=(RecomputePolicy(self.recompute),))

    @property
    def fuses_loss(self) -> bool:
        """Whether the stages that were asked for need the loss of one microbatch at a time."""
        plan, hints = self.given_plan, self.partition_hints
        if plan is not None:
            return plan.partition.backward[0] > 0 or plan.goes_on
        fused = hints.backward is not None and hints.backward[0] > 0
        return fused or hints.recompute == (RecomputePolicy.NONE,)

    def _given_hints(self) -> PartitionHints:
        given = self.hints
        if given is None:
            return PartitionHints()
        if isinstance(given, PartitionHints):
            return given
        if not isinstance(given, Mapping):
            raise ConfigurationError(
                f"hints={given!r}: give PartitionHints, or a mapping with keys of conf/partition."
            )
        return PartitionHints.from_mapping(given)

    @cached_property
    def given_plan(self) -> Plan | None:
        """The plan that the user gave, or None for `"auto"`; PlanError: its file cannot be read."""
        if self.plan == "auto":
            return None
        plan = self.plan if isinstance(self.plan, Plan) else Plan.load(Path(self.plan))
        if self.num_microbatches not in ("auto", plan.num_microbatches):
            raise ConfigurationError(
                f"num_microbatches={self.num_microbatches}, but the plan is for "
                f"{plan.num_microbatches}: leave num_microbatches out, or make another plan."
            )
        return plan


def upload_dtype_of(options: Options, precision: RoundPipePrecision) -> torch.dtype | None:
    """The dtype of uploaded copies, None: masters; ConfigurationError if precision has another."""
    if options.upload_dtype is None:
        return None
    if options.upload_dtype == "auto":
        return precision.autocast_dtype
    dtype = _DTYPES[options.upload_dtype]
    if precision.autocast_dtype is not dtype:
        raise ConfigurationError(
            f"upload_dtype={options.upload_dtype!r} with precision={str(precision.precision)!r}: "
            "weights can only be rounded before the upload where autocast would round them after "
            "it. Set Trainer(precision='bf16-mixed') with 'bf16', precision='16-mixed' with "
            "'fp16', or leave upload_dtype out."
        )
    return dtype


class GradientFormat:
    """Sums up a module's gradients in the dtype that was asked for."""

    def __init__(self, options: Options, precision: RoundPipePrecision) -> None:
        name = options.gradient_dtype
        if name == "bf16" and precision.scaler is not None:
            raise ConfigurationError(
                "gradient_dtype='bf16' with precision='16-mixed': the loss scaler looks at "
                "gradients of float32. Set Trainer(precision='bf16-mixed'), or leave "
                "gradient_dtype out."
            )
        self._name = name
        self._dtype = None if name is None else _DTYPES[name]
        self._set: list[nn.Parameter] = []

    def begin(self, module: nn.Module) -> None:
        """Set torch's `grad_dtype` of all parameters that may be trained."""
        for parameter in module.parameters() if self._dtype is not None else ():
            differs = gradient_dtype(parameter) is not self._dtype
            if parameter.is_floating_point() and differs:
                parameter.grad = None  # of a use before; a training begins with zero_grad
                parameter.grad_dtype = self._dtype
                self._set.append(parameter)

    def check(self, optimizers: Sequence[Optimizer], *, widened: Collection[Optimizer]) -> None:
        """Refuse optimizers that cannot step with such gradients; `widened` ones see float32."""
        for optimizer in optimizers if self._set else ():
            reason = None if optimizer in widened else reason_not_with_gradients(optimizer)
            if reason is not None:
                raise ConfigurationError(
                    f"gradient_dtype={self._name!r}: {type(optimizer).__name__} cannot "
                    f"step with gradients of another dtype than the parameters' ({reason}). Use "
                    "roundpipe_lightning.optim.HostAdamW, which takes any, or leave gradient_dtype "
                    "out; for bfloat16 parameters stochastic_rounding=True works with any "
                    "optimizer, too."
                )

    def end(self) -> None:
        """Put parameters back whose gradients are gone."""
        for parameter in self._set:
            if parameter.grad is None:
                parameter.grad_dtype = parameter.dtype
        self._set = []
