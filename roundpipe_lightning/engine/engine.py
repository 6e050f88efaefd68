"""The engine: runs the steps of a plan.

Step M2 of docs/design.md. What the user's step has returned is known before the gradients are, and
the next step can begin meanwhile (`engine/steps.py`).
"""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import cache, cached_property, partial
from itertools import groupby
from typing import Any

import torch
from torch import nn
from typing_extensions import Unpack

from roundpipe_lightning.engine.capture.compiled import BlockCompiler
from roundpipe_lightning.engine.capture.randomness import StepDraws
from roundpipe_lightning.engine.capture.view import ViewClasses
from roundpipe_lightning.engine.chain.chain import BlockStack, Chain
from roundpipe_lightning.engine.chain.joined import PieceBoard
from roundpipe_lightning.engine.chain.pieces import CallForms
from roundpipe_lightning.engine.device.base import Device
from roundpipe_lightning.engine.device.events import StepAborted
from roundpipe_lightning.engine.device.threads import (
    Countdown,
    divided_intra_op_threads,
    raise_noted,
)
from roundpipe_lightning.engine.microbatch import (
    Driver,
    Microbatch,
    Piece,
    StepContext,
    StepOptions,
    UserStep,
)
from roundpipe_lightning.engine.steps import Step, StepResult, StepsInFlight, grace_seconds
from roundpipe_lightning.engine.store.host_store import HostStore
from roundpipe_lightning.engine.transfer.gradient_reduce import GradientReducer
from roundpipe_lightning.engine.transfer.weight_prefetch import StageRun
from roundpipe_lightning.engine.transfer.worker_transfers import Transfers, WorkerRuns
from roundpipe_lightning.engine.whole_batch import Evaluation
from roundpipe_lightning.engine.worker.turns import TurnGraph, Turns
from roundpipe_lightning.engine.worker.user_code import Outside
from roundpipe_lightning.engine.worker.worker import Worker
from roundpipe_lightning.errors import BatchError, ConfigurationError, PlanError
from roundpipe_lightning.planning.report.step_record import WorkerState
from roundpipe_lightning.planning.schedule.plan import Plan, rotated, turns_of_batch
from roundpipe_lightning.planning.schedule.stages import Stage, StageKind


class UnusedStackWarning(UserWarning):
    """A step did not call the stack that the engine was to pipeline."""


class Engine:
    """Runs a module's training steps and evaluations on the workers. A context manager.

    Args:
        module: The user's module. While the engine is open its parameters lie in flat buffers; they
            stay ordinary parameters.
        stack: The blocks to pipeline, of one stack or of several; None runs the module as one
            stage.
        plan: The stages and the schedule; further plans can be given per step.
        chain: The calls of blocks that the plan is for; None: each stack once.
        timeout_seconds: A step in which no action begins or ends for so long is given up.
        compiler: Compiles blocks from the second step on; None: they run as they are.
        upload_dtype: What trained matrices are cast to on the host before they are uploaded
            (`NarrowCopies`), where anything is; None: they are not.
        trust_rows: Whether blocks run on pieces of a batch without a check of its rows.
        apart: Modules that are used as they are, and not through views (metrics).

    Raises:
        PlanError: If the plan does not fit the stack or the number of devices.
        ConfigurationError: If blocks cannot be compiled for a device.
    """

    def __init__(  # noqa: PLR0913 - all but one keyword-only
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
        trust_rows: bool = False,
        apart: Iterable[nn.Module] = (),
    ) -> None:
        self._module = module
        moves = any(not device.shares_host_memory for device in devices)
        self._upload_dtype = upload_dtype if moves else None
        self._moves = moves
        self._compiler = compiler
        self.stacks = (stack,) if isinstance(stack, BlockStack) else tuple(stack or ())
        self._blocks = tuple(block for s in self.stacks for block in s.blocks)
        self.chain = Chain.from_stacks(self.stacks) if chain is None else chain
        self._devices = tuple(devices)
        if compiler is not None and not all(device.can_compile for device in devices):
            raise ConfigurationError(
                f"compile=True: blocks cannot be compiled for {devices[0].name}. Leave it out."
            )
        self._plan = plan
        self._timeout_seconds = timeout_seconds
        self._check_plan(plan, self.chain)
        self._random_lock = threading.Lock()
        self._classes = ViewClasses(apart)
        self.forms = CallForms(trusts_rows=trust_rows)
        self._plans = deque[PreparedPlan](maxlen=_PLANS_REMEMBERED)  # of this chain, the last ones
        self._next_worker = 0  # with which a batch begins while the last one is in flight
        self._num_steps = 0
        self._warned_of_unused_stack = False
        self.workers: tuple[Worker, ...] = ()
        self._resources = ExitStack()

    def _check_plan(self, plan: Plan, chain: Chain) -> None:
        if plan.partition.num_blocks != len(chain):
            raise PlanError(
                f"The plan is for {plan.partition.num_blocks} blocks, the module has "
                f"{len(chain)}. Make a new plan (plan='auto')."
            )
        if plan.num_workers != len(self._devices):
            raise PlanError(
                f"The plan is for {plan.num_workers} workers, there are {len(self._devices)}. Make "
                "a new plan (plan='auto'), or set Trainer(devices=...) to the plan's number."
            )

    def __enter__(self) -> Engine:
        with ExitStack() as resources:  # gives back what there is if the rest fails
            self.store = store = HostStore(
                self._module, self._blocks, upload_dtype=self._upload_dtype, moves=self._moves
            )
            resources.callback(store.close)
            for device in self._devices:
                device.reset_peak_bytes()
            accelerator = next((d for d in self._devices if not d.shares_host_memory), None)
            if accelerator is not None:
                store.pin(accelerator)
            on_host = sum(device.shares_host_memory for device in self._devices)
            num_threads = resources.enter_context(divided_intra_op_threads(num_workers=on_host))
            names = {b: n for s in self.stacks for b, n in zip(s.blocks, s.names, strict=True)}
            self._transfers = transfers = Transfers(store, devices=self._devices, names=names)
            resources.callback(transfers.close)
            workers = tuple(
                Worker(index, device=device, store=store, classes=self._classes, transfers=own)
                for index, (device, own) in enumerate(
                    zip(self._devices, transfers.transfers, strict=True)
                )
            )
            for worker in workers:
                resources.callback(worker.clear)
            self._steps = StepsInFlight(
                workers=workers,
                transfers=transfers,
                timeout_seconds=self._timeout_seconds,
                prepare_thread=partial(torch.set_num_threads, num_threads),
            )
            resources.callback(self._steps.close)
            self.workers, self._resources = workers, resources.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Join the threads and give page-locked memory back. The parameters stay where they are."""
        self._resources.close()

    def worker_states(self) -> list[WorkerState]:
        """Return what every worker does in the step that began last; to any thread."""
        with suppress(IndexError):  # the step has ended meanwhile
            turns = self._steps.last_turns if self.workers else None
            if turns is not None:
                progress = zip(self.workers, turns.progress().workers(), strict=True)
                return [worker.state(doing) for worker, doing in progress]
        return []

    @property
    def staging_bytes(self) -> int:
        return self._transfers.host_bytes

    def plan_for(self, chain: Chain, plan: Plan) -> None:
        """Run other calls of blocks, by a plan, from now on; PlanError if it is not for them."""
        self._steps.finish_all()
        self._check_plan(plan, chain)
        self.chain, self._plan = chain, plan
        self._plans.clear()
        self._next_worker = 0

    def begin_step(
        self,
        microbatches: Sequence[Any],
        call: UserStep,
        *,
        loss_scales: Sequence[float],
        plan: Plan | None = None,
        joined: bool = False,
        **options: Unpack[StepOptions],
    ) -> Step:
        """Begin forward and backward of all microbatches.

        The step before may be in flight; parameters have been as they are since that began. Ask
        for the step's `outputs()` or its `result()` next.

        Args:
            microbatches: The batch's parts, on the host.
            call: Runs the user's step for one microbatch, in a thread of its own, on a view of the
                module.
            loss_scales: What each microbatch's loss is multiplied by for the backward pass.
            plan: Another plan than the engine's, for another number of microbatches.
            joined: Whether the user's code runs once, on the one batch that is given, and the
                plan's microbatches are pieces of it, inside the calls of blocks.

        Raises:
            BatchError: If there are more or fewer microbatches than planned.
            ConfigurationError: If parameters of blocks were added or replaced.
            WatchdogError: If the step makes no progress.
            Exception: Whatever the user's code raised, with a note that says where.
        """
        plan = self._plan if plan is None else plan
        if not len(microbatches) == len(loss_scales) == (1 if joined else plan.num_microbatches):
            raise BatchError(
                f"{len(microbatches)} microbatches and {len(loss_scales)} loss scales for a plan "
                f"of {plan.num_microbatches} microbatches."
            )
        if plan is not self._plan:
            self._check_plan(plan, self.chain)
        self.store.check_blocks()
        backward = options.get("backward", True)
        prepared = self._prepared(plan)
        # A step that overlaps another begins with the worker after the one that ends that; any
        # other with worker 0.
        first = self._next_worker - self._next_worker % plan.team_size if prepared.num_turns else 0
        if not self._steps.is_empty:
            following = prepared.beginning_with(first)
            self._steps.wait_for_capacity(following.stage_runs(backward=backward))
        first = 0 if self._steps.is_empty else first
        self._next_worker = (first + prepared.num_turns) % plan.num_workers
        prepared = prepared.beginning_with(first)
        context = self._context(prepared, call, joined=joined, **options)
        step = Step(
            _members(context, microbatches, loss_scales),
            context,
            steps=self._steps,
            waits_for_end=not self._num_steps,
            on_success=self._step_ended,
        )
        self._steps.begin(step, prepared.stage_runs(backward=backward))
        return step

    def _prepared(self, plan: Plan) -> PreparedPlan:
        found = next((known for known in self._plans if known.plan is plan), None)
        if found is None:
            found = PreparedPlan(plan, self.chain)
            self._plans.appendleft(found)
        return found

    def _context(
        self,
        prepared: PreparedPlan,
        call: UserStep,
        *,
        joined: bool,
        **options: Unpack[StepOptions],
    ) -> StepContext:
        plan, graph = prepared.plan, prepared.graph
        return StepContext(
            module=self._module,
            stacks=self.stacks,
            chain=self.chain,
            repeated=self.chain.repeated,
            outside_blocks=self.store.outside_blocks,
            turns=Turns(graph, before=self._steps.last_turns),
            workers=self.workers,
            classes=self._classes,
            reducer=GradientReducer(
                num_microbatches=plan.num_microbatches,
                num_stages=len(plan.partition.backward),
                take=self.store.take_gradients,
                shared=(*self.store.shared, *self.chain.repeated),
            ),
            draws=StepDraws(self._random_lock, looks_for_others=not self._num_steps),
            compiler=self._compiler,
            returned=Countdown(1 if joined else plan.num_microbatches),
            forms=self.forms if joined else None,
            is_first=not self._num_steps,
            may_write=joined or plan.num_microbatches == 1,
            call=call,
            **options,
        )

    def _step_ended(self, step: Step, result: StepResult) -> None:
        self._num_steps += 1
        trained = step.context.backward and any(loss is not None for loss in result.losses)
        if trained and self._compiler is not None:
            self._compiler.end_step()
        if trained and not (result.num_calls or self._warned_of_unused_stack) and self.stacks:
            self._warned_of_unused_stack = True
            warnings.warn(
                f"The training step never ran the blocks of {self.stacks[0].name!r} as one chain, "
                "so the module ran as one stage. Name the blocks that it calls one after the other "
                "with RoundPipeStrategy(blocks=[...]).",
                category=UnusedStackWarning,
                stacklevel=2,
            )

    def evaluate(
        self, call: Callable[[Any, Any], Any], batch: Any, *, outside: Outside | None = None
    ) -> Any:
        """Run user code forward only, on the whole batch, in the calling thread.

        Args:
            call: Takes a view of the module and the batch. What it returned is returned, on the
                host.
            batch: On the host.
            outside: Asked before each torch function of the user's code outside the blocks.
        """
        self._steps.finish_all()
        self.store.check_blocks()
        evaluation = Evaluation(
            module=self._module,
            stacks=self.stacks,
            chain=self.chain,
            plan=self._plan,
            workers=self.workers,
            classes=self._classes,
            outside=outside,
        )
        transfers, grace = self._transfers, grace_seconds(self._timeout_seconds)
        try:
            stage_runs = self._prepared(self._plan).stage_runs(backward=False)
            transfers.begin(stage_runs, is_planned=False)
            result = evaluation.evaluate(call, batch)
        except BaseException as error:
            failed = transfers.take_error() if isinstance(error, StepAborted) else None
            transfers.end(failed=True, grace_seconds=grace)
            if failed is None:
                raise
        else:
            transfers.end()
            return result
        try:  # here: `StepAborted` would be shown before it
            raise_noted(*failed)
        finally:  # see `raise_noted`
            del failed


def _members(
    context: StepContext, microbatches: Sequence[Any], loss_scales: Sequence[float]
) -> list[Microbatch]:
    """Return the microbatches of a step: those that are given, or the pieces of the one batch."""
    given = zip(microbatches, loss_scales, strict=True)
    if context.forms is None:
        return [
            Microbatch(context, index=index, batch=batch, loss_scale=scale)
            for index, (batch, scale) in enumerate(given)
        ]
    ((batch, scale),) = given
    num_pieces = context.turns.graph.plan.num_microbatches
    board = PieceBoard(num_pieces, context.turns)
    driver = Driver(context, board=board, batch=batch, loss_scale=scale)
    return [driver, *(Piece(context, driver=driver, index=i) for i in range(1, num_pieces))]


_PLANS_REMEMBERED = 64


class PreparedPlan:
    """A plan for a chain with what follows from it, made when first asked for."""

    def __init__(self, plan: Plan, chain: Chain) -> None:
        self.plan, self._chain = plan, chain
        self.stage_runs = cache(partial(plan_runs, plan, chain))
        self._rotated: dict[int, PreparedPlan] = {}

    @cached_property
    def graph(self) -> TurnGraph:
        return TurnGraph.from_plan(self.plan)

    @cached_property
    def num_turns(self) -> int:
        """By how many workers later the next batch in flight begins."""
        return turns_of_batch(self.plan)

    def beginning_with(self, worker: int) -> PreparedPlan:
        if worker not in self._rotated:
            plan = rotated(self.plan, worker)
            same = plan is self.plan
            self._rotated[worker] = self if same else PreparedPlan(plan, self._chain)
        return self._rotated[worker]


def plan_runs(plan: Plan, chain: Chain, *, backward: bool) -> tuple[WorkerRuns, ...]:
    """Return the stage runs of each worker; without `backward` BACKWARD stages have nothing to do.

    Where batches in flight begin with other workers there is room on each for what any one runs.
    """
    found = []
    for worker, actions in enumerate(plan.schedule.workers):
        groups = groupby(actions, key=lambda action: (action.kind, action.stage))
        stages = [plan.partition.stage(kind, index) for (kind, index), _ in groups]
        stays = plan.resident[worker] if plan.resident else ()
        found.append(
            WorkerRuns(
                runs=tuple(_stage_run(stage, chain, backward=backward) for stage in stages),
                num_slots=plan.weight_slots,
                resident=_unique(chain.links[position].block for position in stays),
            )
        )
    if not turns_of_batch(plan):
        return tuple(found)
    everybody = tuple(dict.fromkeys(run for step in found for run in step.runs))
    return tuple(replace(step, room_for=everybody) for step in found)


def _stage_run(stage: Stage, chain: Chain, *, backward: bool) -> StageRun:
    links = chain.links[stage.blocks.start : stage.blocks.stop]
    blocks = _unique(link.block for link in links)
    wanted = _unique(link.block for link in links if link.backward and backward)
    is_backward = stage.kind is StageKind.BACKWARD
    return StageRun(stage=stage, blocks=blocks, wanted=wanted if is_backward else blocks)


def _unique(blocks: Iterable[nn.Module]) -> tuple[nn.Module, ...]:
    return tuple(dict.fromkeys(blocks))
