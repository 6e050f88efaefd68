"""A team of threads: one task each, errors returned to the caller, always joined.

The threads live as long as the engine, because a thread that computes on the CPU owns a pool of
intra-op threads, which is dear to make.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TypeAlias

import torch

Task: TypeAlias = Callable[[], None]


@dataclass(frozen=True)
class Failure:
    """A task that raised.

    Attributes:
        index: Number of the task.
        error: What it raised.
    """

    index: int
    error: BaseException


class Countdown:
    """Counts things that are to happen.

    Args:
        number: How many there are.
    """

    def __init__(self, number: int) -> None:
        self._left = number
        self._changed = threading.Condition()

    def tell(self) -> None:
        """Hear of one."""
        with self._changed:
            self._left -= 1
            self._changed.notify_all()

    @property
    def is_over(self) -> bool:
        """Whether all have happened."""
        return not self._left

    def wait(self, seconds: float) -> bool:
        """Wait for all of them, but not longer than this; say whether they have happened."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._left, timeout=seconds)


class Run:
    """Tasks under way, or done.

    Args:
        num_tasks: How many.
        on_failure: Called in the failing task's thread, with the first failure and every other.
    """

    def __init__(self, num_tasks: int, on_failure: Callable[[Failure], None]) -> None:
        self._left = num_tasks
        self._on_failure: Callable[[Failure], None] | None = on_failure
        self._finished = threading.Condition()

    def tell_failure(self, failure: Failure) -> None:
        """Hear of a task that has raised."""
        assert self._on_failure is not None, "not all tasks have ended"
        self._on_failure(failure)

    def tell_end(self) -> None:
        """Hear that one task has ended, and that its thread holds nothing of it any more."""
        with self._finished:
            self._left -= 1
            if not self._left:
                self._on_failure = None  # a thread may hold the run for a moment longer
                self._finished.notify_all()

    def wait(self, seconds: float) -> bool:
        """Wait until all tasks have ended, but not longer than this. Returns whether they have.

        Then no thread holds a task any more: what only tasks refer to is freed at once.
        """
        with self._finished:
            return self._finished.wait_for(lambda: not self._left, timeout=seconds)


@dataclass(frozen=True, kw_only=True)
class _Job:
    """A task of a run, by its number there."""

    run: Run
    index: int
    task: Task

    def execute(self) -> None:
        """Run the task."""
        try:
            self.task()
        except BaseException as error:  # noqa: BLE001 - handed to the caller, who raises it
            self.run.tell_failure(Failure(self.index, error))


class ThreadTeam:
    """Threads that wait for tasks. A context manager; leaving it joins them.

    Args:
        num_threads: How many.
        name: Beginning of the threads' names.
        prepare: Called once in every thread.
    """

    def __init__(self, num_threads: int, *, name: str, prepare: Callable[[], None]) -> None:
        self._prepare = prepare
        self._queues: list[queue.SimpleQueue[_Job | None]] = [
            queue.SimpleQueue() for _ in range(num_threads)
        ]
        self._threads = [
            threading.Thread(target=self._serve, args=(jobs,), name=f"{name}-{i}", daemon=True)
            for i, jobs in enumerate(self._queues)
        ]
        for thread in self._threads:
            thread.start()

    def __len__(self) -> int:
        """Number of threads."""
        return len(self._threads)

    def start(self, tasks: Sequence[Task], *, on_failure: Callable[[Failure], None]) -> Run:
        """Give every thread one task.

        Args:
            tasks: At most as many as there are threads.
            on_failure: Told of every task that raises, in that task's thread.
        """
        assert len(tasks) <= len(self), "one thread per task"
        run = Run(len(tasks), on_failure)
        for index, (task, jobs) in enumerate(zip(tasks, self._queues, strict=False)):
            jobs.put(_Job(run=run, index=index, task=task))
        return run

    def _serve(self, jobs: queue.SimpleQueue[_Job | None]) -> None:
        self._prepare()
        while (job := jobs.get()) is not None:
            run = job.run
            try:
                job.execute()
            finally:
                del job
                run.tell_end()
                del run

    def __enter__(self) -> ThreadTeam:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self, *, timeout_seconds: float | None = None) -> bool:
        """Let every thread end after its task, and join it.

        Args:
            timeout_seconds: Give up on a thread that has not ended by then; it is a daemon.

        Returns:
            Whether all have ended.
        """
        for jobs in self._queues:
            jobs.put(None)
        for thread in self._threads:
            thread.join(timeout_seconds)
        return not any(thread.is_alive() for thread in self._threads)

    def dismiss(self) -> None:
        """End the threads, but for the calling one; for an owner that is collected, anywhere."""
        for jobs in self._queues:
            jobs.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()


@contextmanager
def divided_intra_op_threads(*, num_workers: int) -> Iterator[int]:
    """Share the process's intra-op threads among CPU workers.

    Args:
        num_workers: Workers that compute on the host's cores.

    Yields:
        The number of intra-op threads per worker; a thread that computes for one sets it for
        itself.
    """
    total = torch.get_num_threads()
    try:
        yield max(1, total // num_workers) if num_workers > 1 else total
    finally:
        if torch.get_num_threads() != total or num_workers > 1:
            torch.set_num_threads(total)
