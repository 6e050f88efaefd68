import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from roundpipe_lightning.emulation import timing as emulated_time
from roundpipe_lightning.emulation.race_checker import ProtocolChecker, ProtocolError
from roundpipe_lightning.emulation.server import EmulatedServer, ServedDevice
from roundpipe_lightning.emulation.tagged_tensor import raw_of, tag_of
from roundpipe_lightning.emulation.timing import ComputeQueue, EmulatedTiming, HostClock
from roundpipe_lightning.engine.device.base import CopyQueue, CpuDevice
from roundpipe_lightning.engine.device.events import Event, HostEvent
from roundpipe_lightning.engine.device.threads import Countdown
from roundpipe_lightning.engine.transfer.copy_queue import Job, Priority, TransferQueue
from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.planning.schedule.stages import Partition
from tests.kit.engine import (
    Block,
    Regressor,
    check_parity,
    emulated_workers,
    engine_for,
    mean_step,
    regression_batches,
)
from tests.kit.moments import with_gradient

UP, DOWN = CopyQueue.UPLOAD, CopyQueue.DOWNLOAD


def _timing(**given: float) -> EmulatedTiming:
    return EmulatedTiming(
        **{"upload_bytes_per_second": 4000.0, "download_bytes_per_second": 2000.0, **given}  # type: ignore[arg-type]
    )


class Now:
    seconds = 0.0

    def perf_counter(self) -> float:
        return self.seconds


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Now:
    clock = Now()
    monkeypatch.setattr(emulated_time, "time", clock)
    return clock


@contextmanager
def _one_device(**options: Any) -> Iterator[ServedDevice]:
    with EmulatedServer(1, **options) as server:
        yield server.devices[0]


def _buffer(device: ServedDevice, numbers: int) -> Tensor:
    flat = device.allocate(4 * numbers)
    device.synchronize()  # compute launched before may use its memory until then
    return flat.view(torch.float32)


def test_copies_take_the_time_of_their_bytes_and_keep_their_order() -> None:
    with _one_device(timing=_timing()) as device:
        slot, host = _buffer(device, 20), torch.zeros(20)
        begin = time.perf_counter()
        first = device.copy(slot, torch.ones(20), queue=UP)
        second = device.copy(slot, torch.full((20,), 2.0), queue=UP)
        third = device.copy(host, slot, queue=DOWN, after=[second])
        assert not third.is_done or time.perf_counter() - begin > 0.079  # the host goes on
        third.wait()
        seconds = time.perf_counter() - begin
        assert all(event.is_done for event in (first, second))
        assert host.tolist() == [2.0] * 20
        # 20 ms and 20 ms up, 40 ms down
        assert seconds > 0.079


def test_the_target_holds_nothing_usable_until_the_copy_was_made() -> None:
    with _one_device(timing=_timing(), poison=True) as device:
        slot = _buffer(device, 20)
        assert all(math.isnan(x) or x < -1e30 for x in raw_of(slot).tolist())
        begin = time.perf_counter()
        event = device.copy(slot, torch.ones(20), queue=UP)
        assert raw_of(slot).isnan().all() or time.perf_counter() - begin > 0.019
        event.wait()
        assert raw_of(slot).tolist() == [1.0] * 20


def test_compute_takes_the_given_time_in_order_and_the_host_runs_ahead() -> None:
    with EmulatedServer(2) as server:
        one, two = server.devices
        x = torch.ones(3, requires_grad=True)
        begin = time.perf_counter()
        for device in (one, one, two):
            device.start_clock()
        for device in (one, one, two):
            with device.activate():
                server.work(x, forward_seconds=0.06, backward_seconds=0.02).sum().backward()
        marks = [device.mark_event("end") for device in server.devices]
        is_early = any(mark.is_done for mark in marks)
        assert not is_early or time.perf_counter() - begin > 0.079
        marks[0].wait()
        assert time.perf_counter() - begin > 0.159
        spans = [device.compute.spans for device in server.devices]
        assert [len(row) for row in spans] == [4, 2]
        assert [round(end - start, 6) for start, end in spans[0]] == [0.06, 0.02, 0.06, 0.02]
        assert all(before[1] <= after[0] for row in spans for before, after in pairwise(row))


def test_work_without_gradients_takes_its_time_and_makes_no_graph() -> None:
    with _one_device() as device:
        with device.activate(), torch.no_grad():
            x = device.upload(torch.ones(2)).requires_grad_()
            done = device.server.work(x, forward_seconds=0.01, backward_seconds=0.02)
        assert [end - start for start, end in device.compute.spans] == pytest.approx([0.01])
        assert done.grad_fn is None
        assert done is not x
        assert device.holds(done)


def test_no_time_is_between_two_pieces_of_compute_unless_the_host_is_late(now: Now) -> None:
    compute = ComputeQueue(host=HostClock(), delay=lambda: 0.0)
    compute.launch(2.0)
    compute.launch(1.0)
    now.seconds = 5.0
    compute.launch(1.0)
    assert compute.spans == ((0.0, 2.0), (2.0, 3.0), (5.0, 6.0))


def test_compute_waits_for_a_copy_and_the_next_one_for_compute() -> None:
    with _one_device(timing=_timing()) as device:
        device.start_clock()
        slot, host = _buffer(device, 20), torch.zeros(20)
        uploaded = device.copy(slot, torch.ones(20), queue=UP)
        with device.activate():
            device.await_event(uploaded)
            device.server.launch(0.05)
            computed = device.mark_event("computed")
        device.copy(host, slot, queue=DOWN, after=[computed]).wait()
        end = device.mark() - device._clock_start
        ((start, stop),) = device.compute.spans
        assert start - device._clock_start >= 0.02
        assert stop - start == pytest.approx(0.05)
        assert end > 0.02 + 0.05 + 0.04 - 1e-3


def test_events_behind_host_events_are_waited_for() -> None:
    with _one_device(timing=_timing()) as device:
        slot, job = _buffer(device, 20), HostEvent("job")

        def issue() -> None:
            job.stand_for(device.copy(slot, torch.ones(20), queue=UP))

        timer = threading.Timer(0.02, issue)
        timer.start()
        device.await_event(job)
        assert raw_of(slot).tolist() == [1.0] * 20
        timer.join()


def test_callbacks_come_when_it_has_happened() -> None:
    with _one_device(timing=_timing()) as device:
        called: list[str] = []
        slot, are_called = _buffer(device, 20), Countdown(2)

        def call(name: str) -> None:
            called.append(name)
            are_called.count()

        with device.activate():
            device.server.launch(0.03)
        mark = device.mark_event("computed")
        mark.when_done(lambda: call("mark"))
        copy = device.copy(slot, torch.ones(20), queue=UP, after=[mark])
        copy.when_done(lambda: call("copy"))
        copy.wait()
        assert are_called.wait(60)
        assert called == ["mark", "copy"]
        copy.when_done(lambda: called.append("late"))
        assert called[-1] == "late"


def test_a_copy_that_cannot_be_made_raises_where_it_is_waited_for() -> None:
    with _one_device() as device:
        with pytest.raises(RuntimeError, match="size"):
            device.copy(_buffer(device, 3), torch.ones(4), queue=UP).wait()
        slot = _buffer(device, 4)
        device.copy(slot, torch.ones(4), queue=UP).wait()  # the queue goes on
        assert raw_of(slot).tolist() == [1.0] * 4


def test_copies_share_the_memory_of_the_host() -> None:
    timing = _timing(host_bytes_per_second=4000.0, download_bytes_per_second=4000.0)
    with EmulatedServer(2, timing=timing) as server:
        begin = time.perf_counter()
        events = [
            device.copy(_buffer(device, 40), torch.ones(40), queue=UP) for device in server.devices
        ]
        for event in events:
            event.wait()
        assert time.perf_counter() - begin > 0.079  # 160 bytes each at half the rate


def test_a_late_thread_makes_nothing_late(now: Now) -> None:
    host = HostClock()
    now.seconds = 20.0
    host.woke_for(5.0, since=0.0)
    assert host.now() == 5.0
    now.seconds = 21.0
    assert host.now() == 6.0
    host.woke_for(0.0, since=host.now())
    assert host.now() == 6.0  # waited for something that was over: no time passed
    host.restart()
    assert host.now() == 21.0


def test_without_tags_tensors_are_plain() -> None:
    with _one_device(tags=False) as device:
        host = torch.ones(3)
        here = device.upload(host)
        assert tag_of(here) is None
        assert here.data_ptr() != host.data_ptr()
        assert device.download(here).data_ptr() != here.data_ptr()


def test_random_delays_repeat_with_the_seed() -> None:
    def draws(seed: int, name: str) -> list[float]:
        delay = EmulatedTiming(max_delay_seconds=0.5, seed=seed).delays(name)
        return [delay() for _ in range(5)]

    assert draws(1, "upload") == draws(1, "upload")
    assert draws(1, "upload") != draws(2, "upload")
    assert draws(1, "upload") != draws(1, "download")
    assert all(0 <= x <= 0.5 for x in draws(1, "upload"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"upload_bytes_per_second": 0.0}, "upload_bytes_per_second=0.0 must be positive"),
        ({"host_bytes_per_second": math.nan}, "host_bytes_per_second=nan must be positive"),
        ({"copy_seconds": -1.0}, "copy_seconds=-1.0 must be a time of 0 s or more"),
        ({"max_delay_seconds": math.inf}, "max_delay_seconds=inf must be a time"),
    ],
)
def test_times_that_cannot_be_are_refused(given: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        EmulatedTiming(**given)  # type: ignore[arg-type]


class TestChecker:
    """The checker learns of copies, marks and operations by itself."""

    def test_a_slot_that_is_overwritten_while_it_is_read(self) -> None:
        checker = ProtocolChecker()
        with _one_device(checker=checker) as device:
            slot = _buffer(device, 4)
            with device.thread_context(), device.activate():
                device.await_event(device.copy(slot, torch.ones(4), queue=UP))
                slot * 2
                read = device.mark_event("read")
                device.copy(slot, torch.ones(4), queue=UP, after=[read])
                device.await_event(device.copy(slot, torch.ones(4), queue=UP))
                slot + 1
                with pytest.raises(ProtocolError) as caught:
                    device.copy(slot, torch.ones(4), queue=UP, after=[read])
        assert "buffer 1 of emulated:0: upload in" in str(caught.value)
        assert "aten.add" in str(caught.value)
        assert "the compute queue of emulated:0, reads" in str(caught.value)

    def test_new_memory_that_is_filled_while_compute_may_still_use_it(self) -> None:
        with _one_device(checker=ProtocolChecker()) as device:
            slot = device.allocate(16)
            with pytest.raises(ProtocolError, match="before what had it before"):
                device.copy(slot, torch.ones(16, dtype=torch.uint8), queue=UP)

    def test_weights_that_are_used_before_they_have_come(self) -> None:
        with _one_device(checker=ProtocolChecker()) as device:
            slot = _buffer(device, 4)
            with device.thread_context(), device.activate():
                device.copy(slot, torch.ones(4), queue=UP)
                with pytest.raises(ProtocolError, match="upload queue of emulated:0, writes"):
                    slot * 2

    def test_a_result_that_goes_down_before_it_was_computed(self) -> None:
        with (
            _one_device(checker=ProtocolChecker()) as device,
            device.thread_context(),
            device.activate(),
        ):
            result = device.upload(torch.ones(4)) * 3
            host = torch.zeros(4)
            with pytest.raises(ProtocolError, match=r"aten\.mul"):
                device.copy(host, result, queue=DOWN)
            event = device.copy(host, result, queue=DOWN, after=[device.mark_event("computed")])
            with pytest.raises(ProtocolError, match="the host, reads"):
                host + 1
            event.wait()
            assert (host + 1).tolist() == [4.0] * 4

    def test_a_slot_that_is_overwritten_while_another_device_copies_it(self) -> None:
        """`Tensor.to` lets each of two devices wait for the other, but not the host for them."""
        with EmulatedServer(2, checker=ProtocolChecker()) as server:
            one, two = server.devices
            slot = _buffer(one, 4)
            with one.thread_context(), one.activate():
                one.await_event(one.copy(slot, torch.ones(4), queue=UP))
                there = slot.to(two.torch_device)
                with two.activate():
                    result = there + 1
                with pytest.raises(ProtocolError, match=r"before Tensor\.to in MainThread"):
                    one.copy(slot, torch.ones(4), queue=UP)
                assert result.tolist() == [2.0] * 4

    def test_a_thread_that_names_no_device_works_on_the_first(self) -> None:
        with EmulatedServer(2, checker=ProtocolChecker()) as server:
            one, two = server.devices
            with two.thread_context():
                here, there = one.upload(torch.ones(4)), two.upload(torch.ones(4))
                here * 2
                server.launch(0.25)
                assert len(one.compute.spans) == 1
                with pytest.raises(ProtocolError, match="which has named no device"):
                    there * 2
                with two.activate():
                    there * 2

    def test_an_engine_that_does_not_name_a_worker_s_device(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        module = Regressor(4)
        devices = emulated_workers(2)
        monkeypatch.setattr(devices[1], "activate", nullcontext)
        with (
            engine_for(module, devices=devices) as engine,
            pytest.raises(ProtocolError, match="on emulated:1 is launched in roundpipe-micro"),
        ):
            mean_step(engine, regression_batches(3))

    def test_what_crosses_at_once_waits_for_the_device(self) -> None:
        with EmulatedServer(2, checker=ProtocolChecker()) as server:
            one, two = server.devices
            with one.thread_context(), one.activate():
                x = one.upload(torch.ones(4)) * 3
                y = two.bring(x, one) + 1
                assert y.cpu().tolist() == [4.0] * 4
                assert two.download(y).add(1).tolist() == [5.0] * 4
                assert float(y.sum()) == 16.0
                there = x.to(two.torch_device)
                x.add_(1)  # this device's compute waits for the copy, too
                assert there.tolist() == [3.0] * 4


def test_the_host_waits_for_copies_of_memory_that_is_not_page_locked() -> None:
    with _one_device(timing=_timing()) as device:
        slot, host = _buffer(device, 20), torch.ones(30)
        device.pin(host)
        begin = time.perf_counter()
        is_done = device.copy(slot, host[10:], queue=UP).is_done
        assert not is_done or time.perf_counter() - begin > 0.019
        device.unpin(host)
        assert device.copy(slot, host[10:], queue=UP).is_done


class _KnowsItsThread(Block):
    """Remembers the thread of its forward pass, and looks for it in its backward pass."""

    known = threading.local()
    names: ClassVar[list[str]] = []

    def forward(self, x: Tensor) -> Tensor:
        def look(gradient: Tensor) -> Tensor:
            self.names.append(threading.current_thread().name)
            value: int = self.known.value
            return gradient * value

        self.known.value = 1
        return with_gradient(super().forward(x), look)


_needs_backward = pytest.mark.skipif(
    "handle_torch_function" not in torch.autograd.backward.__code__.co_names,
    reason="needs a PyTorch that hands torch.autograd.backward to classes of tensors",
)


@_needs_backward
def test_a_backward_pass_that_relies_on_the_thread_of_its_forward_pass() -> None:
    """PyTorch runs backward passes of accelerators in threads of its own, one for each device."""
    check_parity(Regressor(2, make_block=_KnowsItsThread), num_workers=2)
    _KnowsItsThread.names.clear()
    devices = emulated_workers(2)
    with pytest.raises(AttributeError, match="value"):
        check_parity(Regressor(2, make_block=_KnowsItsThread), devices=devices, num_workers=2)
    names = {*_KnowsItsThread.names} - {"MainThread"}  # of the plain loop
    assert names
    assert names <= {f"autograd of {device.name}_0" for device in devices}


@_needs_backward
def test_a_backward_pass_that_waits_for_another_one_of_its_device() -> None:
    """It waits for good where both are in one thread, and not where each is in its own."""
    with EmulatedServer(2) as server:
        one, two = server.devices

        def begin(device: ServedDevice, hook: Callable[[Tensor], None]) -> threading.Thread:
            def run() -> None:
                with device.thread_context(), device.activate():
                    x = device.upload(torch.ones(2)).requires_grad_()
                    x.register_hook(hook)
                    torch.autograd.backward((x * 2).sum())

            thread = threading.Thread(target=run)
            thread.start()
            return thread

        found: list[bool] = []
        for device, wanted in ((one, False), (two, True)):
            has_begun, other_ended = threading.Event(), threading.Event()
            seconds = 60.0 if wanted else 0.1

            def wait(_: Tensor, begun: Any = has_begun, limit: float = seconds) -> None:
                begun.set()
                found.append(other_ended.wait(limit))  # noqa: B023 - ends before the next one

            waits = begin(one, wait)
            assert has_begun.wait(60)
            other = begin(device, lambda _: other_ended.set())  # noqa: B023
            waits.join()
            other.join()
            assert found.pop() is wanted


def test_launches_take_the_lock_of_the_interpreter() -> None:
    with EmulatedServer(2, timing=EmulatedTiming(launch_seconds=0.02)) as server:
        begin = time.perf_counter()
        threads = [threading.Thread(target=server.launch, args=(0.0,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert time.perf_counter() - begin > 0.039


@pytest.mark.parametrize("by_to", [True, False])
def test_a_tensor_between_devices_couples_their_compute_only_by_to(*, by_to: bool) -> None:
    """As on CUDA: `Tensor.to` lets each of two devices wait for what the other has launched."""
    with EmulatedServer(2) as server:
        one, two = server.devices
        with one.thread_context():
            with one.activate():
                labels = one.upload(torch.ones(4)).requires_grad_()
            with two.activate():
                begin = time.perf_counter()
                server.launch(0.5)
                there = labels.to(two.torch_device) if by_to else two.bring(labels, one)
            idle = one.compute.mark() <= time.perf_counter()
            assert idle is not by_to or time.perf_counter() - begin > 0.5
            (there * 2).sum().backward()
            assert labels.grad is not None
            assert tag_of(labels.grad) == one.name
            assert labels.grad.tolist() == [2.0] * 4


def test_what_is_brought_from_the_host_may_change_there_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The weights of a manual step, whose code writes into them."""
    with _one_device(timing=EmulatedTiming(upload_bytes_per_second=1e3)) as device:
        copies, copy = [], device.copy

        def noted(*given: Any, **options: Any) -> Any:
            copies.append(copy(*given, **options))
            return copies[-1]

        monkeypatch.setattr(device, "copy", noted)
        # As of an accelerator: its stream waits, the host does not.
        monkeypatch.setattr(device, "await_event", lambda event: None)
        source = torch.ones(10)
        device.pin(source)  # else the copy itself stops the host
        device.bring(source, CpuDevice())
        assert [event.is_done for event in copies] == [True]


@pytest.mark.parametrize("read", [Tensor.item, Tensor.tolist, bool, float])
def test_who_reads_a_number_waits_for_the_device(read: Callable[[Tensor], Any]) -> None:
    with _one_device() as device:
        with device.thread_context(), device.activate():
            number = device.upload(torch.ones(()))
            begin = time.perf_counter()
            device.server.launch(0.2)  # it has begun a moment before, by the server's clock
            assert read(number) == 1
        assert time.perf_counter() - begin > 0.1


def test_a_step_has_ended_when_its_device_is_idle() -> None:
    """Also where nothing of what was computed last goes to the host."""
    with (
        EmulatedServer(1) as server,
        engine_for(Regressor(2), num_microbatches=1, devices=server.devices) as engine,
    ):

        def skip(view: Any, batch: Any, index: int) -> None:
            view(batch[0])
            server.launch(0.3)

        mean_step(engine, regression_batches(1), call=skip)
        assert server.devices[0].compute.spans[-1][1] <= time.perf_counter()


def test_a_copy_begins_after_what_it_waits_for_however_late_its_thread_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with _one_device(timing=EmulatedTiming(copy_seconds=0.01)) as device:
        slot = device.allocate(4)
        monkeypatch.setattr(device.server.host, "now", lambda: time.perf_counter() - 100)
        queue = TransferQueue(device, DOWN, on_failure=lambda *_: None, name="download queue")
        monkeypatch.setattr(device.compute, "_end", computed := time.perf_counter() + 0.02)
        mark = device.mark_event("computed")
        pieces = [(torch.empty(4, dtype=torch.uint8), slot)]
        event = queue.submit(Job(name="x", priority=Priority.WEIGHTS, pieces=pieces, after=[mark]))
        event.wait()
        queue.close()
        landed: Any = event.issued()
        assert landed.await_seconds() >= computed + 0.01


def test_a_timeline_knows_that_actions_wait_for_their_weights() -> None:
    whole, gate, late = Partition(forward=(), backward=(3,)), HostEvent("the bus"), list[Event]()
    with (
        EmulatedServer(1, timing=EmulatedTiming()) as server,
        engine_for(
            Regressor(3), num_microbatches=1, devices=server.devices, partition=whole
        ) as engine,
    ):
        transfers: Any = engine.workers[0].transfers
        submit, await_event = transfers.uploads.submit, transfers.await_event

        def held_up(job: Job) -> Event:
            if "layers.1" in job.name:
                job.after = (*job.after, gate)
                late.append(job.event)
            return submit(job)  # type: ignore[no-any-return]

        def awaited(event: Event, reason: Any) -> None:
            if event in late:  # within the one action: its first block has run
                threading.Timer(0.05, gate.set).start()
            await_event(event, reason)

        transfers.uploads.submit, transfers.await_event = held_up, awaited
        result = mean_step(engine, regression_batches(1))
    (entry,), (traffic,) = result.timeline.entries, result.traffic
    assert entry.waiting_seconds > 0.04
    assert traffic.weights_wait_seconds > 0.04
    span = entry.end_seconds - entry.start_seconds
    assert result.timeline.busy_seconds == pytest.approx(span - entry.waiting_seconds)
