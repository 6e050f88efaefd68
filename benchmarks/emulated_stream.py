"""Measures the workers' idle time in a stream of batches, on an emulated server.

    python benchmarks/emulated_stream.py [--models qwen3_32b ...] [--batches 4] [--team-size 1]
                                         [--output json]

The same engine, blocks and server as in `emulated_server.py`; each batch begins while the one
before is in flight, as accumulated batches and asynchronous steps do. The plan is the planner's for
such a stream. Each stream runs twice: with batches that go on round the workers, and with batches
that all begin with worker 0. `simulated` is the prediction of `simulate` for the schedule
of the whole stream. With teams of all workers there is no difference.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from emulated_server import (
    CHUNK_BYTES,
    Case,
    Measured,
    begin,
    case_of,
    frozen_objects,
    opened,
    seen,
)
from published_timings import DEFAULT_TIMINGS, load_timings
from torch import Tensor

from roundpipe_lightning.engine.engine import Engine
from roundpipe_lightning.planning.cost.costs import stage_costs
from roundpipe_lightning.planning.cost.simulate import simulate
from roundpipe_lightning.planning.schedule.plan import rotated, turns_of_batch
from roundpipe_lightning.planning.schedule.schedule import Action, Schedule, Timeline
from roundpipe_lightning.planning.search.request import PartitionHints

WAYS = {"round_the_workers": True, "from_worker_0": False}


def simulated(case: Case, *, num_batches: int, goes_round: bool, hop_seconds: float) -> Timeline:
    """Predict a stream."""
    plan = case.plan
    turns = turns_of_batch(plan) if goes_round else 0
    rows: list[list[Action]] = [[] for _ in range(plan.num_workers)]
    for batch in range(num_batches):
        first = batch * plan.num_microbatches
        schedule = rotated(plan, batch * turns).schedule
        for row, actions in zip(rows, schedule.workers, strict=True):
            row += [replace(action, microbatch=first + action.microbatch) for action in actions]
    return simulate(
        Schedule(workers=tuple(map(tuple, rows))),
        layout=plan,
        costs=stage_costs(
            case.profile,
            partition=plan.partition,
            hop_seconds=hop_seconds,
            recompute=plan.recompute,
        ),
        profile=case.profile,
        hardware=case.hardware,
    )


@contextmanager
def starting(*, goes_round: bool) -> Iterator[None]:
    """Let batches go round the workers, or all begin with worker 0."""
    if goes_round:
        yield
        return
    with mock.patch("roundpipe_lightning.engine.engine.turns_of_batch", return_value=0):
        yield


def measure(
    case: Case, *, num_batches: int, num_streams: int, time_scale: float, goes_round: bool
) -> list[Measured]:
    """Run one batch alone, then streams of batches."""
    with (
        starting(goes_round=goes_round),
        opened(case, time_scale=time_scale, chunk_bytes=CHUNK_BYTES) as (engine, model, batches),
        frozen_objects() as freeze,
    ):
        _run(engine, batches, num_batches=1)
        freeze()
        found = []
        for _ in range(num_streams):
            _run(engine, batches, num_batches=num_batches)
            found.append(seen(model.server, time_scale=time_scale))
    return found


def _run(engine: Engine, batches: Sequence[Tensor], *, num_batches: int) -> None:
    for _ in range(num_batches):
        step = begin(engine, batches)
        step.outputs()
    step.result()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--timings", type=Path, default=DEFAULT_TIMINGS)
    parser.add_argument("--models", nargs="+", help="names (default: all)")
    parser.add_argument("--team-size", type=int, default=1, help="of the plan (default 1)")
    parser.add_argument("--batches", type=int, default=4, help="in a stream (default 4)")
    parser.add_argument("--streams", type=int, default=1, help="counted ones (default 1)")
    parser.add_argument("--time-scale", type=float, default=6.0, help="(default 6)")
    parser.add_argument("--output", choices=("text", "json"), default="text")
    options = parser.parse_args()
    timings = load_timings(options.timings)
    result: dict[str, Any] = {"batches": options.batches, "time_scale": options.time_scale}
    for model in timings.models:
        if options.models and model.name not in options.models:
            continue
        begin = time.perf_counter()
        hints = PartitionHints(team_size=options.team_size)
        case = case_of(model, timings, num_batches=options.batches, hints=hints)
        result[model.name] = {"idle_share_of_one_batch": case.simulated.bubble_fraction}
        for way, goes_round in WAYS.items():
            expected = simulated(
                case,
                num_batches=options.batches,
                goes_round=goes_round,
                hop_seconds=model.hop_seconds,
            )
            streams = measure(
                case,
                num_batches=options.batches,
                num_streams=options.streams,
                time_scale=options.time_scale,
                goes_round=goes_round,
            )
            result[model.name][way] = {
                "simulated_idle_share": expected.bubble_fraction,
                "measured_idle_share": statistics.median(s.bubble_fraction for s in streams),
                "simulated_makespan_ms": expected.makespan_seconds * 1e3,
                "measured_makespan_ms": statistics.median(s.makespan_seconds for s in streams)
                * 1e3,
            }
        result[model.name]["seconds"] = time.perf_counter() - begin
        if options.output == "text":
            print(model.name, json.dumps(result[model.name], indent=2), flush=True)
    if options.output == "json":
        print(json.dumps(result))


if __name__ == "__main__":
    main()
