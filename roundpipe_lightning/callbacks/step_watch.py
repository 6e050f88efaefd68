"""Hears of training steps when they have ended, and makes nobody wait for that."""

from __future__ import annotations

from typing import Any

from roundpipe_lightning.strategy.plan_listeners import StepWatcher
from roundpipe_lightning.strategy.strategy import RoundPipeStrategy


class StepWatch:
    """Tells a callback of the training steps of a fit, in their order.

    With batches in flight a step is told of after the next one has begun.

    Args:
        hear: Told of each, in the Trainer's thread.
    """

    def __init__(self, hear: StepWatcher) -> None:
        self._hear = hear
        self._watchers: list[StepWatcher] = []

    def begin(self, strategy: Any, *, stage: str) -> None:
        """Hear of the steps of a fit with roundpipe's strategy; of other ones, of nothing.

        An earlier fit may have failed before its teardown: it is left, too.
        """
        self.end()
        if stage == "fit" and isinstance(strategy, RoundPipeStrategy):
            self._watchers = strategy.step_watchers
            self._watchers.append(self._hear)

    def end(self) -> None:
        """Hear no longer."""
        if self._hear in self._watchers:
            self._watchers.remove(self._hear)
        self._watchers = []
