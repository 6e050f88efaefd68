"""The weights that a worker computes with: uploaded ahead, into memory that is free by then.

Steps W2, W3 and W5 of docs/design.md. With two slots for the weights of a stage run's blocks:

```
compute   [ run 0       ][ run 1         ][ run 2
upload    0  1           ▲2               ▲3             run 0 has ended: its slot is free
```

With one slot the upload of run 1 begins when run 0 has ended. Blocks that stay on the worker
(`Plan.resident`) have memory of their own: of them only the trainable part is uploaded, at their
first run of a step, because it has changed since the last one.

Parameters of user code outside the blocks (embedding, norm, LM head) go with the stage run in which
that code asked for them in the step before, or when they are asked for. They stay until the step
ends, and as long as a step that overlaps it needs them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from roundpipe_lightning.engine.device.base import Device
from roundpipe_lightning.engine.device.events import DoneEvent, Event
from roundpipe_lightning.engine.store.block_layout import (
    Layouts,
    Memory,
    Region,
    bytes_of,
    region_bytes,
)
from roundpipe_lightning.engine.store.flat_buffers import fills_its_memory
from roundpipe_lightning.engine.store.host_store import HostStore, WeightVersions
from roundpipe_lightning.engine.transfer.copy_queue import Job, Priority, TransferQueue
from roundpipe_lightning.planning.schedule.stages import Stage


@dataclass(frozen=True, kw_only=True)
class StageRun:
    """Consecutive actions of one stage on one worker."""

    stage: Stage
    blocks: tuple[nn.Module, ...]  # the stage's blocks, each once
    wanted: tuple[nn.Module, ...]  # those of them that will be needed, as far as is known before


@dataclass(kw_only=True, eq=False)
class StageWeights:
    """The weights of a stage run, there or in flight."""

    run: StageRun
    regions: Mapping[nn.Module, Region]  # where its blocks lie
    versions: WeightVersions
    # the uploads that compute has not waited for yet
    events: dict[nn.Module, Event] = field(default_factory=dict)
    uploaded: set[nn.Module] = field(default_factory=set)  # blocks that are there or in flight


class _Resident:
    """A block that stays on the worker, in memory of its own."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self.is_fresh = False  # all of it is there, or in flight
        self.event: Event = DoneEvent()  # its last upload
        self._num_writes: int | None = None  # of the frozen part that is there

    @property
    def has_frozen_part(self) -> bool:
        return self._num_writes == self._present_writes()

    @property
    def is_trained(self) -> bool:
        return any(piece.trained for piece in self.region.layout.pieces)

    def begin_step(self) -> None:
        if not self.has_frozen_part or self.is_trained:
            self.is_fresh = False

    def uploaded(self, event: Event) -> None:
        self.is_fresh, self.event = True, event
        self._num_writes = self._present_writes()

    def forget(self) -> None:
        self.is_fresh, self._num_writes = False, None

    def _present_writes(self) -> int:
        frozen = (p for p in self.region.layout.parameters if not p.requires_grad)
        return sum(parameter._version for parameter in frozen)


class OutsideUses:
    """Parameters that user code asks for, by stage, for the next step; of all workers."""

    def __init__(self) -> None:
        self._expected: dict[Stage, Mapping[nn.Parameter, bool]] = {}
        self._asked: dict[Stage, dict[nn.Parameter, bool]] = {}

    def begin_step(self) -> None:
        """Expect what the last steps have asked for: one begins, and no other is in flight."""
        self._expected = {**self._asked} or self._expected
        self._asked = {}

    def begin_overlapped(self) -> None:
        asked = {stage: dict(parameters) for stage, parameters in list(self._asked.items())}
        self._expected = {**self._expected, **asked}

    def expected(self, stage: Stage) -> Mapping[nn.Parameter, bool]:
        return self._expected.get(stage, {})

    def record(self, stage: Stage, parameter: nn.Parameter, *, is_first: bool) -> None:
        self._asked.setdefault(stage, {}).setdefault(parameter, is_first)


@dataclass(kw_only=True, eq=False)
class _OutsideCopy:
    """A parameter outside the blocks on the worker."""

    values: Tensor
    versions: WeightVersions
    event: Event | None  # its upload, if compute has not waited for it yet
    last_step: int = -1  # that has used it


@dataclass(kw_only=True, eq=False)
class _Planned:
    """A stage run of a step in flight."""

    run: StageRun
    versions: WeightVersions
    step: int
    weights: StageWeights | None = None  # from the beginning of its uploads to its end


@dataclass(eq=False)
class WeightPrefetcher:
    """The memory for weights of one worker, and what is uploaded into it.

    Called by the thread whose turn it is; the Trainer's thread may add a step meanwhile, and end
    one. Messages call the blocks by their `names`.
    """

    device: Device
    _: KW_ONLY
    layouts: Layouts
    store: HostStore
    uploads: TransferQueue
    uses: OutsideUses
    names: Mapping[nn.Module, str]
    worker: str

    def __post_init__(self) -> None:
        self._slots: list[Memory] = []
        self._residents: dict[nn.Module, _Resident] = {}
        self._regions: dict[tuple[StageRun, int], Mapping[nn.Module, Region]] = {}  # and the slot
        self._outside: dict[nn.Parameter, _OutsideCopy] = {}
        self._runs: list[_Planned] = []
        self._num_begun = 0  # of these runs, whose uploads have begun
        self._number = 0  # of the run that computes, or computes next
        self._unplanned: StageWeights | None = None  # where runs are not known before
        self._versions = self.store.versions  # that of the last step
        self._step = 0  # of the last step, since none was in flight
        self._num_ended = 0  # steps, since none was in flight
        self._was_given_up = False
        self._lock = threading.RLock()

    def prepare(
        self, runs: Iterable[StageRun], *, num_slots: int, resident: Sequence[nn.Module] = ()
    ) -> None:
        """Make room for stage runs, of which `num_slots` have their weights here at once.

        Blocks that stay have memory of their own.
        """
        self._regions.clear()
        for block, present in list(self._residents.items()):
            if block not in resident or present.region.layout is not self.layouts.of(block):
                present.region.memory.clear()
                del self._residents[block]
        for block in resident:
            if block not in self._residents:
                layout = self.layouts.of(block)
                memory = Memory(self.device, name=f"{self.names[block]} on {self.worker}")
                memory.grow(layout.form.num_bytes)
                self._residents[block] = _Resident(Region(memory=memory, offset=0, layout=layout))
        largest = max((self._slot_bytes(run.blocks) for run in runs), default=0)
        while len(self._slots) > num_slots:
            self._slots.pop().clear()
        for number in range(num_slots):
            if number == len(self._slots):
                self._slots.append(Memory(self.device, name=f"slot {number} of {self.worker}"))
            self._slots[number].grow(largest)

    def _slot_bytes(self, blocks: Iterable[nn.Module]) -> int:
        moving = (block for block in blocks if block not in self._residents)
        return region_bytes([self.layouts.of(block).form.num_bytes for block in moving])

    @property
    def _memories(self) -> list[Memory]:
        return [*self._slots, *(one.region.memory for one in self._residents.values())]

    @property
    def outside_bytes(self) -> int:
        return sum(copy.values.nbytes for copy in list(self._outside.values()))

    @property
    def num_bytes(self) -> int:
        return sum(memory.num_bytes for memory in self._memories) + self.outside_bytes

    def clear(self) -> None:
        self.end_step()
        self._regions.clear()
        for memory in self._memories:
            memory.clear()
        self._slots.clear()
        self._residents.clear()

    def begin_step(self, runs: Sequence[StageRun], *, is_planned: bool = True) -> None:
        """Begin the uploads of a step's first run.

        Unless its runs come in the order that `is_planned`, to learn from, each block is uploaded
        when its run is acquired.
        """
        with self._lock:
            if self._was_given_up:  # its uploads are over; what it computed may go on
                free = self.device.mark_event(f"{self.worker} has given up a step")
                for memory in self._memories:
                    memory.used_by = (free,)
                self._was_given_up = False
            self._versions = self.store.versions
            self._step = self._num_ended = 0
            self._runs = self._planned(runs if is_planned else ())
            self._number = self._num_begun = 0
            for resident in self._residents.values():
                resident.begin_step()
            for planned in self._runs[:1]:
                for parameter, is_first in self.uses.expected(planned.run.stage).items():
                    if is_first:
                        self._upload_outside(parameter, planned.versions, Priority.WEIGHTS)
            self._begin_next()

    def begin_ahead(self) -> None:
        with self._lock:
            for _ in self._slots[1:]:
                self._begin_next()
            self._upload_outside_ahead()

    def _planned(self, runs: Iterable[StageRun]) -> list[_Planned]:
        return [_Planned(run=run, versions=self._versions, step=self._step) for run in runs]

    def can_overlap(self, runs: Iterable[StageRun]) -> bool:
        """Whether there is room for a step's runs, and what stays need not change before them."""
        changes = self._versions is not self.store.versions
        if changes and any(resident.is_trained for resident in self._residents.values()):
            return False
        room = min((slot.num_bytes for slot in self._slots), default=0)
        return all(self._slot_bytes(run.blocks) <= room for run in runs)

    def begin_overlapped(self, runs: Sequence[StageRun]) -> None:
        """Begin the uploads of a step while the one before it may still run; see `can_overlap`."""
        with self._lock:
            self._versions, self._step = self.store.versions, self._step + 1
            over = self._number - self._number % len(self._slots)  # each goes on with its slot
            self._runs = [*self._runs[over:], *self._planned(runs)]
            self._number, self._num_begun = self._number - over, self._num_begun - over
            for _ in range(self._number + len(self._slots) - self._num_begun):
                self._begin_next()
            self._upload_outside_ahead()

    def end_first(self) -> None:
        """Drop what only the first step in flight has used: it has ended on all workers."""
        with self._lock:
            self._num_ended += 1
            stages = {planned.run.stage for planned in self._runs[self._number :]}
            wanted = {p for stage in stages for p in self.uses.expected(stage)}
            for parameter, copy in list(self._outside.items()):
                if parameter not in wanted and copy.last_step < self._num_ended:
                    del self._outside[parameter]

    def end_step(self, *, failed: bool = False) -> None:
        """Forget the runs of all steps. An evaluation has not released its last ones.

        After a failure uploads may have been given up: what stays is then uploaded anew.
        """
        with self._lock:
            self._was_given_up = failed
            left = [*(planned.weights for planned in self._runs), self._unplanned]
            for weights in left if not failed else ():
                if weights is not None:
                    self._set_free(weights)
            self._runs, self._unplanned = [], None
            self._number = self._num_begun = 0
            for resident in self._residents.values() if failed else ():
                resident.forget()
            self._outside.clear()

    def acquire(self, stage: Stage, blocks: Sequence[nn.Module]) -> StageWeights:
        """Return the weights of the stage run that computes now, and upload what is missing."""
        with self._lock:
            while self._num_begun <= self._number < len(self._runs):
                self._begin_next()
            weights = self._runs[self._number].weights if self._runs else self._unplanned
            if not self._runs and (weights is None or weights.run.stage != stage):
                if weights is not None:
                    self.release()
                unique = tuple(dict.fromkeys(blocks))
                run = StageRun(stage=stage, blocks=unique, wanted=unique)
                weights = self._unplanned = self._placed(run, self._number, self._versions)
            assert weights is not None, "it has not ended"
            assert weights.run.stage == stage, "stage runs come in the order of the plan"
            self._upload(weights, blocks, Priority.WEIGHTS)
            return weights

    def release(self) -> None:
        """End the present run: all its compute was launched. Its slot is for the next but one."""
        with self._lock:
            weights, self._unplanned = self._unplanned, None
            if self._number < len(self._runs):
                planned = self._runs[self._number]
                weights, planned.weights = planned.weights, None
            if weights is not None:
                self._set_free(weights)
            self._number += 1
            if self._runs:
                self._begin_next()
            self._upload_outside_ahead()

    def leave_plan(self) -> None:
        """Forget the runs that are left of a step: each block is uploaded when it is acquired."""
        with self._lock:
            for planned in self._runs[self._number :]:
                if planned.weights is not None:
                    self._set_free(planned.weights)
            self._runs, self._number, self._num_begun = [], 0, 0

    def _set_free(self, weights: StageWeights) -> None:
        """Order what is uploaded next into the run's place after all that uses it now.

        That is the compute launched so far, and uploads that no compute has waited for: its own,
        or where it has made none, those of a run before.
        """
        free = self.device.mark_event(f"{self.worker} has left {weights.run.stage}")
        written = {weights.regions[block].memory for block in weights.uploaded}
        for memory in {region.memory for region in weights.regions.values()}:
            before = () if memory in written else (e for e in memory.used_by if not e.is_done)
            memory.used_by = (free, *weights.events.values(), *before)

    def _begin_next(self) -> None:
        number = self._num_begun
        if number >= len(self._runs):
            return
        planned = self._runs[number]
        self._num_begun += 1
        planned.weights = self._placed(planned.run, number, planned.versions)
        priority = Priority.WEIGHTS if number == self._number else Priority.PREFETCH
        self._upload(planned.weights, planned.run.wanted, priority)

    def _placed(self, run: StageRun, number: int, versions: WeightVersions) -> StageWeights:
        """Choose where the blocks of a run lie; runs take turns with the slots."""
        number %= len(self._slots)
        if (run, number) not in self._regions:
            slot, end = self._slots[number], 0
            regions: dict[nn.Module, Region] = {}
            for block in run.blocks:
                if block in self._residents:
                    regions[block] = self._residents[block].region
                    continue
                layout = self.layouts.of(block)
                regions[block] = Region(memory=slot, offset=end, layout=layout)
                end += region_bytes([layout.form.num_bytes])
            if end > slot.num_bytes:
                self._regions.clear()
                slot.grow(end)
            self._regions[run, number] = regions
        return StageWeights(run=run, regions=self._regions[run, number], versions=versions)

    def _upload(
        self, weights: StageWeights, blocks: Iterable[nn.Module], priority: Priority
    ) -> None:
        for block in blocks:
            if block in weights.uploaded:
                continue
            weights.uploaded.add(block)
            region, resident = weights.regions[block], self._residents.get(block)
            if resident is not None and resident.is_fresh:
                weights.events[block] = resident.event
                continue
            trained_only = resident is not None and resident.has_frozen_part
            weights.events[block] = self._submit(
                f"weights of {self.names[block]}",
                weights.versions,
                partial(region.pieces, trained_only=trained_only),
                priority=priority,
                after=(
                    *region.memory.used_by,
                    *self.store.updates_of(self.store.parameters_of(block)),
                ),
            )
            if resident is not None:
                resident.uploaded(weights.events[block])

    def _submit(
        self,
        name: str,
        versions: WeightVersions,
        pieces: Callable[..., Sequence[tuple[Tensor, Tensor]]],
        *,
        priority: Priority,
        after: Sequence[Event],
    ) -> Event:
        job = Job(name=name, priority=priority, pieces=(), after=after)

        def opens() -> Sequence[tuple[Tensor, Tensor]]:
            previous, end = versions.begin_reading()
            job.event.when_done(end)
            return pieces(previous=previous)

        job.opens = opens
        return self.uploads.submit(job)

    def _upload_outside_ahead(self) -> None:
        for number, planned in enumerate(self._runs[self._number : self._number + 2]):
            for parameter in self.uses.expected(planned.run.stage):
                copy = self._outside.get(parameter)
                # The present run may still need other values than the next one.
                if number == 0 or copy is None or copy.versions is planned.versions:
                    self._upload_outside(parameter, planned.versions, Priority.PREFETCH)

    def _upload_outside(
        self, parameter: nn.Parameter, versions: WeightVersions, priority: Priority
    ) -> None:
        copy = self._outside.get(parameter)
        if copy is not None and copy.versions is versions:
            return
        source = self.store.upload_source(parameter)
        self._outside.pop(parameter, None)
        if source.is_inference() or not fills_its_memory(source):
            return
        with torch.inference_mode(mode=False):  # else the queue's thread could not write into it
            flat = self.device.empty(torch.Size([source.nbytes]), torch.uint8)
            values = flat.view(source.dtype).as_strided(source.shape, source.stride())

        def pieces(*, previous: bool) -> Sequence[tuple[Tensor, Tensor]]:
            version = self.store.previous.get(parameter, source) if previous else source
            return [(flat, bytes_of(version.to(source.dtype)))]

        event = self._submit(
            "a parameter outside the blocks",
            versions,
            pieces,
            priority=priority,
            after=self.store.updates_of([parameter]),
        )
        self._outside[parameter] = _OutsideCopy(values=values, versions=versions, event=event)

    def outside_values(
        self, parameter: nn.Parameter, *, wait: Callable[[Event], None], is_first: bool = False
    ) -> Tensor:
        """Return the values of a parameter outside the blocks, for compute launched from now on.

        `wait` lets compute wait for the upload; `is_first`: none of the run's blocks has run.
        """
        with self._lock:
            versions, step = self._versions, self._step
            if self._runs:
                present = self._runs[min(self._number, len(self._runs) - 1)]
                versions, step = present.versions, present.step
                if self._number < len(self._runs):
                    self.uses.record(present.run.stage, parameter, is_first=is_first)
            self._upload_outside(parameter, versions, Priority.WEIGHTS)
            if parameter not in self._outside:  # memory with gaps: one by one
                values = self.device.upload(self.store.value(parameter))
                self._outside[parameter] = _OutsideCopy(
                    values=values, versions=versions, event=None
                )
            copy = self._outside[parameter]
            copy.last_step = step
            event, copy.event = copy.event, None
        if event is not None:
            wait(event)
        return copy.values
