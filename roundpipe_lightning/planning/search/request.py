"""What a plan is wanted for."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from roundpipe_lightning.errors import PlanError
from roundpipe_lightning.planning.cost.costs import RecomputeStart
from roundpipe_lightning.planning.schedule.recompute import RecomputePolicy
from roundpipe_lightning.planning.schedule.stages import Partition
from roundpipe_lightning.planning.search.evolve import Effort, StageLimits


@dataclass(frozen=True, kw_only=True)
class PlanningRequest:
    """What a plan is wanted for; what has a default is left to the planner.

    Attributes:
        num_microbatches: Microbatches of one batch, or several numbers to choose from.
        num_batches: Batches that are accumulated before the weights change: one continuous stream,
            a batch fills the pipeline while the one before drains.
        team_sizes: Team sizes to choose from; empty: all that divide the number of devices.
        round_sizes: Round sizes to choose from; empty: the whole batch, and one per worker.
        limits: Blocks per stage at most, whatever would fit; None: what fits the devices' memory.
        partitions: Partitions to choose from; empty: the search finds them.
        hop_seconds: From one worker to another; None: that of the largest boundary, by way of the
            host (a download and an upload) or directly (`BoundaryRoute`).
        recompute_start: When the workers begin a recompute.
        recompute: What BACKWARD stages may start from. Without NONE there is a BACKWARD stage,
            without the others there is none. Of several SELECTIVE is chosen where it saves enough.
        weight_slots: Slots for weights to choose from; one is taken where it makes a better plan
            fit.
        at_least_resident: Blocks that must stay on every worker.
        at_most_resident: Blocks that may stay on a worker; None: as many as fit and save uploads.
        effort: How long to search per team and round size.

    Raises:
        PlanError: If a count is less than 1, or a partition breaks the limits.
    """

    num_microbatches: int | tuple[int, ...]
    num_batches: int = 1
    team_sizes: tuple[int, ...] = ()
    round_sizes: tuple[int, ...] = ()
    limits: StageLimits | None = None
    partitions: tuple[Partition, ...] = ()
    hop_seconds: float | None = None
    recompute_start: RecomputeStart = RecomputeStart.EARLY
    recompute: tuple[RecomputePolicy, ...] = tuple(RecomputePolicy)
    weight_slots: tuple[int, ...] = (2, 1)
    at_least_resident: int = 0
    at_most_resident: int | None = None
    effort: Effort = field(default_factory=Effort)

    def __post_init__(self) -> None:
        """Refuse counts that no step has."""
        counts = [
            *(("num_microbatches", count) for count in self.microbatch_choices),
            ("num_batches", self.num_batches),
            *(("team_sizes", size) for size in self.team_sizes),
            *(("round_sizes", size) for size in self.round_sizes),
        ]
        for name, value in counts:
            if value < 1:
                raise PlanError(f"{name}: {value} must be 1 or more.")
        self._check_choices()
        for partition in self.partitions:
            if self.limits is not None and not self.limits.allow(partition):
                raise PlanError(
                    f"partitions: '{partition}' has a stage with more blocks than the limits "
                    f"forward={self.limits.forward}, backward={self.limits.backward}, "
                    f"fused={self.limits.fused} allow: change either."
                )

    def _check_choices(self) -> None:
        """Refuse choices from nothing, and numbers that nothing has."""
        choices = (
            ("num_microbatches", self.microbatch_choices),
            ("recompute", self.recompute),
            ("weight_slots", self.weight_slots),
        )
        for name, values in choices:
            if not values:
                raise PlanError(f"{name}: give at least one to choose from.")
        if not set(self.weight_slots) <= {1, 2}:
            raise PlanError(f"weight_slots: {self.weight_slots} must be 1 or 2.")
        most = self.at_most_resident
        if self.at_least_resident < 0 or (most is not None and most < self.at_least_resident):
            raise PlanError(
                f"at_least_resident={self.at_least_resident}, at_most_resident={most}: give 0 or "
                "more, and no more at least than at most."
            )

    @property
    def microbatch_choices(self) -> tuple[int, ...]:
        """Numbers of microbatches to choose from."""
        counts = self.num_microbatches
        return (counts,) if isinstance(counts, int) else counts

    @property
    def policies(self) -> tuple[RecomputePolicy, ...]:
        """What BACKWARD stages may start from; FULL where there may be none."""
        some = tuple(each for each in self.recompute if each is not RecomputePolicy.NONE)
        return some or (RecomputePolicy.FULL,)

    def without_selective(self) -> PlanningRequest:
        """Return the request without SELECTIVE, unless there is nothing else."""
        others = tuple(each for each in self.recompute if each is not RecomputePolicy.SELECTIVE)
        return replace(self, recompute=others or self.recompute)

    def allows(self, partition: Partition) -> bool:
        """Say whether a partition has BACKWARD stages, or none, as the policies want."""
        if partition.num_blocks == 0:
            return True
        if partition.num_backward == 0:
            return RecomputePolicy.NONE in self.recompute
        return self.recompute != (RecomputePolicy.NONE,)
