"""Memory of one device at every stage of a layout: the one model of device memory.

The planner's limits, the check whether a plan fits, and the strategy's check before it allocates
anything all ask here. docs/planning.md (what fits) says what a device holds while it runs a stage.
Beside that: of weights that are uploaded in fewer bits it holds one block's in 16. At the first
stage that runs backward no gradient arrives; at a FUSED one, one that leaves takes the place of an
input. Where graphs are kept, those of all microbatches of a round are there. A selective recompute
has attention's outputs on their way. A backward pass needs what its blocks keep, and what one
block's needs beside, with the logits where the tail segment runs. Workers that compute in the
host's memory hold no weights; gradients of their stage's blocks come as what blocks keep goes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from roundpipe_lightning.planning.cost.costs import Counts, Floats, PartitionTable
from roundpipe_lightning.planning.model.hardware import HardwareSpec
from roundpipe_lightning.planning.model.profile import ModelProfile
from roundpipe_lightning.planning.schedule.plan import (
    PipelineConfig,
    PipelineLayout,
    stage_turns,
)
from roundpipe_lightning.planning.schedule.stages import RecomputePolicy, Stage

_GIB = 2**30
_IN_FLIGHT = 2


def size_text(num_bytes: float) -> str:
    """A number of bytes for messages, e.g. `1.25 GiB`."""
    if num_bytes >= _GIB / 10 or not num_bytes:
        return f"{num_bytes / _GIB:,.2f} GiB"
    if num_bytes >= 2**20 / 10:
        return f"{num_bytes / 2**20:,.1f} MiB"
    return f"{num_bytes / 2**10:,.1f} KiB"


class MemoryKind(Enum):
    """Uses of memory; docs/planning.md (what fits) says what belongs to each."""

    WEIGHTS = "weights"  # in the compute dtype, or compressed
    RESIDENT = "resident weights"
    GRADIENTS = "gradients"
    BOUNDARIES = "boundaries"
    ACTIVATIONS = "activations"
    MASTERS = "masters"
    OPTIMIZER = "optimizer state"
    STAGING = "staging"  # page-locked buffers that copies go through
    RESERVED = "reserved"  # of the runtime


@dataclass(frozen=True, kw_only=True)
class MemoryNeed:
    """Memory needed in one place, the device or the host, against the memory it has.

    Attributes:
        stage: The stage that needs the most; None for the host.
        num_bytes: Bytes by kind, largest first.
    """

    place: str
    stage: Stage | None = None
    num_bytes: tuple[tuple[MemoryKind, int], ...]
    available_bytes: int

    @classmethod
    def of_sizes(
        cls,
        sizes: Mapping[MemoryKind, float],
        *,
        place: str,
        available_bytes: int,
        stage: Stage | None = None,
    ) -> MemoryNeed:
        rows = [(kind, round(size)) for kind, size in sizes.items() if round(size)]
        num_bytes = tuple(sorted(rows, key=lambda row: -row[1]))
        return cls(place=place, stage=stage, num_bytes=num_bytes, available_bytes=available_bytes)

    @property
    def total_bytes(self) -> int:
        return sum(size for _, size in self.num_bytes)

    @property
    def lack_bytes(self) -> int:
        return self.total_bytes - self.available_bytes

    @property
    def missing_bytes(self) -> int:
        return max(0, self.lack_bytes)

    def of(self, kind: MemoryKind) -> int:
        return dict(self.num_bytes).get(kind, 0)

    def __str__(self) -> str:
        """E.g. `device: 20.1 of 24.0 GiB (F0[0:4]: weights 12.0, activations 8.1)`."""
        parts = ", ".join(f"{kind.value} {size / _GIB:.1f}" for kind, size in self.num_bytes)
        where = f"{self.stage}: " if self.stage else ""
        total, there = self.total_bytes / _GIB, f"{self.available_bytes / _GIB:.1f}"
        need = f"{total:.1f} of {there} GiB" if float(there) > 0 else f"{total:.1f} GiB, none free"
        return f"{self.place}: {need} ({where}{parts})"


class Footprint:
    """A model on a machine, of which layouts are asked.

    Args:
        profile: The model, with the sizes of one microbatch; sizes of 0 need no memory.
    """

    def __init__(self, profile: ModelProfile, *, hardware: HardwareSpec) -> None:
        self.profile = profile
        self.hardware = hardware
        self._reserved = max(one.reserved_bytes for one in hardware.workers)
        units = profile.units
        self._working = _range_maxima([unit.working_bytes for unit in units])
        self._forward = _range_maxima([unit.forward_bytes for unit in units])
        self._expanded = _range_maxima([unit.expanded_bytes for unit in units])
        self.boundary_bytes = max((block.boundary_bytes for block in profile.blocks), default=0)

    def fits(self, layout: PipelineLayout) -> bool:
        return self.need(layout).lack_bytes <= 0

    def most_bytes(self, layout: PipelineLayout) -> float:
        if layout.resident:
            return self.need(layout).total_bytes
        return float(_total(self.stage_bytes(layout)).max())

    def fits_each(self, table: PartitionTable, *, config: PipelineConfig) -> npt.NDArray[np.bool_]:
        short = _total(self._sizes(config, table)) - self.room(table, config=config)
        fits = np.where(table.is_stage, short, 0.0) <= 0
        fit: npt.NDArray[np.bool_] = np.all(fits, axis=1)
        return fit

    def room(self, table: PartitionTable, *, config: PipelineConfig) -> Floats:
        """Return the memory of the smallest worker that runs each stage."""
        hardware = self.hardware
        rooms: Floats = np.full(table.start.shape, np.inf)
        if not hardware.unequal:
            return np.full_like(rooms, hardware.device_bytes)
        teams = config.teams(hardware.num_devices)
        least = np.array([min(hardware.workers[w].device_bytes for w in team) for team in teams])
        for index in range(min(config.num_rounds, len(teams))):
            turn = table.turns + index * table.num_turns[:, None]
            rooms = np.minimum(rooms, least[turn % len(teams)])
        return rooms

    def need(self, layout: PipelineLayout) -> MemoryNeed:
        """Return the memory of a device at the stage that needs the most."""
        by_kind, table = self.stage_bytes(layout), PartitionTable.of([layout.partition])
        rooms = self.room(table, config=layout)[0]
        stay = () if self.hardware.shares_host_memory else layout.resident  # all is there
        worst: MemoryNeed | None = None
        for team, members in enumerate(layout.teams(self.hardware.num_devices)):
            places = sorted(set(self.team_stages(layout, team=team)))
            held = dict.fromkeys(stay[w] for w in members) if stay else [()]
            for blocks in held if places else ():
                sizes = {kind: values.copy() for kind, values in by_kind.items()}
                sizes[MemoryKind.RESIDENT] = np.zeros(len(rooms))
                for block in blocks:
                    size = self.profile.blocks[block].parameter_bytes
                    sizes[MemoryKind.RESIDENT] += size
                    slots = self.slots_of(table, block, layout=layout)
                    sizes[MemoryKind.WEIGHTS] -= size * slots
                short = _total(sizes) - rooms
                place = max(places, key=lambda index: short[index])
                need = MemoryNeed.of_sizes(
                    {kind: float(values[place]) for kind, values in sizes.items()},
                    place="device",
                    stage=layout.partition.stages()[place],
                    available_bytes=int(rooms[place]),
                )
                if worst is None or need.lack_bytes > worst.lack_bytes:
                    worst = need
        assert worst is not None, "a step has stages"
        return worst

    def stage_bytes(self, layout: PipelineLayout) -> dict[MemoryKind, Floats]:
        sizes = self._sizes(layout, PartitionTable.of([layout.partition]))
        return {kind: row[0] for kind, row in sizes.items()}

    def num_teams(self, config: PipelineConfig) -> int:
        return max(self.hardware.num_devices // config.team_size, 1)

    def _sizes(self, config: PipelineConfig, table: PartitionTable) -> dict[MemoryKind, Floats]:
        inputs = config.most_members(self.hardware.num_devices)
        ones = np.ones(table.start.shape)
        sizes = {
            MemoryKind.BOUNDARIES: (inputs + _IN_FLIGHT) * self.boundary_bytes * ones,
            MemoryKind.ACTIVATIONS: self._activations(table, config),
        }
        teams, fused = self.num_teams(config), table.fused
        unused = 1 if table.plain else _IN_FLIGHT
        sizes[MemoryKind.BOUNDARIES][:, fused] -= unused * self.boundary_bytes
        if config.recompute is RecomputePolicy.SELECTIVE:
            sizes[MemoryKind.BOUNDARIES] += self._attention_in_flight(table)
        gradients = table.part_sums(self.profile, "trainable_bytes")
        if self.hardware.shares_host_memory:  # those of the segments are added to sums at once
            gradients = table.unit_sums(self.profile.running_sums("trainable_bytes"))
            beside = sizes[MemoryKind.ACTIVATIONS] - self._working[table.start, table.stop]
            gradients = np.maximum(gradients - beside, 0.0)
        gradients[:, :fused] = 0.0
        if self.hardware.shares_host_memory:
            return {**sizes, MemoryKind.GRADIENTS: gradients}
        weights = table.part_sums(self.profile, "parameter_bytes")
        slots = weights
        if config.weight_slots > 1:
            after = table.neighbours(teams, config)
            slots = weights + _at(weights, after)
        before = table.neighbours(-teams, config)
        sizes[MemoryKind.WEIGHTS] = slots + self._expanded_bytes(table)
        others = _at(gradients, before)
        # Blocks' gradients come as the first of the kept graphs goes. The tail's come before that.
        freed, come = (
            table.unit_sums(self.profile.running_sums(size))[:, fused]
            - getattr(self.profile.tail, size)
            for size in ("activation_bytes", "trainable_bytes")
        )
        gradients[:, fused] -= np.where(table.keeps, np.minimum(freed, come), 0.0)
        sizes[MemoryKind.GRADIENTS] = gradients + others
        sizes[MemoryKind.RESERVED] = self._reserved * ones
        return sizes

    def _expanded_bytes(self, table: PartitionTable) -> Floats:
        expanded = self._expanded[table.start, table.stop]
        self._raise(expanded, table, "expanded_bytes", table.head_stages(self.profile)[:1])
        return expanded

    def _activations(self, table: PartitionTable, config: PipelineConfig) -> Floats:
        fused = table.fused
        forward = self._forward[table.start, table.stop]
        head_stages = table.head_stages(self.profile)
        self._raise(forward, table, "forward_bytes", head_stages[:1])
        working = self._working[table.start, table.stop]
        self._raise(working, table, "working_bytes", head_stages)
        kept = table.part_sums(self.profile, "activation_bytes")
        result = kept + working
        result[:, :fused] = forward[:, :fused]
        if table.keeps.any():
            graphs = config.most_members(self.hardware.num_devices)
            both = slice(fused - 1, fused + 1)
            most = graphs * kept[:, both] + working[:, both]
            result[:, both] = np.where(table.keeps[:, None], most, result[:, both])
        return result

    def _raise(
        self,
        most: Floats,
        table: PartitionTable,
        field: str,
        head_stages: Sequence[tuple[Counts, Counts]],
    ) -> None:
        """Count the segments among the largest parts of a stage."""
        for rows, columns in head_stages:
            most[rows, columns] = np.maximum(most[rows, columns], getattr(self.profile.head, field))
        if not table.plain:
            fused = most[:, table.fused]
            np.maximum(fused, getattr(self.profile.tail, field), out=fused)

    def _attention_in_flight(self, table: PartitionTable) -> Floats:
        """Attention's outputs: two microbatches' on their way out, one's on its way in."""
        sizes = table.unit_sums(self.profile.running_sums("attention_bytes"))
        sizes[:, : table.fused] *= _IN_FLIGHT
        if not table.plain:
            sizes[:, table.fused] = 0.0
        sizes[table.keeps, table.fused - 1 : table.fused + 1] = 0.0
        return sizes

    def team_stages(self, layout: PipelineLayout, *, team: int) -> list[int]:
        places = {stage: place for place, stage in enumerate(layout.partition.stages())}
        return [
            places[stage]
            for _, stage, turn in stage_turns(layout, num_rounds=layout.num_rounds)
            if turn is None or turn % self.num_teams(layout) == team
        ]

    def slots_of(
        self, table: PartitionTable, block: int, *, layout: PipelineLayout
    ) -> npt.NDArray[np.bool_]:
        """Say at which of a layout's stages a block lies in a slot for weights."""
        has: npt.NDArray[np.bool_] = ((table.start <= block) & (block < table.stop))[0]
        if layout.weight_slots > 1:
            after = table.neighbours(self.num_teams(layout), layout)[0]
            has = has | ((after >= 0) & has[after])
        return has


def _range_maxima(values: Sequence[float]) -> Floats:
    """Return the largest of the values from one number up to another, by both; 0 of none."""
    found = np.zeros((len(values) + 1, len(values) + 1))
    for start in range(len(values)):
        found[start, start + 1 :] = np.maximum.accumulate(values[start:])
    return found


def _at(values: Floats, columns: Counts) -> Floats:
    """Take values of other columns; 0 for column -1."""
    taken = np.take_along_axis(values, np.clip(columns, 0, values.shape[1] - 1), axis=1)
    result: Floats = np.where(columns >= 0, taken, 0.0)
    return result


def _total(by_kind: dict[MemoryKind, Floats]) -> Floats:
    total: Floats = np.sum(list(by_kind.values()), axis=0)
    return total
