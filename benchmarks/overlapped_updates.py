"""Measures the optimizer's cost for a step that it overlaps, on an emulated server.

    python benchmarks/overlapped_updates.py [--models qwen3_32b --time-scale 0.5 --steps 2]
    python benchmarks/overlapped_updates.py --processor

The step is that of `emulated_server.py`: eight emulated devices, the blocks' published times, links
and parameters made smaller by one factor, the real engine and the real updater. The optimizer takes
a share of the time of a forward pass (of all microbatches on all workers, without idle time),
divided among blocks and other parameters by their bytes. The ways to step it, in turns:

- `none`: no optimizer at all.
- `after`: the optimizer runs between two steps, overlapping with nothing.
- `exact`: `update="exact"` where something waits for all gradients (clipping by norm): it begins
  after the backward pass. The next step's blocks wait for their updates.
- `early`: `update="exact"` elsewhere: a block is stepped when its gradients are there.
- `async`: `update="async"`. The next step computes with the parameters of before the update.

A step's time is that from its beginning to the beginning of the next one, without the first: the
median, and the least, on which other work of the machine has the least influence. `--time-scale`
makes everything but the host slower, or faster: slow blocks leave the host enough time below 1.

With `--processor` two workers compute on this processor, for real, and so does AdamW: what
overlapping is worth where both want the same cores.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from emulated_server import Case, begin, case_of, opened
from published_timings import DEFAULT_TIMINGS, load_timings
from torch import Tensor, nn

from roundpipe_lightning.engine.engine import Engine
from roundpipe_lightning.engine.update.partial_step import CapturedStep
from roundpipe_lightning.engine.update.updater import Updater, UpdateUnit
from tests.kit.engine import auto_plan, engine_of, layers_of, units_of

WAYS = ("none", "after", "exact", "early", "async")
_NUM_UNMEASURED = 1


class PacedOptimizer:
    """Gives an optimizer's step a duration.

    Args:
        seconds: Of the whole step.
        num_bytes: Of all parameters.
    """

    def __init__(self, *, seconds: float, num_bytes: int) -> None:
        self._seconds_per_byte = seconds / num_bytes
        self._free = 0.0

    def __call__(self, unit: UpdateUnit, step: CapturedStep) -> None:
        """Update a unit. Late wake-ups make the next unit no later."""
        now = time.perf_counter()
        duration = unit.num_bytes * self._seconds_per_byte
        start = self._free if now - self._free < duration else now
        step.run(unit.parameters)
        self._free = max(start, 0.0) + duration
        time.sleep(max(0.0, self._free - time.perf_counter()))


def say(text: str) -> None:
    """Tell how far it is."""
    print(text, file=sys.stderr, flush=True)


def step_seconds(
    case: Case, *, way: str, num_steps: int, optimizer_seconds: float, time_scale: float
) -> list[float]:
    """Return the times of steps with an optimizer that steps in one of the ways."""
    with opened(case, time_scale=time_scale) as (engine, model, batches):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        units = units_of(engine, model)
        paced = PacedOptimizer(
            seconds=optimizer_seconds * time_scale, num_bytes=sum(u.num_bytes for u in units)
        )
        run_unit = _plain if way == "none" else paced
        with Updater(engine.store, units, stale=way == "async", run_unit=run_unit) as updater:
            times = timed_steps(
                engine,
                updater,
                optimizer,
                batches=batches,
                way=way,
                num_steps=num_steps,
            )
    return [seconds / time_scale for seconds in times]


def _plain(unit: UpdateUnit, step: CapturedStep) -> None:
    step.run(unit.parameters)


def timed_steps(
    engine: Engine,
    updater: Updater,
    optimizer: torch.optim.Optimizer,
    *,
    batches: Sequence[Tensor],
    way: str,
    num_steps: int,
) -> list[float]:
    """Return the times of steps, each up to the beginning of the next, without the first."""
    begins = []
    for number in range(num_steps + _NUM_UNMEASURED + 1):
        begins.append(time.perf_counter())
        if number:
            say(f"  {way}: step {number} took {begins[-1] - begins[-2]:.2f} s")
        if number == num_steps + _NUM_UNMEASURED:
            break
        if way == "early":
            updater.begin(optimizer)
        gradients = begin(engine, batches).result().gradients
        _let_step(updater, optimizer, gradients, way=way)
    return [after - before for before, after in itertools.pairwise(begins)][_NUM_UNMEASURED:]


def _let_step(
    updater: Updater, optimizer: torch.optim.Optimizer, gradients: dict[Any, Tensor], *, way: str
) -> None:
    if way == "none":
        return
    updater.join()
    for parameter, gradient in gradients.items():
        parameter.grad = gradient
    if way == "async":
        updater.keep([optimizer])
    updater.submit(optimizer, release_gradients=True)
    if way == "after":
        updater.join()


def run_case(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Measure all ways, in turns."""
    plan, profile = case.plan, case.profile
    forward = sum(block.forward_seconds for block in (*profile.blocks, profile.tail))
    optimizer_seconds = options.optimizer_share * forward * plan.num_microbatches / plan.num_workers
    times: dict[str, list[float]] = {way: [] for way in options.ways}
    for _ in range(options.repeats):
        for way in options.ways:
            times[way] += step_seconds(
                case,
                way=way,
                num_steps=options.steps,
                optimizer_seconds=optimizer_seconds,
                time_scale=options.time_scale,
            )
    return {"optimizer_ms": optimizer_seconds * 1e3, **compared(times)}


def compared(times: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return medians and least times, and what they are more than those of the first way."""
    (first, base), *_ = times.items()
    medians = {way: statistics.median(values) for way, values in times.items()}
    others = [way for way in times if way != first]
    return {
        "step_ms": {way: seconds * 1e3 for way, seconds in medians.items()},
        "overhead": {way: medians[way] / medians[first] - 1 for way in others},
        "least_overhead": {way: min(times[way]) / min(base) - 1 for way in others},
        "all_step_ms": {way: [s * 1e3 for s in values] for way, values in times.items()},
    }


class Chain(nn.Module):
    """Blocks of two linear layers, and a mean.

    Args:
        num_blocks: How many.
        width: Of what flows.
    """

    def __init__(self, *, num_blocks: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(num_blocks)
        )

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return a number that depends on every block."""
        del batch_idx
        for layer in self.layers:
            batch = batch + layer(batch)
        return batch.square().mean()


def run_processor(options: argparse.Namespace) -> dict[str, Any]:
    """Measure what overlapping is worth on workers that compute on this processor."""
    times: dict[str, list[float]] = {way: [] for way in ("after", "exact", "early")}
    for _ in range(options.repeats):
        for way, values in times.items():
            values += processor_seconds(options, way=way)
    return compared(times)


def processor_seconds(options: argparse.Namespace, *, way: str) -> list[float]:
    """Return the times of steps on two workers on this processor."""
    torch.manual_seed(0)
    model = Chain(num_blocks=options.blocks, width=options.width)
    stack = layers_of(model)
    plan = auto_plan(stack, num_workers=2, num_microbatches=4)
    optimizer = torch.optim.AdamW(model.parameters())
    batches = list(torch.randn(4, options.tokens, options.width))
    with (
        engine_of(model, stack, plan) as engine,
        Updater(engine.store, units_of(engine, model)) as updater,
    ):
        return timed_steps(
            engine, updater, optimizer, batches=batches, way=way, num_steps=options.steps
        )


def format_text(result: dict[str, Any]) -> str:
    """Write the result as text."""
    lines = []
    for name, row in result["models"].items():
        first, *others = row["step_ms"]
        optimizer = f", optimizer {row['optimizer_ms']:.0f} ms" if "optimizer_ms" in row else ""
        lines.append(f"{name}{optimizer}; median, least, against {first!r}")
        lines.append(f"  {first:8}{row['step_ms'][first]:10.1f} ms")
        lines += [
            f"  {way:8}{row['step_ms'][way]:10.1f} ms{row['overhead'][way]:+8.1%}"
            f"{row['least_overhead'][way]:+8.1%}"
            for way in others
        ]
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", help="of the timings file (default all)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="(default all)")
    parser.add_argument("--steps", type=int, default=4, help="measured steps (default 4)")
    parser.add_argument("--repeats", type=int, default=1, help="of all ways (default 1)")
    parser.add_argument(
        "--optimizer-share", type=float, default=0.5, help="of the forward's time (default 0.5)"
    )
    parser.add_argument(
        "--time-scale", type=float, default=1.0, help="make everything but the host slower"
    )
    parser.add_argument("--timings", type=Path, default=DEFAULT_TIMINGS, help="a file of timings")
    parser.add_argument(
        "--processor", action="store_true", help="measure workers on this processor"
    )
    parser.add_argument("--blocks", type=int, default=8, help="with --processor (default 8)")
    parser.add_argument("--width", type=int, default=512, help="with --processor (default 512)")
    parser.add_argument("--tokens", type=int, default=128, help="of a microbatch (default 128)")
    parser.add_argument("--output", choices=("text", "json"), default="text")
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure what was asked for."""
    if options.processor:
        return {"models": {"this processor": run_processor(options)}}
    torch.set_num_threads(1)
    timings = load_timings(options.timings)
    known = {model.name: model for model in timings.models}
    unknown = sorted(set(options.models or ()) - known.keys())
    if unknown:
        raise SystemExit(f"--models {unknown[0]}: the file has {', '.join(known)}")
    models = {}
    for name in options.models or known:
        say(f"{name}: planning")
        models[name] = run_case(case_of(known[name], timings), options)
    return {"time_scale": options.time_scale, "models": models}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    options = parse(arguments)
    result = measure(options)
    print(json.dumps(result) if options.output == "json" else format_text(result))


if __name__ == "__main__":
    main()
