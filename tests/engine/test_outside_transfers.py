import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from roundpipe_lightning.emulation.server import EmulatedServer
from roundpipe_lightning.emulation.tagged_tensor import raw_of, tag_of
from roundpipe_lightning.engine.device.base import CopyQueue, Device
from roundpipe_lightning.engine.device.events import Event, HostEvent
from roundpipe_lightning.engine.device.host_memory import PAGE_BYTES
from roundpipe_lightning.engine.store.block_layout import Layouts
from roundpipe_lightning.engine.store.host_store import HostStore
from roundpipe_lightning.engine.transfer.copy_queue import Job, Priority, TransferQueue
from roundpipe_lightning.engine.transfer.gradient_downloads import HostSums, OutsideSums
from roundpipe_lightning.engine.transfer.gradient_reduce import GradientReducer
from roundpipe_lightning.engine.transfer.weight_prefetch import (
    OutsideUses,
    StageRun,
    WeightPrefetcher,
)
from roundpipe_lightning.engine.transfer.worker_transfers import Transfers
from roundpipe_lightning.planning.schedule.stages import Partition, Stage
from tests.kit.engine import (
    WIDTH,
    Regressor,
    differences,
    emulated_workers,
    engine_for,
    engine_of,
    layers_of,
    mean_step,
    plain_step,
    plan_of,
    regression_batches,
)


class _Queue(TransferQueue):
    """Notes what it is given."""

    def __init__(self, device: Device, queue: CopyQueue = CopyQueue.UPLOAD) -> None:
        super().__init__(device, queue, on_failure=_raise, name=queue.value)
        self.jobs: list[Job] = []

    def submit(self, job: Job) -> Event:
        self.jobs.append(job)
        return super().submit(job)


def _raise(error: BaseException, place: str) -> None:
    raise AssertionError(place) from error


def _wait(event: Event) -> None:
    event.wait()


F0, X0, B1 = Partition(forward=(1,), backward=(1, 1)).stages()


class _Worker:
    """The weights of a module on one worker, and the queue they come by."""

    def __init__(self, device: Device, store: HostStore, uses: OutsideUses) -> None:
        self.queue = _Queue(device)
        self.weights = WeightPrefetcher(
            device,
            layouts=Layouts(store),
            store=store,
            uploads=self.queue,
            uses=uses,
            names={},
            worker=f"worker on {device.name}",
        )
        self.weights.prepare((), num_slots=1)

    @property
    def priorities(self) -> list[Priority]:
        return [job.priority for job in self.queue.jobs]

    def begin(self, *stages: Stage) -> None:
        self.weights.begin_step(_runs(*stages))

    def begin_overlapped(self, *stages: Stage) -> None:
        self.weights.begin_overlapped(_runs(*stages))

    def values(self, parameter: nn.Parameter, *, is_first: bool = False) -> Tensor:
        return self.weights.outside_values(parameter, wait=_wait, is_first=is_first)


def _runs(*stages: Stage) -> list[StageRun]:
    return [StageRun(stage=stage, blocks=(), wanted=()) for stage in stages]


@contextmanager
def workers_with(
    head: nn.Parameter, tail: nn.Parameter, *, updates: dict[nn.Parameter, HostEvent] | None = None
) -> Iterator[tuple[_Worker, _Worker, OutsideUses]]:
    """Give two workers, and what both know of the user's code."""
    module = Regressor(2)
    module.head.weight, module.tail.weight = head, tail
    store, uses = HostStore(module, tuple(module.layers)), OutsideUses()
    store.updates = updates or {}
    with EmulatedServer(2) as server:
        one, other = (_Worker(device, store, uses) for device in server.devices)
        yield one, other, uses
        for worker in (one, other):
            assert worker.queue.drain(timeout_seconds=60)
            worker.queue.close()
    store.close()


@pytest.fixture
def head() -> nn.Parameter:
    return nn.Parameter(torch.full((8, 8), 1.0))


@pytest.fixture
def tail() -> nn.Parameter:
    return nn.Parameter(torch.full((8, 8), 2.0))


def test_what_a_run_has_asked_for_comes_before_it_in_the_next_step(
    head: nn.Parameter, tail: nn.Parameter
) -> None:
    with workers_with(head, tail) as (worker, _, uses):
        weights, jobs = worker.weights, worker.queue.jobs
        for _ in range(2):
            uses.begin_step()
            worker.begin(F0, X0, B1)
            weights.release()
            weights.release()
            values = worker.values(tail)
            assert torch.equal(raw_of(values), tail)
            assert worker.values(tail) is values
            assert weights.outside_bytes == tail.nbytes
            weights.end_step()
            assert weights.outside_bytes == 0
        assert worker.priorities == [Priority.WEIGHTS, Priority.PREFETCH]
        uses.begin_step()
        worker.begin(F0, X0, B1)
        assert len(jobs) == 2  # it is for the run after the next
        weights.release()
        assert len(jobs) == 3
        weights.end_step()
        weights.begin_step(_runs(F0, X0, B1), is_planned=False)  # an evaluation is not a habit
        worker.values(head)
        weights.end_step()
        uses.begin_step()
        worker.begin(F0, X0, B1)
        weights.release()
        assert len(jobs) == 5


def test_what_comes_before_the_blocks_of_the_first_run_goes_before_their_weights(
    head: nn.Parameter, tail: nn.Parameter
) -> None:
    with workers_with(head, tail) as (worker, _, uses):
        for _ in range(2):
            uses.begin_step()
            worker.begin(X0)
            begun = len(worker.queue.jobs)
            worker.weights.begin_ahead()
            worker.values(head, is_first=True)
            worker.values(tail)
            worker.values(head)  # by the next microbatch, after blocks of the first
            worker.weights.end_step()
        assert begun == 3, "that of the head"
        assert worker.priorities[2:] == [Priority.WEIGHTS, Priority.PREFETCH]


def test_what_a_step_in_flight_needs_comes_ahead_and_what_only_the_last_one_used_goes(
    head: nn.Parameter, tail: nn.Parameter
) -> None:
    with workers_with(head, tail) as (worker, other, uses):
        uses.begin_step()
        worker.begin(F0)
        other.begin(X0, B1)
        worker.values(head, is_first=True)
        other.values(tail)
        uses.begin_overlapped()  # by one that begins with the other worker
        worker.begin_overlapped(X0, B1)
        assert len(worker.queue.jobs) == 2, "the tail's, while the first step runs"
        other.begin_overlapped(F0)
        assert len(other.queue.jobs) == 1, "two runs are to come before"
        other.weights.release()
        assert len(other.queue.jobs) == 2
        worker.weights.release()
        worker.values(tail)
        assert len(worker.queue.jobs) == 2
        assert worker.weights.outside_bytes == head.nbytes + tail.nbytes
        for one in (worker, other):
            one.weights.end_first()
        assert worker.weights.outside_bytes == tail.nbytes
        assert other.weights.outside_bytes == head.nbytes, "expected, if not asked for yet"


def test_nobody_uploads_a_parameter_before_its_update(
    head: nn.Parameter, tail: nn.Parameter
) -> None:
    update = HostEvent("update of tail.weight")
    with workers_with(head, tail, updates={tail: update}) as (worker, _, uses):
        uses.record(F0, tail, is_first=True)
        uses.begin_step()
        worker.begin(F0)
        assert [job.after for job in worker.queue.jobs] == [[update]]
        assert not worker.queue.drain(timeout_seconds=0.1)
        with torch.no_grad():
            tail.fill_(3.0)
        update.set()
        assert torch.equal(raw_of(worker.values(tail)), tail)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each download of gradients."""
    sizes: list[int] = []
    submit = TransferQueue.submit

    def noted(self: TransferQueue, job: Job) -> Event:
        if job.priority is Priority.GRADIENTS:
            sizes.append(sum(source.nbytes for _, source in job.pieces))
        return submit(self, job)

    monkeypatch.setattr(TransferQueue, "submit", noted)
    return sizes


@pytest.mark.parametrize(("round_size", "num_rounds"), [(6, 1), (3, 2), (1, 6)])
def test_gradients_of_a_round_are_one_download(
    round_size: int, num_rounds: int, sent: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And labels come to another worker by copies of its own: `Tensor.to` would couple the two."""
    coupled: list[str] = []

    def move(server: EmulatedServer, tensor: Tensor, target: str | None, make: Any) -> Tensor:
        if tag_of(tensor) and target:
            coupled.append(f"{tag_of(tensor)} to {target}")
        result: Tensor = make()
        return result

    monkeypatch.setattr(EmulatedServer, "move", move)
    module, batches = Regressor(3), regression_batches(6)
    plain, devices = plain_step(module, batches), EmulatedServer(2, poison=True).devices
    with engine_for(module, num_microbatches=6, round_size=round_size, devices=devices) as engine:
        for _ in range(2):
            sent.clear()
            result = mean_step(engine, batches)
            if round_size in (1, 6):  # else a device has summed parts
                assert not differences(module, result, plain)
            for part in (module.head, module.tail):
                num_bytes = sum(parameter.nbytes for parameter in part.parameters())
                assert sent.count(num_bytes) == num_rounds
    assert not coupled


class Words(Regressor):
    """Embeds words, and finds them again."""

    def __init__(self, kind: str) -> None:
        super().__init__(2)
        embedding = nn.Embedding(400, WIDTH, sparse=kind == "sparse")
        tail = nn.Linear(WIDTH, 400, bias=False)
        if kind == "tied":
            tail.weight = embedding.weight
        self.add_module("head", embedding)
        self.add_module("tail", tail)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return functional.cross_entropy(self(batch).flatten(0, 1), batch.flatten())


@pytest.mark.suite("tied-2", "untied-4", "sparse-1")
@pytest.mark.parametrize("round_size", [1, 2, 4])
@pytest.mark.parametrize("kind", ["untied", "tied", "sparse"])
def test_of_an_embedding_the_rows_that_were_used_are_sent(
    round_size: int, kind: str, sent: list[int]
) -> None:
    """After a whole gradient of the same parameter. The sums are those of whole ones."""
    module, twin = Words(kind), Words("untied")
    for mine, other in ((twin.head, module.head), (twin.tail, module.tail)):
        mine.load_state_dict(other.state_dict())
    twin.layers.load_state_dict(module.layers.state_dict())
    batches = [torch.randint(400, (2, 5)) for _ in range(4)]
    each: list[dict[str, Any]] = [plain_step(twin, [batch]).gradients for batch in batches]

    def of_rounds(name: str) -> list[Tensor]:
        gradients = [one[name] / 4 for one in each]
        starts = range(0, 4, round_size)
        return [reduce(torch.add, gradients[start : start + round_size]) for start in starts]

    tail, head = of_rounds("tail.weight"), of_rounds("head.weight")
    wanted = {"tail.weight": tail, "head.weight": head}
    if kind == "tied":
        wanted = {"head.weight": [h + e for h, e in zip(tail, head, strict=True)]}
    num_rounds, whole = 4 // round_size, 400 * WIDTH * 4
    rows = 10 * round_size * (8 + 4 * WIDTH)  # their numbers, and values
    devices = emulated_workers(2)
    with engine_for(module, num_microbatches=4, round_size=round_size, devices=devices) as engine:
        for _ in range(2):
            sent.clear()
            found = mean_step(engine, batches).gradients
            for name, rounds in wanted.items():
                gradient = found[module.get_parameter(name)]
                assert gradient.is_sparse == (kind == "sparse" and name == "head.weight")
                assert torch.equal(gradient.to_dense(), reduce(torch.add, rounds))
            assert sent.count(whole) == num_rounds + (kind == "untied")
            assert sent.count(rows) == num_rounds - (kind == "untied")


def test_copies_go_on_while_gradients_are_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    module, batches = Regressor(3), regression_batches(2)
    plain, numbers, second = plain_step(module, batches), itertools.count(), threading.Event()
    submit, add_stage = TransferQueue.submit, GradientReducer.add_stage

    def noted(self: TransferQueue, job: Job) -> Event:
        if job.priority is Priority.GRADIENTS and next(numbers) == 1:
            job.event.when_done(second.set)
        return submit(self, job)

    def late(self: GradientReducer, *given: Any) -> None:
        if given[-1]:  # gradients, that a worker has sent: not before the next ones have landed
            assert second.wait(20)
        add_stage(self, *given)

    monkeypatch.setattr(TransferQueue, "submit", noted)
    monkeypatch.setattr(GradientReducer, "add_stage", late)
    with engine_for(module, num_microbatches=2, devices=emulated_workers(1)) as engine:
        assert not differences(module, mean_step(engine, batches), plain)


def test_compute_waits_where_much_has_landed_that_is_not_summed_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, may_sum = Regressor(12), threading.Event()
    early: list[Callable[[], None]] = []
    add_later = HostSums.add_later

    def late(self: HostSums, add: Callable[[], None]) -> None:
        if not early:
            threading.Timer(0.3, may_sum.set).start()
        if not may_sum.is_set():
            early.append(add)

        def add_then() -> None:
            assert may_sum.wait(20)
            add()

        add_later(self, add_then)

    monkeypatch.setattr(HostSums, "add_later", late)
    stack = layers_of(module)
    plan = plan_of(
        stack,
        num_workers=1,
        num_microbatches=1,
        partition=Partition(forward=(11,), backward=(1,) * 12),
    )
    with engine_of(module, stack, plan, devices=emulated_workers(1)) as engine:
        mean_step(engine, regression_batches(1))
    assert 0 < len(early) < 7


def test_gradients_outside_the_blocks_wait_on_the_host_for_those_before() -> None:
    """A device holds those of two stage runs at most."""
    module, gate = nn.ModuleList([nn.Linear(8, 8)]), HostEvent("the bus is free")
    (weight, bias), (device,) = module.parameters(), EmulatedServer(1).devices
    store, landed = HostStore(module, list(module)), list[nn.Parameter]()
    transfers = Transfers(store, devices=[device], names={module[0]: "0"})
    (one,) = transfers.transfers
    assert one is not None
    submit = one.downloads.submit

    def held_up(job: Job) -> Event:
        job.after = (*job.after, gate)
        return submit(job)

    one.downloads.submit = held_up  # type: ignore[method-assign]

    def send(parameter: nn.Parameter) -> None:
        sums = OutsideSums()
        sums.add({parameter: device.upload(torch.ones_like(parameter))}, {})
        one.gradients.send_outside(sums, landed=landed.extend, can_add_rows=lambda parameter: False)

    send(weight)
    second = threading.Thread(target=send, args=[bias])
    second.start()
    second.join(0.2)
    waits = second.is_alive()
    gate.set()
    second.join(60)
    assert one.drain(60)
    transfers.close()
    store.close()
    assert waits
    assert landed == [weight, bias]


def test_gradients_land_in_memory_that_is_used_again() -> None:
    module, batches = Regressor(3), regression_batches(4)
    with engine_for(module, num_microbatches=4, devices=emulated_workers(2)) as engine:
        kept = mean_step(engine, batches).gradients
        values = {parameter: gradient.clone() for parameter, gradient in kept.items()}
        places = []
        for _ in range(9):
            found = mean_step(engine, batches).gradients
            places.append({gradient.data_ptr() // PAGE_BYTES for gradient in found.values()})
            del found
        held = engine.staging_bytes
        for _ in range(20):  # an evaluation has no gradients
            with torch.no_grad():
                engine.evaluate(lambda view, batch: view.training_step(batch, 0), batches[0])
        assert engine.staging_bytes == held
    used = set().union(*places)
    assert len(used) <= held / PAGE_BYTES
    assert used.isdisjoint(gradient.data_ptr() // PAGE_BYTES for gradient in kept.values())
    assert all(torch.equal(kept[parameter], gradient) for parameter, gradient in values.items())
