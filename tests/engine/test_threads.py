"""A team of threads: one task each, errors returned, always joined."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from functools import partial

import pytest

from roundpipe_lightning.engine.device.threads import Failure, ThreadTeam


def _team(num_threads: int, prepare: Callable[[], None] = lambda: None) -> ThreadTeam:
    return ThreadTeam(num_threads, name="tested", prepare=prepare)


def _wait(event: threading.Event) -> None:
    event.wait(60)


def _unexpected(failure: Failure) -> None:
    pytest.fail(f"{failure.error!r}")


def test_tasks_run_at_once_on_threads_that_stay() -> None:
    seen: list[set[str]] = []
    with _team(3) as team:
        assert len(team) == 3
        for _ in range(4):
            names: set[str] = set()
            barrier = threading.Barrier(3, timeout=60)

            def task(names: set[str] = names, barrier: threading.Barrier = barrier) -> None:
                barrier.wait()
                names.add(threading.current_thread().name)

            run = team.start([task] * 3, on_failure=_unexpected)
            assert run.wait(60)
            seen.append(names)
    assert seen == [{"tested-0", "tested-1", "tested-2"}] * 4


def test_fewer_tasks_than_threads() -> None:
    done: list[int] = []
    with _team(3) as team:
        assert team.start([lambda: done.append(1)], on_failure=_unexpected).wait(60)
        assert team.start([], on_failure=_unexpected).wait(0)
    assert done == [1]


@pytest.mark.parametrize("error", [ValueError("planned"), SystemExit(1), KeyboardInterrupt()])
def test_errors_are_handed_over_and_the_thread_lives_on(error: BaseException) -> None:
    failures: list[Failure] = []

    def fail() -> None:
        raise error

    with _team(2) as team:
        assert team.start([lambda: None, fail], on_failure=failures.append).wait(60)
        assert [(failure.index, failure.error) for failure in failures] == [(1, error)]
        assert team.start([lambda: None] * 2, on_failure=_unexpected).wait(60)


def test_every_failure_is_told() -> None:
    failures: list[Failure] = []

    def fail() -> None:
        raise ValueError

    with _team(3) as team:
        assert team.start([fail] * 3, on_failure=failures.append).wait(60)
    assert sorted(failure.index for failure in failures) == [0, 1, 2]


def test_waiting_ends_before_the_tasks_do() -> None:
    release = threading.Event()
    with _team(1) as team:
        run = team.start([lambda: _wait(release)], on_failure=_unexpected)
        assert not run.wait(0.05)
        release.set()
        assert run.wait(60)


class _Held(threading.Condition):
    """Holds the thread that notifies others, when they know."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = threading.Event()

    def notify_all(self) -> None:
        super().notify_all()
        self.release()
        _wait(self.goes_on)
        self.acquire()


def test_a_run_that_is_over_holds_no_task() -> None:
    class Result:
        """What a task keeps alive."""

    started, begin = threading.Event(), threading.Event()

    def task(result: Result) -> None:
        started.set()
        _wait(begin)

    def unexpected(result: Result, failure: Failure) -> None:
        _unexpected(failure)

    with _team(1) as team:
        result = Result()
        note = weakref.ref(result)
        run = team.start([partial(task, result)], on_failure=partial(unexpected, result))
        del result
        _wait(started)
        run._changed = held = _Held()
        begin.set()
        assert run.wait(60)
        assert note() is None, "its thread has come no further than to tell of the end"
        held.goes_on.set()


def test_prepare_runs_once_in_every_thread() -> None:
    prepared: list[str] = []
    with _team(3, lambda: prepared.append(threading.current_thread().name)) as team:
        for _ in range(3):
            team.start([lambda: None] * 3, on_failure=_unexpected).wait(60)
    assert sorted(prepared) == ["tested-0", "tested-1", "tested-2"]


def test_leaving_joins_the_threads_even_after_an_error() -> None:
    before = set(threading.enumerate())

    def use_a_team() -> None:
        with _team(3) as team:
            team.start([lambda: time.sleep(0.1)] * 3, on_failure=_unexpected)
            raise ValueError("planned")

    with pytest.raises(ValueError, match="planned"):
        use_a_team()
    assert set(threading.enumerate()) <= before


def test_closing_gives_up_on_a_stuck_thread_which_ends_by_itself() -> None:
    release = threading.Event()
    team = _team(1)
    run = team.start([lambda: _wait(release)], on_failure=_unexpected)
    assert not team.close(timeout_seconds=0.05)
    release.set()
    assert run.wait(60)
    assert team.close(timeout_seconds=60)
