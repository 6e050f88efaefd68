"""Work of a model on any machine: operations and bytes, no seconds.

Every quantity is a function of the microbatch, b sequences of s tokens each:

    fixed + per_token * b s + per_square * b s²

`per_square` is attention's part, `fixed` what does not depend on the tokens, such as reading the
weights and adding up their gradients. `work_seconds` and `time_model` turn work into seconds on a
machine, by the formula of docs/planning.md (seconds on a machine).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from roundpipe_lightning.errors import PlanError
from roundpipe_lightning.planning.model.hardware import HardwareSpec
from roundpipe_lightning.planning.model.profile import BlockProfile, ModelProfile
from roundpipe_lightning.planning.schedule.stages import Partition, RecomputePolicy, StageKind


@dataclass(frozen=True, kw_only=True)
class MicrobatchShape:
    """Shape of a microbatch.

    Attributes:
        sequences: Number of sequences, b.
        seq_len: Tokens of each, s.

    Raises:
        PlanError: A number is less than 1.
    """

    sequences: int
    seq_len: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise PlanError(f"{name}={value} must be 1 or more.")

    @property
    def tokens(self) -> int:
        return self.sequences * self.seq_len


@dataclass(frozen=True, kw_only=True)
class Amount:
    """A number of operations or bytes as a function of the microbatch's shape."""

    fixed: float = 0.0
    per_token: float = 0.0
    per_square: float = 0.0

    def of(self, shape: MicrobatchShape) -> float:
        squares = shape.sequences * shape.seq_len**2
        return self.fixed + self.per_token * shape.tokens + self.per_square * squares

    def __add__(self, other: Amount) -> Amount:
        return Amount(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    def __mul__(self, factor: float) -> Amount:
        return Amount(**{name: value * factor for name, value in vars(self).items()})

    @classmethod
    def fit(cls, short: float, long: float, double: float, *, seq_len: int) -> Amount:
        """Return the amount that has three given values.

        Args:
            short: Value for one sequence of `seq_len` tokens.
            long: Value for one sequence of twice as many tokens.
            double: Value for two sequences of `seq_len` tokens.
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
    """The most of a number of bytes in use at once, which is one amount or another."""

    amounts: tuple[Amount, ...] = ()

    def __mul__(self, factor: float) -> Peak:
        return Peak(amounts=tuple(amount * factor for amount in self.amounts))

    def of(self, shape: MicrobatchShape) -> float:
        return max((0.0, *(amount.of(shape) for amount in self.amounts)))


@dataclass(frozen=True, kw_only=True)
class Work:
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

    def __add__(self, other: Work) -> Work:
        return Work(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    def __mul__(self, factor: float) -> Work:
        return Work(**{name: value * factor for name, value in vars(self).items()})

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
    num_quantizable: int = 0
    quantizable_bytes: int = 0
    boundary_bytes: Amount = Amount()
    gradient_bytes: Amount = Amount()
    kept_bytes: Amount = Amount()
    attention_bytes: Amount = Amount()
    forward_peak_bytes: Peak = Peak()
    peak_bytes: Peak = Peak()

    def part(self, share: float) -> BlockWork:
        amounts: dict[str, Any] = {
            name: value * share
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
    """A model as work: a `ModelProfile` without seconds.

    Attributes:
        tied_parameters: Parameters that head and tail share, counted in both.
    """

    blocks: tuple[BlockWork, ...]
    head: BlockWork = BlockWork(name="head segment")
    tail: BlockWork = BlockWork(name="tail segment")
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
        return sum(part.num_parameters for part in self.segments) - self.tied_parameters

    @property
    def num_trainable(self) -> int:
        """Trainable parameters, tied ones once."""
        tied = self.tied_parameters
        if min(self.head.num_trainable, self.tail.num_trainable) < tied:
            tied = 0  # what is trained there is something else, a prompt say
        return sum(part.num_trainable for part in self.segments) - tied

    def pieces(self, count: int) -> WorkProfile:
        """Return the work on one of several pieces of a batch, whose head and tail run whole.

        Their time counts as spread over the pieces; their memory does not.
        """
        share = 1.0 / count

        def spread(part: BlockWork) -> BlockWork:
            return replace(part, forward=part.forward * share, backward=part.backward * share)

        blocks = tuple(block.part(share) for block in self.blocks)
        return replace(self, blocks=blocks, head=spread(self.head), tail=spread(self.tail))

    def each(self, change: Callable[[BlockWork], BlockWork]) -> WorkProfile:
        blocks = tuple(map(change, self.blocks))
        return replace(self, blocks=blocks, head=change(self.head), tail=change(self.tail))


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

    def timed(part: BlockWork, sized: BlockProfile) -> BlockProfile:
        attention = part.forward.attention_operations.of(shape)
        return replace(
            sized,
            forward_seconds=work_seconds(part.forward, hardware=hardware, shape=shape, dtype=dtype),
            backward_seconds=work_seconds(
                part.backward, hardware=hardware, shape=shape, dtype=dtype
            ),
            attention_seconds=hardware.attention_seconds(attention, dtype=dtype),
        )

    sized = size_model(work, shape=shape)
    return replace(
        sized,
        blocks=tuple(map(timed, work.blocks, sized.blocks)),
        head=timed(work.head, sized.head),
        tail=timed(work.tail, sized.tail),
    )


def size_model(work: WorkProfile, *, shape: MicrobatchShape) -> ModelProfile:
    """Return a model's sizes for a microbatch; all durations are 0."""

    def sized(part: BlockWork) -> BlockProfile:
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

    return ModelProfile(
        blocks=tuple(sized(block) for block in work.blocks),
        head=sized(work.head),
        tail=sized(work.tail),
        fingerprint=work.fingerprint,
        cuts=work.cuts,
    )


@dataclass(frozen=True, kw_only=True)
class Operations:
    """Operations of matrix products and attention; a multiply-add is two.

    Attributes:
        model: Forward and backward pass, each once: what any way to train the model computes.
        recompute: Forward passes that run again, in BACKWARD stages.
    """

    model: float
    recompute: float

    def __mul__(self, factor: float) -> Operations:
        return Operations(model=self.model * factor, recompute=self.recompute * factor)

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
    is not run again.
    """
    model = sum(
        part.forward.operations(shape) + part.backward.operations(shape) for part in work.segments
    )
    again = 0.0
    for stage in partition.stages():
        if stage.kind is not StageKind.BACKWARD:
            continue
        for block in (work.blocks[index] for index in stage.blocks):
            if block.has_backward:
                again += block.forward.operations(shape)
                if recompute is RecomputePolicy.SELECTIVE:
                    again -= block.forward.attention_operations.of(shape)
    return Operations(model=model, recompute=again)
