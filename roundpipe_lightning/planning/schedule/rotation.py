"""Which worker a batch of a stream begins with: the one after the worker that ended the last one.

```
worker 0   F0 F0       B1 B1 x0 x0              three stages on two workers: the first batch
worker 1         X0 X0 f0 f0       b1 b1         (F, X, B) ends on worker 0, so the second one
                                                 (f, x, b) begins with worker 1
```

A plan has the schedule of the first batch; the others run it with the workers' numbers moved on.
What stays on a worker stays there.
"""

from __future__ import annotations

from dataclasses import replace

from roundpipe_lightning.planning.schedule.plan import Plan
from roundpipe_lightning.planning.schedule.round_robin import round_robin_schedule, split_rounds
from roundpipe_lightning.planning.schedule.schedule import Schedule


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
    if len(set(plan.resident)) > 1 and plan.num_batches == 1:
        return False
    return plan.schedule == round_robin_schedule(
        plan.partition,
        num_workers=plan.num_workers,
        num_microbatches=plan.num_microbatches,
        round_size=plan.round_size,
        team_size=plan.team_size,
    )


def rotated(plan: Plan, num_workers: int) -> Plan:
    """Return a plan with its schedule moved on.

    Args:
        plan: The plan.
        num_workers: By how many workers, 0 or more.
    """
    num, rows = plan.num_workers, plan.schedule.workers
    if not num_workers % num:
        return plan
    moved = []
    for worker in range(num):
        actions = rows[(worker - num_workers) % num]
        moved.append(tuple(replace(action, worker=worker) for action in actions))
    return replace(plan, schedule=Schedule(workers=tuple(moved)))
