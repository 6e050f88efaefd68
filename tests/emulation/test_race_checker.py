import gc
import threading
import time
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from roundpipe_lightning.emulation.race_checker import HOST, ProtocolChecker, ProtocolError, Stamp
from roundpipe_lightning.emulation.timing import HostMemory, ServerClock


def _use(
    checker: ProtocolChecker,
    line: str,
    tensor: Tensor,
    *,
    writes: bool,
    after: Sequence[Stamp] = (),
    what: str = "work",
) -> Stamp:
    checker.begin(line, after)
    checker.access(tensor, line=line, writes=writes, what=what)
    return checker.stamp(line)


def test_a_line_orders_its_own_work() -> None:
    checker, slot = ProtocolChecker(), torch.zeros(8)
    for writes in (True, False, True):
        _use(checker, "compute", slot, writes=writes)


@pytest.mark.parametrize(("first", "second"), [(True, False), (False, True), (True, True)])
def test_two_lines_need_an_event_between_them(first: bool, second: bool) -> None:
    checker, slot = ProtocolChecker(), torch.zeros(8)
    checker.name(slot, "slot 1 of worker 0")
    _use(checker, "compute", slot, writes=first, what="attention")
    with pytest.raises(ProtocolError) as caught:
        _use(checker, "upload", slot, writes=second, what="layers.3")
    verbs = ["writes" if flag else "reads" for flag in (first, second)]
    assert str(caught.value) == (
        f"Bytes 0 to 32 of slot 1 of worker 0: layers.3 (upload, {verbs[1]}) may run before "
        f"attention (compute, {verbs[0]}) has ended. No event that compute sets after it is "
        "waited for by upload."
    )


def test_reads_need_no_event() -> None:
    checker, slot = ProtocolChecker(), torch.zeros(8)
    for line in ("compute", "upload", HOST):
        _use(checker, line, slot, writes=False)


def test_an_event_orders_what_came_before_it_and_no_more() -> None:
    checker, slot = ProtocolChecker(), torch.zeros(8)
    stamp = _use(checker, "compute", slot, writes=False)
    _use(checker, "upload", slot, writes=True, after=[stamp])
    other = torch.zeros(8)
    stamp = _use(checker, "compute", other, writes=False)
    _use(checker, "compute", other, writes=False)
    with pytest.raises(ProtocolError):
        _use(checker, "upload", other, writes=True, after=[stamp])


def test_order_is_handed_on_from_line_to_line() -> None:
    checker, slot = ProtocolChecker(), torch.zeros(8)
    uploaded = _use(checker, "upload", slot, writes=True)
    checker.wait("compute", uploaded)
    computed = _use(checker, "compute", torch.zeros(2), writes=True)
    _use(checker, "download", slot, writes=True, after=[computed])


def test_what_the_host_has_waited_for_holds_for_what_it_launches() -> None:
    checker, slot = ProtocolChecker(), torch.zeros(8)
    stamp = _use(checker, "download", slot, writes=True)
    with pytest.raises(ProtocolError):
        _use(checker, HOST, slot, writes=False)
    checker.wait(HOST, stamp)
    _use(checker, HOST, slot, writes=True)
    _use(checker, "upload", slot, writes=False)


def test_ranges_of_one_buffer_are_told_apart() -> None:
    checker, slot = ProtocolChecker(), torch.zeros(16, dtype=torch.uint8)
    _use(checker, "upload", slot[:8], writes=True)
    _use(checker, "compute", slot[8:].view(torch.float32), writes=True)
    with pytest.raises(ProtocolError, match="Bytes 4 to 8 of"):
        _use(checker, "compute", slot[4:12], writes=False)


def test_a_write_after_several_reads_must_come_after_all_of_them() -> None:
    checker, slot = ProtocolChecker(), torch.zeros(8)
    one = _use(checker, "compute of 0", slot, writes=False)
    two = _use(checker, "compute of 1", slot, writes=False)
    with pytest.raises(ProtocolError, match="compute of 1"):
        _use(checker, "upload", slot, writes=True, after=[one])
    _use(checker, "upload", slot, writes=True, after=[one, two])


def test_memory_that_was_freed_is_forgotten() -> None:
    checker = ProtocolChecker()
    for number in range(2000):
        line = f"line {number % 2}"  # the allocator gives the same address again and again
        _use(checker, line, torch.zeros(4), writes=True)
    gc.collect()
    assert len(checker._memories) < 600


@pytest.fixture
def clock() -> Iterator[ServerClock]:
    clock = ServerClock("a clock")
    yield clock
    clock.close()


def test_the_order_is_that_of_the_times_and_close_waits_for_all(clock: ServerClock) -> None:
    called: list[int] = []
    now = time.perf_counter()

    def begin() -> None:  # in the clock's thread, which does nothing else meanwhile
        clock.call_at(now + 0.03, lambda: called.append(3))
        clock.call_at(now + 0.01, lambda: called.append(1))
        clock.call_at(now + 0.02, lambda: called.append(2))
        clock.call_at(now + 0.01, lambda: called.append(11))

    clock.call_at(0.0, begin)
    clock.close()
    assert called == [1, 11, 2, 3]
    assert time.perf_counter() - now >= 0.03


def test_what_is_due_earlier_than_what_it_sleeps_for_wakes_it(clock: ServerClock) -> None:
    is_called = threading.Event()
    far = time.perf_counter() + 0.2
    clock.call_at(far, lambda: None)
    clock.call_at(time.perf_counter(), is_called.set)
    assert is_called.wait(60)
    clock.close()
    assert time.perf_counter() >= far


def test_what_is_called_may_call_and_the_thread_ends_with_the_last(clock: ServerClock) -> None:
    called: list[str] = []
    inside = threading.Event()

    def first() -> None:
        inside.wait()
        called.append("first")
        clock.call_at(0.0, lambda: called.append(threading.current_thread().name))

    clock.call_at(0.0, first)
    threading.Timer(0.01, inside.set).start()
    clock.close()  # while `first` runs
    assert called == ["first", "a clock"]
    clock.call_at(0.0, lambda: called.append("again"))
    clock.close()
    assert called[-1] == "again"
    assert "a clock" not in [thread.name for thread in threading.enumerate()]


def test_no_call_is_lost_when_many_threads_call(clock: ServerClock) -> None:
    called: list[int] = []

    def call() -> None:
        for number in range(200):
            clock.call_at(time.perf_counter() + 1e-5 * (number % 7), lambda: called.append(1))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    clock.close()
    assert len(called) == 800


def test_a_copy_shares_memory_with_those_in_flight_when_it_begins() -> None:
    memory = HostMemory(1000.0)
    assert memory.begin(30, bytes_per_second=2000.0) == pytest.approx(0.03)
    assert memory.begin(10, bytes_per_second=2000.0) == pytest.approx(0.02)
    memory.end()
    assert memory.begin(1, bytes_per_second=100.0) == pytest.approx(0.01)  # a slow link
