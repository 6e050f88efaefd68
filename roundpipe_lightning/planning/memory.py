"""What a plan needs of device and host memory, by kind, against what there is.

A device holds, at the moment that needs the most,

    weights       of the stage that it runs and of the one it runs next (two slots)
    gradients     of that stage, and of the one before, which are being downloaded (two slots)
    boundaries    the inputs of the round's microbatches, a gradient that arrives and one that
                  leaves
    activations   FORWARD: the most that one block needs at once
                  BACKWARD: what all its blocks keep, and what one block's backward needs beside
                  FUSED: the same and the tail segment, with the logits
    reserved      the runtime's context and the allocator's gaps

and the host, for every parameter, its 16-bit copy (compressed where frozen), and where it is
trained its master, gradient and optimizer state; the boundaries that BACKWARD stages start from, of
two rounds; and two page-locked slots per device where weights are not page-locked themselves.
`Recompute.NONE` keeps activations from the forward to the backward pass instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

from roundpipe_lightning.planning.hardware import HardwareSpec
from roundpipe_lightning.planning.predict import PipelineLayout
from roundpipe_lightning.planning.stages import Stage, StageKind
from roundpipe_lightning.planning.storage import ParameterStorage, WeightStorage
from roundpipe_lightning.planning.work import Amount, BlockWork, MicrobatchShape, WorkProfile

RESERVED_BYTES = 384 * 2**20
"""Device memory that a runtime takes for itself: the context and its libraries."""

_GIB = 2**30
_UNDER_WAY = 2


class MemoryKind(Enum):
    """What memory is used for."""

    WEIGHTS = "weights"
    """Parameters in the compute dtype, or compressed."""

    GRADIENTS = "gradients"
    """Gradients of trainable parameters."""

    BOUNDARIES = "boundaries"
    """Tensors between two stages."""

    ACTIVATIONS = "activations"
    """What a block or segment needs between its input and the end of its backward pass."""

    MASTERS = "masters"
    """Full-precision parameters."""

    OPTIMIZER = "optimizer state"
    """State of the optimizer."""

    STAGING = "staging"
    """Page-locked buffers that copies go through."""

    RESERVED = "reserved"
    """What the runtime takes."""


class Recompute(Enum):
    """What the backward pass starts from."""

    FULL = "full"
    """BACKWARD stages run their blocks again from the stored boundary."""

    NONE = "none"
    """Activations of the forward pass stay on the device until the backward pass."""


@dataclass(frozen=True, kw_only=True)
class MemoryNeed:
    """What one place needs, against what it has.

    Attributes:
        place: `device` or `host`.
        stage: The stage that needs the most; empty for the host.
        num_bytes: Bytes by kind, largest first.
        available_bytes: What there is.
    """

    place: str
    stage: str
    num_bytes: tuple[tuple[MemoryKind, int], ...]
    available_bytes: int

    @property
    def total_bytes(self) -> int:
        """All kinds together."""
        return sum(size for _, size in self.num_bytes)

    @property
    def missing_bytes(self) -> int:
        """What is needed beyond what there is; 0 where it fits."""
        return max(0, self.total_bytes - self.available_bytes)

    def of(self, kind: MemoryKind) -> int:
        """Bytes of one kind."""
        return dict(self.num_bytes).get(kind, 0)

    def __str__(self) -> str:
        """For people, e.g. `device: 20.1 of 24.0 GiB (F0[0:4]: weights 12.0, activations 8.1)`."""
        parts = ", ".join(f"{kind.value} {size / _GIB:.1f}" for kind, size in self.num_bytes)
        where = f"{self.stage}: " if self.stage else ""
        total, there = self.total_bytes / _GIB, self.available_bytes / _GIB
        return f"{self.place}: {total:.1f} of {there:.1f} GiB ({where}{parts})"


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """Whether a plan fits into a machine.

    Attributes:
        device: The device at the stage that needs the most.
        host: The host.
    """

    device: MemoryNeed
    host: MemoryNeed

    @property
    def fits(self) -> bool:
        """Whether both suffice."""
        return not self.device.missing_bytes and not self.host.missing_bytes

    @property
    def reason(self) -> str:
        """What is missing where, and what takes the most; empty where it fits."""
        return " ".join(
            f"{need.missing_bytes / _GIB:.1f} GiB of {need.place} memory are missing: {need}."
            for need in (self.device, self.host)
            if need.missing_bytes
        )


@dataclass(frozen=True, kw_only=True)
class _Place:
    """A stage between those that its worker runs before and after it."""

    before: Stage | None
    stage: Stage
    after: Stage | None


@dataclass(frozen=True, kw_only=True)
class MemoryModel:
    """A model on a machine, of which plans are asked.

    Attributes:
        work: The model.
        hardware: The machine.
        storage: What is kept for each parameter.
        recompute: What the backward pass starts from.
        reserved_bytes: Device memory that is not for plans.
    """

    work: WorkProfile
    hardware: HardwareSpec
    storage: ParameterStorage = field(default_factory=ParameterStorage)
    recompute: Recompute = Recompute.FULL
    reserved_bytes: int = RESERVED_BYTES

    def report(self, layout: PipelineLayout, *, shape: MicrobatchShape) -> MemoryReport:
        """Return what a layout needs for microbatches of a shape."""
        host = _by_size(self._host(layout, shape))
        devices = [self._device(place, layout, shape) for place in self._places(layout)]
        device = max(devices, key=lambda need: need.total_bytes)
        available = self.hardware.host_bytes
        if self.hardware.shares_host_memory:
            available -= device.total_bytes * self.hardware.num_devices
        need = MemoryNeed(place="host", stage="", num_bytes=host, available_bytes=available)
        return MemoryReport(device=device, host=need)

    def longest_seq_len(
        self, layout: PipelineLayout, *, sequences: int = 1, multiple_of: int = 1024
    ) -> int:
        """Return the longest sequences that fit; 0 where none do.

        Args:
            layout: How the microbatches travel.
            sequences: Sequences of a microbatch.
            multiple_of: Only multiples of this are tried.
        """

        def fits(count: int) -> bool:
            shape = MicrobatchShape(sequences=sequences, seq_len=count * multiple_of)
            return self.report(layout, shape=shape).fits

        if not fits(1):
            return 0
        low, high = 1, 2
        while fits(high) and high < 2**20:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low * multiple_of

    # --- devices ---------------------------------------------------------------------------------

    def _places(self, layout: PipelineLayout) -> Iterator[_Place]:
        """Every stage with the ones that its worker runs before and after it.

        The last stages of a round are followed by the first ones of the next. After a step's last
        round comes nothing: the next step's weights are not known yet.
        """
        stages = layout.partition.stages()
        teams = max(self.hardware.num_devices // layout.team_size, 1)
        goes_on = layout.num_microbatches > layout.round_size
        for index, stage in enumerate(stages):
            first, last = index - teams, index + teams
            yield _Place(
                before=stages[first % len(stages)] if first >= 0 or goes_on else None,
                stage=stage,
                after=stages[last % len(stages)] if last < len(stages) or goes_on else None,
            )

    def _device(self, place: _Place, layout: PipelineLayout, shape: MicrobatchShape) -> MemoryNeed:
        stage = place.stage
        inputs = -(-layout.round_size // layout.team_size)
        boundary = self._boundary(shape)
        sizes = {
            MemoryKind.BOUNDARIES: (inputs + _UNDER_WAY) * boundary,
            MemoryKind.ACTIVATIONS: self._activations(stage, layout, shape),
        }
        if not self.hardware.shares_host_memory:
            slots = [self._weights(s, layout) for s in (stage, place.after) if s is not None]
            sizes[MemoryKind.WEIGHTS] = sum(slots) + self._expanded(stage, layout)
            slots = [self._gradients(s, layout) for s in (place.before, stage) if s is not None]
            sizes[MemoryKind.GRADIENTS] = sum(slots)
            sizes[MemoryKind.RESERVED] = self.reserved_bytes
        return MemoryNeed(
            place="device",
            stage=str(stage),
            num_bytes=_by_size(sizes),
            available_bytes=self.hardware.device_bytes,
        )

    def _boundary(self, shape: MicrobatchShape) -> float:
        """The largest boundary of one microbatch."""
        return max((amount.of(shape) for amount in self._boundaries), default=0.0)

    @cached_property
    def _boundaries(self) -> frozenset[Amount]:
        """What the blocks hand on, equal ones once."""
        return frozenset(block.boundary_bytes for block in self.work.blocks)

    def _parts(self, stage: Stage, layout: PipelineLayout) -> list[BlockWork]:
        """Blocks and segments of a stage; the head runs again only where it is trained."""
        stages = layout.partition.stages()
        parts = [self.work.blocks[index] for index in stage.blocks]
        if stage == stages[0] or (stage == stages[-1] and self.work.head.num_trainable):
            parts.insert(0, self.work.head)
        if stage.kind is StageKind.FUSED:
            parts.append(self.work.tail)
        return parts

    def _weights(self, stage: Stage, layout: PipelineLayout) -> float:
        return sum(self._stored(part) for part in self._parts(stage, layout))

    def _stored(self, part: BlockWork) -> float:
        frozen = part.parameter_bytes - part.trainable_bytes
        return part.trainable_bytes + frozen * self.storage.frozen_bits / 16

    def _expanded(self, stage: Stage, layout: PipelineLayout) -> float:
        """One block's weights in 16 bits, where they are stored in fewer."""
        if self.storage.frozen_bits == 16:
            return 0.0
        return max(part.parameter_bytes for part in self._parts(stage, layout))

    def _gradients(self, stage: Stage, layout: PipelineLayout) -> float:
        if stage.kind is StageKind.FORWARD:
            return 0.0
        return sum(part.trainable_bytes for part in self._parts(stage, layout))

    def _activations(self, stage: Stage, layout: PipelineLayout, shape: MicrobatchShape) -> float:
        parts = self._parts(stage, layout)
        if stage.kind is StageKind.FORWARD:
            most = max(part.forward_peak_bytes.of(shape) for part in parts)
        else:
            kept = [part.kept_bytes.of(shape) for part in parts]
            beside = [part.peak_bytes.of(shape) - k for part, k in zip(parts, kept, strict=True)]
            most = sum(kept) + max(0.0, *beside)
        if self.recompute is Recompute.FULL:
            return most
        return most + self._kept_everywhere(layout, shape)

    def _kept_everywhere(self, layout: PipelineLayout, shape: MicrobatchShape) -> float:
        """One worker's part of the activations of a round that is between both passes."""
        kept = sum(block.kept_bytes.of(shape) for block in self.work.blocks)
        return kept * layout.round_size / self.hardware.num_devices

    # --- host ------------------------------------------------------------------------------------

    def _host(self, layout: PipelineLayout, shape: MicrobatchShape) -> dict[MemoryKind, float]:
        work, storage = self.work, self.storage
        boundary = self._boundary(shape)
        in_flight = min(layout.num_microbatches, 2 * layout.round_size)
        has_copies = not self.hardware.shares_host_memory or storage.master_bytes == 0
        tied = work.tied_parameters
        per_parameter = work.head.parameter_bytes / max(work.head.num_parameters, 1)
        copies = sum(self._stored(part) for part in work.segments) - tied * per_parameter
        sizes = {
            MemoryKind.WEIGHTS: copies if has_copies else 0.0,
            MemoryKind.MASTERS: work.num_trainable * storage.master_bytes,
            MemoryKind.GRADIENTS: work.num_trainable * storage.gradient_bytes,
            MemoryKind.OPTIMIZER: work.num_trainable * storage.optimizer_bytes,
            MemoryKind.BOUNDARIES: in_flight * layout.partition.num_backward * boundary,
        }
        if storage.weights is WeightStorage.MEMORY_MAPPED:
            stages = layout.partition.stages()
            largest = max(self._weights(stage, layout) for stage in stages)
            sizes[MemoryKind.STAGING] = 2 * largest * self.hardware.num_devices
            sizes[MemoryKind.WEIGHTS] = 0.0  # the page cache gives way
        return sizes


def _by_size(sizes: dict[MemoryKind, float]) -> tuple[tuple[MemoryKind, int], ...]:
    rows: Sequence[tuple[MemoryKind, int]] = [(k, round(size)) for k, size in sizes.items()]
    return tuple(sorted((row for row in rows if row[1]), key=lambda row: -row[1]))
