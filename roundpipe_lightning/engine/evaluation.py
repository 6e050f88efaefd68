"""Evaluation: user code on the whole batch, forward only, the stack streamed through the workers.

Nothing is split, so values, logs and predictions are exactly those of one device. The calling
thread runs everything; a stack may be called any number of times (generation with a cache does).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from roundpipe_lightning.engine.capture import RUN_HERE, without_phantoms
from roundpipe_lightning.engine.stack import BlockStack
from roundpipe_lightning.engine.stack_run import StackRun
from roundpipe_lightning.engine.trees import map_tensors
from roundpipe_lightning.engine.user_code import Outside, UserCode
from roundpipe_lightning.engine.view import ViewClasses
from roundpipe_lightning.engine.worker import Worker
from roundpipe_lightning.planning.plan import Plan
from roundpipe_lightning.planning.schedule import ActionKey
from roundpipe_lightning.planning.stages import Stage, StageKind


class Evaluation:
    """One call of user code, forward only.

    Args:
        module: The user's module.
        stack: Its blocks, or None.
        plan: Says which blocks run where.
        workers: The workers.
        classes: The classes of views.
        outside: Asked before every torch function outside the blocks, or None.
    """

    def __init__(
        self,
        *,
        module: nn.Module,
        stack: BlockStack | None,
        plan: Plan,
        workers: Sequence[Worker],
        classes: ViewClasses,
        outside: Outside | None = None,
    ) -> None:
        self._stack = stack
        self._plan = plan
        self._workers = workers
        self._classes = classes
        self._stages = [s for s in plan.partition.stages() if s.kind is not StageKind.BACKWARD]
        self._position = 0
        self._activation: AbstractContextManager[Any] | None = None
        self._user = UserCode(
            module=module,
            worker=lambda: self.worker,
            workers=workers,
            stream=None,
            classes=classes,
            outside=outside,
        )
        self._runs: list[StackRun] = []  # the present pass, and those whose values are in use

    @property
    def stage(self) -> Stage:
        """The stage that runs at present."""
        return self._stages[self._position]

    @property
    def worker(self) -> Worker:
        """The worker that runs it."""
        key = ActionKey(self.stage.kind, self.stage.index, 0)
        return self._workers[self._plan.schedule.worker_of(key)]

    def next_turn(self) -> None:
        """Go on with the next stage; nobody has to be waited for."""
        self._go_to(self._position + 1)

    def buffers_written(self) -> None:
        """Accept it: an evaluation is one microbatch."""

    def _go_to(self, position: int) -> None:
        self._deactivate()
        self._position = position
        self._activation = self.worker.device.activate()
        self._activation.__enter__()

    def _deactivate(self) -> None:
        if self._activation is not None:
            self._activation.__exit__(None, None, None)
            self._activation = None

    def run(
        self,
        call: Callable[[Any, Any], Any],
        batch: Any,
        *,
        overrides: Mapping[str, Any],
        stand_ins: Mapping[nn.Module, nn.Module],
    ) -> Any:
        """Run the user's code.

        Args:
            call: Takes the view of the module and the batch, where the code computes.
            batch: On the host.
            overrides: Attributes of the root view.
            stand_ins: Modules that are something else in the view.

        Returns:
            What `call` returned, on the host.
        """
        user = self._user
        try:
            self._go_to(0)
            with self.worker.device.thread_context(), user:
                view = user.open_view(
                    self._stack,
                    called=self._block_called,
                    overrides=overrides,
                    stand_ins=stand_ins,
                )
                here = map_tensors(self.worker.device.upload, batch)
                with user.active():
                    output = call(view, here)
                user.write_buffers_back()
                if self._runs:
                    self._runs[-1].check_finished()
                return map_tensors(self._to_host, without_phantoms(output))
        finally:
            self._deactivate()
            while self._runs:
                self._runs.pop().close()
            user.writes.tell()
            user.close()
            for worker in self._workers:
                worker.clear()

    def _to_host(self, tensor: Tensor) -> Tensor:
        return self._user.owner_of(tensor).download(tensor)

    def _block_called(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self._stack is not None, "a proxy stands for a block of a stack"
        if torch.is_grad_enabled():
            return RUN_HERE
        with self._user.suspended():
            if not self._runs or self._runs[-1].finished:
                self._start_pass(self._stack)
            return self._runs[-1].call(index, args, kwargs)

    def _start_pass(self, stack: BlockStack) -> None:
        self._user.write_buffers_back()
        if self._runs and not self._runs[-1].is_held:
            self._runs.pop().close()
        self._go_to(0)
        self._runs.append(
            StackRun(
                self,
                user=self._user,
                stack=stack,
                partition=self._plan.partition,
                keep_boundaries=False,
            )
        )
        self._user.cut = self._runs[-1].cut
