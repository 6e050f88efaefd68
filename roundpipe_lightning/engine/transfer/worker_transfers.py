"""Transfers between host and workers: queues, memory for weights, staging for gradients.

Memory is made between steps and nowhere else, and all of it is given back by `close`. Workers that
compute in host memory move nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass
from enum import Enum
from time import monotonic
from typing import Any

import torch
from torch import nn

from roundpipe_lightning.engine.device.base import CopyQueue, Device
from roundpipe_lightning.engine.device.events import Event
from roundpipe_lightning.engine.device.host_memory import PinnedPool, return_freed_memory
from roundpipe_lightning.engine.store.block_layout import Layouts
from roundpipe_lightning.engine.store.host_store import HostStore
from roundpipe_lightning.engine.transfer.copy_queue import TransferQueue
from roundpipe_lightning.engine.transfer.gradient_downloads import GradientDownloads, HostSums
from roundpipe_lightning.engine.transfer.weight_prefetch import (
    OutsideUses,
    StageRun,
    WeightPrefetcher,
)
from roundpipe_lightning.errors import WatchdogError
from roundpipe_lightning.planning.schedule.stages import StageKind

_MOST_FREED = 2**28  # bytes that CPU workers leave free in the heap from step to step
_TRIM_SECONDS = 1.0  # how long looking for them is left out

_POLL_SECONDS = 0.2  # the Trainer's thread answers to Ctrl-C so often


class WaitedFor(Enum):
    """Kinds of transfers that compute waits for."""

    WEIGHTS = "weights"  # uploads of blocks
    BOUNDARIES = "boundaries"  # tensors between stages, and their gradients


@dataclass(frozen=True, kw_only=True)
class WorkerTraffic:
    """Bytes and waits of a worker's transfers in a step."""

    uploaded_bytes: int = 0  # bytes that its upload queue has copied from the host
    downloaded_bytes: int = 0  # the same of its download queue
    direct_bytes: int = 0  # bytes that have come from other devices, without the host
    weights_wait_seconds: float = 0.0  # how long its compute has waited for weights
    boundaries_wait_seconds: float = 0.0  # the same for boundaries and their gradients
    # beginning and end of each of these waits, in seconds of the step's clock
    waits: tuple[tuple[float, float], ...] = ()

    def waited_within(self, start_seconds: float, end_seconds: float) -> float:
        """Return the seconds of a span of the step's clock in which the worker's compute waited."""
        spans = ((max(a, start_seconds), min(b, end_seconds)) for a, b in self.waits)
        return sum(max(0.0, b - a) for a, b in spans)


@dataclass(frozen=True, kw_only=True)
class WorkerRuns:
    """A worker's part of a plan."""

    runs: tuple[StageRun, ...]
    num_slots: int  # stages whose weights it holds at once
    resident: tuple[nn.Module, ...]  # blocks that stay on it
    # what else it may run of other batches, for which memory is made, too
    room_for: tuple[StageRun, ...] = ()


_NO_RUNS = WorkerRuns(runs=(), num_slots=1, resident=())


@dataclass(eq=False)
class WorkerTransfers:
    """All that moves between the host and one worker, which is called `worker` in messages."""

    device: Device
    _: KW_ONLY
    worker: str
    layouts: Layouts
    store: HostStore
    uses: OutsideUses
    sums: HostSums
    names: Mapping[nn.Module, str]
    on_failure: Callable[[BaseException, str], None]

    def __post_init__(self) -> None:
        self.pool = self.sums.pool
        self.uploads, self.downloads = (
            TransferQueue(
                self.device,
                queue,
                on_failure=self.on_failure,
                name=f"{queue.value} queue of {self.worker}",
            )
            for queue in (CopyQueue.UPLOAD, CopyQueue.DOWNLOAD)
        )
        self.weights = WeightPrefetcher(
            self.device,
            layouts=self.layouts,
            store=self.store,
            uploads=self.uploads,
            uses=self.uses,
            names=self.names,
            worker=self.worker,
        )
        self.gradients = GradientDownloads(
            self.device,
            layouts=self.layouts,
            downloads=self.downloads,
            sums=self.sums,
            worker=self.worker,
        )
        self._prepared: tuple[WorkerRuns, int] | None = None
        self._waits: list[tuple[WaitedFor, Any, Any]] = []
        self._ended: dict[object, list[tuple[WaitedFor, Any, Any]]] = {}  # by their steps
        self._before = (0, 0, 0)

    def begin_step(self, step: WorkerRuns, *, is_planned: bool = True) -> None:
        """Make room, and begin the uploads of the first stage run; see `WeightPrefetcher`."""
        if self._prepared != (step, self.layouts.version):
            runs = (*step.runs, *step.room_for)
            self.weights.prepare(runs, num_slots=step.num_slots, resident=step.resident)
            self.gradients.prepare(self._gradient_bytes(runs))
            self._prepared = (step, self.layouts.version)
        self._waits.clear()
        self._ended.clear()
        self._before = self._counted
        self.weights.begin_step(step.runs, is_planned=is_planned)

    def can_overlap(self, step: WorkerRuns) -> bool:
        """Return whether a step can begin while a planned one runs: its memory has been made."""
        if self._prepared is None or self._prepared[1] != self.layouts.version:
            return False
        present = self._prepared[0]
        return (
            (step.num_slots, step.resident) == (present.num_slots, present.resident)
            and self.weights.can_overlap(step.runs)
            and self._gradient_bytes(step.runs) <= self.gradients.num_bytes
        )

    def end_turns(self, step: object) -> None:
        self._ended[step], self._waits = self._waits, []

    def _gradient_bytes(self, runs: Iterable[StageRun]) -> int:
        return max(
            (
                sum(self.layouts.of(block).form.gradient_bytes for block in run.blocks)
                for run in runs
                if run.stage.kind is not StageKind.FORWARD
            ),
            default=0,
        )

    def await_event(self, event: Event, reason: WaitedFor) -> None:
        """Let the worker's compute wait, and note how long it did."""
        if event.is_done:
            self.device.await_event(event)
            return
        before = self.device.mark()
        self.device.await_event(event)
        self._waits.append((reason, before, self.device.mark()))

    @property
    def num_bytes(self) -> int:
        return self.weights.num_bytes + self.gradients.num_bytes

    def drain(self, timeout_seconds: float) -> bool:
        end = monotonic() + timeout_seconds
        return all(
            queue.drain(timeout_seconds=max(0.0, end - monotonic()))
            for queue in (self.downloads, self.uploads)
        )

    def abort(self) -> None:
        self.uploads.abort()
        self.downloads.abort()

    def end_step(self, *, failed: bool = False) -> None:
        self.gradients.end_step(failed=failed)
        self.weights.end_step(failed=failed)

    @property
    def _counted(self) -> tuple[int, int, int]:
        up, down = self.uploads, self.downloads
        return up.num_bytes, down.num_bytes, up.num_direct_bytes

    def traffic(self, step: object) -> WorkerTraffic:
        """Return the traffic since the step began; after the device was synchronized.

        Of a step that follows another the bytes are counted from the end of that.
        """
        seconds = dict.fromkeys(WaitedFor, 0.0)
        waits = []
        for reason, before, after in self._ended.pop(step, ()):
            span = (self.device.seconds(before), self.device.seconds(after))
            waits.append(span)
            seconds[reason] += span[1] - span[0]
        (up, down, direct), self._before = self._before, self._counted
        return WorkerTraffic(
            uploaded_bytes=self._before[0] - up,
            downloaded_bytes=self._before[1] - down,
            direct_bytes=self._before[2] - direct,
            weights_wait_seconds=seconds[WaitedFor.WEIGHTS],
            boundaries_wait_seconds=seconds[WaitedFor.BOUNDARIES],
            waits=tuple(waits),
        )

    def close(self) -> None:
        for queue in (self.uploads, self.downloads):
            queue.close()
        self.weights.clear()
        self.gradients.clear()
        self.device.staging = None
        self.device.close()


class Transfers:
    """Everything that moves between host and workers; `transfers` has None for CPU workers."""

    def __init__(
        self,
        store: HostStore,
        *,
        devices: Sequence[Device],
        names: Mapping[nn.Module, str],
        root: Device | None = None,
    ) -> None:
        self._blocks = tuple(names)
        self._store = store
        self.layouts = Layouts(store)
        moving = [device for device in devices if not device.shares_host_memory]
        self._pool = PinnedPool(moving[0] if moving else devices[0])
        self._sums = HostSums(self._pool, on_failure=self._failed)
        self._uses = OutsideUses()
        self._error: tuple[BaseException, str] | None = None
        self._on_failure: Callable[[], None] = lambda: None
        self._trimmed_seconds = 0.0

        def transfers_of(device: Device, worker: str) -> WorkerTransfers | None:
            if device.shares_host_memory:
                return None
            return WorkerTransfers(
                device,
                worker=f"{worker} ({device.name})",
                layouts=self.layouts,
                store=store,
                uses=self._uses,
                sums=self._sums,
                names=names,
                on_failure=self._failed,
            )

        self.transfers = tuple(
            transfers_of(device, f"worker {index}") for index, device in enumerate(devices)
        )
        #: Those of the device where user code computes, which has no blocks.
        self.root = None if root is None else transfers_of(root, "user code")
        self._moving = tuple(one for one in (*self.transfers, self.root) if one is not None)
        for device in moving:
            device.staging = self._pool.take if self._pool.is_locked else None

    def begin(
        self,
        steps: Sequence[WorkerRuns],
        *,
        is_planned: bool = True,
        on_failure: Callable[[], None] = lambda: None,
        making_room: Callable[[int], AbstractContextManager[None]] = lambda worker: nullcontext(),
    ) -> None:
        """Begin a step's transfers.

        Args:
            is_planned: Whether in that order, so that weights can be uploaded ahead.
            on_failure: Called, in any thread, when a copy has failed.
            making_room: Entered while memory for weights is made on a worker, by its index.
        """
        self._error, self._on_failure = None, on_failure
        self._store.is_given_up = False
        if not self._moving:
            return
        with torch.inference_mode(mode=False):  # what is made here outlives an evaluation
            self._store.rewritten.clear()  # what is uploaded from now on is not older
            self._store.renew_copies()
            for block in self._blocks:
                self.layouts.renewed(block)
            if is_planned:
                self._uses.begin_step()
            for index, (step, transfers) in enumerate(zip(steps, self.transfers, strict=True)):
                if transfers is not None:
                    with making_room(index):
                        transfers.begin_step(step, is_planned=is_planned)
            if self.root is not None:
                self.root.begin_step(_NO_RUNS, is_planned=False)
            # No worker's later run goes before another's first one.
            for transfers in self._moving:
                transfers.weights.begin_ahead()

    def can_overlap(self, steps: Sequence[WorkerRuns]) -> bool:
        """Return whether a step can begin while one runs: memory and layouts stay as they are."""
        pairs, copies = zip(steps, self.transfers, strict=True), self._store.copies
        return not self._moving or (
            (copies is None or copies.are_cast)
            and all(map(self.layouts.is_renewed, self._blocks))
            and all(one is None or one.can_overlap(step) for step, one in pairs)
        )

    def begin_overlapped(self, steps: Sequence[WorkerRuns]) -> None:
        self._uses.begin_overlapped()
        for step, transfers in zip(steps, self.transfers, strict=True):
            if transfers is not None:
                transfers.weights.begin_overlapped(step.runs)

    def end_first(self) -> None:
        for transfers in self._moving:
            transfers.weights.end_first()

    @property
    def has_failed(self) -> bool:
        return self._error is not None

    def _failed(self, error: BaseException, place: str) -> None:
        if self._error is None:
            self._error = (error, place)
        self.abort()
        self._on_failure()

    def take_error(self) -> tuple[BaseException, str] | None:
        error, self._error = self._error, None
        return error

    def finish(
        self,
        *,
        timeout_seconds: float,
        is_alone: bool = True,
        landed: Callable[[float], bool] = lambda seconds: True,
    ) -> None:
        """Wait for what is in flight. A copy that failed is raised by others; see `take_error`.

        Args:
            is_alone: Whether to wait for all copies: there is no other step in flight.
            landed: Waits so many seconds for gradients, and returns whether all have been added.
        """
        deadline = monotonic() + timeout_seconds
        for is_over in (*(one.drain for one in self._moving if is_alone), landed):
            while not is_over(_POLL_SECONDS):
                if monotonic() > deadline:
                    queues = [q for t in self._moving for q in (t.uploads, t.downloads)]
                    left = ", ".join(queue.name for queue in queues if queue.num_jobs)
                    raise WatchdogError(
                        f"Copies have not ended within {timeout_seconds:g} s (timeout_seconds) "
                        f"after the last action: {left}. Raise "
                        "RoundPipeStrategy(timeout_seconds=...) if they may take so long."
                    )

    def abort(self) -> None:
        self._store.is_given_up = True
        for transfers in self._moving:
            transfers.abort()

    def end(self, *, failed: bool = False, grace_seconds: float = 0.0) -> None:
        """Forget the step; if it was given up, wait so long for copies that are in flight."""
        self._on_failure = lambda: None
        for transfers in self._moving:
            if failed:
                transfers.abort()
                transfers.drain(timeout_seconds=grace_seconds)
            transfers.end_step(failed=failed)
        # Of a step that failed gradients may have landed: the next one's update would take them.
        if self._moving:
            self._sums.drain()
            self._pool.end_step()
        elif monotonic() - self._trimmed_seconds > _TRIM_SECONDS:
            self._trimmed_seconds = monotonic()
            return_freed_memory(least=_MOST_FREED)

    def traffic(self, step: object) -> tuple[WorkerTraffic, ...]:
        return tuple(
            WorkerTraffic() if one is None else one.traffic(step) for one in self.transfers
        )

    @property
    def host_bytes(self) -> int:
        """Page-locked bytes beside those of the parameters."""
        return self._pool.num_bytes

    def close(self) -> None:
        for transfers in self._moving:
            transfers.close()
        self._sums.close()
        self._pool.close()
