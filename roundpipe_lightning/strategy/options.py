"""The strategy's own settings, checked once."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.models.losses.lazy_logits import LossMode
from roundpipe_lightning.models.weights import MicrobatchWeight
from roundpipe_lightning.planning.model.hardware import HardwareSpec, load_hardware
from roundpipe_lightning.planning.schedule.plan import Plan
from roundpipe_lightning.planning.schedule.stages import RecomputePolicy
from roundpipe_lightning.planning.search.request import PartitionHints

PlanSource: TypeAlias = Plan | str | os.PathLike[str]
"""A plan, the path of a saved one, or `"auto"`."""

HardwareSource: TypeAlias = HardwareSpec | str | os.PathLike[str]
"""A machine, the name of one or the path of a file, or `"auto"`: the one at hand."""

HintSource: TypeAlias = PartitionHints | Mapping[str, Any] | None
"""Hints, or a mapping with the keys of `conf/partition` (`forward`, `limits`, `team_size`, ...)."""

_HINTS = (
    "forward",
    "backward",
    "limits",
    "team_size",
    "round_size",
    "weight_slots",
    "resident",
)
_LIMITS = ("forward", "fused", "backward")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a user of the strategy can choose; the meaning is told at `RoundPipeStrategy`.

    Raises:
        ConfigurationError: A value cannot work, or not in this version.
    """

    num_microbatches: int | Literal["auto"]
    plan: PlanSource
    update: str
    check_gradients: bool
    recompute: str
    blocks: str | Sequence[str] | None
    microbatch_weight: MicrobatchWeight
    hardware: HardwareSource
    timeout_seconds: float
    loss: LossMode = "auto"
    workers_per_device: int
    hints: HintSource = None
    replan: bool = True
    trial_run: bool = True
    compile: bool = False
    upload_dtype: str | None = None
    gradient_dtype: str | None = None

    def __post_init__(self) -> None:
        """Check every value by itself."""
        count: object = self.num_microbatches
        if count != "auto" and not (isinstance(count, int) and count >= 1):
            raise ConfigurationError(
                f"num_microbatches={count!r}: give a whole number of 1 or more, or 'auto'."
            )
        if isinstance(self.workers_per_device, bool) or self.workers_per_device < 1:
            raise ConfigurationError(
                f"workers_per_device={self.workers_per_device!r}: give a whole number of 1 or more."
            )
        if not self.timeout_seconds > 0:
            raise ConfigurationError(
                f"timeout_seconds={self.timeout_seconds!r}: give the seconds without progress "
                "after which a step is given up, more than 0."
            )
        if not isinstance(self.plan, (Plan, str, os.PathLike)):
            raise ConfigurationError(
                f"plan={self.plan!r}: give a Plan, the path of a saved one, or 'auto'."
            )
        if self._given_hints() != PartitionHints() and self.plan != "auto":
            raise ConfigurationError(
                "hints settle a part of the plan that is made, but plan=... gives all of it: drop "
                "one of the two."
            )
        self._check_names()
        _ = self.partition_hints  # made once, to have it refused here

    def _check_names(self) -> None:
        """Check the values that are words, and say which are for a later version."""
        if self.update not in ("exact", "async"):
            raise ConfigurationError(f"update={self.update!r}: set 'exact' or 'async'.")
        if self.upload_dtype not in (None, "bf16", "fp16"):
            raise ConfigurationError(
                f"upload_dtype={self.upload_dtype!r}: set 'bf16', 'fp16' or None."
            )
        if self.gradient_dtype not in (None, "fp32", "bf16"):
            raise ConfigurationError(
                f"gradient_dtype={self.gradient_dtype!r}: set 'fp32', 'bf16' or None."
            )
        if self.recompute not in ("auto", *(policy.value for policy in RecomputePolicy)):
            raise ConfigurationError(
                f"recompute={self.recompute!r}: set 'auto', 'full', 'selective' or 'none'."
            )
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
        if self.loss not in ("auto", "fused", "eager"):
            raise ConfigurationError(
                f"loss={self.loss!r}: set 'auto', 'fused' or 'eager' (was 'own')."
            )
        rule = self.microbatch_weight
        if not callable(rule) and rule not in ("auto", "tokens", "samples"):
            raise ConfigurationError(
                f"microbatch_weight={rule!r}: set 'auto', 'tokens', 'samples', or a function that "
                "takes a microbatch and returns its weight."
            )

    @property
    def block_names(self) -> list[str] | None:
        """Dotted names of the block lists that the user named, or None."""
        if self.blocks is None:
            return None
        return [self.blocks] if isinstance(self.blocks, str) else list(self.blocks)

    @property
    def partition_hints(self) -> PartitionHints:
        """What the user has settled about the stages, `recompute` included.

        Raises:
            ConfigurationError: A hint is not known, or no whole number.
            PlanError: A hint cannot be kept by itself, or two contradict each other.
        """
        hints = self._given_hints()
        if self.recompute == "auto" or hints.recompute is not None:
            return hints
        return replace(hints, recompute=(RecomputePolicy(self.recompute),))

    def _given_hints(self) -> PartitionHints:
        """Read `hints`.

        Raises:
            ConfigurationError: A hint is not known, or no whole number.
            PlanError: A hint cannot be kept by itself, or two contradict each other.
        """
        given = self.hints
        if given is None:
            return PartitionHints()
        if isinstance(given, PartitionHints):
            return given
        if not isinstance(given, Mapping):
            raise ConfigurationError(
                f"hints={given!r}: give PartitionHints, or a mapping with some of {_words(_HINTS)}."
            )
        _check_keys("hints", given, _HINTS)
        limits = given.get("limits") or {}
        _check_keys("hints['limits']", limits, _LIMITS)
        return PartitionHints(
            forward=_cut("forward", given.get("forward")),
            backward=_cut("backward", given.get("backward")),
            most_forward=_whole("limits.forward", limits.get("forward")),
            most_fused=_whole("limits.fused", limits.get("fused")),
            most_backward=_whole("limits.backward", limits.get("backward")),
            team_size=_whole("team_size", given.get("team_size")),
            round_size=_whole("round_size", given.get("round_size")),
            weight_slots=_whole("weight_slots", given.get("weight_slots")),
            resident=_whole("resident", given.get("resident")),
        )

    def load_plan(self) -> Plan | None:
        """Return the plan that the user gave, or None for `"auto"`.

        Raises:
            PlanError: The file cannot be read.
            ConfigurationError: The plan is for another number of microbatches than asked for.
        """
        if self.plan == "auto":
            return None
        plan = self.plan if isinstance(self.plan, Plan) else Plan.load(Path(self.plan))
        if self.num_microbatches not in ("auto", plan.num_microbatches):
            raise ConfigurationError(
                f"num_microbatches={self.num_microbatches}, but the plan is for "
                f"{plan.num_microbatches}: leave num_microbatches out, or make another plan."
            )
        return plan


def _words(names: Sequence[str]) -> str:
    return ", ".join(names)


def _check_keys(what: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    unknown = [str(key) for key in given if key not in known]
    if unknown:
        raise ConfigurationError(
            f"{what} has {_words(unknown)}, which is no hint: there are {_words(known)}."
        )


def _whole(name: str, value: object) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise ConfigurationError(f"partition.{name}={value!r}: give a whole number.")


def _cut(name: str, counts: object) -> tuple[int, ...] | None:
    if counts is None:
        return None
    if isinstance(counts, Sequence) and all(type(count) is int for count in counts):
        return tuple(counts)
    raise ConfigurationError(
        f"partition.{name}={counts!r}: give whole numbers, such as partition.{name}=[2,3,3]."
    )
