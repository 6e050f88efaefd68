"""A step that has begun: what its user code has returned, and then its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from roundpipe_lightning.engine.chain import Chain
from roundpipe_lightning.engine.device import Device
from roundpipe_lightning.engine.logistics import Logistics
from roundpipe_lightning.engine.notes import noted
from roundpipe_lightning.engine.result import StepResult
from roundpipe_lightning.engine.running import RunningStep
from roundpipe_lightning.engine.threads import Countdown
from roundpipe_lightning.engine.traffic import StepVisits, WorkerTraffic
from roundpipe_lightning.engine.under_way import StepsUnderWay
from roundpipe_lightning.planning.timeline import Timeline, TimelineEntry


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
        logistics: The copies.
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
        logistics: Logistics,
        is_watched: bool,
        ended: Ended,
    ) -> None:
        self._running = running
        self._context, self._runs = running.context, running.runs
        self._steps = steps
        self._told = told
        self._devices = devices
        self._blocks = blocks
        self._logistics = logistics
        self._is_watched = is_watched
        self._ended = ended
        self._follows = not steps.are_none
        self._result: StepResult | None = None
        self._was_given_up = False
        generators = {g for device in devices for g in device.generators()}
        self._states = [(generator, generator.get_state()) for generator in generators]

    def begin(self, visits: Sequence[StepVisits]) -> None:
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
        to its end where that could be noticed (`engine/under_way.py`).

        Raises:
            WatchdogError: If it makes no progress.
            Exception: What the user's code or a copy has raised, with a note that says where.
        """
        self._logistics.want_to_follow()
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
        traffic = self._logistics.traffic(self._context.turns)
        timeline, clock_seconds = self._timeline(traffic)
        self._result = StepResult(
            outputs=tuple(run.output for run in self._runs),
            losses=tuple(run.loss for run in self._runs),
            gradients=self._context.ledger.sums(),
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
