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
between; the next one may be given other values (`store/weight_versions.py`). So that nobody can
see a difference, a step is waited for to its end, as if it were alone, when

- it draws random numbers from the process-wide generators, which its recompute would seed for a
  moment while other code draws from them; dropout does not (`capture/randomness.py`);
- it has called blocks that it had no plan for, whose weights are not uploaded ahead;
- it has written attributes or buffers of modules: its recompute must see what was there before the
  user's code wrote, and what its own blocks wrote last;
- no step of this engine has ended yet: draws that the engine cannot repeat are found in a step that
  is watched to its end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from torch import Tensor, nn

from roundpipe_lightning.engine.chain.chain import Chain
from roundpipe_lightning.engine.device.base import Device
from roundpipe_lightning.engine.device.events import StepAborted
from roundpipe_lightning.engine.device.notes import noted, raise_noted
from roundpipe_lightning.engine.device.threads import Countdown, Failure, Run, ThreadTeam
from roundpipe_lightning.engine.microbatch import Microbatch, StepContext
from roundpipe_lightning.engine.transfer.transfers import Transfers
from roundpipe_lightning.engine.transfer.worker_transfers import WorkerRuns, WorkerTraffic
from roundpipe_lightning.engine.worker.out_of_memory import Shortage, memory_explained, shortage_on
from roundpipe_lightning.engine.worker.turns import Turns
from roundpipe_lightning.engine.worker.worker import Worker
from roundpipe_lightning.errors import WatchdogError
from roundpipe_lightning.planning.schedule.timeline import Timeline, TimelineEntry

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


_MOST_UNDER_WAY = 2


class StepsUnderWay:
    """The steps of one engine that have begun and not ended. All but `abort` by one thread.

    Args:
        workers: The workers.
        transfers: The copies.
        timeout_seconds: A step in which no action begins or ends for so long is given up.
        prepare_thread: Called in every thread of a microbatch.
    """

    def __init__(
        self,
        *,
        workers: Sequence[Worker],
        transfers: Transfers,
        timeout_seconds: float,
        prepare_thread: Callable[[], None],
    ) -> None:
        self._workers = workers
        self._transfers = transfers
        self._timeout_seconds = timeout_seconds
        self._prepare_thread = prepare_thread
        self._steps: list[RunningStep] = []
        self._teams: list[ThreadTeam] = []
        self._ended: dict[RunningStep, Callable[[bool], None]] = {}
        self._aborting = threading.Lock()  # held while a microbatch's thread aborts, and to forget

    # ------------------------------------------------------------------------------- the beginning

    def wait_for_capacity(self, visits: Sequence[WorkerRuns], *, pools: Sequence[int]) -> None:
        """End steps until another one can begin.

        Args:
            visits: What each worker is to run of it.
            pools: Numbers of its pools, by microbatch.
        """
        if len(self._steps) == _MOST_UNDER_WAY:
            self.finish(self._steps[0])
        if not self._steps:
            return
        transfers = self._transfers
        if not (transfers.can_follow(visits) and transfers.pools_can_follow(pools)):
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
        self, step: RunningStep, visits: Sequence[WorkerRuns], *, ended: Callable[[bool], None]
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
                self._transfers.begin_overlapped(visits)
            else:
                self._transfers.begin(
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
        reducer = step.context.reducer
        with self._guarded():
            step.watch(step.wait)
            self._transfers.finish(
                timeout_seconds=self._timeout_seconds,
                landed=None
                if is_alone
                else lambda seconds: self._has_failed or reducer.await_all(seconds),
            )
        was_aborted = step.context.turns.is_aborted
        if self._has_failed:
            self._raise_failure()
        assert not was_aborted, "a failure is known before anything is aborted"
        self._steps.pop(0).close()
        if is_alone:
            self._clear(failed=False)
        else:
            self._transfers.end_first()
        self._ended.pop(step)(True)

    # ------------------------------------------------------------------------------------ failures

    @property
    def _has_failed(self) -> bool:
        return self._transfers.has_failed or any(step.failures for step in self._steps)

    def _failed(self, step: RunningStep) -> None:
        """A microbatch has failed; one of a step that was given up no longer matters to others."""
        with self._aborting:
            if step in self._steps:
                self.abort()

    def abort(self) -> None:
        """Release every waiter of every step, and give up copies that have not begun."""
        self._abort_turns()
        self._transfers.abort()

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
            self._transfers.finish(timeout_seconds=self._timeout_seconds)
        failed = self._transfers.take_error()
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
        self._transfers.end(failed=failed, grace_seconds=grace_seconds(self._timeout_seconds))

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


@dataclass(frozen=True, kw_only=True)
class StepOutputs:
    """What is known of a step before its gradients are.

    Attributes:
        outputs: What the user's step returned for every microbatch; its tensors detached, on the
            host.
        losses: Every microbatch's loss, before scaling; None where it returned none.
    """

    outputs: tuple[Any, ...]
    losses: tuple[Tensor | None, ...]


class Ended(Protocol):
    """Hears of a step that has ended well."""

    def __call__(self, result: StepResult, *, backward: bool) -> None:
        """Hear of its result, and whether gradients were wanted."""


class PendingStep:
    """A step that has begun. One thread calls its methods: the Trainer's.

    Args:
        running: The step.
        steps: Those that are under way.
        told: Whose user code has returned.
        devices: One per worker.
        blocks: All blocks.
        transfers: The copies.
        is_watched: Whether it is waited for to its end.
        ended: Told when it has ended well.
    """

    def __init__(
        self,
        running: RunningStep,
        *,
        steps: StepsUnderWay,
        told: Countdown,
        devices: Sequence[Device],
        blocks: Sequence[nn.Module],
        transfers: Transfers,
        is_watched: bool,
        ended: Ended,
    ) -> None:
        self._running = running
        self._context, self._runs = running.context, running.runs
        self._steps = steps
        self._told = told
        self._devices = devices
        self._blocks = blocks
        self._transfers = transfers
        self._is_watched = is_watched
        self._ended = ended
        self._follows = not steps.are_none
        self._result: StepResult | None = None
        self._was_given_up = False
        generators = {g for device in devices for g in device.generators()}
        self._states = [(generator, generator.get_state()) for generator in generators]

    def begin(self, visits: Sequence[WorkerRuns]) -> None:
        """Begin it.

        Args:
            visits: What each worker runs.
        """
        if not self._follows:
            for worker in self._context.workers:
                with noted(f"the beginning of a step on {worker}"):
                    worker.device.start_clock()
        self._steps.start(self._running, visits, ended=self._end)

    def outputs(self) -> StepOutputs:
        """Wait until the user's step has returned for all microbatches, and earlier steps ended.

        The step goes on: other steps may begin, as long as no parameter changes. It is waited for
        to its end where that could be noticed (`engine/steps.py`).

        Raises:
            WatchdogError: If it makes no progress.
            Exception: What the user's code or a copy has raised, with a note that says where.
        """
        self._transfers.reserve_second_set()
        if self._is_watched:
            self._steps.finish(self._running)
        else:
            self._steps.await_outputs(self._running, self._told)
            draws = self._context.draws
            if draws.num_draws or any(run.has_written or run.num_streamed for run in self._runs):
                self._steps.finish(self._running)
            draws.stop_watching()
            self._put_generators_back()
        return StepOutputs(
            outputs=tuple(run.output for run in self._runs),
            losses=tuple(run.loss for run in self._runs),
        )

    @property
    def is_over(self) -> bool:
        """Whether it has ended well."""
        return self._result is not None

    @property
    def was_given_up(self) -> bool:
        """Whether it has ended otherwise, because it or another step has failed."""
        return self._was_given_up

    def result(self) -> StepResult:
        """Wait for its end; raises as `outputs` does."""
        self._steps.finish(self._running)
        assert self._result is not None, "it has not been given up"
        return self._result

    def _put_generators_back(self) -> None:
        """Put the devices' generators back, as if the step had not drawn."""
        for generator, state in self._states:
            generator.set_state(state)
        self._states.clear()

    def _end(self, succeeded: bool) -> None:  # noqa: FBT001 - a callback
        for run in self._runs:
            run.tell_writes()
        self._put_generators_back()
        self._was_given_up = not succeeded
        if not succeeded:
            return
        if self._steps.are_none:
            for worker in self._context.workers:
                with noted(f"the end of a step on {worker}"):
                    worker.device.synchronize()
        for action, (_, end) in self._context.marks.items():
            self._devices[action.worker].await_mark(end)
        traffic = self._transfers.traffic(self._context.turns)
        timeline, clock_seconds = self._timeline(traffic)
        self._result = StepResult(
            outputs=tuple(run.output for run in self._runs),
            losses=tuple(run.loss for run in self._runs),
            gradients=self._context.reducer.sums(),
            timeline=timeline,
            clock_seconds=clock_seconds,
            chain=Chain.recorded(self._runs[0].links, blocks=self._blocks),
            num_calls=sum(len(run.links) for run in self._runs),
            num_streamed=sum(run.num_streamed for run in self._runs),
            traffic=traffic,
        )
        self._ended(self._result, backward=self._context.backward)

    def _timeline(self, traffic: Sequence[WorkerTraffic]) -> tuple[Timeline, float | None]:
        """Return when every action ran, and `StepResult.clock_seconds`.

        Of a step that follows another, the times are since its first action.
        """
        spans = {
            action: tuple(map(self._devices[action.worker].seconds, marks))
            for action, marks in self._context.marks.items()
        }
        begin = min((start for start, _ in spans.values()), default=0.0) if self._follows else 0.0
        entries = (
            TimelineEntry(
                action=action,
                start_seconds=start - begin,
                end_seconds=stop - begin,
                waiting_seconds=traffic[action.worker].waited_within(start, stop),
            )
            for action, (start, stop) in spans.items()
        )
        timeline = Timeline(num_workers=len(self._devices), entries=tuple(entries))
        return timeline, begin if self._follows else None


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
