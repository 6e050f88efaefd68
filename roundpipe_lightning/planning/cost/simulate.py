"""Predicts when every action of a schedule runs.

Workers run their actions in order. An action begins when its worker is free and what it needs
(`dependencies()`) has arrived, which takes a hop where it comes from another worker.
"""

from __future__ import annotations

from roundpipe_lightning.planning.cost.costs import RecomputeStart, StageCosts
from roundpipe_lightning.planning.schedule.dependencies import NeededFor, stage_dependencies
from roundpipe_lightning.planning.schedule.schedule import Action, ActionKey, Schedule
from roundpipe_lightning.planning.schedule.stages import Partition
from roundpipe_lightning.planning.schedule.timeline import Timeline, TimelineEntry
from roundpipe_lightning.planning.schedule.validate import walk


def simulate(schedule: Schedule, *, partition: Partition, costs: StageCosts) -> Timeline:
    """Run the schedule on paper.

    Args:
        schedule: Every worker's actions in order.
        partition: The stages.
        costs: What they cost, and what a hop costs.

    Returns:
        The timeline, in an order in which the actions can run.

    Raises:
        PlanError: If the schedule deadlocks.
    """
    rules = {
        (stage.kind, stage.index): stage_dependencies(stage.kind, stage.index, partition)
        for stage in partition.stages()
    }
    early = costs.recompute_start is RecomputeStart.EARLY
    ended: dict[ActionKey, tuple[float, int]] = {}
    free = [0.0] * schedule.num_workers
    entries = []
    for action in walk(schedule, partition):
        start, gradient = free[action.worker], 0.0
        for kind, index, needed_for in rules[action.kind, action.stage]:
            end, worker = ended[ActionKey(kind, index, action.microbatch)]
            arrival = end if worker == action.worker else end + costs.hop_seconds
            if early and needed_for is NeededFor.GRADIENT:
                gradient = max(gradient, arrival)
            else:
                start = max(start, arrival)
        entry = _entry(action, start=start, gradient=gradient, costs=costs)
        free[action.worker] = entry.end_seconds
        ended[action.key] = (entry.end_seconds, action.worker)
        entries.append(entry)
    return Timeline(num_workers=schedule.num_workers, entries=tuple(entries))


def _entry(action: Action, *, start: float, gradient: float, costs: StageCosts) -> TimelineEntry:
    cost = costs.of(action.kind, action.stage)
    recomputed = start + cost.recompute_seconds
    waiting = max(0.0, gradient - recomputed)
    return TimelineEntry(
        action=action,
        start_seconds=start,
        end_seconds=recomputed + waiting + cost.compute_seconds,
        waiting_seconds=waiting,
    )
