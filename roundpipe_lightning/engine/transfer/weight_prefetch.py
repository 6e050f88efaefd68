"""The weights of a worker's visits: uploaded ahead, each into a slot that is free by then.

A visit is a run of actions of one stage on one worker. With two slots:

```
compute   [ visit 0     ][ visit 1       ][ visit 2
upload    0  1           ▲2               ▲3             visit 0 has ended: its slot is free
```

With one slot the upload of visit 1 begins when visit 0 has ended. Blocks that stay on the worker
(`Plan.resident`) have memory of their own: of them only the trainable part is uploaded, at their
first visit of a step, because it has changed since the last one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor, nn

from roundpipe_lightning.engine.device.base import Device
from roundpipe_lightning.engine.device.events import DoneEvent, Event
from roundpipe_lightning.engine.store.block_layout import Layouts, region_bytes
from roundpipe_lightning.engine.store.host_store import HostStore
from roundpipe_lightning.engine.store.weight_versions import Serving
from roundpipe_lightning.engine.transfer.copy_queue import Job, Priority, TransferQueue
from roundpipe_lightning.engine.transfer.weight_buffers import Memory, Region
from roundpipe_lightning.planning.schedule.stages import Stage


@dataclass(frozen=True, kw_only=True)
class StageRun:
    """A visit.

    Attributes:
        stage: Its stage.
        blocks: The stage's blocks, each once.
        wanted: Those of them that will be needed, as far as is known before.
    """

    stage: Stage
    blocks: tuple[nn.Module, ...]
    wanted: tuple[nn.Module, ...]


@dataclass(kw_only=True, eq=False)
class StageWeights:
    """The weights of a visit, there or under way.

    Attributes:
        plan: The visit.
        regions: Where its blocks lie.
        serving: Which values it is given.
        events: The uploads that compute has not waited for yet.
        brought: Blocks that are there or under way.
    """

    plan: StageRun
    regions: Mapping[nn.Module, Region]
    serving: Serving
    events: dict[nn.Module, Event] = field(default_factory=dict)
    brought: set[nn.Module] = field(default_factory=set)


class _Stay:
    """A block that stays on the worker.

    Args:
        region: Memory of its own.
    """

    def __init__(self, region: Region) -> None:
        self.region = region
        self.is_fresh = False  # all of it is there, or under way
        self.event: Event = DoneEvent()  # its last upload
        self._versions: int | None = None  # of the frozen part that is there

    @property
    def has_frozen_part(self) -> bool:
        """Whether what does not change is there."""
        return self._versions == self._present_versions()

    def begin_step(self) -> None:
        """Note that the trainable part has changed, and a frozen one may have."""
        if not self.has_frozen_part or any(p.trained for p in self.region.layout.pieces):
            self.is_fresh = False

    def uploaded(self, event: Event) -> None:
        """Note that what was missing is under way."""
        self.is_fresh, self.event = True, event
        self._versions = self._present_versions()

    def forget(self) -> None:
        """Note that nothing of it need be there."""
        self.is_fresh, self._versions = False, None

    def _present_versions(self) -> int:
        frozen = (p for p in self.region.layout.parameters if not p.requires_grad)
        return sum(parameter._version for parameter in frozen)


class WorkerWeights:
    """The slots of one worker, and what is uploaded into them.

    Called by the thread whose turn it is; the Trainer's thread may add a step meanwhile.

    Args:
        device: The worker's.
        layouts: How blocks lie in memory.
        store: The parameters.
        uploads: The worker's queue.
        names: What blocks are called.
        worker: The worker's name, for people.
    """

    def __init__(
        self,
        device: Device,
        *,
        layouts: Layouts,
        store: HostStore,
        uploads: TransferQueue,
        names: Mapping[nn.Module, str],
        worker: str,
    ) -> None:
        self._device = device
        self._layouts = layouts
        self._uploads = uploads
        self._store = store
        self._names = names
        self._worker = worker
        self._slots: list[Memory] = []
        self._stays: dict[nn.Module, _Stay] = {}
        self._visits: list[
            StageWeights | None
        ] = []  # of the step, as far as their uploads have begun
        self._places: dict[tuple[StageRun, int], Mapping[nn.Module, Region]] = {}  # and the slot
        self._plans: Sequence[tuple[StageRun, Serving]] = ()
        self._serving = layouts.serving  # that of the last step
        self._number = 0  # of the visit that computes, or computes next
        self._lock = threading.RLock()

    # --------------------------------------------------------------------------------- the memory

    def prepare(
        self, plans: Iterable[StageRun], *, num_slots: int, resident: Sequence[nn.Module] = ()
    ) -> None:
        """Make room for some visits. Memory is made, or made larger, here and nowhere else.

        Args:
            plans: The visits.
            num_slots: How many of them have their weights here at once.
            resident: Blocks that stay.
        """
        self._places.clear()
        self._keep(resident)
        largest = max((self._slot_bytes(plan.blocks) for plan in plans), default=0)
        while len(self._slots) > num_slots:
            self._slots.pop().clear()
        for number in range(num_slots):
            if number == len(self._slots):
                self._slots.append(Memory(self._device, name=f"slot {number} of {self._worker}"))
            self._slots[number].grow(largest)

    def _slot_bytes(self, blocks: Iterable[nn.Module]) -> int:
        return region_bytes(
            [self._layouts.of(block).form.num_bytes for block in blocks if block not in self._stays]
        )

    def _keep(self, resident: Sequence[nn.Module]) -> None:
        """Give memory of their own to the blocks that stay, and take it from others."""
        wanted = dict.fromkeys(resident)
        for block, stay in list(self._stays.items()):
            if block not in wanted or stay.region.layout is not self._layouts.of(block):
                stay.region.memory.clear()
                del self._stays[block]
        for block in wanted:
            if block not in self._stays:
                layout = self._layouts.of(block)
                memory = Memory(self._device, name=f"{self._names[block]} on {self._worker}")
                memory.grow(layout.form.num_bytes)
                self._stays[block] = _Stay(Region(memory=memory, offset=0, layout=layout))

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots, and of blocks that stay."""
        stays = (stay.region.memory for stay in self._stays.values())
        return sum(memory.num_bytes for memory in (*self._slots, *stays))

    def clear(self) -> None:
        """Give all memory back to the device."""
        self.end_step()
        self._places.clear()
        for memory in (*self._slots, *(stay.region.memory for stay in self._stays.values())):
            memory.clear()
        self._slots.clear()
        self._stays.clear()

    # ----------------------------------------------------------------------------------- a step

    def begin_step(self, plans: Sequence[StageRun]) -> None:
        """Begin the uploads of a step's first visit.

        Args:
            plans: The worker's visits, in order; empty: each is uploaded when it is entered.
        """
        self._serving = self._layouts.serving
        self._plans, self._visits, self._number = self._served(plans), [], 0
        for stay in self._stays.values():
            stay.begin_step()
        self._begin_next()

    def begin_ahead(self) -> None:
        """Begin the uploads of the visits after it for which there are slots."""
        for _ in self._slots[1:]:
            self._begin_next()

    def _served(self, plans: Iterable[StageRun]) -> list[tuple[StageRun, Serving]]:
        return [(plan, self._serving) for plan in plans]

    @property
    def can_change(self) -> bool:
        """Whether a step may be given other values before the one before it has ended."""
        stays = (stay.region.layout.pieces for stay in self._stays.values())
        return not any(piece.trained for pieces in stays for piece in pieces)

    def has_room_for(self, plans: Iterable[StageRun]) -> bool:
        """Say whether the slots are long enough for some visits."""
        room = min((slot.num_bytes for slot in self._slots), default=0)
        return all(self._slot_bytes(plan.blocks) <= room for plan in plans)

    def follow(self, plans: Sequence[StageRun]) -> None:
        """Take the visits of the next step while those of a step may still run.

        Args:
            plans: The visits; there is room for them, and what stays need not change before them.
        """
        with self._lock:
            self._serving = self._layouts.serving
            over = self._number - self._number % len(self._slots)  # each goes on with its slot
            self._plans = [*self._plans[over:], *self._served(plans)]
            self._visits, self._number = self._visits[over:], self._number - over
            for _ in range(self._number + len(self._slots) - len(self._visits)):
                self._begin_next()

    def _begin_next(self) -> None:
        """Begin the uploads of the first visit whose uploads have not begun."""
        number = len(self._visits)
        if number >= len(self._plans):
            return
        plan, serving = self._plans[number]
        visit = self._placed(plan, number % len(self._slots), serving)
        self._visits.append(visit)
        is_next = number == self._number
        self._bring(visit, plan.wanted, Priority.WEIGHTS if is_next else Priority.PREFETCH)

    def _placed(self, plan: StageRun, number: int, serving: Serving) -> StageWeights:
        """Say where the blocks of a visit lie in the slot of that number."""
        regions = self._places.get((plan, number))
        if regions is None:
            regions = self._newly_placed(plan, self._slots[number])
            self._places[plan, number] = regions
        return StageWeights(plan=plan, regions=regions, serving=serving)

    def _newly_placed(self, plan: StageRun, slot: Memory) -> Mapping[nn.Module, Region]:
        regions: dict[nn.Module, Region] = {}
        end = 0
        for block in plan.blocks:
            if block in self._stays:
                regions[block] = self._stays[block].region
                continue
            layout = self._layouts.of(block)
            regions[block] = Region(memory=slot, offset=end, layout=layout)
            end += region_bytes([layout.form.num_bytes])
        if end > slot.num_bytes:
            slot.free.wait()
            slot.grow(end)
            self._places.clear()
        return regions

    def _bring(self, visit: StageWeights, blocks: Iterable[nn.Module], priority: Priority) -> None:
        for block in blocks:
            if block in visit.brought:
                continue
            visit.brought.add(block)
            region, stay = visit.regions[block], self._stays.get(block)
            if stay is not None and stay.is_fresh:
                visit.events[block] = stay.event
                continue
            trained_only = stay is not None and stay.has_frozen_part
            job = Job(
                name=f"weights of {self._names[block]}",
                priority=priority,
                pieces=(),
                after=(
                    region.memory.free,
                    *self._store.updates_of(self._store.parameters_of(block)),
                ),
                is_staged=region.is_staged(trained_only=trained_only),
            )
            job.opens = partial(_opened, job, visit.serving, region, trained_only=trained_only)
            visit.events[block] = self._uploads.submit(job)
            if stay is not None:
                stay.uploaded(visit.events[block])

    def acquire(self, stage: Stage, blocks: Sequence[nn.Module]) -> StageWeights:
        """Return the visit that computes now.

        Args:
            stage: Its stage.
            blocks: The stage's blocks; of those that are not here the upload begins.
        """
        with self._lock:
            if not self._plans:
                return self._acquire_unplanned(stage, blocks)
            while len(self._visits) <= self._number:
                self._begin_next()
            visit = self._visits[self._number]
            assert visit is not None, "it has not ended"
            assert visit.plan.stage == stage, "visits come in the order of the plan"
            self._bring(visit, blocks, Priority.WEIGHTS)
            return visit

    def _acquire_unplanned(self, stage: Stage, blocks: Sequence[nn.Module]) -> StageWeights:
        present = self._visits[self._number] if self._number < len(self._visits) else None
        if present is not None and present.plan.stage != stage:
            self.release()
            present = None
        if present is None:
            unique = tuple(dict.fromkeys(blocks))
            plan = StageRun(stage=stage, blocks=unique, wanted=unique)
            present = self._placed(plan, self._number % len(self._slots), self._serving)
            self._visits.append(present)
        self._bring(present, blocks, Priority.WEIGHTS)
        return present

    def release(self) -> None:
        """End the present visit: all its compute was launched. Its slot is for the next but one."""
        with self._lock:
            if self._number < len(self._visits):
                visit, self._visits[self._number] = self._visits[self._number], None
                assert visit is not None, "it ends once"
                self._set_free(visit)
            self._number += 1
            if self._plans:
                self._begin_next()

    def _set_free(self, visit: StageWeights) -> None:
        """Have what is uploaded next in a visit's place wait for the compute launched so far."""
        free = self._device.mark_event(f"{self._worker} has left {visit.plan.stage}")
        for region in visit.regions.values():
            region.memory.free = free

    def end_step(self, *, failed: bool = False) -> None:
        """Forget the visits of a step. An evaluation has not left its last ones.

        Args:
            failed: Whether uploads may have been given up: what stays is then uploaded anew.
        """
        for visit in self._visits if not failed else ():
            if visit is not None:
                self._set_free(visit)
        self._plans, self._visits, self._number = (), [], 0
        for stay in self._stays.values() if failed else ():
            stay.forget()


def _opened(
    job: Job, serving: Serving, region: Region, *, trained_only: bool
) -> Sequence[tuple[Tensor, Tensor]]:
    """Begin to read a block's values for an upload; return what is copied."""
    previous = serving.begin_reading()
    job.event.when_done(partial(serving.end_reading, previous=previous))
    return region.pieces(trained_only=trained_only, previous=previous)
