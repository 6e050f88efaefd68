"""User code on the whole batch: evaluations, and steps that step their optimizers themselves.

In both the calling thread runs everything. Nothing is split, so values, logs and predictions are
exactly those of one device.

An evaluation goes forward only, its blocks streamed through the workers. They may be called in any
order and any number of times (generation with a cache does). A block that the chain has runs in its
stage, on that stage's worker; any other is uploaded for its call to the worker of the stage before.

User code that calls `backward` and `optimizer.step` itself, several times in a step perhaps, cannot
be divided among workers. It runs as it is, on one device, on a view in which

- parameters *are* the masters, on the host: optimizers, clipping, `p.data.clamp_(...)` and moving
  averages of weights find what they expect;
- an operation that meets a master and a tensor on the device gets a copy of the master there, made
  differentiably, so that autograd itself brings the gradient to the master's `.grad`;
- a block's parameters are on the device only while the block runs, and again while its recompute
  and backward run: `torch.utils.checkpoint` keeps a block's inputs and nothing else.

```
forward     upload 0, run 0, drop    upload 1, run 1, drop    loss
backward    upload 1, run 1 again, gradients down, drop    upload 0, run 0 again, ...
```
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from roundpipe_lightning.engine.capture.placeholder import make_proxy, writes_first
from roundpipe_lightning.engine.capture.torch_functions import KEEP_PLACE, QUESTIONS, name_of
from roundpipe_lightning.engine.capture.trees import Copies, Reference, map_tensors, tensors_in
from roundpipe_lightning.engine.capture.view import ViewClasses, ViewMaker, put, write_through
from roundpipe_lightning.engine.chain.chain import BlockStack, Chain
from roundpipe_lightning.engine.chain.values import Given, run_block, works_in_place
from roundpipe_lightning.engine.device.base import CpuDevice, Device
from roundpipe_lightning.engine.device.threads import add_note
from roundpipe_lightning.engine.worker.loaded_blocks import (
    EarlierBuffers,
    PlacedBuffers,
    ResidentBlocks,
)
from roundpipe_lightning.engine.worker.out_of_memory import Shortage, memory_explained
from roundpipe_lightning.engine.worker.user_code import Outside, UserCode, root_view
from roundpipe_lightning.engine.worker.worker import Worker
from roundpipe_lightning.planning.schedule.plan import Plan
from roundpipe_lightning.planning.schedule.schedule import ActionKey
from roundpipe_lightning.planning.schedule.stages import Stage, StageKind


@dataclass(kw_only=True, eq=False)
class Evaluation:
    """One call of user code, forward only; the plan says which calls of the chain run where."""

    module: nn.Module
    stacks: Sequence[BlockStack]
    chain: Chain
    plan: Plan
    workers: Sequence[Worker]
    classes: ViewClasses
    outside: Outside | None = None

    def __post_init__(self) -> None:
        stages = self.plan.partition.stages()
        self._stages = [s for s in stages if s.kind is not StageKind.BACKWARD]
        self._position = 0
        self._block: str | None = None  # the one that runs
        self._activation = ExitStack()
        self._user = UserCode(
            module=self.module,
            worker=lambda: self.worker,
            workers=self.workers,
            stream=None,
            classes=self.classes,
            outside=self.outside,
        )
        self._names = {b: n for s in self.stacks for b, n in zip(s.blocks, s.names, strict=True)}
        self._here: dict[Tensor, Tensor] = {}  # what the present stage has taken from elsewhere

    @property
    def stage(self) -> Stage:
        return self._stages[self._position]

    @property
    def worker(self) -> Worker:
        key = ActionKey(self.stage.kind, self.stage.index, 0)
        return self.workers[self.plan.schedule.worker_of(key)]

    @property
    def place(self) -> str:
        return f"{self.stage.kind.name} stage {self.stage.index} of an evaluation, {self.worker}"

    def _go_to(self, position: int) -> None:
        self._activation.close()
        self._end_forward()
        self._here.clear()
        self._position = position
        self._activation.enter_context(self.worker.device.activate())

    def _end_forward(self) -> None:
        self.worker.end_forward(self.stage)
        self._user.write_buffers_back()

    def evaluate(self, call: Callable[[Any, Any], Any], batch: Any) -> Any:
        """Run the user's code; arguments as of `Engine.evaluate`. Its output is on the host."""
        user = self._user
        try:
            self._go_to(0)
            with (
                self.worker.device.thread_context(),
                memory_explained(self._shortage),
                user,
                user.suspended(),
            ):
                view = user.open_view(self._names, called=self._block_called)
                here = map_tensors(self.worker.device.upload, batch)
                with user.active():
                    output = call(view, here)
                self._end_forward()
                return map_tensors(lambda x: user.owner_of(x).download(x), output)
        except Exception as error:
            code = "code outside the blocks" if self._block is None else f"block {self._block}"
            add_note(error, f"This happened in {code}, {self.place}.")
            raise
        finally:
            self._activation.close()
            self._here.clear()
            user.writes.tell()
            user.close()
            for worker in self.workers:
                worker.clear()

    def _shortage(self) -> Shortage:
        return Shortage(
            self.worker,
            workers=self.workers,
            place=self.place,
            stage=self.stage,
            plan=self.plan,
            boundaries=sum(tensor.nbytes for tensor in self._here.values()),
        )

    def _block_called(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.is_grad_enabled():
            return NotImplemented
        self._user.check_call(block, self._names[block])
        with self._user.suspended():
            position = self.chain.find(block, gradient=None, start=0)
            if position is None:
                with self.worker.streamed(block, StageKind.FORWARD) as resident:
                    result = self._run_block(block, resident, (args, kwargs))
                    resident.end_forward()
                return result
            if position not in self.stage.blocks:
                self._go_to(next(i for i, s in enumerate(self._stages) if position in s.blocks))
            links = self.chain.links[self.stage.blocks.start : self.stage.blocks.stop]
            resident = self.worker.resident(self.stage, [link.block for link in links])
            result = self._run_block(block, resident, (args, kwargs))
            if self.chain.ends_pass(position):
                self.worker.end_forward(self.stage)
                if position + 1 == len(self.chain) and self._position + 1 < len(self._stages):
                    self._go_to(len(self._stages) - 1)
            return result

    def _run_block(self, block: nn.Module, resident: ResidentBlocks, given: Given) -> Any:
        self._block = self._names[block]
        with (
            # Tensors that it keeps in a cache are where it ran the last time.
            self._user.in_block(0, resident, gathers=True),
            resident.written(self._user.writes.within(block)),
        ):
            placed = resident.block(block)
            outcome = run_block(
                placed,
                self._take,
                given=given,
                watched=lambda taken: self._user.resumed(),
                name=self._names[block],
                repeats=False,
                writes=works_in_place(placed),
            )
        for module, attribute, value in resident.take_writes():
            put(self._user.maker.view_of(module), attribute, value)
            self._user.writes.renew(module, attribute, value)
        self._block = None
        tensors = [tensor for tensor, _ in outcome.tensors]
        return outcome.handed_out(lambda slot, in_object: tensors[slot])

    def _take(self, tensor: Any, in_object: bool) -> Any:  # noqa: ARG002, FBT001 - a `Swap`
        device = self.worker.device
        if device.holds(tensor):
            return tensor
        if tensor not in self._here:
            self._here[tensor] = device.bring(tensor, self._user.owner_of(tensor))
        return self._here[tensor]


@dataclass(eq=False)
class ManualStep:
    """One call of user code that steps its optimizers itself."""

    module: nn.Module
    _: KW_ONLY
    blocks: Sequence[nn.Module]  # what is on the device only while it runs
    device: Device
    apart: Iterable[nn.Module] = ()  # as of `Engine`
    # entered while a block runs once more
    watched: Callable[[nn.Module], AbstractContextManager[None]] = lambda block: nullcontext()

    def __post_init__(self) -> None:
        self.meeting = _MeetingPlace(self.module, self.device)
        self.buffers = PlacedBuffers(self.device, keep_writes=True)
        self.proxies: dict[nn.Module, Any] = {}
        self._classes = ViewClasses(self.apart)
        self._maker = self.new_maker(self.buffers.place, write=write_through)

    def new_maker(
        self, buffer: Callable[[Tensor], Tensor], *, write: Callable[[nn.Module, str, Any], None]
    ) -> ViewMaker:
        return ViewMaker(
            parameter=self.meeting.placed, buffer=buffer, classes=self._classes, write=write
        )

    def buffers_watched(self, block: nn.Module) -> AbstractContextManager[EarlierBuffers]:
        views = {m: self._maker.view_of(m) for m in block.modules() if m.__dict__["_buffers"]}
        return self.buffers.watched(views)

    def run_step(self, call: Callable[[Any, Any], Any], batch: Any) -> Any:
        device, maker = self.device, self._maker
        try:
            with device.activate(), device.thread_context():
                self.proxies = {
                    block: make_proxy(
                        block, maker=maker, classes=self._classes, called=self._block_called
                    )
                    for block in self.blocks
                }
                maker.add_stand_ins(self.proxies)
                view = root_view(self.module, maker, lambda: device.torch_device)
                here = map_tensors(device.upload, batch)
                with self.meeting:
                    output = call(view, here)
                self.buffers.write_back(maker.views, owner_of=self._owner_of)
                return map_tensors(lambda x: self._owner_of(x).download(x), output)
        finally:
            device.synchronize()
            maker.close()

    def _owner_of(self, tensor: Tensor) -> Device:
        return self.device if self.meeting.is_here(tensor) else CpuDevice()

    def _block_called(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serve a proxy: run the block, so that nothing but its inputs is kept."""
        if self.meeting.runs_a_block:
            return NotImplemented
        if not torch.is_grad_enabled():
            with self.meeting.in_block():
                return self.proxies[block](*args, **kwargs)
        run = _BlockRun(self, block, (args, kwargs))
        tensors, run.tensors = run.tensors, []
        return checkpoint(run, *tensors, use_reentrant=False)


class _Numbered(Reference):
    def __init__(self, number: int) -> None:
        self.number = number


@dataclass(eq=False)
class _BlockRun:
    """One call of a block; called once for its forward pass, then for every recompute.

    The forward pass gets what the user's code gave. A recompute gets copies of the containers and
    objects among it, as they were at the time of the call, and the buffers of that time.
    """

    step: ManualStep
    block: nn.Module
    forward: Given | None  # what it is given; None when it has run forward

    def __post_init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._given: Given = Copies(self._number).arguments(self.forward or ((), {}))
        self._earlier: EarlierBuffers = []

    def _number(self, tensor: Any, in_object: bool) -> _Numbered:  # noqa: ARG002, FBT001 - a `Swap`
        self.tensors.append(tensor)
        return _Numbered(len(self.tensors) - 1)

    def __call__(self, *tensors: Tensor) -> Any:
        step = self.step
        if self.forward is not None:
            (args, kwargs), self.forward = self.forward, None
            with step.buffers_watched(self.block) as self._earlier, step.meeting.in_block():
                return step.proxies[self.block](*args, **kwargs)
        given = Copies(lambda numbered, in_object: tensors[numbered.number])
        args, kwargs = given.arguments(self._given)
        clones = {  # of what the forward pass has written over, by the buffer
            module.__dict__["_buffers"][name]: kept.clone()
            if step.device.holds(kept)
            else step.device.upload(kept)
            for module, name, kept in self._earlier
            if kept is not None
        }
        maker = step.new_maker(
            lambda b: clones[b] if b in clones else step.buffers.place(b),
            write=lambda module, name, value: None,  # the forward pass has written it
        )
        try:
            # Neither mode is on in the thread, or the function, that runs a backward pass.
            with (
                step.watched(self.block),
                step.device.thread_context(),
                step.meeting,
                step.meeting.in_block(),
            ):
                return maker.view_of(self.block)(*args, **kwargs)
        finally:
            maker.close()


class _MeetingPlace(TorchFunctionMode):
    """Brings the tensors of every operation together, differentiably: on the device, as a rule.

    What is written into stays where it is, and the others come to it. Numbers may stay on the host.
    """

    def __init__(self, module: nn.Module, device: Device) -> None:
        super().__init__()
        self._device = device
        self._masters = frozenset(module.parameters())
        self._copies: dict[tuple[nn.Parameter, bool], Tensor] | None = None

    @property
    def runs_a_block(self) -> bool:
        return self._copies is not None

    @contextmanager
    def in_block(self) -> Iterator[None]:
        """Run a block until the end of the context: its parameters come once, then go."""
        self._copies = {}
        try:
            yield
        finally:
            self._copies = None

    def is_here(self, tensor: Tensor) -> bool:
        return tensor.device == self._device.torch_device

    def placed(self, parameter: nn.Parameter) -> Tensor:
        # Checkpointing of the user's inside a block calls its functions again in a backward pass.
        is_again = torch._C._current_graph_task_id() != -1  # noqa: SLF001
        return parameter if self._copies is None and not is_again else self._copy(parameter)

    def _copy(self, parameter: nn.Parameter) -> Tensor:
        if self._copies is None:
            return self._device.bring(parameter, _HOST)
        key = (parameter, torch.is_grad_enabled())
        if key not in self._copies:
            self._copies[key] = self._device.bring(parameter, _HOST)
        return self._copies[key]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, name_of(func)
        if name not in QUESTIONS and name not in KEEP_PLACE and func not in _ABOUT_GRAPHS:
            args, kwargs = self._together(name, args, kwargs)
        return func(*args, **kwargs)

    def _together(self, name: str, args: Any, kwargs: Any) -> Any:
        places = {self.is_here(tensor) for tensor in tensors_in((args, kwargs))}
        if len(places) < 2:
            return args, kwargs
        writes = args and (name == "__set__" or writes_first(name))
        written = next(iter(tensors_in(args[0] if writes else kwargs.get("out"))), None)
        on_host = written is not None and not self.is_here(written)
        move = Tensor.cpu if on_host else self._to_device
        return map_tensors(move, (args, kwargs))

    def _to_device(self, tensor: Tensor) -> Tensor:
        if self.is_here(tensor):
            return tensor
        if isinstance(tensor, nn.Parameter) and tensor in self._masters:
            return self._copy(tensor)
        is_number = tensor.dim() == 0 and not tensor.requires_grad
        return tensor if is_number else self._device.bring(tensor, _HOST)


_HOST = CpuDevice()

_ABOUT_GRAPHS = (torch.autograd.grad, torch.autograd.backward)
"""Functions that take tensors by their place in a graph, wherever they are."""
