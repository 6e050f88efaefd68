"""What each worker runs of a plan, as its transfers see it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import groupby

from torch import nn

from roundpipe_lightning.engine.chain.chain import Chain
from roundpipe_lightning.engine.transfer.weight_prefetch import StageRun
from roundpipe_lightning.engine.transfer.worker_transfers import WorkerRuns
from roundpipe_lightning.planning.schedule.plan import Plan
from roundpipe_lightning.planning.schedule.round_robin import turns_of_batch
from roundpipe_lightning.planning.schedule.stages import Stage, StageKind


def plan_runs(plan: Plan, chain: Chain, *, backward: bool) -> tuple[WorkerRuns, ...]:
    """Return what each worker runs.

    Args:
        plan: The plan.
        chain: The calls of blocks that it is for.
        backward: Whether BACKWARD stages have anything to do.

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
