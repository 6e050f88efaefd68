"""Routes: which worker runs what of a step.

```
calls       b0 + + b1 b2 + b3 norm head        + is an operation between blocks
stages      [F0         ] [F1           ]      forward, by the plan
units       [U0    ] [U1] [U2           ]      what one backward run recomputes
```

A route follows the plan as long as user code calls the blocks that the plan expects. From the first
other call on, calls are dealt out as they come: each is a stage and a unit of its own, and its
microbatches go to the workers in turn. Numbers are the same on any route.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from roundpipe_lightning.engine.driver.calls import Call, Output
from roundpipe_lightning.planning.schedule.plan import Plan
from roundpipe_lightning.planning.schedule.schedule import ActionKey
from roundpipe_lightning.planning.schedule.stages import Stage, StageKind


@dataclass(frozen=True, kw_only=True)
class PlannedStage:
    """A stage of the plan.

    Attributes:
        workers: The worker of every microbatch.
    """

    stage: Stage
    workers: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Route:
    """What a plan says of a step.

    Attributes:
        blocks: The blocks in the order in which user code is expected to call them.
        forward: Stages of the forward pass, the first blocks first.
        backward: Stages of the backward pass, the last blocks first.
        weight_slots: Stages whose weights a worker holds at once.
        resident: For each worker the blocks that stay on it; empty: none.
    """

    blocks: tuple[nn.Module, ...]
    forward: tuple[PlannedStage, ...]
    backward: tuple[PlannedStage, ...]
    num_microbatches: int
    num_workers: int
    weight_slots: int = 2
    resident: tuple[tuple[nn.Module, ...], ...] = ()

    @classmethod
    def dealt(cls, *, num_microbatches: int, num_workers: int) -> Route:
        """Return the route of a step without a plan."""
        return cls(
            blocks=(),
            forward=(),
            backward=(),
            num_microbatches=num_microbatches,
            num_workers=num_workers,
        )

    @classmethod
    def of_plan(cls, plan: Plan, blocks: Sequence[nn.Module]) -> Route:
        """Return the route of a plan for the calls of these blocks."""

        def planned(kinds: Sequence[StageKind]) -> tuple[PlannedStage, ...]:
            return tuple(
                PlannedStage(
                    stage=stage,
                    workers=tuple(
                        plan.schedule.worker_of(ActionKey(stage.kind, stage.index, microbatch))
                        for microbatch in range(plan.num_microbatches)
                    ),
                )
                for stage in plan.partition.stages()
                if stage.kind in kinds
            )

        return cls(
            blocks=tuple(blocks),
            forward=planned([StageKind.FORWARD, StageKind.FUSED]),
            backward=planned([StageKind.FUSED, StageKind.BACKWARD]),
            num_microbatches=plan.num_microbatches,
            num_workers=plan.num_workers,
            weight_slots=plan.weight_slots,
            resident=tuple(
                tuple(dict.fromkeys(blocks[position] for position in stays))
                for stays in plan.resident or ()
            ),
        )

    def forward_index(self, position: int) -> int:
        """Return which stage of the forward pass has the block at a position."""
        starts = [planned.stage.blocks.start for planned in self.forward]
        return max(bisect_right(starts, position) - 1, 0)

    def backward_index(self, position: int) -> int:
        """Return which stage of the backward pass has the block at a position."""
        return next(
            index
            for index, planned in enumerate(self.backward)
            if planned.stage.blocks.start <= position
        )

    def dealt_workers(self) -> tuple[int, ...]:
        return tuple(index % self.num_workers for index in range(self.num_microbatches))


@dataclass(eq=False)
class StageCalls:
    """Calls that a worker runs one after the other on each of its microbatches.

    Thread: the driver appends calls. Guarded by: `Step.changed`.

    Attributes:
        stage: The stage of the plan; None: the call was dealt.
        workers: The worker of every microbatch.
        is_closed: Whether no call will be added any more.
        num_left: Parts of its calls that have not run yet.
    """

    stage: Stage | None
    workers: tuple[int, ...]
    calls: list[Call] = field(default_factory=list)
    is_closed: bool = False
    num_left: int = 0


@dataclass(eq=False)
class Unit:
    """Neighbouring calls that go backward together: one graph for each microbatch.

    No call but the first takes a tensor of user code that wants a gradient: the driver may need
    that gradient before it reaches the calls in front.

    Attributes:
        number: Its place among the units of the step.
        stage: The stage of the backward pass; None: it was dealt.
        workers: The worker of every microbatch.
        boundaries: Outputs of other units that it takes.
        consumers: Units that take its outputs.
        is_closed: Whether no call will be added any more.
    """

    number: int
    stage: Stage | None
    workers: tuple[int, ...]
    num_parts: int
    calls: list[Call] = field(default_factory=list)
    boundaries: set[Output] = field(default_factory=set)
    consumers: set[Unit] = field(default_factory=set)
    is_closed: bool = False

    @property
    def keeps_graph(self) -> bool:
        """Whether the forward pass keeps its graph, so that nothing is recomputed."""
        return self.stage is not None and self.stage.keeps_graph
