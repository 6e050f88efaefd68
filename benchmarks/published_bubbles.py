"""Replays published pipeline schedules, and plans better ones for the same timings.

    python benchmarks/published_bubbles.py [--timings FILE] [--output json]

Every published row of the timings file is replayed by the project's simulator. Then each model is
planned for one isolated synchronous step, `team_1` with teams of one and `teams` with any, and for
a `stream` of eight accumulated batches, with 25 GB/s each way per device and 200 GB/s of host
memory for all; each plan is given with every action's start and end. A stream's idle share is that
from the second batch's first action to the end of the last one, the final drain included.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from published_schedules import (
    bound_partition,
    gpipe_schedule,
    interleaved_schedule,
    looped_bfs_schedule,
    one_f_one_b_schedule,
)
from published_timings import DEFAULT_TIMINGS, PublishedModel, PublishedTimings, load_timings

from roundpipe_lightning.planning.cost.costs import (
    ActionCost,
    RecomputeStart,
    StageCosts,
    stage_costs,
)
from roundpipe_lightning.planning.cost.simulate import simulate
from roundpipe_lightning.planning.model.hardware import HardwareSpec, load_hardware
from roundpipe_lightning.planning.schedule.plan import PipelineConfig, schedule_of
from roundpipe_lightning.planning.schedule.schedule import Schedule, Timeline
from roundpipe_lightning.planning.schedule.stages import Partition
from roundpipe_lightning.planning.search.planner import PlannedTraining, plan_training
from roundpipe_lightning.planning.search.request import PartitionHints, PlanningRequest

_LINK_BYTES_PER_SECOND = 25e9
_HOST_BYTES_PER_SECOND = 200e9
_NUM_BATCHES = 8


def machine(num_devices: int) -> HardwareSpec:
    """Return a server of RTX 4090s, each with a link of its own."""
    return replace(
        load_hardware("rtx4090x8"),
        name=f"rtx4090x{num_devices}",
        num_devices=num_devices,
        devices_per_root=1,
        upload_bytes_per_second=_LINK_BYTES_PER_SECOND,
        download_bytes_per_second=_LINK_BYTES_PER_SECOND,
        root_upload_bytes_per_second=_LINK_BYTES_PER_SECOND,
        root_download_bytes_per_second=_LINK_BYTES_PER_SECOND,
        host_bytes_per_second=_HOST_BYTES_PER_SECOND,
    )


def replay(model: PublishedModel, timings: PublishedTimings) -> dict[str, float]:
    """Return the makespan in seconds of every schedule whose stages the file gives."""
    found = {}
    if model.roundpipe is not None:
        found["roundpipe"] = _replay_roundpipe(model, timings)
    for name, counts in model.bound.items():
        found[name] = _replay_bound(name, counts, model=model, timings=timings)
    return found


def _replay_roundpipe(model: PublishedModel, timings: PublishedTimings) -> float:
    assert model.roundpipe is not None
    forward, backward = model.roundpipe
    partition = Partition(forward=forward, backward=backward)
    count, workers = timings.num_microbatches, timings.num_devices
    config = PipelineConfig(num_microbatches=count, round_size=min(workers, count))
    layout = config.with_stages(partition)
    costs = stage_costs(model.profile, partition=partition, hop_seconds=model.hop_seconds)
    schedule = schedule_of(layout, num_workers=workers)
    return simulate(schedule, layout=layout, costs=costs).makespan_seconds


def _replay_bound(
    name: str, counts: Sequence[int], *, model: PublishedModel, timings: PublishedTimings
) -> float:
    """Replay a schedule whose last stage runs the LM head like a part of itself.

    The fused stage is empty then, and a stage of no blocks is written as one that takes no time.
    """
    block, tail = model.profile.blocks[0], model.profile.tail
    forward = [count * block.forward_seconds for count in counts]
    backward = [count * block.backward_seconds for count in counts]
    costs = StageCosts(
        stages=(
            *(ActionCost(compute_seconds=seconds) for seconds in forward[:-1]),
            ActionCost(compute_seconds=forward[-1] + tail.forward_seconds),
            ActionCost(compute_seconds=0.0),
            ActionCost(
                recompute_seconds=forward[-1],
                compute_seconds=backward[-1] + tail.backward_seconds,
            ),
            *(
                ActionCost(recompute_seconds=recompute, compute_seconds=seconds)
                for recompute, seconds in zip(forward[-2::-1], backward[-2::-1], strict=True)
            ),
        ),
        hop_seconds=model.hop_seconds,
        recompute_start=RecomputeStart.WITH_GRADIENT,
    )
    partition = bound_partition([max(count, 1) for count in counts])
    schedule = _bound_schedule(name, num_stages=len(counts), timings=timings)
    count = timings.num_microbatches
    layout = PipelineConfig(num_microbatches=count, round_size=count).with_stages(partition)
    return simulate(schedule, layout=layout, costs=costs).makespan_seconds


def _bound_schedule(name: str, *, num_stages: int, timings: PublishedTimings) -> Schedule:
    workers, microbatches = timings.num_devices, timings.num_microbatches
    if name == "gpipe":
        return gpipe_schedule(num_workers=workers, num_microbatches=microbatches)
    if name == "one_f_one_b":
        return one_f_one_b_schedule(num_workers=workers, num_microbatches=microbatches)
    make = interleaved_schedule if name == "interleaved_1f1b" else looped_bfs_schedule
    return make(num_stages=num_stages, num_workers=workers, num_microbatches=microbatches)


def plan(model: PublishedModel, timings: PublishedTimings) -> dict[str, dict[str, Any]]:
    """Plan one step with and without teams, and a stream of batches."""
    request = PlanningRequest(
        num_microbatches=timings.num_microbatches, hop_seconds=model.hop_seconds
    )
    requests = {
        "team_1": replace(request, hints=PartitionHints(team_size=1)),
        "teams": request,
        "stream": replace(request, num_batches=_NUM_BATCHES),
    }
    rows = {}
    for name, wanted in requests.items():
        begin = time.perf_counter()
        planned = plan_training(
            model.profile, hardware=machine(timings.num_devices), request=wanted
        )
        seconds = time.perf_counter() - begin
        rows[name] = _plan_row(planned, seconds, num_batches=wanted.num_batches)
    return rows


def _plan_row(
    planned: PlannedTraining, planning_seconds: float, *, num_batches: int
) -> dict[str, Any]:
    timeline, partition = planned.timeline, planned.plan.partition
    bubble_fraction = timeline.bubble_fraction
    if num_batches > 1:
        bubble_fraction = bubble_fraction_after(
            timeline, first_microbatch=planned.plan.num_microbatches // num_batches
        )
    return {
        "makespan_ms": timeline.makespan_seconds * 1e3,
        "idle_share": max(0.0, bubble_fraction),
        "forward_partition": list(partition.forward),
        "backward_partition": list(partition.backward),
        "team_size": planned.plan.team_size,
        "round_size": planned.plan.round_size,
        "num_batches": num_batches,
        "planning_seconds": planning_seconds,
        "actions": [
            {
                "worker": worker,
                "kind": entry.action.kind.name.lower(),
                "stage": entry.action.stage,
                "microbatch": entry.action.microbatch,
                "start_ms": (entry.start_seconds - timeline.start_seconds) * 1e3,
                "end_ms": (entry.end_seconds - timeline.start_seconds) * 1e3,
            }
            for worker, row in enumerate(timeline.rows())
            for entry in row
        ],
    }


def bubble_fraction_after(timeline: Timeline, *, first_microbatch: int) -> float:
    """Return the idle share from the first action of a microbatch or a later one to the end.

    An action that the moment cuts counts with its part behind it; an action's waiting counts as
    evenly spread over it.
    """
    begin = min(
        entry.start_seconds
        for entry in timeline.entries
        if entry.action.microbatch >= first_microbatch
    )
    end = timeline.start_seconds + timeline.makespan_seconds
    busy = 0.0
    for entry in timeline.entries:
        length = entry.end_seconds - entry.start_seconds
        part = max(0.0, entry.end_seconds - max(entry.start_seconds, begin))
        busy += entry.busy_seconds * (part / length if length > 0 else 0.0)
    return 1.0 - busy / (timeline.num_workers * (end - begin))


def run(timings: PublishedTimings) -> dict[str, Any]:
    """Replay and plan every model."""
    replayed = {
        model.name: {
            name: {"makespan_ms": seconds * 1e3, "published_ms": model.published_ms.get(name)}
            for name, seconds in replay(model, timings).items()
        }
        for model in timings.models
    }
    planned = {model.name: plan(model, timings) for model in timings.models}
    return {"replayed": replayed, "planned": planned}


def format_text(result: dict[str, Any]) -> str:
    """Write the result as text."""
    lines = [f"{'replayed':42}{'makespan':>12}{'published':>12}{'off by':>9}"]
    for model, rows in result["replayed"].items():
        for name, row in rows.items():
            published, makespan = row["published_ms"], row["makespan_ms"]
            known = f"{published:9.1f} ms{makespan / published - 1:9.3%}" if published else ""
            lines.append(f"{model + ' ' + name:42}{makespan:9.1f} ms{known}")
    lines.append(
        f"\n{'planned':42}{'makespan':>12}{'idle':>8}{'team':>6}{'round':>7}{'planned in':>12}"
    )
    for model, rows in result["planned"].items():
        for name, row in rows.items():
            lines.append(
                f"{model + ' ' + name:42}{row['makespan_ms']:9.1f} ms{row['idle_share']:8.2%}"
                f"{row['team_size']:6}{row['round_size']:7}{row['planning_seconds']:10.2f} s"
            )
    for model, rows in result["planned"].items():
        lines += ["", *_format_best(model, rows["teams"])]
    return "\n".join(lines)


def _format_best(model: str, row: dict[str, Any]) -> list[str]:
    """Write a plan with every action as `F2.5 12.0-34.5`: kind, stage, microbatch, times in ms."""
    partition = Partition(
        forward=tuple(row["forward_partition"]), backward=tuple(row["backward_partition"])
    )
    letters = {"forward": "F", "fused": "X", "backward": "B"}
    workers: dict[int, list[str]] = {}
    for action in row["actions"]:
        name = f"{letters[action['kind']]}{action['stage']}.{action['microbatch']}"
        times = f"{action['start_ms']:.1f}-{action['end_ms']:.1f}"
        workers.setdefault(action["worker"], []).append(f"{name} {times}")
    return [
        f"{model}: {partition}; team {row['team_size']}, rounds of {row['round_size']}",
        *(f"  worker {worker}: {', '.join(cells)}" for worker, cells in sorted(workers.items())),
    ]


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--timings", type=Path, default=DEFAULT_TIMINGS, help="a YAML file")
    parser.add_argument("--output", choices=("text", "json"), default="text")
    arguments = parser.parse_args()
    result = run(load_timings(arguments.timings))
    print(json.dumps(result) if arguments.output == "json" else format_text(result))


if __name__ == "__main__":
    main()
