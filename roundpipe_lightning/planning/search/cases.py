"""Cases: one way for the microbatches to travel each, in which partitions are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from roundpipe_lightning.errors import FitError, PlanError
from roundpipe_lightning.planning.cost.costs import BoundaryRoute, Floats
from roundpipe_lightning.planning.cost.device_memory import Footprint
from roundpipe_lightning.planning.cost.partition_table import Evaluator, PartitionTable
from roundpipe_lightning.planning.cost.predict import StepModel, StepPrediction
from roundpipe_lightning.planning.cost.traffic import hop_seconds
from roundpipe_lightning.planning.model.hardware import HardwareSpec
from roundpipe_lightning.planning.model.profile import ModelProfile
from roundpipe_lightning.planning.schedule.plan import PipelineConfig, PipelineLayout
from roundpipe_lightning.planning.schedule.round_robin import split_rounds
from roundpipe_lightning.planning.schedule.stages import Partition, RecomputePolicy
from roundpipe_lightning.planning.search.evolve import Effort, PartitionSearch
from roundpipe_lightning.planning.search.limits import (
    describe_lack,
    even_share,
    joint_limits,
    resident_blocks,
    widest_limits,
)
from roundpipe_lightning.planning.search.partition import StageLimits, even_partitions
from roundpipe_lightning.planning.search.request import PlanningRequest

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
        limits: Blocks per stage at most, other stages as small as they may be.
        joint_limits: Blocks per stage at most, all stages together.
    """

    config: PipelineConfig
    step: StepModel
    request: PlanningRequest
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
        if self.profile.num_blocks:
            policies = self.request.recompute
            fit &= np.where(
                table.backward[:, 1:].any(axis=1),
                policies != (RecomputePolicy.NONE,),
                RecomputePolicy.NONE in policies,
            )
        return fit

    def beginnings(self, admits: Admits | None) -> tuple[Partition, ...]:
        partitions = self.request.partitions
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
        return even_partitions(self.profile, limits=limits, count=count)

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
        pipelines: list[tuple[tuple[float, ...], tuple[int, ...]]] = []
        if config.speeds:
            teams, count = config.teams(hardware.num_devices), hardware.num_devices
            shares = [config.members(size, count) for size in rounds]
            pipelines = [
                (tuple(config.speeds[w] for w in workers), tuple(s.count(member) for s in shares))
                for member, workers in enumerate(zip(*teams, strict=True))
            ]
        return Evaluator(
            profile=self.profile,
            num_workers=hardware.num_devices // config.team_size,
            rounds=tuple(-(-size // config.team_size) for size in rounds),
            hop_seconds=hop,
            recompute_start=self.request.recompute_start,
            forward_upload_seconds=forward,
            backward_upload_seconds=max(forward, shared) if forward else 0.0,
            weight_slots=config.weight_slots,
            recompute=config.recompute,
            team_size=config.team_size,
            host=self.step.host,
            pipelines=tuple(dict.fromkeys(pipelines)),
            pipeline_share=_PIPELINE_SHARE,
            joined=config.round_size if config.joined else 0,
        )

    def search(self, effort: Effort) -> PartitionSearch:
        return PartitionSearch(
            evaluator=self.evaluator, limits=self.limits, effort=effort, fits=self.fits
        )

    def predict(self, partition: Partition) -> StepPrediction:
        request, layout = self.request, self.config.with_stages(partition)
        resident = resident_blocks(
            self.footprint,
            layout,
            at_least=request.at_least_resident,
            at_most=request.at_most_resident,
        )
        return self.step.predict(replace(layout, resident=resident))

    def num_actions(self, partition: Partition) -> int:
        return partition.num_stages * self.config.num_microbatches


def find_cases(
    steps: Steps, *, hardware: HardwareSpec, request: PlanningRequest, num_batches: int
) -> list[Case]:
    """Return every case in which devices can hold a stage of one block.

    Plans are compared by a stream of `num_batches` accumulated batches.

    Raises:
        FitError: If a device cannot hold a block in any of them.
        PlanError: If the request contradicts the machine.
    """
    configs = pipeline_configs(hardware, request, num_batches=num_batches)
    is_settled = bool(request.partitions) or request.recompute == (RecomputePolicy.NONE,)
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
                limits=limits,
                joint_limits=joint,
            )
        )
    if not cases:
        lacks = [describe_lack(steps(c.batch_microbatches).footprint, config=c) for c in configs]
        raise FitError(min(lacks, key=len))
    return cases


def _wanted(limits: StageLimits, footprint: Footprint, request: PlanningRequest) -> StageLimits:
    if request.limits is not None:
        return limits.within(request.limits)
    return even_share(limits, profile=footprint.profile, hardware=footprint.hardware)


def pipeline_configs(
    hardware: HardwareSpec, request: PlanningRequest, *, num_batches: int
) -> list[PipelineConfig]:
    """Return all ways to travel that a request leaves; PlanError if it contradicts the machine."""
    num_workers = hardware.num_devices
    divisors = [size for size in range(1, num_workers + 1) if num_workers % size == 0]
    slots = (2,) if hardware.shares_host_memory else sorted(set(request.weight_slots), reverse=True)
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
        )
        for team_size in request.team_sizes or divisors
        for count, round_size in _rounds(num_workers, request)
        if team_size <= round_size <= count and (round_size == count or not request.joined)
        for policy in request.policies
        for weight_slots in slots
    ]
    if not found:
        raise PlanError(
            f"No team size of {request.team_sizes} goes with a round size of "
            f"{request.round_sizes} and num_microbatches={request.num_microbatches}: a round "
            "has at least one microbatch per worker of a team, and at most the whole batch."
        )
    return found


def _rounds(num_workers: int, request: PlanningRequest) -> Iterator[tuple[int, int]]:
    """Numbers of microbatches of a batch, each with the round sizes to choose from."""
    for count in request.microbatch_choices:
        few = (num_workers, max(num_workers, _ROUND))
        sizes = request.round_sizes or (count, *(min(size, count) for size in few))
        for size in dict.fromkeys(sizes):
            yield count, size
