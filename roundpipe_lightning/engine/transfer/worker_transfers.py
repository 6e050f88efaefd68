"""What one worker moves: its queues, its slots for weights and its staging for gradients.

Only workers that do not compute in host memory have it. Memory is made between steps and nowhere
else, and all of it is given back by `close`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import Tensor, nn

from roundpipe_lightning.engine.device.base import CopyQueue, Device
from roundpipe_lightning.engine.device.events import Event
from roundpipe_lightning.engine.device.host_memory import own_pages
from roundpipe_lightning.engine.store.block_layout import BlockLayout, Layouts
from roundpipe_lightning.engine.store.host_store import HostStore
from roundpipe_lightning.engine.transfer.copy_queue import (
    CHUNK_BYTES,
    MOST_UNDER_WAY,
    TransferQueue,
)
from roundpipe_lightning.engine.transfer.gradient_reduce import (
    FlatGradients,
    GradientReducer,
    GradientStaging,
)
from roundpipe_lightning.engine.transfer.outside_parameters import (
    OutsideGradients,
    OutsideUses,
    OutsideWeights,
)
from roundpipe_lightning.engine.transfer.weight_prefetch import StageRun, WorkerWeights
from roundpipe_lightning.planning.schedule.stages import Stage, StageKind


class WaitedFor(Enum):
    """What compute waits for."""

    WEIGHTS = "weights"
    """Uploads of blocks."""

    BOUNDARIES = "boundaries"
    """Tensors between stages, and their gradients."""


@dataclass(frozen=True, kw_only=True)
class WorkerTraffic:
    """What a worker has moved in a step.

    Attributes:
        uploaded_bytes: Bytes that its upload queue has copied from the host.
        downloaded_bytes: The same of its download queue.
        direct_bytes: Bytes that have come from other devices, without the host.
        weights_wait_seconds: How long its compute has waited for weights.
        boundaries_wait_seconds: The same for boundaries and their gradients.
        waits: Beginning and end of each of these waits, in seconds of the step's clock.
    """

    uploaded_bytes: int = 0
    downloaded_bytes: int = 0
    direct_bytes: int = 0
    weights_wait_seconds: float = 0.0
    boundaries_wait_seconds: float = 0.0
    waits: tuple[tuple[float, float], ...] = ()

    def waited_within(self, start_seconds: float, end_seconds: float) -> float:
        """Return how much of a span of the step's clock the worker's compute has waited."""
        spans = ((max(a, start_seconds), min(b, end_seconds)) for a, b in self.waits)
        return sum(max(0.0, b - a) for a, b in spans)


@dataclass(frozen=True, kw_only=True)
class WorkerRuns:
    """A worker's part of a plan.

    Attributes:
        visits: What it runs, in order.
        num_slots: Stages whose weights it holds at once.
        resident: Blocks that stay on it.
        room_for: What else it may run of other batches, for which memory is made, too.
    """

    visits: tuple[StageRun, ...]
    num_slots: int
    resident: tuple[nn.Module, ...]
    room_for: tuple[StageRun, ...] = ()

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages of its visits."""
        return tuple(visit.stage for visit in self.visits)


class WorkerTransfers:
    """All that moves between the host and one worker.

    Args:
        device: The worker's.
        worker: The worker's name, for people.
        layouts: How blocks lie in memory.
        store: The parameters.
        uses: What is known of the user's code outside the blocks.
        names: What blocks are called.
        on_failure: Told of an error in a copy, and where it was.
    """

    def __init__(
        self,
        device: Device,
        *,
        worker: str,
        layouts: Layouts,
        store: HostStore,
        uses: OutsideUses,
        names: Mapping[nn.Module, str],
        on_failure: Callable[[BaseException, str], None],
    ) -> None:
        self._device = device
        self._layouts = layouts
        self.uploads, self.downloads = (
            TransferQueue(
                device, queue, on_failure=on_failure, name=f"{queue.value} queue of {worker}"
            )
            for queue in (CopyQueue.UPLOAD, CopyQueue.DOWNLOAD)
        )
        self.weights = WorkerWeights(
            device,
            layouts=layouts,
            store=store,
            uploads=self.uploads,
            names=names,
            worker=worker,
        )
        self.outside = OutsideWeights(
            device,
            store=store,
            uploads=self.uploads,
            uses=uses,
        )
        self.outside_gradients = OutsideGradients(
            device, self.downloads, longest=store.longest_outside
        )
        self._longest_outside = store.longest_outside
        self._gradients = GradientStaging(
            device, layouts=layouts, downloads=self.downloads, worker=worker
        )
        self._staging: dict[CopyQueue, list[Tensor]] = {}
        self._prepared: tuple[WorkerRuns, int] | None = None
        self._waits: list[tuple[WaitedFor, Any, Any]] = []
        self._ended: dict[object, list[tuple[WaitedFor, Any, Any]]] = {}  # by their steps
        self._before = (0, 0, 0)

    # ----------------------------------------------------------------------------------- a step

    def begin_step(self, step: WorkerRuns, *, is_planned: bool = True) -> None:
        """Make room, and begin the uploads of the first visit.

        Args:
            step: What the worker will run.
            is_planned: Whether in that order, so that weights can be uploaded ahead.
        """
        if self._prepared != (step, self._layouts.version):
            self._prepare(step)
            self._prepared = (step, self._layouts.version)
        self._waits.clear()
        self._ended.clear()
        self._before = self._counted
        self.outside.begin_step(step.stages, is_planned=is_planned)
        self.weights.begin_step(step.visits if is_planned else ())

    def begin_ahead(self) -> None:
        """Begin the uploads of later visits, as far as there is room."""
        self.weights.begin_ahead()
        self.outside.begin_ahead()

    def can_follow(self, step: WorkerRuns) -> bool:
        """Say whether a step can begin while a planned one runs: its memory has been made."""
        if self._prepared is None or self._prepared[1] != self._layouts.version:
            return False
        present = self._prepared[0]
        return (
            (step.num_slots, step.resident) == (present.num_slots, present.resident)
            and self.weights.has_room_for(step.visits)
            and self._gradient_bytes(step.visits) <= self._gradients.num_bytes
            and self._staged_bytes(step.visits) <= self._num_staged(CopyQueue.UPLOAD)
        )

    def follow_step(self, step: WorkerRuns) -> None:
        """Begin the first uploads of a step while the one before it may still run.

        Args:
            step: What the worker will run; it can follow.
        """
        self.weights.follow(step.visits)
        self.outside.follow_step(step.stages)

    def leave_step(self, step: object) -> None:
        """Hear that the worker has had its last turn of a step: what comes is the next one's."""
        self._ended[step], self._waits = self._waits, []
        self.outside.leave_step()

    def _prepare(self, step: WorkerRuns) -> None:
        visits = (*step.visits, *step.room_for)
        self.weights.prepare(visits, num_slots=step.num_slots, resident=step.resident)
        gradients = self._gradient_bytes(visits)
        self._gradients.prepare(gradients)
        self._stage(CopyQueue.DOWNLOAD, max(gradients, self._longest_outside))
        self._stage(CopyQueue.UPLOAD, self._staged_bytes(visits))

    def _gradient_bytes(self, visits: Iterable[StageRun]) -> int:
        """Return the bytes of the gradients of the largest visit."""
        return max(
            (
                sum(self._layouts.of(block).form.gradient_bytes for block in visit.blocks)
                for visit in visits
                if visit.stage.kind is not StageKind.FORWARD
            ),
            default=0,
        )

    def _staged_bytes(self, visits: Iterable[StageRun]) -> int:
        """Return how long the buffers for staged uploads must be."""
        blocks = {block for visit in visits for block in visit.blocks}
        # A job with one piece that is not page-locked stages all of its pieces.
        layouts = (self._layouts.of(block) for block in blocks)
        staged = (one.pieces for one in layouts if not all(p.is_locked for p in one.pieces))
        loose = (piece.source.nbytes for pieces in staged for piece in pieces)
        return min(CHUNK_BYTES, max(loose, default=0))

    def _num_staged(self, queue: CopyQueue) -> int:
        return min((buffer.nbytes for buffer in self._staging.get(queue, ())), default=0)

    def _stage(self, queue: CopyQueue, longest: int) -> None:
        """Have page-locked buffers for staged jobs, no longer than they need be."""
        size = min(CHUNK_BYTES, longest)
        if size <= self._num_staged(queue):
            return
        self._unstage(queue)
        buffers = [own_pages(size) for _ in range(MOST_UNDER_WAY)]
        for buffer in buffers:
            self._device.pin(buffer)
        self._staging[queue] = buffers
        transfers = self.uploads if queue is CopyQueue.UPLOAD else self.downloads
        transfers.stage_through(buffers)

    def _unstage(self, queue: CopyQueue) -> None:
        for buffer in self._staging.pop(queue, ()):
            self._device.unpin(buffer)

    def await_event(self, event: Event, reason: WaitedFor) -> None:
        """Let the worker's compute wait, and note how long it did."""
        if event.is_done:
            self._device.await_event(event)
            return
        before = self._device.mark()
        self._device.await_event(event)
        self._waits.append((reason, before, self._device.mark()))

    def send_gradients(
        self,
        stage: int,
        blocks: Sequence[tuple[BlockLayout, Sequence[nn.Parameter]]],
        *,
        microbatches: Sequence[int],
        reducer: GradientReducer,
        last: int,
        shared: Sequence[Set[nn.Parameter]],
    ) -> None:
        """Send a visit's gradients to the reducer.

        Args:
            stage: Index of the stage.
            blocks: Its blocks, with their leaves.
            microbatches: Whose gradients they are, ascending.
            reducer: Takes them when they have landed.
            last: The microbatch that ends the visit.
            shared: Parameters that have others, too: summed per microbatch first.
        """
        several = {p for layout, _ in blocks for known in shared for p in layout.trained & known}
        add_reserved = reducer.reserve_shared(last) if several else None

        def landed(gradients: FlatGradients) -> None:
            if add_reserved is not None:
                add_reserved(gradients.take(several))
            reducer.add_stage(stage, microbatches, gradients)

        if not self._gradients.send(blocks, landed=landed):
            if add_reserved is not None:
                add_reserved({})
            reducer.add_stage(stage, microbatches, {})

    @property
    def num_bytes(self) -> int:
        """Bytes on the device: slots, blocks that stay, and staging."""
        return self.weights.num_bytes + self._gradients.num_bytes + self.outside.num_bytes

    @property
    def host_bytes(self) -> int:
        """Page-locked bytes of the queues' own."""
        return sum(buffer.nbytes for some in self._staging.values() for buffer in some)

    # ------------------------------------------------------------------------------ the end of it

    def drain(self, *, timeout_seconds: float) -> bool:
        """Wait for everything that is under way; say whether that was done in time."""
        end = time.monotonic() + timeout_seconds
        return all(
            queue.drain(timeout_seconds=max(0.0, end - time.monotonic()))
            for queue in (self.downloads, self.uploads)
        )

    def busy_queues(self) -> Iterator[TransferQueue]:
        """Queues with jobs that are not over."""
        yield from (queue for queue in (self.uploads, self.downloads) if queue.num_jobs)

    def abort(self) -> None:
        """Give up all copies that have not begun, and release who waits for them."""
        self.uploads.abort()
        self.downloads.abort()

    def end_step(self, *, failed: bool = False) -> None:
        """Forget what belongs to the step."""
        self.outside.end_step()
        self.outside_gradients.end_step()
        self.weights.end_step(failed=failed)
        if failed:
            self._gradients.abandon()

    @property
    def _counted(self) -> tuple[int, int, int]:
        up, down = self.uploads, self.downloads
        return up.num_bytes, down.num_bytes, up.num_direct_bytes

    def traffic(self, step: object) -> WorkerTraffic:
        """Return what was moved since the step began; after the device was synchronized.

        Args:
            step: The step. Of one that follows another the bytes are counted from the end of that.
        """
        seconds = dict.fromkeys(WaitedFor, 0.0)
        waits = []
        for reason, before, after in self._ended.pop(step, ()):
            span = (self._device.seconds(before), self._device.seconds(after))
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
        """End the threads and give all memory back."""
        for queue in (self.uploads, self.downloads):
            queue.close()
        for direction in list(self._staging):
            self._unstage(direction)
        self.weights.clear()
        self._gradients.clear()
        self._device.close()
