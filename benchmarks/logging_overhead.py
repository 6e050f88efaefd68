"""Measures the cost of the callbacks: training steps with all of them on, against steps without.

One process trains a small decoder on CPU workers. Between two batches, while the Trainer asks for
the next one, `PipelineMonitor`, `PipelineTimeline` and `PlanReport` are put into the Trainer or
taken out of it. So both kinds of batches run in the same memory and the same threads, a moment
apart, and whatever else the machine does hits both. A batch with them and one without are a pair;
which comes first is drawn for each pair. A batch's time is from its fetch to the fetch of the next,
with all that Lightning does in between. Before it, untimed, garbage is collected: each pays for its
own.

`ratio_median` is the median over the pairs of time with callbacks by time without; `ratio_low` and
`ratio_high` are its 95 % confidence interval (order statistics, so no distribution is assumed).
`cpu_ratio_median` is the same of the process's processor time, which depends less on what else the
machine does. A median does not see what happens in few batches: `ratio_of_sums` and
`cpu_ratio_of_sums` do. `callback_seconds_share` is counted another way: the seconds that the
callbacks' own hooks take, as a share of the time of the batches that have them.

`--control` leaves the callbacks out of all batches: what is then left of a difference is the
scatter of the machine. `--emulated` trains on emulated devices instead, whose blocks take given
times, with an optimizer in host memory that takes half as long as the forward pass: there a batch
also gets longer if the callbacks make the Trainer wait for what it would overlap with. `--live`
measures `LiveView` instead, drawn on a terminal that is thrown away.

    python benchmarks/logging_overhead.py [--pairs 200] [--log-every 50] [--control] [--emulated]
        [--live]
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import math
import platform
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import Profiler
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional

from roundpipe_lightning import (
    LiveView,
    PipelineMonitor,
    PipelineTimeline,
    PlanReport,
    RoundPipeStrategy,
)
from roundpipe_lightning.emulation.server import EmulatedServer
from roundpipe_lightning.emulation.timing import EmulatedTiming
from roundpipe_lightning.planning.model.hardware import load_hardware
from roundpipe_lightning.testing import EmulatedStrategy

_WARMUP = 4  # batches, all of them with the callbacks

Times: TypeAlias = tuple[float, float]
"""Seconds of the wall's clock and of the processor's."""

Batch: TypeAlias = dict[str, Tensor]

_VOCABULARY = 512


class Block(nn.Module):
    """A decoder layer: causal attention and a feed-forward layer."""

    def __init__(self, width: int, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.joined = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.inner, self.outer = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the hidden states; shapes (sequences, tokens, width)."""
        batch, tokens, width = x.shape
        parts = self.joined(self.first_norm(x)).view(batch, tokens, 3, self.num_heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        result: Tensor = x + self.outer(functional.gelu(self.inner(self.second_norm(x))))
        return result


class TimedBlock(nn.Module):
    """A linear layer that takes a given time on an emulated device."""

    def __init__(self, width: int, *, server: EmulatedServer, seconds: float) -> None:
        super().__init__()
        self.server, self.seconds = server, seconds
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the hidden states."""
        x = self.server.work(x, forward_seconds=self.seconds, backward_seconds=2 * self.seconds)
        result: Tensor = x + self.linear(x)
        return result


class SlowAdamW(torch.optim.AdamW):
    """Takes a given time for each parameter's value, and no processor for it."""

    seconds_per_value = 0.0

    def step(self, closure: Any = None) -> Any:
        """Step, and wait."""
        result = super().step(closure)
        members = (p for group in self.param_groups for p in group["params"])
        time.sleep(self.seconds_per_value * sum(p.numel() for p in members if p.grad is not None))
        return result


class Decoder(LightningModule):
    """A small causal language model.

    Args:
        blocks: Its layers, for hidden states of `width`.
        width: Of hidden states.
        update_seconds: How long the optimizer's step waits, beside its own work.
    """

    def __init__(self, blocks: Sequence[nn.Module], *, width: int, update_seconds: float) -> None:
        super().__init__()
        self.update_seconds = update_seconds
        self.embedding = nn.Embedding(_VOCABULARY, width)
        self.layers = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, _VOCABULARY, bias=False)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the mean loss per target."""
        del batch_idx
        x = self.embedding(batch["input_ids"])
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))[:, :-1].flatten(0, 1)
        loss = functional.cross_entropy(logits, batch["labels"][:, 1:].flatten())
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        if not self.update_seconds:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)
        optimizer = SlowAdamW(self.parameters(), lr=1e-4)
        num_values = sum(parameter.numel() for parameter in self.parameters())
        optimizer.seconds_per_value = self.update_seconds / num_values
        return optimizer


class HookClock(Profiler):
    """Adds up how long the hooks of some callbacks take; Lightning reports each to its profiler.

    Args:
        callbacks: Whose.

    Attributes:
        runs: Whether it does.
        seconds: By the callback's name.
    """

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        super().__init__()
        self._of = {f"[Callback]{c.state_key}": type(c).__name__ for c in callbacks}
        self.seconds = dict.fromkeys(self._of.values(), 0.0)
        self.runs = False
        self._began = 0.0

    def start(self, action_name: str) -> None:  # noqa: ARG002 - Lightning's signature
        """Note when; hooks do not call each other."""
        self._began = time.perf_counter()

    def stop(self, action_name: str) -> None:
        """Add what a hook has taken."""
        name = self._of.get(action_name.rpartition(".")[0])
        if name is not None and self.runs:
            self.seconds[name] += time.perf_counter() - self._began


class Turns:
    """The batches of a training, by turns with and without callbacks: the Trainer's data loader.

    Args:
        batch: Every batch.
        order: Which turns are to have the callbacks. Those for warming up come before.
        callbacks: They, as they are given to the Trainer, too.
        clock: Runs in the turns.

    Attributes:
        times: What the turns have taken.
        trainer: The Trainer, once it is there.
    """

    trainer: Trainer

    def __init__(
        self,
        batch: Batch,
        *,
        order: Sequence[bool],
        callbacks: Sequence[Callback],
        clock: HookClock,
    ) -> None:
        self._batch = batch
        self._order = order
        self._callbacks = callbacks
        self._clock = clock
        self.times: list[Times] = []

    def __len__(self) -> int:
        return _WARMUP + len(self._order) + 1  # the end of the last one is not measured

    def __iter__(self) -> Iterator[Batch]:
        """Give the batches. What stands behind a `yield` runs when the next one is asked for."""
        for _ in range(_WARMUP):
            yield self._batch
        gc.collect()
        gc.freeze()  # what is there by now is not looked through before each turn
        self._clock.runs = True
        lists = self._lists()
        everybody = [list(members) for members in lists]
        for has_callbacks in self._order:
            for members, everyone in zip(lists, everybody, strict=True):
                members[:] = [m for m in everyone if has_callbacks or not self._is_theirs(m)]
            for view in self._callbacks:
                if isinstance(view, LiveView) and view.is_shown != has_callbacks:
                    (view.on_train_start if has_callbacks else view.on_train_end)(self.trainer)
            gc.collect()
            wall, processor = time.perf_counter(), time.process_time()
            yield self._batch
            self.times.append((time.perf_counter() - wall, time.process_time() - processor))
        self._clock.runs = False
        for members, everyone in zip(lists, everybody, strict=True):
            members[:] = everyone
        yield self._batch

    def _lists(self) -> tuple[list[Any], ...]:
        """Lists of callbacks and listeners. The hooks around fetches note the time, and stay."""
        trainer: Any = self.trainer
        strategy = trainer.strategy
        return trainer.callbacks, strategy.plan_listeners, strategy.step_listeners

    def _is_theirs(self, member: Any) -> bool:
        """Whether a callback or a listener is one of the callbacks'. No other listens."""
        return member in self._callbacks or not isinstance(member, Callback)


def drawn_order(num_pairs: int) -> list[bool]:
    """Return which turns have the callbacks: one of each pair."""
    drawn = random.Random(0)
    firsts = [drawn.random() < 0.5 for _ in range(num_pairs)]
    return [turn for first in firsts for turn in (first, not first)]


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % confidence interval of a median, from order statistics."""
    ordered, count = sorted(values), len(values)
    rank = max(0, math.floor((count - 1.96 * math.sqrt(count)) / 2) - 1)
    return ordered[rank], ordered[count - 1 - rank]


def make_training(
    options: argparse.Namespace, resources: ExitStack
) -> tuple[Decoder, RoundPipeStrategy]:
    """Return what is trained, and where."""
    width, num_blocks = options.width, options.blocks
    if not options.emulated:
        blocks: list[nn.Module] = [Block(width) for _ in range(num_blocks)]
        strategy = RoundPipeStrategy(num_microbatches=options.microbatches, replan=False)
        return Decoder(blocks, width=width, update_seconds=0.0), strategy
    seconds = options.block_seconds
    block_bytes = 4 * width * (width + 1)
    rate = block_bytes / seconds  # weights travel as fast as a block computes
    timing = EmulatedTiming(upload_bytes_per_second=rate, download_bytes_per_second=rate)
    server = resources.enter_context(EmulatedServer(options.workers, timing=timing, tags=False))
    machine = replace(load_hardware("rtx4090x4"), name="emulated", num_devices=options.workers)
    on_server = EmulatedStrategy(
        devices=server.devices,
        num_microbatches=options.microbatches,
        hardware=machine,
        replan=False,
    )
    blocks = [TimedBlock(width, server=server, seconds=seconds) for _ in range(num_blocks)]
    forward_seconds = seconds * num_blocks * options.microbatches / options.workers
    return Decoder(blocks, width=width, update_seconds=forward_seconds / 2), on_server


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure."""
    be_quiet()
    torch.manual_seed(0)
    report = PlanReport(write=lambda text: None)
    callbacks: list[Callback] = [report, PipelineMonitor(), PipelineTimeline(options.folder)]
    if options.live:
        nowhere = (options.folder / "terminal").open("w", encoding="utf-8")
        callbacks = [LiveView(console=Console(file=nowhere, force_terminal=True, width=110))]
    ids = torch.randint(0, _VOCABULARY, (options.microbatches * options.samples, options.tokens))
    order, clock = drawn_order(options.pairs), HookClock(callbacks)
    turns = Turns(
        {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)},
        order=[has_callbacks and not options.control for has_callbacks in order],
        callbacks=callbacks,
        clock=clock,
    )
    with ExitStack() as resources:
        module, strategy = make_training(options, resources)
        resources.callback(gc.unfreeze)
        turns.trainer = Trainer(
            accelerator="cpu",
            devices=options.workers,
            strategy=strategy,
            callbacks=callbacks,
            profiler=clock,
            logger=CSVLogger(options.folder),
            log_every_n_steps=options.log_every,
            max_epochs=1,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=options.live,
            default_root_dir=options.folder,
        )
        turns.trainer.fit(module, turns)
    seconds = {name: each / options.pairs for name, each in clock.seconds.items()}
    return summary(paired(turns.times, order), seconds=seconds, options=options)


def paired(times: Sequence[Times], order: Sequence[bool]) -> list[tuple[Times, Times]]:
    """Return the times of each pair, that with callbacks first."""
    pairs = zip(times[::2], times[1::2], strict=True)
    return [
        pair if first_has_callbacks else (pair[1], pair[0])
        for pair, first_has_callbacks in zip(pairs, order[::2], strict=True)
    ]


def compared(pairs: Sequence[tuple[float, float]], *, prefix: str) -> dict[str, float]:
    """Return how much longer turns with callbacks take."""
    ratios = [on / off for on, off in pairs]
    lower, middle, upper = statistics.quantiles(ratios, n=4)
    low, high = median_interval(ratios)
    return {
        f"{prefix}ratio_median": middle,
        f"{prefix}ratio_low": low,
        f"{prefix}ratio_high": high,
        f"{prefix}ratio_lower_quartile": lower,
        f"{prefix}ratio_upper_quartile": upper,
        f"{prefix}ratio_of_sums": sum(on for on, _ in pairs) / sum(off for _, off in pairs),
    }


def summary(
    pairs: Sequence[tuple[Times, Times]],
    *,
    seconds: dict[str, float],
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Return the figures."""
    on, off = ([pair[index][0] for pair in pairs] for index in range(2))
    return {
        **compared(list(zip(on, off, strict=True)), prefix=""),
        **compared([(one[1], other[1]) for one, other in pairs], prefix="cpu_"),
        "pairs": len(pairs),
        "batch_seconds_median": statistics.median(off),
        "callback_seconds_share": sum(seconds.values()) / statistics.mean(on),
        "callback_seconds_per_batch": seconds,
        "control": options.control,
        "emulated": options.emulated,
        "log_every_n_steps": options.log_every,
        "num_workers": options.workers,
        "num_microbatches": options.microbatches,
        "torch": torch.__version__,
        "machine": platform.machine(),
    }


def be_quiet() -> None:
    """Leave out what Lightning says about small trainings."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    torch.set_num_threads(1)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=200, help="of batches (default 200)")
    parser.add_argument("--control", action="store_true", help="callbacks in no batch")
    parser.add_argument("--live", action="store_true", help="LiveView, not the other callbacks")
    parser.add_argument("--emulated", action="store_true", help="train on emulated devices")
    parser.add_argument(
        "--log-every", type=int, default=1, help="the Trainer's log_every_n_steps (default 1)"
    )
    parser.add_argument("--workers", type=int, default=2, help="(default 2)")
    parser.add_argument("--microbatches", type=int, default=4, help="per batch (default 4)")
    parser.add_argument("--samples", type=int, default=2, help="per microbatch (default 2)")
    parser.add_argument("--tokens", type=int, default=64, help="per sequence (default 64)")
    parser.add_argument("--width", type=int, default=256, help="of the model (default 256)")
    parser.add_argument("--blocks", type=int, default=12, help="of the model (default 12)")
    parser.add_argument(
        "--block-seconds",
        type=float,
        default=0.01,
        help="of a block's forward pass on an emulated device (default 0.01)",
    )
    parser.add_argument("--output", choices=("text", "json"), default="text")
    return parser.parse_args(arguments)


def main() -> None:
    """Measure and print."""
    options = parse()
    with tempfile.TemporaryDirectory() as folder:
        options.folder = Path(folder)
        result = run(options)
    if options.output == "json":
        print(json.dumps(result))
        return
    seconds = result["batch_seconds_median"]
    lines = [f"{result['pairs']} pairs of batches of {seconds:.3f} s, with / without callbacks"]
    for name, prefix in (("time", ""), ("processor time", "cpu_")):
        median, low, high = (result[f"{prefix}ratio_{end}"] for end in ("median", "low", "high"))
        together = result[f"{prefix}ratio_of_sums"]
        lines.append(
            f"{name}: median {median:.4f} (95 %: {low:.4f} to {high:.4f}), "
            f"all together {together:.4f}"
        )
    lines.append(f"the callbacks' own hooks: {result['callback_seconds_share']:.3%} of a batch")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
