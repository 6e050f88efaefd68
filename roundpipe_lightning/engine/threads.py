"""A team of threads: one task each, errors returned to the caller, always joined.

The threads live as long as the engine, because a thread that computes on the CPU owns a pool of
intra-op threads, which is dear to make.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TypeAlias

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


class Run:
    """Tasks under way, or done.

    Args:
        num_tasks: How many.
        on_failure: Called in the failing task's thread, with the first failure and every other.
    """

    def __init__(self, num_tasks: int, on_failure: Callable[[Failure], None]) -> None:
        self._left = num_tasks
        self._on_failure = on_failure
        self._finished = threading.Condition()

    def execute(self, index: int, task: Task) -> None:
        """Run one task and note its end."""
        try:
            task()
        except BaseException as error:  # noqa: BLE001 - handed to the caller, who raises it
            self._on_failure(Failure(index, error))
        finally:
            with self._finished:
                self._left -= 1
                if not self._left:
                    self._finished.notify_all()

    def wait(self, seconds: float) -> bool:
        """Wait until all tasks have ended, but not longer than this. Returns whether they have."""
        with self._finished:
            return self._finished.wait_for(lambda: not self._left, timeout=seconds)


class ThreadTeam:
    """Threads that wait for tasks. A context manager; leaving it joins them.

    Args:
        num_threads: How many.
        name: Beginning of the threads' names.
        prepare: Called once in every thread.
    """

    def __init__(self, num_threads: int, *, name: str, prepare: Callable[[], None]) -> None:
        self._prepare = prepare
        self._queues: list[queue.SimpleQueue[Task | None]] = [
            queue.SimpleQueue() for _ in range(num_threads)
        ]
        self._threads = [
            threading.Thread(target=self._serve, args=(tasks,), name=f"{name}-{i}", daemon=True)
            for i, tasks in enumerate(self._queues)
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
        for index, (task, tasks_of_thread) in enumerate(zip(tasks, self._queues, strict=False)):
            tasks_of_thread.put(_bound(run, index, task))
        return run

    def _serve(self, tasks: queue.SimpleQueue[Task | None]) -> None:
        self._prepare()
        while (task := tasks.get()) is not None:
            task()
            del task

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
        for tasks in self._queues:
            tasks.put(None)
        for thread in self._threads:
            thread.join(timeout_seconds)
        return not any(thread.is_alive() for thread in self._threads)


def _bound(run: Run, index: int, task: Task) -> Task:
    return lambda: run.execute(index, task)
