"""Measures the share of the workers' time that the engine's own dispatcher costs, emulated.

    python benchmarks/emulated_server.py [--models qwen3_32b ...] [--time-scale 4] [--output json]

The engine runs steps of a chain of tiny blocks on eight emulated devices, in real threads. The
blocks' parameters and boundaries are those of a model of the timings file made smaller by one
factor, and so are the links; a device computes for each block as long as was published. The plan is
the planner's. `simulated` is what `simulate` predicts for the same plan, `measured` the
median of the steps, without the first. Times are from the first computation to the end of the last.

A boundary goes down and up again: its size is such that this takes the published hop.

What the first step leaves is frozen for Python's collector (`gc.freeze`): its search through all
objects of the process holds all threads for a quarter of a second, and finds nothing.

The process keeps to one core (`--cores`). All its threads, the engine's and those of the emulation,
take turns with Python's interpreter lock; from core to core each turn costs more than what is done
in it: on two cores the same step takes two to three times the processor time.

With `--speeds 1 1 1 1 .5 .5 .5 .5` devices are unequal and get shares of the work by their speeds.
`worst` is the idle share of the device that idles most, of its own time.

With `--blocks` models are also planned, predicted and measured with `microbatching="blocks"`: the
user's code runs once, on the whole batch, so the tail segment on one device, when all microbatches
have gone forward. The ratios are those of the times of a step, over the other mode's.

With `--optimizer-seconds-share 0.5` steps are also measured from one's first computation to the
next one's, without an optimizer and with one whose update takes half a simulated step.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from published_bubbles import machine
from published_timings import DEFAULT_TIMINGS, PublishedModel, PublishedTimings, load_timings
from torch import Tensor, nn

from roundpipe_lightning.emulation.server import EmulatedServer
from roundpipe_lightning.emulation.timing import EmulatedTiming
from roundpipe_lightning.engine.engine import Engine
from roundpipe_lightning.engine.steps import Step, StepResult
from roundpipe_lightning.engine.update.partial_step import CapturedStep
from roundpipe_lightning.engine.update.updater import Updater, UpdateUnit
from roundpipe_lightning.planning.cost.costs import stage_costs
from roundpipe_lightning.planning.cost.simulate import simulate
from roundpipe_lightning.planning.model.hardware import HardwareSpec
from roundpipe_lightning.planning.model.profile import BlockProfile, ModelProfile
from roundpipe_lightning.planning.schedule.plan import Plan
from roundpipe_lightning.planning.schedule.schedule import Timeline
from roundpipe_lightning.planning.schedule.stages import RecomputePolicy
from roundpipe_lightning.planning.search.planner import plan_of_one_batch, plan_training
from roundpipe_lightning.planning.search.request import PartitionHints, PlanningRequest
from tests.kit.engine import engine_of, layers_of, units_of

BYTES_PER_BYTE = 10_000
"""Bytes of a model for each byte of the tiny one."""

CHUNK_BYTES = 100_000_000 // BYTES_PER_BYTE
"""Longest copy that cannot be overtaken, 100 MB of a model. Real ones are shorter; each costs the
host."""

_NUMBER_BYTES = 4


class TimedBlock(nn.Module):
    """Parameters that are as many bytes as a block's, and nothing but time to compute with them.

    Args:
        profile: The block.
        server: Where it computes.
        time_scale: Seconds per second.
    """

    def __init__(self, profile: BlockProfile, *, server: EmulatedServer, time_scale: float) -> None:
        super().__init__()
        self.server = server
        self.forward_seconds = profile.forward_seconds * time_scale
        self.backward_seconds = profile.backward_seconds * time_scale
        frozen = profile.parameter_bytes - profile.trainable_bytes
        self.trained = _parameter(profile.trainable_bytes)
        self.frozen = _parameter(frozen).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Take the time of the block."""
        x = self.server.work(
            x, forward_seconds=self.forward_seconds, backward_seconds=self.backward_seconds
        )
        weight = self.trained if self.trained.numel() else self.frozen
        return x + weight[:1]


def _parameter(num_bytes: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(math.ceil(num_bytes / BYTES_PER_BYTE / _NUMBER_BYTES)))


class TimedModel(nn.Module):
    """A chain of timed blocks and a tail segment.

    Args:
        profile: The model.
        server: Where it computes.
        time_scale: Seconds per second.
        pieces: Microbatches that the tail segment runs on at once.
    """

    def __init__(
        self, profile: ModelProfile, *, server: EmulatedServer, time_scale: float, pieces: int = 1
    ) -> None:
        super().__init__()
        self.server = server
        self.layers = nn.ModuleList(
            TimedBlock(block, server=server, time_scale=time_scale) for block in profile.blocks
        )
        self.tail = TimedBlock(profile.tail, server=server, time_scale=pieces * time_scale)
        self.embedding = nn.Parameter(torch.zeros(1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return a number that depends on every block."""
        del batch_idx
        x = batch + self.embedding
        for layer in self.layers:
            x = layer(x)
        total: Tensor = self.tail(x).sum()
        return total


@dataclass(frozen=True, kw_only=True)
class Case:
    """A case to measure.

    Attributes:
        profile: The model, with the boundaries' size that makes a hop of two copies.
        plan: The planner's.
        simulated: What is predicted for it.
        hardware: The server.
    """

    profile: ModelProfile
    plan: Plan
    simulated: Timeline
    hardware: HardwareSpec


def case_of(model: PublishedModel, timings: PublishedTimings, **choices: Any) -> Case:
    """Plan a model and predict its step.

    Args:
        model: The model.
        timings: The file that it is from.
        **choices: Further fields of `PlanningRequest`.
    """
    hardware = machine(timings.num_devices)
    boundary_bytes = round(model.hop_seconds / 2 * hardware.upload_bytes_per_second)
    profile = replace(
        model.profile,
        blocks=tuple(replace(b, boundary_bytes=boundary_bytes) for b in model.profile.blocks),
    )
    request = PlanningRequest(
        num_microbatches=timings.num_microbatches, hop_seconds=model.hop_seconds, **choices
    )
    if request.joined:
        policies = (RecomputePolicy.FULL, RecomputePolicy.SELECTIVE)
        request = replace(request, hints=PartitionHints(most_fused=0, recompute=policies))
    plan = plan_of_one_batch(plan_training(profile, hardware=hardware, request=request).plan)
    costs = stage_costs(
        profile,
        partition=plan.partition,
        hop_seconds=model.hop_seconds,
        recompute=plan.recompute,
        speeds=plan.speeds,
    )
    simulated = simulate(
        plan.schedule, layout=plan, costs=costs, profile=profile, hardware=hardware
    )
    return Case(profile=profile, plan=plan, simulated=simulated, hardware=hardware)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One step.

    Attributes:
        begin_seconds: When its first computation began.
        makespan_seconds: From the first computation to the end of the last, of the unscaled time.
        bubble_fraction: Share of the workers' time in which they did not compute.
        worst_fraction: The same of the worker that computed the least.
        host_share: Processor time of the whole process over the time of the step.
    """

    begin_seconds: float
    makespan_seconds: float
    bubble_fraction: float
    worst_fraction: float
    host_share: float


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """Updates between steps.

    Attributes:
        update: `none`, `exact` or `async`.
        seconds: How long an update of all parameters takes.
    """

    update: str = "none"
    seconds: float = 0.0

    @contextmanager
    def running(self, engine: Engine, model: nn.Module) -> Iterator[Callable[[StepResult], None]]:
        """Give a function to call with a step's result."""
        if self.update == "none":
            yield lambda result: None
            return
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        units = units_of(engine, model)
        total = sum(unit.num_bytes for unit in units)

        def run_unit(unit: UpdateUnit, step: CapturedStep) -> None:
            del step
            time.sleep(self.seconds * unit.num_bytes / total)

        stale = self.update == "async"
        with Updater(engine.store, units, stale=stale, run_unit=run_unit) as updater:

            def update(result: StepResult) -> None:
                updater.join()
                for parameter, gradient in result.gradients.items():
                    parameter.grad = gradient
                if stale:
                    updater.keep([optimizer])
                updater.submit(optimizer)

            yield update
            updater.join()


@contextmanager
def opened(
    case: Case, *, time_scale: float, **server: Any
) -> Iterator[tuple[Engine, TimedModel, list[Tensor]]]:
    """Open a case's engine on its emulated server; give the microbatches of a step, too."""
    hardware, plan = case.hardware, case.plan
    scale = BYTES_PER_BYTE * time_scale
    timing = EmulatedTiming(
        upload_bytes_per_second=hardware.upload_bytes_per_second / scale,
        download_bytes_per_second=hardware.download_bytes_per_second / scale,
        host_bytes_per_second=hardware.host_bytes_per_second / scale,
    )
    boundary = case.profile.blocks[0].boundary_bytes / BYTES_PER_BYTE
    pieces = plan.num_microbatches if plan.joined else 1
    batches = [torch.zeros(pieces * math.ceil(boundary / _NUMBER_BYTES))]
    batches *= plan.num_microbatches // pieces
    options = {"tags": False, "speeds": plan.speeds or None, **server}
    with EmulatedServer(plan.num_workers, timing=timing, **options) as emulated:
        model = TimedModel(case.profile, server=emulated, time_scale=time_scale, pieces=pieces)
        with engine_of(model, layers_of(model), plan, devices=emulated.devices) as engine:
            yield engine, model, batches


def begin(engine: Engine, batches: Sequence[Tensor], *, joined: bool = False) -> Step:
    """Begin a step."""
    return engine.begin_step(
        batches,
        lambda view, batch, index: view.training_step(batch, index),
        loss_scales=[1 / len(batches)] * len(batches),
        joined=joined,
    )


def measure(
    case: Case,
    *,
    num_steps: int,
    time_scale: float,
    tags: bool = False,
    optimizer: Optimizer | None = None,
) -> list[Measured]:
    """Run steps; the first is not among those returned."""
    optimizer = Optimizer() if optimizer is None else optimizer
    how: dict[str, Any] = {"time_scale": time_scale, "chunk_bytes": CHUNK_BYTES, "tags": tags}
    with (
        opened(case, **how) as (engine, model, batches),
        optimizer.running(engine, model) as update,
        frozen_objects() as freeze,
    ):
        measured = []
        for _ in range(num_steps + 1):
            began, processor = time.perf_counter(), time.process_time()
            result = begin(engine, batches, joined=case.plan.joined).result()
            host_share = (time.process_time() - processor) / (time.perf_counter() - began)
            measured.append(seen(model.server, time_scale=time_scale, host_share=host_share))
            update(result)
            freeze()
    return measured[1:]


def keep_to_cores(number: int) -> int:
    """Let the threads that will be made, and the calling one, run on a few cores alone.

    Args:
        number: How many; 0 for all that the process may use.

    Returns:
        On how many they run; 0 where the system does not say.
    """
    if not hasattr(os, "sched_setaffinity"):
        return 0
    allowed = sorted(os.sched_getaffinity(0))
    if number:
        allowed = allowed[-number:]
        os.sched_setaffinity(0, allowed)
    return len(allowed)


@contextmanager
def frozen_objects() -> Iterator[Callable[[], None]]:
    """Give what takes all objects out of the collector's sight, when it is first called."""
    is_frozen = False

    def freeze() -> None:
        nonlocal is_frozen
        if not is_frozen:
            gc.collect()
            gc.freeze()
            is_frozen = True

    try:
        yield freeze
    finally:
        gc.unfreeze()


def seen(server: EmulatedServer, *, time_scale: float, host_share: float = 0.0) -> Measured:
    """Return what the devices have computed since their clocks began."""
    rows = [device.compute.spans for device in server.devices]
    starts = [start for row in rows for start, _ in row]
    ends = [end for row in rows for _, end in row]
    makespan = max(ends) - min(starts)
    busy = [sum(end - start for start, end in row) for row in rows]
    return Measured(
        begin_seconds=min(starts) / time_scale,
        makespan_seconds=makespan / time_scale,
        bubble_fraction=1 - sum(busy) / (makespan * len(rows)),
        worst_fraction=1 - min(busy) / makespan,
        host_share=host_share,
    )


def measure_updates(
    case: Case, *, share: float, num_steps: int, time_scale: float
) -> dict[str, Any]:
    """Measure steps, from one's first computation to the next one's, with and without updates.

    Args:
        case: The case.
        share: Seconds of an update per second of a simulated step.
        num_steps: Measured steps.
        time_scale: Seconds per second.
    """
    seconds = share * case.simulated.makespan_seconds * time_scale
    found: dict[str, Any] = {"seconds_share": share}
    for update in ("none", "exact", "async"):
        steps = measure(
            case,
            num_steps=num_steps + 1,
            time_scale=time_scale,
            optimizer=Optimizer(update=update, seconds=seconds),
        )
        begins = [step.begin_seconds for step in steps]
        periods = [second - first for first, second in pairwise(begins)]
        found[f"{update}_step_ms"] = statistics.median(periods) * 1e3
    for update in ("exact", "async"):
        found[f"{update}_over_none"] = found[f"{update}_step_ms"] / found["none_step_ms"]
    return found


def worst_share(timeline: Timeline) -> float:
    """Idle share of the worker that computes the least."""
    busy = [sum(entry.busy_seconds for entry in row) for row in timeline.rows()]
    return 1 - min(busy) / timeline.makespan_seconds


def run_model(
    model: PublishedModel, timings: PublishedTimings, options: argparse.Namespace
) -> dict[str, Any]:
    """Plan, predict and measure one model."""
    case = case_of(model, timings, speeds=tuple(options.speeds))
    how = {"num_steps": options.steps, "time_scale": options.time_scale, "tags": options.tags}
    steps = measure(case, **how)
    makespan = statistics.median(step.makespan_seconds for step in steps)
    result: dict[str, Any] = {
        "simulated_idle_share": case.simulated.bubble_fraction,
        "measured_idle_share": statistics.median(step.bubble_fraction for step in steps),
        "simulated_worst_share": worst_share(case.simulated),
        "measured_worst_share": statistics.median(step.worst_fraction for step in steps),
        "simulated_makespan_ms": case.simulated.makespan_seconds * 1e3,
        "measured_makespan_ms": makespan * 1e3,
        "measured_idle_shares": [step.bubble_fraction for step in steps],
        "host_share": statistics.median(step.host_share for step in steps),
        "num_actions": sum(map(len, case.plan.schedule.workers)),
        "team_size": case.plan.team_size,
        "round_size": case.plan.round_size,
    }
    if options.blocks:
        joined = case_of(model, timings, speeds=tuple(options.speeds), joined=True)
        taken = statistics.median(step.makespan_seconds for step in measure(joined, **how))
        result["blocks"] = {
            "partition": str(joined.plan.partition),
            "simulated_makespan_ms": joined.simulated.makespan_seconds * 1e3,
            "measured_makespan_ms": taken * 1e3,
            "simulated_ratio": joined.simulated.makespan_seconds / case.simulated.makespan_seconds,
            "measured_ratio": taken / makespan,
        }
    if options.optimizer_seconds_share is not None:
        result["optimizer"] = measure_updates(
            case,
            share=options.optimizer_seconds_share,
            num_steps=options.steps,
            time_scale=options.time_scale,
        )
    return result


def format_text(result: dict[str, Any]) -> str:
    """Write the result as text."""
    lines = [
        f"{'':16}{'idle':>21}{'worst':>21}{'makespan':>23}{'host':>8}",
        f"{'':16}"
        + 2 * f"{'simulated':>11}{'measured':>10}"
        + f"{'simulated':>12}{'measured':>11}",
    ]
    for name, row in result["models"].items():
        lines.append(
            f"{name:16}{row['simulated_idle_share']:11.2%}{row['measured_idle_share']:10.2%}"
            f"{row['simulated_worst_share']:11.2%}{row['measured_worst_share']:10.2%}"
            f"{row['simulated_makespan_ms']:9.0f} ms{row['measured_makespan_ms']:8.0f} ms"
            f"{row['host_share']:8.0%}"
        )
        if "blocks" in row:
            blocks = row["blocks"]
            lines.append(
                f"{'    microbatching=blocks':58}{blocks['simulated_makespan_ms']:9.0f} ms"
                f"{blocks['measured_makespan_ms']:8.0f} ms   ratio simulated "
                f"{blocks['simulated_ratio']:.3f}, measured {blocks['measured_ratio']:.3f}"
            )
        if "optimizer" in row:
            steps = row["optimizer"]
            words = [
                f"{name} {steps[f'{name}_step_ms']:.0f} ms" for name in ("none", "exact", "async")
            ]
            lines.append(f"{'':4}updates of {steps['seconds_share']:g} steps: {', '.join(words)}")
    return "\n".join(lines)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--timings", type=Path, default=DEFAULT_TIMINGS, help="a YAML file")
    parser.add_argument("--models", nargs="+", help="of the file (default all)")
    parser.add_argument("--steps", type=int, default=3, help="measured steps (default 3)")
    parser.add_argument(
        "--time-scale", type=float, default=1.0, help="make everything but the host slower"
    )
    parser.add_argument(
        "--speeds", type=float, nargs="*", default=(), help="of each device (default equal)"
    )
    parser.add_argument("--microbatches", type=int, help="of a step (default as published)")
    parser.add_argument("--blocks", action="store_true", help='measure microbatching="blocks", too')
    parser.add_argument(
        "--optimizer-seconds-share",
        type=float,
        help="measure steps with updates of so many simulated steps' time, too",
    )
    parser.add_argument(
        "--cores", type=int, default=1, help="keep to so many cores; 0 for all (default 1)"
    )
    parser.add_argument("--tags", action="store_true", help="let tensors refuse to mix devices")
    parser.add_argument("--output", choices=("text", "json"), default="text")
    options = parser.parse_args()
    if options.cores < 0:
        parser.error(f"--cores {options.cores}: a number of cores, or 0 for all")
    torch.set_num_threads(1)
    num_cores = keep_to_cores(options.cores)
    timings = load_timings(options.timings)
    if options.microbatches:
        timings = replace(timings, num_microbatches=options.microbatches)
    if options.speeds and len(options.speeds) != timings.num_devices:
        parser.error(f"--speeds: give {timings.num_devices}, one for each device")
    names = [model.name for model in timings.models]
    unknown = sorted(set(options.models or ()) - set(names))
    if unknown:
        parser.error(f"--models {unknown[0]}: the file has {', '.join(names)}")
    models = {
        model.name: run_model(model, timings, options)
        for model in timings.models
        if options.models is None or model.name in options.models
    }
    result = {
        "num_workers": timings.num_devices,
        "time_scale": options.time_scale,
        "num_cores": num_cores,
        "models": models,
    }
    print(json.dumps(result) if options.output == "json" else format_text(result))


if __name__ == "__main__":
    main()
