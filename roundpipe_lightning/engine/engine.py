"""The engine: runs the steps of a plan.

```
Trainer's thread   step(microbatches) ─── waits, watches ───────────────▶ StepResult
microbatch threads    user code and stages, turn by turn ──┘ gradients, losses, outputs
```

`begin_step` is the same in two parts: what the user's step has returned is known before the
gradients are, and the next step can begin meanwhile (`engine/steps.py`).
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import TracebackType
from typing import Any

import torch
from torch import nn

from roundpipe_lightning.engine.capture.compiled import BlockCompiler
from roundpipe_lightning.engine.capture.randomness import RandomLock, StepDraws
from roundpipe_lightning.engine.capture.view import ViewClasses
from roundpipe_lightning.engine.chain.chain import BlockStack, Chain
from roundpipe_lightning.engine.chain.stage_runs import plan_runs
from roundpipe_lightning.engine.device.base import Device
from roundpipe_lightning.engine.device.events import StepAborted
from roundpipe_lightning.engine.device.notes import raise_noted
from roundpipe_lightning.engine.device.threads import Countdown, divided_intra_op_threads
from roundpipe_lightning.engine.evaluation import Evaluation
from roundpipe_lightning.engine.microbatch import Microbatch, StepContext, UserStep
from roundpipe_lightning.engine.steps import (
    PendingStep,
    RunningStep,
    StepResult,
    StepsUnderWay,
    grace_seconds,
)
from roundpipe_lightning.engine.store.host_store import HostStore
from roundpipe_lightning.engine.transfer.gradient_reduce import GradientReducer
from roundpipe_lightning.engine.transfer.transfers import Transfers
from roundpipe_lightning.engine.transfer.worker_transfers import WorkerRuns
from roundpipe_lightning.engine.worker.turns import TurnGraph, Turns
from roundpipe_lightning.engine.worker.user_code import Outside
from roundpipe_lightning.engine.worker.worker import Worker
from roundpipe_lightning.errors import BatchError, ConfigurationError, PlanError
from roundpipe_lightning.planning.schedule.plan import Plan
from roundpipe_lightning.planning.schedule.round_robin import rotated, turns_of_batch

_PLANS_REMEMBERED = 64


class BatchStarts:
    """The workers with which the batches of one engine begin."""

    def __init__(self) -> None:
        self._next = 0  # the worker with which a batch begins that follows the last one
        self._rotated: list[tuple[Plan, int, Plan]] = []
        self._turns: list[tuple[Plan, int]] = []

    def following(self, plan: Plan) -> Plan:
        """Return a plan as it is run by a batch that follows the last one."""
        first = self._first(plan)
        for known, worker, found in self._rotated:
            if known is plan and worker == first:
                return found
        found = rotated(plan, first)
        self._rotated = [(plan, first, found), *self._rotated][:_PLANS_REMEMBERED]
        return found

    def _first(self, plan: Plan) -> int:
        if not self._turns_of(plan):
            return 0
        return self._next - self._next % plan.team_size

    def began(self, plan: Plan, *, follows: bool) -> None:
        """Note that a batch has begun.

        Args:
            plan: Its plan, as if it began with worker 0.
            follows: Whether it follows the last one; else it begins with worker 0.
        """
        first = self._first(plan) if follows else 0
        self._next = (first + self._turns_of(plan)) % plan.num_workers

    def _turns_of(self, plan: Plan) -> int:
        for known, turns in self._turns:
            if known is plan:
                return turns
        turns = turns_of_batch(plan)
        self._turns = [(plan, turns), *self._turns][:_PLANS_REMEMBERED]
        return turns


__all__ = ["Engine", "UnusedStackWarning"]


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
        compiler: Compiles blocks from the second step on; None: they run as they are.
        upload_dtype: What trained matrices of blocks are cast to on the host before they are
            uploaded (`store/upload_copies.py`), where anything is; None: they are not.

    Raises:
        PlanError: If the plan does not fit the stack or the number of devices.
        ConfigurationError: If blocks cannot be compiled for a device.
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
        compiler: BlockCompiler | None = None,
        upload_dtype: torch.dtype | None = None,
    ) -> None:
        self._module = module
        moves = any(not device.shares_host_memory for device in devices)
        self._upload_dtype = upload_dtype if moves else None
        self._compiler = compiler
        self._stacks = _as_stacks(stack)
        self._names = {b: n for s in self._stacks for b, n in zip(s.blocks, s.names, strict=True)}
        self._blocks = tuple(block for s in self._stacks for block in s.blocks)
        self._chain = Chain.of(self._stacks) if chain is None else chain
        self._devices = tuple(devices)
        if compiler is not None and not all(device.can_compile for device in devices):
            raise ConfigurationError(
                f"compile=True: blocks cannot be compiled for {devices[0].name}. Leave it out."
            )
        self._plan = plan
        self._timeout_seconds = timeout_seconds
        self._check_plan(plan)
        self._random_lock = RandomLock()
        self._classes = ViewClasses()
        self._graphs: list[tuple[Plan, TurnGraph]] = []
        self._steps: StepsUnderWay | None = None
        self._num_steps = 0
        self._starts = BatchStarts()
        self._warned_of_unused_stack = False
        self._resources = ExitStack()
        self._store: HostStore | None = None
        self._transfers: Transfers | None = None
        self._visits: list[tuple[Plan, bool, tuple[WorkerRuns, ...]]] = []
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
        self._store = HostStore(self._module, self._blocks, upload_dtype=self._upload_dtype)
        self._resources.callback(self._store.close)
        for device in self._devices:
            device.reset_peak_bytes()
        accelerator = next((d for d in self._devices if not d.shares_host_memory), None)
        if accelerator is not None:
            self._store.pin(accelerator)
        on_host = sum(device.shares_host_memory for device in self._devices)
        self._num_threads = self._resources.enter_context(
            divided_intra_op_threads(num_workers=on_host)
        )
        self._transfers = Transfers(self._store, devices=self._devices, names=self._names)
        self._resources.callback(self._transfers.close)
        pairs = zip(self._devices, self._transfers.transfers, strict=True)
        self._workers = tuple(
            Worker(
                index,
                device=device,
                store=self._store,
                classes=self._classes,
                transfers=transfers,
            )
            for index, (device, transfers) in enumerate(pairs)
        )
        self._steps = StepsUnderWay(
            workers=self._workers,
            transfers=self._transfers,
            timeout_seconds=self._timeout_seconds,
            prepare_thread=self._prepare_thread,
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
        steps, self._steps = self._steps, None
        if steps is not None:
            steps.close()
        for worker in self._workers:
            worker.clear()
        self._resources.close()

    def _prepare_thread(self) -> None:
        torch.set_num_threads(self._num_threads)

    @property
    def workers(self) -> tuple[Worker, ...]:
        """The workers; none before the engine is entered."""
        return self._workers

    @property
    def store(self) -> HostStore:
        """The parameters; there is none before the engine is entered."""
        return self._open_store

    @property
    def staging_bytes(self) -> int:
        """Page-locked host memory beside that of the parameters."""
        return self._open_transfers.host_bytes

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
        self._open_steps.finish_all()
        before = self._chain
        self._chain = chain
        try:
            self._check_plan(plan)
        except PlanError:
            self._chain = before
            raise
        self._plan = plan
        self._graphs.clear()
        self._visits.clear()

    # ------------------------------------------------------------------------------------- steps

    def step(
        self,
        microbatches: Sequence[Any],
        call: UserStep,
        *,
        loss_scales: Sequence[float],
        **options: Any,
    ) -> StepResult:
        """Run forward and backward of all microbatches; as `begin_step`, and to its end."""
        return self.begin_step(microbatches, call, loss_scales=loss_scales, **options).result()

    def begin_step(  # noqa: PLR0913 - all but two keyword-only
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
    ) -> PendingStep:
        """Begin forward and backward of all microbatches.

        The step before may be under way; parameters have been as they are since that began. Ask
        for the step's `outputs()` or its `result()` next.

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
        plan, visits = self._run_plan(plan, backward=backward)
        told = Countdown(plan.num_microbatches)
        context = self._context(
            plan,
            told=told.tell,
            pools=self._open_transfers.pools(self._graph_of(plan).pools),
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
        pending = PendingStep(
            RunningStep(runs, context, timeout_seconds=self._timeout_seconds),
            steps=self._open_steps,
            told=told,
            devices=self._devices,
            blocks=self._blocks,
            transfers=self._open_transfers,
            is_watched=not self._num_steps,
            ended=self._step_ended,
        )
        pending.begin(visits)
        return pending

    def _run_plan(self, plan: Plan, *, backward: bool) -> tuple[Plan, tuple[WorkerRuns, ...]]:
        """End steps until another can begin; return what is run of its plan, and by which workers.

        A step that follows one under way begins with the worker after the one that ends that.
        """
        steps = self._open_steps
        if not steps.are_none:
            following = self._starts.following(plan)
            visits = self._runs_of(following, backward=backward)
            steps.wait_for_capacity(visits, pools=self._graph_of(following).pools)
            if not steps.are_none:
                self._starts.began(plan, follows=True)
                return following, visits
        self._starts.began(plan, follows=False)
        return plan, self._runs_of(plan, backward=backward)

    def _step_ended(self, result: StepResult, *, backward: bool) -> None:
        self._num_steps += 1
        trained = backward and any(loss is not None for loss in result.losses)
        if trained and self._compiler is not None:
            self._compiler.end_step()
        if trained and not result.num_calls:
            self._warn_of_unused_stack()

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
        self._open_steps.finish_all()
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
        transfers = self._open_transfers
        succeeded, failed = False, None
        try:
            transfers.begin(self._runs_of(self._plan, backward=False), is_planned=False)
            result = evaluation.run(
                call, batch, overrides=overrides or {}, stand_ins=stand_ins or {}
            )
            succeeded = True
        except StepAborted:
            failed = transfers.take_error()
            assert failed is not None, "a copy has failed"
        finally:
            transfers.end(failed=not succeeded, grace_seconds=grace_seconds(self._timeout_seconds))
        if failed is not None:  # raised here: `StepAborted` would be shown before it
            try:
                raise_noted(*failed)
            finally:  # see `raise_noted`
                del failed
        return result

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
        repeated = _repeated_parameters(self._chain)
        return StepContext(
            module=self._module,
            stacks=self._stacks,
            chain=self._chain,
            repeated=repeated,
            plan=plan,
            graph=graph,
            turns=Turns(graph, before=self._open_steps.turns),
            workers=self._workers,
            classes=self._classes,
            reducer=GradientReducer(
                num_microbatches=plan.num_microbatches,
                num_stages=len(plan.partition.backward),
                take=self._open_store.take_gradients,
                shared=(*self._open_store.shared, *repeated),
            ),
            draws=StepDraws(self._random_lock),
            compiler=self._compiler,
            step_seed=int(torch.randint(0, 2**62, (), device="cpu")),
            **given,
        )

    def _graph_of(self, plan: Plan) -> TurnGraph:
        """Return the gates of a plan, made once for each of the last plans."""
        for known, graph in self._graphs:
            if known is plan:
                return graph
        graph = TurnGraph.of(plan)
        self._graphs = [(plan, graph), *self._graphs][:_PLANS_REMEMBERED]
        return graph

    def _runs_of(self, plan: Plan, *, backward: bool) -> tuple[WorkerRuns, ...]:
        """Return what each worker runs of a plan, made once for each of the last plans."""
        for known, is_trained, visits in self._visits:
            if known is plan and is_trained == backward:
                return visits
        visits = plan_runs(plan, self._chain, backward=backward)
        self._visits = [(plan, backward, visits), *self._visits][:_PLANS_REMEMBERED]
        return visits

    @property
    def _open_steps(self) -> StepsUnderWay:
        assert self._steps is not None, "the engine is entered"
        return self._steps

    @property
    def _open_transfers(self) -> Transfers:
        assert self._transfers is not None, "the engine is entered"
        return self._transfers

    @property
    def _open_store(self) -> HostStore:
        assert self._store is not None, "the engine is entered"
        return self._store


def _as_stacks(stack: BlockStack | Sequence[BlockStack] | None) -> tuple[BlockStack, ...]:
    if stack is None:
        return ()
    return (stack,) if isinstance(stack, BlockStack) else tuple(stack)


def _repeated_parameters(chain: Chain) -> frozenset[nn.Parameter]:
    """Parameters of blocks that stand in the chain more than once."""
    counts = Counter(link.block for link in chain.links)
    return frozenset(p for b, count in counts.items() if count > 1 for p in b.parameters())
