"""Steps under way: the forward pass of the next batch begins while this backward pass drains.

```
Trainer's thread   begin ─▶ outputs ─▶ begin ───────▶ outputs ─▶ result of the first
worker 0           F0 F0  B2 B2      │ F0 F0  B2 B2
worker 1             F1 F1  B1 B1    │   F1 F1 ..
worker 2               X  X   B0 B0  │ ..X  X              │: a worker goes on with the next step
```

What a step has returned is known when its last microbatch begins its backward pass. Until its
gradients are asked for, the Trainer's thread may do other things, and begin the next step: every
worker takes that up when its own part of this one has ended. What this one reads must not change in
between; the next one may be given other values (`engine/serving.py`). So that nobody can see a
difference, a step is waited for to its end, as if it were alone, when

- it draws random numbers from the process-wide generators, which its recompute would seed for a
  moment while other code draws from them; dropout does not (`engine/own_draws.py`);
- it has called blocks that it had no plan for, whose weights are not uploaded ahead;
- it has written attributes or buffers of modules: its recompute must see what was there before the
  user's code wrote, and what its own blocks wrote last;
- no step of this engine has ended yet: draws that the engine cannot repeat are found in a step that
  is watched to its end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NoReturn

from roundpipe_lightning.engine.logistics import Logistics
from roundpipe_lightning.engine.running import RunningStep, grace_seconds
from roundpipe_lightning.engine.threads import Countdown, ThreadTeam
from roundpipe_lightning.engine.traffic import StepVisits
from roundpipe_lightning.engine.turns import StepAborted, Turns
from roundpipe_lightning.engine.worker import Worker
from roundpipe_lightning.errors import WatchdogError

_MOST_UNDER_WAY = 2


class StepsUnderWay:
    """The steps of one engine that have begun and not ended. All but `abort` by one thread.

    Args:
        workers: The workers.
        logistics: The copies.
        timeout_seconds: A step in which no action begins or ends for so long is given up.
        prepare_thread: Called in every thread of a microbatch.
    """

    def __init__(
        self,
        *,
        workers: Sequence[Worker],
        logistics: Logistics,
        timeout_seconds: float,
        prepare_thread: Callable[[], None],
    ) -> None:
        self._workers = workers
        self._logistics = logistics
        self._timeout_seconds = timeout_seconds
        self._prepare_thread = prepare_thread
        self._steps: list[RunningStep] = []
        self._teams: list[ThreadTeam] = []
        self._ended: dict[RunningStep, Callable[[bool], None]] = {}
        self._aborting = threading.Lock()  # held while a microbatch's thread aborts, and to forget

    # ------------------------------------------------------------------------------- the beginning

    def make_way(self, visits: Sequence[StepVisits], *, lanes: Sequence[int]) -> None:
        """End steps until another one can begin.

        Args:
            visits: What each worker is to run of it.
            lanes: Numbers of its lanes, by microbatch.
        """
        if len(self._steps) == _MOST_UNDER_WAY:
            self.finish(self._steps[0])
        if not self._steps:
            return
        logistics = self._logistics
        if not (logistics.can_follow(visits) and logistics.lanes_can_follow(lanes)):
            self.finish(self._steps[-1])

    @property
    def are_none(self) -> bool:
        """Whether no step is under way."""
        return not self._steps

    @property
    def turns(self) -> Turns | None:
        """The gates of the last one."""
        return self._steps[-1].context.turns if self._steps else None

    def start(
        self, step: RunningStep, visits: Sequence[StepVisits], *, ended: Callable[[bool], None]
    ) -> None:
        """Begin a step, for which there is way.

        Args:
            step: The step.
            visits: What each worker runs of it.
            ended: Told when it has ended, and whether well.

        Raises:
            Exception: What a step that is under way has failed with.
        """
        follows = bool(self._steps)
        if follows and self._has_failed:
            self._raise_failure()
        self._steps.append(step)
        self._ended[step] = ended
        with self._guarded():
            if follows:
                self._logistics.follow(visits)
            else:
                self._logistics.begin(
                    visits, on_failure=self._abort_turns, making_room=step.making_room
                )
            step.start(self._free_team(len(step.runs)), on_failure=lambda: self._failed(step))
        if self._has_failed:  # before this step was known: nobody has told it
            self.abort()

    def _free_team(self, num_threads: int) -> ThreadTeam:
        busy = [step.team for step in self._steps]
        free = [team for team in self._teams if team not in busy]
        for team in free:
            if len(team) >= num_threads:
                return team
            self._dismiss(team)
        team = ThreadTeam(num_threads, name="roundpipe-microbatch", prepare=self._prepare_thread)
        self._teams.append(team)
        return team

    def _dismiss(self, team: ThreadTeam, *, timeout_seconds: float | None = None) -> None:
        seconds = self._timeout_seconds if timeout_seconds is None else timeout_seconds
        self._teams.remove(team)
        team.close(timeout_seconds=seconds)

    # ------------------------------------------------------------------------------------- waiting

    def await_outputs(self, step: RunningStep, told: Countdown) -> None:
        """Wait until what a step's user code has returned is known, and earlier steps have ended.

        Raises:
            WatchdogError: If it makes no progress.
            Exception: What a microbatch or a copy of any step has raised.
        """
        if step not in self._steps:
            return
        with self._guarded():
            step.watch(lambda seconds: told.wait(seconds) or step.wait(0.0))
            if told.is_over and not self._has_failed:
                with suppress(StepAborted):  # a copy has failed
                    for run in step.runs:
                        run.await_output()
        if self._has_failed or not told.is_over:
            self._raise_failure()
        while self._steps[0] is not step:
            self._finish_first()

    def finish(self, step: RunningStep) -> None:
        """Wait for the end of a step, and of those before it.

        Raises:
            WatchdogError: If one makes no progress.
            Exception: What a microbatch or a copy of any step has raised.
        """
        while step in self._steps:
            self._finish_first()

    def finish_all(self) -> None:
        """Wait for the end of all steps; raises as `finish` does."""
        while self._steps:
            self._finish_first()

    def _finish_first(self) -> None:
        step = self._steps[0]
        is_alone = len(self._steps) == 1
        ledger = step.context.ledger
        with self._guarded():
            step.watch(step.wait)
            self._logistics.finish(
                timeout_seconds=self._timeout_seconds,
                landed=None
                if is_alone
                else lambda seconds: self._has_failed or ledger.await_all(seconds),
            )
        was_aborted = step.context.turns.is_aborted
        if self._has_failed:
            self._raise_failure()
        assert not was_aborted, "a failure is known before anything is aborted"
        self._steps.pop(0).close()
        if is_alone:
            self._clear(failed=False)
        else:
            self._logistics.end_first()
        self._ended.pop(step)(True)

    # ------------------------------------------------------------------------------------ failures

    @property
    def _has_failed(self) -> bool:
        return self._logistics.has_failed or any(step.failures for step in self._steps)

    def _failed(self, step: RunningStep) -> None:
        """A microbatch has failed; one of a step that was given up no longer matters to others."""
        with self._aborting:
            if step in self._steps:
                self.abort()

    def abort(self) -> None:
        """Release every waiter of every step, and give up copies that have not begun."""
        self._abort_turns()
        self._logistics.abort()

    def _abort_turns(self) -> None:
        for step in list(self._steps):
            step.context.turns.abort()

    def _give_up(self) -> None:
        """Release every waiter, and let running code come to its end."""
        self.abort()
        grace = grace_seconds(self._timeout_seconds)
        for step in self._steps:
            if not step.wait(grace) and step.team is not None:
                self._dismiss(step.team, timeout_seconds=0.0)  # it ends when user code does
        self._clear(failed=True)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Give all steps up if the Trainer's thread is interrupted: by Ctrl-C, or the watchdog."""
        try:
            yield
        except BaseException as error:
            steps = list(self._steps)
            self._give_up()
            self._forget()
            if isinstance(error, WatchdogError):  # rather the cause than the wait for the others
                _raise_first(steps)
            raise

    def _raise_failure(self) -> NoReturn:
        """Wait for everybody who was released, and raise what the first step has failed with."""
        steps = list(self._steps)
        with self._guarded():
            for step in steps:
                step.watch(step.wait)
            self._logistics.finish(timeout_seconds=self._timeout_seconds)
        failed = self._logistics.take_error()
        self._clear(failed=True)
        self._forget()
        _raise_first(steps)
        assert failed is not None, "something has failed"
        try:
            steps[0].raise_copy(*failed)
        finally:  # see `raise_noted`
            del failed

    def _forget(self) -> None:
        ended = [self._ended.pop(step) for step in self._steps]
        for step in self._steps:
            step.close()
        with self._aborting:
            self._steps.clear()
        for tell in ended:
            tell(False)

    def _clear(self, *, failed: bool) -> None:
        for worker in self._workers:
            worker.clear()
        self._logistics.end(failed=failed, grace_seconds=grace_seconds(self._timeout_seconds))

    def close(self) -> None:
        """Give up what is under way and join the threads."""
        if self._steps:
            self._give_up()
            self._forget()
        for team in list(self._teams):
            self._dismiss(team)


def _raise_first(steps: Sequence[RunningStep]) -> None:
    """Raise what the first step that has failed has failed with, if one has."""
    for step in steps:
        if step.failures:
            step.raise_first()
