"""Gradients on their way from a worker to the host. Steps M9 and W6 of docs/design.md.

Gradients stay where they land (`PinnedPool`): they are summed there, become `.grad` there, and
are what the optimizer reads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from functools import partial

import torch
from torch import Tensor, nn

from roundpipe_lightning.engine.device.base import Device
from roundpipe_lightning.engine.device.events import DoneEvent, Event
from roundpipe_lightning.engine.device.host_memory import PinnedPool
from roundpipe_lightning.engine.store.block_layout import (
    BlockLayout,
    Form,
    Layouts,
    Memory,
    bytes_of,
)
from roundpipe_lightning.engine.store.flat_buffers import fills_its_memory
from roundpipe_lightning.engine.transfer.copy_queue import Job, Priority, TransferQueue
from roundpipe_lightning.engine.transfer.gradient_reduce import (
    FlatGradients,
    Gradients,
    Rows,
    fold,
    in_their_dtype,
)

_FEW = 4  # times as many rows are worth the work to send those alone
_MOST_WAITING = 2  # times that something has landed which is not added up yet
_MOST_SUM_THREADS = 4  # they use all of the memory's bandwidth; other cores are the optimizer's


@dataclass(eq=False)
class HostSums:
    """The thread that sums what lands: the queue that has brought it goes on copying."""

    pool: PinnedPool  # what lands lies there
    _: KW_ONLY
    # called, in that thread, with an error in a sum and what it is of
    on_failure: Callable[[BaseException, str], None]

    def __post_init__(self) -> None:
        total = torch.get_num_threads()
        # Asked there: a thread that was never asked forgets what it is given.
        self._thread = ThreadPoolExecutor(
            1,
            "roundpipe-sums",
            lambda: torch.set_num_threads(min(_MOST_SUM_THREADS, torch.get_num_threads())),
        )
        self._thread.submit(int).result()
        self._pending: deque[Future[None]] = deque()
        torch.set_num_threads(total)  # a thread's own number is also that of later threads

    def add_later(self, add: Callable[[], None]) -> None:
        def execute() -> None:
            try:
                add()
            except BaseException as error:  # noqa: BLE001 - raised from the Trainer's thread
                self.on_failure(error, "sums of gradients on the host")

        self._pending.append(self._thread.submit(execute))

    def await_room(self) -> None:
        """Wait while much has landed that is not added up: it takes memory."""
        with suppress(IndexError):  # others wait here, too
            while len(self._pending) >= _MOST_WAITING:
                self._pending.popleft().result()

    def drain(self) -> None:
        self._thread.submit(lambda: None).result()

    def close(self) -> None:
        self._thread.shutdown()


class OutsideSums:
    """Gradients of parameters outside the blocks, summed on a device over a round."""

    def __init__(self) -> None:
        self.gradients: Gradients = {}
        self._rows: dict[nn.Parameter, list[Tensor] | None] = {}  # None: it may be any

    def add(self, gradients: Gradients, rows: Rows) -> None:
        """Add gradients, which are taken over, of some of which only `rows` are not zero."""
        for parameter in gradients:
            known = self._rows.setdefault(parameter, [])
            if known is not None and parameter in rows:
                known.append(rows[parameter])
            else:
                self._rows[parameter] = None
        fold(self.gradients, in_their_dtype(gradients))

    def few_rows(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the rows that are not zero, some perhaps twice; None if they may be many."""
        rows = self._rows[parameter]
        if rows is None or _FEW * sum(map(len, rows)) > len(parameter):
            return None
        return torch.cat(rows)


def _sparse(
    shape: torch.Size, indices: Tensor, values: Tensor, *, is_coalesced: bool = False
) -> Tensor:
    # `torch.sparse_coo_tensor` of PyTorch 2.11 warns where it does not check its arguments.
    made: Tensor = torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors(  # noqa: SLF001
        len(indices),
        values.dim() - 1,
        shape,
        indices,
        values,
        dtype=values.dtype,
        layout=torch.sparse_coo,
        device=values.device,
        is_coalesced=is_coalesced,
    )
    return made


def _with_rows(shape: torch.Size, rows: Tensor, values: Tensor) -> Tensor:
    """Return a sparse tensor. A row that is given again has the same values: they count once."""
    unique, places = rows.unique(return_inverse=True)
    again = torch.ones(len(rows), dtype=torch.bool)
    again[torch.empty_like(unique).scatter_(0, places, torch.arange(len(rows)))] = False
    values[again] = 0
    return _sparse(shape, rows[None], values)


@dataclass(eq=False)
class GradientDownloads:
    """A worker's gradients on their way to the host, after each stage run.

    Those of blocks are gathered in one buffer on the device. Those of parameters outside the blocks
    go as they are. Called by the thread whose turn it is, on whichever worker.
    """

    device: Device
    _: KW_ONLY
    layouts: Layouts
    downloads: TransferQueue
    sums: HostSums
    worker: str

    def __post_init__(self) -> None:
        self._memory = Memory(self.device, name=f"gradient staging of {self.worker}")
        self._views: dict[tuple[Form, ...], tuple[Tensor, ...]] = {}
        self._landed: Event = DoneEvent()
        self._outside_landed: Event = DoneEvent()

    def prepare(self, num_bytes: int) -> None:
        if num_bytes > self._memory.num_bytes:
            self._views.clear()
            self._memory.grow(num_bytes)

    @property
    def num_bytes(self) -> int:
        return self._memory.num_bytes

    def clear(self) -> None:
        self._views.clear()
        self._memory.clear()

    def send_run(
        self,
        blocks: Sequence[tuple[BlockLayout, Sequence[nn.Parameter]]],
        *,
        landed: Callable[[FlatGradients], None],
    ) -> bool:
        """Gather the gradients of a stage run's leaves, take them from these, and send them.

        `landed` is given them when they are on the host. Returns whether there were any.
        """
        layouts = tuple(layout for layout, _ in blocks)
        layout = self.layouts.of_gradients(layouts)
        leaves = [leaves[i] for layout_, leaves in blocks for i in layout_.form.trained]
        found = [(index, leaf.grad) for index, leaf in enumerate(leaves)]
        present = tuple(index for index, gradient in found if gradient is not None)
        if not present:
            return False
        forms = tuple(one.form for one in layouts)
        if forms not in self._views:
            whole = self._memory.bytes_at(0, self._memory.num_bytes)
            self._views[forms] = tuple(place.within(whole, offset=0) for place in layout.places)
        views = self._views[forms]
        with torch.no_grad():
            self.device.await_event(self._landed)
            torch._foreach_copy_(
                [views[index] for index in present], [g for _, g in found if g is not None]
            )
        for leaf in leaves:
            leaf.grad = None
        self.sums.await_room()
        flat = self.sums.pool.take(layout.num_bytes)
        gradients = FlatGradients(flat, layout=layout, present=present)
        gathered = self._memory.bytes_at(0, layout.num_bytes)
        self._landed = self._submit(
            "gradients are gathered", [(flat, gathered)], partial(landed, gradients)
        )
        return True

    def send_outside(
        self,
        sums: OutsideSums,
        *,
        landed: Callable[[Gradients], None],
        can_add_rows: Callable[[nn.Parameter], bool],
    ) -> None:
        """Send sums of gradients of parameters outside the blocks, which compute so far has made.

        Nobody else uses them after. Memory on the device is taken by those of two stage runs at
        most. `landed` is given them when they are on the host: only rows of an embedding's, where
        these are few and the host `can_add_rows`.
        """
        self._outside_landed.wait()
        copies: list[tuple[Tensor, Tensor]] = []
        on_host: dict[nn.Parameter, Callable[[], Tensor]] = {}
        for parameter, gradient in sums.gradients.items():
            rows = sums.few_rows(parameter)
            if gradient.is_sparse:
                parts = [gradient._indices(), gradient._values()]  # noqa: SLF001
                made = partial(_sparse, gradient.shape, is_coalesced=gradient.is_coalesced())
            elif can_add_rows(parameter) and rows is not None:
                with torch.no_grad():
                    parts, made = (
                        [rows, gradient.index_select(0, rows)],
                        partial(_with_rows, gradient.shape),
                    )
            else:
                parts, made = [gradient], partial(Tensor.detach)
            on_host[parameter] = partial(made, *(self._copied(part, copies) for part in parts))
        self._outside_landed = self._submit(
            "gradients outside the blocks are made",
            copies,
            lambda: landed({parameter: made() for parameter, made in on_host.items()}),
        )

    def _copied(self, tensor: Tensor, copies: list[tuple[Tensor, Tensor]]) -> Tensor:
        whole = tensor if fills_its_memory(tensor) else tensor.contiguous()
        flat = self.sums.pool.take(whole.nbytes)
        copies.append((flat, bytes_of(whole)))
        return flat.view(whole.dtype).as_strided(whole.shape, whole.stride())

    def _submit(
        self, made: str, copies: Sequence[tuple[Tensor, Tensor]], landed: Callable[[], None]
    ) -> Event:
        return self.downloads.submit(
            Job(
                name="gradients",
                priority=Priority.GRADIENTS,
                pieces=copies,
                after=[self.device.mark_event(made)],
                done=lambda: self.sums.add_later(landed),
            )
        )

    def end_step(self, *, failed: bool = False) -> None:
        if failed:  # a download may have been given up
            self._landed = self._outside_landed = DoneEvent()
