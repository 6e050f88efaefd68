"""Steps whose user code runs once: `training_step` on the whole batch, in the Trainer's thread.

```
Trainer        training_step ─▶ loss ─▶ backward ─▶ post_backward
step           open ───────────────────────────────────── closed
workers          forward passes of microbatches    backward passes
```

The step is open from `training_step` to the end of its backward pass: workers run it in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities.types import STEP_OUTPUT

from roundpipe_lightning.engine.chain.chain import Chain, Link, following_blocks
from roundpipe_lightning.engine.driver.draws import mix
from roundpipe_lightning.engine.driver.driver import Driver
from roundpipe_lightning.engine.driver.lazy import gathered
from roundpipe_lightning.engine.driver.route import Route
from roundpipe_lightning.engine.driver.snapshot import Snapshot
from roundpipe_lightning.engine.driver.step import Step
from roundpipe_lightning.engine.one_step import OneStepEngine
from roundpipe_lightning.errors import BatchError
from roundpipe_lightning.models.batches import batch_size_of
from roundpipe_lightning.planning.report.step_record import WorkerState
from roundpipe_lightning.planning.schedule.schedule import Timeline
from roundpipe_lightning.strategy import compat
from roundpipe_lightning.strategy.planning.inputs import Planned, num_values
from roundpipe_lightning.strategy.runtime import PipelineRuntime
from roundpipe_lightning.strategy.step import InFlightBatch


class OneStepRuntime(PipelineRuntime):
    """Runs training steps and evaluations by the driver, on CPU workers."""

    _is_plain = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._resources = ExitStack()
        self._driver: Driver | None = None
        self._present: AbstractContextManager[Step] | None = None
        self._finish: Callable[[], None] = lambda: None

    def close(self) -> None:
        self.end_step(failed=True)
        super().close()
        self._resources.close()
        self._driver = None

    @property
    def worker_states(self) -> list[WorkerState]:
        return []

    def _open_driver(self) -> Driver:
        if self._driver is None:
            engine = OneStepEngine(
                self._module,
                self.blocks,
                devices=self._devices,
                trusts_rows=self._options.trust_rows,
                project=self._fusion,
            )
            with torch.inference_mode(mode=False):  # else the parameters could not be trained
                self._driver = self._resources.enter_context(engine).driver
        return self._driver

    # A training batch ----------------------------------------------------------------------------

    def training_step(self, batch: Any, *arguments: Any) -> STEP_OUTPUT:
        """Run `training_step` on the batch; its loss is run backward by Lightning, as ever."""
        self.end_step(failed=True)  # one that nobody has run backward
        if not self._module.automatic_optimization:
            return self._manual_step(batch, *arguments)
        planned = self._plan_for_batch(batch, arguments)
        step = self._begin(self._route_of(planned))
        try:
            output: STEP_OUTPUT = self._module.training_step(batch, *arguments)
            compat.check_output(output)
            output = self._materialized(output)
        except BaseException as error:
            self.end_step(error)
            raise
        self._finish = partial(self._step_ended, step, planned, num_values(batch))
        if output is None or compat.skips_backward(self._module.trainer):
            self.end_step()
        return output

    def _materialized(self, output: Any) -> Any:
        """Return what user code has returned with logits in place of lazy ones."""
        return output if self._fusion is None else self._fusion.materialized(output)

    def _begin(self, route: Route) -> Step:
        seed = mix(torch.initial_seed(), self._batch_number)
        present = self._open_driver().step(route, seed=seed)
        step = present.__enter__()
        self._present = present
        return step

    def end_step(self, error: BaseException | None = None, *, failed: bool = False) -> None:
        """Close the step: its backward pass has run, or never will."""
        present, self._present = self._present, None
        finish, self._finish = self._finish, lambda: None
        if present is None:
            return
        if error is not None:
            present.__exit__(type(error), error, error.__traceback__)
            return
        present.__exit__(None, None, None)
        if not failed:
            finish()

    def _plan_for_batch(self, batch: Any, arguments: Sequence[Any]) -> Planned:
        count = self.planner.num_microbatches
        with suppress(BatchError):  # nobody knows its rows before a block has it
            count = max(1, min(count, batch_size_of(batch)))
        planned = self.planner.planned(batch, arguments, count=count, joined=True)
        event = self.planner.event_of(planned, assumed_rates=self._assumed_rates)
        for listener in self._plan_listeners if event is not None else ():
            assert event is not None
            listener(event)
        if self.last is None or planned.plan.num_microbatches >= self.plan.num_microbatches:
            self.plan = planned.plan
        return planned

    def _route_of(self, planned: Planned) -> Route:
        blocks = [link.block for link in self.planner.chain.links]
        return Route.of_plan(planned.plan, blocks)

    def _step_ended(self, step: Step, planned: Planned, size: int) -> None:
        chain = chain_of(step, self)
        if not chain.links:
            return
        batch = EndedBatch(planned, chain, step.timeline(), size)
        self._batch_ended(batch, has_trained=True)

    # An evaluation -------------------------------------------------------------------------------

    def evaluate(self, step_name: str, batch: Any, *arguments: Any) -> Any:
        """Run an evaluation step on the full batch, on all workers."""
        self.end_step(failed=True)
        num_workers = len(self._devices)
        route = Route.dealt(num_microbatches=num_workers, num_workers=num_workers)
        with self._open_driver().step(route, seed=mix(torch.initial_seed(), 0)):
            output = getattr(self._module, step_name)(batch, *arguments)
            return gathered(self._materialized(output))


class EndedBatch(InFlightBatch):
    """A batch whose backward pass has run."""

    def __init__(self, planned: Planned, chain: Chain, timeline: Timeline, size: int) -> None:
        super().__init__(None, planned=planned, num_values=size, backward_scale=1.0)  # type: ignore[arg-type]
        self.chain, self.timeline = chain, timeline


def chain_of(step: Step, runtime: PipelineRuntime) -> Chain:
    """Return the calls of blocks that a step has made."""
    names = {block: name for name, block in runtime.blocks.items()}
    following = following_blocks(runtime.stacks)
    links: list[Link] = []
    for call in step.calls:
        if not isinstance(call.runner, Snapshot):
            continue
        block = call.runner.block
        links.append(
            Link(
                block=block,
                name=names[block],
                cut=bool(links) and following.get(links[-1].block) is not block,
                gradient=call.context.grad_enabled,
                backward=call.has_gradient,
            )
        )
    return Chain.recorded(links, blocks=list(names))
