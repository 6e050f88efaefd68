import itertools
import random
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from roundpipe_lightning.engine.device.accelerator import CompletionThread
from roundpipe_lightning.engine.device.base import CopyQueue, CpuDevice, Device
from roundpipe_lightning.engine.device.events import DoneEvent, Event, HostEvent, StepAborted
from roundpipe_lightning.engine.device.host_memory import PAGE_BYTES, PinnedPool
from roundpipe_lightning.engine.transfer.copy_queue import (
    MOST_IN_FLIGHT,
    Job,
    Priority,
    TransferQueue,
)
from roundpipe_lightning.engine.transfer.gradient_downloads import HostSums
from roundpipe_lightning.engine.worker.turns import TurnGraph, Turns
from roundpipe_lightning.planning.schedule.plan import Plan
from roundpipe_lightning.planning.schedule.schedule import Action, ActionKey, Schedule, dependencies
from roundpipe_lightning.planning.schedule.stages import Partition
from tests.kit.engine import Regressor, layers_of, plan_of
from tests.kit.moments import PATIENCE_SECONDS

CHUNK = 8


class SteppedDevice(CpuDevice):
    def __init__(self) -> None:
        super().__init__()
        self.given: list[tuple[Tensor, Tensor, HostEvent]] = []
        self.order: list[int] = []
        self.most_in_flight = 0
        self._changed = threading.Condition()
        self._num_made = 0

    def copy(
        self, dst: Tensor, src: Tensor, *, queue: CopyQueue, after: Sequence[Event] = ()
    ) -> Event:
        assert all(event.is_done for event in after)
        event = HostEvent(f"chunk of {src.nbytes} bytes")
        with self._changed:
            self.given.append((dst, src, event))
            self.order.append(int(src[0]))
            self.most_in_flight = max(self.most_in_flight, len(self.given) - self._num_made)
            self._changed.notify_all()
        return event

    def await_given(self, num: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.given) >= num, PATIENCE_SECONDS)

    def make(self, num: int = 1, *, error: Exception | None = None) -> None:
        for _ in range(num):
            self.await_given(self._num_made + 1)
            dst, src, event = self.given[self._num_made]
            with self._changed:
                self._num_made += 1
            if error is not None:
                event.fail(error)
                continue
            dst.copy_(src)
            event.set()


class Failures(list[tuple[BaseException, str]]):
    def note(self, error: BaseException, name: str) -> None:
        self.append((error, name))


@contextmanager
def queue_of(
    device: CpuDevice, failures: Failures, direction: CopyQueue = CopyQueue.UPLOAD
) -> Iterator[TransferQueue]:
    device.chunk_bytes = CHUNK
    queue = TransferQueue(device, direction, on_failure=failures.note, name="upload queue")
    try:
        yield queue
    finally:
        queue.close()


def flat(value: int, num_bytes: int = CHUNK) -> Tensor:
    return torch.full((num_bytes,), value, dtype=torch.uint8)


def job(
    value: int, *, chunks: int = 1, priority: Priority = Priority.WEIGHTS, **given: object
) -> Job:
    source = flat(value, chunks * CHUNK)
    pieces = [(torch.zeros_like(source), source)]
    return Job(name=f"job {value}", priority=priority, pieces=pieces, **given)  # type: ignore[arg-type]


def test_an_urgent_job_overtakes_the_chunks_of_a_long_one() -> None:
    device, failures = SteppedDevice(), Failures()
    with queue_of(device, failures) as queue:
        long, urgent, late = job(1, chunks=5), job(2, priority=Priority.BOUNDARY), job(3)
        target = long.pieces[0][0]
        events = [queue.submit(long)]
        device.await_given(MOST_IN_FLIGHT)
        events += [queue.submit(late), queue.submit(urgent)]
        device.make(7)
        for event in events:
            event.wait()
        assert device.order == [1, 1, 1, 1, 2, 1, 3]
        assert device.most_in_flight == MOST_IN_FLIGHT
        assert queue.num_bytes == 7 * CHUNK
        assert torch.equal(target, flat(1, 5 * CHUNK))
    assert not failures


def test_a_copy_that_waits_for_what_fails_is_not_made() -> None:
    failures, update, target = Failures(), HostEvent("an update"), flat(0)
    with queue_of(CpuDevice(), failures) as queue:
        pieces = [(target, flat(1))]
        queue.submit(Job(name="job", priority=Priority.WEIGHTS, pieces=pieces, after=[update]))
        update.fail(ValueError("out of range"))
        assert queue.drain(timeout_seconds=PATIENCE_SECONDS)
    assert [str(error) for error, _ in failures] == ["out of range"]
    assert not target.any()


def test_a_device_can_wait_for_a_job_whose_last_chunk_was_issued() -> None:
    device, failures = SteppedDevice(), Failures()
    with queue_of(device, failures) as queue:
        event = queue.submit(job(1, chunks=2))
        behind = event.issued()
        assert behind is device.given[1][2]
        assert not event.is_done
        device.make(2)
        event.wait()


def test_a_job_that_waits_holds_up_no_other() -> None:
    device, failures = SteppedDevice(), Failures()
    with queue_of(device, failures) as queue:
        compute = HostEvent("compute")
        first = queue.submit(job(1, priority=Priority.BOUNDARY, after=[compute, HostEvent()]))
        second = queue.submit(job(2, priority=Priority.GRADIENTS, after=[compute]))
        third = queue.submit(job(3, priority=Priority.PREFETCH))
        device.make()
        third.wait()
        compute.set()
        device.make()
        second.wait()
        assert not first.is_done
        assert device.order == [3, 2]


@pytest.mark.parametrize("direction", list(CopyQueue))
def test_what_is_not_page_locked_goes_up_through_the_pool(direction: CopyQueue) -> None:
    device, failures = SteppedDevice(), Failures()
    pool = PinnedPool(device)
    device.staging = pool.take
    with queue_of(device, failures, direction) as queue:
        source = torch.arange(9 * CHUNK - 2, dtype=torch.uint8)
        target = torch.zeros_like(source)
        job = Job(name="weights", priority=Priority.WEIGHTS, pieces=[(target, source)])
        event = queue.submit(job)
        device.make(9)
        event.wait()
        assert torch.equal(target, source)
    is_up = direction is CopyQueue.UPLOAD
    first, stop = source.data_ptr(), source.data_ptr() + source.nbytes
    assert all(is_up != (first <= src.data_ptr() < stop) for _, src, _ in device.given)
    assert not job.pieces  # an event that is kept keeps no tensors
    held = pool.num_bytes
    device.given.clear()
    again = [pool.take(CHUNK) for _ in range(9 * is_up)]
    assert pool.num_bytes == held == len(again) * PAGE_BYTES


def test_what_user_code_has_on_the_host_goes_up_through_the_pool_and_may_change_at_once() -> None:
    device, source = SteppedDevice(), flat(3)
    device.staging = PinnedPool(device).take
    there = Device.upload(device, source, wait=lambda event: None)
    source.zero_()
    device.make()
    assert there.tolist() == [3] * CHUNK


@pytest.mark.parametrize("where", ["copy", "chunk"])
def test_a_failing_copy_is_told_once_and_releases_everybody(where: str) -> None:
    device, failures = SteppedDevice(), Failures()
    are_submitted = threading.Event()

    copy = device.copy

    def held(*args: Any, **options: Any) -> Event:
        assert are_submitted.wait(PATIENCE_SECONDS)
        if where == "copy":
            raise RuntimeError("the bus is gone")
        return copy(*args, **options)

    with queue_of(device, failures) as queue:
        device.copy = held  # type: ignore[method-assign]
        jobs = [job(1, chunks=3), job(2), job(3, after=[HostEvent()])]
        events = [queue.submit(one) for one in jobs]
        are_submitted.set()
        if where == "chunk":
            device.await_given(MOST_IN_FLIGHT)  # after the error no more are given
            device.make(error=RuntimeError("the bus is gone"))
            assert not queue.drain(timeout_seconds=0.1)  # others are in flight
            device.make(MOST_IN_FLIGHT - 1)  # awaited before their memory is used again
        for event in events:
            with pytest.raises(StepAborted):
                event.wait()
        assert queue.drain(timeout_seconds=PATIENCE_SECONDS)
        [(error, name)] = failures
        assert (str(error), name) == ("the bus is gone", "upload queue: job 1")
        if where == "chunk":
            num_before = len(device.given)
            again = queue.submit(job(4))
            device.await_given(num_before + 1)
            device.make()
            again.wait()


def test_an_abort_gives_jobs_up_and_the_queue_serves_the_next_step() -> None:
    device, failures = SteppedDevice(), Failures()
    with queue_of(device, failures) as queue:
        compute = HostEvent("compute")
        events = [queue.submit(job(1, chunks=6)), queue.submit(job(2, after=[compute]))]
        device.await_given(MOST_IN_FLIGHT)
        queue.abort()
        for event in events:
            with pytest.raises(StepAborted):
                event.wait()
        assert not queue.drain(timeout_seconds=0.01)  # chunks are in flight
        device.make(MOST_IN_FLIGHT)
        assert queue.drain(timeout_seconds=PATIENCE_SECONDS)
        compute.set()  # too late: the job is not made any more
        last = queue.submit(job(3))
        device.make()
        last.wait()
        assert device.order == [1] * MOST_IN_FLIGHT + [3]
    assert not failures


@pytest.mark.parametrize("whose", ["a queue", "sums", "completions"])
def test_who_closes_waits_for_what_its_thread_is_at(whose: str) -> None:
    """Memory is given back after that."""
    device, begun, goes_on = SteppedDevice(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        assert goes_on.wait(PATIENCE_SECONDS)

    def copy(*_: object, **__: object) -> Event:
        work()
        return DoneEvent()

    close: Callable[[], None]
    if whose == "a queue":
        device.copy = copy  # type: ignore[method-assign]
        queue = TransferQueue(device, CopyQueue.UPLOAD, on_failure=Failures().note, name="queue")
        queue.submit(job(1))
        close = queue.close
    elif whose == "sums":
        sums = HostSums(PinnedPool(device), on_failure=Failures().note)
        sums.add_later(work)
        close = sums.close
    else:
        completions, event = CompletionThread("completions"), SimpleNamespace(wait=work)
        completions.watch(event, lambda: None)  # type: ignore[arg-type]
        close = completions.close
    assert begun.wait(PATIENCE_SECONDS)
    closing = threading.Thread(target=close)
    closing.start()
    closing.join(0.1)
    waits = closing.is_alive()
    goes_on.set()
    closing.join(PATIENCE_SECONDS)
    assert waits


def test_a_queue_without_a_thread_takes_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for copies that nobody will make."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    device, failures = SteppedDevice(), Failures()
    with queue_of(device, failures) as queue:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            for number in range(2):
                with pytest.raises(RuntimeError, match="new thread"):
                    queue.submit(job(number))
        assert queue.num_jobs == 0
        event = queue.submit(job(3))  # the next one finds a thread
        device.make()
        event.wait()
        assert queue.drain(timeout_seconds=PATIENCE_SECONDS)
        assert device.order == [3]
    assert not failures


def _cuts(draw: st.DrawFn, total: int) -> tuple[int, ...]:
    counts: list[int] = []
    while sum(counts) < total:
        counts.append(draw(st.integers(1, total - sum(counts))))
    return tuple(counts)


@st.composite
def random_plans(draw: st.DrawFn) -> Plan:
    """Return a plan with a random schedule: any order that respects the dependencies."""
    num_blocks, num_microbatches = draw(st.integers(0, 4)), draw(st.integers(1, 4))
    num_workers = draw(st.integers(1, 4))
    fused = draw(st.integers(0, num_blocks))
    rest = num_blocks - fused
    partition = Partition(forward=_cuts(draw, rest), backward=(fused, *_cuts(draw, rest)))
    randomness = random.Random(draw(st.integers(0, 10**6)))
    waiting = [
        ActionKey(stage.kind, stage.index, microbatch)
        for stage in partition.stages()
        for microbatch in range(num_microbatches)
    ]
    done: set[ActionKey] = set()
    rows: list[list[Action]] = [[] for _ in range(num_workers)]
    while waiting:
        ready = [k for k in waiting if done.issuperset(dependencies(k, partition))]
        key = randomness.choice(ready)
        waiting.remove(key)
        done.add(key)
        worker = randomness.randrange(num_workers)
        rows[worker].append(
            Action(kind=key.kind, stage=key.stage, microbatch=key.microbatch, worker=worker)
        )
    return Plan(
        model="random",
        partition=partition,
        num_workers=num_workers,
        num_microbatches=num_microbatches,
        round_size=num_microbatches,
        schedule=Schedule(workers=tuple(map(tuple, rows))),
        block_names=tuple(f"layers.{i}" for i in range(num_blocks)),
    )


class _Log:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.events: list[tuple[str, Action]] = []

    def note(self, what: str, action: Action) -> None:
        with self._lock:
            self.events.append((what, action))


def _walk_all(plan: Plan, turns: Turns, graph: TurnGraph, log: _Log) -> list[threading.Thread]:
    def walk(microbatch: int) -> None:
        for action in graph.paths[microbatch]:
            try:
                turns.begin(action)
            except StepAborted:
                return
            log.note("begin", action)
            log.note("end", action)
            turns.end(action)

    threads = [
        threading.Thread(target=walk, args=(m,), daemon=True) for m in range(plan.num_microbatches)
    ]
    for thread in threads:
        thread.start()
    return threads


@settings(max_examples=60)
@given(random_plans())
def test_random_schedules_run_to_their_end_in_order(plan: Plan) -> None:
    graph = TurnGraph.from_plan(plan)
    turns, log = Turns(graph), _Log()
    for thread in _walk_all(plan, turns, graph, log):
        thread.join(60)
        assert not thread.is_alive(), f"deadlock\n{turns.progress().to_text()}\n{plan}"
    begins = [action for what, action in log.events if what == "begin"]
    assert sorted(map(str, begins)) == sorted(map(str, plan.schedule))
    moment = {(what, action.key): i for i, (what, action) in enumerate(log.events)}
    for worker, actions in enumerate(plan.schedule.workers):
        assert [a for a in begins if a.worker == worker] == list(actions)
        for before, after in itertools.pairwise(actions):
            assert moment["end", before.key] < moment["begin", after.key]
    for action in plan.schedule:
        for dependency in dependencies(action.key, plan.partition):
            assert moment["end", dependency] < moment["begin", action.key]
    assert turns.num_events == 2 * len(begins)


@settings(max_examples=30)
@given(random_plans(), st.integers(0, 20))
def test_an_abort_at_any_moment_releases_everyone(plan: Plan, moment: int) -> None:
    graph = TurnGraph.from_plan(plan)
    turns = Turns(graph)

    class Stopping(_Log):
        def note(self, what: str, action: Action) -> None:
            super().note(what, action)
            if len(self.events) == moment + 1:
                turns.abort()

    if not moment:
        turns.abort()
    for thread in _walk_all(plan, turns, graph, Stopping()):
        thread.join(60)
        assert not thread.is_alive()
    turns.abort()


def _plan() -> Plan:
    return plan_of(layers_of(Regressor(2)), num_workers=2, num_microbatches=2)


def test_a_waiter_waits_until_the_worker_is_free() -> None:
    plan = _plan()
    graph = TurnGraph.from_plan(plan)
    turns = Turns(graph)
    first, second = graph.paths[0][0], graph.paths[1][0]
    turns.begin(first)
    entered = threading.Event()

    def wait() -> None:
        turns.begin(second)
        entered.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert not entered.wait(0.1)
    assert ">F0.0<" in turns.progress().to_text()
    assert re.search(r"worker 0: 0 of 6 done, runs F0\.0 for \d+\.\d s", turns.progress().to_text())
    assert "worker 1: 0 of 4 done, waits to begin F1.0 for F0.0 (worker 0, running)" in (
        turns.progress().to_text()
    )
    turns.end(first)
    assert entered.wait(60)
    thread.join()
    assert "worker 0: 1 of 6 done, runs F0.1" in turns.progress().to_text()
    assert "worker 1: 0 of 4 done, may begin F1.0" in turns.progress().to_text()


def test_a_begin_after_an_abort_raises_at_once() -> None:
    graph = TurnGraph.from_plan(_plan())
    turns = Turns(graph)
    turns.abort()
    for path in graph.paths:
        for action in path:
            with pytest.raises(StepAborted):
                turns.begin(action)  # one that waited would wait for ever
