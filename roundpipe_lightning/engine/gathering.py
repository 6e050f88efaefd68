"""Gradients on their way home: gathered on the device, sent down while the next visit computes.

```
compute    [ visit 0 ]gather[ visit 1          ]gather[ visit 2
staging               └──────────────┐              └──────
download               [ gradients 0 ]               [ gradients 1 ..
host                                 └▶ ledger
```

One operation gathers all gradients of a visit in a flat staging buffer, and one buffer is enough:
the next gathering waits for the download before it, which has a whole visit's time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from roundpipe_lightning.engine.device import Device
from roundpipe_lightning.engine.events import DoneEvent, Event
from roundpipe_lightning.engine.gradients import FlatGradients
from roundpipe_lightning.engine.layouts import BlockLayout, Form, Layouts, Place
from roundpipe_lightning.engine.slots import Memory
from roundpipe_lightning.engine.transfers import Job, TransferQueue, Urgency


class GradientStaging:
    """Where a worker's gradients are gathered. Called by the thread whose turn it is.

    Args:
        device: The worker's.
        layouts: How blocks lie in memory.
        downloads: The worker's queue.
        worker: The worker's name, for people.
    """

    def __init__(
        self, device: Device, *, layouts: Layouts, downloads: TransferQueue, worker: str
    ) -> None:
        self._device = device
        self._layouts = layouts
        self._downloads = downloads
        self._memory = Memory(device, name=f"gradient staging of {worker}")
        self._landed: Event = DoneEvent()
        self._views: dict[tuple[Form, ...], tuple[Tensor, ...]] = {}

    def prepare(self, num_bytes: int) -> None:
        """Make room for the gradients of a visit."""
        if num_bytes > self._memory.num_bytes:
            self._views.clear()
            self._memory.grow(num_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffer."""
        return self._memory.num_bytes

    def clear(self) -> None:
        """Give all memory back to the device."""
        self._views.clear()
        self._memory.clear()

    def send(
        self,
        blocks: Sequence[tuple[BlockLayout, Sequence[nn.Parameter]]],
        *,
        landed: Callable[[FlatGradients], None],
    ) -> bool:
        """Gather the gradients of a visit's leaves, take them from these, and send them home.

        Args:
            blocks: Layouts and leaves of the visit's blocks.
            landed: Given the gradients in the queue's thread, when they are on the host.

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
        gathered = self._device.mark_event("gradients are gathered")
        home = FlatGradients(
            torch.empty(layout.num_bytes, dtype=torch.uint8), layout=layout, present=present
        )
        self._landed = self._downloads.submit(
            Job(
                name="gradients",
                urgency=Urgency.GRADIENTS,
                pieces=[(home.flat, self._memory.bytes_at(0, layout.num_bytes))],
                after=[gathered],
                is_staged=True,
                done=lambda: landed(home),
            )
        )
        return True

    def abandon(self) -> None:
        """Forget a download that was given up."""
        self._landed = DoneEvent()

    def _views_of(self, forms: tuple[Form, ...], places: Sequence[Place]) -> tuple[Tensor, ...]:
        if forms not in self._views:
            whole = self._memory.bytes_at(0, self._memory.num_bytes)
            self._views[forms] = tuple(place.within(whole, offset=0) for place in places)
        return self._views[forms]
