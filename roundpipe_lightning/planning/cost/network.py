"""What several hosts exchange in an optimizer step, and when the network is what a step waits for.

Each host sends, and receives, (n-1)/n of the gradients of all trained parameters, and as much of
their new values. A block's gradients leave as soon as its backward pass has ended; its new values
come back while the next step's forward pass begins.

```
compute    F F F F B B B B B B B B B B B B │ F F F F
network            g7 g6 g5 w7 g4 w6 ..    │ .. w0 w1
```

Where blocks are stepped one by one, all of it may go on beside the step. Where clipping has the
optimizer wait for all gradients, these go on beside the backward pass, and the new values beside
the next forward pass. Accumulated gradients leave when the last backward pass has ended.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from roundpipe_lightning.planning.cost.predict import StepPrediction
from roundpipe_lightning.planning.model.hardware import HardwareSpec
from roundpipe_lightning.planning.model.profile import ModelProfile
from roundpipe_lightning.planning.model.storage import ParameterStorage
from roundpipe_lightning.planning.model.work import BlockWork, WorkProfile

_LINK_SHARE = 0.9
"""Share of a link's rate that is reached; the rest is headers and pauses between chunks."""


def split_samples(count: int, shares: Sequence[float]) -> list[int]:
    """Divide at least as many samples as there are hosts by shares, one or more for each.

    What rounding leaves goes to the largest remainders.
    """
    free = count - len(shares)
    exact = [free * share / sum(shares) for share in shares]
    sizes = [1 + int(part) for part in exact]
    left = count - sum(sizes)
    for host in sorted(range(len(shares)), key=lambda h: int(exact[h]) - exact[h])[:left]:
        sizes[host] += 1
    return sizes


def _new_bytes(part: BlockWork, num_trainable: int, more: float = 0.0) -> float:
    return num_trainable and num_trainable * (part.parameter_bytes / part.num_parameters + more)


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """What every host sends in a step, and receives.

    Attributes:
        steps_at_end: Whether no block is stepped before all gradients are there, for clipping or
            accumulation.
    """

    hardware: HardwareSpec
    gradient_bytes: float
    weight_bytes: float
    steps_at_end: bool

    @classmethod
    def of(
        cls,
        work: WorkProfile,
        *,
        storage: ParameterStorage,
        hardware: HardwareSpec,
        steps_at_end: bool,
    ) -> Exchange:
        """Describe a training's."""
        away = (hardware.num_nodes - 1) / hardware.num_nodes
        # Blocks and an LM head of its own get the copies that are uploaded; embeddings, and what is
        # tied to them, their masters, twice as wide.
        blocks = sum(_new_bytes(block, block.num_trainable) for block in work.blocks)
        head = _new_bytes(work.head, work.head.num_trainable, storage.master_bytes / 2)
        with_head = sum(part.num_trainable for part in (*work.blocks, work.head))
        tail = _new_bytes(work.tail, work.num_trainable - with_head)  # without what is tied
        return cls(
            hardware=hardware,
            gradient_bytes=away * work.num_trainable * storage.gradient_bytes,
            weight_bytes=away * (blocks + head + tail),
            steps_at_end=steps_at_end,
        )

    @property
    def num_bytes(self) -> float:
        return self.gradient_bytes + self.weight_bytes

    @property
    def seconds(self) -> float:
        """How long the network takes."""
        return self._seconds(self.num_bytes)

    def _seconds(self, num_bytes: float) -> float:
        return num_bytes / (self.hardware.network_bytes_per_second * _LINK_SHARE)

    def share_of_room(self, alone: StepPrediction, profile: ModelProfile) -> float:
        """Return the network's time as a share of what passes beside it; at most 1: it is hidden.

        Args:
            alone: A step of one host.
            profile: The model, for how much of a batch is its forward pass.
        """
        pairs = self._pairs(alone, profile)
        return max(needed / room if room else math.inf for needed, room in pairs)

    def with_network(self, alone: StepPrediction, profile: ModelProfile) -> StepPrediction:
        """Return the step with what of the exchange nothing hides."""
        waits = sum(max(0.0, needed - room) for needed, room in self._pairs(alone, profile))
        return replace(alone, step_seconds=alone.step_seconds + waits, network_seconds=waits)

    def _pairs(self, alone: StepPrediction, profile: ModelProfile) -> list[tuple[float, float]]:
        """Return seconds of the network, each with those of what goes on beside it."""
        if not self.steps_at_end:
            return [(self.seconds, alone.step_seconds)]
        batch = alone.pipeline_seconds / alone.layout.num_batches
        forward = sum(part.forward_seconds for part in profile.parts)
        both = profile.busy_seconds + profile.seconds_to_recompute(alone.layout.recompute)
        share = forward / both if both else 0.5
        backward = (1 - share) * batch if alone.layout.num_batches == 1 else 0.0
        return [
            (self._seconds(self.gradient_bytes), backward),
            (self._seconds(self.weight_bytes), share * batch),
        ]
