"""Parameters of user code outside the blocks (embedding, norm, LM head) on their way.

The engine learns from each step which of them user code asks for during which visit of a worker.
In the next step they are uploaded, like the weights of that visit, while the visit before computes;
what was not expected is uploaded when it is asked for. What the first visit needs before its blocks
goes before their weights. They stay until the step ends. Their gradients, one per microbatch, go
home while the worker computes something else:

```
compute    [ visit 0      ][ visit 1: blocks, LM head, loss; backward ][ of the next microbatch
upload     0  [ LM head ]
download                                             [ its gradient ]
```
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from roundpipe_lightning.engine.device import Device
from roundpipe_lightning.engine.events import Event
from roundpipe_lightning.engine.gradients import Gradients
from roundpipe_lightning.engine.layouts import bytes_of
from roundpipe_lightning.engine.parameter_group import fills_its_memory
from roundpipe_lightning.engine.serving import Serving
from roundpipe_lightning.engine.store import HostStore
from roundpipe_lightning.engine.transfers import CHUNK_BYTES, Job, TransferQueue, Urgency

_MOST_ON_THE_WAY = 2
"""Microbatches whose gradients take memory on a worker until they are home."""


class OutsideWeights:
    """The values of such parameters on one worker. Called by the thread whose turn it is.

    Args:
        device: The worker's.
        store: The parameters.
        uploads: The worker's queue.
        updated: Gives the event that a parameter has the values to compute with.
    """

    def __init__(
        self,
        device: Device,
        *,
        store: HostStore,
        uploads: TransferQueue,
        updated: Callable[[Sequence[nn.Parameter]], Event],
    ) -> None:
        self._device = device
        self._store = store
        self._uploads = uploads
        self._updated = updated
        # By the number of the visit, and whether it is needed before the visit's blocks.
        self._expected: dict[int, dict[nn.Parameter, bool]] = {}
        self._asked: dict[int, dict[nn.Parameter, bool]] = {}
        self._number = 0  # of the visit
        self._is_planned = False
        self._serving = store.serving
        self._next: Serving | None = None  # of the step that follows
        self._has_left = False  # the last turn of the step is over
        self._following = threading.Lock()
        self._here: dict[nn.Parameter, Tensor] = {}
        self._events: dict[nn.Parameter, Event] = {}
        #: Bytes of what is here or on its way.
        self.num_bytes = 0

    def begin_step(self, *, is_planned: bool) -> None:
        """Begin the uploads that the first visit needs before those of its blocks.

        Args:
            is_planned: Whether the worker's visits are those of the last planned step.
        """
        self._number, self._is_planned = 0, is_planned
        self._serving, self._next, self._has_left = self._store.serving, None, False
        if is_planned:
            self._expected = self._asked or self._expected
            self._asked = {}
            for parameter, is_first in self._expected.get(0, {}).items():
                if is_first:
                    self._bring(parameter, Urgency.WEIGHTS)

    def begin_ahead(self) -> None:
        """Begin what else the first two visits need."""
        if self._is_planned:
            self._expect(0)
            self._expect(1)

    def follow_step(self) -> None:
        """Hear that a step follows the one that runs. It may be given other values."""
        with self._following:
            self._next = self._store.serving
            self._go_on()

    def leave_step(self) -> None:
        """Hear that the worker has had its last turn of a step."""
        with self._following:
            self._has_left = True
            self._go_on()

    def _go_on(self) -> None:
        """Go on to the step that follows; where it is given other values, bring these."""
        if self._next is None or not self._has_left:
            return
        if self._next is self._serving:
            self._next, self._has_left = None, False
            return
        is_planned = self._is_planned
        self.end_step()
        self.begin_step(is_planned=is_planned)
        self.begin_ahead()

    def leave(self) -> None:
        """Go on to the next visit."""
        self._number += 1
        if self._is_planned:
            self._expect(self._number + 1)

    def _expect(self, number: int) -> None:
        for parameter in self._expected.get(number, ()):
            self._bring(parameter, Urgency.PREFETCH)

    def _bring(self, parameter: nn.Parameter, urgency: Urgency) -> None:
        source = parameter.detach()
        if parameter in self._here or source.is_inference() or not fills_its_memory(source):
            return
        with torch.inference_mode(mode=False):  # else the queue's thread could not write into it
            flat = self._device.empty(torch.Size([source.nbytes]), torch.uint8)
            values = flat.view(source.dtype).as_strided(source.shape, source.stride())
        job = Job(
            name="a parameter outside the blocks",
            urgency=urgency,
            pieces=(),
            after=[self._updated([parameter])],
        )
        job.opens = partial(self._opened, job, self._serving, parameter, flat)
        self._here[parameter] = values
        self._events[parameter] = self._uploads.submit(job)
        self.num_bytes += source.nbytes

    def _opened(
        self, job: Job, serving: Serving, parameter: nn.Parameter, flat: Tensor
    ) -> Sequence[tuple[Tensor, Tensor]]:
        previous = serving.begin_reading()
        job.event.when_done(partial(serving.end_reading, previous=previous))
        served = self._store.previous.get(parameter, parameter) if previous else parameter
        return [(flat, bytes_of(served.detach()))]

    def values(
        self, parameter: nn.Parameter, *, wait: Callable[[Event], None], is_first: bool = False
    ) -> Tensor:
        """Return the values of a parameter, for compute that is launched from now on.

        Args:
            parameter: The parameter.
            wait: Lets the worker's compute wait.
            is_first: Whether none of the visit's blocks has run.
        """
        if self._is_planned:
            self._asked.setdefault(self._number, {}).setdefault(parameter, is_first)
        self._bring(parameter, Urgency.WEIGHTS)
        if parameter not in self._here:  # memory with gaps: one by one
            self._here[parameter] = self._device.upload(self._store.value(parameter))
            self.num_bytes += parameter.nbytes
        event = self._events.pop(parameter, None)
        if event is not None:
            wait(event)
        return self._here[parameter]

    def end_step(self) -> None:
        """Give the memory back."""
        self._is_planned, self._next = False, None
        self._here.clear()
        self._events.clear()
        self.num_bytes = 0


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
                urgency=Urgency.GRADIENTS,
                pieces=pieces,
                after=[self._device.mark_event("gradients outside the blocks are made")],
                is_staged=longest <= self._longest or self._longest >= CHUNK_BYTES,
                done=lambda: landed(home),
            )
        )

    def end_step(self) -> None:
        """Forget what is home."""
        self._on_the_way.clear()
