"""Requests for plans: a user's hints about the stages, and the request made of them.

A hint that cannot be kept is refused with the reason, never bent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from roundpipe_lightning.errors import ConfigurationError, PlanError
from roundpipe_lightning.planning.cost.costs import RecomputeStart
from roundpipe_lightning.planning.schedule.plan import Plan
from roundpipe_lightning.planning.schedule.stages import (
    Partition,
    RecomputePolicy,
    check_partition,
    cuts_before,
    reversed_cuts,
)
from roundpipe_lightning.planning.search.partition import QUICK, Effort, StageLimits, even_cuts

_LEAST = {
    **dict.fromkeys(("most_forward", "most_backward", "team_size", "round_size"), 1),
    **dict.fromkeys(("most_fused", "resident"), 0),
}
"""The least that a hint may be."""

_SIMPLE = (RecomputePolicy.FULL, RecomputePolicy.NONE)

_HINTS = (
    *("forward", "backward", "limits"),
    *("team_size", "round_size", "weight_slots", "resident"),
)
_STAGES = ("forward", "backward", "fused")


def _check_keys(what: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    unknown = [str(key) for key in given if key not in known]
    if unknown:
        raise ConfigurationError(
            f"{what} has {', '.join(unknown)}, which is no hint: there are {', '.join(known)}."
        )


def _counts(name: str, counts: object) -> tuple[int, ...]:
    if isinstance(counts, Sequence) and all(type(count) is int for count in counts):
        return tuple(counts)
    raise ConfigurationError(
        f"partition.{name}={counts!r}: give whole numbers, such as partition.{name}=[2,3,3]."
    )


def _key(name: str) -> str:
    return "partition." + name.replace("most_", "limits.")


@dataclass(frozen=True, kw_only=True)
class PartitionHints:
    """Hints about stages, teams and rounds; None leaves a choice to the planner.

    Attributes:
        forward: Blocks of every FORWARD stage, as in `Partition.forward`.
        backward: Blocks of the FUSED and every BACKWARD stage, as in `Partition.backward`.
        most_forward: Blocks of a FORWARD stage, at most.
        most_backward: Blocks of a BACKWARD stage, at most.
        most_fused: Blocks of the FUSED stage, at most.
        recompute: What BACKWARD stages may start from.
        weight_slots: Stages whose weights a device holds at once, 1 or 2.
        resident: Blocks that stay on every device.
        like_teams: As of `PipelineConfig`; of a plan that is kept.
        keeps_graphs: As of `Partition`; of a plan that is kept.
        shares_backward: As of `PipelineConfig`; of a plan that is kept.
    """

    forward: tuple[int, ...] | None = None
    backward: tuple[int, ...] | None = None
    most_forward: int | None = None
    most_backward: int | None = None
    most_fused: int | None = None
    team_size: int | None = None
    round_size: int | None = None
    recompute: tuple[RecomputePolicy, ...] | None = None
    weight_slots: int | None = None
    resident: int | None = None
    like_teams: bool | None = None
    keeps_graphs: bool | None = None
    shares_backward: bool | None = None

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise PlanError(f"{_key(name)}={value} must be {least} or more.")
        if self.weight_slots not in (None, 1, 2):
            raise PlanError(f"partition.weight_slots={self.weight_slots} must be 1 or 2.")
        self._check_cuts()
        if self._fuses_all:
            for name, counts, is_ruled_out in (
                ("forward", self.forward, bool(self.forward)),
                ("backward", self.backward, len(self.backward or ()) > 1),
            ):
                if is_ruled_out:
                    raise PlanError(
                        f"partition.recompute=none has all blocks in the fused stage, but "
                        f"partition.{name}={list(counts or ())} has others: drop one of the two."
                    )
        if self.team_size and self.round_size and self.round_size < self.team_size:
            raise PlanError(
                f"partition.round_size={self.round_size} leaves workers of a team of "
                f"partition.team_size={self.team_size} without a microbatch: a round has at least "
                "one for each of them."
            )

    def _check_cuts(self) -> None:
        """Refuse cuts that cut nothing, disagree, or break the limits beside them."""
        if self.backward is not None and (not self.backward or self.backward[0] < 0):
            raise PlanError(
                f"partition.backward={list(self.backward)} must begin with the blocks of the fused "
                "stage, 0 or more."
            )
        if self.forward is not None and self.backward is not None:
            plain = bool(self.forward) and sum(self.forward) == sum(self.backward)
            Partition(forward=self.forward, backward=self.backward, plain=plain)
        forward = self.forward or ()
        fused, *backward = self.backward or (0,)
        for name, counts, stages in (
            ("forward", forward, forward),
            ("backward", self.backward or (), backward),
        ):
            if min(stages, default=1) < 1:
                raise PlanError(
                    f"partition.{name}={list(counts)}: every stage needs at least one block."
                )
        for name, stages in (("forward", forward), ("backward", backward), ("fused", [fused])):
            most = getattr(self, f"most_{name}")
            if most is not None and max(stages, default=0) > most:
                cut = "forward" if name == "forward" else "backward"
                raise PlanError(
                    f"partition.{cut} has a stage of {max(stages)} blocks, but "
                    f"partition.limits.{name}={most} allows at most {most}: drop one of the two."
                )

    @property
    def _fuses_all(self) -> bool:
        return self.recompute == (RecomputePolicy.NONE,)

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any]) -> PartitionHints:
        """Read hints from values with the keys of the configuration group `partition`.

        Raises:
            ConfigurationError: A hint is not known, or no whole number.
            PlanError: A hint cannot be kept by itself, or two contradict each other.
        """
        _check_keys("hints", given, _HINTS)
        limits = given.get("limits") or {}
        if not isinstance(limits, Mapping):
            raise ConfigurationError(
                f"partition.limits={limits!r}: give the most blocks of a stage by its kind, such "
                "as partition.limits.backward=1."
            )
        _check_keys("hints['limits']", limits, ("forward", "fused", "backward"))
        values = {name: value for name, value in given.items() if name != "limits"}
        values |= {f"most_{name}": value for name, value in limits.items()}
        for name, value in values.items():
            if value is None:
                continue
            if name in ("forward", "backward"):
                values[name] = _counts(name, value)
            elif not isinstance(value, int) or isinstance(value, bool):
                raise ConfigurationError(f"{_key(name)}={value!r}: give a whole number.")
        return cls(**values)

    @classmethod
    def of_plan(cls, plan: Plan) -> PartitionHints:
        """Return hints that fix all that a plan does."""
        return cls(
            forward=plan.partition.forward,
            backward=plan.partition.backward,
            team_size=plan.team_size,
            round_size=plan.round_size,
            recompute=None if plan.recompute is RecomputePolicy.FULL else (plan.recompute,),
            weight_slots=plan.weight_slots,
            like_teams=plan.like_teams,
            keeps_graphs=plan.partition.keeps_graphs,
            shares_backward=plan.shares_backward,
        )

    def keys_given(self) -> list[str]:
        given = [name for name, value in vars(self).items() if value is not None]
        return [_key(name).removeprefix("partition.") for name in given]

    @property
    def cuts(self) -> bool:
        return self.forward is not None or self.backward is not None

    def check(
        self, *, num_blocks: int, num_devices: int, num_microbatches: int, cuts: Sequence[int] = ()
    ) -> None:
        """Raise a PlanError if a hint does not fit a model, a machine or a batch."""
        for name, counts in (("forward", self.forward), ("backward", self.backward)):
            total = sum(counts or ())
            if total > num_blocks or (name == "backward" and counts and total != num_blocks):
                raise PlanError(
                    f"partition.{name}={list(counts or ())} has {total} blocks, the model has "
                    f"{num_blocks}."
                )
        if self._fuses_all and self.most_fused is not None and self.most_fused < num_blocks:
            raise PlanError(
                f"partition.recompute=none has all {num_blocks} blocks in the fused stage, but "
                f"partition.limits.fused={self.most_fused}: drop one of the two."
            )
        if self._fuses_all and cuts:
            raise PlanError(
                f"partition.recompute=none has all {num_blocks} blocks in the fused stage, but the "
                f"model has cuts at {tuple(cuts)}, where other code runs between two blocks, and "
                "no stage spans one: drop it, or set partition.recompute=full."
            )
        if self.resident is not None and self.resident > num_blocks:
            raise PlanError(
                f"partition.resident={self.resident} is more than the {num_blocks} blocks of the "
                "model."
            )
        divisors = [size for size in range(1, num_devices + 1) if num_devices % size == 0]
        if self.team_size is not None and self.team_size not in divisors:
            raise PlanError(
                f"partition.team_size={self.team_size} does not divide the {num_devices} devices: "
                f"choose from {divisors}."
            )
        for name, value in (("round_size", self.round_size), ("team_size", self.team_size)):
            if value is not None and value > num_microbatches:
                raise PlanError(
                    f"partition.{name}={value} is more than the {num_microbatches} microbatches of "
                    "a batch."
                )

    @property
    def limits(self) -> dict[str, int]:
        given = {name: getattr(self, f"most_{name}") for name in _STAGES}
        return {name: value for name, value in given.items() if value is not None}

    def limited(self, limits: StageLimits) -> StageLimits:
        return limits.within(replace(limits, **self.limits))

    def partitions(
        self,
        block_names: Sequence[str],
        *,
        limits: StageLimits,
        cuts: Sequence[int] = (),
        plain: bool = False,
    ) -> tuple[Partition, ...]:
        """Return the partitions that keep the fixed cuts; none where no cut is fixed.

        Where one cut is fixed, the other one is even, in any number of stages that the limits
        allow. A stage that spans a cut of the model is a PlanError.
        """
        if not self.cuts:
            return ()
        num_blocks = len(block_names)
        fixed = self.backward[0] if self.backward else num_blocks - sum(self.forward or ())
        rest = num_blocks if plain else num_blocks - fixed
        inside = cuts_before(rest, cuts)
        forward = [self.forward] if self.forward is not None else []
        backward = [self.backward] if self.backward is not None else []
        if not forward:
            forward = [*even_cuts(rest, most=limits.forward, cuts=inside)]
        if not backward:
            back = even_cuts(rest, most=limits.backward, cuts=reversed_cuts(rest, inside))
            firsts = ((0,), ()) if plain else ((fixed,),)
            backward = [(*first, *counts) for counts in back for first in firsts]
        found = tuple(
            Partition(forward=f, backward=b, plain=plain, keeps_graphs=kept)
            for f in forward
            for b in backward
            for kept in (False, True)
            if not kept or (plain and f[-1:] == b[:1])
        )
        for partition in found:
            check_partition(partition, cuts=cuts, block_names=block_names, what="partition hints")
        return found


@dataclass(frozen=True, kw_only=True)
class PlanningRequest:
    """Request for a plan; fields with a default are left to the planner.

    Attributes:
        num_microbatches: Microbatches of one batch, or several numbers to choose from.
        num_batches: Batches that are accumulated before the weights change: one continuous stream,
            a batch fills the pipeline while the one before drains.
        hints: What is fixed about stages, teams and rounds.
        hop_seconds: From one worker to another; None: that of the largest boundary, by way of the
            host (a download and an upload) or directly (`BoundaryRoute`).
        effort: How long to search; with `QUICK` in teams of 1 or of all.
        speeds: As of `PipelineConfig`: durations are those of speed 1.
        joined: As of `PipelineConfig`: durations of the tail segment are spread over the pieces.
        plain: As of `PipelineConfig`.
    """

    num_microbatches: int | tuple[int, ...]
    num_batches: int = 1
    hints: PartitionHints = field(default_factory=PartitionHints)
    hop_seconds: float | None = None
    recompute_start: RecomputeStart = RecomputeStart.EARLY
    effort: Effort = field(default_factory=Effort)
    speeds: tuple[float, ...] = ()
    joined: bool = False
    plain: bool = False

    @property
    def microbatch_choices(self) -> tuple[int, ...]:
        counts = self.num_microbatches
        return (counts,) if isinstance(counts, int) else counts

    @property
    def recompute(self) -> tuple[RecomputePolicy, ...]:
        """What BACKWARD stages may start from: without NONE there is one, without others none.

        Of several SELECTIVE is chosen where it saves enough.
        """
        if self.hints.recompute:
            return self.hints.recompute
        return _SIMPLE if self.effort == QUICK else tuple(RecomputePolicy)

    @property
    def policies(self) -> tuple[RecomputePolicy, ...]:
        some = tuple(each for each in self.recompute if each is not RecomputePolicy.NONE)
        return some or (RecomputePolicy.FULL,)

    def with_recompute(self, *policies: RecomputePolicy) -> PlanningRequest:
        return replace(self, hints=replace(self.hints, recompute=policies))

    def without_selective(self) -> PlanningRequest:
        others = tuple(each for each in self.recompute if each is not RecomputePolicy.SELECTIVE)
        return self.with_recompute(*others) if others else self

    def allows(self, partition: Partition) -> bool:
        """Return whether a partition has BACKWARD stages, or none, as the policies want."""
        if partition.num_blocks == 0:
            return True
        if not partition.recomputes:
            return RecomputePolicy.NONE in self.recompute
        return self.recompute != (RecomputePolicy.NONE,)
