"""Which action waits for which: the one place that says it.

The validator, the simulator, the renderer and the engine all ask `dependencies()`, so that what is
simulated is what runs. For one microbatch m:

```
F0 ──> F1 ──> .. ──> F(a-1) ──> X0 ══> B1 ══> B2 ══> ..      ══ gradient, ── start
 │      └────────────────────────────> B1's recompute          (the boundary it starts from)
 └────────────────────────────────────────────> B2's recompute
```
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from roundpipe_lightning.planning.schedule.schedule import ActionKey
from roundpipe_lightning.planning.schedule.stages import Partition, StageKind


class NeededFor(Enum):
    """Which part of an action waits for a dependency."""

    START = "start"
    """Nothing of the action may begin before."""

    GRADIENT = "gradient"
    """The recompute may begin before; the backward, which needs the incoming gradient, may not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dependency:
    """An action that must have ended before another, or a part of it, may begin.

    Attributes:
        key: The action that must have ended.
        needed_for: The part of the waiting action that waits.
    """

    key: ActionKey
    needed_for: NeededFor


def dependencies(key: ActionKey, partition: Partition) -> tuple[Dependency, ...]:
    """Return what the action `key` waits for, all of the same microbatch.

    Args:
        key: The waiting action.
        partition: The stages.

    Raises:
        PlanError: If the partition has no such stage.
    """
    return tuple(
        Dependency(key=ActionKey(kind, stage, key.microbatch), needed_for=needed_for)
        for kind, stage, needed_for in stage_dependencies(key.kind, key.stage, partition)
    )


def stage_dependencies(
    kind: StageKind, index: int, partition: Partition
) -> tuple[tuple[StageKind, int, NeededFor], ...]:
    """Return what a stage waits for: the rule behind `dependencies()`, without a microbatch."""
    stage = partition.stage(kind, index)
    start, gradient = NeededFor.START, NeededFor.GRADIENT
    if kind is StageKind.FORWARD:
        return ((kind, index - 1, start),) if index > 0 else ()
    if kind is StageKind.FUSED:
        last = partition.num_forward - 1
        return ((StageKind.FORWARD, last, start),) if last >= 0 else ()
    source = partition.producer(stage.blocks.start)
    giver = (StageKind.FUSED, 0) if index == 1 else (StageKind.BACKWARD, index - 1)
    return ((source.kind, source.index, start), (*giver, gradient))
