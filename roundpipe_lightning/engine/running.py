"""A step that runs: the Trainer's thread waits for it, watches it, and raises what went wrong."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from roundpipe_lightning.engine.microbatch import Microbatch, StepContext
from roundpipe_lightning.engine.notes import noted, raise_noted
from roundpipe_lightning.engine.out_of_memory import Shortage, memory_explained, shortage_on
from roundpipe_lightning.engine.threads import Failure, Run, ThreadTeam
from roundpipe_lightning.engine.turns import StepAborted
from roundpipe_lightning.errors import WatchdogError

_POLL_SECONDS = 0.2  # how often the Trainer's thread looks at progress; also its response to Ctrl-C


class RunningStep:
    """The microbatches of one step.

    Args:
        runs: The microbatches.
        context: What they share.
        timeout_seconds: A step in which no action begins or ends for so long is given up.

    Attributes:
        runs: As given.
        context: As given.
        team: Its threads, from `start` on.
        failures: What the microbatches have raised, the first one first.
    """

    def __init__(
        self, runs: Sequence[Microbatch], context: StepContext, *, timeout_seconds: float
    ) -> None:
        self.runs = runs
        self.context = context
        self.team: ThreadTeam | None = None
        self.failures: list[Failure] = []
        self._timeout_seconds = timeout_seconds
        self._run: Run | None = None

    def start(self, team: ThreadTeam, *, on_failure: Callable[[], None]) -> None:
        """Start the microbatches.

        Args:
            team: A thread for each, at least.
            on_failure: Called, in its thread, when one has failed.
        """

        def failed(failure: Failure) -> None:
            if not isinstance(failure.error, StepAborted):
                self.failures.append(failure)
            on_failure()

        self.team = team
        self._run = team.start([r.run for r in self.runs], on_failure=failed)

    def wait(self, seconds: float) -> bool:
        """Wait until all microbatches have ended, but not longer than this."""
        return self._run is None or self._run.wait(seconds)

    def close(self) -> None:
        """Break the circle of references, so that memory is free at once."""
        self._run = None

    def watch(self, is_over: Callable[[float], bool]) -> None:
        """Wait, as long as the step makes progress.

        Args:
            is_over: Waits so many seconds at most, and says whether to wait no longer.

        Raises:
            WatchdogError: If it makes none.
        """
        context = self.context
        num_events, since = -1, time.monotonic()
        while not is_over(_POLL_SECONDS):
            if context.turns.num_events != num_events:
                num_events, since = context.turns.num_events, time.monotonic()
            elif time.monotonic() - since > self._timeout_seconds:
                standing = "\n".join(f"  {r.place}" for r in self.runs)
                raise WatchdogError(
                    f"No action began or ended for {self._timeout_seconds:g} s (timeout_seconds). "
                    f"The schedule, running actions in > <:\n{context.turns.report(context.plan)}\n"
                    f"Every microbatch stands at, or waits for:\n{standing}\n"
                    "Raise RoundPipeStrategy(timeout_seconds=...) if a stage may take so long."
                )

    def raise_first(self) -> NoReturn:
        """Raise the first failure again."""
        failure = self.failures[0]
        self.failures.clear()
        try:
            raise_noted(failure.error, self.runs[failure.index].place)
        finally:  # see `raise_noted`
            del failure

    @contextmanager
    def making_room(self, index: int) -> Iterator[None]:
        """Explain a lack of memory for the weights of a worker, by its index."""
        place = f"the memory for weights of {self.context.workers[index]}"
        with noted(place), memory_explained(lambda: self._shortage(place)):
            yield

    def raise_copy(self, error: BaseException, place: str) -> NoReturn:
        """Raise what has made a copy fail."""
        with memory_explained(lambda: self._shortage(place)):
            raise_noted(error, place)
        raise AssertionError("unreachable")

    def _shortage(self, place: str) -> Shortage:
        """Describe a shortage outside the actions."""
        workers = self.context.workers
        worker = next((one for one in workers if str(one) in place), workers[0])
        return shortage_on(
            worker, among=workers, place=place, stage=None, plan=self.context.plan, boundaries=0
        )


def grace_seconds(timeout_seconds: float) -> float:
    """Return how long a step that was given up may take to come to its end."""
    return min(timeout_seconds, 60.0)
