"""Work of a model on any machine, operations and bytes, and how its parameters are stored.

Every quantity is a function of the microbatch, b sequences of s tokens each:

    fixed + per_token * b s + per_square * b s²

`per_square` is attention's part, `fixed` what does not depend on the tokens, such as reading the
weights and adding up their gradients. `work_seconds` and `time_model` turn work into seconds on a
machine, by the formula of docs/planning.md (seconds on a machine).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any

from typing_extensions import Self

from roundpipe_lightning.errors import PlanError
from roundpipe_lightning.planning.model.hardware import HardwareSpec
from roundpipe_lightning.planning.model.profile import BlockProfile, ModelProfile
from roundpipe_lightning.planning.schedule.stages import Partition, RecomputePolicy, StageKind

_FEW = 2048  # tokens


@dataclass(frozen=True, kw_only=True)
class MicrobatchShape:
    """A number of sequences, b, of s tokens each; PlanError: a number is less than 1."""

    sequences: int
    seq_len: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise PlanError(f"{name}={value} must be 1 or more.")

    @property
    def tokens(self) -> int:
        return self.sequences * self.seq_len


class _Summed:
    """Adds and scales all fields alike."""

    def __add__(self, other: Self) -> Self:
        return type(self)(
            **{name: each + getattr(other, name) for name, each in vars(self).items()}
        )

    def __mul__(self, factor: float) -> Self:
        return type(self)(**{name: each * factor for name, each in vars(self).items()})


@dataclass(frozen=True, kw_only=True)
class Amount(_Summed):
    """A number of operations or bytes as a function of the microbatch's shape."""

    fixed: float = 0.0
    per_token: float = 0.0
    per_square: float = 0.0

    def of(self, shape: MicrobatchShape) -> float:
        squares = shape.sequences * shape.seq_len**2
        return self.fixed + self.per_token * shape.tokens + self.per_square * squares

    def piece(self, share: float) -> Amount:
        """Return that of a part of the tokens; what is fixed is whole in every part."""
        return replace(self, per_token=share * self.per_token, per_square=share * self.per_square)

    @classmethod
    def fit(cls, short: float, long: float, double: float, *, seq_len: int) -> Amount:
        """Return the amount that has three given values.

        They are for one sequence of `seq_len` tokens, for one of twice as many, and for two.
        """
        per_square = (long - double) / (2 * seq_len**2)
        per_token = (double - short) / seq_len - per_square * seq_len
        fixed = 2 * short - double
        return cls(
            fixed=_clean(fixed, short),
            per_token=_clean(per_token, short / seq_len),
            per_square=_clean(per_square, short / seq_len**2),
        )


def _clean(value: float, scale: float) -> float:
    """Nothing, where rounding left next to nothing."""
    return 0.0 if abs(value) <= 1e-9 * abs(scale) else value


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The most of a number of bytes in use at once, which is one amount or another.

    Attributes:
        short: Another one that counts for as many tokens as `_FEW` at most.
    """

    amounts: tuple[Amount, ...] = ()
    short: Amount = Amount()

    def __mul__(self, factor: float) -> Peak:
        amounts = tuple(amount * factor for amount in self.amounts)
        return Peak(amounts=amounts, short=self.short * factor)

    def piece(self, share: float) -> Peak:
        amounts = tuple(amount.piece(share) for amount in self.amounts)
        return Peak(amounts=amounts, short=self.short.piece(share))

    def of(self, shape: MicrobatchShape) -> float:
        amounts = (*self.amounts, self.short) if shape.tokens <= _FEW else self.amounts
        return max((0.0, *(amount.of(shape) for amount in amounts)))


@dataclass(frozen=True, kw_only=True)
class Work(_Summed):
    """Operations of one pass over a block.

    Attributes:
        matrix_operations: Of matrix products, a multiply-add counted as two; of a mixture's experts
            those that tokens meet.
        matrix_bytes: What they read and write: of a mixture the weights of all experts.
        attention_operations: Of fused attention, only the pairs that its mask leaves.
        memory_bytes: What all other operations read and write.
    """

    matrix_operations: Amount = Amount()
    matrix_bytes: Amount = Amount()
    attention_operations: Amount = Amount()
    memory_bytes: Amount = Amount()

    def piece(self, share: float) -> Work:
        return Work(**{name: amount.piece(share) for name, amount in vars(self).items()})

    def operations(self, shape: MicrobatchShape) -> float:
        return self.matrix_operations.of(shape) + self.attention_operations.of(shape)


@dataclass(frozen=True, kw_only=True)
class BlockWork:
    """Operations and bytes of a block, or of the head or tail segment.

    What is not named here is as of `BlockProfile`.

    Attributes:
        backward: The backward pass, the recompute not included.
        num_parameters: Parameters, without buffers.
        num_trainable: Those that get a gradient.
        mapped_bytes: Of `parameter_bytes`, those that stay in their files.
        boundary_bytes: What is handed to the next block.
        gradient_bytes: What is handed back to the block before: the gradient of the input; 0 where
            nothing before is trained.
        kept_bytes: What the backward pass keeps from the forward pass (or its recompute).
        attention_bytes: What attention's forward pass returns and its backward pass needs.
        forward_peak_bytes: Most memory in use at once in a forward pass that keeps nothing, without
            parameters and the block's input.
        peak_bytes: Most memory in use at once in a forward pass and the backward pass after it,
            without parameters, their gradients and the block's input.
    """

    name: str
    forward: Work = Work()
    backward: Work = Work()
    num_parameters: int = 0
    num_trainable: int = 0
    parameter_bytes: int = 0
    trainable_bytes: int = 0
    mapped_bytes: int = 0
    num_quantizable: int = 0
    quantizable_bytes: int = 0
    boundary_bytes: Amount = Amount()
    gradient_bytes: Amount = Amount()
    kept_bytes: Amount = Amount()
    attention_bytes: Amount = Amount()
    forward_peak_bytes: Peak = Peak()
    peak_bytes: Peak = Peak()

    def part(self, share: float) -> BlockWork:
        """Return the block with values of a part of their width."""
        return self._each_amount(lambda amount: amount * share)

    def piece(self, share: float) -> BlockWork:
        """Return the block on a part of the tokens."""
        return self._each_amount(lambda amount: amount.piece(share))

    def _each_amount(self, change: Callable[[Any], Any]) -> BlockWork:
        amounts: dict[str, Any] = {
            name: change(value)
            for name, value in vars(self).items()
            if isinstance(value, Amount | Peak | Work)
        }
        return replace(self, **amounts)

    @property
    def has_backward(self) -> bool:
        """Whether the block recomputes and runs backward: it or a block before it is trained."""
        return self.num_trainable > 0 or self.backward != Work()


@dataclass(frozen=True, kw_only=True)
class WorkProfile:
    """A model as work: a `ModelProfile` without seconds. Tied parameters are in head and tail.

    Attributes:
        repeated: Sizes of frozen tensors that another block has as well, such as those of the model
            beside its reference.
    """

    blocks: tuple[BlockWork, ...]
    head: BlockWork = BlockWork(name="head segment")
    tail: BlockWork = BlockWork(name="tail segment")
    repeated: BlockWork = BlockWork(name="repeated")
    tied_parameters: int = 0
    fingerprint: str = ""
    cuts: tuple[int, ...] = ()

    @property
    def block_names(self) -> tuple[str, ...]:
        return tuple(block.name for block in self.blocks)

    @property
    def segments(self) -> tuple[BlockWork, ...]:
        return (self.head, *self.blocks, self.tail)

    @property
    def num_parameters(self) -> int:
        counted = sum(part.num_parameters for part in self.segments)
        return counted - self.tied_parameters - self.repeated.num_parameters

    @property
    def num_trainable(self) -> int:
        """Trainable parameters, tied ones once."""
        tied = self.tied_parameters
        if min(self.head.num_trainable, self.tail.num_trainable) < tied:
            tied = 0  # what is trained there is something else, a prompt say
        return sum(part.num_trainable for part in self.segments) - tied

    def pieces(self, count: int) -> WorkProfile:
        """Return the work on one of several pieces of a batch, whose head and tail run whole.

        Their time counts as spread over the pieces; their memory does not. Where only one batch
        was measured, nothing says what of its work is fixed, so all of it is divided.
        """
        share = 1.0 / count
        is_known = any(block.boundary_bytes.per_token for block in self.blocks)
        piece = BlockWork.piece if is_known else BlockWork.part

        def spread(part: BlockWork) -> BlockWork:
            return replace(part, forward=part.forward * share, backward=part.backward * share)

        blocks = tuple(piece(block, share) for block in self.blocks)
        return replace(self, blocks=blocks, head=spread(self.head), tail=spread(self.tail))

    def each(self, change: Callable[[BlockWork], BlockWork]) -> WorkProfile:
        return replace(
            self,
            blocks=tuple(map(change, self.blocks)),
            head=change(self.head),
            tail=change(self.tail),
            repeated=change(self.repeated),
        )


def work_seconds(
    work: Work, *, hardware: HardwareSpec, shape: MicrobatchShape, dtype: str
) -> float:
    """Return the seconds of compute on one device; `dtype` names a rate of `MatrixRates`.

    A matrix product first moves its operands and then multiplies: that the two overlap in part is
    in the shares.
    """
    matrix = hardware.matrix_seconds(work.matrix_operations.of(shape), dtype=dtype)
    attention = hardware.attention_seconds(work.attention_operations.of(shape), dtype=dtype)
    moved = work.matrix_bytes.of(shape) + work.memory_bytes.of(shape)
    return matrix + attention + hardware.memory_seconds(moved)


def time_model(
    work: WorkProfile, *, hardware: HardwareSpec, shape: MicrobatchShape, dtype: str
) -> ModelProfile:
    """Return the planner's view of a model on a machine; `dtype` names a rate of `MatrixRates`."""

    def timed(part: BlockWork) -> BlockProfile:
        attention = part.forward.attention_operations.of(shape)
        forward, backward = (
            work_seconds(each, hardware=hardware, shape=shape, dtype=dtype)
            for each in (part.forward, part.backward)
        )
        return replace(
            _sized(part, shape=shape),
            forward_seconds=forward,
            backward_seconds=backward,
            attention_seconds=hardware.attention_seconds(attention, dtype=dtype),
        )

    return _profile_of(work, timed)


def size_model(work: WorkProfile, *, shape: MicrobatchShape) -> ModelProfile:
    """Return a model's sizes for a microbatch; all durations are 0."""
    return _profile_of(work, partial(_sized, shape=shape))


def _profile_of(work: WorkProfile, profile: Callable[[BlockWork], BlockProfile]) -> ModelProfile:
    return ModelProfile(
        blocks=tuple(map(profile, work.blocks)),
        head=profile(work.head),
        tail=profile(work.tail),
        fingerprint=work.fingerprint,
        cuts=work.cuts,
    )


def _sized(part: BlockWork, *, shape: MicrobatchShape) -> BlockProfile:
    kept = part.kept_bytes.of(shape)
    return BlockProfile(
        name=part.name,
        parameter_bytes=part.parameter_bytes,
        trainable_bytes=part.trainable_bytes,
        num_quantizable=part.num_quantizable,
        quantizable_bytes=part.quantizable_bytes,
        boundary_bytes=round(part.boundary_bytes.of(shape)),
        activation_bytes=max(0, round(kept)),
        working_bytes=max(0, round(part.peak_bytes.of(shape) - kept)),
        forward_bytes=round(part.forward_peak_bytes.of(shape)),
        attention_bytes=max(0, round(part.attention_bytes.of(shape))),
        has_backward=part.has_backward,
    )


@dataclass(frozen=True, kw_only=True)
class Operations(_Summed):
    """Operations of matrix products and attention; a multiply-add is two.

    Attributes:
        model: Forward and backward pass, each once: what any way to train the model computes.
        recompute: Forward passes that run again, in BACKWARD stages.
    """

    model: float
    recompute: float

    @property
    def all(self) -> float:
        return self.model + self.recompute


def microbatch_operations(
    work: WorkProfile,
    *,
    shape: MicrobatchShape,
    partition: Partition,
    recompute: RecomputePolicy = RecomputePolicy.FULL,
) -> Operations:
    """Add up a microbatch's operations.

    What a BACKWARD stage has is recomputed, where it has a backward pass; with SELECTIVE attention
    is not run again, with NONE nothing is.
    """
    model = sum(
        part.forward.operations(shape) + part.backward.operations(shape) for part in work.segments
    )
    again = 0.0
    for stage in partition.stages():
        if stage.kind is not StageKind.BACKWARD or recompute is RecomputePolicy.NONE:
            continue
        for part in [work.blocks[index] for index in stage.blocks] + [work.tail] * stage.has_tail:
            if part.has_backward:
                again += part.forward.operations(shape)
                if recompute is RecomputePolicy.SELECTIVE:
                    again -= part.forward.attention_operations.of(shape)
    return Operations(model=model, recompute=again)


_COMPUTE_BITS = 16
_MAPPED_PASSES = 3

STATE_WINDOW_BYTES = 64 << 20
"""Optimizer state on disk that is read, stepped and written at a time."""

_NUM_STATE_WINDOWS = 3  # one is read ahead, one stepped, one written behind


SCALE_BLOCK = 64
"""Quantised weights that share a float32 scale."""


class WeightStorage(Enum):
    """Storage of the weights that are uploaded."""

    PAGE_LOCKED = "page_locked"
    """In page-locked host memory: a device reads them by itself."""

    MEMORY_MAPPED = "memory_mapped"
    """In the page cache, mapped from files: the host copies them into a page-locked buffer first,
    so each byte passes the host's memory three times instead of once."""

    ON_DISK = "on_disk"
    """The same, of more than the page cache holds: every upload reads them from the disk."""


@dataclass(frozen=True, kw_only=True)
class ParameterStorage:
    """Bytes per parameter; the defaults are those of AdamW with 16-bit weights on the devices.

    Attributes:
        weights: Where the weights lie that are uploaded.
        master_bytes: Of a trainable parameter's full-precision master; 0: it is uploaded itself.
        gradient_bytes: Of its gradient, summed up on the host.
        optimizer_bytes: Of its optimizer state in memory.
        disk_bytes: Of its optimizer state on disk.
        frozen_bits: Of a frozen parameter that can be quantised: 16, 8 or 4, beside its scales.
    """

    weights: WeightStorage = WeightStorage.PAGE_LOCKED
    master_bytes: float = 4.0
    gradient_bytes: float = 4.0
    optimizer_bytes: float = 8.0
    disk_bytes: float = 0.0
    frozen_bits: int = 16

    @property
    def update_bytes(self) -> float:
        """Bytes that the optimizer reads and writes for a trainable parameter in one step.

        It reads the gradient, reads and writes master and state, and writes the 16-bit copy. State
        on disk passes the memory as well.
        """
        state = self.optimizer_bytes + self.disk_bytes
        return self.gradient_bytes + 2 * self.master_bytes + 2 * state + 2

    def update_seconds(self, num_trainable: int, hardware: HardwareSpec) -> float:
        """Return the optimizer's time: the host's, or the disk's to read and write its state."""
        moved = 2 * num_trainable * self.disk_bytes
        in_memory = hardware.host_seconds(num_trainable * self.update_bytes)
        return max(in_memory, moved / hardware.disk_bytes_per_second)

    def placed(
        self, profile: ModelProfile, *, num_trainable: int, hardware: HardwareSpec
    ) -> ParameterStorage:
        """Return the storage with mapped weights on the disk where the page cache is too small.

        Uploads go through all of them in turn, so a cache that has no room for all has none of what
        is needed next.
        """
        if self.weights is not WeightStorage.MEMORY_MAPPED:
            return self
        mapped = sum(p.parameter_bytes - p.trainable_bytes for p in self.stored(profile).parts)
        kept = num_trainable * (self.master_bytes + self.gradient_bytes)
        held = kept + self.state_bytes(num_trainable)
        if mapped + held <= hardware.host_bytes:
            return self
        return replace(self, weights=WeightStorage.ON_DISK)

    def state_bytes(self, num_trainable: int) -> float:
        windows = min(num_trainable * self.disk_bytes, _NUM_STATE_WINDOWS * STATE_WINDOW_BYTES)
        return num_trainable * self.optimizer_bytes + windows

    def sum_bytes(self, downloaded_bytes: float) -> float:
        """Return the bytes that the host reads and writes to add 16-bit gradients to their sums."""
        return downloaded_bytes * (1 + 2 * self.gradient_bytes * 8 / _COMPUTE_BITS)

    def transfer_seconds(
        self, *, uploaded_bytes: float, downloaded_bytes: float, hardware: HardwareSpec
    ) -> float:
        """Time for which transfers keep the host's memory or the disk busy.

        The bytes are those of all devices together: weights up, gradients down.
        """
        if hardware.shares_host_memory:  # nothing is copied but from the disk
            on_disk = self.weights is WeightStorage.ON_DISK
            return uploaded_bytes / hardware.disk_bytes_per_second if on_disk else 0.0
        down = downloaded_bytes / hardware.host_bytes_per_second
        return uploaded_bytes / self._upload_rate(hardware) + down

    def _upload_rate(self, hardware: HardwareSpec) -> float:
        """Return the bytes per second that the weights' place gives to all devices together."""
        rate = hardware.host_bytes_per_second
        if self.weights is not WeightStorage.PAGE_LOCKED:
            rate *= hardware.efficiency.host / _MAPPED_PASSES
        if self.weights is WeightStorage.ON_DISK:
            rate = min(rate, hardware.disk_bytes_per_second)
        return rate

    def saved_bytes(self, num_parameters: int, num_bytes: int) -> float:
        if self.frozen_bits == _COMPUTE_BITS:
            return 0.0
        codes_and_scales = num_parameters * (self.frozen_bits / 8 + 4 / SCALE_BLOCK)
        return max(0.0, num_bytes - codes_and_scales)

    def stored(self, profile: ModelProfile) -> ModelProfile:
        """Return the model with frozen parameters of their size in storage."""

        def smaller(part: BlockProfile) -> BlockProfile:
            saved = self.saved_bytes(part.num_quantizable, part.quantizable_bytes)
            return replace(
                part,
                parameter_bytes=round(part.parameter_bytes - saved),
                expanded_bytes=part.quantizable_bytes if saved else 0,
            )

        return profile.each(smaller)

    def expanded_seconds(self, part: BlockProfile, hardware: HardwareSpec) -> float:
        """Time of a device to expand a block's frozen parameters to 16 bits after an upload."""
        saved = self.saved_bytes(part.num_quantizable, part.quantizable_bytes)
        moved = 2 * part.quantizable_bytes - saved  # the codes are read, the weights are written
        return hardware.memory_seconds(moved) if saved else 0.0

    def links(self, hardware: HardwareSpec) -> HardwareSpec:
        """Return the machine with the uploads that the weights' place allows."""
        if self.weights is WeightStorage.PAGE_LOCKED:
            return hardware
        copied = self._upload_rate(hardware)
        return replace(
            hardware,
            upload_bytes_per_second=min(hardware.upload_bytes_per_second, copied),
            root_upload_bytes_per_second=min(
                hardware.root_upload_bytes_per_second, copied / hardware.num_roots
            ),
            unequal=tuple(map(self.links, hardware.unequal)),
        )
