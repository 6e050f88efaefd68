"""How many operations a training step is, and how many more its recompute is."""

from __future__ import annotations

from dataclasses import dataclass

from roundpipe_lightning.planning.model.work import BlockWork, MicrobatchShape, WorkProfile
from roundpipe_lightning.planning.schedule.recompute import RecomputePolicy
from roundpipe_lightning.planning.schedule.stages import Partition, StageKind


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
        """Return the operations of so many times the work."""
        return Operations(model=self.model * factor, recompute=self.recompute * factor)

    @property
    def all(self) -> float:
        """What the devices compute."""
        return self.model + self.recompute


def microbatch_operations(
    work: WorkProfile,
    *,
    shape: MicrobatchShape,
    partition: Partition,
    recompute: RecomputePolicy = RecomputePolicy.FULL,
) -> Operations:
    """Add up a microbatch's operations.

    Args:
        work: What the model computes.
        shape: The microbatch.
        partition: The stages: what a BACKWARD stage has is recomputed, where it has a backward
            pass.
        recompute: What BACKWARD stages start from; with SELECTIVE attention is not run again.
    """
    model = sum(
        _forward(part, shape) + _backward(part, shape)
        for part in (work.head, *work.blocks, work.tail)
    )
    again = 0.0
    for stage in partition.stages():
        if stage.kind is not StageKind.BACKWARD:
            continue
        for block in (work.blocks[index] for index in stage.blocks):
            if block.has_backward:
                again += _forward(block, shape)
                if recompute is RecomputePolicy.SELECTIVE:
                    again -= block.forward.attention_operations.of(shape)
    return Operations(model=model, recompute=again)


def _forward(part: BlockWork, shape: MicrobatchShape) -> float:
    work = part.forward
    return work.matrix_operations.of(shape) + work.attention_operations.of(shape)


def _backward(part: BlockWork, shape: MicrobatchShape) -> float:
    work = part.backward
    return work.matrix_operations.of(shape) + work.attention_operations.of(shape)
