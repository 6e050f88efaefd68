"""The gradient reducer: sums gradients on the host in the order of the microbatches.

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
from roundpipe_lightning.engine.transfer.copy_queue import CHUNK_BYTES, Job, Priority, TransferQueue
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
        parameters = self._layout.parameters
        taken = [index for index in self._present if parameters[index] in wanted]
        if not taken:
            return {}
        self._present = tuple(index for index in self._present if index not in set(taken))
        return {parameters[index]: self._at(index).clone() for index in taken}

    def _at(self, index: int) -> Tensor:
        return self._layout.places[index].within(self.flat, offset=0)

    def expanded(self) -> Gradients:
        """Return the gradients by parameter: views of the buffer."""
        return {self._layout.parameters[index]: self._at(index) for index in self._present}

    def add(self, other: FlatGradients) -> bool:
        """Add others, if they are of the same parameters; say whether that was so."""
        if self._layout is not other._layout or self._present != other._present:
            return False
        for dtype, start, stop in self._layout.spans:
            self.flat[start:stop].view(dtype).add_(other.flat[start:stop].view(dtype))
        return True


class GradientAccumulator:
    """The sums of one stage, or of all that is used outside the blocks.

    Args:
        num_microbatches: How many microbatches contribute, each exactly once.
    """

    def __init__(self, num_microbatches: int) -> None:
        self._lock = threading.Lock()
        self._missing = list(range(num_microbatches))
        self._held: dict[int, tuple[Sequence[int], Gradients | FlatGradients]] = {}
        self._sums: Gradients = {}
        self._flat: FlatGradients | None = None  # sums, as long as all contributions are such

    def add(self, microbatches: Sequence[int], gradients: Gradients | FlatGradients) -> bool:
        """Add what some microbatches contribute together.

        Returns:
            Whether these were the last that were missing.

        Args:
            microbatches: Their indices, ascending; a device that sums over a round gives several.
            gradients: Host tensors, which the reducer takes over. May be empty.
        """
        with self._lock:
            self._held[microbatches[0]] = (microbatches, gradients)
            while self._missing and self._missing[0] in self._held:
                done, contribution = self._held.pop(self._missing[0])
                self._fold(contribution)
                self._missing = [m for m in self._missing if m not in done]
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
        """Return the sums by parameter."""
        if self._flat is not None:
            self._sums, self._flat = self._flat.expanded(), None
        return self._sums


class _Pending:
    """What a microbatch contributes to parameters with several uses."""

    def __init__(self) -> None:
        self.sums: Gradients = {}
        self.come: dict[int, Gradients] = {}
        self.num_reserved = self.num_folded = 0
        self.is_closed = False

    def fold(self) -> None:
        """Add up what has come, as far as all before it has."""
        while self.num_folded in self.come:
            fold(self.sums, self.come.pop(self.num_folded))
            self.num_folded += 1


class GradientReducer:
    """All gradients of one step, on the host.

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
        self._open = Countdown(num_stages + 1)
        self._lock = threading.Lock()
        self._pending = tuple(_Pending() for _ in range(num_microbatches))

    def add_stage(
        self, stage: int, microbatches: Sequence[int], gradients: Gradients | FlatGradients
    ) -> None:
        """Add gradients of parameters that only this stage uses.

        Args:
            stage: Index in the backward partition.
            microbatches: Which microbatches they are of, ascending.
            gradients: Host tensors, taken over.
        """
        if not isinstance(gradients, FlatGradients):  # those have it already
            gradients = _in_their_dtype(gradients)
        accumulator = self._stages[stage]
        is_complete = accumulator.add(microbatches, gradients)
        if is_complete and self._take is not None:
            with self._lock:
                alone = {p: g for p, g in accumulator.sums.items() if p not in self._elsewhere}
            for parameter in self._take(alone) if alone else ():
                self._taken.add(parameter)
                del accumulator.sums[parameter]
        if is_complete:
            self._open.count()

    def await_all(self, seconds: float) -> bool:
        """Wait until all has been added, but not longer than this; say whether it has."""
        return self._open.wait(seconds)

    def note_elsewhere(self, parameters: Iterable[nn.Parameter]) -> None:
        """Say that a microbatch has used parameters outside their stage.

        Before it adds gradients of that stage: so nothing comes after these that belongs to them.
        """
        if self._take is not None:
            with self._lock:
                self._elsewhere.update(parameters)

    def add_shared(self, microbatch: int, gradients: Gradients) -> None:
        """Add gradients of parameters with several uses; they are summed per microbatch first."""
        self.reserve_shared(microbatch)(gradients)

    def reserve_shared(self, microbatch: int) -> Callable[[Gradients], None]:
        """Say that such gradients will come, to be added in the order of the promises.

        Returns:
            Takes the gradients, in any thread.
        """
        pending = self._pending[microbatch]
        with self._lock:
            number = pending.num_reserved
            pending.num_reserved += 1

        def keep(gradients: Gradients) -> None:
            gradients = _in_their_dtype(gradients)
            assert self._taken.isdisjoint(gradients), "who has uses elsewhere is not taken"
            with self._lock:
                pending.come[number] = gradients
                pending.fold()
            self._close(microbatch)

        return keep

    def close_microbatch(self, microbatch: int) -> None:
        """Say that a microbatch promises nothing more."""
        self._pending[microbatch].is_closed = True
        self._close(microbatch)

    def _close(self, microbatch: int) -> None:
        pending = self._pending[microbatch]
        with self._lock:
            if not pending.is_closed or pending.num_folded < pending.num_reserved:
                return
            pending.is_closed = False  # once
        if self._shared.add([microbatch], pending.sums):
            self._open.count()

    def sums(self) -> Gradients:
        """Return the sums, after all microbatches are closed. Call it once."""
        total: Gradients = {}
        for accumulator in (*self._stages, self._shared):
            fold(total, accumulator.sums)
        return total


def _in_their_dtype(gradients: Gradients) -> Gradients:
    return {parameter: g.to(gradient_dtype(parameter)) for parameter, g in gradients.items()}


class GradientStaging:
    """Where a worker's gradients are gathered. Called by the thread whose turn it is.

    Args:
        device: The worker's.
        layouts: How blocks lie in memory.
        downloads: The worker's queue.
        worker: The worker's name, for messages.
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
                priority=Priority.GRADIENTS,
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


class OutsideGradients:
    """Their gradients on the way home from one worker. Any thread may send some.

    Args:
        device: The worker's.
        downloads: The worker's queue.
        longest: Bytes for which the queue's page-locked buffers are long enough.
    """

    def __init__(self, device: Device, downloads: TransferQueue, *, longest: int) -> None:
        self._device = device
        self._downloads = downloads
        self._longest = longest
        self._mutex = threading.Lock()
        self._on_the_way: deque[Event] = deque()

    def send(self, gradients: Gradients, *, landed: Callable[[Gradients], None]) -> None:
        """Bring gradients home that compute launched so far has made.

        Args:
            gradients: On the device; nobody else uses them after.
            landed: Given them, on the host, in the queue's thread.
        """
        with self._mutex:
            while len(self._on_the_way) >= _MOST_ON_THE_WAY:
                self._on_the_way.popleft().wait()
            self._on_the_way.append(self._submitted(gradients, landed))

    def _submitted(self, gradients: Gradients, landed: Callable[[Gradients], None]) -> Event:
        pieces, home = [], {}
        for parameter, gradient in gradients.items():
            whole = gradient if fills_its_memory(gradient) else gradient.contiguous()
            host = torch.empty(whole.nbytes, dtype=torch.uint8)
            pieces.append((host, bytes_of(whole)))
            home[parameter] = host.view(whole.dtype).as_strided(whole.shape, whole.stride())
        longest = max(host.nbytes for host, _ in pieces)
        return self._downloads.submit(
            Job(
                name="gradients of parameters outside the blocks",
                priority=Priority.GRADIENTS,
                pieces=pieces,
                after=[self._device.mark_event("gradients outside the blocks are made")],
                is_staged=longest <= self._longest or self._longest >= CHUNK_BYTES,
                done=lambda: landed(home),
            )
        )

    def end_step(self) -> None:
        """Forget what is home."""
        self._on_the_way.clear()
