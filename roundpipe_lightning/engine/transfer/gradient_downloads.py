"""Gradients on their way from a worker to the host.

Steps M9 and W6 of docs/design.md.

```
compute    [ stage run ] gather           [ next stage run ] gather
download                 [ blocks ][ outside ]
host                     into page-locked memory             sums, in a thread of their own
```

Gradients stay where they land (`pinned_pool.py`): they are summed there, become `.grad` there, and
are what the optimizer reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor, nn

from roundpipe_lightning.engine.device.base import Device
from roundpipe_lightning.engine.device.events import DoneEvent, Event
from roundpipe_lightning.engine.store.block_layout import (
    BlockLayout,
    Form,
    Layouts,
    Place,
    bytes_of,
)
from roundpipe_lightning.engine.store.flat_buffers import fills_its_memory
from roundpipe_lightning.engine.transfer.copy_queue import Job, Priority, TransferQueue
from roundpipe_lightning.engine.transfer.gradient_reduce import FlatGradients, Gradients
from roundpipe_lightning.engine.transfer.pinned_pool import PinnedPool
from roundpipe_lightning.engine.transfer.weight_buffers import Memory

_MOST_SUM_THREADS = 4  # they use all of the memory's bandwidth; other cores are the optimizer's


class HostSums:
    """The thread that sums what lands: the queue that has brought it goes on copying.

    Args:
        pool: What lands lies there.
        on_failure: Called, in that thread, with an error in a sum and what it is of.
    """

    def __init__(
        self, pool: PinnedPool, *, on_failure: Callable[[BaseException, str], None]
    ) -> None:
        self.pool = pool
        self._on_failure = on_failure
        self._thread = ThreadPoolExecutor(1, "roundpipe-sums", initializer=_use_few_threads)

    def add_later(self, add: Callable[[], None]) -> None:
        def execute() -> None:
            try:
                add()
            except BaseException as error:  # noqa: BLE001 - raised from the Trainer's thread
                self._on_failure(error, "sums of gradients on the host")

        self._thread.submit(execute)

    def drain(self) -> None:
        """Wait for all that was given so far."""
        self._thread.submit(lambda: None).result()

    def close(self) -> None:
        self._thread.shutdown()


def _use_few_threads() -> None:
    torch.set_num_threads(min(_MOST_SUM_THREADS, torch.get_num_threads()))


class GradientDownloads:
    """A worker's gradients on their way to the host, after each stage run.

    Those of blocks are gathered in one buffer on the device. Those of parameters outside the blocks
    go as they are. Called by the thread whose turn it is, on whichever worker.

    Args:
        device: The worker's.
        layouts: Those of all blocks.
        downloads: The queue.
        sums: Where gradients go.
        worker: For messages.
    """

    def __init__(
        self,
        device: Device,
        *,
        layouts: Layouts,
        downloads: TransferQueue,
        sums: HostSums,
        worker: str,
    ) -> None:
        self._device = device
        self._layouts = layouts
        self._downloads = downloads
        self._sums = sums
        self._memory = Memory(device, name=f"gradient staging of {worker}")
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

        Args:
            blocks: Layouts and leaves of the run's blocks.
            landed: Given the gradients, when they are on the host.

        Returns:
            Whether there were any; else nothing will land.
        """
        layouts = tuple(layout for layout, _ in blocks)
        layout = self._layouts.of_gradients(layouts)
        leaves = [leaves[i] for layout_, leaves in blocks for i in layout_.form.trained]
        found = [(index, leaf.grad) for index, leaf in enumerate(leaves)]
        present = tuple(index for index, gradient in found if gradient is not None)
        if not present:
            return False
        views = self._views_of(tuple(one.form for one in layouts), layout.places)
        with torch.no_grad():
            self._device.await_event(self._landed)
            torch._foreach_copy_(
                [views[index] for index in present], [g for _, g in found if g is not None]
            )
        for leaf in leaves:
            leaf.grad = None
        flat = self._sums.pool.take(layout.num_bytes)
        gradients = FlatGradients(flat, layout=layout, present=present)
        gathered = self._memory.bytes_at(0, layout.num_bytes)
        self._landed = self._submit(
            "gradients are gathered", [(flat, gathered)], partial(landed, gradients)
        )
        return True

    def _views_of(self, forms: tuple[Form, ...], places: Sequence[Place]) -> tuple[Tensor, ...]:
        if forms not in self._views:
            whole = self._memory.bytes_at(0, self._memory.num_bytes)
            self._views[forms] = tuple(place.within(whole, offset=0) for place in places)
        return self._views[forms]

    def send_outside(self, gradients: Gradients, *, landed: Callable[[Gradients], None]) -> None:
        """Send sums of gradients of parameters outside the blocks, which compute so far has made.

        Nobody else uses them after. Memory on the device is taken by those of two stage runs at
        most. `landed` is given them when they are on the host.
        """
        self._outside_landed.wait()
        copies, on_host = [], {}
        for parameter, gradient in gradients.items():
            if gradient.is_sparse:
                on_host[parameter] = self._device.download(gradient)
                continue
            whole = gradient if fills_its_memory(gradient) else gradient.contiguous()
            flat = self._sums.pool.take(whole.nbytes)
            copies.append((flat, bytes_of(whole)))
            on_host[parameter] = flat.view(whole.dtype).as_strided(whole.shape, whole.stride())
        self._outside_landed = self._submit(
            "gradients outside the blocks are made", copies, partial(landed, on_host)
        )

    def _submit(
        self, made: str, copies: Sequence[tuple[Tensor, Tensor]], landed: Callable[[], None]
    ) -> Event:
        return self._downloads.submit(
            Job(
                name="gradients",
                priority=Priority.GRADIENTS,
                pieces=copies,
                after=[self._device.mark_event(made)],
                done=lambda: self._sums.add_later(landed),
            )
        )

    def end_step(self, *, failed: bool = False) -> None:
        if failed:  # a download may have been given up
            self._landed = self._outside_landed = DoneEvent()
