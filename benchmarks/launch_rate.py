"""Measures how fast a block launches operations in the engine, against plain PyTorch.

Each block makes many operations on a tensor of size 1, forward and backward, so nothing but the
host's work per operation counts. One worker runs one microbatch; more workers share the
interpreter, each with a microbatch of its own. Like is compared with like: where the engine keeps
the graph of all blocks the plain loop does, too (`kept`); where it runs all blocks but the last one
again (`recomputed`) the plain loop has `torch.utils.checkpoint` around each, without its care for
random numbers. The figure is operations per second in the engine over those of the plain loop in
one thread, from the processor's time as well as the clock's: other programs on the machine delay
only the latter. Both run in turn, and the median of the pairs' ratios is printed.

    python benchmarks/launch_rate.py [--workers 1 4 8] [--pairs 31] [--output json]
    python benchmarks/launch_rate.py --toy-step  # a step of `Trainer.fit` on four small blocks
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from roundpipe_lightning.planning.schedule.stages import Partition
from roundpipe_lightning.strategy.strategy import RoundPipeStrategy
from tests.kit.engine import cpu_workers, engine_of, mean_step, plan_of, stack_of
from tests.kit.training import make_trainer

NUM_BLOCKS = 8
_CHECKPOINT: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}


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


def rates(
    num_workers: int, *, pairs: int, repeats: int, recomputes: bool = False
) -> dict[str, float]:
    """Return the engine's operations per second over the plain loop's: the median of the pairs."""
    plain, ours = Model(repeats), Model(repeats)
    batches = [torch.ones(1) for _ in range(num_workers)]
    stack = stack_of(tuple(ours.layers))
    plan = plan_of(
        stack,
        num_workers=num_workers,
        num_microbatches=num_workers,
        team_size=num_workers,
        partition=Partition(
            forward=(NUM_BLOCKS - 1,) if recomputes else (),
            backward=(1, NUM_BLOCKS - 1) if recomputes else (NUM_BLOCKS,),
        ),
    )

    def run_plain() -> None:
        for x in batches:
            for layer in plain.layers[:-1]:
                x = checkpoint(layer, x, **_CHECKPOINT) if recomputes else layer(x)
            plain.layers[-1](x).sum().backward()

    ratios = []
    with engine_of(ours, stack, plan, devices=cpu_workers(num_workers)) as engine:
        for _ in range(pairs + 1):  # the first prepares
            one, other = measure(run_plain), measure(lambda: mean_step(engine, batches))
            ratios.append((one[0] / other[0], one[1] / other[1]))
    processor, clock = map(statistics.median, zip(*ratios[1:], strict=True))
    return {"processor": processor, "clock": clock}


class Toy(LightningModule):
    """Four linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """Return a loss."""
        (x,) = batch
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return plain gradient descent."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class _Clock(Callback):
    """Notes the seconds of the processor when each batch ends."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.seconds.append(time.process_time())


def toy_step(strategy: Any, *, steps: int, warm_up: int = 50) -> float:
    """Return the processor's seconds of a step of `Trainer.fit`: one microbatch on one worker."""
    clock, rows = _Clock(), torch.ones(4 * (warm_up + steps), 16)
    data = DataLoader(TensorDataset(rows), batch_size=4)
    with tempfile.TemporaryDirectory() as folder:
        flags: dict[str, Any] = {"strategy": strategy, "max_epochs": 1, "callbacks": clock}
        make_trainer(Path(folder), **flags).fit(Toy(), data)
    return (clock.seconds[-1] - clock.seconds[warm_up - 1]) / steps


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--pairs", type=int, default=31, help="counted pairs of steps (default 31)")
    parser.add_argument("--repeats", type=int, default=200, help="of 4 operations (default 200)")
    parser.add_argument("--output", choices=("text", "json"), default="text")
    parser.add_argument("--toy-step", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.toy_step:
        ours = toy_step(RoundPipeStrategy(num_microbatches=1), steps=300)
        plain = toy_step("auto", steps=300)
        print(f"processor's time of a step: {1e3 * ours:.2f} ms, plain Lightning {1e3 * plain:.2f}")
        return
    found = {
        f"{num_workers} workers, {kind}": rates(
            num_workers, pairs=options.pairs, repeats=options.repeats, recomputes=recomputes
        )
        for num_workers in options.workers
        for kind, recomputes in (("recomputed", True), ("kept", False))
    }
    if options.output == "json":
        print(json.dumps(found))
        return
    for name, ratios in found.items():
        text = ", ".join(f"{ratio:.2f} by the {kind}" for kind, ratio in ratios.items())
        print(f"{name}: {text}")


if __name__ == "__main__":
    main()
