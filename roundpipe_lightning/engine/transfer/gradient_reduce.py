"""Gradients on their way to the host, and their sums there, in the order of the microbatches.

Steps M9, W6 and W7 of docs/design.md.

Floating-point addition is not associative, so a sum that depends on who finished first would make
the result depend on the number of workers. Contributions that arrive early wait for their turn:

    arrives   m=0   m=2 (waits)   m=1          sum  ((g0 + g1) + g2)

This is the order, to the bit, in which a plain loop over the same microbatches accumulates. Sums
are of the parameter's `grad_dtype`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from roundpipe_lightning.engine.device.base import Device
from roundpipe_lightning.engine.device.events import DoneEvent, Event
from roundpipe_lightning.engine.device.threads import Countdown
from roundpipe_lightning.engine.store.block_layout import (
    BlockLayout,
    FlatLayout,
    Form,
    Layouts,
    Place,
    bytes_of,
    gradient_dtype,
)
from roundpipe_lightning.engine.store.flat_buffers import fills_its_memory
from roundpipe_lightning.engine.store.host_store import TakeGradients
from roundpipe_lightning.engine.transfer.copy_queue import Job, Priority, TransferQueue
from roundpipe_lightning.engine.transfer.weight_buffers import Memory

Gradients: TypeAlias = dict[nn.Parameter, Tensor]

T = TypeVar("T", bound=Tensor)

_MOST_ON_THE_WAY = 2
"""Microbatches whose gradients of outside parameters take memory on a worker until they land."""


def fold(sums: dict[T, Tensor], contribution: dict[T, Tensor]) -> None:
    """Add a contribution to running sums, in place; new entries are taken over, not copied."""
    old, new = [], []
    for parameter, gradient in contribution.items():
        if parameter not in sums:
            sums[parameter] = gradient
        elif sums[parameter].is_sparse:  # in this order PyTorch adds any two layouts
            sums[parameter] = gradient + sums[parameter]
        elif gradient.is_sparse:
            sums[parameter] = sums[parameter] + gradient
        else:
            old.append(sums[parameter])
            new.append(gradient)
    if old:
        torch._foreach_add_(old, new)


class FlatGradients:
    """Gradients in one flat host buffer: they are added up without looking at each.

    Args:
        flat: The bytes.
        layout: What lies where.
        present: Which of the layout's parameters have a gradient.
    """

    def __init__(self, flat: Tensor, *, layout: FlatLayout, present: tuple[int, ...]) -> None:
        self.flat = flat
        self._layout = layout
        self._present = present

    def take(self, wanted: Collection[nn.Parameter]) -> Gradients:
        """Return copies of the gradients of some parameters, and leave these out from now on."""
        taken = {p: g.clone() for p, g in self.expanded().items() if p in wanted}
        known = self._layout.parameters
        self._present = tuple(index for index in self._present if known[index] not in taken)
        return taken

    def expanded(self) -> Gradients:
        """Return the gradients by parameter: views of the buffer."""
        layout = self._layout
        return {
            layout.parameters[index]: layout.places[index].within(self.flat, offset=0)
            for index in self._present
        }

    def add(self, other: FlatGradients) -> bool:
        """Add others, if they are of the same parameters; return whether they were."""
        if self._layout is not other._layout or self._present != other._present:
            return False
        for dtype, start, stop in self._layout.spans:
            self.flat[start:stop].view(dtype).add_(other.flat[start:stop].view(dtype))
        return True


class GradientAccumulator:
    """Sums of contributions, in the order of their numbers, whichever comes first.

    Args:
        num: How many contributions there are; `reserve` adds one.
    """

    def __init__(self, num: int = 0) -> None:
        self._lock = threading.Lock()
        self._num = num
        self._missing = list(range(num))
        self._held: dict[int, tuple[Sequence[int], Gradients | FlatGradients]] = {}
        self._sums: Gradients = {}
        self._flat: FlatGradients | None = None  # sums, as long as all contributions are such

    def reserve(self) -> int:
        """Return the number of a contribution that is to come after those known so far."""
        with self._lock:
            self._missing.append(self._num)
            self._num += 1
            return self._missing[-1]

    @property
    def is_complete(self) -> bool:
        """Whether nothing is missing."""
        return not self._missing

    def add(self, numbers: Sequence[int], gradients: Gradients | FlatGradients) -> bool:
        """Add what some contribute together; return whether these were the last missing ones.

        Args:
            numbers: Ascending; a device that sums over a round of microbatches gives several.
            gradients: Host tensors, which are taken over. May be empty.
        """
        with self._lock:
            self._held[numbers[0]] = (numbers, gradients)
            while self._missing and self._missing[0] in self._held:
                done, contribution = self._held.pop(self._missing[0])
                self._fold(contribution)
                self._missing = [number for number in self._missing if number not in done]
            return not self._missing

    def _fold(self, contribution: Gradients | FlatGradients) -> None:
        if isinstance(contribution, FlatGradients):
            if self._flat is None and not self._sums:
                self._flat = contribution
                return
            if self._flat is not None and self._flat.add(contribution):
                return
            contribution = contribution.expanded()
        if contribution:
            fold(self.sums, contribution)

    @property
    def sums(self) -> Gradients:
        """The sums by parameter."""
        if self._flat is not None:
            self._sums, self._flat = self._flat.expanded(), None
        return self._sums


class GradientReducer:
    """All gradients of one step, on the host.

    Parameters that only one stage uses are summed over the microbatches. Those with several uses
    are summed per microbatch first.

    Args:
        num_microbatches: Number of microbatches.
        num_stages: Number of FUSED and BACKWARD stages.
        take: Given the sums of a stage's parameters that only this stage uses, as soon as they are
            there, in the thread that brought the last part; returns those it wants to keep, which
            `sums` leaves out.
        shared: Parameters that are known to have uses elsewhere.
    """

    def __init__(
        self,
        *,
        num_microbatches: int,
        num_stages: int,
        take: TakeGradients | None = None,
        shared: Iterable[nn.Parameter] = (),
    ) -> None:
        self._take = take
        self._taken: set[nn.Parameter] = set()
        self._elsewhere = set(shared)
        self._stages = tuple(GradientAccumulator(num_microbatches) for _ in range(num_stages))
        self._shared = GradientAccumulator(num_microbatches)
        self._microbatches = tuple(GradientAccumulator() for _ in range(num_microbatches))
        self._closed: set[int] = set()  # microbatches whose last part may be missing
        self._open = Countdown(num_stages + 1)
        self._lock = threading.Lock()

    def add_stage(
        self, stage: int, microbatches: Sequence[int], gradients: Gradients | FlatGradients
    ) -> None:
        """Add gradients of parameters that only this stage of the backward partition uses.

        They are of some microbatches, ascending, and host tensors, which are taken over.
        """
        if not isinstance(gradients, FlatGradients):  # those have it already
            gradients = _in_their_dtype(gradients)
        accumulator = self._stages[stage]
        if not accumulator.add(microbatches, gradients):
            return
        if self._take is not None:
            with self._lock:
                alone = {p: g for p, g in accumulator.sums.items() if p not in self._elsewhere}
            for parameter in self._take(alone) if alone else ():
                self._taken.add(parameter)
                del accumulator.sums[parameter]
        self._open.count()

    def await_all(self, seconds: float) -> bool:
        """Wait until all has been added, but not longer than this; return whether it has."""
        return self._open.wait(seconds)

    def note_elsewhere(self, parameters: Iterable[nn.Parameter]) -> None:
        """Say that a microbatch has used parameters outside their stage.

        Before it adds gradients of that stage: so nothing comes after these that belongs to them.
        """
        if self._take is not None:
            with self._lock:
                self._elsewhere.update(parameters)

    def add_shared(self, microbatch: int, gradients: Gradients) -> None:
        """Add gradients of parameters with several uses."""
        self.reserve_shared(microbatch)(gradients)

    def reserve_shared(self, microbatch: int) -> Callable[[Gradients], None]:
        """Reserve a place in the order of such gradients; return what takes them, in any thread."""
        return partial(self._add_shared, microbatch, self._microbatches[microbatch].reserve())

    def _add_shared(self, microbatch: int, number: int, gradients: Gradients) -> None:
        gradients = _in_their_dtype(gradients)
        assert self._taken.isdisjoint(gradients), "who has uses elsewhere is not taken"
        self._microbatches[microbatch].add([number], gradients)
        self._close_if_complete(microbatch)

    def close_microbatch(self, microbatch: int) -> None:
        """Say that a microbatch reserves nothing more."""
        with self._lock:
            self._closed.add(microbatch)
        self._close_if_complete(microbatch)

    def _close_if_complete(self, microbatch: int) -> None:
        accumulator = self._microbatches[microbatch]
        with self._lock:
            if microbatch not in self._closed or not accumulator.is_complete:
                return
            self._closed.remove(microbatch)  # once
        if self._shared.add([microbatch], accumulator.sums):
            self._open.count()

    def sums(self) -> Gradients:
        """Return the sums, after all microbatches are closed. Call it once."""
        total: Gradients = {}
        for accumulator in (*self._stages, self._shared):
            fold(total, accumulator.sums)
        return total


def _in_their_dtype(gradients: Gradients) -> Gradients:
    return {parameter: g.to(gradient_dtype(parameter)) for parameter, g in gradients.items()}


class GradientDownloads:
    """A worker's gradients on their way to the host.

    Those of a stage run are gathered in one buffer on the device by the thread whose turn it is.
    Those of parameters outside the blocks go as they are, sent by any thread.
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
        self._mutex = threading.Lock()
        self._outside: deque[Event] = deque()

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
        flat = torch.empty(layout.num_bytes, dtype=torch.uint8)
        gradients = FlatGradients(flat, layout=layout, present=present)
        self._landed = self._downloads.submit(
            Job(
                name="gradients",
                priority=Priority.GRADIENTS,
                pieces=[(flat, self._memory.bytes_at(0, layout.num_bytes))],
                after=[gathered],
                is_staged=True,
                done=partial(landed, gradients),
            )
        )
        return True

    def _views_of(self, forms: tuple[Form, ...], places: Sequence[Place]) -> tuple[Tensor, ...]:
        if forms not in self._views:
            whole = self._memory.bytes_at(0, self._memory.num_bytes)
            self._views[forms] = tuple(place.within(whole, offset=0) for place in places)
        return self._views[forms]

    def send_outside(self, gradients: Gradients, *, landed: Callable[[Gradients], None]) -> None:
        """Send gradients of parameters outside the blocks, which compute so far has made.

        Nobody else uses them after. `landed` is given them, on the host, in the queue's thread.
        """
        with self._mutex:
            while len(self._outside) >= _MOST_ON_THE_WAY:
                self._outside.popleft().wait()
            self._outside.append(self._submit_outside(gradients, landed))

    def _submit_outside(self, gradients: Gradients, landed: Callable[[Gradients], None]) -> Event:
        pieces, on_host = [], {}
        for parameter, gradient in gradients.items():
            whole = gradient if fills_its_memory(gradient) else gradient.contiguous()
            host = torch.empty(whole.nbytes, dtype=torch.uint8)
            pieces.append((host, bytes_of(whole)))
            on_host[parameter] = host.view(whole.dtype).as_strided(whole.shape, whole.stride())
        longest = max(host.nbytes for host, _ in pieces)
        return self._downloads.submit(
            Job(
                name="gradients of parameters outside the blocks",
                priority=Priority.GRADIENTS,
                pieces=pieces,
                after=[self._device.mark_event("gradients outside the blocks are made")],
                is_staged=self._downloads.can_stage(longest),
                done=partial(landed, on_host),
            )
        )

    def end_step(self, *, failed: bool = False) -> None:
        self._outside.clear()
        if failed:  # a download may have been given up
            self._landed = DoneEvent()
