import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from roundpipe_lightning.emulation.race_checker import ProtocolChecker
from roundpipe_lightning.emulation.server import EmulatedDevice, EmulatedServer
from roundpipe_lightning.emulation.tagged_tensor import untag
from roundpipe_lightning.emulation.timing import EmulatedTiming
from roundpipe_lightning.engine.device.base import Device
from roundpipe_lightning.engine.device.events import Event, HostEvent
from roundpipe_lightning.engine.engine import Engine
from roundpipe_lightning.engine.steps import Step, StepResult, StepsInFlight
from roundpipe_lightning.engine.store.host_store import HostStore, WeightVersions
from roundpipe_lightning.engine.transfer.gradient_downloads import HostSums
from roundpipe_lightning.engine.worker.loaded_blocks import PlacedBuffers
from roundpipe_lightning.engine.worker.turns import Turns
from roundpipe_lightning.planning.schedule.plan import Plan, rotated, turns_of_batch
from roundpipe_lightning.planning.schedule.schedule import Action, Timeline
from roundpipe_lightning.planning.schedule.stages import Partition
from tests.kit.engine import (
    TIMEOUT_SECONDS,
    Regressor,
    cpu_workers,
    engine_of,
    layers_of,
    plan_of,
    regression_batches,
    training_step,
)
from tests.kit.moments import PATIENCE_SECONDS, ObservedBlock, ObservedCondition

NUM_WORKERS = 3
NUM_MICROBATCHES = 2


def let_first_block(module: Regressor, on_backward: Callable[[], None]) -> None:
    """Have somebody called in the backward pass of the first block, the last one to run."""
    first = module.layers[0]
    assert isinstance(first, ObservedBlock)
    first.on_backward = on_backward


def module_and_plan(
    *, dropout: float = 0.0, make_block: Callable[[], nn.Module] | None = None
) -> tuple[Regressor, Plan]:
    module = Regressor(3, make_block=make_block or (lambda: ObservedBlock(dropout)))
    plan = plan_of(
        layers_of(module),
        num_workers=NUM_WORKERS,
        num_microbatches=NUM_MICROBATCHES,
        partition=Partition(forward=(2,), backward=(1, 2)),
    )
    assert len({plan.schedule.workers[0][0].worker, plan.schedule.workers[2][-1].worker}) == 2
    return module, plan


@contextmanager
def opened(module: Regressor, plan: Plan, *, emulated: bool = True) -> Iterator[Engine]:
    with EmulatedServer(plan.num_workers, checker=ProtocolChecker(), poison=True) as server:
        devices = [*server.devices] if emulated else cpu_workers(plan.num_workers)
        with engine_of(module, layers_of(module), plan, devices=devices) as engine:
            yield engine


def begin(
    engine: Engine,
    number: int,
    *,
    call: Any = training_step,
    plan: Plan | None = None,
    backward: bool = True,
) -> Step:
    num_microbatches = NUM_MICROBATCHES if plan is None else plan.num_microbatches
    batches = [(x + number, y) for x, y in regression_batches(num_microbatches)]
    torch.manual_seed(number)
    scales = [0.5] * num_microbatches
    return engine.begin_step(batches, call, loss_scales=scales, backward=backward)


def assert_same(found: StepResult, wanted: StepResult) -> None:
    assert [x.item() for x in found.losses if x is not None] == [
        x.item() for x in wanted.losses if x is not None
    ]
    assert found.gradients.keys() == wanted.gradients.keys()
    for parameter, gradient in wanted.gradients.items():
        assert torch.equal(found.gradients[parameter], gradient)


@pytest.mark.parametrize("emulated", [True, False], ids=["emulated", "cpu"])
def test_a_batch_begins_before_the_backward_pass_of_the_last_one_ends(
    monkeypatch: pytest.MonkeyPatch, *, emulated: bool
) -> None:
    module, plan = module_and_plan()
    threads: list[int] = []
    monkeypatch.setattr(Device, "expect_threads", lambda self, num: threads.append(num))
    begun = threading.Event()
    order: list[str] = []

    def call(view: Any, batch: Any, index: int) -> Any:
        order.append("forward of the next")
        begun.set()
        return view.training_step(batch, index)

    def wait_for_next() -> None:
        assert begun.wait(TIMEOUT_SECONDS), "the next batch did not begin"
        order.append("backward")

    with opened(module, plan, emulated=emulated) as engine:
        wanted = [begin(engine, number).result() for number in range(3)]
        let_first_block(module, wait_for_next)  # only when the next batch has begun
        first = begin(engine, 0)
        losses = first.outputs().losses
        was_over = first.is_over
        second = begin(engine, 1, call=call)
        second.outputs()
        assert first.is_over, "two batches at most"
        third = begin(engine, 2)
        found = [first.result(), second.result(), third.result()]
    assert max(threads) == 2 * NUM_MICROBATCHES
    assert not was_over
    assert losses == first.result().losses
    assert order.index("forward of the next") < order.index("backward")
    for ours, its in zip(found, wanted, strict=True):
        assert_same(ours, its)
        assert len(ours.timeline.entries) == len(its.timeline.entries)


def test_outputs_have_landed_when_they_are_returned() -> None:
    module, plan = module_and_plan()
    with (
        EmulatedServer(NUM_WORKERS, timing=EmulatedTiming(copy_seconds=0.02)) as server,
        engine_of(module, layers_of(module), plan, devices=server.devices) as engine,
    ):
        wanted = begin(engine, 0).result().losses
        assert begin(engine, 0).outputs().losses == wanted
        found = begin(engine, 0, backward=False).result()
        assert (found.losses, found.gradients) == (wanted, {})


def test_sums_of_a_step_that_fails_end_before_its_error_is_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, plan = module_and_plan()
    add_later, landed, summed = HostSums.add_later, threading.Event(), threading.Event()

    def late(self: HostSums, add: Callable[[], None]) -> None:
        def add_then() -> None:
            time.sleep(0.3)
            add()
            summed.set()

        add_later(self, add_then)
        landed.set()

    def fail() -> None:
        assert landed.wait(TIMEOUT_SECONDS)
        raise ValueError("the last block fails")

    with opened(module, plan) as engine:
        begin(engine, 0).result()
        monkeypatch.setattr(HostSums, "add_later", late)
        let_first_block(module, fail)
        with pytest.raises(ValueError, match="the last block fails"):
            begin(engine, 1).result()
        assert summed.is_set()


def test_the_first_batch_of_an_engine_is_waited_for() -> None:
    module, plan = module_and_plan()
    with opened(module, plan) as engine:
        step = begin(engine, 0)
        step.outputs()
        assert step.is_over


class Noisy(ObservedBlock):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * torch.rand_like(x))


@pytest.mark.parametrize("drops_out", [True, False])
def test_a_batch_that_draws_from_what_others_draw_from_is_waited_for(*, drops_out: bool) -> None:
    module, plan = module_and_plan(dropout=0.5, make_block=None if drops_out else Noisy)
    returned = threading.Event()

    def on_backward() -> None:
        assert not drops_out or returned.wait(TIMEOUT_SECONDS)

    with opened(module, plan) as engine:
        returned.set()
        wanted = [begin(engine, number).result() for number in range(2)]
        let_first_block(module, on_backward)
        for number, result in enumerate(wanted):
            returned.clear()
            step = begin(engine, number)
            step.outputs()
            assert step.is_over is not drops_out
            returned.set()
            assert_same(step.result(), result)


def test_a_batch_that_writes_attributes_is_waited_for() -> None:
    module, plan = module_and_plan()

    def call(view: Any, batch: Any, index: int) -> Any:
        view.num_seen = index
        return view.training_step(batch, index)

    with opened(module, plan) as engine:
        begin(engine, 0).result()
        step = begin(engine, 1, call=call)
        step.outputs()
        assert step.is_over
    assert module.num_seen == NUM_MICROBATCHES - 1


class Counting(ObservedBlock):
    num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return super().forward(x)


def test_a_batch_whose_blocks_write_is_waited_for() -> None:
    module, plan = module_and_plan(make_block=Counting)
    with opened(module, plan) as engine:
        begin(engine, 0).result()
        step = begin(engine, 1)
        step.outputs()
        assert step.is_over


def test_a_buffer_may_be_written_while_its_upload_is_under_way() -> None:
    """Another microbatch writes the buffers of its forward pass to the host at any time."""
    with EmulatedServer(1, checker=ProtocolChecker()) as server:
        device, buffer = server.devices[0], torch.zeros(())
        upload = device.upload

        def write_meanwhile(tensor: Tensor, wait: Any = None) -> Tensor:
            def write_and_wait(event: Event) -> None:
                buffer.add_(1)  # raises a ProtocolError where the upload reads this memory
                device.await_event(event)

            return upload(tensor, write_and_wait)

        with device.thread_context(), patch.object(device, "upload", write_meanwhile):
            placed = PlacedBuffers(device, keep_writes=False).place(buffer)
            assert (placed.item(), buffer.item()) == (0, 1)


def test_numbers_drawn_while_a_batch_is_in_flight_are_those_of_the_main_thread() -> None:
    module, plan = module_and_plan()
    drawn, ran = threading.Event(), threading.Event()

    def on_backward() -> None:
        ran.set()
        assert drawn.wait(TIMEOUT_SECONDS)

    with opened(module, plan) as engine:
        begin(engine, 0).result()
        torch.manual_seed(7)
        wanted = torch.rand(3)
        let_first_block(module, on_backward)
        step = begin(engine, 1)
        step.outputs()
        torch.manual_seed(7)
        assert ran.wait(TIMEOUT_SECONDS)
        found = torch.rand(3)  # in the middle of a block's backward pass
        drawn.set()
        after = torch.default_generator.get_state()
        step.result()
        assert torch.equal(torch.default_generator.get_state(), after)
    assert torch.equal(found, wanted)


def test_an_error_of_a_batch_in_flight_is_raised_by_who_waits_next() -> None:
    module, plan = module_and_plan()
    returned = threading.Event()

    def fail() -> None:
        assert returned.wait(TIMEOUT_SECONDS)
        raise ValueError("backward has failed")

    with opened(module, plan) as engine:
        wanted = begin(engine, 0).result()
        let_first_block(module, fail)
        begin(engine, 1).outputs()
        returned.set()
        with pytest.raises(ValueError, match="backward has failed") as caught:
            begin(engine, 2).outputs()
        assert "BACKWARD stage 1" in str(caught.value.__notes__)  # type: ignore[attr-defined]
        let_first_block(module, lambda: None)
        assert_same(begin(engine, 0).result(), wanted)


@pytest.mark.parametrize("emulated", [True, False], ids=["emulated", "cpu"])
@pytest.mark.parametrize("when", ["before", "while"])
def test_an_error_before_the_next_batch_is_known_ends_that_too(
    monkeypatch: pytest.MonkeyPatch, when: str, *, emulated: bool
) -> None:
    module, plan = module_and_plan()
    may_fail = threading.Event()
    running: list[Step] = []
    begin_step = StepsInFlight.begin

    def begun(steps: StepsInFlight, step: Step, runs: Any) -> None:
        if running:  # the next one is ready, and nobody knows of it yet
            may_fail.set()
            assert running[0].wait(TIMEOUT_SECONDS / 2)
        running.append(step)
        begin_step(steps, step, runs)

    def fail() -> None:
        assert may_fail.wait(TIMEOUT_SECONDS)
        raise ValueError("backward has failed")

    def progress(turns: Turns) -> str:
        raise AssertionError("the watchdog has ended the step")

    with opened(module, plan, emulated=emulated) as engine:
        wanted = begin(engine, 0).result()
        monkeypatch.setattr(StepsInFlight, "begin", begun)
        monkeypatch.setattr(Turns, "progress", progress)
        let_first_block(module, fail)
        first = begin(engine, 1)
        first.outputs()
        if when == "before":
            may_fail.set()
            assert running[0].wait(TIMEOUT_SECONDS / 2)
        with pytest.raises(ValueError, match="backward has failed") as caught:
            begin(engine, 2).outputs()
        notes = str(caught.value.__notes__)  # type: ignore[attr-defined]
        assert "BACKWARD stage 1" in notes
        assert first.was_given_up
        monkeypatch.undo()
        let_first_block(module, lambda: None)
        assert_same(begin(engine, 0).result(), wanted)


def test_an_error_of_the_next_batch_ends_both() -> None:
    module, plan = module_and_plan()

    def call(view: Any, batch: Any, index: int) -> Any:
        raise ValueError("forward has failed")

    with opened(module, plan) as engine:
        wanted = begin(engine, 0).result()
        begin(engine, 1).outputs()
        with pytest.raises(ValueError, match="forward has failed"):
            begin(engine, 2, call=call).outputs()
        assert_same(begin(engine, 0).result(), wanted)


def test_an_engine_closes_while_a_batch_is_in_flight() -> None:
    module, plan = module_and_plan()
    before = set(threading.enumerate())
    with opened(module, plan) as engine:
        begin(engine, 0).result()
        step = begin(engine, 1)
        step.outputs()
        engine.close()
        left = {thread.name for thread in set(threading.enumerate()) - before}
        assert left <= {"clock of the emulated server"}


def test_an_evaluation_waits_for_a_batch_in_flight() -> None:
    module, plan = module_and_plan()
    with opened(module, plan) as engine:
        begin(engine, 0).result()
        step = begin(engine, 1)
        step.outputs()
        engine.evaluate(lambda view, x: view(x), regression_batches(1)[0][0])
        assert step.is_over


@dataclass(frozen=True, kw_only=True)
class Layout:
    num_workers: int
    num_microbatches: int = 2
    team_size: int = 1
    num_rounds: int = 1

    def plan(self, module: Regressor) -> Plan:
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


def stream(engine: Engine, plan: Plan, numbers: Sequence[int]) -> list[StepResult]:
    steps = []
    for number in numbers:
        steps.append(begin(engine, number, plan=plan))
        steps[-1].outputs()
    return [step.result() for step in steps]


def actions_of(thing: Timeline | Plan) -> frozenset[Action]:
    if isinstance(thing, Plan):
        return frozenset(thing.schedule)
    return frozenset(entry.action for entry in thing.entries)


@pytest.mark.suite(
    "teams and rounds-emulated",
    "two rounds-cpu",
    "more workers than stages-cpu",
    "one round-emulated",
)
@pytest.mark.parametrize("emulated", [True, False], ids=["emulated", "cpu"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_batches_in_flight_go_round_the_workers(name: str, *, emulated: bool) -> None:
    module = Regressor(3)
    plan = LAYOUTS[name].plan(module)
    turns, numbers = turns_of_batch(plan), range(3 if emulated else 5)
    with opened(module, plan, emulated=emulated) as engine:
        wanted = [begin(engine, number, plan=plan).result() for number in numbers]
        found = stream(engine, plan, numbers)
        again = stream(engine, plan, range(2))  # the first one is alone
    for number, (ours, alone) in enumerate(zip(found, wanted, strict=True)):
        assert actions_of(alone.timeline) == actions_of(plan)
        assert actions_of(ours.timeline) == actions_of(rotated(plan, number * turns))
        assert_same(ours, alone)
    assert actions_of(again[0].timeline) == actions_of(plan)
    assert actions_of(again[1].timeline) == actions_of(rotated(plan, turns))


def test_a_stream_needs_no_more_device_memory_from_its_second_batch_on() -> None:
    module = Regressor(3)
    plan = LAYOUTS["one round"].plan(module)
    with opened(module, plan) as engine:
        sizes = set()
        for number in range(3):
            stream(engine, plan, range(number, number + 4))
            workers = [worker.transfers for worker in engine.workers]
            held = tuple(one.num_bytes for one in workers if one is not None)
            sizes.add(held)
    assert len(sizes) == 1
    assert len({*held}) == 1, "every worker may run the largest stage"


def test_where_blocks_stay_on_their_workers_batches_begin_with_the_first() -> None:
    module = Regressor(3)
    plan = replace(LAYOUTS["one round"].plan(module), resident=((0,), (1,), ()))
    with opened(module, plan) as engine:
        begin(engine, 0, plan=plan).outputs()
        for result in stream(engine, plan, range(3)):
            assert actions_of(result.timeline) == actions_of(plan)


def test_an_error_names_the_worker_that_has_run_it() -> None:
    module = Regressor(3)
    plan = LAYOUTS["one round"].plan(module)
    first = rotated(plan, turns_of_batch(plan)).schedule

    def fail(view: Any, batch: Any, index: int) -> Any:
        raise ValueError("no such batch")

    with opened(module, plan) as engine:
        begin(engine, 0, plan=plan).result()
        begin(engine, 1, plan=plan).outputs()
        with pytest.raises(ValueError, match="no such batch") as caught:
            begin(engine, 2, plan=plan, call=fail).result()
        [action] = [a for a in first if str(a.key) == "F0.0"]
        assert action.worker != 0
        place = f"worker {action.worker} (emulated:{action.worker})"
        assert place in "".join(getattr(caught.value, "__notes__", [place]))
        assert actions_of(begin(engine, 3, plan=plan).result().timeline) == actions_of(plan)


def test_a_batch_of_another_size_goes_on_round_the_workers() -> None:
    module = Regressor(3)
    plan, layers = LAYOUTS["one round"].plan(module), layers_of(module)
    small = plan_of(layers, num_workers=3, num_microbatches=1, partition=plan.partition)
    with opened(module, plan, emulated=False) as engine:
        begin(engine, 0, plan=plan).result()
        begin(engine, 1, plan=plan).outputs()
        pending = engine.begin_step(
            regression_batches(1), training_step, loss_scales=[1.0], plan=small
        )
        pending.outputs()
        last = begin(engine, 2, plan=plan)
        found = [step.result().timeline for step in (pending, last)]
    turns = turns_of_batch(plan)
    assert actions_of(found[0]) == actions_of(rotated(small, turns))
    assert actions_of(found[1]) == actions_of(rotated(plan, turns + turns_of_batch(small)))


def test_slots_are_overwritten_when_they_were_read() -> None:
    module, plan = module_and_plan()

    def call(view: Any, batch: Any) -> None:
        view.training_step(batch, 0)  # nothing is downloaded that the host would wait for

    with opened(module, plan) as engine, torch.no_grad():
        for batch in regression_batches(4):
            engine.evaluate(call, batch)


def test_a_step_with_other_values_waits_where_trained_blocks_stay() -> None:
    for resident in ((), ((0,), (), ())):
        module, plan = module_and_plan()
        with opened(module, replace(plan, resident=resident)) as engine:
            wanted = begin(engine, 0).result()
            first = begin(engine, 1)
            first.outputs()
            engine.store.versions = WeightVersions(previous=False)
            second = begin(engine, 0)
            if resident:
                assert first.is_over
            found = second.result()
            assert found.losses == wanted.losses


class _LateDevice(EmulatedDevice):
    """Has made what was launched on it when the test says so."""

    def __init__(self) -> None:
        super().__init__(0)
        self.marks: list[HostEvent] = []
        self.error: Exception | None = None

    def upload(self, tensor: Tensor, wait: object = None) -> Tensor:
        if self.error is not None:
            raise self.error
        return super().upload(tensor)

    def mark_event(self, name: str) -> Event:
        self.marks.append(HostEvent(name))
        return self.marks[-1]


def test_a_block_without_a_plan_is_read_until_its_copy_has_been_made() -> None:
    """An accelerator's copy is only launched when `upload_block` returns."""
    module, device = Regressor(2), _LateDevice()
    block = next(iter(module.layers))
    store = HostStore(module, list(module.layers))
    versions, observed = store.versions, ObservedCondition()
    versions._changed = observed
    values = store.upload_block(block, device)
    [copied] = device.marks
    updater = threading.Thread(target=versions.switch)  # to write into the parameters then
    updater.start()
    assert observed.waits.acquire(timeout=PATIENCE_SECONDS)
    assert updater.is_alive()
    copied.set()
    updater.join(PATIENCE_SECONDS)
    assert not updater.is_alive()
    assert all(torch.equal(untag(value), p) for p, value in values.items())


def test_a_block_that_could_not_be_copied_is_not_read_for_good() -> None:
    module, device = Regressor(2), _LateDevice()
    store = HostStore(module, list(module.layers))
    device.error = RuntimeError("out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        store.upload_block(next(iter(module.layers)), device)
    for mark in device.marks:
        mark.set()
    store.versions.switch()  # returns
