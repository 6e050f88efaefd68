"""The round-robin schedule: stages go to the workers in turn (RoundPipe, arXiv 2604.27085).

The stages of a round run on worker 0, 1, 2, .., N-1, 0, 1, ..; each runs there for all the round's
microbatches in turn, so that its weights are uploaded once. The next round goes on where the last
one stopped, at the worker that is free first. Three stages, two workers, rounds of two
microbatches:

```
worker 0:  F0.0 F0.1  B1.0 B1.1            X0.2 X0.3
worker 1:       X0.0  X0.1       F0.2 F0.3            B1.2 B1.3
```

Unequal workers: stages of one worker each are as large as its speed asks for; within a team each
member gets microbatches by its speed (`PipelineConfig.teams`, `members`).

With teams of T, the workers 0..T-1 take the place of worker 0, T..2T-1 that of worker 1, and so on;
microbatch j of a round goes to the team's member j mod T.

A batch of a stream begins with the worker after the one that ended the batch before
(docs/engine.md, batches in flight). A plan has the schedule of the first batch; the others run it
with the workers' numbers moved on. What stays on a worker stays there.
"""

from __future__ import annotations

from dataclasses import replace

from roundpipe_lightning.planning.schedule.plan import PipelineConfig, PipelineLayout, Plan
from roundpipe_lightning.planning.schedule.schedule import Action, Schedule
from roundpipe_lightning.planning.schedule.stages import Partition


def round_robin_schedule(
    partition: Partition,
    *,
    num_workers: int,
    num_microbatches: int,
    round_size: int,
    team_size: int = 1,
    speeds: tuple[float, ...] = (),
) -> Schedule:
    """Lay the stages round the workers.

    Args:
        round_size: Microbatches that travel together; the last round may have fewer.
        team_size: Workers that share a stage's microbatches; must divide `num_workers`.
        speeds: How fast every worker is; empty: they are equal.
    """
    config = PipelineConfig(
        num_microbatches=num_microbatches,
        round_size=round_size,
        team_size=team_size,
        speeds=speeds,
    )
    teams = config.teams(num_workers)
    rows: list[list[Action]] = [[] for _ in range(num_workers)]
    turn = 0
    for first in range(0, num_microbatches, round_size):
        microbatches = range(first, min(first + round_size, num_microbatches))
        members = config.members(len(microbatches), num_workers)
        for stage in partition.stages():
            team = teams[turn % len(teams)]
            turn += 1
            for member, microbatch in zip(members, microbatches, strict=True):
                worker = team[member]
                rows[worker].append(
                    Action(kind=stage.kind, stage=stage.index, microbatch=microbatch, worker=worker)
                )
    return Schedule(workers=tuple(map(tuple, rows)))


def schedule_of(
    layout: PipelineLayout, *, num_workers: int, num_microbatches: int | None = None
) -> Schedule:
    """Lay a layout's stages round the workers, for its microbatches or another number of them."""
    return round_robin_schedule(
        layout.partition,
        num_workers=num_workers,
        num_microbatches=num_microbatches or layout.num_microbatches,
        round_size=layout.round_size,
        team_size=layout.team_size,
        speeds=layout.speeds,
    )


def split_rounds(num_microbatches: int, *, round_size: int) -> tuple[int, ...]:
    full, rest = divmod(num_microbatches, round_size)
    return (round_size,) * full + ((rest,) if rest else ())


def turns_of_batch(plan: Plan) -> int:
    """Return by how many workers the next batch of a stream begins after this one, from 0 on.

    0 where a plan is not laid round the workers, and where blocks stay on some workers that others
    do not have and that were not chosen for a stream of batches.
    """
    if not _may_rotate(plan):
        return 0
    num_turns = plan.partition.num_stages * len(
        split_rounds(plan.num_microbatches, round_size=plan.round_size)
    )
    return num_turns * plan.team_size % plan.num_workers


def _may_rotate(plan: Plan) -> bool:
    if plan.speeds or (len(set(plan.resident)) > 1 and plan.num_batches == 1):
        return False
    return plan.schedule == schedule_of(plan, num_workers=plan.num_workers)


def rotated(plan: Plan, num_workers: int) -> Plan:
    num, rows = plan.num_workers, plan.schedule.workers
    if not num_workers % num:
        return plan
    moved = []
    for worker in range(num):
        actions = rows[(worker - num_workers) % num]
        moved.append(tuple(replace(action, worker=worker) for action in actions))
    return replace(plan, schedule=Schedule(workers=tuple(moved)))
