import gc
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from time import perf_counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from roundpipe_lightning.emulation.server import EmulatedDevice
from roundpipe_lightning.engine.device.events import Event, HostEvent, StepAborted
from roundpipe_lightning.engine.device.host_memory import PAGE_BYTES
from roundpipe_lightning.engine.store.host_store import HostStore
from roundpipe_lightning.engine.transfer.copy_queue import Job, Priority
from roundpipe_lightning.engine.transfer.gradient_reduce import GradientReducer
from roundpipe_lightning.engine.transfer.weight_prefetch import StageRun
from roundpipe_lightning.engine.transfer.worker_transfers import (
    Transfers,
    WaitedFor,
    WorkerRuns,
    WorkerTransfers,
)
from roundpipe_lightning.planning.schedule.stages import Partition, Stage, StageKind
from tests.kit.engine import (
    Block,
    MemoryDevice,
    Regressor,
    Workers,
    differences,
    emulated_workers,
    engine_for,
    mean_step,
    on_any_workers,
    plain_step,
    regression_batches,
)

BLOCKS = 6
WHOLE = Partition(forward=(2, 2), backward=(2, 2, 2))


@pytest.mark.suite("2-resident0", "2-resident2", "1-resident1")
@pytest.mark.parametrize("resident", [(), ((), (0, 3), (5,)), ((0, 1, 2, 3, 4, 5),) * 3])
@pytest.mark.parametrize("num_slots", [1, 2])
def test_slots_and_blocks_that_stay_change_no_bit(num_slots: int, resident: Any) -> None:
    module = Regressor(BLOCKS)
    for parameter in (*module.layers[1].parameters(), *module.layers[3].parameters()):
        parameter.requires_grad_(False)
    batches = regression_batches(4)
    held: dict[str, Any] = {"weight_slots": num_slots, "resident": resident, "partition": WHOLE}
    with engine_for(module, num_microbatches=4, devices=emulated_workers(3), **held) as engine:
        for _ in range(3):
            plain = plain_step(module, batches)
            result = mean_step(engine, batches)
            assert not differences(module, result, plain)
            with torch.no_grad():
                for parameter in module.parameters():
                    if parameter.requires_grad:
                        parameter.sub_(0.1 * result.gradients[parameter])
                value = engine.evaluate(lambda view, b: view.training_step(b, 0), batches[0])
                assert torch.equal(value, module.training_step(batches[0], 0))


def _outside_bytes(module: Regressor) -> int:
    return sum(p.nbytes for part in (module.head, module.tail) for p in part.parameters())


def test_a_frozen_block_that_stays_is_uploaded_once_and_again_when_it_was_written_to() -> None:
    module = Regressor(2)
    module.layers.requires_grad_(False)
    layers: list[Any] = list(module.layers)
    layers[1].norm.requires_grad_(True)
    batches = regression_batches(2)
    held: Any = {"partition": Partition.parse("forward 1 | backward 1 1"), "resident": ((0, 1),)}
    frozen, trained = (
        sum(p.nbytes for p in module.layers.parameters() if p.requires_grad == wanted)
        for wanted in (False, True)
    )
    with engine_for(module, num_microbatches=2, devices=emulated_workers(1), **held) as engine:
        first, second = (mean_step(engine, batches).traffic[0].uploaded_bytes for _ in range(2))
        with torch.no_grad():
            layers[0].inner.weight.add_(1)
        assert not differences(module, mean_step(engine, batches), plain_step(module, batches))
    assert first >= frozen + trained
    moved = second - _outside_bytes(module)
    assert trained <= moved < 2 * trained + 64  # the norm's two vectors, in one copy


def test_one_worker_that_holds_everything_moves_updates_and_gradients_alone() -> None:
    module = Regressor(4)
    batches = regression_batches(3)
    blocks = sum(p.nbytes for p in module.layers.parameters())
    padded = 1.1 * blocks  # every tensor begins at a cache line
    with engine_for(module, resident=((0, 1, 2, 3),), devices=emulated_workers(1)) as engine:
        for _ in range(2):
            [traffic] = mean_step(engine, batches).traffic
            up = traffic.uploaded_bytes - _outside_bytes(module)
            # Of the round: gradients of parameters outside the blocks; of microbatches: the loss.
            down = traffic.downloaded_bytes - _outside_bytes(module) - 3 * 4
            assert blocks <= up == down < padded


def _is_ours(thread: threading.Thread) -> bool:
    return thread.name.startswith("roundpipe") or " queue of worker " in thread.name


def test_tensors_threads_and_bytes_do_not_grow() -> None:
    module = Regressor(3)
    batches, seen, tensors = regression_batches(2), set(), []
    devices = [MemoryDevice(index) for index in range(2)]
    with engine_for(module, num_microbatches=2, devices=devices) as engine:
        for number in range(41):
            mean_step(engine, batches)
            if number % 15 == 10:
                gc.collect()
                tensors.append(sum(issubclass(type(x), Tensor) for x in gc.get_objects()))
                held = sum(w.transfers.num_bytes for w in engine.workers if w.transfers)
                threads = sum(_is_ours(thread) for thread in threading.enumerate())
                assert threads > 2, "of the microbatches, and of the queues"
                seen.add((threads, held))
                assert engine.staging_bytes < 40 * PAGE_BYTES, "what can be in flight at once"
    assert len(seen) == 1
    assert max(tensors) - min(tensors) < 15, "one a step; a thread may hold its last"


class TimedDevice(MemoryDevice):
    """Knows a mark's time only when somebody has waited for it, or for a later one."""

    num_marks = num_awaited = 0

    def mark(self) -> tuple[int, float]:
        self.num_marks += 1
        return self.num_marks, perf_counter()

    def await_mark(self, mark: tuple[int, float]) -> None:
        self.num_awaited = max(self.num_awaited, mark[0])

    def seconds(self, mark: tuple[int, float]) -> float:
        assert mark[0] <= self.num_awaited
        return mark[1] - self._clock_start


def test_times_are_asked_when_they_have_come() -> None:
    module, devices = Regressor(3), [TimedDevice(index) for index in range(2)]
    with engine_for(module, num_microbatches=2, devices=devices) as engine:
        for _ in range(2):
            assert mean_step(engine, regression_batches(2)).timeline.makespan_seconds > 0


def test_memory_is_not_used_again_before_copies_of_a_step_that_was_given_up_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, copied = nn.ModuleList([Many(2)]), HostEvent("the bus")
    store = HostStore(module, list(module))
    everybody = Transfers(store, devices=[MemoryDevice()], names={module[0]: "0"})
    monkeypatch.setattr(MemoryDevice, "copy", lambda *_, **__: copied)
    [transfers] = everybody.transfers
    assert transfers is not None
    pieces = [(torch.empty(8), torch.ones(8))]
    transfers.uploads.submit(Job(name="x", priority=Priority.WEIGHTS, pieces=pieces)).issued()
    end = threading.Thread(target=everybody.end, kwargs={"failed": True, "grace_seconds": 60.0})
    end.start()
    end.join(0.2)
    waits = end.is_alive()
    copied.set()
    end.join(60)
    everybody.close()
    store.close()
    assert waits


class CountedOperations(TorchDispatchMode):
    num = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.num += 1
        return func(*args, **(kwargs or {}))


class Many(nn.Module):
    def __init__(self, num: int) -> None:
        super().__init__()
        self.all = nn.ParameterList(torch.ones(4) for _ in range(num))


@contextmanager
def transfers_of(module: nn.ModuleList) -> Iterator[WorkerTransfers]:
    store, names = HostStore(module, list(module)), {b: str(i) for i, b in enumerate(module)}
    everybody = Transfers(store, devices=[MemoryDevice()], names=names)
    [transfers] = everybody.transfers
    assert transfers is not None
    try:
        yield transfers
        assert everybody.take_error() is None
    finally:
        everybody.close()
        store.close()


def operations_per_stage_run(num_parameters: int) -> int:
    module = nn.ModuleList(Many(num_parameters) for _ in range(3))
    blocks = tuple(module)
    stage = Stage(kind=StageKind.BACKWARD, index=1, blocks=range(3))
    stage_run = StageRun(stage=stage, blocks=blocks, wanted=blocks)
    step = WorkerRuns(runs=(stage_run,) * 6, num_slots=2, resident=())
    reducer = GradientReducer(num_microbatches=6, num_stages=2)
    gradients = [torch.ones(4) for _ in range(num_parameters)]
    with transfers_of(module) as transfers:
        transfers.begin_step(step)
        transfers.weights.begin_ahead()
        counting = ExitStack()
        counted: Any = CountedOperations()  # type: ignore[no-untyped-call]
        for number in range(6):
            if number == 3:  # all that is made once was made
                counting.enter_context(counted)
            entered = transfers.weights.acquire(stage, blocks)
            placed = []
            for block in blocks:
                leaves = entered.regions[block].leaves()
                transfers.await_event(entered.events.pop(block), WaitedFor.WEIGHTS)
                placed.append((entered.regions[block].layout, list(leaves.values())))
                for leaf, gradient in zip(leaves.values(), gradients, strict=True):
                    leaf.grad = gradient
            transfers.gradients.send_run(placed, landed=partial(reducer.add_stage, 1, [number]))
            transfers.weights.release()
        counting.close()
        assert transfers.drain(timeout_seconds=60)
        transfers.end_step()
    for number in range(6):
        reducer.close_microbatch(number)
    assert all(torch.equal(g, torch.full((4,), 6.0)) for g in reducer.sums().values())
    return int(counted.num)


def test_many_small_tensors_cost_what_one_flat_buffer_costs() -> None:
    few, many = operations_per_stage_run(2), operations_per_stage_run(500)
    assert few == many < 100


class FailingDevice(EmulatedDevice):
    num_left = 10**9

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self._mutex = threading.Lock()

    def copy(self, *args: Any, **kwargs: Any) -> Any:
        with self._mutex:  # both queues copy
            self.num_left -= 1
            fails = not self.num_left
        if fails:
            raise RuntimeError("the device fell off the bus")
        return super().copy(*args, **kwargs)


@pytest.mark.parametrize("number", [1, 5, 9])
def test_a_failing_copy_ends_the_step_and_names_the_device(number: int) -> None:
    module = Regressor(3)
    batches, devices = regression_batches(3), [FailingDevice(index) for index in range(2)]
    plain = plain_step(module, batches)
    with engine_for(module, devices=devices, timeout_seconds=60) as engine:
        devices[1].num_left = number
        with pytest.raises(RuntimeError, match="fell off the bus") as error:
            mean_step(engine, batches)
        assert "queue of worker 1 (emulated:1)" in " ".join(getattr(error.value, "__notes__", ()))
        for _ in range(2):
            assert not differences(module, mean_step(engine, batches), plain)


class _PlannedError(Exception):
    """Raised by the test in user code."""


def test_an_error_in_user_code_gives_up_copies_in_flight() -> None:
    module = Regressor(4)
    batches = regression_batches(4)
    plain, stay = plain_step(module, batches), ((0,), (1, 2))

    def fail(view: Any, batch: Any, index: int) -> Any:
        loss = view.training_step(batch, 0)
        if index == 1:
            raise _PlannedError
        return loss

    devices = emulated_workers(2)
    with engine_for(module, num_microbatches=4, resident=stay, devices=devices) as engine:
        for _ in range(3):
            with pytest.raises(_PlannedError):
                mean_step(engine, batches, call=fail)
            assert not differences(module, mean_step(engine, batches), plain)


@on_any_workers
def test_parameters_of_several_uses_are_summed_in_one_order(workers: Workers) -> None:
    class Tied(Regressor):
        def __init__(self) -> None:
            super().__init__(3)
            blocks: list[Any] = list(self.layers)
            blocks[2].inner.weight = blocks[0].inner.weight
            blocks[1].norm.weight = self.tail_norm = nn.Parameter(torch.rand(8))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.tail_norm.sum()

    module = Tied()
    assert isinstance(module.layers[0], Block)
    batches = regression_batches(3)
    plain = plain_step(module, batches)
    with engine_for(module, round_size=1, devices=workers(3)) as engine:
        for _ in range(3):
            assert not differences(module, mean_step(engine, batches), plain)


def test_compute_waits_for_a_block_that_stays_though_an_earlier_run_has_uploaded_it() -> None:
    module = nn.ModuleList([Many(2)])
    [block], stages = module, [Stage(kind=kind, index=0, blocks=range(1)) for kind in StageKind]
    runs = tuple(StageRun(stage=stage, blocks=(block,), wanted=(block,)) for stage in stages)
    with transfers_of(module) as transfers:
        transfers.begin_step(WorkerRuns(runs=runs, num_slots=1, resident=(block,)))
        events: list[Event] = []
        for stage in stages:
            events += transfers.weights.acquire(stage, (block,)).events.values()
            transfers.weights.release()
        assert len(events) == len(stages)
        assert len(set(events)) == 1
        transfers.drain(timeout_seconds=60)
        transfers.end_step()


def test_a_block_is_uploaded_when_it_has_been_updated() -> None:
    module, update = nn.ModuleList([Many(2)]), HostEvent("the update of the block")
    stage = Stage(kind=StageKind.BACKWARD, index=0, blocks=range(1))
    run = StageRun(stage=stage, blocks=tuple(module), wanted=tuple(module))
    with transfers_of(module) as transfers:
        transfers.store.updates = dict.fromkeys(module.parameters(), update)
        transfers.begin_step(WorkerRuns(runs=(run,), num_slots=1, resident=()))
        waits = not transfers.uploads.drain(timeout_seconds=0.2)
        for parameter in module.parameters():
            parameter.data.fill_(3.0)
        update.set()
        acquired = transfers.weights.acquire(stage, run.blocks)
        acquired.events.pop(run.blocks[0]).wait()
        assert waits
        leaves = acquired.regions[run.blocks[0]].leaves().values()
        assert all(leaf.unique().item() == 3.0 for leaf in leaves)
        transfers.end_step()


def test_compute_does_not_go_on_with_an_upload_that_was_given_up() -> None:
    event = HostEvent("weights")
    event.abort()
    with transfers_of(nn.ModuleList([Many(2)])) as transfers, pytest.raises(StepAborted):
        transfers.await_event(event, WaitedFor.WEIGHTS)


def test_uploads_wait_for_what_a_step_that_was_given_up_has_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = nn.ModuleList([Many(2)])
    stage = Stage(kind=StageKind.BACKWARD, index=0, blocks=range(1))
    run = StageRun(stage=stage, blocks=tuple(module), wanted=tuple(module))
    step = WorkerRuns(runs=(run,), num_slots=1, resident=())
    with transfers_of(module) as transfers:
        transfers.begin_step(step)
        transfers.abort()
        transfers.end_step(failed=True)
        computed = HostEvent("the last thing that it has launched")
        monkeypatch.setattr(MemoryDevice, "mark_event", lambda *_: computed)
        transfers.begin_step(step)
        [event] = transfers.weights.acquire(stage, run.blocks).events.values()
        assert not transfers.uploads.drain(timeout_seconds=0.2)
        computed.set()
        event.wait()
        transfers.end_step()


@pytest.mark.parametrize("skips", [False, True], ids=["the next run", "after one without uploads"])
def test_an_upload_that_nobody_waited_for_ends_before_its_slot_is_used_again(skips: bool) -> None:
    """Else it could overwrite what was uploaded there after it, by a more urgent job."""
    kind, second = (StageKind.BACKWARD, 2) if skips else (StageKind.FORWARD, 1)
    module = nn.ModuleList(Many(2) for _ in range(4))
    for number, parameter in enumerate(module.parameters()):
        parameter.data.fill_(number)
    stages = [Stage(kind=kind, index=i, blocks=range(i, i + 1)) for i in range(4)]
    runs = tuple(
        StageRun(
            stage=stage, blocks=(block,), wanted=() if skips and stage.index == 1 else (block,)
        )
        for stage, block in zip(stages, module, strict=True)
    )
    with transfers_of(module) as transfers:
        gate = HostEvent("the bus is busy")
        submit, held = transfers.uploads.submit, [runs[0].blocks[0]]

        def held_up(job: Job) -> Event:
            if held:  # the first block's upload is late, and no compute waits for it
                held.clear()
                job.after = (*job.after, gate)
            return submit(job)

        transfers.uploads.submit = held_up  # type: ignore[method-assign]
        transfers.begin_step(WorkerRuns(runs=runs, num_slots=1, resident=()))
        for _ in range(second):
            transfers.weights.release()
        acquired = transfers.weights.acquire(stages[second], runs[second].blocks)
        event = acquired.events.pop(runs[second].blocks[0])
        were_done = [transfers.uploads.drain(timeout_seconds=0.2), event.is_done]
        gate.set()
        event.wait()
        assert were_done == [False, False]
        [*leaves] = acquired.regions[runs[second].blocks[0]].leaves().values()
        assert [leaf.unique().item() for leaf in leaves] == [2 * second, 2 * second + 1]
        for stage in stages[second + 1 :]:
            transfers.weights.release()
            acquired = transfers.weights.acquire(stage, ())
        transfers.drain(timeout_seconds=60)
        transfers.end_step()
