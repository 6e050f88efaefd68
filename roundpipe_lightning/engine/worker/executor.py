"""The executor: one thread for each worker, which runs what the step gives it.

A worker's loop is all that there is: it takes a run of the step, waits for what its calls need,
runs them, and hands the results back. Only the thread of a worker touches the worker's replicas,
leaves and graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only

from roundpipe_lightning.engine.device.events import StepAborted
from roundpipe_lightning.engine.device.threads import Failure, ThreadTeam, add_note
from roundpipe_lightning.engine.driver.backward import BackwardRun
from roundpipe_lightning.engine.driver.block_calls import (
    flatten_outcome,
    reason_against,
    versions_of,
)
from roundpipe_lightning.engine.driver.calls import Call, Output
from roundpipe_lightning.engine.driver.draws import Draws
from roundpipe_lightning.engine.driver.forms import Rows
from roundpipe_lightning.engine.driver.operations import RowOperation
from roundpipe_lightning.engine.driver.outcome import Outcome
from roundpipe_lightning.engine.driver.snapshot import Snapshot
from roundpipe_lightning.engine.driver.step import ForwardRun, Step
from roundpipe_lightning.engine.worker.graph import HostLeaves, UnitGraph, part_of
from roundpipe_lightning.engine.worker.replica import Replica
from roundpipe_lightning.planning.schedule.schedule import Action
from roundpipe_lightning.planning.schedule.stages import Stage

Values: TypeAlias = Callable[[Tensor | Output, Rows | None], Tensor]
"""Gives a call's part of an argument."""


class StepWorker:
    """A worker of the executor. Thread: its own."""

    def __init__(self, index: int, draws: Draws) -> None:
        self.index, self._draws = index, draws
        self._leaves = HostLeaves()
        self._replicas: dict[Any, Replica] = {}
        self._graphs: dict[tuple[Any, int], UnitGraph] = {}  # kept from the forward pass

    def run_step(self, step: Step) -> None:
        """Run all that a step has for this worker."""
        place = "?"
        try:
            while (run := step.await_work(self.index)) is not None:
                if isinstance(run, ForwardRun):
                    while (item := step.next_call(run)) is not None:
                        place = f"{item[0].name!r}, microbatch {item[1]}"
                        self._run_forward(step, *item)
                else:
                    place = f"{run.unit.calls[0].name!r}, backward pass"
                    for part in run.parts:
                        self._run_backward(step, run, part)
        except StepAborted:
            pass
        except BaseException as error:  # noqa: BLE001 - raised in the driver's thread
            add_note(error, f"This happened in {place}, on worker {self.index}.")
            step.fail(error)
        finally:
            self._graphs.clear()

    def _note_span(self, step: Step, stage: Stage | None, part: int, start: float) -> None:
        if stage is not None:
            action = Action(kind=stage.kind, stage=stage.index, microbatch=part, worker=self.index)
            step.note_span(action, start)

    def _run_forward(self, step: Step, call: Call, part: int) -> None:
        start = perf_counter()
        call.check_unwritten()
        if call.unit is not None and call.unit.keeps_graph:
            key = (call.unit, part)
            graph = self._graphs.get(key)
            if graph is None:
                graph = self._graphs[key] = UnitGraph(part, self._run_call)
            leaves, structure = graph.run(call)
        else:
            with torch.no_grad():
                leaves, structure = self._run_call(
                    call, part, lambda source, rows: part_of(source, rows, call, part), grad=False
                )
        if call.stage is not None:
            self._note_span(step, call.stage.stage, part, start)
        step.keep_results(call, part, leaves, structure)

    def _run_backward(self, step: Step, run: BackwardRun, part: int) -> None:
        start = perf_counter()
        graph = self._graphs.pop((run.unit, part), None)
        if graph is None:
            graph = UnitGraph(part, self._run_call)
            for call in run.unit.calls:
                graph.run(call)
        gradients = step.await_gradients(run, part)
        result = graph.run_backward(gradients)
        self._note_span(step, run.unit.stage, part, start)
        step.end_unit(
            run,
            part,
            outputs=result.outputs,
            tensors=result.tensors,
            parameters=self._leaves.take_gradients(),
        )

    def _run_call(
        self, call: Call, part: int, values: Values, *, grad: bool | None = None
    ) -> tuple[list[Any], TreeSpec]:
        def with_leaves(source: Tensor | Output, rows: Rows | None) -> Tensor:
            if isinstance(source, nn.Parameter):
                return self._leaves.leaf_of(source, source in call.parameters)
            return values(source, rows)

        args, kwargs = call.arguments_for(with_leaves)
        is_unknown = call.outputs is None
        if is_unknown:  # it may write into what it is given, and is then run by the driver
            args, kwargs = tree_map_only(Tensor, _copy, (args, kwargs))
            versions = versions_of((args, kwargs))
        with call.context.entered(grad=grad):
            if isinstance(call.runner, RowOperation):
                return tree_flatten(call.context.run(call.runner.function, *args, **kwargs))
            snapshot: Snapshot = call.runner
            may_write = grad is False and call.has_gradient and len(call.split) == 1
            before = {b: b.detach().clone() for b in snapshot.buffers} if may_write else {}
            run = partial(call.context.run, self._replica_for(call, snapshot).run, args, kwargs)
            outcome = self._draws.run(call, part, call.step.seed, run)
            if is_unknown:
                call.refusal = reason_against(outcome) or ""
                if versions_of((args, kwargs)) != versions:
                    call.refusal = "it writes into a tensor that it is given"
            if before and outcome.written_buffers:
                call.saved_buffers = before
        return flatten_outcome(outcome)

    def _replica_for(self, call: Call, snapshot: Snapshot) -> Replica:
        """Return a replica: for a recompute with the buffers as they were before the call."""
        saved = call.saved_buffers
        if saved is not None:
            return self._replica_of(snapshot, lambda buffer: saved[buffer].clone())
        if snapshot not in self._replicas:
            self._replicas[snapshot] = self._replica_of(snapshot, lambda buffer: buffer)
        return self._replicas[snapshot]

    def _replica_of(self, snapshot: Snapshot, buffer: Callable[[Tensor], Tensor]) -> Replica:
        return Replica(
            snapshot,
            parameter=lambda p: self._leaves.leaf_of(p, snapshot.parameters[p]),
            buffer=buffer,
        )


def _copy(tensor: Tensor) -> Tensor:
    is_parameter = isinstance(tensor, nn.Parameter)
    return tensor if is_parameter or tensor.requires_grad else tensor.clone()


class Executor:
    """The threads of all workers."""

    def __init__(self, *, num_workers: int, prepare: Callable[[], None] = lambda: None) -> None:
        self._driver_leaves = HostLeaves()
        self.draws = Draws(torch.default_generator)
        self._workers = [StepWorker(index, self.draws) for index in range(num_workers)]
        self._team = ThreadTeam(num_workers, name="worker", prepare=prepare)

    def start(self, step: Step) -> Callable[[], None]:
        """Let the workers begin a step; returns what waits until all have left it."""

        def failed(failure: Failure) -> None:
            step.fail(failure.error)

        tasks = [partial(worker.run_step, step) for worker in self._workers]
        running = self._team.start(tasks, on_failure=failed)

        def join_workers() -> None:
            while not running.wait(_POLL_SECONDS):
                pass

        return join_workers

    def make_replica(
        self, snapshot: Snapshot
    ) -> Callable[[tuple[Any, ...], dict[str, Any]], Outcome]:
        """Make a replica of a block where user code computes; return what runs it."""
        replica = Replica(
            snapshot,
            parameter=lambda p: self._driver_leaves.leaf_of(p, snapshot.parameters[p]),
            buffer=Tensor.clone,
        )
        return replica.run

    def close(self) -> None:
        self._team.close()


_POLL_SECONDS = 0.2
