"""What is settled about a plan before it is made: the user's hints, and what is kept besides."""

from __future__ import annotations

from dataclasses import dataclass, replace

from roundpipe_lightning.errors import PlanError
from roundpipe_lightning.planning.model.hardware import HardwareSpec
from roundpipe_lightning.planning.model.work import WorkProfile
from roundpipe_lightning.planning.schedule.plan import Plan
from roundpipe_lightning.planning.schedule.stages import RecomputePolicy
from roundpipe_lightning.planning.search.request import PartitionHints
from roundpipe_lightning.strategy.options import Options


@dataclass(frozen=True, kw_only=True)
class SeenStep:
    """What a trial of the step has shown.

    Attributes:
        work: What a microbatch costs.
        knows_activations: Whether its bytes are among that.
        writes_buffers: Whether the forward pass writes into buffers.
        may_write_buffers: Whether it does, or is not known not to.
    """

    work: WorkProfile
    knows_activations: bool
    writes_buffers: bool
    may_write_buffers: bool


class KeptHints:
    """Completes hints for the batches of one session.

    Args:
        options: The strategy's settings.
        machine: What is planned for.
        num_workers: Workers.

    Attributes:
        rounds: Team and round size of the first plan, by its number of microbatches.
    """

    def __init__(self, options: Options, *, machine: HardwareSpec, num_workers: int) -> None:
        self._options = options
        self._machine = machine
        self._num_workers = num_workers
        self.rounds: dict[int, tuple[int, int]] = {}

    def note(self, plan: Plan) -> None:
        """Keep the team and round size of the first plan for as many microbatches."""
        self.rounds.setdefault(plan.num_microbatches, (plan.team_size, plan.round_size))

    def wanted(self, count: int, *, full: int) -> PartitionHints:
        """Return the user's hints, as far as they can be kept with fewer microbatches.

        Args:
            count: Microbatches of the batch.
            full: Microbatches of a full one.
        """
        hints = self._options.partition_hints
        if count >= full:
            return hints
        team = hints.team_size if hints.team_size and hints.team_size <= count else None
        size = None if hints.round_size is None else min(hints.round_size, count)
        return replace(hints, team_size=team, round_size=size)

    def completed(self, hints: PartitionHints, seen: SeenStep, count: int) -> PartitionHints:
        """Return hints with what else has to be kept.

        Running statistics are written in the order of the microbatches, so in one round without
        teams. Accelerators sum gradients up per round and team: those stay as they are, so that
        results do not depend on which shapes came first. A stage has no more than a part of the
        blocks on CPU workers, and wherever nothing is known about activations; no block stays
        there, because what room they leave is not known.

        Raises:
            PlanError: A hint contradicts that.
        """
        if self._options.compile and hints.recompute is None:  # it has no operations to keep
            hints = replace(hints, recompute=(RecomputePolicy.FULL, RecomputePolicy.NONE))
        if hints.resident is None and not seen.knows_activations:
            hints = replace(hints, resident=0)
        if seen.writes_buffers and (
            hints.team_size not in (None, 1) or hints.round_size not in (None, count)
        ):
            raise PlanError(
                f"partition.team_size={hints.team_size} and "
                f"partition.round_size={hints.round_size} cannot be kept: the forward pass writes "
                "into buffers (running statistics, for example), which needs one round of all "
                f"{count} microbatches and no teams. Drop these hints."
            )
        if seen.may_write_buffers:
            hints = replace(
                hints,
                team_size=hints.team_size or 1,
                round_size=hints.round_size or count,
            )
        elif count in self.rounds and not self._machine.shares_host_memory:
            team_size, round_size = self.rounds[count]
            hints = replace(hints, team_size=team_size, round_size=round_size)
        if seen.knows_activations and not self._machine.shares_host_memory:
            return hints
        if hints.recompute == (RecomputePolicy.NONE,):
            return hints
        num_blocks = len(seen.work.blocks)
        most = max(1, -(-num_blocks // max(self._num_workers, 4)))
        if hints.backward is None:
            hints = replace(
                hints,
                most_backward=hints.most_backward or most,
                most_fused=most if hints.most_fused is None else hints.most_fused,
            )
        return hints
