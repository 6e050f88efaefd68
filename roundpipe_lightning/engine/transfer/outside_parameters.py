"""Parameters of user code outside the blocks (embedding, norm, LM head) on their way.

The engine learns from each step which of them user code asks for during the visits of which stage.
In the next step they are uploaded, like the weights of such a visit, while the visit before
computes; what was not expected is uploaded when it is asked for. What the first visit needs before
its blocks goes before their weights. They stay until the step ends, and as long as a step that is
under way then needs them. Their gradients, one per microbatch, go home while the worker computes
something else:

```
compute    [ visit 0      ][ visit 1: blocks, LM head, loss; backward ][ of the next microbatch
upload     0  [ LM head ]
download                                             [ its gradient ]
```
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from roundpipe_lightning.engine.device.base import Device
from roundpipe_lightning.engine.device.events import Event
from roundpipe_lightning.engine.store.block_layout import bytes_of
from roundpipe_lightning.engine.store.flat_buffers import fills_its_memory
from roundpipe_lightning.engine.store.host_store import HostStore
from roundpipe_lightning.engine.store.weight_versions import Serving
from roundpipe_lightning.engine.transfer.copy_queue import CHUNK_BYTES, Job, Priority, TransferQueue
from roundpipe_lightning.engine.transfer.gradient_reduce import Gradients
from roundpipe_lightning.planning.schedule.stages import Stage

_MOST_ON_THE_WAY = 2
"""Microbatches whose gradients take memory on a worker until they are home."""


class OutsideUses:
    """Which parameters user code asks for in the visits of which stage; all workers share it.

    A step learns for the next one, whichever worker runs a stage then.
    """

    def __init__(self) -> None:
        self._expected: dict[Stage, Mapping[nn.Parameter, bool]] = {}
        self._asked: dict[Stage, dict[nn.Parameter, bool]] = {}

    def begin_step(self) -> None:
        """Expect what the last steps have asked for: one begins, and none is under way."""
        self._expected = {**self._asked} or self._expected
        self._asked = {}

    def follow_step(self) -> None:
        """Expect what the step under way has asked for, too: one follows it."""
        asked = {stage: dict(parameters) for stage, parameters in list(self._asked.items())}
        self._expected = {**self._expected, **asked}

    def expected(self, stage: Stage) -> Mapping[nn.Parameter, bool]:
        """Return the parameters of a stage, and whether each is needed before its blocks."""
        return self._expected.get(stage, {})

    def note(self, stage: Stage, parameter: nn.Parameter, *, is_first: bool) -> None:
        """Note that a parameter was asked for, by the thread whose turn it is."""
        self._asked.setdefault(stage, {}).setdefault(parameter, is_first)


class OutsideWeights:
    """The values of such parameters on one worker. Called by the thread whose turn it is.

    The Trainer's thread may add a step meanwhile, and say that one has ended.

    Args:
        device: The worker's.
        store: The parameters.
        uploads: The worker's queue.
        uses: What is known of the user's code.
    """

    def __init__(
        self,
        device: Device,
        *,
        store: HostStore,
        uploads: TransferQueue,
        uses: OutsideUses,
    ) -> None:
        self._device = device
        self._store = store
        self._uploads = uploads
        self._uses = uses
        self._stages: list[Stage] = []  # of the visits that are known
        self._number = 0  # of the visit among them
        self._is_planned = False
        self._serving = store.serving
        self._next: tuple[Serving, Sequence[Stage]] | None = None  # of the step that follows
        self._has_left = False  # the last turn of the step is over
        self._num_left = 0  # steps whose last turn is over, since the worker had none
        self._num_ended = 0  # and those that have ended everywhere
        self._lock = threading.RLock()
        self._here: dict[nn.Parameter, Tensor] = {}
        self._events: dict[nn.Parameter, Event] = {}
        self._last_used: dict[nn.Parameter, int] = {}  # in which of these steps
        #: Bytes of what is here or on its way.
        self.num_bytes = 0

    # -------------------------------------------------------------------------- steps and visits

    def begin_step(self, stages: Sequence[Stage] = (), *, is_planned: bool) -> None:
        """Begin the uploads that the first visit needs before those of its blocks.

        Args:
            stages: Of the worker's visits.
            is_planned: Whether they come in that order, and the step is one to learn from.
        """
        with self._lock:
            self._num_left = self._num_ended = 0
            self._last_used.clear()
            self._next, self._has_left, self._is_planned = None, False, is_planned
            self._begin(self._store.serving, stages)

    def _begin(self, serving: Serving, stages: Sequence[Stage]) -> None:
        self._serving, self._stages, self._number = serving, list(stages), 0
        if self._is_planned and stages:
            for parameter, is_first in self._uses.expected(stages[0]).items():
                if is_first:
                    self._bring(parameter, Priority.WEIGHTS)

    def begin_ahead(self) -> None:
        """Begin what else the present visit and the next one need."""
        with self._lock:
            for stage in self._stages[self._number : self._number + 2] if self._is_planned else ():
                for parameter in self._uses.expected(stage):
                    self._bring(parameter, Priority.PREFETCH)

    def follow_step(self, stages: Sequence[Stage] = ()) -> None:
        """Hear that a step follows the one that runs. It may be given other values.

        Args:
            stages: Of the worker's visits.
        """
        with self._lock:
            self._next = self._store.serving, stages
            if self._store.serving is self._serving:
                del self._stages[: self._number]
                self._stages += stages
                self._number = 0
                self.begin_ahead()
            self._go_on()

    def leave_step(self) -> None:
        """Hear that the worker has had its last turn of a step."""
        with self._lock:
            self._num_left += 1
            self._has_left = True
            self._go_on()

    def _go_on(self) -> None:
        """Go on to the step that follows; where it is given other values, bring these."""
        if self._next is None or not self._has_left:
            return
        (serving, stages), self._next, self._has_left = self._next, None, False
        if serving is not self._serving:
            self._forget()
            self._begin(serving, stages)
            self.begin_ahead()

    def release(self) -> None:
        """Go on to the next visit."""
        with self._lock:
            self._number += 1
            self.begin_ahead()

    def end_first(self) -> None:
        """Hear that the first step under way has ended everywhere: drop what it alone has used."""
        with self._lock:
            self._num_ended += 1
            stages = {*self._stages[self._number :]}
            wanted = {p for stage in stages for p in self._uses.expected(stage)}
            for parameter in [p for p in self._here if p not in wanted]:
                if self._last_used.get(parameter, -1) < self._num_ended:
                    self._drop(parameter)

    def end_step(self) -> None:
        """Give the memory back."""
        with self._lock:
            self._is_planned, self._next = False, None
            self._forget()

    def _forget(self) -> None:
        for parameter in list(self._here):
            self._drop(parameter)

    def _drop(self, parameter: nn.Parameter) -> None:
        del self._here[parameter]
        self._events.pop(parameter, None)
        self.num_bytes -= parameter.nbytes

    # -------------------------------------------------------------------------------- the values

    def _bring(self, parameter: nn.Parameter, priority: Priority) -> None:
        source = parameter.detach()
        if parameter in self._here or source.is_inference() or not fills_its_memory(source):
            return
        with torch.inference_mode(mode=False):  # else the queue's thread could not write into it
            flat = self._device.empty(torch.Size([source.nbytes]), torch.uint8)
            values = flat.view(source.dtype).as_strided(source.shape, source.stride())
        job = Job(
            name="a parameter outside the blocks",
            priority=priority,
            pieces=(),
            after=self._store.updates_of([parameter]),
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
        with self._lock:
            if self._is_planned and self._number < len(self._stages):
                self._uses.note(self._stages[self._number], parameter, is_first=is_first)
            self._last_used[parameter] = self._num_left
            self._bring(parameter, Priority.WEIGHTS)
            if parameter not in self._here:  # memory with gaps: one by one
                self._here[parameter] = self._device.upload(self._store.value(parameter))
                self.num_bytes += parameter.nbytes
            values, event = self._here[parameter], self._events.pop(parameter, None)
        if event is not None:
            wait(event)
        return values


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
