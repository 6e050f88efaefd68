"""Cases: one way for the microbatches to travel each, with the stages that fit a device.

`Footprint` says what a layout needs. The limits are the most blocks of each kind of stage with
which stages of that size still fit. Where a profile says nothing about activations, a BACKWARD or
FUSED stage gets no more blocks than a device would hold if the blocks were dealt out evenly, and a
FORWARD stage twice as many.

What memory a device has to spare while it runs the stage that needs the most is given to blocks
that it runs anyway. A frozen block that stays is never uploaded again. A trainable one changes
when the step ends, so it stays from its first run of a step on, usually its FORWARD, to the last
one: its BACKWARD, and those of later rounds. Greedy: blocks that save the most uploads per byte
first. While such a block's stage runs, the block needs no room in a slot for weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

import numpy as np
import numpy.typing as npt

from roundpipe_lightning.errors import FitError, PlanError
from roundpipe_lightning.planning.cost.costs import BoundaryRoute, Evaluator, Floats, PartitionTable
from roundpipe_lightning.planning.cost.device_memory import Footprint, size_text
from roundpipe_lightning.planning.cost.predict import StepModel, StepPrediction
from roundpipe_lightning.planning.cost.traffic import hop_seconds
from roundpipe_lightning.planning.model.hardware import HardwareSpec
from roundpipe_lightning.planning.model.profile import ModelProfile
from roundpipe_lightning.planning.schedule.plan import PipelineConfig, PipelineLayout, split_rounds
from roundpipe_lightning.planning.schedule.stages import (
    Partition,
    RecomputePolicy,
    call_lengths,
    cuts_before,
    reversed_cuts,
)
from roundpipe_lightning.planning.search.partition import (
    QUICK,
    Effort,
    PartitionSearch,
    StageLimits,
    even_partitions,
    largest_cuts,
)
from roundpipe_lightning.planning.search.request import PlanningRequest

ONES = StageLimits(forward=1, fused=0, backward=1)
"""Limits that allow the smallest stages alone."""


def limits_within(footprint: Footprint, *, config: PipelineConfig) -> StageLimits | None:
    """Return the most blocks per stage with which every device holds its part; None: not one."""
    widest = widest_limits(footprint, config=config)
    return widest and joint_limits(widest, footprint=footprint, config=config)


def widest_limits(footprint: Footprint, *, config: PipelineConfig) -> StageLimits | None:
    """Return the most blocks of one kind of stage while the others have the fewest.

    None where stages of one block do not fit.
    """

    def holds(**changes: int) -> bool:
        return are_held(replace(ONES, **changes), footprint=footprint, config=config)

    if not holds():
        return None
    num_blocks = footprint.profile.num_blocks
    most = max(num_blocks, 1)
    return StageLimits(
        forward=_largest(lambda n: holds(forward=n), least=1, most=most),
        backward=_largest(lambda n: holds(backward=n), least=1, most=most),
        fused=_largest(lambda n: holds(fused=n), least=0, most=num_blocks),
    )


def joint_limits(
    limits: StageLimits, *, footprint: Footprint, config: PipelineConfig
) -> StageLimits:
    """Narrow limits until stages as large as all of them fit: neighbours share the two slots."""
    while not are_held(limits, footprint=footprint, config=config):
        forward, fused, backward = limits.forward, limits.fused, limits.backward
        if forward > max(backward, fused):
            forward -= 1
        elif fused > backward:
            fused -= 1
        elif backward > 1:
            backward -= 1
        else:
            forward, fused = max(forward - 1, 1), max(fused - 1, 0)
        limits = StageLimits(forward=forward, fused=fused, backward=backward)
    return limits


def are_held(limits: StageLimits, *, footprint: Footprint, config: PipelineConfig) -> bool:
    """Return whether every device can hold its part where all stages are as large as the limits.

    Of unequal devices the largest one: which stage runs where is looked at with each partition.
    """
    layout = config.with_stages(largest_stages(footprint.profile, limits, plain=config.plain))
    largest = max(one.device_bytes for one in footprint.hardware.workers)
    return footprint.most_bytes(layout) <= largest


def largest_stages(profile: ModelProfile, limits: StageLimits, *, plain: bool = False) -> Partition:
    """Return stages as large as the limits and the model's cuts allow."""
    num_blocks, cuts = profile.num_blocks, profile.cuts
    fused = min(limits.fused, sum(call_lengths(num_blocks, cuts)[-1:]))
    rest = num_blocks - fused
    ahead = num_blocks if plain else rest
    forward = largest_cuts(ahead, most=limits.forward, cuts=cuts_before(ahead, cuts))
    backward = largest_cuts(rest, most=limits.backward, cuts=reversed_cuts(rest, cuts))
    return Partition(forward=forward or (0,) * plain, backward=(fused, *backward), plain=plain)


def describe_lack(footprint: Footprint, *, config: PipelineConfig) -> str:
    """Name what no device can hold: the stage of one block or of the tail segment, at its least."""
    profile, hardware = footprint.profile, footprint.hardware
    ones = largest_stages(profile, ONES, plain=config.plain)
    need = footprint.need(config.with_stages(ones))
    part, what = profile.tail, "the tail segment"
    if need.stage and not need.stage.has_tail:
        part = profile.blocks[need.stage.blocks.start]
        what = f"even one block, {part.name!r}"
    sizes = ", ".join(f"{kind.value} {size_text(size)}" for kind, size in need.num_bytes)
    return (
        f"{hardware.name} cannot hold {what}: it has {size_text(part.parameter_bytes)} of weights "
        f"and needs {size_text(need.total_bytes)} of a device's "
        f"{size_text(hardware.device_bytes)} ({sizes}). Use smaller microbatches, LoRA, or devices "
        "with more memory."
    )


def _largest(holds: Callable[[int], bool], *, least: int, most: int) -> int:
    """The largest number that holds, of which `least` does: by doubling, then by bisection."""
    stride = 1
    while least + stride <= most and holds(least + stride):
        least, stride = least + stride, 2 * stride
    most = min(most, least + stride - 1)
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if holds(middle) else (least, middle - 1)
    return least


def resident_blocks(
    footprint: Footprint, layout: PipelineLayout, *, wanted: int | None = None
) -> tuple[tuple[int, ...], ...]:
    """Return for every worker the blocks that stay on it, ascending; empty where none do.

    Args:
        layout: The plan's stages, teams and rounds; it must fit.
        wanted: Blocks that stay on every worker that runs as many; None: as many as fit and save
            uploads.

    Raises:
        FitError: A worker has no room for those that are wanted.
    """
    hardware, blocks = footprint.hardware, footprint.profile.blocks
    moves = not hardware.shares_host_memory and any(block.parameter_bytes for block in blocks)
    if not moves or wanted == 0:
        return ()
    table = PartitionTable.of([layout.partition])
    stage_needs = np.sum(list(footprint.stage_bytes(layout).values()), axis=0)
    by_worker: list[tuple[int, ...]] = [()] * hardware.num_devices
    for team, members in enumerate(layout.teams(hardware.num_devices)):
        runs = footprint.team_stages(layout, team=team)
        if not runs:
            continue
        places, ranked = sorted(set(runs)), _ranked(footprint.profile, layout, runs)
        needs = stage_needs[places]
        room = min(hardware.workers[worker].device_bytes for worker in members)
        chosen: list[int] = []
        resident = 0
        for block in ranked:
            if len(chosen) == wanted:
                break
            size = blocks[block].parameter_bytes
            left = needs - size * footprint.slots_of(table, block, layout=layout)[places]
            if resident + size + left.max() <= room:
                chosen.append(block)
                needs, resident = left, resident + size
        if len(chosen) < min(wanted or 0, len(ranked)):
            block = next(block for block in ranked if block not in chosen)
            raise FitError(
                f"{wanted} blocks cannot stay on a device of {hardware.name}: with {len(chosen)} "
                f"of them it holds {size_text(resident + needs.max())} of {size_text(room)}, and "
                f"{blocks[block].name!r} has {size_text(blocks[block].parameter_bytes)} more. Ask "
                "for fewer, or leave it to the planner."
            )
        for worker in members:
            by_worker[worker] = tuple(sorted(chosen))
    return tuple(by_worker) if any(by_worker) else ()


def _ranked(profile: ModelProfile, layout: PipelineLayout, runs: list[int]) -> list[int]:
    """Return the blocks that save uploads in a team's stages, the most per byte first."""
    num_runs: Counter[int] = Counter()
    for place, _ in groupby(runs):  # the same stage again is the same stage run
        num_runs.update(layout.partition.stages()[place].blocks)
    saved = {
        index: count - min(1.0, part.trainable_bytes / part.parameter_bytes)
        for index, count in num_runs.items()
        if (part := profile.blocks[index]).parameter_bytes
    }
    worthwhile = [index for index, share in saved.items() if share > 0]
    return sorted(worthwhile, key=lambda index: (-saved[index], index))


_FEW = 8  # even partitions that fit, fewer than which call for smaller ones
_ROUND = 8  # microbatches of a round that few workers may take, beside one each and all of a batch
_PIPELINE_SHARE = 0.05  # part of a pipeline's estimate by which the estimate of its step is longer

_EVEN_STAGES = 3000
"""Blocks of a model times numbers of stages to choose from, about: balancing takes time."""

Steps = Callable[[int], StepModel]
"""The model for one microbatch of a batch that is split into a number of them."""

Admits = Callable[[PipelineLayout], bool]
"""Whether a layout keeps what the planner does not know, such as the host's memory."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """One way for the microbatches to travel.

    Attributes:
        asked: Partitions to choose from; empty: the search finds them.
        limits: Blocks per stage at most, other stages as small as they may be.
        joint_limits: Blocks per stage at most, all stages together.
    """

    config: PipelineConfig
    step: StepModel
    request: PlanningRequest
    asked: tuple[Partition, ...]
    limits: StageLimits
    joint_limits: StageLimits

    @property
    def footprint(self) -> Footprint:
        return self.step.footprint

    @property
    def profile(self) -> ModelProfile:
        return self.footprint.profile

    @property
    def hardware(self) -> HardwareSpec:
        return self.footprint.hardware

    def fits(self, table: PartitionTable) -> npt.NDArray[np.bool_]:
        """Return a mask of partitions that keep the devices' memory and the recompute policies."""
        fit = self.footprint.fits_each(table, config=self.config)
        keeps = False if self.config.shares_backward else self.request.hints.keeps_graphs
        if keeps is not None:
            fit &= table.keeps == keeps
        if self.profile.num_blocks:
            policies = self.request.recompute
            fit &= np.where(
                table.backward[:, 1:].any(axis=1) | (table.plain & ~table.keeps),
                policies != (RecomputePolicy.NONE,),
                RecomputePolicy.NONE in policies,
            )
        return fit

    def beginnings(self, admits: Admits | None) -> tuple[Partition, ...]:
        partitions = self.asked
        if not partitions:
            partitions = self._even(self.limits)
            if self.fits(PartitionTable.of(partitions)).sum() < _FEW:
                partitions = (*partitions, *self._even(self.joint_limits))
        fit = self.fits(PartitionTable.of(partitions)).tolist()
        return tuple(
            partition
            for partition, holds in dict(zip(partitions, fit, strict=True)).items()
            if holds and (admits is None or admits(self.config.with_stages(partition)))
        )

    def _even(self, limits: StageLimits) -> tuple[Partition, ...]:
        most = max(_FEW // 2, _EVEN_STAGES // max(self.profile.num_blocks, 1))
        count = min(self.request.effort.num_even, most)
        return even_partitions(self.profile, limits=limits, count=count, plain=self.config.plain)

    def estimates(self, partitions: Sequence[Partition]) -> Floats:
        return self.evaluator.seconds(PartitionTable.of(partitions))

    def bounds(self, partitions: Sequence[Partition]) -> Floats:
        """Return lower bounds of the steps' seconds: all weights are there."""
        return self.evaluator.bound.seconds(PartitionTable.of(partitions))

    @cached_property
    def evaluator(self) -> Evaluator:
        """Estimates one of the pipelines that teams split the plan into."""
        hardware, config = self.hardware, self.config
        rounds = split_rounds(config.num_microbatches, round_size=config.round_size)
        forward = hardware.upload_seconds(1.0, num_devices=hardware.num_devices)
        trains = any(block.trainable_bytes for block in self.profile.blocks)
        shared = (2 if trains else 1) * hardware.num_devices / hardware.host_bytes_per_second
        reach = hardware.devices_reach_each_other
        quickest = BoundaryRoute.DIRECT if reach else BoundaryRoute.THROUGH_HOST
        hop = self.step.hop
        if hop is None:
            hop = hop_seconds(hardware, self.footprint.boundary_bytes, route=quickest)
        shares = tuple(-(-size // config.team_size) for size in rounds)
        # What a share is rounded by is made up for in later stages, where speeds differ.
        exact = sum(shares) * config.team_size / config.num_microbatches
        teams = config.teams(hardware.num_devices) if config.speeds else ()
        speeds = (sum(config.speeds[worker] for worker in team) / len(team) for team in teams)
        return Evaluator(
            profile=self.profile,
            num_workers=hardware.num_devices // config.team_size,
            rounds=shares,
            hop_seconds=hop,
            recompute_start=self.request.recompute_start,
            forward_upload_seconds=forward,
            backward_upload_seconds=max(forward, shared) if forward else 0.0,
            weight_slots=config.weight_slots,
            recompute=config.recompute,
            team_size=config.team_size,
            host=self.step.host_of(config.num_batches),
            speeds=tuple(exact * speed for speed in speeds),
            pipeline_share=_PIPELINE_SHARE,
            joined=config.round_size if config.joined else 0,
            shares_backward=config.shares_backward,
        )

    def search(self, effort: Effort) -> PartitionSearch:
        return PartitionSearch(
            evaluator=self.evaluator, limits=self.limits, effort=effort, fits=self.fits
        )

    def predict(self, partition: Partition) -> StepPrediction:
        layout, wanted = self.config.with_stages(partition), self.request.hints.resident
        resident = resident_blocks(self.footprint, layout, wanted=wanted)
        return self.step.predict(replace(layout, resident=resident))

    def num_actions(self, partition: Partition) -> int:
        return partition.num_stages * self.config.num_microbatches


def find_cases(
    steps: Steps, *, hardware: HardwareSpec, request: PlanningRequest, num_batches: int
) -> list[Case]:
    """Return every case in which devices can hold a stage of one block; FitError: there is none.

    Plans are compared by a stream of `num_batches` accumulated batches. PlanError: the request
    contradicts the machine.
    """
    configs = pipeline_configs(hardware, request, num_batches=num_batches)
    profile = steps(request.microbatch_choices[0]).profile
    whole = request.hints.limited(StageLimits.none(profile.num_blocks))
    asked = request.hints.partitions(
        profile.block_names, limits=whole, cuts=profile.cuts, plain=request.plain
    )
    is_settled = bool(asked) or request.recompute == (RecomputePolicy.NONE,)
    cases: list[Case] = []
    largest: dict[PipelineConfig, StageLimits] = {}
    for config in configs:
        step = steps(config.batch_microbatches)
        footprint = step.footprint
        if is_settled:  # limits do not say what memory the stages need
            limits = joint = StageLimits.none(footprint.profile.num_blocks)
        else:
            widest = widest_limits(footprint, config=config)
            if widest is None:
                continue
            limits = _wanted(widest, footprint, request)
            if limits == largest.get(replace(config, weight_slots=2)):
                continue  # a second slot costs nothing there
            joint = joint_limits(widest, footprint=footprint, config=config)
            joint = _wanted(joint, footprint, request)
        largest[config] = limits
        cases.append(
            Case(
                config=config,
                step=step,
                request=request,
                asked=asked,
                limits=limits,
                joint_limits=joint,
            )
        )
    if not cases:
        lacks = [describe_lack(steps(c.batch_microbatches).footprint, config=c) for c in configs]
        raise FitError(min(lacks, key=len))
    return cases


def _wanted(limits: StageLimits, footprint: Footprint, request: PlanningRequest) -> StageLimits:
    """Return the limits that are asked for, or those of a profile that knows no activations."""
    blocks = footprint.profile.blocks
    if request.hints.limits:
        return request.hints.limited(limits)
    if any(block.activation_bytes or block.working_bytes for block in blocks):
        return limits
    share = max(-(-len(blocks) // footprint.hardware.num_devices), 1)
    return limits.within(StageLimits(forward=2 * share, backward=share, fused=share))


def pipeline_configs(
    hardware: HardwareSpec, request: PlanningRequest, *, num_batches: int
) -> list[PipelineConfig]:
    """Return all ways to travel that a request leaves; PlanError if it contradicts the machine."""
    num_workers = hardware.num_devices
    divisors = [size for size in range(1, num_workers + 1) if num_workers % size == 0]
    hints = request.hints
    slots: Sequence[int] = (2, 1) if hints.weight_slots is None else (hints.weight_slots,)
    if hardware.shares_host_memory:
        slots = (2,)
    teams: Sequence[int] = (1, num_workers) if request.effort == QUICK else divisors
    if hints.team_size is not None:
        teams = (hints.team_size,)
    like: Sequence[bool] = (False, True) if hints.like_teams is None else (hints.like_teams,)
    shares = (hints.shares_backward,) if hints.shares_backward is not None else (False, True)
    if not request.plain or request.speeds or num_batches > 1:
        shares = (False,)
    found = [
        PipelineConfig(
            num_microbatches=count * num_batches,
            round_size=round_size,
            team_size=team_size,
            weight_slots=weight_slots,
            recompute=policy,
            num_batches=num_batches,
            speeds=request.speeds,
            joined=request.joined,
            plain=request.plain,
            shares_backward=shares_backward,
            like_teams=like_teams,
        )
        for team_size in teams
        for like_teams in (like if request.speeds and 1 < team_size < num_workers else (False,))
        for count, round_size in _rounds(num_workers, request)
        if team_size <= round_size <= count
        and (round_size == count or not (request.joined or request.plain))
        for shares_backward in shares
        if not shares_backward or (team_size < num_workers <= count)
        for policy in request.policies
        for weight_slots in slots
    ]
    if not found:
        raise PlanError(
            f"No team size of {teams} goes with a round size of {hints.round_size or 'any'} and "
            f"num_microbatches={request.num_microbatches}: a round "
            "has at least one microbatch per worker of a team, and at most the whole batch."
        )
    return found


def _rounds(num_workers: int, request: PlanningRequest) -> Iterator[tuple[int, int]]:
    """Numbers of microbatches of a batch, each with the round sizes to choose from."""
    for count in request.microbatch_choices:
        few = (num_workers, max(num_workers, _ROUND))
        sizes = (count, *(min(size, count) for size in few))
        if request.hints.round_size:
            sizes = (request.hints.round_size,)
        for size in dict.fromkeys(sizes):
            yield count, size
