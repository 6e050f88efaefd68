"""Predicts when every action of a schedule runs, with the transfers of a machine or without any.

Workers run their actions in order. An action begins when its worker is free and what it needs
(`dependencies()`) has arrived, which takes a hop where it comes from another worker.

Each worker has one queue for each direction. A *stage run* is some actions of one stage in a row on
one worker: its weights are uploaded once, before its first action, and the gradients of its
trainable parameters are downloaded once, after its last. Two slots: the weights of a worker's next
run are uploaded while the present one computes, no earlier; and a gradient is downloaded while the
next run computes, which must have ended by the time the run after that has gradients of its own.
With one slot for weights (`weight_slots=1`) the next run's are uploaded when this one has ended.

```
upload    [ W0 ][ W1 ]      [ W2   ]
compute         [ run 0     ][ run 1        ][ run 2 ..
download                     [ G0  ]         [ G1 ..
```

Boundaries go first on the same links. Their latency is the hop, and their bytes are charged to the
link by adding those of a run to the weights that are uploaded behind it and to the gradients that
are downloaded behind it. Copies from device to device are charged to the receiver's uploads, and
not to anybody's downloads (`BoundaryRoute`). Links share the bandwidth of their root of the bus and
of the host's memory evenly. Workers begin with empty slots; a timeline's makespan counts from the
first action, so the first block's first upload is not in it.

A stage run's first action begins with the weights of its first block, as the engine does, and waits
for those of the others inside: what runs forward (a recompute, too) ends no sooner than the last
block's share of it after the last weights have come. Blocks count alike for this.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from roundpipe_lightning.errors import PlanError
from roundpipe_lightning.planning.cost.costs import RecomputeStart, StageCosts
from roundpipe_lightning.planning.cost.traffic import StageRun, worker_stage_runs
from roundpipe_lightning.planning.model.hardware import HardwareSpec
from roundpipe_lightning.planning.model.profile import BlockProfile, ModelProfile
from roundpipe_lightning.planning.schedule.plan import PipelineLayout
from roundpipe_lightning.planning.schedule.schedule import (
    Action,
    Schedule,
    Timeline,
    TimelineEntry,
    stage_dependencies,
)
from roundpipe_lightning.planning.schedule.stages import StageKind


def simulate(
    schedule: Schedule,
    *,
    layout: PipelineLayout,
    costs: StageCosts,
    profile: ModelProfile | None = None,
    hardware: HardwareSpec | None = None,
) -> Timeline:
    """Run a valid schedule of a layout on paper, with the uploads and downloads it needs.

    The costs, and the way that boundaries take, must be those of the same recompute policy. Nothing
    is uploaded or downloaded without `profile` and `hardware`, or where devices share the host's
    memory.

    Raises:
        PlanError: If the schedule deadlocks.
    """
    weightless = (BlockProfile(name="block"),) * layout.partition.num_blocks
    runs = worker_stage_runs(
        schedule,
        partition=layout.partition,
        profile=profile or ModelProfile(blocks=weightless, fingerprint=""),
        recompute=layout.recompute,
        resident=layout.resident,
        route=costs.route,
    )
    return Simulation(runs, layout=layout, costs=costs, hardware=hardware).timeline()


@dataclass(eq=False, slots=True)
class _TimedRun:
    """A run of actions of one stage on one worker, and what travels for it.

    Stages are counted in the order in which a microbatch passes them; `start` and `gradient` are
    those that the whole of an action, or what comes behind its recompute, waits for, each with how
    many microbatches of it: all of a batch at a barrier, else 1. An action runs forward for
    `forward_seconds` of its `seconds`, and this through `num_blocks` blocks, the first of which
    needs `first_bytes` of what is uploaded. `landed` is when all of it was there. `shares_slot`:
    its weights are in the slot of the run before.
    Where the tail segment runs once for `joined` microbatches, `joins` has what their actions wait
    for instead of `start`: stages and microbatches.
    """

    actions: tuple[Action, ...]
    upload_bytes: float
    first_bytes: float
    download_bytes: float
    place: int
    start: tuple[tuple[int, int], ...]
    gradient: tuple[tuple[int, int], ...]
    forward_seconds: float
    seconds: float
    num_blocks: int
    shares_slot: bool
    joined: int
    joins: dict[int, list[tuple[int, int]]]
    landed: float = 0.0


@dataclass(eq=False, slots=True)
class _Flow:
    """Bytes on their way; links are a root's uploads and its downloads, in turn."""

    worker: int
    link: int
    own_rate: float
    remaining_bytes: float
    bytes_per_second: float = 0.0


@dataclass(eq=False, slots=True)
class _Worker:
    """Progress of one worker: stage runs before `stage run` have ended."""

    runs: list[_TimedRun]
    root: int
    run: int = 0
    action: int = 0
    computing: bool = False
    started: float | None = None
    num_begun: int = 0
    num_uploaded: int = 0
    uploading: bool = False
    num_downloaded: int = 0
    downloading: bool = False


class Simulation:
    """One simulation: actions end at known times, flows at times that depend on all others."""

    def __init__(
        self,
        runs: Sequence[Sequence[StageRun]],
        *,
        layout: PipelineLayout,
        costs: StageCosts,
        hardware: HardwareSpec | None,
    ) -> None:
        if hardware is not None and hardware.shares_host_memory:
            hardware = None
        self._weight_slots = layout.weight_slots
        self._hop_seconds = costs.hop_seconds
        self._hardware = hardware
        per_root = hardware.devices_per_root if hardware else 1
        self._workers = [
            _Worker(runs=_transfers(row, layout, costs=costs), root=worker // per_root)
            for worker, row in enumerate(runs)
        ]
        actions = [action for row in runs for run in row for action in run.actions]
        self._num_actions = len(actions)
        self._num_microbatches = max((action.microbatch for action in actions), default=0) + 1
        self._now = 0.0
        # by stage and microbatch: when it ended and where
        self._ended: dict[int, tuple[float, int]] = {}
        self._waiters: dict[int, list[int]] = {}
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
            if self._ends and self._ends[0][0] < self._flow_end:
                self._now, worker = heapq.heappop(self._ends)
                self._end_action(worker)
            else:
                self._now = self._flow_end
                self._advance_flows()
                self._end_flow(min(self._flows, key=_remaining_bytes))
            if self._flows_changed:
                self._advance_flows()
                self._share_links()
        if len(self._entries) != self._num_actions:
            raise PlanError("The schedule deadlocks; check it with validate_schedule.")
        return Timeline(num_workers=len(self._workers), entries=tuple(self._entries))

    def _advance_flows(self) -> None:
        seconds = self._now - self._flows_seen
        for flow in self._flows:
            flow.remaining_bytes -= flow.bytes_per_second * seconds
        self._flows_seen = self._now

    def _share_links(self) -> None:
        """Share the links anew, and say when the next flow will have ended.

        Every flow gets the rate of its own link, or its share of a root's or of the host's memory.
        """
        self._flow_end = math.inf
        self._flows_changed = False
        hardware = self._hardware
        if hardware is None or not self._flows:
            return
        busy = Counter(flow.link for flow in self._flows)
        host_share = hardware.host_bytes_per_second / len(self._flows)
        root = (hardware.root_upload_bytes_per_second, hardware.root_download_bytes_per_second)
        for flow in self._flows:
            rate = min(flow.own_rate, root[flow.link % 2] / busy[flow.link], host_share)
            flow.bytes_per_second = rate
            end = self._now + max(flow.remaining_bytes, 0.0) / rate
            self._flow_end = min(self._flow_end, end)

    def _end_flow(self, flow: _Flow) -> None:
        worker = self._workers[flow.worker]
        self._flows.remove(flow)
        self._flows_changed = True
        if flow.link % 2:
            worker.downloading = False
            worker.num_downloaded += 1
        else:
            worker.uploading = False
            self._end_upload(worker)
        self._next_transfers(flow.worker)
        self._try_start(flow.worker)

    def _end_upload(self, worker: _Worker) -> None:
        """Note that the first block's weights of the next stage run have come, or those of all."""
        if worker.num_begun == worker.num_uploaded:
            worker.num_begun += 1
        else:
            worker.runs[worker.num_uploaded].landed = self._now
            worker.num_uploaded += 1

    def _end_action(self, index: int) -> None:
        worker = self._workers[index]
        run = worker.runs[worker.run]
        microbatch = run.actions[worker.action].microbatch
        key = run.place * self._num_microbatches + microbatch
        self._ended[key] = (self._now, index)
        worker.computing, worker.started = False, None
        worker.action += 1
        if worker.action == len(run.actions):
            worker.run, worker.action = worker.run + 1, 0
            self._next_transfers(index)
        self._try_start(index)
        for waiter in self._waiters.pop(key, ()):
            self._try_start(waiter)

    def _next_transfers(self, index: int) -> None:
        worker = self._workers[index]
        runs = worker.runs
        following = runs[worker.run + 1 : worker.run + 2]
        num_ahead = self._weight_slots + any(run.shares_slot for run in following)
        last_upload = min(worker.run + num_ahead, len(runs))
        while not worker.uploading and worker.num_uploaded < last_upload:
            run = runs[worker.num_uploaded]
            is_begun = worker.num_begun > worker.num_uploaded
            size = run.upload_bytes - run.first_bytes if is_begun else run.first_bytes
            worker.uploading = self._begin_flow(index, 0, size)
            if not worker.uploading:
                self._end_upload(worker)
        while not worker.downloading and worker.num_downloaded < worker.run:
            size = runs[worker.num_downloaded].download_bytes
            worker.downloading = self._begin_flow(index, 1, size)
            worker.num_downloaded += not worker.downloading

    def _begin_flow(self, index: int, direction: int, size: float) -> bool:
        if self._hardware is None or size <= 0:
            return False
        own = self._hardware.workers[index]
        rate = own.download_bytes_per_second if direction else own.upload_bytes_per_second
        link = 2 * self._workers[index].root + direction
        self._flows.append(_Flow(index, link, rate, size))
        self._flows_changed = True
        return True

    def _try_start(self, index: int) -> None:
        """Begin the worker's next action, or its backward, if everything it needs is there."""
        worker = self._workers[index]
        if worker.computing or worker.run == len(worker.runs):
            return
        if worker.num_begun <= worker.run or worker.num_downloaded < worker.run - 1:
            return
        run = worker.runs[worker.run]
        action = run.actions[worker.action]
        start = worker.started
        if start is None:
            arrival = self._arrival(run.start, action, run.joins.get(action.microbatch))
            if arrival is None:
                return
            start = worker.started = max(self._now, arrival)
        gradient = self._arrival(run.gradient, action)
        if gradient is None or worker.num_uploaded <= worker.run:
            return
        last_block = run.landed + run.forward_seconds / run.num_blocks
        waiting = max(0.0, max(last_block, gradient) - start - run.forward_seconds)
        seconds = run.seconds
        if run.joined:  # the tail segment runs in the first microbatch's action, for all of them
            seconds *= 0 if action.microbatch % run.joined else run.joined
        end = start + seconds + waiting
        worker.computing = True
        heapq.heappush(self._ends, (end, index))
        self._entries.append(
            TimelineEntry(
                action=action, start_seconds=start, end_seconds=end, waiting_seconds=waiting
            )
        )

    def _arrival(
        self,
        places: tuple[tuple[int, int], ...],
        action: Action,
        joins: Sequence[tuple[int, int]] | None = None,
    ) -> float | None:
        """Return the arrival of an action's inputs from some stages; None: one has not run."""
        arrival, number = 0.0, action.microbatch
        for place, microbatch in joins or [
            (place, number - number % count + other)
            for place, count in places
            for other in range(count)
        ]:
            key = place * self._num_microbatches + microbatch
            ended = self._ended.get(key)
            if ended is None:
                self._waiters.setdefault(key, []).append(action.worker)
                return None
            end, worker = ended
            arrival = max(arrival, end if worker == action.worker else end + self._hop_seconds)
        return arrival


_remaining_bytes = attrgetter("remaining_bytes")


def _transfers(
    runs: Sequence[StageRun], layout: PipelineLayout, *, costs: StageCosts
) -> list[_TimedRun]:
    """Charge boundaries to the transfers behind them, and look up what actions cost and need."""
    partition = layout.partition
    late = costs.recompute_start is RecomputeStart.WITH_GRADIENT
    num_forward = partition.num_forward

    def place(kind: StageKind, index: int) -> int:
        return index if kind is StageKind.FORWARD else num_forward + index

    found: list[_TimedRun] = []
    boundary_bytes = 0
    for run in runs:
        kind, index = run.stage.kind, run.stage.index
        places = tuple(
            (place(each.kind, each.stage), layout.round_size if each.is_barrier else 1)
            for each in stage_dependencies(kind, index, partition)
        )
        num_early = len(places) - (kind is StageKind.BACKWARD and not late)
        cost = costs.of(place(kind, index), run.actions[0].worker)
        forward = cost.seconds if kind is StageKind.FORWARD else cost.recompute_seconds
        num_blocks = max(1, len(run.stage.blocks)) if forward else 1
        joined = partition.joined if kind is StageKind.FUSED else 0
        joins = {
            action.microbatch: [
                (place(each.kind, each.stage), each.microbatch)
                for each in layout.dependencies(action.key)
            ]
            for action in run.actions
            if joined
        }
        found.append(
            _TimedRun(
                actions=run.actions,
                upload_bytes=run.weight_bytes + boundary_bytes,
                first_bytes=run.weight_bytes / num_blocks + boundary_bytes,
                download_bytes=run.gradient_bytes + run.output_bytes,
                place=place(kind, index),
                start=places[:num_early],
                gradient=places[num_early:],
                forward_seconds=forward,
                seconds=cost.seconds,
                num_blocks=num_blocks,
                shares_slot=run.stage.keeps_graph and kind is StageKind.BACKWARD,
                joined=joined,
                joins=joins,
            )
        )
        boundary_bytes = run.input_bytes + run.direct_bytes
    return found
