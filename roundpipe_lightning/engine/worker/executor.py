"""The executor: one thread for each worker, which runs what the step gives it.

A worker's loop is all that there is: it takes a run of the step, waits for what its calls need,
runs them, and hands the results back. Only the thread of a worker touches the worker's replicas,
leaves and graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only

from roundpipe_lightning.engine.device.base import CpuDevice, Device
from roundpipe_lightning.engine.device.events import StepAborted
from roundpipe_lightning.engine.device.threads import Failure, ThreadTeam, add_note
from roundpipe_lightning.engine.driver.backward import BackwardRun
from roundpipe_lightning.engine.driver.block_calls import (
    flatten_outcome,
    reason_against,
    versions_of,
)
from roundpipe_lightning.engine.driver.calls import Call, Output, join_parts, rows_of
from roundpipe_lightning.engine.driver.draws import DeviceDraws, Draws
from roundpipe_lightning.engine.driver.forms import Rows
from roundpipe_lightning.engine.driver.operations import RowOperation
from roundpipe_lightning.engine.driver.outcome import Outcome
from roundpipe_lightning.engine.driver.route import PlannedStage, Route
from roundpipe_lightning.engine.driver.snapshot import Snapshot
from roundpipe_lightning.engine.driver.step import ForwardRun, Run, Step
from roundpipe_lightning.engine.store.host_store import HostStore
from roundpipe_lightning.engine.transfer.parts import HOST, JoinedParts, Part, Place
from roundpipe_lightning.engine.transfer.weight_prefetch import StageRun
from roundpipe_lightning.engine.transfer.worker_transfers import Transfers, WorkerRuns
from roundpipe_lightning.engine.worker.graph import UnitGraph
from roundpipe_lightning.engine.worker.leaves import (
    DeviceLeaves,
    HostLeaves,
    Leaves,
    RunBlocks,
    unplanned_run,
)
from roundpipe_lightning.engine.worker.replica import Replica
from roundpipe_lightning.engine.worker.root import DeviceRoot, HostRoot, Root
from roundpipe_lightning.planning.schedule.schedule import Action
from roundpipe_lightning.planning.schedule.stages import Stage

Values: TypeAlias = Callable[[Tensor | Output, Rows | None], Tensor]
"""Gives a call's part of an argument."""


class StepWorker:
    """A worker of the executor. Thread: its own.

    Args:
        keeps: Whether parts that others read stay where they are made, and do not go to the host.
    """

    def __init__(
        self,
        index: int,
        *,
        place: Place,
        leaves: Leaves,
        draws: DeviceDraws,
        keeps: Callable[[], bool],
    ) -> None:
        self.index, self.place, self._leaves, self._draws = index, place, leaves, draws
        self._keeps = keeps
        self._graphs: dict[tuple[Any, int], UnitGraph] = {}  # kept from the forward pass
        self._run: RunBlocks | None = None
        self._taken: list[Part | JoinedParts] = []  # parts of which there may be copies here

    def run_step(self, step: Step, runs: Sequence[StageRun]) -> None:
        """Run all that a step has for this worker."""
        where = "?"
        device = self.place.device
        try:
            self._leaves.begin_step(runs)
            with device.activate(), device.thread_context():
                while (run := step.await_work(self.index)) is not None:
                    where = f"{_calls_of(run)[0].name!r}"
                    if isinstance(run, ForwardRun):
                        self._run_forward(step, run)
                    else:
                        where += ", backward pass"
                        self._run_backward(step, run)
        except StepAborted:
            pass
        except BaseException as error:  # noqa: BLE001 - raised in the driver's thread
            add_note(error, f"This happened in {where}, on worker {self.index}.")
            step.fail(error)
        finally:
            self._graphs.clear()
            self._taken.clear()
            self._leaves.end_step()

    def _note_span(self, step: Step, stage: Stage | None, part: int, start: float) -> None:
        if stage is not None:
            action = Action(kind=stage.kind, stage=stage.index, microbatch=part, worker=self.index)
            step.note_span(action, start)

    def _run_forward(self, step: Step, run: ForwardRun) -> None:
        stage = run.stage.stage
        present = -1
        made: list[Call] = []
        while (item := step.next_call(run)) is not None:
            call, part = item
            if part != present:
                self._leave_part(present, made)
                present, made = part, []
            if self._run is None:
                blocks: Sequence[nn.Module] = [c.runner.block for c in _block_calls([call])]
                if stage is not None:
                    blocks = step.route.blocks[stage.blocks.start : stage.blocks.stop]
                if blocks:
                    self._run = RunBlocks(stage, tuple(dict.fromkeys(blocks)))
            self._run_forward_call(step, call, part)
            made.append(call)
        self._leave_part(present, made)
        self._leaves.end_run(has_more=False)
        self._run = None

    def _run_forward_call(self, step: Step, call: Call, part: int) -> None:
        start = perf_counter()
        call.check_unwritten()
        if call.unit is not None and call.unit.keeps_graph:
            key = (call.unit, part)
            graph = self._graphs.get(key)
            if graph is None:
                graph = self._graphs[key] = UnitGraph(part, self._run_call, self._take)
            leaves, structure = graph.run(call)
        else:
            with torch.no_grad():
                leaves, structure = self._run_call(
                    call,
                    part,
                    lambda source, rows: self._take(source, rows, call, part),
                    grad=False,
                )
        if call.stage is not None:
            self._note_span(step, call.stage.stage, part, start)
        step.keep_results(call, part, leaves, structure, self.place)

    def _run_backward(self, step: Step, run: BackwardRun) -> None:
        unit = run.unit
        blocks: list[nn.Module] = []
        if unit.stage is not None:
            blocks += step.route.blocks[unit.stage.blocks.start : unit.stage.blocks.stop]
        blocks += [call.runner.block for call in _block_calls(unit.calls)]
        self._run = RunBlocks(unit.stage, tuple(dict.fromkeys(blocks)))
        for part in run.parts:
            self._run_backward_part(step, run, part)
        if not self.place.is_host:
            self._leaves.send_gradients(
                lambda gradients: step.add_parameter_gradients(run, run.parts, *gradients)
            )
        self._leaves.end_run(has_more=step.has_more(run, self.index))
        self._run = None

    def _run_backward_part(self, step: Step, run: BackwardRun, part: int) -> None:
        start = perf_counter()
        graph = self._graphs.pop((run.unit, part), None)
        if graph is None:
            graph = UnitGraph(part, self._run_call, self._take)
            for call in run.unit.calls:
                graph.run(call)
        gradients = {
            output: self._sum_of(arrived)
            for output, arrived in step.await_gradients(run, part).items()
        }
        result = graph.run_backward(gradients)
        self._note_span(step, run.unit.stage, part, start)
        outputs = {o: Part(gradient, self.place) for o, gradient in result.outputs.items()}
        tensors = {key: Part(gradient, self.place) for key, gradient in result.tensors.items()}
        of_parameters = self._leaves.take_gradients()
        step.end_unit(run, part, outputs=outputs, tensors=tensors)
        if of_parameters is not None:
            step.add_parameter_gradients(run, [part], of_parameters, {})
        if not self.place.is_host:
            for output, gradient in outputs.items():
                producer = output.call.unit
                if producer is None or not self._is_read_here(producer.workers, part):
                    self._send(gradient)
            self._drop_copies()

    def _is_read_here(self, workers: Sequence[int], part: int) -> bool:
        return workers[part] == self.index

    def _sum_of(self, arrived: Sequence[Part | JoinedParts]) -> Tensor:
        total = arrived[0].on(self.place)
        for gradient in arrived[1:]:
            total = total + gradient.on(self.place).to(total.dtype)
        return total

    # Parts of tensors ----------------------------------------------------------------------------

    def _take(self, source: Tensor | Output, rows: Rows | None, call: Call, part: int) -> Tensor:
        """Return a call's part of an argument, without a graph, here."""
        split = call.split
        if isinstance(source, Tensor):
            given = call.step.given.part_of(source, rows, split, part)
            if isinstance(given, Tensor):
                return given
            if rows is not None:
                self._taken.append(given)
            return given.on(self.place)
        if len(source.call.split) == len(split):
            values = source.parts[part]
            assert values is not None, "the call was ready"
            return self._part_here(values)
        parts = [self._part_here(values) for values in source.parts if values is not None]
        return rows_of(join_parts(parts, source.form.rows), rows, split, part)

    def _part_here(self, part: Part) -> Tensor:
        if not self.place.is_host:
            self._taken.append(part)
        return part.on(self.place)

    def _leave_part(self, part: int, calls: Iterable[Call]) -> None:
        """Let what others will read of a part go to the host, and drop copies."""
        if self.place.is_host:
            return
        for call in calls:
            for output in call.outputs or ():
                values = output.parts[part]
                if values is not None and output.num_readers[part]:
                    self._send(values)
        self._drop_copies()

    def _send(self, part: Part) -> None:
        if not self._keeps():
            part.send_home()

    def _drop_copies(self) -> None:
        for part in self._taken:
            part.leave(self.place)
        self._taken.clear()

    # Calls ---------------------------------------------------------------------------------------

    def _run_call(
        self, call: Call, part: int, values: Values, *, grad: bool | None = None
    ) -> tuple[list[Any], TreeSpec]:
        def with_leaves(source: Tensor | Output, rows: Rows | None) -> Tensor:
            if isinstance(source, nn.Parameter):
                written = call.step.given.written(source)
                return self._leaves.leaf_of(
                    source,
                    requires_grad=source in call.parameters,
                    values=None if written is None else written.on(self.place),
                )
            return values(source, rows)

        self._leaves.refresh(call.generation)
        args, kwargs = call.arguments_for(with_leaves)
        is_unknown = call.outputs is None
        if is_unknown:  # it may write into what it is given, and is then run by the driver
            args, kwargs = tree_map_only(Tensor, _copy, (args, kwargs))
            versions = versions_of((args, kwargs))
        with call.context.entered(grad=grad):
            if isinstance(call.runner, RowOperation):
                return tree_flatten(call.context.run(call.runner.function, *args, **kwargs))
            snapshot: Snapshot = call.runner
            assert self._run is not None, "a run has begun"
            may_write = grad is False and len(call.split) == 1
            keeps = may_write and call.has_gradient
            before = {b: b.detach().clone() for b in snapshot.buffers} if keeps else {}
            replica = self._leaves.replica_for(call, self._run)
            run = partial(call.context.run, replica.run, args, kwargs)
            outcome = self._draws.run(call, part, call.step.seed, run)
            if is_unknown:
                call.refusal = reason_against(outcome) or ""
                if versions_of((args, kwargs)) != versions:
                    call.refusal = "it writes into a tensor that it is given"
            if may_write and outcome.written_buffers:
                self._leaves.write_back(outcome)
                if before:
                    call.saved_buffers = before
        return flatten_outcome(outcome, snapshot)


def _copy(tensor: Tensor) -> Tensor:
    is_parameter = isinstance(tensor, nn.Parameter)
    return tensor if is_parameter or tensor.requires_grad else tensor.clone()


class Executor:
    """The threads of all workers, and the place where user code computes.

    Args:
        devices: One for each worker.
        blocks: The blocks, each once.
        store: Where the parameters live; None: all devices compute in host memory.
        transfers: What moves tensors; `Transfers.root` is that of `root`.
        root: The device where user code computes; None: host memory.
        outside: The modules outside the blocks.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        *,
        blocks: Mapping[str, nn.Module] | None = None,
        store: HostStore | None = None,
        transfers: Transfers | None = None,
        root: Device | None = None,
        outside: Iterable[nn.Module] = (),
        prepare_thread: Callable[[], None] = lambda: None,
    ) -> None:
        self._devices, self._transfers = tuple(devices), transfers
        self._blocks = tuple((blocks or {}).values())
        self._runs: tuple[Route, tuple[WorkerRuns, ...]] | None = None
        draws: dict[int, Draws] = {}  # by the generator's `id`: each lives as long as the process

        def draws_of(device: Device) -> DeviceDraws:
            generators = device.generators()
            for generator in generators:
                draws.setdefault(id(generator), Draws(generator))
            return DeviceDraws([draws[id(generator)] for generator in generators])

        moving = (None,) * len(devices) if transfers is None else transfers.transfers
        self._workers = []
        for index, (device, own) in enumerate(zip(devices, moving, strict=True)):
            leaves: Leaves = HostLeaves()
            if own is not None:
                assert store is not None
                assert transfers is not None
                leaves = DeviceLeaves(device, transfers=own, store=store, layouts=transfers.layouts)
            self._workers.append(
                StepWorker(
                    index,
                    place=HOST if own is None else Place(device, own),
                    leaves=leaves,
                    draws=draws_of(device),
                    keeps=partial(self._keeps, device),
                )
            )
        self._root: Root = HostRoot()
        if transfers is not None and transfers.root is not None:
            assert store is not None
            assert root is not None
            self._root = DeviceRoot(root, transfers=transfers.root, store=store, modules=outside)
        self.root = self._root.place
        self.draws = draws_of(self.root.device)
        self._team = ThreadTeam(len(devices), name="worker", prepare=prepare_thread)
        for device in devices:
            device.expect_threads(len(devices))

    @classmethod
    def on_host(cls, num_workers: int) -> Executor:
        """Return workers that compute in host memory."""
        return cls([CpuDevice(index) for index in range(num_workers)])

    def _keeps(self, device: Device) -> bool:
        return device.has_spare_memory() and all(one.reaches(device) for one in self._devices)

    def start(self, step: Step) -> Callable[[], None]:
        """Let the workers begin a step; returns what waits until all have left it.

        In between user code computes in the calling thread.
        """
        runs = self._runs_of(step.route)
        transfers = self._transfers
        if transfers is not None:
            transfers.begin(
                runs,
                is_planned=bool(step.route.blocks),
                on_failure=lambda: _fail_with_copy(step, transfers),
            )
        try:
            contexts = self._root.entered()
        except BaseException as error:
            if transfers is not None:
                transfers.end(failed=True, grace_seconds=_GRACE_SECONDS)
            if isinstance(error, StepAborted):
                step.raise_error()
            raise

        def failed(failure: Failure) -> None:
            step.fail(failure.error)

        tasks = [
            partial(worker.run_step, step, own.runs if step.route.blocks else ())
            for worker, own in zip(self._workers, runs, strict=True)
        ]
        running = self._team.start(tasks, on_failure=failed)

        def join_workers() -> None:
            try:
                while not running.wait(_POLL_SECONDS):
                    if transfers is not None and step.has_failed:
                        transfers.abort()
                if transfers is not None and not step.has_failed:
                    transfers.finish(timeout_seconds=_GRACE_SECONDS)
            finally:
                contexts.close()
                if transfers is not None:
                    transfers.end(failed=step.has_failed, grace_seconds=_GRACE_SECONDS)

        return join_workers

    def _runs_of(self, route: Route) -> tuple[WorkerRuns, ...]:
        if self._runs is None or self._runs[0] is not route:
            singles = tuple(map(unplanned_run, self._blocks))
            runs = []
            for worker in range(route.num_workers):
                stages = [_stage_run(p, route) for p in _stages_of(route, worker)]
                runs.append(
                    WorkerRuns(
                        runs=tuple(run for run in stages if run.blocks),
                        num_slots=route.weight_slots,
                        resident=route.resident[worker] if route.resident else (),
                        room_for=singles,
                    )
                )
            self._runs = (route, tuple(runs))
        return self._runs[1]

    def make_replica(
        self, snapshot: Snapshot
    ) -> Callable[[tuple[Any, ...], dict[str, Any]], Outcome]:
        """Make a replica of a block where user code computes; return what runs it."""
        return self._root.replica_of(snapshot).run

    def bring(self, block: nn.Module) -> None:
        """Let user code run a block itself, where it computes, for the rest of the step."""
        self._root.bring(block)

    def run_part(
        self,
        call: Call,
        part: int,
        values: Values,
        parameter: Callable[[nn.Parameter], Any],
    ) -> list[Any]:
        """Run a call for a part in the driver's thread, with a graph of the driver's."""
        args, kwargs = call.arguments_for(values)
        with call.context.entered():
            if isinstance(call.runner, RowOperation):
                return tree_flatten(call.context.run(call.runner.function, *args, **kwargs))[0]
            self.bring(call.runner.block)
            saved = call.saved_buffers or {}
            replica = Replica(call.runner, parameter, lambda b: saved.get(b, b).clone())
            run = partial(call.context.run, replica.run, args, kwargs)
            outcome = self.draws.run(call, part, call.step.seed, run)
            return flatten_outcome(outcome, call.runner)[0]

    def close(self) -> None:
        self._team.close()


def _calls_of(run: Run) -> list[Call]:
    return run.stage.calls if isinstance(run, ForwardRun) else run.unit.calls


def _block_calls(calls: Iterable[Call]) -> list[Call]:
    return [call for call in calls if isinstance(call.runner, Snapshot)]


def _stages_of(route: Route, worker: int) -> list[PlannedStage]:
    return [p for p in (*route.forward, *route.backward) if worker in p.workers]


def _stage_run(planned: PlannedStage, route: Route) -> StageRun:
    stage = planned.stage
    blocks = tuple(dict.fromkeys(route.blocks[stage.blocks.start : stage.blocks.stop]))
    return StageRun(stage=stage, blocks=blocks, wanted=blocks)


def _fail_with_copy(step: Step, transfers: Transfers) -> None:
    failed = transfers.take_error()
    if failed is not None:
        error, place = failed
        add_note(error, f"This happened in {place}.")
        step.fail(error)


_POLL_SECONDS = 0.2
_GRACE_SECONDS = 60.0
