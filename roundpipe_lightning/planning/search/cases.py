"""Cases: one way for the microbatches to travel each, in which partitions are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt

from roundpipe_lightning.errors import FitError, PlanError
from roundpipe_lightning.planning.cost.costs import BoundaryRoute, StageCosts, stage_costs
from roundpipe_lightning.planning.cost.device_memory import Footprint
from roundpipe_lightning.planning.cost.simulate import simulate, simulate_transfers
from roundpipe_lightning.planning.cost.traffic import boundary_route, hop_seconds
from roundpipe_lightning.planning.model.hardware import HardwareSpec
from roundpipe_lightning.planning.model.profile import ModelProfile
from roundpipe_lightning.planning.schedule.plan import PipelineLayout
from roundpipe_lightning.planning.schedule.round_robin import round_robin_schedule, split_rounds
from roundpipe_lightning.planning.schedule.schedule import Schedule
from roundpipe_lightning.planning.schedule.stages import Partition, RecomputePolicy
from roundpipe_lightning.planning.schedule.timeline import Timeline
from roundpipe_lightning.planning.search.evolve import Candidate, StageLimits, even_candidates
from roundpipe_lightning.planning.search.limits import (
    Travel,
    describe_lack,
    even_share,
    limits_within,
    resident_blocks,
    widest_limits,
)
from roundpipe_lightning.planning.search.makespan_table import Evaluator, Floats, PartitionTable
from roundpipe_lightning.planning.search.request import PlanningRequest

_FEW = 8
"""Even partitions that fit, fewer than which call for smaller ones."""

_EVEN_STAGES = 3000
"""Blocks of a model times numbers of stages to choose from, about: balancing takes time."""

Profiles = Callable[[int], ModelProfile]
"""The model for one microbatch of a batch that is split into a number of them."""

Admits = Callable[[PipelineLayout], bool]
"""Whether a layout keeps what the planner does not know, such as the host's memory."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A layout and its step.

    Attributes:
        layout: The stages and how microbatches travel.
        timeline: When every action runs.
    """

    layout: PipelineLayout
    timeline: Timeline

    @property
    def makespan_seconds(self) -> float:
        return self.timeline.makespan_seconds


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """One way for the microbatches to travel.

    Attributes:
        travel: Microbatches, rounds, teams, slots, recompute.
        footprint: The model on the machine.
        request: What is wanted.
        limits: Blocks per stage at most, other stages as small as they may be.
        joint_limits: Blocks per stage at most, all stages together.
        hop_seconds: From one worker to another, at least.
        known_even: Even partitions by their limits, which cases of the same model share.
    """

    travel: Travel
    footprint: Footprint
    request: PlanningRequest
    limits: StageLimits
    joint_limits: StageLimits
    hop_seconds: float
    known_even: dict[StageLimits, tuple[Candidate, ...]] = field(default_factory=dict)

    @property
    def profile(self) -> ModelProfile:
        return self.footprint.profile

    @property
    def hardware(self) -> HardwareSpec:
        return self.footprint.hardware

    def _even(self, limits: StageLimits) -> tuple[Candidate, ...]:
        """Return even partitions within limits; other cases of the same model have made many."""
        if limits not in self.known_even:
            most = max(_FEW // 2, _EVEN_STAGES // max(self.profile.num_blocks, 1))
            count = min(self.request.effort.num_even, most)
            self.known_even[limits] = even_candidates(self.profile, limits=limits, count=count)
        return self.known_even[limits]

    def fits(self, table: PartitionTable) -> npt.NDArray[np.bool_]:
        """Say which partitions keep the devices' memory and the recompute policies."""
        most = self.footprint.most_bytes_of_each(
            table.forward, table.backward, layout=self.travel.layout(table.partition(0))
        )
        fit: npt.NDArray[np.bool_] = most <= self.hardware.device_bytes
        if self.profile.num_blocks:
            has_backward = table.backward[:, 1:].any(axis=1)
            policies = self.request.recompute
            fit &= np.where(
                has_backward,
                policies != (RecomputePolicy.NONE,),
                RecomputePolicy.NONE in policies,
            )
        return fit

    def beginnings(self, admits: Admits | None) -> tuple[Candidate, ...]:
        """Return the partitions that are asked for, or even ones, as far as they fit."""
        asked = self.request.partitions
        if asked:
            candidates: Sequence[Candidate] = [
                Candidate(each.forward, each.backward[0], each.backward[1:]) for each in asked
            ]
        else:
            candidates = self._even(self.limits)
            if self.fits(_table(candidates)).sum() < _FEW:
                candidates = (*candidates, *self._even(self.joint_limits))
        fit = self.fits(_table(candidates)).tolist()
        return tuple(
            candidate
            for candidate, holds in dict(zip(candidates, fit, strict=True)).items()
            if holds and (admits is None or admits(self.travel.layout(candidate.partition)))
        )

    def makespans(self, candidates: Sequence[Candidate], *, uploads: bool) -> Floats:
        """Estimate steps with uploads on links that all devices share, or bound them without."""
        evaluator = self.evaluator if uploads else self._bound
        return evaluator.makespans(_table(candidates))

    @cached_property
    def evaluator(self) -> Evaluator:
        """Estimates one of the pipelines that teams split the plan into."""
        hardware, travel = self.hardware, self.travel
        rounds = split_rounds(
            travel.num_microbatches * travel.num_batches, round_size=travel.round_size
        )
        forward = hardware.upload_seconds(1.0, num_devices=hardware.num_devices)
        trains = any(block.trainable_bytes for block in self.profile.blocks)
        shared = (2 if trains else 1) * hardware.num_devices / hardware.host_bytes_per_second
        return Evaluator(
            profile=self.profile,
            num_workers=hardware.num_devices // travel.team_size,
            rounds=tuple(-(-size // travel.team_size) for size in rounds),
            hop_seconds=self.hop_seconds,
            recompute_start=self.request.recompute_start,
            forward_upload_seconds=forward,
            backward_upload_seconds=max(forward, shared) if forward else 0.0,
            weight_slots=travel.weight_slots,
            recompute=travel.recompute,
        )

    @cached_property
    def _bound(self) -> Evaluator:
        """Estimates too little: all weights are there."""
        return replace(self.evaluator, forward_upload_seconds=0.0, backward_upload_seconds=0.0)

    def predict(
        self, partition: Partition, *, num_batches: int | None = None, stays: bool = True
    ) -> Prediction:
        """Predict a step with all its transfers.

        Args:
            partition: The stages.
            num_batches: Batches in one stream; None: those that plans are compared by.
            stays: Whether blocks may stay on their workers.
        """
        layout = self.travel.layout(partition)
        request = self.request
        resident = resident_blocks(
            self.footprint,
            layout,
            at_least=request.at_least_resident,
            at_most=request.at_most_resident if stays else request.at_least_resident,
        )
        layout = replace(layout, resident=resident)
        return self.simulate(layout, num_batches=num_batches)

    def simulate(self, layout: PipelineLayout, *, num_batches: int | None = None) -> Prediction:
        """Simulate a layout, with all its transfers where there are any."""
        schedule = self.schedule(layout.partition, num_batches=num_batches)
        costs = self.costs(layout)
        if self.hardware.shares_host_memory:
            timeline = simulate(schedule, partition=layout.partition, costs=costs)
        else:
            timeline = simulate_transfers(
                schedule,
                partition=layout.partition,
                costs=costs,
                profile=self.profile,
                hardware=self.hardware,
                weight_slots=layout.weight_slots,
                resident=layout.resident,
                recompute=layout.recompute,
            )
        return Prediction(layout=layout, timeline=timeline)

    def num_actions(self, partition: Partition) -> int:
        return partition.num_stages * self.travel.num_microbatches * self.travel.num_batches

    def costs(self, layout: PipelineLayout) -> StageCosts:
        """Return what a layout's stages and hops cost."""
        route = boundary_route(self.footprint, layout)
        return stage_costs(
            self.profile,
            partition=layout.partition,
            hop_seconds=_hop_seconds(self.footprint, self.request, route=route),
            recompute_start=self.request.recompute_start,
            recompute=self.travel.recompute,
            route=route,
        )

    def schedule(self, partition: Partition, *, num_batches: int | None = None) -> Schedule:
        """Lay the stages round the workers."""
        batches = self.travel.num_batches if num_batches is None else num_batches
        return round_robin_schedule(
            partition,
            num_workers=self.hardware.num_devices,
            num_microbatches=self.travel.num_microbatches * batches,
            round_size=self.travel.round_size,
            team_size=self.travel.team_size,
        )


def find_cases(
    profiles: Profiles, *, hardware: HardwareSpec, request: PlanningRequest, num_batches: int
) -> list[Case]:
    """Return every case in which devices can hold a stage of one block.

    Args:
        profiles: The model.
        hardware: The machine.
        request: What is wanted.
        num_batches: Accumulated batches that plans are compared by.

    Raises:
        FitError: If a device cannot hold a block in any of them.
        PlanError: If the request contradicts the machine.
    """
    ways = travels(hardware, request, num_batches=num_batches)
    footprints = {
        count: Footprint(profiles(count), hardware=hardware) for count in request.microbatch_choices
    }
    reach = hardware.devices_reach_each_other
    quickest = BoundaryRoute.DIRECT if reach else BoundaryRoute.THROUGH_HOST
    known_even: dict[int, dict[StageLimits, tuple[Candidate, ...]]] = {
        count: {} for count in footprints
    }
    cases: list[Case] = []
    largest: dict[Travel, StageLimits] = {}
    for travel in ways:
        footprint = footprints[travel.num_microbatches]
        limits = _limits(footprint, travel, request, widest_limits)
        two_slots = largest.get(replace(travel, weight_slots=2))
        if limits is None or (limits == two_slots and not _settled(request)):
            continue  # a second slot costs nothing there
        largest[travel] = limits
        cases.append(
            Case(
                travel=travel,
                footprint=footprint,
                request=request,
                limits=limits,
                joint_limits=_limits(footprint, travel, request, limits_within) or limits,
                hop_seconds=_hop_seconds(footprint, request, route=quickest),
                known_even=known_even[travel.num_microbatches],
            )
        )
    if not cases:
        needs = {t: footprints[t.num_microbatches] for t in ways}
        raise FitError(min((describe_lack(f, travel=t) for t, f in needs.items()), key=len))
    return cases


def _settled(request: PlanningRequest) -> bool:
    """Whether the stages are given, so that limits do not say what memory they need."""
    return bool(request.partitions) or request.recompute == (RecomputePolicy.NONE,)


def _table(candidates: Sequence[Candidate]) -> PartitionTable:
    return PartitionTable.of([(c.forward, (c.fused, *c.backward)) for c in candidates])


class _Within(Protocol):
    """Finds the most blocks per stage that fit."""

    def __call__(self, footprint: Footprint, *, travel: Travel) -> StageLimits | None: ...


def _limits(
    footprint: Footprint, travel: Travel, request: PlanningRequest, find: _Within
) -> StageLimits | None:
    """Return the most blocks per stage; None where the smallest stages do not fit."""
    profile = footprint.profile
    most = max(profile.num_blocks, 1)
    if _settled(request):
        return StageLimits(forward=most, fused=profile.num_blocks, backward=most)
    within = find(footprint, travel=travel)
    if within is None:
        return None
    if request.limits is None:
        return even_share(within, profile=profile, hardware=footprint.hardware)
    return StageLimits(
        forward=min(within.forward, request.limits.forward),
        fused=min(within.fused, request.limits.fused),
        backward=min(within.backward, request.limits.backward),
    )


def _hop_seconds(footprint: Footprint, request: PlanningRequest, *, route: BoundaryRoute) -> float:
    if request.hop_seconds is not None:
        return request.hop_seconds
    return hop_seconds(footprint.hardware, footprint.boundary_bytes, route=route)


def travels(hardware: HardwareSpec, request: PlanningRequest, *, num_batches: int) -> list[Travel]:
    """Return every way for the microbatches to travel that a request leaves.

    Args:
        hardware: The machine.
        request: What is wanted.
        num_batches: Accumulated batches in one stream.

    Raises:
        PlanError: If the request contradicts the machine.
    """
    found = list(_travels(hardware, request, num_batches=num_batches))
    if not found:
        raise PlanError(
            f"No team size of {request.team_sizes} goes with a round size of "
            f"{request.round_sizes} and num_microbatches={request.num_microbatches}: a round "
            "has at least one microbatch per worker of a team, and at most the whole batch."
        )
    return found


def _travels(
    hardware: HardwareSpec, request: PlanningRequest, *, num_batches: int
) -> Iterator[Travel]:
    num_workers = hardware.num_devices
    divisors = [size for size in range(1, num_workers + 1) if num_workers % size == 0]
    slots = (2,) if hardware.shares_host_memory else sorted(set(request.weight_slots), reverse=True)
    for team_size in request.team_sizes or divisors:
        if team_size not in divisors:
            raise PlanError(
                f"team_sizes: {team_size} does not divide the {num_workers} devices of "
                f"{hardware.name}; choose from {divisors}."
            )
        for count in request.microbatch_choices:
            rounds = request.round_sizes or (count, min(num_workers, count))
            for round_size in dict.fromkeys(rounds):
                if not team_size <= round_size <= count:
                    continue
                for policy in request.policies:
                    for weight_slots in slots:
                        yield Travel(
                            num_microbatches=count,
                            round_size=round_size,
                            team_size=team_size,
                            weight_slots=weight_slots,
                            recompute=policy,
                            num_batches=num_batches,
                        )
