"""Values around a plan: the work it is made for, its constraints, and its listeners' event."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from roundpipe_lightning.planning.model.hardware import HardwareSpec
from roundpipe_lightning.planning.model.measured import MeasuredProfile
from roundpipe_lightning.planning.model.work import (
    MicrobatchShape,
    Operations,
    WorkProfile,
    microbatch_operations,
)
from roundpipe_lightning.planning.report.description import PlanDescription
from roundpipe_lightning.planning.schedule.plan import Plan
from roundpipe_lightning.planning.schedule.stages import RecomputePolicy
from roundpipe_lightning.planning.search.fit import TrainingJob
from roundpipe_lightning.planning.search.request import PartitionHints
from roundpipe_lightning.strategy.options import Options

_FIRST_LOOK = 5
"""Steps after which measured times are looked at; then after twice as many, and so on."""


@dataclass(kw_only=True)
class Planned:
    """A plan and what it was made for, for batches of one shape."""

    plan: Plan  # the plan in use for batches like this one
    job: TrainingJob
    measured: MeasuredProfile  # how long its blocks take, as far as that has been measured
    # whether the job's work is that of the step, not of its parameters alone
    knows_activations: bool
    size: int = 0  # values in the largest microbatch's tensors; 0: before the first batch
    planning_seconds: float = 0.0
    next_look: int = _FIRST_LOOK  # steps after which a better plan is looked for
    _operations: tuple[Plan, Operations] | None = None

    @classmethod
    def unmeasured(cls, plan: Plan, job: TrainingJob, *, knows_activations: bool) -> Planned:
        measured = MeasuredProfile(job.profile)
        return cls(plan=plan, job=job, measured=measured, knows_activations=knows_activations)

    def operations_of(self, plan: Plan) -> Operations:
        """Count the operations of a microbatch with one of these plans, once per plan."""
        if self._operations is None or self._operations[0] is not plan:
            job = self.job
            counted = microbatch_operations(
                job.work, shape=job.shape, partition=plan.partition, recompute=plan.recompute
            )
            self._operations = (plan, counted)
        return self._operations[1]


@dataclass(frozen=True, kw_only=True)
class PlanEvent:
    """A plan that is about to be run for the first time."""

    # the plan, and whether its prediction follows from the step's code and from measured times
    planned: Planned
    replaced: Plan | None  # the plan that was run before for such batches; None for the first one
    assumed_rates: bool  # whether the machine's rates are assumed, not measured or given

    @cached_property
    def description(self) -> PlanDescription:
        planned, measured = self.planned, self.planned.measured
        profile = measured.profile() if measured.is_ready else None
        return PlanDescription.of(planned.plan, job=planned.job, profile=profile)


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """Work of a step, as far as it is known."""

    work: WorkProfile
    knows_activations: bool  # whether its bytes are among that
    # whether it is that of a piece: all go forward before the loss is computed
    is_joined: bool = False

    def pieces(self, count: int) -> StepWork:
        return replace(self, work=self.work.pieces(count), is_joined=True)


class PlanConstraints:
    """Constraints on a plan before it is made: the user's hints, and what follows besides.

    Attributes:
        rounds: Team and round size of the first plan, by its number of microbatches.
    """

    def __init__(self, options: Options, *, machine: HardwareSpec) -> None:
        self._options = options
        self._machine = machine
        self.rounds: dict[int, tuple[int, int]] = {}

    def users_hints(self, count: int, *, full: int) -> PartitionHints:
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

    def completed(
        self, hints: PartitionHints, step: StepWork, count: int, shape: MicrobatchShape
    ) -> PartitionHints:
        """Return hints with what else has to be kept.

        Accelerators sum gradients up per round and team: those stay as they are, so that
        results do not depend on which shapes came first. A stage has no more than a part of the
        blocks on CPU workers, unless one runs one microbatch whose activations are smaller than
        the weights, and wherever nothing is known about activations; no block stays there,
        because what room they leave is not known.

        Raises:
            PlanError: A hint contradicts that.
        """
        if step.is_joined and count > 1:  # all pieces go forward before the loss is computed
            wanted = hints.recompute or RecomputePolicy
            policies = tuple(p for p in wanted if p is not RecomputePolicy.NONE)
            hints = replace(hints, recompute=policies, most_fused=0, round_size=count)
        shares_memory = self._machine.shares_host_memory
        if self._options.compile and hints.recompute is None:  # it has no operations to keep
            hints = replace(hints, recompute=(RecomputePolicy.FULL, RecomputePolicy.NONE))
        if hints.resident is None and not step.knows_activations:
            hints = replace(hints, resident=0)
        if count in self.rounds and not shares_memory:
            team_size, round_size = self.rounds[count]
            hints = replace(hints, team_size=team_size, round_size=round_size)
        blocks = step.work.blocks
        needs_no_stages = count == self._machine.num_devices == 1 and (
            sum(one.kept_bytes.of(shape) - one.parameter_bytes for one in blocks) < 0
        )
        if step.knows_activations and (needs_no_stages or not shares_memory):
            return hints
        if hints.recompute == (RecomputePolicy.NONE,) or hints.backward is not None:
            return hints
        most = max(1, -(-len(blocks) // max(self._machine.num_devices, 4)))
        return replace(
            hints,
            most_backward=hints.most_backward or most,
            most_fused=most if hints.most_fused is None else hints.most_fused,
        )
