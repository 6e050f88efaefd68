"""What a step gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from roundpipe_lightning.engine.chain import Chain
from roundpipe_lightning.engine.traffic import WorkerTraffic
from roundpipe_lightning.planning.timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step gives.

    Attributes:
        outputs: What the user's step returned for every microbatch; its tensors detached, on the
            host.
        losses: Every microbatch's loss, before scaling; None where it returned none.
        gradients: Sum over the microbatches of the gradients of their scaled losses, on the host. A
            parameter that no loss depends on is missing.
        timeline: When every action ran.
        clock_seconds: Where the timeline begins on that of the steps before, with which the step
            overlaps; None: none was under way when it began, and others follow its timeline.
        chain: The calls of blocks that the first microbatch made.
        num_calls: How many calls of blocks all microbatches made.
        num_streamed: How many of them were not planned.
        traffic: What each worker has moved, and how long its compute has waited for it.
    """

    outputs: tuple[Any, ...]
    losses: tuple[Tensor | None, ...]
    gradients: dict[nn.Parameter, Tensor]
    timeline: Timeline
    chain: Chain
    num_calls: int
    num_streamed: int
    traffic: tuple[WorkerTraffic, ...] = ()
    clock_seconds: float | None = None
