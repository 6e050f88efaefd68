"""The planner's profile of a model, in bytes and seconds per microbatch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from roundpipe_lightning.errors import PlanError
from roundpipe_lightning.planning.schedule.stages import RecomputePolicy, check_cuts


@dataclass(frozen=True, kw_only=True)
class BlockProfile:
    """One block, or the head or tail segment, of a model, for one microbatch.

    Attributes:
        name: Dotted name in the model, e.g. `model.layers.3`.
        backward_seconds: Duration of the backward pass, the recompute not included.
        parameter_bytes: Size of all parameters and buffers in the compute dtype.
        trainable_bytes: Size of those that get a gradient, in the compute dtype.
        boundary_bytes: Size of what is handed to the next block.
        activation_bytes: Size of what its backward keeps from its forward (or its recompute).
        working_bytes: The most that its backward needs at once beside that.
        forward_bytes: The most that a forward pass which keeps nothing needs at once.
        attention_seconds: Part of `forward_seconds` that attention takes.
        attention_bytes: Size of attention's outputs; with them kept, a recompute leaves attention
            out.
        expanded_bytes: Size in the compute dtype of parameters that `parameter_bytes` has in a
            compressed form, which is expanded on the device.
        num_quantizable: Frozen parameters that are compressed where the storage says so.
        quantizable_bytes: Their size in the compute dtype.
        has_backward: Whether it runs backward and is recomputed for it; not where nothing in it or
            before it is trained.

    Raises:
        PlanError: If a figure is negative.
    """

    name: str
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    parameter_bytes: int = 0
    trainable_bytes: int = 0
    boundary_bytes: int = 0
    activation_bytes: int = 0
    working_bytes: int = 0
    forward_bytes: int = 0
    attention_seconds: float = 0.0
    attention_bytes: int = 0
    expanded_bytes: int = 0
    num_quantizable: int = 0
    quantizable_bytes: int = 0
    has_backward: bool = True

    def __post_init__(self) -> None:
        for field, value in vars(self).items():
            if field != "name" and not value >= 0:
                raise PlanError(f"Profile of {self.name!r}: {field}={value} must be 0 or more.")

    @property
    def recompute_seconds(self) -> float:
        return self.forward_seconds if self.has_backward else 0.0

    def seconds_to_recompute(self, policy: RecomputePolicy) -> float:
        if policy is RecomputePolicy.SELECTIVE and self.attention_bytes:
            return max(self.recompute_seconds - self.attention_seconds, 0.0)
        return self.recompute_seconds


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """A model as the planner sees it: a chain of blocks between a head and a tail segment.

    Attributes:
        blocks: The blocks in the order in which they run.
        head: The user's code before the first block (embedding, masks).
        tail: The user's code after the last block (norm, LM head, loss).
        fingerprint: Identifies the model's structure, see `fingerprint`.
        cuts: Ascending block indices i such that no stage may have both block i-1 and block i,
            because other code runs between them.

    Raises:
        PlanError: If the cuts do not ascend, or do not lie between two blocks.
    """

    blocks: tuple[BlockProfile, ...]
    fingerprint: str
    head: BlockProfile = BlockProfile(name="head segment")
    tail: BlockProfile = BlockProfile(name="tail segment")
    cuts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_cuts(self.cuts, num_blocks=len(self.blocks))

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def parts(self) -> tuple[BlockProfile, ...]:
        return (self.head, *self.blocks, self.tail)

    def each(self, change: Callable[[BlockProfile], BlockProfile]) -> ModelProfile:
        blocks = tuple(map(change, self.blocks))
        return replace(self, blocks=blocks, head=change(self.head), tail=change(self.tail))

    @property
    def busy_seconds(self) -> float:
        return sum(part.forward_seconds + part.backward_seconds for part in self.parts)

    def seconds_to_recompute(self, policy: RecomputePolicy = RecomputePolicy.FULL) -> float:
        return sum(block.seconds_to_recompute(policy) for block in self.blocks)

    @property
    def block_names(self) -> tuple[str, ...]:
        return tuple(block.name for block in self.blocks)


def fingerprint(parts: Iterable[str]) -> str:
    """Return a short stable hash of the lines that describe a model's structure.

    Args:
        parts: For instance `name dtype shape` of every parameter, in order.
    """
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode())
        digest.update(b"\n")
    return digest.hexdigest()[:16]
