"""Measures the idle share of training from the command line beside the bare engine's, emulated.

    python benchmarks/command_overlap.py [--milliseconds 8] [--steps 6] [--output json]

The Trainer is the one that `python train.py` makes of the shipped configuration, with callbacks,
loggers and clipping, on four emulated devices; its strategy is `EmulatedStrategy`. The bare engine
runs the same plan with the same updates, with `async` two steps in flight, as the Trainer has them.
Blocks take the given time forward and twice that backward, and the optimizer half the time of a
forward pass. The idle share is the workers' time without computing, from a step's first computation
to the next step's; the least of the steps, on which other work of the machine has the least
influence.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from roundpipe_lightning.cli.build import build_run
from roundpipe_lightning.emulation.server import EmulatedServer
from roundpipe_lightning.emulation.timing import EmulatedTiming
from roundpipe_lightning.engine.engine import Engine
from roundpipe_lightning.engine.steps import Step
from roundpipe_lightning.engine.update.partial_step import CapturedStep
from roundpipe_lightning.engine.update.updater import Updater, UpdateUnit
from roundpipe_lightning.models.blocks import find_stacks
from roundpipe_lightning.planning.model.hardware import config_folder
from roundpipe_lightning.planning.schedule.plan import Plan
from roundpipe_lightning.strategy import runtime
from tests.kit.engine import units_of

NUM_WORKERS, NUM_BLOCKS, NUM_MICROBATCHES = 4, 8, 8
_NUM_WEIGHTS = 1_000
_OPTIMIZER_SHARE = 0.5
_NUM_UNMEASURED = 2
UPDATES = ("exact", "async")


class TimedBlock(nn.Module):
    """A weight, and time to compute with it."""

    def __init__(self, server: EmulatedServer, seconds: float) -> None:
        super().__init__()
        # As a function: attributes of an object would count as written by the step.
        self.work = partial(server.work, forward_seconds=seconds, backward_seconds=2 * seconds)
        self.weight = nn.Parameter(torch.zeros(_NUM_WEIGHTS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.work(x)
        return x + self.weight[:1]


class TimedModule(LightningModule):
    """A chain of timed blocks that logs a loss.

    Args:
        server: Where it computes.
        seconds: Of a block's forward pass.
    """

    def __init__(self, server: EmulatedServer, seconds: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TimedBlock(server, seconds) for _ in range(NUM_BLOCKS))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        del batch_idx
        x = batch["input_ids"]
        for layer in self.layers:
            x = layer(x)
        loss = x.mean()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Measurement:
    """A server, and an optimizer that takes its time.

    Args:
        seconds: Of a block's forward pass.
        num_steps: Measured steps.
    """

    def __init__(self, *, seconds: float, num_steps: int) -> None:
        self.seconds = seconds
        self.num_steps = num_steps + _NUM_UNMEASURED + 1
        forward = NUM_BLOCKS * NUM_MICROBATCHES * seconds / NUM_WORKERS
        self._update_seconds = _OPTIMIZER_SHARE * forward / NUM_BLOCKS

    def run_unit(self, unit: UpdateUnit, step: CapturedStep) -> None:
        """Update a block."""
        time.sleep(self._update_seconds)
        step.run(unit.parameters)

    def trainer(self, update: str, folder: Path, *overrides: str) -> tuple[float, Plan]:
        """Return the idle share of the command's Trainer, and its plan."""
        settings = [
            "hardware=cpu",
            f"paths.output_dir={folder}",
            f"partition.num_microbatches={NUM_MICROBATCHES}",
            "partition.forward=[3,4]",
            "partition.backward=[1,1,1,1,1,1,1,1]",
            "trainer.strategy._target_=roundpipe_lightning.testing.EmulatedStrategy",
            f"trainer.strategy.update={update}",
            f"trainer.devices={NUM_WORKERS}",
            f"trainer.max_steps={self.num_steps}",
            f"data.batch_size={NUM_MICROBATCHES}",
            *overrides,
        ]
        with initialize_config_dir(str(config_folder()), version_base="1.3"):
            config = compose("train", overrides=settings)
        run = build_run(config)
        strategy: Any = run.trainer.strategy
        data: Any = [{"input_ids": torch.zeros(1)}] * (NUM_MICROBATCHES * self.num_steps)
        with self._served() as (server, module), self._paced():
            strategy._given_devices = server.devices  # noqa: SLF001 - settings are text
            run.trainer.fit(module, DataLoader(data, batch_size=NUM_MICROBATCHES))
            return self._idle_share(server), strategy.plan

    @contextmanager
    def _paced(self) -> Iterator[None]:
        before = runtime.Updater
        runtime.Updater = partial(Updater, run_unit=self.run_unit)  # type: ignore[assignment, misc]
        try:
            yield
        finally:
            runtime.Updater = before  # type: ignore[misc]

    @contextmanager
    def _served(self) -> Iterator[tuple[EmulatedServer, TimedModule]]:
        rate = 4 * _NUM_WEIGHTS / (self.seconds / 2)  # a block travels in half its time
        timing = EmulatedTiming(upload_bytes_per_second=rate, download_bytes_per_second=rate)
        with EmulatedServer(NUM_WORKERS, timing=timing, tags=False) as server:
            for device in server.devices:
                device.compute.restart = lambda: None  # type: ignore[method-assign]
            yield server, TimedModule(server, self.seconds)

    def engine(self, update: str, plan: Plan) -> float:
        """Return the idle share of the bare engine."""
        batches = [torch.zeros(1, 1)] * NUM_MICROBATCHES
        with self._served() as (server, module):
            module.log = lambda *_: None  # type: ignore[assignment, method-assign]
            (stack,) = find_stacks(module, None)
            with Engine(module, stack=stack, devices=server.devices, plan=plan) as engine:
                units = units_of(engine, module)
                optimizer = module.configure_optimizers()
                stale = update == "async"
                with Updater(engine.store, units, stale=stale, run_unit=self.run_unit) as updater:
                    before: Step | None = None
                    for _ in range(self.num_steps):
                        step = engine.begin_step(
                            batches,
                            lambda view, batch, index: view.training_step(
                                {"input_ids": batch}, index
                            ),
                            loss_scales=[1 / NUM_MICROBATCHES] * NUM_MICROBATCHES,
                        )
                        if not stale:
                            self._update(updater, optimizer, step)
                            continue
                        if before is not None:
                            self._update(updater, optimizer, before, has_next=True)
                        updater.defer(optimizer)
                        step.outputs()
                        before = step
                    if before is not None:
                        self._update(updater, optimizer, before, keeps=True)
                    updater.join()
            return self._idle_share(server)

    def _update(
        self,
        updater: Updater,
        optimizer: torch.optim.Optimizer,
        step: Step,
        *,
        keeps: bool = False,
        has_next: bool = False,
    ) -> None:
        """Submit the update that a step's gradients make; `has_next`: the next step has begun."""
        gradients = step.result().gradients
        if not keeps and not has_next:
            updater.join()
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        if keeps or has_next:
            updater.keep([optimizer], is_read=has_next)
        updater.submit(optimizer, release_gradients=has_next)

    def _idle_share(self, server: EmulatedServer) -> float:
        """Return the least idle share of a step, between the first computations of neighbours."""
        per_step = NUM_BLOCKS * NUM_MICROBATCHES
        rows = [device.compute.spans for device in server.devices]
        spans = sorted(span for row in rows for span in row)
        num_spans = len(spans) // self.num_steps
        begins = [spans[index][0] for index in range(0, len(spans), num_spans)]
        assert len(spans) % self.num_steps == 0, "every step computes the same"
        assert num_spans > per_step
        work = sum(end - start for start, end in spans) / self.num_steps
        periods = [after - before for before, after in itertools.pairwise(begins)]
        return 1 - work / (NUM_WORKERS * min(periods[_NUM_UNMEASURED:]))


def measure(*, seconds: float, num_steps: int, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return the idle shares of the Trainer and of the engine for each kind of update."""
    found: dict[str, Any] = {}
    for update in UPDATES:
        measurement = Measurement(seconds=seconds, num_steps=num_steps)
        with tempfile.TemporaryDirectory() as folder:
            trainer, plan = measurement.trainer(update, Path(folder), *overrides)
        engine = measurement.engine(update, plan)
        found[update] = {"trainer_idle_share": trainer, "engine_idle_share": engine}
    return found


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--milliseconds", type=float, default=8.0, help="of a block (default 8)")
    parser.add_argument("--steps", type=int, default=6, help="measured steps (default 6)")
    parser.add_argument("--output", choices=("text", "json"), default="text")
    parser.add_argument("overrides", nargs="*", help="of the configuration")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(
        seconds=options.milliseconds / 1e3, num_steps=options.steps, overrides=options.overrides
    )
    if options.output == "json":
        print(json.dumps(found))
        return
    for update, shares in found.items():
        print(
            f"{update:6} idle: Trainer {shares['trainer_idle_share']:.1%}, "
            f"engine {shares['engine_idle_share']:.1%}"
        )


if __name__ == "__main__":
    main()
