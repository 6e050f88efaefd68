"""When a block's parameters may be read: the optimizer may still be writing into them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from roundpipe_lightning.engine.events import DoneEvent, Event, HostEvent
from roundpipe_lightning.engine.store import HostStore


class UpdateEvents:
    """Turns the store's gate into events, for uploads that are submitted before the update ends.

    Every upload waits for its own block only: one worker's next stage holds up no other worker's
    present one.

    Args:
        store: The parameters.
        on_failure: Told of an update that failed.
    """

    def __init__(
        self, store: HostStore, *, on_failure: Callable[[BaseException, str], None]
    ) -> None:
        self._store = store
        self._on_failure = on_failure

    def updated(self, block: nn.Module) -> Event:
        """Return the event that a block has the values to compute with."""
        return self.updated_parameters(self._store.parameters_of(block))

    def updated_parameters(self, parameters: Sequence[nn.Parameter]) -> Event:
        """Return the event that parameters have the values to compute with."""
        gate = self._store.gate
        if gate is None:
            return DoneEvent("nothing is updated")
        event = HostEvent("update of parameters")

        def is_over(error: BaseException | None) -> None:
            if error is None:
                event.set()
                return
            self._on_failure(error, "waiting for the update of parameters")
            event.abort()

        gate.when_updated(parameters, is_over)
        return event
