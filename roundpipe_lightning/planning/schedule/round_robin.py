"""The round-robin schedule: stages go to the workers in turn (RoundPipe, arXiv 2604.27085).

The stages of a round run on worker 0, 1, 2, .., N-1, 0, 1, ..; each runs there for all the round's
microbatches in turn, so that its weights are uploaded once. The next round goes on where the last
one stopped, at the worker that is free first. Three stages, two workers, rounds of two
microbatches:

```
worker 0:  F0.0 F0.1  B1.0 B1.1            X0.2 X0.3
worker 1:       X0.0  X0.1       F0.2 F0.3            B1.2 B1.3
```

With teams of T, the workers 0..T-1 take the place of worker 0, T..2T-1 that of worker 1, and so on;
microbatch j of a round goes to the team's member j mod T.
"""

from __future__ import annotations

from roundpipe_lightning.errors import PlanError
from roundpipe_lightning.planning.schedule.schedule import Action, Schedule
from roundpipe_lightning.planning.schedule.stages import Partition


def round_robin_schedule(
    partition: Partition,
    *,
    num_workers: int,
    num_microbatches: int,
    round_size: int,
    team_size: int = 1,
) -> Schedule:
    """Lay the stages round the workers.

    Args:
        partition: The stages.
        num_workers: Number of workers.
        num_microbatches: Number of microbatches.
        round_size: Microbatches that travel together; the last round may have fewer.
        team_size: Workers that share a stage's microbatches; divides `num_workers`.

    Raises:
        PlanError: If the numbers do not fit together.
    """
    for name, value in (
        ("num_workers", num_workers),
        ("num_microbatches", num_microbatches),
        ("round_size", round_size),
        ("team_size", team_size),
    ):
        if value < 1:
            raise PlanError(f"{name}={value} must be 1 or more.")
    if num_workers % team_size:
        raise PlanError(f"team_size={team_size} does not divide num_workers={num_workers}.")
    num_teams = num_workers // team_size
    rows: list[list[Action]] = [[] for _ in range(num_workers)]
    turn = 0
    for first in range(0, num_microbatches, round_size):
        microbatches = range(first, min(first + round_size, num_microbatches))
        for stage in partition.stages():
            leader = turn % num_teams * team_size
            turn += 1
            for place, microbatch in enumerate(microbatches):
                worker = leader + place % team_size
                rows[worker].append(
                    Action(kind=stage.kind, stage=stage.index, microbatch=microbatch, worker=worker)
                )
    return Schedule(workers=tuple(map(tuple, rows)))


def split_rounds(num_microbatches: int, *, round_size: int) -> tuple[int, ...]:
    """Return the number of microbatches of every round; the last one may have fewer."""
    full, rest = divmod(num_microbatches, round_size)
    return (round_size,) * full + ((rest,) if rest else ())
