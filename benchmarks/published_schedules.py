"""Published pipeline schedules, to be replayed by the same simulator for comparison.

In all of them a stage's weights stay on one worker: with S stages and N workers, stage s lives on
worker s mod N (S = N: one stage each; S > N: "virtual" stages). They are written as actions of a
symmetric partition, which has as many BACKWARD as FORWARD stages and a fused stage without blocks.

- GPipe: all forwards, then all backwards (Huang et al., arXiv 1811.06965).
- 1F1B: after a warm-up, one forward and one backward in turn (PipeDream-Flush, Narayanan et al.,
  arXiv 2006.09503).
- Interleaved 1F1B: the same with virtual stages, N microbatches per virtual stage in turn
  (Megatron-LM, Narayanan et al., arXiv 2104.04473, section 2.2).
- Looped BFS: virtual stages, each for all microbatches before the next (breadth-first,
Lamy-Poirier,
  arXiv 2211.05953).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from roundpipe_lightning.errors import PlanError
from roundpipe_lightning.planning.schedule.schedule import Action, Schedule
from roundpipe_lightning.planning.schedule.stages import Partition, StageKind


def bound_partition(sizes: Sequence[int]) -> Partition:
    """Return the symmetric partition of stages with the given numbers of blocks."""
    return Partition(forward=tuple(sizes), backward=(0, *reversed(sizes)))


def gpipe_schedule(*, num_workers: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards; one stage per worker."""
    return looped_bfs_schedule(
        num_stages=num_workers, num_workers=num_workers, num_microbatches=num_microbatches
    )


def one_f_one_b_schedule(*, num_workers: int, num_microbatches: int) -> Schedule:
    """One forward, one backward; one stage per worker."""
    rows = []
    for worker in range(num_workers):
        forwards = [(worker, microbatch) for microbatch in range(num_microbatches)]
        rows.append(_one_forward_one_backward(forwards, forwards, num_workers - worker - 1))
    return _schedule(rows, num_stages=num_workers)


def interleaved_schedule(*, num_stages: int, num_workers: int, num_microbatches: int) -> Schedule:
    """One forward, one backward; several stages per worker.

    Raises:
        PlanError: If the workers do not divide the stages and the microbatches.
    """
    for name, value in (("num_stages", num_stages), ("num_microbatches", num_microbatches)):
        if value % num_workers:
            raise PlanError(
                f"{name}={value} must be a multiple of num_workers={num_workers} for interleaved "
                f"1F1B."
            )
    rows = []
    groups = [
        range(first, first + num_workers) for first in range(0, num_microbatches, num_workers)
    ]
    for worker in range(num_workers):
        stages = range(worker, num_stages, num_workers)
        forwards = [(s, m) for group in groups for s in stages for m in group]
        backwards = [(s, m) for group in groups for s in reversed(stages) for m in group]
        warm_up = 2 * (num_workers - worker - 1) + (len(stages) - 1) * num_workers
        rows.append(_one_forward_one_backward(forwards, backwards, warm_up))
    return _schedule(rows, num_stages=num_stages)


def looped_bfs_schedule(*, num_stages: int, num_workers: int, num_microbatches: int) -> Schedule:
    """Every stage for all microbatches before the worker's next stage."""
    rows = []
    for worker in range(num_workers):
        stages = range(worker, num_stages, num_workers)
        forwards = [(StageKind.FORWARD, s, m) for s in stages for m in range(num_microbatches)]
        backwards = [
            (StageKind.BACKWARD, s, m) for s in reversed(stages) for m in range(num_microbatches)
        ]
        rows.append(forwards + backwards)
    return _schedule(rows, num_stages=num_stages)


_Step = tuple[StageKind, int, int]
"""Kind, stage counted from the model's first, microbatch."""


def _one_forward_one_backward(
    forwards: Sequence[tuple[int, int]], backwards: Sequence[tuple[int, int]], warm_up: int
) -> list[_Step]:
    """Run `warm_up` forwards, then one forward and one backward in turn, then what is left."""
    warm_up = min(warm_up, len(forwards))
    row = [(StageKind.FORWARD, *step) for step in forwards[:warm_up]]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        row += [(StageKind.FORWARD, *forward), (StageKind.BACKWARD, *backward)]
    row += [(StageKind.BACKWARD, *step) for step in backwards[len(forwards) - warm_up :]]
    return row


def _schedule(rows: Iterable[Sequence[_Step]], *, num_stages: int) -> Schedule:
    """Write the steps as actions, an empty fused one before the last stage's backward."""
    workers = []
    for worker, row in enumerate(rows):
        actions = []
        for kind, stage, microbatch in row:
            index = stage
            if kind is StageKind.BACKWARD:
                index = num_stages - stage
                if index == 1:
                    actions.append(_action(StageKind.FUSED, 0, microbatch, worker))
            actions.append(_action(kind, index, microbatch, worker))
        workers.append(tuple(actions))
    return Schedule(workers=tuple(workers))


def _action(kind: StageKind, stage: int, microbatch: int, worker: int) -> Action:
    return Action(kind=kind, stage=stage, microbatch=microbatch, worker=worker)
