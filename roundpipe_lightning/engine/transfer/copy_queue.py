"""Transfer queues: what is copied to and from a worker, in the order in which compute waits for it.

Steps W2 and W6 of docs/design.md; docs/engine.md (queues) says who goes first, and why in chunks.

```
submit(weights, 80 MiB)   submit(boundary)
upload    [ weights 1 ] .. [ weights 4 ][ boundary ][ weights 5 ]
                                        ▲ four chunks were in flight: it could not go earlier
```

A copy that fails ends the step: every job is given up and its event releases who waits. `abort`
does the same from outside. The queue can be used again after `drain`.
"""

from __future__ import annotations

import contextlib
import ctypes
import heapq
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import IntEnum

from torch import Tensor

from roundpipe_lightning.engine.device.base import CopyQueue, Device
from roundpipe_lightning.engine.device.events import Event, HostEvent

# Chunks that a queue has given to its device: enough to keep the bus busy while the queue's thread
# waits for Python's lock.
MOST_IN_FLIGHT = 4


class Priority(IntEnum):
    """Order of jobs; the lowest goes first."""

    BOUNDARY = 0  # a boundary, or its gradient: an action waits for it
    WEIGHTS = 1  # weights of the stage run that computes, or computes next
    PREFETCH = 2  # weights of a later stage run
    GRADIENTS = 3  # gradients: nothing in the step waits for them but its end


@dataclass(kw_only=True, eq=False)
class Job:
    """Copies that belong together."""

    name: str
    priority: Priority
    # pairs of destination and source; flat ones of bytes are cut into chunks
    pieces: Sequence[tuple[Tensor, Tensor]]
    after: Sequence[Event] = ()  # what must be done before the first copy
    # called in the queue's thread when all is there, before the event is set
    done: Callable[[], None] | None = None
    is_direct: bool = False  # whether it comes from another device, without the host
    # called in the queue's thread before the first copy; returns the pieces
    opens: Callable[[], Sequence[tuple[Tensor, Tensor]]] | None = None
    # the end of the job. A device may wait for it when the last chunk was issued
    event: HostEvent = field(init=False)
    num_waits: int = field(init=False)  # how much of `after` is not done yet; the queue's
    is_over: bool = field(init=False, default=False)  # ended or given up; the queue's
    _chunks: Iterator[tuple[Tensor, Tensor]] | None = field(init=False, default=None)
    _next: tuple[Tensor, Tensor] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.event = HostEvent(self.name)

    def take_chunk(self, chunk_bytes: int) -> tuple[tuple[Tensor, Tensor] | None, bool]:
        """Return the next chunk to copy, None if none is left, and whether it is the last one."""
        if self._chunks is None:
            pieces = self.pieces if self.opens is None else self.opens()
            self._chunks = (chunk for d, s in pieces for chunk in cut_up(d, s, chunk_bytes))
            self._next = next(self._chunks, None)
        chunk, self._next = self._next, next(self._chunks, None)
        return chunk, self._next is None

    def let_go(self) -> None:
        """Forget the tensors: an event may live longer than what was copied."""
        self.pieces, self.after, self.done, self.opens = (), (), None, None


@dataclass(kw_only=True, eq=False)
class _Chunk:
    """A copy that is in flight."""

    job: Job
    event: Event
    dst: Tensor
    src: Tensor  # where it comes from: memory that nobody holds is used again
    is_last: bool


@dataclass(eq=False)
class TransferQueue:
    """The copies of one direction of a worker. Its thread starts with the first job."""

    device: Device
    queue: CopyQueue
    _: KW_ONLY
    # called, in the queue's thread, with an error in a copy and the job's name
    on_failure: Callable[[BaseException, str], None]
    name: str  # for messages, for example `upload queue of worker 1 (cuda:1)`

    def __post_init__(self) -> None:
        self.num_bytes = 0  # bytes copied from or to the host since the beginning
        self.num_direct_bytes = 0  # bytes copied from other devices
        lock = threading.RLock()
        self._changed = threading.Condition(lock)  # there is work, or no more
        # Who waits for the end is not woken by every chunk: it would take Python's lock each time.
        self._is_idle = threading.Condition(lock)
        self._in_flight: deque[_Chunk] = deque()
        self._present = ""  # the name of the job that it works at
        self._ready: list[tuple[int, int, Job]] = []
        self._jobs: dict[Job, int] = {}  # not over, with their numbers
        self._num_submitted = 0
        self._is_busy = False
        self._is_closed = False
        self._thread: threading.Thread | None = None

    # ----------------------------------------------------------------------- from other threads

    def submit(self, job: Job) -> Event:
        """Take a job and return the end of it.

        A RuntimeError says that the system gives no thread; the job is not taken then.
        """
        job.num_waits = len(job.after)
        with self._changed:
            assert not self._is_closed, "the engine is open"
            if self._thread is None:
                thread = threading.Thread(target=self._serve, name=self.name, daemon=True)
                thread.start()
                self._thread = thread
            self._jobs[job] = self._num_submitted
            self._num_submitted += 1
            if not job.num_waits:
                self._push(job)
        for event in job.after:
            event.when_done(lambda: self._came(job))
        return job.event

    def _came(self, job: Job) -> None:
        with self._changed:
            job.num_waits -= 1
            if not job.num_waits and not job.is_over:
                self._push(job)

    def _push(self, job: Job) -> None:
        heapq.heappush(self._ready, (job.priority, self._jobs[job], job))
        self._changed.notify()

    def abort(self) -> None:
        """Give every job up. Copies in flight come to their end; see `drain`."""
        with self._changed:
            given_up = list(self._jobs)
            for job in given_up:
                job.is_over = True
            self._jobs.clear()
            self._ready.clear()
            self._is_idle.notify_all()
        for job in given_up:
            job.event.abort()
            job.let_go()

    def drain(self, *, timeout_seconds: float) -> bool:
        """Wait until every job is over and nothing is in flight; return whether that came to be."""
        with self._is_idle:
            return self._is_idle.wait_for(
                lambda: not self._jobs and not self._is_busy, timeout=timeout_seconds
            )

    @property
    def num_jobs(self) -> int:
        return len(self._jobs)

    def close(self, *, timeout_seconds: float = 10.0) -> None:
        """Give up what is left and end the thread; one that hangs in a copy is left behind."""
        self.abort()
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_seconds)

    # ----------------------------------------------------------------------- in its own thread

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ready or self._in_flight or self._is_closed)
                self._is_busy = True
                job = heapq.heappop(self._ready)[2] if self._ready else None
            if job is None and not self._in_flight:
                return  # closed
            try:
                if job is not None:
                    self._issue(job)
                if job is None or len(self._in_flight) == MOST_IN_FLIGHT:
                    self._finish(self._in_flight.popleft())
            except BaseException as error:  # noqa: BLE001 - handed to the step, which raises it
                self._fail(error)
            del job
            with self._changed:
                self._is_busy = bool(self._in_flight)
                if not self._is_busy and not self._jobs:
                    self._is_idle.notify_all()

    def _issue(self, job: Job) -> None:
        self._present = job.name
        chunk, is_last = job.take_chunk(self.device.chunk_bytes)
        if chunk is None:  # there was nothing to copy
            self._end(job)
            return
        dst, src = chunk
        if self.queue is CopyQueue.UPLOAD and not job.is_direct:
            src = _page_locked(src, self.device)
        # `after` has happened, or failed: that raises here. Emulated time counts from it.
        event = self.device.copy(dst, src, queue=self.queue, after=job.after)
        self._in_flight.append(_Chunk(job=job, event=event, dst=dst, src=src, is_last=is_last))
        if is_last:
            job.event.stand_for(event)
        else:
            with self._changed:
                if not job.is_over:
                    self._push(job)

    def _finish(self, chunk: _Chunk) -> None:
        job = chunk.job
        self._present = job.name
        chunk.event.wait()
        if job.is_direct:
            self.num_direct_bytes += chunk.dst.nbytes
        else:
            self.num_bytes += chunk.dst.nbytes
        if chunk.is_last and not job.is_over:
            self._end(job)

    def _end(self, job: Job) -> None:
        if job.done is not None:
            job.done()
        with self._changed:
            if job.is_over:
                return
            job.is_over = True
            del self._jobs[job]
        job.let_go()
        job.event.set()

    def _fail(self, error: BaseException) -> None:
        self.on_failure(error, f"{self.name}: {self._present}")
        self.abort()
        while self._in_flight:
            with contextlib.suppress(Exception):  # the device's further errors say no more
                self._in_flight[0].event.wait()
            self._in_flight.popleft()


def cut_up(dst: Tensor, src: Tensor, chunk_bytes: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Cut a copy into chunks; what is not flat bytes stays whole."""
    num_bytes = src.nbytes
    if num_bytes <= chunk_bytes or src.dim() != 1 or src.element_size() != 1:
        yield dst, src
        return
    for start in range(0, num_bytes, chunk_bytes):
        stop = min(start + chunk_bytes, num_bytes)
        yield dst[start:stop], src[start:stop]


def _page_locked(src: Tensor, device: Device) -> Tensor:
    """Return flat host bytes, or a page-locked copy where copies of them would stop the host.

    It is made in this thread alone and without Python's lock: a tensor's own `copy_` would start a
    pool of threads for each thread that calls it.
    """
    is_flat = src.dim() == 1 and src.element_size() == 1
    if device.staging is None or not is_flat or device.is_page_locked(src):
        return src
    staging = device.staging(src.nbytes)
    ctypes.memmove(staging.data_ptr(), src.data_ptr(), src.nbytes)
    return staging
