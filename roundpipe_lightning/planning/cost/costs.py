"""Costs of a partition's actions, and the makespans of many partitions at once, as rows of arrays.

`PartitionTable` says which stage has which blocks and segments. `Evaluator` is the inner loop of
the search. `simulate` is its reference: it computes the same makespan for a whole table, stage
after stage, as array operations. For one stage let a[m] be the arrival of microbatch m's input, r
and c the seconds of its recompute and the rest (r = 0 but for an early recompute), and f the time
at which its worker is free. Its actions end at

    end[0] = max(a[0], f + r) + c
    end[m] = max(a[m], end[m-1] + r) + c
           = max over j <= m of (a'[j] - j (r + c)) + m (r + c) + c,   a'[0] = max(a[0], f + r),

which is one running maximum instead of a loop over the microbatches. One thing is left out: that a
recompute waits for its stored boundary too, which matters only where a worker is idle long before
its gradient comes. So the makespan is exact or, rarely, too short, and the search confirms its best
partitions with `simulate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property

import numpy as np
import numpy.typing as npt

from roundpipe_lightning.errors import PlanError
from roundpipe_lightning.planning.model.profile import ModelProfile, prefix_sums
from roundpipe_lightning.planning.schedule.plan import PipelineConfig
from roundpipe_lightning.planning.schedule.stages import (
    Partition,
    RecomputePolicy,
    Stage,
    StageKind,
)

Floats = npt.NDArray[np.float64]


class RecomputeStart(Enum):
    """Earliest begin of the recompute of a BACKWARD action."""

    EARLY = "early"
    """As soon as its worker is free: accelerators, where it is queued before the gradient's
    event."""

    WITH_GRADIENT = "with_gradient"
    """Once the gradient has arrived: workers that run an action in one go, such as CPU workers."""


class BoundaryRoute(Enum):
    """Route of boundaries between devices."""

    THROUGH_HOST = "through_host"
    """Nothing."""

    GRADIENTS_DIRECT = "gradients_direct"
    """Gradients; for boundaries there is no room."""

    DIRECT = "direct"
    """Boundaries, kept attention outputs and gradients."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ActionCost:
    """Duration of a stage for one microbatch.

    Attributes:
        recompute_seconds: The part that needs no gradient; 0 but for BACKWARD stages.
    """

    recompute_seconds: float = 0.0
    compute_seconds: float

    @property
    def seconds(self) -> float:
        return self.recompute_seconds + self.compute_seconds


class UpdateTiming(Enum):
    """Time at which the optimizer runs."""

    AFTER_STEP = "after_step"
    """After all gradients have come down; the next step's forward pass begins with the blocks that
    are updated (exact updates)."""

    BEHIND_NEXT_STEP = "behind_next_step"
    """While the next step computes with weights that are one step old (asynchronous updates)."""


@dataclass(frozen=True, kw_only=True)
class HostCosts:
    """What a step takes beside its pipeline; all durations in seconds.

    Attributes:
        per_uploaded_byte: For which an upload keeps the host's memory busy.
        per_downloaded_byte: For which a gradient does, the sum that it is added to included.
        first_upload: Of one byte of the first upload, which nothing hides.
        last_download: Of one byte of the last download.
        forward_share: Part of the pipeline that is the forward pass, beside which exact updates
            pass; 0: beside nothing.
    """

    per_uploaded_byte: float = 0.0
    per_downloaded_byte: float = 0.0
    first_upload: float = 0.0
    last_download: float = 0.0
    optimizer: float = 0.0
    timing: UpdateTiming = UpdateTiming.AFTER_STEP
    forward_share: float = 0.0

    @property
    def goes_on(self) -> bool:
        return self.timing is UpdateTiming.BEHIND_NEXT_STEP

    def step_seconds(
        self,
        pipeline: float | Floats,
        *,
        uploaded: float | Floats,
        downloaded: float | Floats,
        edges: float | Floats,
    ) -> Floats:
        """Return the whole step, given its pipeline, its bytes and what nothing hides."""
        host = self.per_uploaded_byte * uploaded + self.per_downloaded_byte * downloaded
        if self.goes_on:
            return np.maximum(pipeline, host + self.optimizer)
        late = np.maximum(0.0, self.optimizer - self.forward_share * pipeline)
        step: Floats = np.maximum(np.maximum(pipeline, host) + late, host + self.optimizer) + edges
        return step


@dataclass(frozen=True, kw_only=True)
class StageCosts:
    """Costs of every stage of a partition.

    Attributes:
        stages: Per stage, in the order of `Partition.stages`.
        hop_seconds: Time for a boundary or gradient to get from one worker to another.
        route: The way that boundaries take, which the hop is of.
        speeds: How fast every worker is: the costs are those of speed 1. Empty: all are.
    """

    stages: tuple[ActionCost, ...]
    hop_seconds: float = 0.0
    recompute_start: RecomputeStart = RecomputeStart.EARLY
    route: BoundaryRoute = BoundaryRoute.THROUGH_HOST
    speeds: tuple[float, ...] = ()

    def of(self, place: int, worker: int) -> ActionCost:
        cost = self.stages[place]
        if not self.speeds:
            return cost
        factor = 1 / self.speeds[worker]
        return ActionCost(
            recompute_seconds=factor * cost.recompute_seconds,
            compute_seconds=factor * cost.compute_seconds,
        )


def stage_costs(
    profile: ModelProfile,
    *,
    partition: Partition,
    hop_seconds: float = 0.0,
    recompute_start: RecomputeStart = RecomputeStart.EARLY,
    recompute: RecomputePolicy = RecomputePolicy.FULL,
    route: BoundaryRoute = BoundaryRoute.THROUGH_HOST,
    speeds: tuple[float, ...] = (),
) -> StageCosts:
    """Add up the blocks of every stage; PlanError if the partition has another number of blocks."""
    if partition.num_blocks != profile.num_blocks:
        raise PlanError(f"'{partition}' does not cut a model of {profile.num_blocks} blocks.")
    return StageCosts(
        stages=tuple(_stage_cost(stage, profile, recompute) for stage in partition.stages()),
        hop_seconds=hop_seconds,
        recompute_start=recompute_start,
        route=route,
        speeds=speeds,
    )


def _stage_cost(stage: Stage, profile: ModelProfile, policy: RecomputePolicy) -> ActionCost:
    units = [profile.units[index] for index in stage.blocks] + [profile.tail] * stage.has_tail
    forward = sum(unit.forward_seconds for unit in units)
    backward = sum(unit.backward_seconds for unit in units)
    forward += profile.head.forward_seconds if stage.has_head_forward else 0.0
    backward += profile.head.backward_seconds if stage.has_head_backward else 0.0
    if stage.kind is StageKind.FORWARD:
        return ActionCost(compute_seconds=forward)
    if stage.kind is StageKind.FUSED:
        return ActionCost(compute_seconds=forward + backward)
    recompute = sum(unit.seconds_to_recompute(policy) for unit in units)
    if stage.keeps_graph:
        recompute = 0.0
    return ActionCost(recompute_seconds=recompute, compute_seconds=backward)


Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class PartitionTable:
    """Partitions as rows of block counts, and their stages as columns.

    Columns stand in the order in which a microbatch passes the stages. A partition with fewer of
    them has empty ones in front of its FORWARD and behind its BACKWARD stages. Of plain partitions
    the last FORWARD and the first BACKWARD stage have one unit more, the tail segment.

    Attributes:
        forward: Shape (partitions, most FORWARD stages); shorter ones have zeros in front.
        backward: Shape (partitions, most stages from the tail on), column 0 the fused stage or the
            first BACKWARD one; shorter ones have zeros behind.
        keeps: Shape (partitions,), `Partition.keeps_graphs`.
    """

    forward: Counts
    backward: Counts
    keeps: npt.NDArray[np.bool_]
    plain: bool = False

    def __len__(self) -> int:
        return len(self.forward)

    def __getitem__(self, rows: Counts | slice) -> PartitionTable:
        return replace(
            self,
            forward=self.forward[rows],
            backward=self.backward[rows],
            keeps=self.keeps[rows],
        )

    @classmethod
    def of(cls, partitions: Sequence[Partition]) -> PartitionTable:
        most_forward = max(partition.num_forward for partition in partitions)
        most_backward = max(len(partition.backward) for partition in partitions)
        forward = np.zeros((len(partitions), most_forward), dtype=np.int64)
        backward = np.zeros((len(partitions), most_backward), dtype=np.int64)
        for row, partition in enumerate(partitions):
            forward[row, most_forward - partition.num_forward :] = partition.forward
            backward[row, : len(partition.backward)] = partition.backward
        keeps = np.array([partition.keeps_graphs for partition in partitions])
        return cls(forward=forward, backward=backward, keeps=keeps, plain=partitions[0].plain)

    # The rule of `Stage.has_head_forward`, `has_head_backward` and `has_tail`, as columns:
    @cached_property
    def first(self) -> Counts:
        found: Counts = self.is_stage.argmax(axis=1)
        return found

    @cached_property
    def last(self) -> Counts:
        found: Counts = self.fused + np.count_nonzero(self.backward[:, 1:], axis=1)
        return found

    @property
    def fused(self) -> int:
        """The first column that runs backward."""
        return int(self.forward.shape[1])

    @cached_property
    def start(self) -> Counts:
        """First unit of every stage, of shape (partitions, stages)."""
        ahead = self.forward.cumsum(axis=1) - self.forward
        behind = self.backward.sum(axis=1, keepdims=True) - self.backward.cumsum(axis=1)
        return np.concatenate([ahead, behind], axis=1)

    @cached_property
    def stop(self) -> Counts:
        stop: Counts = self.start + np.concatenate([self.forward, self.backward], axis=1)
        if self.plain:
            stop[:, self.fused - 1 : self.fused + 1] += 1
        return stop

    @cached_property
    def is_stage(self) -> npt.NDArray[np.bool_]:
        is_stage = self.stop > self.start
        is_stage[:, self.fused] = True
        return is_stage

    def unit_sums(self, sums: Floats) -> Floats:
        found: Floats = sums[self.stop] - sums[self.start]
        return found

    def head_stages(self, profile: ModelProfile) -> list[tuple[Counts, Counts]]:
        """Rows and columns of the stages that need the head: the first; the last if it is trained.

        A head that is not trained has no backward pass.
        """
        rows = np.arange(len(self))
        found = [(rows, self.first)]
        if profile.head.trainable_bytes:
            others = rows[self.first != self.last]
            found.append((others, self.last[others]))
        return found

    def part_sums(self, profile: ModelProfile, size: str) -> Floats:
        """Add up a figure over every stage's blocks and segments."""
        sizes = self.unit_sums(profile.running_sums(size))
        for rows, columns in self.head_stages(profile):
            sizes[rows, columns] += getattr(profile.head, size)
        if not self.plain:
            sizes[:, self.fused] += getattr(profile.tail, size)
        return sizes

    def neighbours(self, distance: int, config: PipelineConfig) -> Counts:
        """Return the column of the stage so many places on; -1 where none is.

        The last stages of a round are followed by the first ones of the next, if there is one. A
        stage that follows itself is one stage run that goes on, so nothing follows.
        """
        count = self.num_turns[:, None]
        turn = self.turns + distance
        if config.shares_backward:
            first = self.fused - self.first[:, None]  # turn of the first BACKWARD stage
            behind = self.turns + np.sign(distance)
            turn = np.where(self.turns < first, np.minimum(turn, first), behind)
        if config.goes_on:
            turn = turn % count
            is_other = distance % count != 0
        else:
            is_other = np.broadcast_to((turn >= 0) & (turn < count), turn.shape)
        column = turn + self.first[:, None]
        column += self.keeps[:, None] & (column >= self.fused - 1)
        found: Counts = np.where(is_other, column, -1)
        return found

    @property
    def turns(self) -> Counts:
        """The turn of each column: where graphs are kept, two stages in a row have the same."""
        columns = np.arange(self.start.shape[1])[None, :]
        found: Counts = (
            columns - self.first[:, None] - (self.keeps[:, None] & (columns >= self.fused))
        )
        return found

    @property
    def num_turns(self) -> Counts:
        found: Counts = self.last - self.first + 1 - self.keeps
        return found


def _pass_stage(ends: Floats, start: Floats, *, recompute: Floats, compute: Floats) -> None:
    """Turn arrivals at a stage, by microbatch and partition, into ends of its actions."""
    np.maximum(ends[0], start + recompute, out=ends[0])
    offsets = np.arange(len(ends), dtype=np.float64)[:, None] * (recompute + compute)
    ends -= offsets
    np.maximum.accumulate(ends, axis=0, out=ends)
    offsets += compute
    ends += offsets


_CHUNK = 512  # partitions evaluated together: as many as keep the arrays in the cache


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """Computes makespans, and whole steps, for one model on one number of workers.

    A plan with teams of T is T pipelines that do not meet, each with 1/T of the workers and of the
    microbatches: evaluate one of them.

    Attributes:
        rounds: Microbatches of each round.
        forward_upload_seconds: Time to upload one byte of weights for a FORWARD stage; 0: no time.
        backward_upload_seconds: The same for FUSED and BACKWARD stages, whose uploads may share the
            host's memory with gradients on their way back.
        team_size: Pipelines beside each other.
        speeds: Of the workers, where they are unequal. Empty: 1.
        joined: Microbatches of the batch whose tail segment runs once, as in `Partition`; 0: none.
        shares_backward: As in `PipelineConfig`.
        pipeline_share: Part of the pipeline that a step is longer by, because transfers and the
            pipeline hinder each other; of steps that the host limits the quicker pipeline is best.
    """

    profile: ModelProfile
    num_workers: int
    rounds: tuple[int, ...]
    hop_seconds: float
    recompute_start: RecomputeStart = RecomputeStart.EARLY
    forward_upload_seconds: float = 0.0
    backward_upload_seconds: float = 0.0
    weight_slots: int = 2
    recompute: RecomputePolicy = RecomputePolicy.FULL
    team_size: int = 1
    host: HostCosts = field(default_factory=HostCosts)
    speeds: tuple[float, ...] = ()
    pipeline_share: float = 0.0
    joined: int = 0
    shares_backward: bool = False

    @property
    def bound(self) -> Evaluator:
        """The same with all weights there already: its steps are no longer."""
        host = replace(self.host, per_uploaded_byte=0.0, first_upload=0.0)
        bare = replace(self, forward_upload_seconds=0.0, backward_upload_seconds=0.0)
        return replace(bare, host=host, pipeline_share=0.0)

    def seconds(self, table: PartitionTable) -> Floats:
        host, rows = self.host, np.arange(len(table))
        sizes = table.part_sums(self.profile, "parameter_bytes")
        gradients = table.part_sums(self.profile, "trainable_bytes")[:, table.fused :]
        # A stage that is the next one of its team, too, goes on as the same stage run.
        count, rounds = table.num_turns, len(self.rounds)
        same = self.num_workers % count == 0
        runs = np.where(same, np.minimum(rounds, self.num_workers // count), rounds)
        runs = self.team_size * runs
        runs_back = self.team_size * self.num_workers * rounds if self.shares_backward else runs
        first = np.maximum((table.stop - table.start)[rows, table.first], 1)
        edges = host.first_upload * sizes[rows, table.first] / first
        edges += host.last_download * gradients[rows, table.last - table.fused]
        pipeline = self.makespans(table)
        step = host.step_seconds(
            pipeline,
            uploaded=runs * sizes[:, : table.fused].sum(axis=1)
            + runs_back
            * (sizes[:, table.fused :].sum(axis=1) - table.keeps * sizes[:, table.fused]),
            downloaded=runs_back * gradients.sum(axis=1),
            edges=edges,
        )
        result: Floats = step + self.pipeline_share * pipeline
        return result

    def makespans(self, table: PartitionTable) -> Floats:
        """Return the pipeline's part: of one step, or from one to the next where it goes on."""
        parts = [table[first : first + _CHUNK] for first in range(0, len(table), _CHUNK)]
        return np.concatenate([self._makespans(part) for part in parts]) if parts else np.zeros(0)

    def _makespans(self, table: PartitionTable) -> Floats:
        rounds, speeds = self.rounds, self.speeds or (1.0,) * self.num_workers
        recompute, compute = self._durations(table)
        upload = self._upload_durations(table)
        present = table.is_stage.T
        period, rows = recompute + compute, np.arange(len(table))
        # Worker `num_workers` is a dummy that is always free: absent stages run there, in no time.
        state = np.zeros((3, self.num_workers + 1, len(table)))
        state[:, -1] = -np.inf
        free, free_before, uploaded = state
        turns = np.zeros(len(table), dtype=np.int64)
        hop = self.hop_seconds if self.num_workers > 1 else 0.0
        before, once = upload[table.first, rows], np.zeros(len(table))
        slowness = 1.0 / np.asarray([*speeds, 1.0])
        for index, round_size in enumerate(rounds * (2 if self.host.goes_on else 1)):
            if index == len(rounds):
                once, before = free.max(axis=0) - before, free.max(axis=0)
            ends = np.zeros((round_size, len(table)))
            started, share = np.zeros(len(table), dtype=bool), -(-round_size // self.num_workers)
            for stage in range(len(compute)):
                here = present[stage]
                stays = table.keeps & (stage == table.fused)
                turns -= stays
                is_shared = self.shares_backward and stage >= table.fused
                worker = np.where(here, turns % self.num_workers, self.num_workers)
                turns += here & (not is_shared)
                hops = here & started & ~stays & (not is_shared or stage == table.fused)
                ends += np.where(hops, hop, 0.0)
                started |= here
                if (table.plain or self.joined) and stage == table.fused:
                    ends[:] = ends.max(axis=0)  # the barrier
                if is_shared and stage == table.fused:
                    state[:, :-1] = state[:, :-1].max(axis=1, keepdims=True)
                    ends = ends[:share]
                free_now = free[worker, rows]
                slot_free = free_before[worker, rows] if self.weight_slots > 1 else free_now
                weights = np.maximum(uploaded[worker, rows], slot_free)
                weights += upload[stage]
                start = np.maximum(free_now, weights)
                slow = slowness[worker]
                if self.joined and stage == table.fused:
                    ends[:] = np.maximum(ends, start) + self.joined * compute[stage] * slow
                    uploaded[worker, rows], free_before[worker, rows] = weights, free_now
                    free[worker, rows] = ends[0]
                    continue
                _pass_stage(
                    ends, start, recompute=recompute[stage] * slow, compute=compute[stage] * slow
                )
                uploaded[worker, rows], free_before[worker, rows] = weights, free_now
                free[worker, rows] = np.where(here, ends[-1], -np.inf)
            if self.shares_backward:
                state[:, :-1] = state[:, turns % self.num_workers, rows][:, None]
        result: Floats = free.max(axis=0) - before
        if self.host.goes_on:  # no step begins before the last but one has ended
            busy = sum(rounds) * period.sum(axis=0) / sum(speeds)
            result = np.maximum(result, np.maximum(once / 2, busy))
        return result

    def _upload_durations(self, table: PartitionTable) -> Floats:
        sizes = table.part_sums(self.profile, "parameter_bytes")
        sizes[:, : table.fused] *= self.forward_upload_seconds
        sizes[:, table.fused :] *= self.backward_upload_seconds
        sizes[table.keeps, table.fused] = 0.0
        return np.ascontiguousarray(sizes.T)

    def _durations(self, table: PartitionTable) -> tuple[Floats, Floats]:
        units, head, tail = self.profile.units, self.profile.head, self.profile.tail
        fused, rows = table.fused, np.arange(len(table))
        forward = table.unit_sums(self.profile.running_sums("forward_seconds"))
        compute = table.unit_sums(self.profile.running_sums("backward_seconds"))
        again = [unit.seconds_to_recompute(self.recompute) for unit in units]
        recompute = table.unit_sums(prefix_sums(again))
        recompute[:, :fused] = 0.0
        recompute[table.keeps, fused] = 0.0
        compute[rows, table.last] += head.backward_seconds
        if not table.plain:
            compute[:, fused] += forward[:, fused] + tail.forward_seconds + tail.backward_seconds
            recompute[:, fused] = 0.0
        compute[:, :fused] = forward[:, :fused]
        compute[rows, table.first] += head.forward_seconds
        if self.recompute_start is RecomputeStart.WITH_GRADIENT:
            compute += recompute
            recompute = np.zeros_like(recompute)
        return np.ascontiguousarray(recompute.T), np.ascontiguousarray(compute.T)
