"""Evaluation: user code on the whole batch, forward only, its blocks streamed through the workers.

Nothing is split, so values, logs and predictions are exactly those of one device. The calling
thread runs everything; blocks may be called in any order and any number of times (generation with a
cache does). A block that the chain has runs in its stage, on that stage's worker; any other is
uploaded for its call to the worker of the stage before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from roundpipe_lightning.engine.capture.placeholder import RUN_HERE
from roundpipe_lightning.engine.capture.trees import map_tensors
from roundpipe_lightning.engine.capture.view import ViewClasses, put
from roundpipe_lightning.engine.chain.block_outcome import Given, run_block, works_in_place
from roundpipe_lightning.engine.chain.chain import BlockStack, Chain
from roundpipe_lightning.engine.device.threads import add_note
from roundpipe_lightning.engine.worker.loaded_blocks import ResidentBlocks
from roundpipe_lightning.engine.worker.out_of_memory import Shortage, memory_explained
from roundpipe_lightning.engine.worker.user_code import Outside, UserCode
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
            with self.worker.device.thread_context(), user, memory_explained(self._shortage):
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
            return RUN_HERE
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
