"""Measures how fast a block launches operations in the engine, against plain PyTorch.

Each block makes many operations on a tensor of size 1, forward and backward, so nothing but the
host's work per operation counts. One worker runs one microbatch of blocks that are not run again;
more workers share the interpreter, each with a microbatch of its own. The figure is operations per
second in the engine over those of a plain loop in one thread, from the processor's time as well as
the clock's: other programs on the machine delay only the latter.

    python benchmarks/launch_rate.py [--workers 1 4 8] [--pairs 7] [--output json]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from roundpipe_lightning.planning.schedule.stages import Partition
from tests.kit.engine import cpu_workers, engine_of, mean_step, plan_of, stack_of

NUM_BLOCKS = 8


class Block(nn.Module):
    """Operations of the kinds that models make, on one number."""

    def __init__(self, repeats: int) -> None:
        super().__init__()
        self.linear, self.repeats = nn.Linear(1, 1), repeats

    def forward(self, x: Tensor) -> Tensor:
        """Return the number after 4 operations per repetition."""
        for _ in range(self.repeats):
            x = self.linear(x).relu() * 0.5 + 1.0
        return x


class Model(nn.Module):
    """A stack of such blocks."""

    def __init__(self, repeats: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block(repeats) for _ in range(NUM_BLOCKS))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return a loss."""
        del batch_idx
        for layer in self.layers:
            batch = layer(batch)
        return batch.sum()


def measure(run: Callable[[], Any]) -> tuple[float, float]:
    """Return the seconds of the processor and of the clock."""
    processor, clock = time.process_time(), time.perf_counter()
    run()
    return time.process_time() - processor, time.perf_counter() - clock


def rates(num_workers: int, *, pairs: int, repeats: int) -> dict[str, float]:
    """Return the engine's operations per second over the plain loop's, each its fastest run."""
    plain, ours = Model(repeats), Model(repeats)
    batches = [torch.ones(1) for _ in range(num_workers)]
    stack = stack_of(tuple(ours.layers))
    plan = plan_of(
        stack,
        num_workers=num_workers,
        num_microbatches=num_workers,
        team_size=num_workers,
        partition=Partition(forward=(), backward=(NUM_BLOCKS,)),
    )

    def run_plain() -> None:
        for batch in batches:
            plain.training_step(batch, 0).backward()

    plain_runs, engine_runs = [], []
    with engine_of(ours, stack, plan, devices=cpu_workers(num_workers)) as engine:
        for _ in range(pairs + 1):  # the first prepares
            plain_runs.append(measure(run_plain))
            engine_runs.append(measure(lambda: mean_step(engine, batches)))
    fastest = [map(min, zip(*runs, strict=True)) for runs in (plain_runs, engine_runs)]
    ratios = [one / other for one, other in zip(*fastest, strict=True)]
    return dict(zip(("processor", "clock"), ratios, strict=True))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--pairs", type=int, default=7, help="counted pairs of steps (default 7)")
    parser.add_argument("--repeats", type=int, default=600, help="of 4 operations (default 600)")
    parser.add_argument("--output", choices=("text", "json"), default="text")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {n: rates(n, pairs=options.pairs, repeats=options.repeats) for n in options.workers}
    if options.output == "json":
        print(json.dumps(found))
        return
    for num_workers, ratios in found.items():
        text = ", ".join(f"{ratio:.2f} by the {kind}" for kind, ratio in ratios.items())
        print(f"{num_workers} workers, operations per second over plain PyTorch: {text}")


if __name__ == "__main__":
    main()
