"""How the microbatches of a step travel: a plan without its schedule."""

from __future__ import annotations

from dataclasses import dataclass

from roundpipe_lightning.planning.schedule.plan import Plan
from roundpipe_lightning.planning.schedule.recompute import RecomputePolicy
from roundpipe_lightning.planning.schedule.stages import Partition


@dataclass(frozen=True, kw_only=True)
class PipelineLayout:
    """How a step's microbatches travel.

    Attributes:
        partition: The stages.
        num_microbatches: Microbatches of an optimizer step.
        round_size: Microbatches that travel together.
        team_size: Workers that share a stage.
        weight_slots: Stages whose weights a device holds at once, see `Plan.weight_slots`.
        recompute: What BACKWARD stages start from.
        resident: Blocks that stay on each worker, see `Plan.resident`.
        num_batches: Accumulated batches that the microbatches are those of.
    """

    partition: Partition
    num_microbatches: int
    round_size: int
    team_size: int = 1
    weight_slots: int = 2
    recompute: RecomputePolicy = RecomputePolicy.FULL
    resident: tuple[tuple[int, ...], ...] = ()
    num_batches: int = 1

    @property
    def goes_on(self) -> bool:
        """Whether another round follows the first one."""
        return self.num_microbatches > self.round_size

    @property
    def num_rounds(self) -> int:
        """Rounds of a step."""
        return -(-self.num_microbatches // self.round_size)

    @classmethod
    def of(cls, plan: Plan) -> PipelineLayout:
        """Return how a plan's microbatches travel."""
        return cls(
            partition=plan.partition,
            num_microbatches=plan.num_microbatches,
            round_size=plan.round_size,
            team_size=plan.team_size,
            weight_slots=plan.weight_slots,
            recompute=plan.recompute,
            resident=plan.resident,
        )
