"""The pass over the memory: every piece is stepped by one thread, in machine code or by torch.

Each thread has one intra-op thread, away from the launchers. Pieces are taken from one queue, so a
thread that is held up leaves its pieces to the others. What a piece's result is does not depend on
who computes it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.optim.disk import StateFiles
from roundpipe_lightning.optim.rounding import BLOCK, num_blocks
from roundpipe_lightning.optim.state import (
    FlatParameter,
    MomentFormat,
    Task,
    cut_into_tasks,
    step_with_torch,
)

if TYPE_CHECKING:
    from roundpipe_lightning.optim.native import PieceStep

log = logging.getLogger(__name__)
T = TypeVar("T")

_MANY = 8  # of so many processors one is left to the threads that copy and launch

PIECE_ELEMENTS = 262144
"""Elements of a task: 1 MiB of float32 for each tensor. Machine code does not care. Smaller ones
would fit a core's own cache, but with torch's operations every task passes Python's lock several
times: 64Ki take half as long again, 512Ki as long."""


@dataclass(kw_only=True, eq=False)
class StepKernel:
    """Steps parameters with AdamW; arguments as of `HostAdamW`. Copies of this object are itself.

    Raises:
        ConfigurationError: Machine code is wanted, and cannot be made here.
    """

    moments: MomentFormat
    stochastic_rounding: bool
    num_threads: int | None
    choice: str = "auto"
    piece_elements: int = PIECE_ELEMENTS
    files: StateFiles | None = None  # where the state is, if it is on disk

    def __post_init__(self) -> None:
        # where the new values of parameters are also written, flat. A parameter is known by its
        # memory, because a step in parts sees aliases of it.
        self.copies: dict[tuple[int, int], Tensor] = {}
        if self.choice == "native" and (problem := _reason_not_native()) is not None:
            raise _not_possible(problem)

    @property
    def is_native(self) -> bool:
        """Whether machine code steps what it can."""
        return self.choice != "torch" and _reason_not_native() is None

    def step(self, parameters: Sequence[FlatParameter]) -> None:
        """Step all parameters and wait.

        Raises:
            ConfigurationError: Machine code is wanted, and has not the bits of torch here.
            OffloadError: State could not be written; it is in memory.
        """
        work = self._work(parameters)
        tasks = list(cut_into_tasks(parameters, size=self.piece_elements))
        for window in [tasks] if self.files is None else self.files.in_windows(tasks, _state_of):
            self._threads.process(work, window)

    def close(self) -> None:
        """End the threads and finish what is being written; a later `step` starts them again."""
        self._threads.close()
        if self.files is not None:
            self.files.close()

    @functools.cached_property
    def _threads(self) -> KernelThreads:
        return KernelThreads(num_threads=self.num_threads)

    def __deepcopy__(self, memo: dict[int, Any]) -> StepKernel:
        return self

    def _work(self, parameters: Sequence[FlatParameter]) -> Callable[[Task], None]:
        with_torch = functools.partial(
            step_with_torch,
            moments=self.moments.moments,
            stochastic_rounding=self.stochastic_rounding,
        )
        if not self.is_native:
            return with_torch
        steps = {parameter: self._native_step(parameter) for parameter in parameters}

        def work(task: Task) -> None:
            rest = []
            for piece in task:
                step = steps[piece.parameter]
                if step is None:
                    rest.append(piece)
                else:
                    step(piece.start, piece.stop)
            if rest:
                with_torch(tuple(rest))

        return work

    def _native_step(self, parameter: FlatParameter) -> PieceStep | None:
        """Return the step of a parameter in machine code; None: torch's operations have to."""
        from roundpipe_lightning.optim import native  # only now: importing numba takes a while

        try:
            return native.prepare(
                parameter, moments=self.moments, stochastic_rounding=self.stochastic_rounding
            )
        except native.UnusableCodeError as error:
            if self.choice == "native":
                raise _not_possible(str(error)) from error
            _warn(str(error))
            return None


@functools.cache
def _reason_not_native() -> str | None:
    """Return why nothing is stepped in machine code, and say so once in the log; None: it is."""
    try:
        importlib.import_module("numba")
    except (ImportError, OSError) as error:  # OSError: its library does not fit this system
        problem: str | None = f"numba cannot be imported ({error})"
    else:
        from roundpipe_lightning.optim import native

        problem = native.reason_not_usable()
    if problem is not None:
        _warn(problem)
    return problem


@functools.cache
def _warn(problem: str) -> None:
    log.warning(
        "HostAdamW steps with torch's operations, which takes longer than machine code: %s.",
        problem,
    )


def _not_possible(problem: str) -> ConfigurationError:
    return ConfigurationError(
        f"kernel='native' is not possible here: {problem}. Choose kernel='auto' or 'torch'; numba "
        "has wheels for the usual systems, and needs no compiler."
    )


def _state_of(task: Task) -> Iterator[Tensor]:
    for piece in task:
        for vector in piece.parameter.state.values():
            if vector.numel() == piece.parameter.values.numel():
                yield vector[piece.start : piece.stop]
            else:  # scales of blocks
                yield vector[piece.start // BLOCK : num_blocks(piece.stop)]


def usable_processors() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


class KernelThreads:
    """Threads that work on pieces; they end when nobody holds this object any more.

    Args:
        num_threads: How many; None: as many as torch's intra-op threads, but one processor in
            eight is left to others.
    """

    def __init__(self, *, num_threads: int | None) -> None:
        processors = sorted(usable_processors())
        self._processors = processors[len(processors) // _MANY :]
        self.num_threads = num_threads or min(torch.get_num_threads(), len(self._processors))
        self._pool: ThreadPoolExecutor | None = None

    def process(self, work: Callable[[T], object], pieces: Iterable[T]) -> None:
        """Call `work` for every piece, in any thread, and wait.

        Raises the first that `work` raised: pieces taken are finished then, others are not begun.
        """
        left = deque(pieces)

        def serve() -> None:
            with torch.no_grad():
                while left:
                    try:
                        piece = left.popleft()
                    except IndexError:
                        return
                    try:
                        work(piece)
                    except BaseException:
                        left.clear()
                        raise

        if self._pool is None:
            total = torch.get_num_threads()
            given = (self._processors, threading.Barrier(self.num_threads))
            self._pool = ThreadPoolExecutor(
                self.num_threads, "roundpipe-optimizer", _prepare, given
            )
            wait([self._pool.submit(int) for _ in range(self.num_threads)])
            torch.set_num_threads(total)  # a thread's own number is also that of later threads
        served = [self._pool.submit(serve) for _ in range(self.num_threads)]
        try:
            wait(served)
        except KeyboardInterrupt:
            left.clear()
            wait(served)
            raise
        for one in served:
            one.result()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


def _prepare(processors: list[int], all_there: threading.Barrier) -> None:
    """Begin a thread. It holds nothing that holds the pool, which would then never end."""
    torch.get_num_threads()  # a thread's first question sets the number to that of all
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):  # a container's limits changed since: it runs anywhere
            os.sched_setaffinity(0, processors)
    all_there.wait()
