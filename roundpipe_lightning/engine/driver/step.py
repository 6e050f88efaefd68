"""One step: the calls that user code has posted, and what the workers have made of them.

```
Trainer's thread (driver)                       workers, a thread each
  with step: training_step(batch)
    h = embed(ids)
    h = layer0(h)       ── Call 0 ──▶           parts 0, 1, 2, 3 of call 0
    h = layer1(h)       ── Call 1 ──▶           ...
    loss = f(h)         ◀── values ──           the parts of call 1, put together
  loss.backward()       ── reached ──▶          the same calls once more with a graph, and backward
                        ◀── gradients ──
```

The driver never runs a block, and workers never run user code outside of blocks.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_unflatten

from roundpipe_lightning.engine.device.events import Event, StepAborted
from roundpipe_lightning.engine.driver.backward import BackwardPass, BackwardRun
from roundpipe_lightning.engine.driver.block_calls import (
    BlockForm,
    sized_form,
    unflatten_outcome,
)
from roundpipe_lightning.engine.driver.calls import (
    Call,
    Output,
    Split,
    join_parts,
    rows_of,
    split_rows,
)
from roundpipe_lightning.engine.driver.context import CallContext
from roundpipe_lightning.engine.driver.double_backward import DoubleBackward, RunPart
from roundpipe_lightning.engine.driver.forms import CallForm, Rows, TensorForm
from roundpipe_lightning.engine.driver.lazy import LazyTensor, gathered, is_lazy
from roundpipe_lightning.engine.driver.nodes import (
    CallNode,
    GatherNode,
    LazyNode,
    ParameterNode,
    apply,
)
from roundpipe_lightning.engine.driver.operations import RowOperation, row_operation
from roundpipe_lightning.engine.driver.outcome import apply_outcome
from roundpipe_lightning.engine.driver.parameters import ParameterWatch
from roundpipe_lightning.engine.driver.route import Route, StageCalls, Unit
from roundpipe_lightning.engine.driver.rows import NotABlockError
from roundpipe_lightning.engine.driver.snapshot import DELETED, Snapshot
from roundpipe_lightning.engine.transfer.gradient_reduce import FlatGradients, Gradients
from roundpipe_lightning.engine.transfer.parts import HOST, JoinedParts, Part, Place
from roundpipe_lightning.planning.schedule.schedule import Action, Timeline, TimelineEntry

_USER = 1 << 62
"""Stands for user code among the numbers of units that give gradients: it comes first."""


Project = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Takes a torch function with its arguments, as `__torch_function__` does."""


@dataclass(eq=False)
class ForwardRun:
    """A worker's parts of a stage.

    Thread: one worker's. Guarded by: `Step.changed`.
    """

    stage: StageCalls
    parts: list[int]
    num_run: dict[int, int] = field(default_factory=dict)
    present: int = 0  # index of the part that it is at


Run = ForwardRun | BackwardRun


class Step:
    """One step of user code.

    Thread: the driver posts calls and reaches them in backward passes; workers take runs.
    Guarded by: `changed`.

    Args:
        route: Which worker runs what.
        trainable: The parameters that may get gradients through calls.
        seed: Of all random numbers that blocks draw.
        root: Where user code computes.
        project: Asked before each operation on lazy tensors; may answer in its place, or return
            `NotImplemented`: makes logits lazy.
        watch: Lets user code's writes into parameters wait for the calls that read them.
        run_part: Runs a call in the driver's thread.
    """

    def __init__(
        self,
        *,
        route: Route,
        trainable: Collection[nn.Parameter],
        seed: int,
        watch: ParameterWatch,
        run_part: RunPart,
        root: Place = HOST,
        project: Project | None = None,
    ) -> None:
        self.route, self.seed, self.root, self._project = route, seed, root, project
        self.device = root.device.torch_device
        self.given = GivenTensors(self)
        self.changed = threading.Condition()
        self.calls: list[Call] = []
        self.error: BaseException | None = None
        self.is_over = self.is_aborted = False
        self.num_gathers: dict[str, int] = {}
        self._trainable = tuple(trainable)
        self._watch = watch
        self._double = DoubleBackward(run_part)
        self._thread = threading.get_ident()
        self._is_trying = False
        self._stages = [
            StageCalls(stage=planned.stage, workers=planned.workers) for planned in route.forward
        ]
        self._follows_plan = bool(route.blocks)
        self._context: CallContext | None = None  # of the last call
        self._position = 0  # of the next block in the plan
        self._units: list[Unit] = []
        self._passes: list[BackwardPass] = []
        self._tokens: dict[Call, Tensor] = {}
        self._parameter_tokens: dict[nn.Parameter | None, Tensor] = {}
        self._next_stage = [0] * route.num_workers
        self._start_seconds = perf_counter()
        self._spans: list[dict[Action, tuple[float, float]]] = [
            {} for _ in range(route.num_workers)
        ]
        self._closed_outputs: deque[Output] = deque()

    # Posting: called by the driver ---------------------------------------------------------------

    def post_operation(
        self, func: Any, args: Any, kwargs: Any, leaves: Sequence[Any], structure: TreeSpec
    ) -> tuple[bool, Any]:
        """Post an operation on lazy tensors if it keeps rows apart; return whether it does."""
        self._check_reader()
        if self.is_over or any(self.present_value(x) is not x for x in leaves):
            return False, None
        if self._project is not None:
            answer = self._project(func, args, kwargs)
            if answer is not NotImplemented:
                return True, answer
        operation = row_operation(func, args, kwargs, is_lazy=is_lazy)
        if operation is None:
            self.num_gathers[func.__name__] = self.num_gathers.get(func.__name__, 0) + 1
            return False, None
        return True, self.post_rows(operation, leaves, structure)

    def post_rows(self, operation: RowOperation, leaves: Sequence[Any], structure: TreeSpec) -> Any:
        """Post an operation that keeps rows apart, on flat arguments; return lazy tensors."""
        num_rows = next(x.num_rows for x in leaves if is_lazy(x))
        call = self._new_call(
            operation.name, operation, (leaves, structure), operation.form, num_rows, {}
        )
        token = self._post(call, None, is_differentiable=operation.is_differentiable)
        return self._results(call, token)

    def post_block(
        self,
        snapshot: Snapshot,
        known: BlockForm,
        *,
        leaves: Sequence[Any],
        structure: TreeSpec,
        learn: Callable[[CallForm], None],
    ) -> Any:
        """Post a call of a block; return what it returns, with lazy tensors.

        Args:
            learn: Called with the form of the call when its sizes were not known before.
        """
        self._check_thread()
        call = self._new_call(
            snapshot.name,
            snapshot,
            (leaves, structure),
            known.form,
            known.num_rows,
            snapshot.parameters,
        )
        token = self._post(call, snapshot.block)
        if not known.form.results:
            self.wait_until(lambda: call.first_results is not None)
            assert call.first_results is not None
            results, result_structure, num_rows = call.first_results
            if call.refusal:
                raise NotABlockError(call.refusal)
            form = sized_form(known.form, known.result_rows, results, result_structure, num_rows)
            with self.changed:
                self._make_outputs(call, form)
                self._keep_early_results(call)
            learn(form)
        outcome = unflatten_outcome(self._results(call, token), snapshot)
        if outcome.hook_calls or outcome.attributes:
            # A buffer is in checkpoints: it has values.
            attributes = [
                a._replace(value=gathered(a.value)) if a.is_buffer else a
                for a in outcome.attributes
            ]
            apply_outcome(snapshot, outcome.hook_calls, attributes)
        return outcome.result

    def _new_call(
        self,
        name: str,
        runner: Any,
        arguments: tuple[Sequence[Any], TreeSpec],
        form: CallForm,
        num_rows: int,
        parameters: Mapping[nn.Parameter, bool],
    ) -> Call:
        self._check_open()
        own = {x: x.requires_grad for x in arguments[0] if isinstance(x, nn.Parameter)}
        parameters = {**parameters, **own} if own else parameters
        self._watch.watch(parameters)
        self._context = context = CallContext.current(self.device.type, self._context)
        has_rows = any(rows is not None for rows in form.arguments)
        leaves, structure = arguments
        sources = tuple(x.output if isinstance(x, LazyTensor) else x for x in leaves)
        self.given.note(sources)
        return Call(
            step=self,
            number=len(self.calls),
            name=name,
            runner=runner,
            arguments=sources,
            structure=structure,
            form=form,
            context=context,
            num_rows=num_rows,
            split=split_rows(num_rows, self.route.num_microbatches) if has_rows else (num_rows,),
            generation=self._watch.generation,
            read_parameters=tuple(parameters),
            parameters=frozenset(p for p, trained in parameters.items() if trained)
            if context.grad_enabled
            else frozenset(),
        )

    def _post(
        self, call: Call, block: nn.Module | None, *, is_differentiable: bool = True
    ) -> Tensor | None:
        """Give a call to the workers; return its token in the driver's graph, if it is in it."""
        has_graph = call.context.grad_enabled and is_differentiable
        token = self._token_of(call) if has_graph else None
        call.has_gradient = token is not None
        with self.changed:
            if call.form.results:
                self._make_outputs(call, call.form)
            self._place(call, block)
            self.calls.append(call)
            self._drop_closed()
            self.changed.notify_all()
        if token is not None:
            self._tokens[call] = token
        return token

    def _make_outputs(self, call: Call, form: CallForm) -> None:
        call.form = form
        call.outputs = tuple(
            Output(call, result, requires_grad=call.has_gradient and has_gradients(result.dtype))
            for result in form.results
            if isinstance(result, TensorForm)
        )

    def _keep_early_results(self, call: Call) -> None:
        """Keep results of microbatches that came before the sizes were known."""
        for part, (leaves, place) in call.early_results.items():
            self._keep_parts(call, part, leaves, place)
        call.early_results.clear()
        call.drop_first_tensors()
        self.changed.notify_all()

    def present_value(self, leaf: Any) -> Any:
        """Return an argument as a call takes it: values if they are no longer what a call made."""
        if isinstance(leaf, LazyTensor) and (leaf.was_written or leaf.output.call.step is not self):
            return leaf.output.call.step.gather(leaf)
        return leaf

    def _token_of(self, call: Call) -> Tensor | None:
        """Return the call's token in the driver's graph; None if it gets no gradient."""
        producers = dict.fromkeys(source.call for source in call.sources)
        tokens = [self._tokens[c] for c in producers if c in self._tokens]
        tensors = call.real_tensors = call.tensors_with_gradient()
        if not (tokens or tensors or call.parameters):
            return None
        if call.parameters:
            if not self._parameter_tokens:
                self._make_parameter_tokens()
            tokens += [
                t for p, t in self._parameter_tokens.items() if p is None or p in call.parameters
            ]
        return apply(CallNode, call, len(tokens), *tokens, *tensors)

    def _make_parameter_tokens(self) -> None:
        """Make the nodes of the parameters, in front of all calls.

        A parameter with hooks has a node of its own, which runs only where a call that computes
        with the parameter does: hooks cannot be given None.
        """
        trained = [p for p in self._trainable if p.requires_grad]
        hooked = [p for p in trained if p._backward_hooks]  # noqa: SLF001
        unhooked = [p for p in trained if not p._backward_hooks]  # noqa: SLF001
        self._parameter_tokens[None] = apply(ParameterNode, self, *unhooked)
        for parameter in hooked:
            self._parameter_tokens[parameter] = apply(ParameterNode, self, parameter)

    def _place(self, call: Call, block: nn.Module | None) -> None:
        """Give a call its stage and its unit."""
        route = self.route
        if block is not None and self._follows_plan:
            if self._position < len(route.blocks) and route.blocks[self._position] is block:
                self._position += 1
            else:
                self._leave_plan()
        if self._follows_plan:
            position = max(self._position - 1, 0)
            index = route.forward_index(position)
            for stage in self._stages[:index]:
                stage.is_closed = True
            call.stage = self._stages[index]
            planned = route.backward[route.backward_index(position)]
            home: tuple[Any, tuple[int, ...]] = (planned.stage, planned.workers)
        else:
            last = self._stages[-1] if self._stages else None
            if block is not None or last is None or last.is_closed:
                if last is not None:
                    last.is_closed = True
                self._stages.append(StageCalls(stage=None, workers=route.dealt_workers()))
            call.stage = self._stages[-1]
            home = (None, call.stage.workers)
        call.stage.calls.append(call)
        call.stage.num_left += len(call.split)
        for source in call.sources:
            source.was_taken = True
            source.count_reader(1)
        if call.has_gradient:
            self._place_in_unit(call, *home, begins=block is not None and not self._follows_plan)

    def _place_in_unit(
        self, call: Call, stage: Any, workers: tuple[int, ...], *, begins: bool
    ) -> None:
        unit = self._units[-1] if self._units else None
        if (
            unit is None
            or begins
            or unit.is_closed
            or unit.stage is not stage
            or bool(call.real_tensors)
            or unit.calls[-1].split != call.split
        ):
            unit = Unit(
                number=len(self._units), stage=stage, workers=workers, num_parts=len(call.split)
            )
            self._units.append(unit)
        call.unit = unit
        unit.calls.append(call)
        for source in call.sources:
            producer = source.call.unit
            if producer is unit:
                continue
            if producer is not None:
                producer.consumers.add(unit)
            if source not in unit.boundaries:
                unit.boundaries.add(source)
                source.count_reader(1)

    def _leave_plan(self) -> None:
        self._follows_plan = False
        for stage in self._stages:
            stage.is_closed = True

    def _results(self, call: Call, token: Tensor | None) -> Any:
        plain: Sequence[Any] = call.form.results
        if call.first_results is None and not all(map(is_constant, plain)):
            self.wait_until(lambda: call.first_results is not None)
        if call.first_results is not None:
            plain = call.first_results[0]
        outputs = iter(call.outputs or ())
        leaves = []
        for form, value in zip(call.form.results, plain, strict=True):
            if not isinstance(form, TensorForm):
                leaves.append(value)
                continue
            output = next(outputs)
            leaves.append(
                apply(LazyNode, token, output, self.device)
                if output.requires_grad
                else LazyTensor.wrap(output, self.device)
            )
        return tree_unflatten(leaves, call.form.structure)

    # Values: called by the driver ----------------------------------------------------------------

    def gather(self, lazy: LazyTensor) -> Tensor:
        """Return the values of the whole batch, with their place in the driver's graph."""
        self._check_reader()
        if lazy.base is not None and lazy.base[0].was_written:
            lazy.share_memory_of_base()
        if lazy.whole is None:
            parts = self.await_parts(lazy.output)
            with torch.enable_grad():
                values = (
                    apply(GatherNode, lazy, *parts)
                    if lazy.requires_grad and not self.is_over
                    else join_parts(parts, lazy.rows)
                )
            lazy.whole = values
        return lazy.whole if torch.is_grad_enabled() else lazy.whole.detach()

    def await_parts(self, output: Output) -> list[Tensor]:
        if not self.is_over or None in output.parts:  # a block may leave a tensor beyond its step
            self.wait_until(lambda: None not in output.parts)
        return [part.on(self.root) for part in output.parts if part is not None]

    def first_rows(self, output: Output, num_rows: int) -> Tensor:
        """Return the values of the first rows, as soon as they are there."""
        split, rows = output.call.split, output.form.rows
        num_parts = next(
            (n for n in range(1, len(split) + 1) if sum(split[:n]) >= num_rows), len(split)
        )
        self.wait_until(lambda: None not in output.parts[:num_parts])
        parts = [part.on(self.root) for part in output.parts[:num_parts] if part is not None]
        values = join_parts(parts, rows)
        return values if rows is None else values.narrow(rows.dim, 0, num_rows * rows.repeat)

    def await_forward(self) -> None:
        """Wait until every posted call has run: something is about to change a parameter."""
        self.wait_until(lambda: not any(stage.num_left for stage in self._stages))

    def wait_until(self, is_there: Callable[[], bool]) -> None:
        with self.changed:
            self._drop_closed()
            self.changed.wait_for(lambda: self.error is not None or is_there())
        self._check_open()

    def raise_error(self) -> None:
        """Raise what a worker has raised."""
        if self.error is not None:
            raise self.error

    def _check_open(self) -> None:
        self.raise_error()
        if self.is_over:
            raise RuntimeError(
                "A training step is used after it has ended: its loss was run backward later, or a "
                "tensor of one of its blocks was read. Do both inside the step."
            )

    @contextmanager
    def trying_block(self) -> Iterator[None]:
        """Refuse reads of other blocks' outputs until the context ends: a block is tried."""
        self._is_trying = True
        try:
            yield
        finally:
            self._is_trying = False

    def _check_reader(self) -> None:
        if self._is_trying:
            raise NotABlockError("it reads a tensor that another block has left for it")
        self._check_thread()

    def _check_thread(self) -> None:
        if threading.get_ident() != self._thread:
            raise RuntimeError(
                "A block's output is read in another thread than that of training_step: in a block "
                "that was not given it, or in a hook on a tensor of an accelerator. Give it to the "
                "block as an argument, or read it in training_step before the backward pass."
            )

    # The backward pass: called by the driver, inside autograd ------------------------------------

    def run_call_backward(self, call: Call) -> list[Tensor | None]:
        """Let the workers run a call backward; return the gradients of `Call.real_tensors`."""
        self._check_open()
        if torch.is_grad_enabled():  # create_graph=True
            will_run = torch._C._will_engine_execute_node  # noqa: SLF001
            with_parameters = any(
                t.grad_fn is not None and will_run(t.grad_fn)
                for t in self._parameter_tokens.values()
            )
            return self._double.run_call(call, with_parameters=with_parameters)
        backward = self._present_pass()
        with self.changed:
            backward.reach(call)
            self.changed.notify_all()
        if not call.real_tensors:
            return []
        self._await_backward(backward, lambda: backward.is_finished(call.unit))
        return backward.real_gradients(call, self.root)  # no worker writes into these any more

    def parameter_gradients(self, parameters: Sequence[nn.Parameter]) -> list[Tensor | None]:
        if torch.is_grad_enabled():
            return self._double.parameter_gradients(parameters)
        backward = self._present_pass()
        self._await_backward(backward, backward.have_landed)
        gradients = backward.parameter_gradients(parameters)
        if self.root.is_host:
            return gradients
        return [
            g if g is None or p.device != self.device else self.root.upload(g)
            for p, g in zip(parameters, gradients, strict=True)
        ]

    def add_user_gradient(self, output: Output, gradient: Tensor) -> None:
        """Keep what user code gives of an output's gradient, until its call is reached."""
        if torch.is_grad_enabled():
            self._double.add_gradient(output, gradient)
            return
        split, rows = output.call.split, output.form.rows
        made = self.root.mark("a gradient of user code")
        with self.changed:
            for part, arrived in enumerate(output.gradients):
                if rows is None and part:
                    break  # all parts are equal: the driver has taken the first
                arrived[_USER] = Part(rows_of(gradient, rows, split, part), self.root, made)

    def _present_pass(self) -> BackwardPass:
        task = torch._C._current_graph_task_id()  # noqa: SLF001
        backward = next((p for p in self._passes if p.task == task and not p.is_over), None)
        if backward is not None:
            return backward
        will_run = torch._C._will_engine_execute_node  # noqa: SLF001
        calls = [
            call
            for call, token in self._tokens.items()
            if token.grad_fn is not None and will_run(token.grad_fn)
        ]
        for call in calls:
            call.check_parameters()
        backward = BackwardPass(
            calls,
            task=task,
            num_workers=self.route.num_workers,
            keeps_graph=torch._C._autograd._get_current_graph_task_keep_graph(),  # noqa: SLF001
        )
        engine = torch.autograd.Variable._execution_engine  # noqa: SLF001
        engine.queue_callback(lambda: self._end_pass(backward))
        with self.changed:
            for stage in self._stages:
                stage.is_closed = True
            for unit in self._units:
                unit.is_closed = True
            self._follows_plan = False
            self._passes.append(backward)
            self.changed.notify_all()
        return backward

    def _await_backward(self, backward: BackwardPass, is_there: Callable[[], bool]) -> None:
        with self.changed:
            backward.driver_waits = True
            self.changed.notify_all()
        self.wait_until(is_there)
        with self.changed:
            backward.driver_waits = False

    def _end_pass(self, backward: BackwardPass) -> None:
        self._await_backward(backward, lambda: backward.is_finished() and backward.have_landed())
        with self.changed:
            backward.is_over = True
            self._passes.remove(backward)
            self.changed.notify_all()

    # Times: noted by workers, each in a row of its own --------------------------------------------

    def note_span(self, action: Action, start_seconds: float) -> None:
        """Note that an action of the plan has run until now; of several calls the whole span."""
        spans = self._spans[action.worker]
        first = spans[action][0] if action in spans else start_seconds
        spans[action] = (first, perf_counter())

    def timeline(self) -> Timeline:
        """Return when every action of the plan has run."""
        entries = [
            TimelineEntry(
                action=action,
                start_seconds=start - self._start_seconds,
                end_seconds=end - self._start_seconds,
            )
            for spans in self._spans
            for action, (start, end) in spans.items()
        ]
        return Timeline(num_workers=self.route.num_workers, entries=tuple(entries))

    # The end: called by the driver ---------------------------------------------------------------

    def close(self) -> None:
        """End the step: workers go, values are dropped."""
        with self.changed:
            self.is_over = True
            for stage in self._stages:
                stage.is_closed = True
            self._tokens.clear()
            self._parameter_tokens.clear()
            self.changed.notify_all()

    def release(self) -> None:
        """Let go of all calls, when the workers have left: lazy tensors may live on."""
        for call in self.calls:
            call.release()
        self.calls, self._stages, self._units, self._passes = [], [], [], []
        self._double.release()

    def abort(self) -> None:
        """Give the step up: user code has raised. Workers end what they are at."""
        with self.changed:
            self.is_aborted = True
            self.changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Let the step end with an error; called by any thread."""
        with self.changed:
            if self.error is None:
                self.error = error
            self.changed.notify_all()

    def close_output(self, output: Output) -> None:
        """Note that user code has let go of a lazy tensor: called by any thread, at any moment."""
        self._closed_outputs.append(output)

    def _drop_closed(self) -> None:
        while self._closed_outputs:
            output = self._closed_outputs.popleft()
            output.is_open = False
            for part in range(len(output.parts)):
                output.drop_unread(part)

    # Work: called by workers ---------------------------------------------------------------------

    def await_work(self, worker: int) -> Run | None:
        """Return what a worker runs next; None when the step is over."""
        with self.changed:
            while True:
                self._check_alive()
                run = self._next_forward(worker) or self._next_backward(worker)
                if run is not None or self.is_over:
                    return run
                self.changed.wait()

    def _next_forward(self, worker: int) -> ForwardRun | None:
        while self._next_stage[worker] < len(self._stages):
            stage = self._stages[self._next_stage[worker]]
            if not stage.calls and not stage.is_closed:
                return None
            self._next_stage[worker] += 1
            parts = [part for part, owner in enumerate(stage.workers) if owner == worker]
            if stage.calls and parts:
                return ForwardRun(stage, parts, dict.fromkeys(parts, 0))
        return None

    def _next_backward(self, worker: int) -> BackwardRun | None:
        for backward in reversed(self._passes):
            run = backward.next_run(worker)
            if run is not None:
                return run
        return None

    def next_call(self, run: ForwardRun) -> tuple[Call, int] | None:
        """Return a call of a run that can run now, and for which part; None when all have."""
        with self.changed:
            while True:
                self._check_alive()
                calls, num_parts = run.stage.calls, len(run.parts)
                is_done = run.stage.is_closed
                for offset in range(num_parts):
                    index = (run.present + offset) % num_parts
                    part = run.parts[index]
                    while run.num_run[part] < len(calls):
                        call = calls[run.num_run[part]]
                        if part < len(call.split):
                            break
                        run.num_run[part] += 1
                    else:
                        continue
                    is_done = False
                    if _has_arguments(call, part):
                        run.num_run[part] += 1
                        run.present = index
                        return call, part
                if is_done:
                    return None
                self.changed.wait()

    def keep_results(
        self, call: Call, part: int, leaves: Sequence[Any], structure: TreeSpec, place: Place
    ) -> None:
        """Keep what a call has made for a part, at a place."""
        with self.changed:
            if part == 0:
                call.first_results = (leaves, structure, call.split[0])
                if call.outputs is not None:
                    call.drop_first_tensors()
            if call.outputs is None:
                call.early_results[part] = leaves, place
            else:
                self._keep_parts(call, part, leaves, place)
            assert call.stage is not None
            call.stage.num_left -= 1
            call.num_left -= 1
            if not call.num_left:
                call.check_parameters()
            for source in call.sources:
                if len(source.call.split) == len(call.split):
                    source.count_part_reader(part, -1)
                elif not call.num_left:
                    source.count_reader(-1)
            self.changed.notify_all()

    def _keep_parts(self, call: Call, part: int, leaves: Sequence[Any], place: Place) -> None:
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        assert call.outputs is not None, "its sizes are known"
        if len(tensors) != len(call.outputs):
            raise RuntimeError(
                f"{call.name!r} returned {len(tensors)} tensors for a microbatch, but "
                f"{len(call.outputs)} when it was tried. It must return the same for any rows."
            )
        for output, tensor in zip(call.outputs, tensors, strict=True):
            check_shape(call, output, tensor, part)
            output.parts[part] = Part(tensor.detach(), place)
            output.drop_unread(part)

    def await_gradients(
        self, run: BackwardRun, part: int
    ) -> dict[Output, list[Part | JoinedParts]]:
        """Return what is to be summed up as the gradients of a unit's outputs for a part.

        When it is complete: of user code first, then of the last unit first.
        """
        with self.changed:
            while not run.backward.is_ready(run.unit, part):
                self._check_alive()
                self.changed.wait()
            self._check_alive()
            found = {}
            for call in run.unit.calls:
                for output in call.outputs or ():
                    arrived = output.gradients[part]
                    if arrived:
                        found[output] = [arrived[n] for n in sorted(arrived, reverse=True)]
                        arrived.clear()
            return found

    def end_unit(
        self,
        run: BackwardRun,
        part: int,
        *,
        outputs: dict[Output, Part],
        tensors: dict[tuple[Call, int], Part],
    ) -> None:
        """Take the gradients that a unit gives for a part."""
        unit, backward = run.unit, run.backward
        with self.changed:
            for output, gradient in outputs.items():
                if not backward.takes_part(output.call.unit):
                    continue
                if len(output.call.split) == unit.num_parts:
                    output.gradients[part][unit.number] = gradient
                else:
                    _give_across(output, unit, part, gradient)
            backward.end_part(unit, part, tensors=tensors)
            if not backward.keeps_graph:
                for source in unit.boundaries:
                    if len(source.call.split) == unit.num_parts:
                        source.count_part_reader(part, -1)
            self.changed.notify_all()

    def add_parameter_gradients(
        self, run: BackwardRun, parts: Sequence[int], *gradients: Gradients | FlatGradients
    ) -> None:
        """Take what parts of a unit give to parameters: of blocks, and others. On the host."""
        run.backward.add_sums(run.unit, parts, *gradients)
        with self.changed:
            run.backward.land(run.unit, parts)
            self.changed.notify_all()

    def has_more(self, run: BackwardRun, worker: int) -> bool:
        """Return whether a worker will run another unit of the same stage backward."""
        with self.changed:
            return run.unit.stage is not None and run.backward.has_more(run.unit.stage, worker)

    @property
    def has_failed(self) -> bool:
        return self.error is not None or self.is_aborted

    def _check_alive(self) -> None:
        if self.error is not None or self.is_aborted:
            raise StepAborted


def has_gradients(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def is_constant(leaf: Any) -> bool:
    """Return whether a leaf of a call's results is a tensor, or the same for every batch."""
    return leaf is None or leaf is DELETED or isinstance(leaf, TensorForm | str | torch.dtype)


def _has_arguments(call: Call, part: int) -> bool:
    for source in call.sources:
        if len(source.call.split) == len(call.split):
            if source.parts[part] is None:
                return False
        elif None in source.parts:
            return False
    return True


def _give_across(output: Output, unit: Unit, part: int, gradient: Part) -> None:
    """Give a gradient to an output whose call has other parts than the unit."""
    split, rows = output.call.split, output.form.rows
    if unit.num_parts == 1:  # the unit has the whole batch
        for index, arrived in enumerate(output.gradients):
            if rows is None and index:
                break
            arrived[unit.number] = gradient.cut(
                partial(rows_of, rows=rows, split=split, part=index)
            )
        return
    # The output is of the whole batch, the unit has a part of it.
    unit_split = unit.calls[0].split

    def join(parts: dict[int, Tensor]) -> Tensor:
        tensors = list(parts.values())
        if rows is None:
            return torch.stack(tensors).sum(0) if len(tensors) > 1 else tensors[0]
        whole = tensors[0].new_zeros(output.form.shape_for(output.call.num_rows))
        for index, tensor in parts.items():
            rows_of(whole, rows, unit_split, index).copy_(tensor)
        return whole

    joined = output.gradients[0].setdefault(unit.number, JoinedParts(join))
    assert isinstance(joined, JoinedParts), "a unit gives it in one way"
    joined.parts[part] = gradient


def check_shape(call: Call, output: Output, tensor: Tensor, part: int) -> None:
    """Raise if a call made another shape than when it was tried."""
    rows = call.num_rows if len(call.split) == 1 else call.split[part]
    expected = output.form.shape_for(rows)
    if tensor.shape != expected or tensor.dtype != output.form.dtype:
        raise RuntimeError(
            f"{call.name!r} returned a tensor of shape {tuple(tensor.shape)}, {tensor.dtype}, for "
            f"{rows} rows, where {tuple(expected)}, {output.form.dtype}, was expected from "
            "the first step."
        )


class GivenTensors:
    """Tensors of user code that calls are given: each part is brought to a worker once.

    Thread: the driver notes them, workers take them. Guarded by: `_lock`.
    """

    def __init__(self, step: Step) -> None:
        self._root, self._device = step.root, step.device
        self._lock = threading.Lock()
        self._made: dict[tuple[int, int], Event] = {}  # by identity and version
        self._parts: dict[Any, Part] = {}

    def note(self, leaves: Sequence[Any]) -> None:
        """Note tensors that a call is given now."""
        if self._root.is_host:
            return
        new = [x for x in leaves if isinstance(x, Tensor) and self._is_made_here(x)]
        new = [x for x in new if x.device == self._device and _key_of(x) not in self._made]
        if new:
            made = self._root.mark("tensors of user code")
            assert made is not None, "it is a device"
            self._made |= {_key_of(x): made for x in new}

    def _is_made_here(self, tensor: Tensor) -> bool:
        """Return whether user code has made a tensor: a parameter if it has written into it."""
        return not isinstance(tensor, nn.Parameter) or self._root.was_written(tensor)

    def written(self, parameter: nn.Parameter) -> Part | None:
        """Return the values of a parameter that user code has written into."""
        if self._root.is_host or _key_of(parameter) not in self._made:
            return None
        values = self.part_of(parameter, None, (), 0)
        return values if isinstance(values, Part) else None

    def part_of(self, tensor: Tensor, rows: Rows | None, split: Split, part: int) -> Tensor | Part:
        """Return a part of a tensor; itself where it is on the host, and stays there."""
        made = self._made.get(_key_of(tensor))
        if made is None:
            return rows_of(tensor.detach(), rows, split, part)
        whole = rows is None or len(split) == 1
        key = (_key_of(tensor), None if whole else (rows, split, part))
        with self._lock:
            if key not in self._parts:
                values = rows_of(tensor.detach(), rows, split, part)
                self._parts[key] = Part(values, self._root, made)
            return self._parts[key]


def _key_of(tensor: Tensor) -> tuple[int, int]:
    return id(tensor), 0 if tensor.is_inference() else tensor._version
