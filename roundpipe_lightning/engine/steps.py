"""Steps in flight: the forward pass of the next batch begins while this backward pass runs.

```
Trainer's thread   begin ─▶ outputs ─▶ begin ───────▶ outputs ─▶ result of the first
worker 0           F0 F0  B2 B2      │ F0 F0  B2 B2
worker 1             F1 F1  B1 B1    │   F1 F1 ..
worker 2               X  X   B0 B0  │ ..X  X              │: a worker goes on with the next step
```

docs/engine.md (batches in flight) says how, and when a step is waited for to its end, as if it were
alone, so that nobody can see a difference.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass
from time import monotonic
from typing import Any, NoReturn

from torch import Tensor, nn

from roundpipe_lightning.engine.chain.chain import Chain
from roundpipe_lightning.engine.device.events import StepAborted
from roundpipe_lightning.engine.device.threads import (
    Countdown,
    Failure,
    ThreadTeam,
    noted,
    raise_noted,
)
from roundpipe_lightning.engine.microbatch import Microbatch, StepContext
from roundpipe_lightning.engine.transfer.worker_transfers import (
    Transfers,
    WorkerRuns,
    WorkerTraffic,
)
from roundpipe_lightning.engine.worker.out_of_memory import Shortage, memory_explained
from roundpipe_lightning.engine.worker.turns import Turns
from roundpipe_lightning.engine.worker.worker import Worker
from roundpipe_lightning.errors import WatchdogError
from roundpipe_lightning.planning.schedule.schedule import Timeline, TimelineEntry

_POLL_SECONDS = 0.2  # how often the Trainer's thread looks at progress; also its response to Ctrl-C
_MOST_IN_FLIGHT = 2


@dataclass(frozen=True, kw_only=True)
class StepOutputs:
    """Results of a step that are known before its gradients are.

    Attributes:
        outputs: What the user's step returned for every microbatch; its tensors detached, on the
            host.
        losses: Every microbatch's loss, before scaling; None where it returned none.
    """

    outputs: tuple[Any, ...]
    losses: tuple[Tensor | None, ...]


@dataclass(frozen=True, kw_only=True)
class StepResult(StepOutputs):
    """Result of a step.

    Attributes:
        gradients: Sum over the microbatches of the gradients of their scaled losses, on the host. A
            parameter that no loss depends on is missing.
        clock_seconds: Where the timeline begins on that of the steps before, with which the step
            overlaps; None: none was in flight when it began, and others continue its timeline.
        chain: The calls of blocks that the first microbatch made.
        num_calls: How many calls of blocks all microbatches made.
        num_streamed: How many of them were not planned.
        traffic: What each worker has moved, and how long its compute has waited for it.
        wrote: Whether user code or a block has written into attributes or buffers of modules.
        changed: An attribute that user code has changed for good; empty: none.
    """

    gradients: dict[nn.Parameter, Tensor]
    timeline: Timeline
    chain: Chain
    num_calls: int
    num_streamed: int
    traffic: tuple[WorkerTraffic, ...] = ()
    clock_seconds: float | None = None
    wrote: bool = False
    changed: str = ""


@dataclass(eq=False)
class Step:
    """A step in flight. Its methods are called by the Trainer's thread."""

    microbatches: Sequence[Microbatch]
    context: StepContext
    _: KW_ONLY
    steps: StepsInFlight
    waits_for_end: bool  # whether `outputs` waits for its end
    on_success: Callable[[Step, StepResult], None]

    def __post_init__(self) -> None:
        self.team: ThreadTeam | None = None  # its threads, from `start` on
        self.failures: list[Failure] = []  # what the microbatches have raised
        self.was_given_up = False  # whether it has ended because it or another step has failed
        self._overlaps = not self.steps.is_empty
        self.tasks: Countdown | None = None
        self._result: StepResult | None = None

    def returned(self) -> StepOutputs:
        """Wait until the user's step has returned for all microbatches, and earlier steps ended.

        The step goes on, and nothing may be done meanwhile that it could notice. Raises what the
        user's code or a copy has raised, with a note that says where.
        """
        self.steps.await_outputs(self)
        return StepOutputs(outputs=self._outputs, losses=self._losses)

    def outputs(self) -> StepOutputs:
        """Wait as `returned` does. Other steps may begin then, as long as no parameter changes.

        The step is waited for to its end where that could be noticed (docs/engine.md).
        """
        if not self.waits_for_end:
            self.steps.await_outputs(self)
        must_wait = any(m.user.writes.were_any or m.num_streamed for m in self.microbatches)
        if self.waits_for_end or must_wait or self.context.draws.num_draws:
            self.steps.finish(self)
        return StepOutputs(outputs=self._outputs, losses=self._losses)

    @property
    def _outputs(self) -> tuple[Any, ...]:
        return tuple(one.output for one in self.microbatches if one.runs_user_code)

    @property
    def _losses(self) -> tuple[Tensor | None, ...]:
        return tuple(one.loss for one in self.microbatches if one.runs_user_code)

    def result(self) -> StepResult:
        self.steps.finish(self)
        assert self._result is not None, "it has not been given up"
        return self._result

    @property
    def is_over(self) -> bool:
        return self._result is not None

    def start(self, team: ThreadTeam, *, on_failure: Callable[[], None]) -> None:
        """Start the microbatches; `on_failure` is called in the thread of one that has failed."""

        def failed(failure: Failure) -> None:
            if not isinstance(failure.error, StepAborted):
                self.failures.append(failure)
            on_failure()

        self.team = team
        self.tasks = team.start([one.execute for one in self.microbatches], on_failure=failed)

    def wait(self, seconds: float) -> bool:
        return self.tasks is None or self.tasks.wait(seconds)

    def watch(self, is_over: Callable[[float], bool]) -> None:
        """Wait, as long as the step makes progress; else it is a WatchdogError.

        `is_over` waits so many seconds at most, and returns whether to wait no longer.
        """
        turns, timeout_seconds = self.context.turns, self.steps.timeout_seconds
        num_events, since = -1, monotonic()
        while not is_over(_POLL_SECONDS):
            if turns.num_events != num_events:
                num_events, since = turns.num_events, monotonic()
            elif monotonic() - since > timeout_seconds:
                places = "\n".join(f"  {one.turns.place}" for one in self.microbatches)
                raise WatchdogError(
                    f"No action began or ended for {timeout_seconds:g} s (timeout_seconds). "
                    f"The schedule, running actions in > <:\n{turns.progress().to_text()}\n"
                    f"Every microbatch stands at, or waits for:\n{places}\n"
                    "Raise RoundPipeStrategy(timeout_seconds=...) if a stage may take so long."
                )

    @contextmanager
    def making_room(self, index: int) -> Iterator[None]:
        """Explain a lack of memory for the weights of a worker, by its index."""
        place = f"the memory for weights of {self.context.workers[index]}"
        with noted(place), memory_explained(lambda: self.shortage(place)):
            yield

    def shortage(self, place: str) -> Shortage:
        workers = self.context.workers
        worker = next((one for one in workers if str(one) in place), workers[0])
        plan = self.context.turns.graph.plan
        return Shortage(worker, workers=workers, place=place, plan=plan)

    def end(self, traffic: Callable[[Turns], tuple[WorkerTraffic, ...]] | None) -> None:
        """End it, when nothing of it runs any more; without `traffic` it was given up."""
        changed = [one.user.writes.tell() for one in self.microbatches]
        self.was_given_up = traffic is None
        if traffic is None:
            return
        context, workers = self.context, self.context.workers
        if self.steps.is_empty:
            for worker in workers:
                with noted(f"the end of a step on {worker}"):
                    worker.device.synchronize()
        for action, (_, end) in context.turns.marks.items():
            workers[action.worker].device.await_mark(end)
        moved = traffic(context.turns)
        timeline, clock_seconds = self._timeline(moved)
        first, blocks = self.microbatches[0], [b for stack in context.stacks for b in stack.blocks]
        self._result = StepResult(
            outputs=self._outputs,
            losses=self._losses,
            gradients=context.reducer.sums(),
            timeline=timeline,
            clock_seconds=clock_seconds,
            chain=Chain.recorded(first.links, blocks=blocks),
            num_calls=sum(len(one.links) for one in self.microbatches),
            num_streamed=sum(one.num_streamed for one in self.microbatches),
            traffic=moved,
            wrote=any(one.user.writes.were_any for one in self.microbatches),
            changed=next(filter(None, changed), ""),
        )
        self.on_success(self, self._result)

    def _timeline(self, traffic: Sequence[WorkerTraffic]) -> tuple[Timeline, float | None]:
        """Return the times of every action, and `StepResult.clock_seconds`.

        Of a step that overlaps another, the times are since its first action.
        """
        workers = self.context.workers
        spans = {
            action: tuple(map(workers[action.worker].device.seconds, marks))
            for action, marks in self.context.turns.marks.items()
        }
        begin = min((start for start, _ in spans.values()), default=0.0) if self._overlaps else 0.0
        entries = (
            TimelineEntry(
                action=action,
                start_seconds=start - begin,
                end_seconds=stop - begin,
                waiting_seconds=traffic[action.worker].waited_within(start, stop),
            )
            for action, (start, stop) in spans.items()
        )
        timeline = Timeline(num_workers=len(workers), entries=tuple(entries))
        return timeline, begin if self._overlaps else None


def grace_seconds(timeout_seconds: float) -> float:
    return min(timeout_seconds, 60.0)


@dataclass(kw_only=True, eq=False)
class StepsInFlight:
    """The steps of one engine that have begun and not ended. All but `abort` by one thread."""

    workers: Sequence[Worker]
    transfers: Transfers
    timeout_seconds: float  # a step in which no action begins or ends for so long is given up
    prepare_thread: Callable[[], None]  # called in every thread of a microbatch

    def __post_init__(self) -> None:
        self._steps: list[Step] = []
        self._teams: list[ThreadTeam] = []
        self._aborting = threading.Lock()  # held while a microbatch's thread aborts, and to forget

    @property
    def is_empty(self) -> bool:
        return not self._steps

    @property
    def last_turns(self) -> Turns | None:
        return self._steps[-1].context.turns if self._steps else None

    def wait_for_capacity(self, stage_runs: Sequence[WorkerRuns]) -> None:
        """End steps until another one, with these stage_runs, can begin."""
        if len(self._steps) == _MOST_IN_FLIGHT:
            self.finish(self._steps[0])
        if not self._steps:
            return
        if not self.transfers.can_overlap(stage_runs):
            self.finish(self._steps[-1])

    def begin(self, step: Step, stage_runs: Sequence[WorkerRuns]) -> None:
        """Begin a step, for which there is capacity; raises what one in flight failed with."""
        overlaps = not self.is_empty
        if overlaps and self._has_failed:
            self._raise_failure()
        self._steps.append(step)
        with self._guarded():
            if overlaps:
                self.transfers.begin_overlapped(stage_runs)
            else:
                for worker in self.workers:
                    with noted(f"the beginning of a step on {worker}"):
                        worker.device.start_clock()
                self.transfers.begin(
                    stage_runs, on_failure=self._abort_turns, making_room=step.making_room
                )
            team = self._free_team(len(step.microbatches))
            step.start(team, on_failure=lambda: self._abort_with(step))
        if self._has_failed:  # before this step was known: nobody has aborted it
            self.abort()

    def _free_team(self, num_threads: int) -> ThreadTeam:
        busy = [step.team for step in self._steps]
        for team in [team for team in self._teams if team not in busy]:
            if len(team) >= num_threads:
                return team
            self._dismiss(team)
        team = ThreadTeam(num_threads, name="roundpipe-microbatch", prepare=self.prepare_thread)
        self._teams.append(team)
        for worker in self.workers:
            worker.device.expect_threads(sum(len(team) for team in self._teams))
        return team

    def _dismiss(self, team: ThreadTeam, *, timeout_seconds: float | None = None) -> None:
        seconds = self.timeout_seconds if timeout_seconds is None else timeout_seconds
        self._teams.remove(team)
        team.close(timeout_seconds=seconds)

    def await_outputs(self, step: Step) -> None:
        """Wait for what a step's user code returns, and for the end of earlier steps."""
        if step not in self._steps:
            return
        returned = step.context.returned
        with self._guarded():
            step.watch(lambda seconds: returned.wait(seconds) or step.wait(0.0))
            if returned.is_over and not self._has_failed:
                with suppress(StepAborted):  # a copy has failed
                    for microbatch in step.microbatches:
                        microbatch.await_output()
        if self._has_failed or not returned.is_over:
            self._raise_failure()
        while self._steps[0] is not step:
            self._finish_first()

    def finish(self, step: Step) -> None:
        """Wait for the end of a step, and of those before it.

        Raises what a microbatch or a copy of any step has raised.
        """
        while step in self._steps:
            self._finish_first()

    def finish_all(self) -> None:
        while self._steps:
            self._finish_first()

    def _finish_first(self) -> None:
        step = self._steps[0]
        is_alone = len(self._steps) == 1
        reducer = step.context.reducer
        with self._guarded():
            step.watch(step.wait)
            self.transfers.finish(
                timeout_seconds=self.timeout_seconds,
                is_alone=is_alone,
                landed=lambda seconds: self._has_failed or reducer.await_all(seconds),
            )
        was_aborted = step.context.turns.is_aborted
        if self._has_failed:
            self._raise_failure()
        assert not was_aborted, "a failure is known before anything is aborted"
        self._steps.pop(0).tasks = None
        if is_alone:
            self._clear(failed=False)
        else:
            self.transfers.end_first()
        step.end(self.transfers.traffic)

    @property
    def _has_failed(self) -> bool:
        return self.transfers.has_failed or any(step.failures for step in self._steps)

    def _abort_with(self, step: Step) -> None:
        """Abort all, unless the step that has failed was given up before: nobody waits for it."""
        with self._aborting:
            if step in self._steps:
                self.abort()

    def abort(self) -> None:
        """Release every waiter of every step, and give up copies that have not begun."""
        self._abort_turns()
        self.transfers.abort()

    def _abort_turns(self) -> None:
        for step in list(self._steps):
            step.context.turns.abort()

    def _give_up(self) -> None:
        """Release every waiter, let running code come to its end, and forget the steps."""
        self.abort()
        grace = grace_seconds(self.timeout_seconds)
        for step in self._steps:
            if not step.wait(grace) and step.team is not None:
                self._dismiss(step.team, timeout_seconds=0.0)  # it ends when user code does
        self._clear(failed=True)
        self._forget()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Give all steps up if the Trainer's thread is interrupted: by Ctrl-C, or the watchdog."""
        try:
            yield
        except BaseException as error:
            steps = list(self._steps)
            self._give_up()
            if isinstance(error, WatchdogError):  # rather the cause than the wait for the others
                _raise_first(steps)
            raise

    def _raise_failure(self) -> NoReturn:
        """Wait for everybody who was released, and raise what the first step has failed with."""
        steps = list(self._steps)
        with self._guarded():
            for step in steps:
                step.watch(step.wait)
            self.transfers.finish(timeout_seconds=self.timeout_seconds)
        failed = self.transfers.take_error()
        self._clear(failed=True)
        self._forget()
        _raise_first(steps)
        assert failed is not None, "something has failed"
        try:
            with memory_explained(lambda place=failed[1]: steps[0].shortage(place)):  # type: ignore[misc]
                raise_noted(*failed)
        finally:  # see `raise_noted`
            del failed

    def _forget(self) -> None:
        steps = list(self._steps)
        for step in steps:
            step.tasks = None
        with self._aborting:
            self._steps.clear()
        for step in steps:
            step.end(None)

    def _clear(self, *, failed: bool) -> None:
        for worker in self.workers:
            worker.clear()
        self.transfers.end(failed=failed, grace_seconds=grace_seconds(self.timeout_seconds))

    def close(self) -> None:
        if self._steps:
            self._give_up()
        for team in list(self._teams):
            self._dismiss(team)


def _raise_first(steps: Sequence[Step]) -> None:
    for step in steps:
        if step.failures:
            # What the driver of a batch fails with comes first: it drops what its pieces replay.
            failure = min(step.failures, key=lambda failure: failure.index)
            step.failures.clear()
            try:
                raise_noted(failure.error, step.microbatches[failure.index].turns.place)
            finally:  # see `raise_noted`
                del failure
