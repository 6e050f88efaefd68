"""The engine: runs the steps of a plan.

```
Trainer's thread   step(microbatches) ─── waits, watches ───────────────▶ StepResult
microbatch threads    user code and stages, turn by turn ──┘ gradients, losses, outputs
```
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from roundpipe_lightning.engine.chain import Chain
from roundpipe_lightning.engine.device import Device, divided_intra_op_threads
from roundpipe_lightning.engine.evaluation import Evaluation
from roundpipe_lightning.engine.gradients import GradientLedger
from roundpipe_lightning.engine.microbatch import Microbatch, StepContext, UserStep
from roundpipe_lightning.engine.randomness import RandomLock
from roundpipe_lightning.engine.stack import BlockStack
from roundpipe_lightning.engine.store import HostStore
from roundpipe_lightning.engine.threads import Failure, Run, ThreadTeam
from roundpipe_lightning.engine.turns import StepAborted, TurnGraph, Turns
from roundpipe_lightning.engine.user_code import Outside
from roundpipe_lightning.engine.view import ViewClasses
from roundpipe_lightning.engine.worker import Worker
from roundpipe_lightning.errors import BatchError, PlanError, WatchdogError
from roundpipe_lightning.planning.plan import Plan
from roundpipe_lightning.planning.timeline import Timeline, TimelineEntry

_POLL_SECONDS = 0.2  # how often the Trainer's thread looks at progress; also its response to Ctrl-C


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
        chain: The calls of blocks that the first microbatch made.
        num_streamed: How many calls, of all microbatches, were not planned.
    """

    outputs: tuple[Any, ...]
    losses: tuple[Tensor | None, ...]
    gradients: dict[nn.Parameter, Tensor]
    timeline: Timeline
    chain: Chain
    num_streamed: int


class UnusedStackWarning(UserWarning):
    """A step did not call the stack that the engine was to pipeline."""


class Engine:
    """Runs a module's training steps and evaluations on the workers. A context manager.

    Args:
        module: The user's module. While the engine is open its parameters lie in flat buffers; they
            stay ordinary parameters.
        stack: The blocks to pipeline, of one stack or of several; None runs the module as one
            stage.
        devices: One per worker.
        plan: The stages and the schedule; further plans can be given per step.
        chain: The calls of blocks that the plan is for; None: each stack once.
        timeout_seconds: A step in which no action begins or ends for so long is given up.

    Raises:
        PlanError: If the plan does not fit the stack or the number of devices.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        stack: BlockStack | Sequence[BlockStack] | None,
        devices: Sequence[Device],
        plan: Plan,
        chain: Chain | None = None,
        timeout_seconds: float = 600.0,
    ) -> None:
        self._module = module
        self._stacks = _as_stacks(stack)
        self._blocks = tuple(block for s in self._stacks for block in s.blocks)
        self._chain = Chain.of(self._stacks) if chain is None else chain
        self._devices = tuple(devices)
        self._plan = plan
        self._timeout_seconds = timeout_seconds
        self._check_plan(plan)
        self._random_lock = RandomLock()
        self._classes = ViewClasses()
        self._graphs: dict[int, tuple[Plan, TurnGraph]] = {}
        self._team: ThreadTeam | None = None
        self._warned_of_unused_stack = False
        self._resources = ExitStack()
        self._store: HostStore | None = None
        self._workers: tuple[Worker, ...] = ()

    def _check_plan(self, plan: Plan) -> None:
        if plan.partition.num_blocks != len(self._chain):
            raise PlanError(
                f"The plan is for {plan.partition.num_blocks} blocks, the module has "
                f"{len(self._chain)}. Make a new plan (plan='auto')."
            )
        if plan.num_workers != len(self._devices):
            raise PlanError(
                f"The plan is for {plan.num_workers} workers, there are {len(self._devices)}. Make "
                "a new plan (plan='auto'), or set Trainer(devices=...) to the plan's number."
            )

    # ------------------------------------------------------------------------------- life cycle

    def __enter__(self) -> Engine:
        self._store = HostStore(self._module, self._blocks)
        self._resources.callback(self._store.close)
        for device in self._devices:
            device.reset_peak_bytes()
        accelerator = next((d for d in self._devices if not d.shares_host_memory), None)
        if accelerator is not None:
            self._store.pin(accelerator)
        self._num_threads = self._resources.enter_context(divided_intra_op_threads(self._devices))
        self._workers = tuple(
            Worker(index, device=device, store=self._store, classes=self._classes)
            for index, device in enumerate(self._devices)
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Join the threads and give page-locked memory back. The parameters stay where they are."""
        self._dismiss_team()
        for worker in self._workers:
            worker.clear()
        self._resources.close()

    def _dismiss_team(self) -> None:
        if self._team is not None:
            self._team.close(timeout_seconds=self._timeout_seconds)
            self._team = None

    def _team_of(self, num_threads: int) -> ThreadTeam:
        if self._team is not None and len(self._team) < num_threads:
            self._dismiss_team()
        if self._team is None:
            self._team = ThreadTeam(
                num_threads, name="roundpipe-microbatch", prepare=self._prepare_thread
            )
        return self._team

    def _prepare_thread(self) -> None:
        torch.set_num_threads(self._num_threads)

    @property
    def workers(self) -> tuple[Worker, ...]:
        """The workers; none before the engine is entered."""
        return self._workers

    @property
    def stacks(self) -> tuple[BlockStack, ...]:
        """The stacks whose blocks it knows."""
        return self._stacks

    @property
    def chain(self) -> Chain:
        """The calls of blocks that plans are for."""
        return self._chain

    def plan_for(self, chain: Chain, plan: Plan) -> None:
        """Run other calls of blocks from the next step on.

        Args:
            chain: The calls.
            plan: Their plan, for some number of microbatches.

        Raises:
            PlanError: If the plan is not for the chain.
        """
        before = self._chain
        self._chain = chain
        try:
            self._check_plan(plan)
        except PlanError:
            self._chain = before
            raise
        self._plan = plan
        self._graphs.clear()

    # ------------------------------------------------------------------------------------- steps

    def step(  # noqa: PLR0913 - all but two keyword-only
        self,
        microbatches: Sequence[Any],
        call: UserStep,
        *,
        loss_scales: Sequence[float],
        plan: Plan | None = None,
        backward: bool = True,
        thread_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
        overrides: Callable[[int], Mapping[str, Any]] = lambda index: {},
        stand_ins: Callable[[int], Mapping[nn.Module, nn.Module]] = lambda index: {},
        outside: Outside | None = None,
    ) -> StepResult:
        """Run forward and backward of all microbatches.

        Args:
            microbatches: The batch's parts, on the host.
            call: Runs the user's step for one microbatch, in a thread of its own, on a view of the
                module.
            loss_scales: What each microbatch's loss is multiplied by for the backward pass.
            plan: Another plan than the engine's, for another number of microbatches.
            backward: Whether gradients are wanted.
            thread_context: Entered in every thread, for thread-local state such as autocast.
            overrides: Attributes of a microbatch's root view, by its index.
            stand_ins: Modules that are something else in a microbatch's view, by its index.
            outside: Asked, in every microbatch's thread, before each torch function of the user's
                code outside the blocks; it may answer in the function's place.

        Raises:
            BatchError: If there are more or fewer microbatches than planned.
            ConfigurationError: If parameters of blocks were added or replaced.
            WatchdogError: If the step makes no progress.
            Exception: Whatever the user's code raised, with a note that says where.
        """
        plan = self._plan if plan is None else plan
        if not len(microbatches) == len(loss_scales) == plan.num_microbatches:
            raise BatchError(
                f"{len(microbatches)} microbatches and {len(loss_scales)} loss scales for a plan "
                f"of {plan.num_microbatches} microbatches."
            )
        self._open_store.check_blocks()
        context = self._context(
            plan,
            call=call,
            backward=backward,
            thread_context=thread_context,
            overrides=overrides,
            stand_ins=stand_ins,
            outside=outside,
        )
        runs = [
            Microbatch(context, index=index, batch=batch, loss_scale=scale)
            for index, (batch, scale) in enumerate(zip(microbatches, loss_scales, strict=True))
        ]
        with self._preserved_generators():
            for device in self._devices:
                device.start_clock()
            try:
                self._run_all(runs, context)
            finally:
                for run in runs:
                    run.tell_writes()
            for device in self._devices:
                device.synchronize()
        trained = backward and any(run.loss is not None for run in runs)
        if trained and not any(run.links for run in runs):
            self._warn_of_unused_stack()
        return StepResult(
            outputs=tuple(run.output for run in runs),
            losses=tuple(run.loss for run in runs),
            gradients=context.ledger.sums(),
            timeline=self._timeline(context),
            chain=Chain.recorded(runs[0].links, blocks=self._blocks),
            num_streamed=sum(run.num_streamed for run in runs),
        )

    def evaluate(
        self,
        call: Callable[[Any, Any], Any],
        batch: Any,
        *,
        overrides: Mapping[str, Any] | None = None,
        stand_ins: Mapping[nn.Module, nn.Module] | None = None,
        outside: Outside | None = None,
    ) -> Any:
        """Run user code forward only, on the whole batch, in the calling thread.

        Args:
            call: Takes a view of the module and the batch.
            batch: On the host.
            overrides: Attributes of the root view.
            stand_ins: Modules that are something else in the view.
            outside: Asked before each torch function of the user's code outside the blocks.

        Returns:
            What `call` returned, on the host.
        """
        self._open_store.check_blocks()
        evaluation = Evaluation(
            module=self._module,
            stacks=self._stacks,
            chain=self._chain,
            plan=self._plan,
            workers=self._workers,
            classes=self._classes,
            outside=outside,
        )
        return evaluation.run(call, batch, overrides=overrides or {}, stand_ins=stand_ins or {})

    def _warn_of_unused_stack(self) -> None:
        if self._stacks and not self._warned_of_unused_stack:
            self._warned_of_unused_stack = True
            warnings.warn(
                f"The training step never ran the blocks of {self._stacks[0].name!r} as one chain, "
                "so the module ran as one stage. Name the blocks that it calls one after the other "
                "with RoundPipeStrategy(blocks=[...]).",
                category=UnusedStackWarning,
                stacklevel=3,
            )

    def _context(self, plan: Plan, **given: Any) -> StepContext:
        if plan is not self._plan:
            self._check_plan(plan)
        graph = self._graph_of(plan)
        return StepContext(
            module=self._module,
            stacks=self._stacks,
            chain=self._chain,
            repeated=_repeated_parameters(self._chain),
            plan=plan,
            graph=graph,
            turns=Turns(graph),
            workers=self._workers,
            classes=self._classes,
            ledger=GradientLedger(
                num_microbatches=plan.num_microbatches, num_stages=len(plan.partition.backward)
            ),
            random_lock=self._random_lock,
            step_seed=int(torch.randint(0, 2**62, (), device="cpu")),
            **given,
        )

    def _graph_of(self, plan: Plan) -> TurnGraph:
        """Return the gates of a plan, made once per number of microbatches."""
        known = self._graphs.get(plan.num_microbatches)
        if known is None or known[0] is not plan:
            known = self._graphs[plan.num_microbatches] = (plan, TurnGraph.of(plan))
        return known[1]

    @property
    def _open_store(self) -> HostStore:
        assert self._store is not None, "the engine is entered"
        return self._store

    @contextmanager
    def _preserved_generators(self) -> Iterator[None]:
        """Put the devices' generators back after a step, as if it had not drawn."""
        generators = {g for device in self._devices for g in device.generators()}
        states = [(generator, generator.get_state()) for generator in generators]
        try:
            yield
        finally:
            for generator, state in states:
                generator.set_state(state)

    # ------------------------------------------------------------------------- waiting, watching

    def _run_all(self, runs: Sequence[Microbatch], context: StepContext) -> None:
        failures: list[Failure] = []

        def on_failure(failure: Failure) -> None:
            if not isinstance(failure.error, StepAborted):
                failures.append(failure)
            context.turns.abort()

        team, run = self._team_of(len(runs)), None
        try:
            run = team.start([r.run for r in runs], on_failure=on_failure)
            self._watch(run, runs, context)
        except BaseException as error:
            # Ctrl-C, or the watchdog: release every waiter and let running code come to its end.
            context.turns.abort()
            ended = run is not None and run.wait(_grace_seconds(self._timeout_seconds))
            if not ended and self._team is not None:
                self._team.close(timeout_seconds=0.0)  # stuck in user code: end when that ends
                self._team = None
            self._clear_workers()
            if isinstance(error, WatchdogError) and failures:
                self._raise_first(failures, runs)  # the cause, rather than the wait for the others
            raise
        self._clear_workers()
        if failures:
            self._raise_first(failures, runs)

    def _raise_first(self, failures: list[Failure], runs: Sequence[Microbatch]) -> NoReturn:
        failure = failures[0]
        add_note(failure.error, f"This happened in {runs[failure.index].place}.")
        try:
            raise failure.error
        finally:  # its traceback refers to this frame: no circle that holds the step's tensors
            failures.clear()
            del failure

    def _clear_workers(self) -> None:
        for worker in self._workers:
            worker.clear()

    def _watch(self, run: Run, runs: Sequence[Microbatch], context: StepContext) -> None:
        num_events, since = -1, time.monotonic()
        while not run.wait(_POLL_SECONDS):
            if context.turns.num_events != num_events:
                num_events, since = context.turns.num_events, time.monotonic()
            elif time.monotonic() - since > self._timeout_seconds:
                standing = "\n".join(f"  {r.place}" for r in runs)
                raise WatchdogError(
                    f"No action began or ended for {self._timeout_seconds:g} s (timeout_seconds). "
                    f"The schedule, running actions in > <:\n{context.turns.report(context.plan)}\n"
                    f"Every microbatch stands at, or waits for:\n{standing}\n"
                    "Raise RoundPipeStrategy(timeout_seconds=...) if a stage may take so long."
                )

    def _timeline(self, context: StepContext) -> Timeline:
        entries = []
        for action, (begin, end) in context.marks.items():
            device = self._devices[action.worker]
            entries.append(
                TimelineEntry(
                    action=action,
                    start_seconds=device.seconds(begin),
                    end_seconds=device.seconds(end),
                )
            )
        return Timeline(num_workers=len(self._devices), entries=tuple(entries))


def _as_stacks(stack: BlockStack | Sequence[BlockStack] | None) -> tuple[BlockStack, ...]:
    if stack is None:
        return ()
    return (stack,) if isinstance(stack, BlockStack) else tuple(stack)


def _repeated_parameters(chain: Chain) -> frozenset[nn.Parameter]:
    """Parameters of blocks that stand in the chain more than once."""
    counts = Counter(link.block for link in chain.links)
    return frozenset(p for b, count in counts.items() if count > 1 for p in b.parameters())


def add_note(error: BaseException, note: str) -> None:
    """Attach a note to an exception, also in Python 3.10, which keeps but does not print it."""
    noted: Any = error
    noted.__notes__ = [*getattr(error, "__notes__", []), note]


def _grace_seconds(timeout_seconds: float) -> float:
    return min(timeout_seconds, 60.0)
