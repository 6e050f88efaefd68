"""From a model and a machine to the plan with the shortest step.

Chosen together: the stages (uneven, asymmetric), the blocks of the fused stage, teams and rounds. A
team of T splits the plan into T pipelines that never meet, so it idles less the larger it is, but
uploads every stage's weights T times: `simulate_transfers` decides between them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from roundpipe_lightning.errors import PlanError
from roundpipe_lightning.planning.costs import RecomputeStart, StageCosts, stage_costs
from roundpipe_lightning.planning.cuts import check_partition
from roundpipe_lightning.planning.evaluate import Evaluator
from roundpipe_lightning.planning.hardware import HardwareSpec
from roundpipe_lightning.planning.limits import stage_limits
from roundpipe_lightning.planning.plan import Plan
from roundpipe_lightning.planning.profile import ModelProfile
from roundpipe_lightning.planning.roundrobin import round_robin_schedule, split_rounds
from roundpipe_lightning.planning.schedule import Schedule
from roundpipe_lightning.planning.search import (
    Candidate,
    Effort,
    StageLimits,
    best_even,
    even_candidates,
    search_partitions,
)
from roundpipe_lightning.planning.simulate import simulate
from roundpipe_lightning.planning.stages import Partition
from roundpipe_lightning.planning.timeline import Timeline
from roundpipe_lightning.planning.transfers import simulate_transfers

_CONFIRMED = 3
"""Partitions per team and round size that are simulated with their transfers."""

_CONFIRMED_ACTIONS = 40_000
"""Actions of these simulations together; one is simulated in any case."""

_HOPELESS = 1.01
"""How much longer than the best a confirmed step may be for more of its kind to be confirmed."""

_PROMISING = 1.04
"""How much longer than the best with even stages a team and round size may be to be searched."""

_SHAPES_SEARCHED = 3
"""Team and round sizes that are searched, at most."""

_BATCHES_SEARCHED = 3
"""Accumulated batches that the search looks at, so that those between fill and drain count most."""


@dataclass(frozen=True, kw_only=True)
class PlanningRequest:
    """What a plan is wanted for; what has a default is left to the planner.

    Attributes:
        num_microbatches: Microbatches of one batch.
        num_batches: Batches that are accumulated before the weights change: one continuous stream,
            a batch fills the pipeline while the one before drains.
        team_sizes: Team sizes to choose from; empty: all that divide the number of devices.
        round_sizes: Round sizes to choose from; empty: the whole batch, and one per worker.
        limits: Blocks per stage at most; None: what fits the devices' memory.
        partitions: Partitions to choose from; empty: the search finds them.
        hop_seconds: From one worker to another; None: a download and an upload of the largest
            boundary.
        recompute_start: When the workers begin a recompute.
        effort: How long to search per team and round size.

    Raises:
        PlanError: If a count is less than 1, or a partition breaks the limits.
    """

    num_microbatches: int
    num_batches: int = 1
    team_sizes: tuple[int, ...] = ()
    round_sizes: tuple[int, ...] = ()
    limits: StageLimits | None = None
    partitions: tuple[Partition, ...] = ()
    hop_seconds: float | None = None
    recompute_start: RecomputeStart = RecomputeStart.EARLY
    effort: Effort = field(default_factory=Effort)

    def __post_init__(self) -> None:
        """Refuse counts that no step has."""
        counts = [
            ("num_microbatches", self.num_microbatches),
            ("num_batches", self.num_batches),
            *(("team_sizes", size) for size in self.team_sizes),
            *(("round_sizes", size) for size in self.round_sizes),
        ]
        for name, value in counts:
            if value < 1:
                raise PlanError(f"{name}: {value} must be 1 or more.")
        for partition in self.partitions:
            if self.limits is not None and not self.limits.allow(partition):
                raise PlanError(
                    f"partitions: '{partition}' has a stage with more blocks than the limits "
                    f"forward={self.limits.forward}, backward={self.limits.backward}, "
                    f"fused={self.limits.fused} allow: change either."
                )


@dataclass(frozen=True, kw_only=True)
class PlannedTraining:
    """The planner's answer.

    Attributes:
        plan: The plan; its microbatches are those of all accumulated batches.
        costs: What its stages cost.
        timeline: When every action is predicted to run, transfers included.
    """

    plan: Plan
    costs: StageCosts
    timeline: Timeline


def plan_training(
    profile: ModelProfile, *, hardware: HardwareSpec, request: PlanningRequest
) -> PlannedTraining:
    """Choose the plan with the shortest predicted step.

    Args:
        profile: The model. Sizes that are 0 cost no time and no memory.
        hardware: The machine; every device is a worker.
        request: What is wanted, and what is settled.

    Raises:
        PlanError: If a device cannot hold a block, or the request contradicts the machine.
    """
    limits = request.limits or stage_limits(profile, hardware)
    hop = (
        request.hop_seconds if request.hop_seconds is not None else _hop_seconds(profile, hardware)
    )
    for partition in request.partitions:
        if partition.num_blocks != profile.num_blocks:
            raise PlanError(
                f"partitions: '{partition}' has {partition.num_blocks} blocks, the model has "
                f"{profile.num_blocks}."
            )
        check_partition(
            partition, cuts=profile.cuts, block_names=profile.block_names, what="partitions"
        )
    task = _Task(
        profile=profile, hardware=hardware, request=request, limits=limits, hop_seconds=hop
    )
    best, shape = task.best()
    num_batches = request.num_batches
    timeline = best.timeline
    if num_batches != task.num_looked_at:
        timeline = task.predict(shape, partition=best.partition, num_batches=num_batches).timeline
    return PlannedTraining(
        plan=task.plan(shape, partition=best.partition),
        costs=task.costs(best.partition),
        timeline=timeline,
    )


def _hop_seconds(profile: ModelProfile, hardware: HardwareSpec) -> float:
    size = max((block.boundary_bytes for block in profile.blocks), default=0)
    return hardware.download_seconds(size) + hardware.upload_seconds(size)


@dataclass(frozen=True, kw_only=True)
class _Shape:
    """How the microbatches travel, whatever the stages are."""

    team_size: int
    round_size: int


@dataclass(frozen=True, kw_only=True)
class _Prediction:
    """A partition and its step."""

    partition: Partition
    timeline: Timeline
    makespan_seconds: float


@dataclass(frozen=True, kw_only=True)
class _Task:
    """Everything that stays the same during the search."""

    profile: ModelProfile
    hardware: HardwareSpec
    request: PlanningRequest
    limits: StageLimits
    hop_seconds: float

    def best(self) -> tuple[_Prediction, _Shape]:
        """Return the best partition found and how its microbatches travel."""
        asked = self.request.partitions
        even = tuple(
            Candidate(partition.forward, partition.backward[0], partition.backward[1:])
            for partition in asked
        ) or even_candidates(self.profile, limits=self.limits)
        best: _Prediction | None = None
        for shape in self._promising_shapes(even):
            for partition in self._search(shape, even):
                found = self.predict(shape, partition=partition, num_batches=self.num_looked_at)
                if best is None or found.makespan_seconds < best.makespan_seconds:
                    best, best_shape = found, shape
                elif not asked and found.makespan_seconds > _HOPELESS * best.makespan_seconds:
                    break
        assert best is not None
        return best, best_shape

    def _promising_shapes(self, even: Sequence[Candidate]) -> list[_Shape]:
        """Return the teams and rounds that do best with even stages, the best first."""
        makespans = {}
        for shape in self._shapes():
            makespans[shape] = best_even(self._evaluator(shape), even=even).makespan_seconds
        if not makespans:
            request = self.request
            raise PlanError(
                f"No team size of {request.team_sizes} goes with a round size of "
                f"{request.round_sizes} and num_microbatches={request.num_microbatches}: a round "
                "has at least one microbatch per worker of a team, and at most the whole batch."
            )
        ranked = sorted(makespans, key=lambda shape: makespans[shape])
        limit = _PROMISING * makespans[ranked[0]]
        return [shape for shape in ranked if makespans[shape] <= limit][:_SHAPES_SEARCHED]

    def _shapes(self) -> Iterator[_Shape]:
        num_workers, request = self.hardware.num_devices, self.request
        divisors = [size for size in range(1, num_workers + 1) if num_workers % size == 0]
        for team_size in request.team_sizes or divisors:
            if team_size not in divisors:
                raise PlanError(
                    f"team_sizes: {team_size} does not divide the {num_workers} devices of "
                    f"{self.hardware.name}; choose from {divisors}."
                )
            rounds = request.round_sizes or (request.num_microbatches, num_workers)
            for round_size in dict.fromkeys(rounds):
                if team_size <= round_size <= request.num_microbatches:
                    yield _Shape(team_size=team_size, round_size=round_size)

    def _search(self, shape: _Shape, even: Sequence[Candidate]) -> list[Partition]:
        """Return promising partitions, the best first, or those that were asked for."""
        if self.request.partitions:
            return list(self.request.partitions)
        effort = self.request.effort
        if shape.team_size == self.hardware.num_devices:
            # One worker never waits for another: only the fused stage matters, and even stages do.
            effort = replace(effort, num_actions=0)
        found = search_partitions(
            self._evaluator(shape),
            even=even,
            limits=self.limits,
            effort=effort,
            num_results=_CONFIRMED,
        )
        partitions = [result.partition for result in found]
        num_actions = partitions[0].num_stages * self.request.num_microbatches * self.num_looked_at
        return partitions[: max(1, _CONFIRMED_ACTIONS // num_actions)]

    def _evaluator(self, shape: _Shape) -> Evaluator:
        """Evaluate one of the pipelines that a shape splits the plan into."""
        hardware, team_size = self.hardware, shape.team_size
        rounds = split_rounds(
            self.request.num_microbatches * self.num_looked_at, round_size=shape.round_size
        )
        forward = hardware.upload_seconds(1.0, num_devices=hardware.num_devices)
        trains = any(block.trainable_bytes for block in self.profile.blocks)
        shared = (2 if trains else 1) * hardware.num_devices / hardware.host_bytes_per_second
        return Evaluator(
            profile=self.profile,
            num_workers=hardware.num_devices // team_size,
            rounds=tuple(-(-size // team_size) for size in rounds),
            hop_seconds=self.hop_seconds,
            recompute_start=self.request.recompute_start,
            forward_upload_seconds=forward,
            backward_upload_seconds=max(forward, shared) if forward else 0.0,
        )

    def predict(self, shape: _Shape, *, partition: Partition, num_batches: int) -> _Prediction:
        """Predict a partition's step with all its transfers."""
        schedule = self._schedule(shape, partition=partition, num_batches=num_batches)
        costs = self.costs(partition)
        if self.hardware.shares_host_memory:
            timeline = simulate(schedule, partition=partition, costs=costs)
        else:
            timeline = simulate_transfers(
                schedule,
                partition=partition,
                costs=costs,
                profile=self.profile,
                hardware=self.hardware,
            )
        return _Prediction(
            partition=partition, timeline=timeline, makespan_seconds=timeline.makespan_seconds
        )

    def costs(self, partition: Partition) -> StageCosts:
        """Return what the stages cost."""
        return stage_costs(
            self.profile,
            partition=partition,
            hop_seconds=self.hop_seconds,
            recompute_start=self.request.recompute_start,
        )

    def plan(self, shape: _Shape, *, partition: Partition) -> Plan:
        """Make the plan of all batches."""
        num_batches = self.request.num_batches
        return Plan(
            model=self.profile.fingerprint,
            partition=partition,
            num_workers=self.hardware.num_devices,
            num_microbatches=self.request.num_microbatches * num_batches,
            team_size=shape.team_size,
            round_size=shape.round_size,
            schedule=self._schedule(shape, partition=partition, num_batches=num_batches),
            block_names=self.profile.block_names,
        )

    def _schedule(self, shape: _Shape, *, partition: Partition, num_batches: int) -> Schedule:
        return round_robin_schedule(
            partition,
            num_workers=self.hardware.num_devices,
            num_microbatches=self.request.num_microbatches * num_batches,
            round_size=shape.round_size,
            team_size=shape.team_size,
        )

    @property
    def num_looked_at(self) -> int:
        """Accumulated batches that plans are compared by."""
        return min(self.request.num_batches, _BATCHES_SEARCHED)
