import threading
import time
from collections.abc import Iterator

import pytest

from roundpipe_lightning.emulation.links import HostMemory
from roundpipe_lightning.emulation.timing import ServerClock


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
        clock.call_at(now + 0.02, lambda: called.append(2)).cancel()
        clock.call_at(now + 0.01, lambda: called.append(11))

    clock.call_at(0.0, begin)
    clock.close()
    assert called == [1, 11, 3]
    assert time.perf_counter() - now >= 0.03


def test_what_is_due_earlier_than_what_it_sleeps_for_wakes_it(clock: ServerClock) -> None:
    is_called = threading.Event()
    far = clock.call_at(time.perf_counter() + 1e6, lambda: None)
    clock.call_at(time.perf_counter(), is_called.set)
    assert is_called.wait(60)
    far.cancel()
    clock.close()


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


def test_memory_is_shared_equally_at_every_moment(clock: ServerClock) -> None:
    memory = HostMemory(1000.0, clock=clock)
    ends: dict[str, float] = {}
    begin = time.perf_counter()

    def copy(name: str, after: float, num_bytes: int, rate: float) -> None:
        memory.begin(
            begin + after,
            num_bytes,
            bytes_per_second=rate,
            arrived=lambda end: ends.update({name: end - begin}),
        )

    def begin_all() -> None:  # by the clock, in whose thread memory is used
        copy("long", 0.0, 30, 1000.0)
        clock.call_at(begin + 0.01, lambda: copy("short", 0.01, 10, 1000.0))
        clock.call_at(begin + 0.1, lambda: copy("slow link", 0.1, 1, 100.0))

    clock.call_at(0.0, begin_all)
    clock.close()
    # 10 bytes alone, 20 ms at half the rate beside the short one, 10 ms alone.
    assert ends == pytest.approx({"long": 0.04, "short": 0.03, "slow link": 0.11}, abs=1e-6)


def test_a_copy_that_is_known_late_ends_as_if_it_had_been_known_in_time(
    clock: ServerClock,
) -> None:
    memory = HostMemory(1000.0, clock=clock)
    ends: list[float] = []
    begin = time.perf_counter()

    def both() -> None:
        for after in (0.02, 0.0):  # the clock is 20 ms further when the second is submitted
            memory.begin(begin + after, 10, bytes_per_second=500.0, arrived=ends.append)

    clock.call_at(begin + 0.02, both)
    clock.close()
    assert [round(end - begin, 6) for end in ends] == [0.02, 0.04]
