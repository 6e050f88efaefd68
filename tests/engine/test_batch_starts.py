"""Batches in flight begin with the worker after the one that ended the batch before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from roundpipe_lightning.emulation.race_checker import ProtocolChecker
from roundpipe_lightning.emulation.server import EmulatedServer
from roundpipe_lightning.engine.device.base import CpuDevice, Device
from roundpipe_lightning.engine.engine import Engine
from roundpipe_lightning.engine.steps import Step, StepResult
from roundpipe_lightning.planning.schedule.plan import Plan
from roundpipe_lightning.planning.schedule.round_robin import rotated, turns_of_batch
from roundpipe_lightning.planning.schedule.schedule import Action
from roundpipe_lightning.planning.schedule.stages import Partition
from roundpipe_lightning.planning.schedule.timeline import Timeline
from tests.kit.engine import (
    Regressor,
    engine_of,
    layers_of,
    plan_of,
    regression_batches,
    training_step,
)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How batches are laid round the workers."""

    num_workers: int
    num_microbatches: int = 2
    team_size: int = 1
    num_rounds: int = 1

    def plan(self, module: Regressor) -> Plan:
        """Return the plan of a module of three blocks."""
        return plan_of(
            layers_of(module),
            num_workers=self.num_workers,
            num_microbatches=self.num_microbatches,
            team_size=self.team_size,
            round_size=self.num_microbatches // self.num_rounds,
            partition=Partition(forward=(1, 1), backward=(1, 1, 1)),
        )


LAYOUTS = {
    "one round": Layout(num_workers=3),
    "teams": Layout(num_workers=4, team_size=2),
    "two rounds": Layout(num_workers=4, num_microbatches=4, num_rounds=2),
    "teams and rounds": Layout(num_workers=4, num_microbatches=4, team_size=2, num_rounds=2),
    "more workers than stages": Layout(num_workers=7),
}


@contextmanager
def opened(module: Regressor, plan: Plan, *, emulated: bool = True) -> Iterator[Engine]:
    """Open an engine on checked emulated devices, or on CPU workers."""
    with EmulatedServer(plan.num_workers, checker=ProtocolChecker(), poison=True) as server:
        devices: list[Device] = [*server.devices]
        if not emulated:
            devices = [CpuDevice(index) for index in range(plan.num_workers)]
        with engine_of(module, layers_of(module), plan, devices=devices) as engine:
            yield engine


def begin(engine: Engine, plan: Plan, number: int, *, call: Any = training_step) -> Step:
    """Begin the step of a batch."""
    batches = [(x + number, y) for x, y in regression_batches(plan.num_microbatches)]
    torch.manual_seed(number)
    return engine.begin_step(batches, call, loss_scales=[0.5] * len(batches))


def stream(engine: Engine, plan: Plan, numbers: Sequence[int]) -> list[StepResult]:
    """Run batches of which each begins while the one before drains."""
    steps = []
    for number in numbers:
        steps.append(begin(engine, plan, number))
        steps[-1].outputs()
    return [step.result() for step in steps]


def actions_of(thing: Timeline | Plan) -> frozenset[Action]:
    """Return what has run, or is to run, on which worker."""
    if isinstance(thing, Plan):
        return frozenset(thing.schedule)
    return frozenset(entry.action for entry in thing.entries)


@pytest.mark.parametrize("emulated", [True, False], ids=["emulated", "cpu"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_batches_in_flight_go_round_the_workers(name: str, *, emulated: bool) -> None:
    module = Regressor(3)
    plan = LAYOUTS[name].plan(module)
    turns = turns_of_batch(plan)
    with opened(module, plan, emulated=emulated) as engine:
        begin(engine, plan, 0).outputs()  # memory is made for two batches in flight
        wanted = [begin(engine, plan, number).result() for number in range(5)]
        found = stream(engine, plan, range(5))
        again = stream(engine, plan, range(2))  # the first one is alone
    for number, (ours, alone) in enumerate(zip(found, wanted, strict=True)):
        assert actions_of(alone.timeline) == actions_of(plan)
        assert actions_of(ours.timeline) == actions_of(rotated(plan, number * turns))
        assert [float(x) for x in ours.losses if x is not None] == [
            float(x) for x in alone.losses if x is not None
        ]
        assert ours.gradients.keys() == alone.gradients.keys()
        for parameter, gradient in alone.gradients.items():
            assert torch.equal(ours.gradients[parameter], gradient)
    assert actions_of(again[0].timeline) == actions_of(plan)
    assert actions_of(again[1].timeline) == actions_of(rotated(plan, turns))


def test_a_stream_needs_no_more_memory_from_its_second_batch_on() -> None:
    module = Regressor(3)
    plan = LAYOUTS["one round"].plan(module)
    with opened(module, plan) as engine:
        sizes = set()
        for number in range(3):
            stream(engine, plan, range(number, number + 4))
            workers = [worker.transfers for worker in engine.workers]
            held = tuple(one.num_bytes for one in workers if one is not None)
            sizes.add((engine.staging_bytes, held))
    assert len(sizes) == 1
    assert len({*held}) == 1, "every worker may run the largest stage"


def test_where_blocks_stay_on_their_workers_batches_begin_with_the_first() -> None:
    module = Regressor(3)
    plan = replace(LAYOUTS["one round"].plan(module), resident=((0,), (1,), ()))
    with opened(module, plan) as engine:
        begin(engine, plan, 0).outputs()
        for result in stream(engine, plan, range(3)):
            assert actions_of(result.timeline) == actions_of(plan)


def test_an_error_names_the_worker_that_has_run_it() -> None:
    module = Regressor(3)
    plan = LAYOUTS["one round"].plan(module)
    first = rotated(plan, turns_of_batch(plan)).schedule

    def fail(view: Any, batch: Any, index: int) -> Any:
        raise ValueError("no such batch")

    with opened(module, plan) as engine:
        begin(engine, plan, 0).result()
        begin(engine, plan, 1).outputs()
        with pytest.raises(ValueError, match="no such batch") as caught:
            begin(engine, plan, 2, call=fail).result()
        [action] = [a for a in first if str(a.key) == "F0.0"]
        assert action.worker != 0
        place = f"worker {action.worker} (emulated:{action.worker})"
        assert place in "".join(getattr(caught.value, "__notes__", [place]))
        assert actions_of(begin(engine, plan, 3).result().timeline) == actions_of(plan)


def test_a_batch_of_another_size_goes_on_round_the_workers() -> None:
    module = Regressor(3)
    plan, layers = LAYOUTS["one round"].plan(module), layers_of(module)
    small = plan_of(layers, num_workers=3, num_microbatches=1, partition=plan.partition)
    with opened(module, plan, emulated=False) as engine:
        begin(engine, plan, 0).result()
        begin(engine, plan, 1).outputs()
        pending = engine.begin_step(
            regression_batches(1), training_step, loss_scales=[1.0], plan=small
        )
        pending.outputs()
        last = begin(engine, plan, 2)
        found = [step.result().timeline for step in (pending, last)]
    turns = turns_of_batch(plan)
    assert actions_of(found[0]) == actions_of(rotated(small, turns))
    assert actions_of(found[1]) == actions_of(rotated(plan, turns + turns_of_batch(small)))
