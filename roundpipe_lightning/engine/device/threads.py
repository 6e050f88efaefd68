"""A team of threads: one task each, errors returned to the caller, always joined.

The threads live as long as the engine, because a thread that computes on the CPU owns a pool of
intra-op threads, which is expensive to make.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, TypeAlias

import torch

Task: TypeAlias = Callable[[], None]


@dataclass(frozen=True)
class Failure:
    """A task that raised."""

    index: int
    error: BaseException


class Countdown:
    """A number of events that are to happen."""

    def __init__(self, number: int) -> None:
        self._left = number
        self._counting = threading.Lock()
        self._gate = threading.Lock()  # held until all have happened; an event costs ten of it
        self.is_over = not number
        if number:
            self._gate.acquire()

    def count(self) -> None:
        with self._counting:
            self._left -= 1
            if self._left:
                return
        self.is_over = True
        self._gate.release()

    def wait(self, seconds: float) -> bool:
        if not self.is_over and self._gate.acquire(timeout=seconds):
            self._gate.release()  # for others who wait
        return self.is_over


def _execute(index: int, task: Task, on_failure: Callable[[Failure], None], process: int) -> None:
    try:
        task()
    except BaseException as error:  # noqa: BLE001 - handed to the caller, who raises it
        if os.getpid() != process:
            # The task has forked it: it has no other thread, and nobody else would end it.
            code = error.code if isinstance(error, SystemExit) else 1
            if not isinstance(error, SystemExit):
                traceback.print_exception(error)
            elif isinstance(code, str):
                sys.stderr.write(f"{code}\n")
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1 if isinstance(code, str) else code or 0)
        on_failure(Failure(index, error))


class ThreadTeam:
    """Threads that wait for tasks, until `close` joins them; `prepare` is called once in each."""

    def __init__(self, num_threads: int, *, name: str, prepare: Callable[[], None]) -> None:
        self._prepare = prepare
        self._queues: list[queue.SimpleQueue[tuple[Countdown, Task] | None]] = [
            queue.SimpleQueue() for _ in range(num_threads)
        ]
        self._threads = [
            threading.Thread(target=self._serve, args=(jobs,), name=f"{name}-{i}", daemon=True)
            for i, jobs in enumerate(self._queues)
        ]
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:  # the system gives no more: nobody will close those that run
            for jobs in self._queues:
                jobs.put(None)
            raise

    def __len__(self) -> int:
        return len(self._threads)

    def start(self, tasks: Sequence[Task], *, on_failure: Callable[[Failure], None]) -> Countdown:
        """Give every thread at most one task; `on_failure` is called in the thread that fails.

        When what is returned is over, no thread holds a task any more: what only tasks refer to is
        freed at once.
        """
        assert len(tasks) <= len(self), "one thread per task"
        running = Countdown(len(tasks))
        for index, (task, jobs) in enumerate(zip(tasks, self._queues, strict=False)):
            jobs.put((running, partial(_execute, index, task, on_failure, os.getpid())))
        return running

    def _serve(self, jobs: queue.SimpleQueue[tuple[Countdown, Task] | None]) -> None:
        self._prepare()
        while (job := jobs.get()) is not None:
            running, task = job
            del job
            try:
                task()
            finally:
                del task
                running.count()
                del running

    def close(self, *, timeout_seconds: float | None = None) -> bool:
        """Let every thread end after its task, and join it; return whether all have ended in time.

        A thread that has not is left behind: it is a daemon.
        """
        for jobs in self._queues:
            jobs.put(None)
        for thread in self._threads:
            thread.join(timeout_seconds)
        return not any(thread.is_alive() for thread in self._threads)


@contextmanager
def divided_intra_op_threads(*, num_workers: int) -> Iterator[int]:
    """Share the process's intra-op threads among CPU workers; yields the number per worker.

    A thread that computes for one sets it for itself.
    """
    total = torch.get_num_threads()
    try:
        yield max(1, total // num_workers) if num_workers > 1 else total
    finally:
        if torch.get_num_threads() != total or num_workers > 1:
            torch.set_num_threads(total)


def add_note(error: BaseException, note: str) -> None:
    noted: Any = error
    noted.__notes__ = [*getattr(error, "__notes__", []), note]


_TRACED = (
    "A step that workers share is not traced as a whole: write torch.cond as an `if`, or with "
    "torch.where, and leave out fullgraph=True. RoundPipeStrategy(compile=True) compiles blocks."
)


def _note_place(error: BaseException, place: str) -> None:
    add_note(error, f"This happened in {place}.")
    if type(error).__module__.startswith("torch._dynamo"):
        add_note(error, _TRACED)


@contextmanager
def noted(place: str) -> Iterator[None]:
    """Note on errors of the body where they happened."""
    try:
        yield
    except Exception as error:
        if not any(place in note for note in getattr(error, "__notes__", ())):
            _note_place(error, place)
        raise


def raise_noted(error: BaseException, place: str) -> NoReturn:
    """Raise an error again, with a note that says where it happened."""
    _note_place(error, place)
    try:
        raise error
    finally:  # its traceback refers to this frame: no circle that holds the step's tensors
        del error
