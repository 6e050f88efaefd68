"""A model in bytes and seconds per microbatch, as it is planned for and as it is measured.

The engine measures actions, so stages, while a plan needs blocks. A stage's duration is a sum,

    FORWARD     forward of its blocks
    FUSED       forward and backward of its blocks
    BACKWARD    recompute and backward of its blocks

where the tail counts as a block of the stages that have it, and in the first stage the head's
forward, in the last one its backward.
What is measured is dealt out over the terms in proportion to what they are taken to be. With
one partition only the sums can be known; every other partition adds knowledge of their
parts, and the terms converge to durations that explain all of them.

A step gives for each stage the median over its microbatches, three steps give the median of those,
so one slow step (the first one, say) changes nothing. From then on the average follows the medians
exponentially: what is older than `HALF_LIFE_STEPS` steps counts half.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from roundpipe_lightning.errors import PlanError
from roundpipe_lightning.planning.schedule.schedule import Timeline
from roundpipe_lightning.planning.schedule.stages import (
    Partition,
    RecomputePolicy,
    StageKind,
    check_cuts,
)


@dataclass(frozen=True, kw_only=True)
class BlockProfile:
    """One block, or the head or tail segment, of a model, for one microbatch.

    Attributes:
        name: Dotted name in the model, e.g. `model.layers.3`.
        backward_seconds: Duration of the backward pass, the recompute not included.
        parameter_bytes: Size of all parameters and buffers in the compute dtype.
        trainable_bytes: Size of those that get a gradient, in the compute dtype.
        boundary_bytes: Size of what is handed to the next block.
        activation_bytes: Size of what its backward keeps from its forward (or its recompute).
        working_bytes: The most that its backward needs at once beside that.
        forward_bytes: The most that a forward pass which keeps nothing needs at once.
        attention_seconds: Part of `forward_seconds` that attention takes.
        attention_bytes: Size of attention's outputs; with them kept, a recompute leaves attention
            out.
        expanded_bytes: Size in the compute dtype of parameters that `parameter_bytes` has in a
            compressed form, which is expanded on the device.
        num_quantizable: Frozen parameters that are compressed where the storage says so.
        quantizable_bytes: Their size in the compute dtype.
        has_backward: Whether it runs backward and is recomputed for it; not where nothing in it or
            before it is trained.

    Raises:
        PlanError: If a figure is negative.
    """

    name: str
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    parameter_bytes: int = 0
    trainable_bytes: int = 0
    boundary_bytes: int = 0
    activation_bytes: int = 0
    working_bytes: int = 0
    forward_bytes: int = 0
    attention_seconds: float = 0.0
    attention_bytes: int = 0
    expanded_bytes: int = 0
    num_quantizable: int = 0
    quantizable_bytes: int = 0
    has_backward: bool = True

    def __post_init__(self) -> None:
        for field, value in vars(self).items():
            if field != "name" and not value >= 0:
                raise PlanError(f"Profile of {self.name!r}: {field}={value} must be 0 or more.")

    @property
    def recompute_seconds(self) -> float:
        return self.forward_seconds if self.has_backward else 0.0

    def seconds_to_recompute(self, policy: RecomputePolicy) -> float:
        if policy is RecomputePolicy.NONE:
            return 0.0
        if policy is RecomputePolicy.SELECTIVE and self.attention_bytes:
            return max(self.recompute_seconds - self.attention_seconds, 0.0)
        return self.recompute_seconds


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """A model as the planner sees it: a chain of blocks between a head and a tail segment.

    Attributes:
        blocks: The blocks in the order in which they run.
        head: The user's code before the first block (embedding, masks).
        tail: The user's code after the last block (norm, LM head, loss).
        fingerprint: Identifies the model's structure, see `fingerprint`.
        cuts: Ascending block indices i such that no stage may have both block i-1 and block i,
            because other code runs between them.

    Raises:
        PlanError: If the cuts do not ascend, or do not lie between two blocks.
    """

    blocks: tuple[BlockProfile, ...]
    fingerprint: str
    head: BlockProfile = BlockProfile(name="head segment")
    tail: BlockProfile = BlockProfile(name="tail segment")
    cuts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_cuts(self.cuts, num_blocks=len(self.blocks))

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def parts(self) -> tuple[BlockProfile, ...]:
        return (self.head, *self.blocks, self.tail)

    @property
    def units(self) -> tuple[BlockProfile, ...]:
        """The blocks and, as if it were one more, the tail segment."""
        return (*self.blocks, self.tail)

    def each(self, change: Callable[[BlockProfile], BlockProfile]) -> ModelProfile:
        blocks = tuple(map(change, self.blocks))
        return replace(self, blocks=blocks, head=change(self.head), tail=change(self.tail))

    @property
    def busy_seconds(self) -> float:
        return sum(part.forward_seconds + part.backward_seconds for part in self.parts)

    def seconds_to_recompute(self, policy: RecomputePolicy = RecomputePolicy.FULL) -> float:
        return sum(block.seconds_to_recompute(policy) for block in self.blocks)

    def forward_share(self, policy: RecomputePolicy = RecomputePolicy.FULL) -> float:
        """Return the share of the forward pass in a step."""
        forward = sum(part.forward_seconds for part in self.parts)
        both = self.busy_seconds + self.seconds_to_recompute(policy)
        return forward / both if both else 0.5

    @property
    def block_names(self) -> tuple[str, ...]:
        return tuple(block.name for block in self.blocks)

    def running_sums(self, size: str) -> npt.NDArray[np.float64]:
        """Return the sums of an attribute over the first 0, 1, 2, ... units."""
        if size not in self._sums:
            self._sums[size] = prefix_sums([getattr(unit, size) for unit in self.units])
        return self._sums[size]

    @cached_property
    def _sums(self) -> dict[str, npt.NDArray[np.float64]]:
        return {}


def prefix_sums(values: Sequence[float]) -> npt.NDArray[np.float64]:
    return np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=np.float64))])


def fingerprint(parts: Iterable[str]) -> str:
    """Return a short stable hash of the lines that describe a model's structure, in order."""
    return hashlib.sha256("".join(f"{part}\n" for part in parts).encode()).hexdigest()[:16]


HALF_LIFE_STEPS = 8.0
"""Steps after which a measurement counts half."""

_WINDOW = 3  # steps of which the middle one counts

_Key = tuple[StageKind, int]


class MeasuredProfile:
    """The durations of a model's blocks as far as they have been measured.

    Args:
        estimate: The model with estimated durations, in any unit: their ratios are where the
            measurement begins, and what is not measured yet is scaled to what is.
    """

    def __init__(self, estimate: ModelProfile) -> None:
        self.num_steps = 0
        self._estimate = estimate
        self._terms = _terms(estimate)
        self._seconds: list[float | None] = [None] * len(self._terms)
        self._partition: Partition | None = None
        self._windows: dict[_Key, deque[float]] = {}

    @property
    def is_ready(self) -> bool:
        return any(seconds is not None for seconds in self._seconds)

    def observe(
        self, timeline: Timeline, *, partition: Partition, speeds: Sequence[float] = ()
    ) -> None:
        """Take in a step.

        Args:
            speeds: How fast every worker is; empty: as fast as the estimate says.
        """
        self.num_steps += 1
        if partition != self._partition:
            self._partition, self._windows = partition, {}
        durations: dict[_Key, list[float]] = {}
        for entry in timeline.entries:
            key = (entry.action.kind, entry.action.stage)
            speed = speeds[entry.action.worker] if speeds else 1.0
            durations.setdefault(key, []).append(entry.busy_seconds * speed)
        for key, values in durations.items():
            window = self._windows.setdefault(key, deque(maxlen=_WINDOW))
            window.append(median(values))
        share = 1.0 - 0.5 ** (1.0 / HALF_LIFE_STEPS)
        current = self._current()
        for stage in partition.stages():
            seen = self._windows.get((stage.kind, stage.index), ())
            if len(seen) == _WINDOW:
                num = partition.num_blocks + 1
                # the indices of the terms that a stage's duration is the sum of
                units = [*stage.blocks] + [num - 1] * stage.has_tail
                terms = [unit + num * (stage.kind is not StageKind.FORWARD) for unit in units]
                ends = (stage.has_head_forward, stage.has_head_backward)
                terms += [2 * num + place for place, has in enumerate(ends) if has]
                self._deal_out(median(seen), terms, current, share)

    def _deal_out(
        self, seconds: float, terms: Sequence[int], current: Sequence[float], share: float
    ) -> None:
        """Move the terms of a stage towards what was measured of their sum."""
        total = sum([current[term] for term in terms])
        for term in terms:
            part = current[term] / total if total > 0 else 1.0 / len(terms)
            before = self._seconds[term]
            target = seconds * part
            self._seconds[term] = target if before is None else before + share * (target - before)

    def _current(self) -> list[float]:
        """All terms: measured ones as they are, others scaled to those of their kind, or to all."""
        measured = [seconds for seconds in self._seconds if seconds is not None]
        if len(measured) == len(self._terms):
            return measured
        num = len(self._estimate.units)
        whole = self._ratio(range(len(self._terms)), otherwise=1.0)
        forward = self._ratio(range(num), otherwise=whole)
        both = self._ratio(range(num, 2 * num), otherwise=whole)
        ratios = [forward] * num + [both] * num + [whole] * 2
        return [
            estimate * ratio if seconds is None else seconds
            for estimate, ratio, seconds in zip(self._terms, ratios, self._seconds, strict=True)
        ]

    def _ratio(self, terms: Sequence[int], *, otherwise: float) -> float:
        known = [(self._seconds[term], self._terms[term]) for term in terms]
        measured = sum(seconds for seconds, _ in known if seconds is not None)
        estimated = sum(estimate for seconds, estimate in known if seconds is not None)
        return measured / estimated if measured > 0 and estimated > 0 else otherwise

    def profile(self) -> ModelProfile:
        """Return the model with measured durations, and with the estimate's sizes."""
        estimate, current = self._estimate, self._current()
        num = len(estimate.units)
        *blocks, tail = (
            _timed(unit, forward=min(forward, both), backward=max(0.0, both - forward))
            for unit, forward, both in zip(
                estimate.units, current[:num], current[num : 2 * num], strict=True
            )
        )
        head_forward, head_backward = current[2 * num :]
        head = _timed(estimate.head, forward=head_forward, backward=head_backward)
        return replace(estimate, blocks=tuple(blocks), head=head, tail=tail)

    def state_dict(self) -> dict[str, Any]:
        return {
            "fingerprint": self._estimate.fingerprint,
            "num_steps": self.num_steps,
            "seconds": list(self._seconds),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Take over what `state_dict` returned, if it was of this model; return whether it was."""
        seconds = state.get("seconds", ())
        is_its = state.get("fingerprint") == self._estimate.fingerprint
        if not is_its or len(seconds) != len(self._terms):
            return False
        self.num_steps = int(state["num_steps"])
        self._seconds = [None if value is None else float(value) for value in seconds]
        return True


def _terms(profile: ModelProfile) -> list[float]:
    """Forward of every unit, both passes of every unit, head's forward and backward."""
    return [
        *(unit.forward_seconds for unit in profile.units),
        *(unit.forward_seconds + unit.backward_seconds for unit in profile.units),
        profile.head.forward_seconds,
        profile.head.backward_seconds,
    ]


def _timed(part: BlockProfile, *, forward: float, backward: float) -> BlockProfile:
    return replace(part, forward_seconds=forward, backward_seconds=backward)
