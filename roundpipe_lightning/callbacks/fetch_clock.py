"""How long the Trainer waits for its data loader."""

from __future__ import annotations

import time

from lightning.pytorch import Trainer

from roundpipe_lightning.strategy import compat


class FetchClock:
    """Adds up the time in which the Trainer's thread fetches training batches.

    Lightning tells its profiler of every fetch, through two functions that it gives the fetcher
    anew in each epoch; the clock listens there. The first fetch of an epoch happens before it can:
    that one counts from the epoch's start to the batch's, with the making of the iterator.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._began: float | None = None
        self._epoch_began: float | None = None
        self._listens: object = None

    def epoch_started(self) -> None:
        """Begin to wait for the first batch of an epoch."""
        self._epoch_began = time.perf_counter()

    def batch_started(self, trainer: Trainer) -> None:
        """Note that a batch is there, and listen to the next fetches."""
        if self._epoch_began is not None:
            self._seconds += time.perf_counter() - self._epoch_began
            self._epoch_began = None
        self._listens = compat.listen_to_fetches(
            trainer, self._begin, self._end, known=self._listens
        )

    def take_seconds(self) -> float:
        """Return what has been added up since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _begin(self) -> None:
        self._began = time.perf_counter()

    def _end(self) -> None:
        if self._began is not None:
            self._seconds += time.perf_counter() - self._began
            self._began = None
