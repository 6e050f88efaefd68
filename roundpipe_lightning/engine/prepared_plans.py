"""Data that is made once per plan: its gates, the runs of each worker, and where it begins."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from itertools import groupby

from torch import nn

from roundpipe_lightning.engine.chain.chain import Chain
from roundpipe_lightning.engine.transfer.weight_prefetch import StageRun
from roundpipe_lightning.engine.transfer.worker_transfers import WorkerRuns
from roundpipe_lightning.engine.worker.turns import TurnGraph
from roundpipe_lightning.planning.schedule.plan import Plan, rotated, turns_of_batch
from roundpipe_lightning.planning.schedule.stages import Stage, StageKind

_PLANS_REMEMBERED = 64


class PreparedPlan:
    """A plan for a chain with what follows from it, made when first asked for."""

    def __init__(self, plan: Plan, chain: Chain) -> None:
        self.plan = plan
        self._chain = chain
        self._stage_runs: dict[bool, tuple[WorkerRuns, ...]] = {}
        self._rotated: dict[int, PreparedPlan] = {}

    @cached_property
    def graph(self) -> TurnGraph:
        return TurnGraph.from_plan(self.plan)

    @cached_property
    def num_turns(self) -> int:
        """By how many workers later the next batch in flight begins."""
        return turns_of_batch(self.plan)

    def stage_runs(self, *, backward: bool) -> tuple[WorkerRuns, ...]:
        if backward not in self._stage_runs:
            self._stage_runs[backward] = plan_runs(self.plan, self._chain, backward=backward)
        return self._stage_runs[backward]

    def beginning_with(self, worker: int) -> PreparedPlan:
        if worker not in self._rotated:
            plan = rotated(self.plan, worker)
            same = plan is self.plan
            self._rotated[worker] = self if same else PreparedPlan(plan, self._chain)
        return self._rotated[worker]


class PreparedPlans:
    """The last plans of an engine for a chain, and the worker with which its next batch begins."""

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        self._known: list[PreparedPlan] = []
        self._next_worker = 0

    def prepared(self, plan: Plan) -> PreparedPlan:
        for known in self._known:
            if known.plan is plan:
                return known
        found = PreparedPlan(plan, self._chain)
        self._known = [found, *self._known][:_PLANS_REMEMBERED]
        return found

    def following(self, plan: Plan) -> PreparedPlan:
        """Return a plan as it is run by a batch that begins while the last one is in flight."""
        prepared = self.prepared(plan)
        return prepared.beginning_with(self._first_worker(prepared))

    def begin(self, plan: Plan, *, overlaps: bool) -> PreparedPlan:
        """Return the plan of a batch that begins, and find the worker of the one after it.

        Without another one in flight it begins with worker 0.
        """
        prepared = self.prepared(plan)
        first = self._first_worker(prepared) if overlaps else 0
        self._next_worker = (first + prepared.num_turns) % plan.num_workers
        return prepared.beginning_with(first)

    def _first_worker(self, prepared: PreparedPlan) -> int:
        if not prepared.num_turns:
            return 0
        return self._next_worker - self._next_worker % prepared.plan.team_size


def plan_runs(plan: Plan, chain: Chain, *, backward: bool) -> tuple[WorkerRuns, ...]:
    """Return the stage runs of each worker; without `backward` BACKWARD stages have nothing to do.

    Where batches in flight begin with other workers there is room on each for what any one runs.
    """
    found = []
    for worker, actions in enumerate(plan.schedule.workers):
        groups = groupby(actions, key=lambda action: (action.kind, action.stage))
        stages = [plan.partition.stage(kind, index) for (kind, index), _ in groups]
        stays = plan.resident[worker] if plan.resident else ()
        found.append(
            WorkerRuns(
                runs=tuple(_stage_run(stage, chain, backward=backward) for stage in stages),
                num_slots=plan.weight_slots,
                resident=_unique(chain.links[position].block for position in stays),
            )
        )
    if not turns_of_batch(plan):
        return tuple(found)
    everybody = tuple(dict.fromkeys(run for step in found for run in step.runs))
    return tuple(replace(step, room_for=everybody) for step in found)


def _stage_run(stage: Stage, chain: Chain, *, backward: bool) -> StageRun:
    links = chain.links[stage.blocks.start : stage.blocks.stop]
    wanted: Iterable[nn.Module] = (link.block for link in links)
    if stage.kind is StageKind.BACKWARD:
        wanted = (link.block for link in links if link.backward and backward)
    return StageRun(
        stage=stage, blocks=_unique(link.block for link in links), wanted=_unique(wanted)
    )


def _unique(blocks: Iterable[nn.Module]) -> tuple[nn.Module, ...]:
    return tuple(dict.fromkeys(blocks))
