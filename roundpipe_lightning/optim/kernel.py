"""The pass over the memory: every piece is stepped by one thread, in machine code or by torch."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

from torch import Tensor

from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.optim.blockwise import BLOCK, num_blocks
from roundpipe_lightning.optim.disk import StateFiles
from roundpipe_lightning.optim.moments import MomentFormat, moments_in
from roundpipe_lightning.optim.pieces import Piece, Stepped, tasks
from roundpipe_lightning.optim.scratch import Scratch
from roundpipe_lightning.optim.threads import KernelThreads, node_of
from roundpipe_lightning.optim.torch_step import NUM_SCRATCH, TorchStep

if TYPE_CHECKING:
    from roundpipe_lightning.optim.native import Prepared

log = logging.getLogger(__name__)

PIECE_ELEMENTS = 262144
"""Elements of a task: 1 MiB of float32 for each tensor. Machine code does not care. Smaller ones
would fit a core's own cache, but with torch's operations every task passes Python's lock several
times: 64Ki take half as long again, 512Ki as long."""

Task = tuple[Piece, ...]


class KernelChoice(Enum):
    """What steps the pieces."""

    AUTO = "auto"
    """Machine code where it can be made and has torch's bits, else torch's operations."""

    TORCH = "torch"
    """torch's operations."""

    NATIVE = "native"
    """Machine code; refused where it cannot be made."""


class StepKernel:
    """Steps parameters with AdamW.

    Copies of this object are the object itself.

    Args:
        moments: How the two moments are kept.
        stochastic_rounding: Whether masters of bfloat16 are rounded at random.
        num_threads: Number of threads; None: as `KernelThreads` decides.
        choice: What steps the pieces.
        piece_elements: Elements of a task.

    Raises:
        ConfigurationError: Machine code is wanted, and cannot be made here.
    """

    def __init__(
        self,
        *,
        moments: MomentFormat,
        stochastic_rounding: bool,
        num_threads: int | None,
        choice: KernelChoice = KernelChoice.AUTO,
        piece_elements: int = PIECE_ELEMENTS,
    ) -> None:
        self._moments = moments
        self._stochastic = stochastic_rounding
        self._piece_elements = piece_elements
        self._num_threads = num_threads
        self._torch = TorchStep(
            moments=moments_in(moments), stochastic_rounding=stochastic_rounding
        )
        self._choice = choice
        if choice is KernelChoice.NATIVE and (problem := _why_not_native()) is not None:
            raise ConfigurationError(
                f"kernel='native' is not possible here: {problem}. Choose kernel='auto' or "
                "'torch'; llvmlite has wheels for the usual systems, and needs no compiler."
            )
        self._threads: KernelThreads[Task] | None = None

    @property
    def is_native(self) -> bool:
        """Whether machine code steps what it can."""
        return self._choice is not KernelChoice.TORCH and _why_not_native() is None

    def run(self, entries: Sequence[Stepped], files: StateFiles | None) -> None:
        """Step all parameters and wait.

        Args:
            entries: The parameters.
            files: Where the state is, if it is on disk.
        """
        work = self._work(entries)
        cut = list(tasks(entries, size=self._piece_elements))
        if files is None:
            self._run(cut, work)
            return
        for window in files.windows(cut, _state_of):
            with files.using(window.ranges):
                self._run(window.tasks, work)
        files.check()

    def _run(self, cut: Sequence[Task], work: Callable[[Task, Scratch], None]) -> None:
        threads = self._started()
        threads.run(work, _by_node(cut, threads.nodes))

    def close(self) -> None:
        """End the threads; a later `run` starts new ones."""
        if self._threads is not None:
            self._threads.close()
            self._threads = None

    def dismiss(self) -> None:
        """End the threads; can be called from any thread, when nothing runs."""
        if self._threads is not None:
            self._threads.dismiss()

    def __deepcopy__(self, memo: dict[int, Any]) -> StepKernel:
        return self

    def _started(self) -> KernelThreads[Task]:
        if self._threads is None:
            self._threads = KernelThreads(
                num_threads=self._num_threads,
                num_scratch=NUM_SCRATCH * self._piece_elements,
            )
        return self._threads

    def _work(self, entries: Sequence[Stepped]) -> Callable[[Task, Scratch], None]:
        """Return what steps a task."""
        if not self.is_native:
            return self._torch.run
        from roundpipe_lightning.optim import native

        prepared: dict[Stepped, Prepared | None] = {
            entry: native.prepare(
                entry, moments=self._moments, stochastic_rounding=self._stochastic
            )
            for entry in entries
        }

        def work(task: Task, scratch: Scratch) -> None:
            rest = []
            pairs = []
            for piece in task:
                how = prepared[piece.of]
                if how is None:
                    rest.append(piece)
                else:
                    pairs.append((how, piece))
            native.run(pairs)
            if rest:
                self._torch.run(rest, scratch)

        return work


@functools.cache
def _why_not_native() -> str | None:
    """Return why nothing is stepped in machine code, and say so once in the log; None: it is."""
    try:
        importlib.import_module("llvmlite.binding")
    except (ImportError, OSError) as error:  # OSError: its library does not fit this system
        problem: str | None = f"llvmlite cannot be imported ({error})"
    else:
        from roundpipe_lightning.optim import native

        problem = native.why_not()
    if problem is not None:
        log.warning(
            "HostAdamW steps with torch's operations, which takes longer than machine code: %s.",
            problem,
        )
    return problem


def _state_of(task: Task) -> Iterator[Tensor]:
    """Return the pieces of state that a task uses."""
    for piece in task:
        for vector in piece.of.state.values():
            if vector.numel() == piece.of.values.numel():
                yield vector[piece.start : piece.stop]
            else:  # scales of blocks
                yield vector[piece.start // BLOCK : num_blocks(piece.stop)]


def _by_node(cut: Iterable[Task], nodes: Sequence[int]) -> list[list[Task]]:
    """Sort tasks by the node in whose memory they are."""
    if len(nodes) == 1:
        return [list(cut)]
    queues: list[list[Task]] = [[] for _ in nodes]
    places = {node: index for index, node in enumerate(nodes)}
    for index, task in enumerate(cut):
        piece = task[0]
        values = piece.of.values
        node = node_of(values.data_ptr() + piece.start * values.element_size())
        queues[places.get(-1 if node is None else node, index % len(nodes))].append(task)
    return queues
