"""What the callbacks cost: training steps with all of them on, against steps without.

Two processes train the same small decoder on CPU workers, one with `PipelineMonitor`,
`PipelineTimeline` and `PlanReport`, one with none of them. They take turns, a batch each: a process
runs one when it is sent a token, and else stands still in a read from a pipe. So whatever else the
machine does hits both, and neither slows the other. Adjacent batches are a pair; which of the two
comes first changes from pair to pair. A batch's time is from its start to the start of the next,
with all that Lightning does in between, and without the other's turn.

`ratio_median` is the median over the pairs of time with callbacks by time without; `ratio_low` and
`ratio_high` are its 95 % confidence interval (order statistics, so no distribution is assumed).
`cpu_ratio_median` is the same of the processes' processor time, which depends less on what else the
machine does. A median does not see what happens in few batches: `ratio_of_sums` does.

Two processes that do the same may still differ for good, by where their memory happens to lie; so
there are several rounds, each with new processes. `--control` leaves the callbacks out of both:
what is then left of a difference is not theirs.

`callback_seconds_share` is counted another way: the seconds that the callbacks' own hooks take, all
batches taken together, as a share of the time of these batches.

    python benchmarks/logging_overhead.py [--pairs 100] [--rounds 4] [--control] [--output json]
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import math
import multiprocessing
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from roundpipe_lightning import PipelineMonitor, PipelineTimeline, PlanReport, RoundPipeStrategy

_WARMUP = 4

Times: TypeAlias = list[tuple[float, float]]
"""Seconds of the wall's clock and of the processor's, batch by batch."""

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


class Decoder(LightningModule):
    """A small causal language model."""

    def __init__(self, *, width: int, num_blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, _VOCABULARY, bias=False)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
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
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Tokens(Dataset[dict[str, Tensor]]):
    """Random tokens with labels and a mask, as language models take them."""

    def __init__(self, num_sequences: int, length: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self._ids = torch.randint(0, _VOCABULARY, (num_sequences, length), generator=generator)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = self._ids[index]
        return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


class TakeTurns(Callback):
    """Runs a batch when a token comes, and answers with the time that it took.

    Args:
        pipe: Where tokens come from.
    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._num_batches = 0
        self._began: tuple[float, float] | None = None

    def on_train_batch_start(self, *_: Any) -> None:
        """End the batch before, with all that Lightning did after it, and wait for the turn."""
        if self._began is not None:
            wall, processor = self._began
            spent = (time.perf_counter() - wall, time.process_time() - processor)
            self._num_batches += 1
            if self._num_batches == _WARMUP:
                gc.collect()
                gc.freeze()  # from here on, each process pays for its own garbage alone
            self._pipe.send(spent)
        else:
            self._pipe.send("ready")
        self._pipe.recv()
        self._began = (time.perf_counter(), time.process_time())


def count_seconds(callback: Callback) -> Callable[[], float]:
    """Let a callback's hooks note how long they take; return a function that says how long so far.

    The first batch, in which the plan is made and told, is not counted.
    """
    total, batches = [0.0], [0]

    def timed(hook: Callable[..., Any], *, ends_batch: bool) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return hook(*args, **kwargs)
            finally:
                if batches[0] >= _WARMUP:
                    total[0] += time.perf_counter() - began
                batches[0] += ends_batch

        return run

    for name in dir(callback):
        if name.startswith("on_train_batch") or name == "on_before_optimizer_step":
            hook = getattr(callback, name)
            setattr(callback, name, timed(hook, ends_batch=name == "on_train_batch_end"))
    return lambda: total[0]


def train(pipe: Connection, callbacks: list[Callback], options: argparse.Namespace) -> None:
    """Train, a batch for each token, and end at the last one."""
    torch.manual_seed(0)
    folder = tempfile.mkdtemp(dir=options.folder)
    num_batches = _WARMUP + options.pairs
    trainer = Trainer(
        accelerator="cpu",
        devices=options.workers,
        strategy=RoundPipeStrategy(num_microbatches=options.microbatches, replan=False),
        callbacks=[*callbacks, TakeTurns(pipe)],
        logger=CSVLogger(folder),
        log_every_n_steps=options.log_every,
        max_steps=num_batches + 1,  # the last one's end is not measured
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        default_root_dir=folder,
    )
    batch = options.microbatches * options.samples
    data = DataLoader(Tokens(batch * (num_batches + 1), options.tokens), batch_size=batch)
    trainer.fit(Decoder(width=options.width, num_blocks=options.blocks), data)


def child(pipe: Connection, options: argparse.Namespace, *, with_callbacks: bool) -> None:
    """Be one of the two processes; at the end, say how long the callbacks' hooks took."""
    be_quiet()
    callbacks: list[Callback] = []
    if with_callbacks:
        report = PlanReport(write=lambda text: None)
        callbacks = [report, PipelineMonitor(), PipelineTimeline(options.folder)]
    clocks = {type(callback).__name__: count_seconds(callback) for callback in callbacks}
    try:
        train(pipe, callbacks, options)
    finally:
        gc.unfreeze()
    pipe.send({name: clock() / (options.pairs + 1) for name, clock in clocks.items()})


def take_turns(pipes: Mapping[int, Connection], *, num_pairs: int) -> tuple[Times, Times]:
    """Let two processes train by turns; return the times of each one's batches after warming up.

    Both stand before their first batch, and before their last one in the end.
    """
    times: tuple[Times, Times] = ([], [])
    for number in range(_WARMUP + num_pairs):
        for runner in (0, 1) if number % 2 else (1, 0):
            pipes[runner].send("go")
            times[runner].append(pipes[runner].recv())
    return times[0][_WARMUP:], times[1][_WARMUP:]


def end(pipe: Connection) -> dict[str, float]:
    """Let a process end its training; return how long each callback's hooks took."""
    pipe.send("end")
    spent: dict[str, float] = pipe.recv()
    return spent


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % confidence interval of a median, from order statistics."""
    ordered, count = sorted(values), len(values)
    rank = max(0, math.floor((count - 1.96 * math.sqrt(count)) / 2) - 1)
    return ordered[rank], ordered[count - 1 - rank]


def run_round(options: argparse.Namespace, *, first: int) -> tuple[Times, Times, dict[str, float]]:
    """Measure with two new processes; return the times with and without, and what hooks took.

    Only one of them runs at any time, also when they begin and end.

    Args:
        options: The settings.
        first: Which of them is started first: 0 is the one with callbacks.
    """
    context = multiprocessing.get_context("spawn")
    pipes: dict[int, Connection] = {}
    processes = []
    for index in (first, 1 - first):
        pipes[index], theirs = context.Pipe()
        having = {"with_callbacks": index == 0 and not options.control}
        processes.append(context.Process(target=child, args=(theirs, options), kwargs=having))
        processes[-1].start()
        theirs.close()
        pipes[index].recv()  # it is ready
    try:
        with_them, without = take_turns(pipes, num_pairs=options.pairs)
        spent, _ = (end(pipes[index]) for index in (0, 1))
    finally:
        for pipe in pipes.values():
            pipe.close()  # one that still waits for a token ends with an error
        for process in processes:
            process.join()
    return with_them, without, spent


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure."""
    rounds = [run_round(options, first=number % 2) for number in range(options.rounds)]
    with_them = [times for one, _, _ in rounds for times in one]
    without = [times for _, other, _ in rounds for times in other]
    names = rounds[0][2]
    spent = {name: statistics.mean(hooks[name] for _, _, hooks in rounds) for name in names}
    result = summary(with_them, without, spent=spent, options=options)
    each = [(one, other) for one, other, _ in rounds]
    result["ratio_medians_of_rounds"] = [
        statistics.median(a[0] / b[0] for a, b in zip(*pair, strict=True)) for pair in each
    ]
    return result


def summary(
    with_them: Times, without: Times, *, spent: dict[str, float], options: argparse.Namespace
) -> dict[str, Any]:
    """Return the figures."""
    pairs = list(zip(with_them, without, strict=True))
    ratios, cpu_ratios = ([one[i] / other[i] for one, other in pairs] for i in range(2))
    on, off = ([wall for wall, _ in times] for times in (with_them, without))
    lower, middle, upper = statistics.quantiles(ratios, n=4)
    low, high = median_interval(ratios)
    cpu_low, cpu_high = median_interval(cpu_ratios)
    return {
        "ratio_median": middle,
        "ratio_low": low,
        "ratio_high": high,
        "ratio_lower_quartile": lower,
        "ratio_upper_quartile": upper,
        "ratio_of_sums": sum(on) / sum(off),
        "cpu_ratio_median": statistics.median(cpu_ratios),
        "cpu_ratio_low": cpu_low,
        "cpu_ratio_high": cpu_high,
        "pairs": len(pairs),
        "batch_seconds_median": statistics.median(off),
        "callback_seconds_share": sum(spent.values()) / statistics.mean(on),
        "callback_seconds_per_batch": spent,
        "control": options.control,
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


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=100, help="pairs in a round (default 100)")
    parser.add_argument("--rounds", type=int, default=4, help="with new processes (default 4)")
    parser.add_argument("--control", action="store_true", help="callbacks in neither process")
    parser.add_argument(
        "--log-every", type=int, default=1, help="the Trainer's log_every_n_steps (default 1)"
    )
    parser.add_argument("--workers", type=int, default=2, help="CPU workers (default 2)")
    parser.add_argument("--microbatches", type=int, default=4, help="per batch (default 4)")
    parser.add_argument("--samples", type=int, default=2, help="per microbatch (default 2)")
    parser.add_argument("--tokens", type=int, default=64, help="per sequence (default 64)")
    parser.add_argument("--width", type=int, default=256, help="of the model (default 256)")
    parser.add_argument("--blocks", type=int, default=12, help="of the model (default 12)")
    parser.add_argument("--output", choices=("text", "json"), default="text")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        options.folder = Path(folder)
        result = run(options)
    if options.output == "json":
        print(json.dumps(result))
        return
    print(
        f"{result['pairs']} pairs of batches of {result['batch_seconds_median']:.3f} s: with / "
        f"without callbacks median {result['ratio_median']:.4f} (95 %: {result['ratio_low']:.4f} "
        f"to {result['ratio_high']:.4f}), quartiles {result['ratio_lower_quartile']:.4f} and "
        f"{result['ratio_upper_quartile']:.4f}, all together {result['ratio_of_sums']:.4f}\n"
        f"of processor time {result['cpu_ratio_median']:.4f} (95 %: {result['cpu_ratio_low']:.4f} "
        f"to {result['cpu_ratio_high']:.4f})\n"
        f"the callbacks' own hooks: {result['callback_seconds_share']:.3%} of a batch"
    )


if __name__ == "__main__":
    main()
