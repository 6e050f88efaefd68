"""Device and host memory that a plan needs, by kind, against the memory there is.

`Footprint` is the model of a device; docs/planning.md (what fits) says what the host holds. Of
head's and tail's gradients those of other uses and rounds wait there, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from roundpipe_lightning.planning.cost.device_memory import Footprint, MemoryKind, MemoryNeed
from roundpipe_lightning.planning.cost.traffic import stage_parts
from roundpipe_lightning.planning.model.hardware import HardwareSpec
from roundpipe_lightning.planning.model.work import (
    BlockWork,
    MicrobatchShape,
    ParameterStorage,
    WeightStorage,
    WorkProfile,
    size_model,
)
from roundpipe_lightning.planning.schedule.plan import PipelineLayout
from roundpipe_lightning.planning.schedule.stages import RecomputePolicy, StageKind

_GIB = 2**30
_ROUNDS_IN_FLIGHT = 2
_WAITING = 5  # stages: two have landed, one is sent to other hosts, two wait for that
_SUMMED = 2  # blocks: their sums over the hosts wait for the optimizer


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """Whether a plan fits into a machine: the device is at the stage that needs the most."""

    device: MemoryNeed
    host: MemoryNeed

    @property
    def fits(self) -> bool:
        return not self.device.missing_bytes and not self.host.missing_bytes

    @property
    def missing_share(self) -> float:
        return max(
            need.lack_bytes / max(abs(need.available_bytes), 1) for need in (self.device, self.host)
        )

    @property
    def reason(self) -> str:
        """Text: the missing memory by place, and its largest part; empty where the plan fits."""
        return " ".join(
            f"{need.missing_bytes / _GIB:.1f} GiB of {need.place} memory are missing: {need}."
            for need in (self.device, self.host)
            if need.missing_bytes
        )


@dataclass(frozen=True, kw_only=True)
class MemoryModel:
    """A model on a machine, of which plans are asked what memory they need.

    Attributes:
        accumulates: Whether a step is of several batches.
        clips: Whether no block is stepped before the gradients of all are there.
    """

    work: WorkProfile
    hardware: HardwareSpec
    shape: MicrobatchShape
    storage: ParameterStorage = field(default_factory=ParameterStorage)
    accumulates: bool = False
    clips: bool = False

    def report(self, layout: PipelineLayout) -> MemoryReport:
        device = self.footprint.need(layout)
        return MemoryReport(device=device, host=self._host_need(layout, device.total_bytes))

    @property
    def host_may_fit(self) -> bool:
        """Whether the host has room for what every plan needs."""
        sums = self._num_in_blocks if self.hardware.num_nodes == 1 else 0
        least = sum(self._host_parameters.values()) + sums * self.storage.gradient_bytes
        return least <= self.hardware.host_bytes

    def host_fits(self, layout: PipelineLayout) -> bool:
        shares = self.hardware.shares_host_memory
        device = self.footprint.most_bytes(layout) if shares else 0.0
        return not self._host_need(layout, device).missing_bytes

    @cached_property
    def footprint(self) -> Footprint:
        profile = self.storage.stored(size_model(self.work, shape=self.shape))
        return Footprint(profile, hardware=self.hardware)

    def _host_need(self, layout: PipelineLayout, device_bytes: float) -> MemoryNeed:
        available = self.hardware.host_bytes
        if self.hardware.shares_host_memory:
            # as many devices work at a time: each on a microbatch of its own
            num_busy = min(self.hardware.num_devices, layout.num_microbatches)
            available -= round(device_bytes) * num_busy
        sizes = self._host(layout)
        return MemoryNeed.of_sizes(sizes, place="host", available_bytes=available)

    def _host(self, layout: PipelineLayout) -> dict[MemoryKind, float]:
        footprint = self.footprint
        in_flight = min(layout.num_microbatches, _ROUNDS_IN_FLIGHT * layout.round_size)
        partition = layout.partition
        again = [
            stage
            for stage in partition.stages()
            if stage.kind is StageKind.BACKWARD and not stage.keeps_graph
        ]
        kept = float(len(again) * footprint.boundary_bytes)
        if layout.recompute is RecomputePolicy.SELECTIVE:
            blocks = footprint.profile.blocks
            kept += sum(blocks[b].attention_bytes for stage in again for b in stage.blocks)
        sizes: dict[MemoryKind, float] = dict(self._host_parameters)
        sizes[MemoryKind.BOUNDARIES] = in_flight * kept
        sizes[MemoryKind.GRADIENTS] = self._gradients(layout) + self._waiting_gradients(layout)
        is_mapped = self.storage.weights is WeightStorage.MEMORY_MAPPED
        if is_mapped and not self.hardware.shares_host_memory:
            largest = max(
                sum(part.parameter_bytes for part in stage_parts(footprint.profile, stage))
                for stage in partition.stages()
            )
            sizes[MemoryKind.STAGING] = 2.0 * largest * self.hardware.num_devices
        return sizes

    @cached_property
    def _num_in_blocks(self) -> int:
        return sum(block.num_trainable for block in self.work.blocks)

    @property
    def _num_others(self) -> int:
        return self.work.num_trainable - self._num_in_blocks

    def _gradients(self, layout: PipelineLayout) -> float:
        """Bytes of gradients, beside those of head and tail that wait.

        A stage's sums over rounds and batches are kept, and what is added to them is on its way.
        With several hosts, those of a block leave when they are complete, and each host has its
        part of all hosts' sums. On CPU workers nothing is on its way, and gradients of a batch are
        added to those of the batches before when all are there. Those of head and tail always are,
        and leave at the end.
        """
        work, num_hosts = self.work, self.hardware.num_nodes
        others = (1 + self.accumulates) * self._num_others
        kept = blocks = float(self._num_in_blocks)
        is_kept = self.accumulates or layout.num_rounds > 1
        if self.hardware.shares_host_memory:
            arriving = self.accumulates * blocks
        else:
            num = _WAITING + self.hardware.num_devices
            arriving = min(blocks, num * self._largest(layout)) if is_kept or num_hosts > 1 else 0.0
        if num_hosts > 1:
            largest = max((block.num_trainable for block in work.blocks), default=0)
            sums = blocks if self.clips else min(blocks, _SUMMED * largest)
            kept = is_kept * blocks + sums * self.hardware.owned_part
        return (kept + arriving + others) * self.storage.gradient_bytes

    def _largest(self, layout: PipelineLayout) -> int:
        """Return the most trained parameters of blocks that a stage with gradients has."""
        stages = (s for s in layout.partition.stages() if s.kind is not StageKind.FORWARD)
        sizes = (sum(self.work.blocks[b].num_trainable for b in stage.blocks) for stage in stages)
        return max(sizes, default=0)

    @cached_property
    def _masters(self) -> float:
        """Bytes of masters.

        Of several hosts each has its part of what has copies, blocks' parameters. Head and tail are
        uploaded themselves: they have no copies, which are counted.
        """
        each = self.storage.master_bytes
        if self.hardware.num_nodes == 1 or self.hardware.shares_host_memory:
            return self.work.num_trainable * each
        own = self._num_in_blocks * each * self.hardware.owned_part
        return own + self._num_others * each / 2

    def _waiting_gradients(self, layout: PipelineLayout) -> float:
        """Bytes of head's and tail's gradients beside their sums: two rounds', of every use."""
        if self.hardware.shares_host_memory:
            return 0.0
        uses = self.work.head.num_trainable + self.work.tail.num_trainable
        rounds = min(layout.num_rounds, _ROUNDS_IN_FLIGHT)
        return (rounds * uses - self._num_others) * self.storage.gradient_bytes

    @cached_property
    def _host_parameters(self) -> dict[MemoryKind, float]:
        """Bytes that the host keeps of every parameter, whatever the layout."""
        work, storage = self.work, self.storage
        has_copies = not self.hardware.shares_host_memory or storage.master_bytes == 0
        tied = work.tied_parameters
        state = storage.state_bytes(work.num_trainable) * self.hardware.owned_part
        per_parameter = self._stored(work.head) / max(work.head.num_parameters, 1)
        copies = sum(self._stored(part) for part in work.segments) - tied * per_parameter
        copies -= self._stored(work.repeated)
        return {
            MemoryKind.WEIGHTS: copies if has_copies else 0.0,
            MemoryKind.MASTERS: self._masters,
            MemoryKind.OPTIMIZER: state,
        }

    def _stored(self, part: BlockWork) -> float:
        saved = self.storage.saved_bytes(part.num_quantizable, part.quantizable_bytes)
        return part.parameter_bytes - part.mapped_bytes - saved  # the page cache gives way


def longest_that_fits(shortage: Callable[[int], float], *, too_long: int) -> int:
    """Return the longest length below one that is too long which fits; 0 where none does.

    What is missing grows with the length nearly as a line, so every second length is guessed from
    the known ones on either side; the others halve what is left, so that no curve takes long.

    Args:
        shortage: What is missing at a length: 0 or less where it fits. It must not fall.
        too_long: A length that does not fit; if it does, the one below is returned.
    """
    low, high = 0, too_long
    below, above = None, shortage(too_long)
    if above <= 0:
        return too_long - 1
    if too_long > 2 and shortage(1) > 0:
        return 0
    halves = True
    while high - low > 1:
        guess = (low + high) // 2
        if below is not None and not halves:
            guess = low + round((high - low) * -below / (above - below))
            guess = min(max(guess, low + 1), high - 1)
        halves = not halves
        missing = shortage(guess)
        if missing > 0:
            high, above = guess, missing
        else:
            low, below = guess, missing
    return low
