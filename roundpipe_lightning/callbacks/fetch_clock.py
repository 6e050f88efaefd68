"""How long the Trainer waits for its data loader."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loops.fetchers import _DataFetcher


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
        self._listening_to: tuple[Any, Any] | None = None

    def epoch_started(self) -> None:
        """Begin to wait for the first batch of an epoch."""
        self._epoch_began = time.perf_counter()

    def batch_started(self, trainer: Trainer) -> None:
        """Note that a batch is there, and listen to the next fetches."""
        if self._epoch_began is not None:
            self._seconds += time.perf_counter() - self._epoch_began
            self._epoch_began = None
        fetcher = trainer.fit_loop._data_fetcher  # noqa: SLF001 - the only one who knows
        if isinstance(fetcher, _DataFetcher) and not self._listens(fetcher):
            fetcher._start_profiler = _both(self._begin, fetcher._start_profiler)  # noqa: SLF001
            fetcher._stop_profiler = _both(self._end, fetcher._stop_profiler)  # noqa: SLF001
            self._listening_to = (fetcher, fetcher._start_profiler)  # noqa: SLF001

    def take_seconds(self) -> float:
        """Return what has been added up since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _listens(self, fetcher: _DataFetcher) -> bool:
        if self._listening_to is None:
            return False
        known, listener = self._listening_to
        return known is fetcher and fetcher._start_profiler is listener  # noqa: SLF001

    def _begin(self) -> None:
        self._began = time.perf_counter()

    def _end(self) -> None:
        if self._began is not None:
            self._seconds += time.perf_counter() - self._began
            self._began = None


def _both(first: Callable[[], None], second: Callable[[], None]) -> Callable[[], None]:
    def call() -> None:
        first()
        second()

    return call
