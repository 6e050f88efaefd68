"""Predicts a step when weights and gradients travel over links of limited bandwidth.

Each worker has one queue for each direction. A *visit* is a run of actions of one stage on one
worker: its weights are uploaded once, before its first action, and the gradients of its trainable
    parameters are
downloaded once, after its last. Two slots: the weights of a worker's next visit are uploaded while
the present one computes, no earlier; and a gradient is downloaded while the next visit computes,
which must have ended by the time the visit after that has gradients of its own.

```
upload    [ W0 ][ W1 ]      [ W2   ]
compute         [ visit 0   ][ visit 1      ][ visit 2 ..
download                     [ G0  ]         [ G1 ..
```

Boundaries go first on the same links. Their latency is the hop, and their bytes are charged to the
link by adding those of a visit to the weights that are uploaded behind it and to the gradients that
are downloaded behind it. Links share the bandwidth of their root of the bus and of the host's
memory evenly. Workers begin with empty slots; a timeline's makespan counts from the first action,
so one stage's first upload is not in it.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from typing import NamedTuple

from roundpipe_lightning.errors import PlanError
from roundpipe_lightning.planning.costs import RecomputeStart, StageCosts
from roundpipe_lightning.planning.dependencies import NeededFor, stage_dependencies
from roundpipe_lightning.planning.hardware import HardwareSpec
from roundpipe_lightning.planning.profile import BlockProfile, ModelProfile
from roundpipe_lightning.planning.schedule import Action, ActionKey, Schedule
from roundpipe_lightning.planning.stages import Partition, Stage, StageKind
from roundpipe_lightning.planning.timeline import Timeline, TimelineEntry


class Direction(Enum):
    """Which way bytes travel."""

    UPLOAD = "upload"
    """From the host to a device."""

    DOWNLOAD = "download"
    """From a device to the host."""


@dataclass(frozen=True, kw_only=True)
class StageBytes:
    """What a stage moves.

    Attributes:
        weight_bytes: Parameters, once per visit.
        gradient_bytes: Gradients of trainable parameters, once per visit; 0 for FORWARD.
        input_bytes: Boundaries and gradients that one action needs.
        output_bytes: Boundaries and gradients that one action hands on.
    """

    weight_bytes: int
    gradient_bytes: int
    input_bytes: int
    output_bytes: int


def stage_bytes(profile: ModelProfile, *, stage: Stage, partition: Partition) -> StageBytes:
    """Add up what a stage moves.

    The head segment counts with the first and the last stage, the tail segment with the fused one.
    """
    stages = partition.stages()
    parts: list[BlockProfile] = [profile.blocks[block] for block in stage.blocks]
    if stage == stages[0] or stage == stages[-1]:
        parts.append(profile.head)
    if stage.kind is StageKind.FUSED:
        parts.append(profile.tail)
    boundary = max((block.boundary_bytes for block in profile.blocks), default=0)
    backward = [s for s in stages if s.kind is StageKind.BACKWARD]
    kept = sum(partition.producer(s.blocks.start) == stage for s in backward)
    if stage.kind is StageKind.FORWARD:
        inputs, outputs = min(stage.index, 1), max(kept, 1)
    elif stage.kind is StageKind.FUSED:
        inputs, outputs = min(partition.num_forward, 1), min(partition.num_backward, 1)
    else:
        inputs, outputs = 2, int(stage != stages[-1])
    trains = stage.kind is not StageKind.FORWARD
    return StageBytes(
        weight_bytes=sum(part.parameter_bytes for part in parts),
        gradient_bytes=sum(part.trainable_bytes for part in parts) if trains else 0,
        input_bytes=inputs * boundary,
        output_bytes=outputs * boundary,
    )


def simulate_transfers(
    schedule: Schedule,
    *,
    partition: Partition,
    costs: StageCosts,
    profile: ModelProfile,
    hardware: HardwareSpec,
) -> Timeline:
    """Run the schedule on paper, with the uploads and downloads it needs.

    Args:
        schedule: Every worker's actions in order; must be valid.
        partition: The stages.
        costs: What they cost, and what a hop costs.
        profile: What they weigh.
        hardware: The links and the host's memory.

    Raises:
        PlanError: If the schedule deadlocks.
    """
    moved = {
        (stage.kind, stage.index): stage_bytes(profile, stage=stage, partition=partition)
        for stage in partition.stages()
    }
    run = _Run(schedule, partition=partition, costs=costs, moved=moved, hardware=hardware)
    return run.timeline()


@dataclass(eq=False)
class _Visit:
    """A run of actions of one stage on one worker, and what travels for it."""

    actions: tuple[Action, ...]
    upload_bytes: float
    download_bytes: float


class _Link(NamedTuple):
    """One direction of one root of the bus."""

    root: int
    direction: Direction


@dataclass(eq=False)
class _Flow:
    """Bytes on their way."""

    worker: int
    link: _Link
    remaining_bytes: float
    bytes_per_second: float = 0.0


@dataclass(eq=False)
class _Worker:
    """Where one worker stands: visits before `visit` have ended."""

    visits: list[_Visit]
    visit: int = 0
    action: int = 0
    computing: bool = False
    recomputing_since: float | None = None
    num_uploaded: int = 0
    uploading: bool = False
    num_downloaded: int = 0
    downloading: bool = False


class _Run:
    """One simulation: actions end at known times, flows at times that depend on all others."""

    def __init__(
        self,
        schedule: Schedule,
        *,
        partition: Partition,
        costs: StageCosts,
        moved: dict[tuple[StageKind, int], StageBytes],
        hardware: HardwareSpec,
    ) -> None:
        self._costs = costs
        self._hardware = hardware
        self._rules = {
            (stage.kind, stage.index): stage_dependencies(stage.kind, stage.index, partition)
            for stage in partition.stages()
        }
        self._workers = [_Worker(visits=_visits(row, moved)) for row in schedule.workers]
        self._num_actions = sum(len(row) for row in schedule.workers)
        self._now = 0.0
        self._ended: dict[ActionKey, tuple[float, int]] = {}
        self._waiters: dict[ActionKey, list[int]] = {}
        self._ends: list[tuple[float, int]] = []
        self._flows: list[_Flow] = []
        self._flows_changed = False
        self._flows_seen = 0.0
        self._flow_end = math.inf
        self._entries: list[TimelineEntry] = []

    def timeline(self) -> Timeline:
        for index in range(len(self._workers)):
            self._next_transfers(index)
            self._try_start(index)
        self._share_links()
        while self._ends or self._flows:
            self._step()
        if len(self._entries) != self._num_actions:
            raise PlanError("The schedule deadlocks; check it with validate_schedule.")
        return Timeline(num_workers=len(self._workers), entries=tuple(self._entries))

    def _step(self) -> None:
        """Go to the next moment at which an action or a flow ends."""
        action_end = self._ends[0][0] if self._ends else math.inf
        if self._flow_end <= action_end:
            self._now = self._flow_end
            self._advance_flows()
            flow = min(self._flows, key=lambda flow: flow.remaining_bytes)
            self._flows.remove(flow)
            self._end_flow(flow)
        else:
            self._now, worker = heapq.heappop(self._ends)
            self._end_action(worker)
        if self._flows_changed:
            self._advance_flows()
            self._share_links()

    def _advance_flows(self) -> None:
        """Bring what remains of every flow up to now."""
        for flow in self._flows:
            flow.remaining_bytes -= flow.bytes_per_second * (self._now - self._flows_seen)
        self._flows_seen = self._now

    def _share_links(self) -> None:
        """Share the links anew, and say when the next flow will have ended."""
        rates = self._rates()
        self._flow_end = math.inf
        for flow in self._flows:
            flow.bytes_per_second = rates[flow.link]
            seconds = max(flow.remaining_bytes, 0.0) / flow.bytes_per_second
            self._flow_end = min(self._flow_end, self._now + seconds)
        self._flows_changed = False

    def _rates(self) -> dict[_Link, float]:
        """Return bytes per second on every busy link: its own rate, or its share of a root's."""
        hardware = self._hardware
        own = {
            Direction.UPLOAD: hardware.upload_bytes_per_second,
            Direction.DOWNLOAD: hardware.download_bytes_per_second,
        }
        root = {
            Direction.UPLOAD: hardware.root_upload_bytes_per_second,
            Direction.DOWNLOAD: hardware.root_download_bytes_per_second,
        }
        host_share = hardware.host_bytes_per_second / max(len(self._flows), 1)
        busy = Counter(flow.link for flow in self._flows)
        return {
            link: min(own[link.direction], root[link.direction] / count, host_share)
            for link, count in busy.items()
        }

    def _end_flow(self, flow: _Flow) -> None:
        worker = self._workers[flow.worker]
        self._flows_changed = True
        if flow.link.direction is Direction.UPLOAD:
            worker.uploading = False
            worker.num_uploaded += 1
        else:
            worker.downloading = False
            worker.num_downloaded += 1
        self._next_transfers(flow.worker)
        self._try_start(flow.worker)

    def _end_action(self, index: int) -> None:
        worker = self._workers[index]
        visit = worker.visits[worker.visit]
        key = visit.actions[worker.action].key
        self._ended[key] = (self._now, index)
        worker.computing, worker.recomputing_since = False, None
        worker.action += 1
        if worker.action == len(visit.actions):
            worker.visit, worker.action = worker.visit + 1, 0
            self._next_transfers(index)
        self._try_start(index)
        for waiter in self._waiters.pop(key, ()):
            self._try_start(waiter)

    def _next_transfers(self, index: int) -> None:
        """Begin the upload and the download that the worker's slots allow, one at a time each."""
        worker = self._workers[index]
        root = index // self._hardware.devices_per_root
        last_upload = min(worker.visit + 2, len(worker.visits))
        if not worker.uploading and worker.num_uploaded < last_upload:
            size = worker.visits[worker.num_uploaded].upload_bytes
            worker.uploading = self._flows_changed = True
            self._flows.append(_Flow(index, _Link(root, Direction.UPLOAD), size))
        if not worker.downloading and worker.num_downloaded < worker.visit:
            size = worker.visits[worker.num_downloaded].download_bytes
            worker.downloading = self._flows_changed = True
            self._flows.append(_Flow(index, _Link(root, Direction.DOWNLOAD), size))

    def _try_start(self, index: int) -> None:
        """Begin the worker's next action, or its backward, if everything it needs is there."""
        worker = self._workers[index]
        if worker.computing or worker.visit == len(worker.visits):
            return
        if worker.num_uploaded <= worker.visit or worker.num_downloaded < worker.visit - 1:
            return
        action = worker.visits[worker.visit].actions[worker.action]
        if worker.recomputing_since is None:
            start = self._arrival(action, NeededFor.START)
            if start is None:
                return
            worker.recomputing_since = max(self._now, start)
        gradient = self._arrival(action, NeededFor.GRADIENT)
        if gradient is None:
            return
        start = worker.recomputing_since
        cost = self._costs.of(action.kind, action.stage)
        waiting = max(0.0, gradient - start - cost.recompute_seconds)
        end = start + cost.seconds + waiting
        worker.computing = True
        heapq.heappush(self._ends, (end, index))
        self._entries.append(
            TimelineEntry(
                action=action, start_seconds=start, end_seconds=end, waiting_seconds=waiting
            )
        )

    def _arrival(self, action: Action, needed_for: NeededFor) -> float | None:
        """Return when the last dependency of a kind arrives; None where one has not ended."""
        late = self._costs.recompute_start is RecomputeStart.WITH_GRADIENT
        arrival = 0.0
        for kind, stage, part in self._rules[action.kind, action.stage]:
            if part is not needed_for and not (late and needed_for is NeededFor.START):
                continue
            key = ActionKey(kind, stage, action.microbatch)
            if key not in self._ended:
                self._waiters.setdefault(key, []).append(action.worker)
                return None
            end, worker = self._ended[key]
            hop = 0.0 if worker == action.worker else self._costs.hop_seconds
            arrival = max(arrival, end + hop)
        return arrival


def _visits(
    row: tuple[Action, ...], moved: dict[tuple[StageKind, int], StageBytes]
) -> list[_Visit]:
    """Group a worker's actions by stage, and charge boundaries to the transfers behind them."""
    visits: list[_Visit] = []
    boundary_bytes = 0
    for stage, group in groupby(row, key=lambda action: (action.kind, action.stage)):
        actions = tuple(group)
        sizes = moved[stage]
        visits.append(
            _Visit(
                actions=actions,
                upload_bytes=sizes.weight_bytes + boundary_bytes,
                download_bytes=sizes.gradient_bytes + len(actions) * sizes.output_bytes,
            )
        )
        boundary_bytes = len(actions) * sizes.input_bytes
    return visits
