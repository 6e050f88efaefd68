r"""Tokens per second of this project beside other ways to train the same model on one device.

Every system (`throughput_systems.py`) trains in a process of its own; they take turns, some steps
each, in an order that changes from turn to turn. Same architecture and random weights, same
batches, same loss, same precision, AdamW.

    python benchmarks/train_throughput.py --system ours checkpointed --model qwen3_1_7b \
        --seq-len 2048 --microbatches 32 [--precision bf16-mixed] [--memory-cap-gib 24]
        [--capped ours] [--train lora] [--num-blocks 8] [--turns 5] [--output json]
    python benchmarks/train_throughput.py --longest --system ours --model qwen3_1_7b \
        --memory-cap-gib 24

`--longest` looks for the longest sequence that trains, one sequence in one microbatch, in units of
1,024 tokens. A system that is not installed, or has not enough memory, is reported so. What has
been measured so far goes to stderr, a line of JSON at a time.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import torch
from throughput_systems import SYSTEMS, Task, serve
from torch import multiprocessing

UNIT = 1024  # tokens, of --longest


class Process:
    """A system in a process of its own.

    Args:
        name: Which system.
        task: What it trains.
    """

    def __init__(self, name: str, task: Task) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection: Connection
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, name, task), daemon=True)
        self._process.start()
        theirs.close()
        self.error: dict[str, Any] | None = None

    def __enter__(self) -> Process:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process.is_alive() and self.error is None:
            self._connection.send(None)
            self._process.join(30)
        self._process.kill()
        self._process.join()

    def run(self, num_steps: int) -> dict[str, Any]:
        """Run steps; an answer with `error` is this system's last."""
        if self.error is not None:
            return self.error
        try:
            self._connection.send(num_steps)
            answer: dict[str, Any] = self._connection.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            answer = {"error": "the process ended without an answer (killed for memory, perhaps)"}
        if "error" in answer:
            self.error = answer
        return answer


def compare(
    names: Sequence[str], task: Task, *, turns: int, steps: int, capped: Sequence[str] = ()
) -> dict[str, Any]:
    """Let systems take turns and return what each reached.

    Args:
        names: The systems; the first one is compared with each of the others.
        task: What they train.
        capped: Those for which the memory cap holds; empty: all.
        turns: How often each has its turn, after one that is not counted.
        steps: Steps per turn.
    """
    free = replace(task, memory_cap_gib=None)
    processes = {name: Process(name, task if name in (capped or names) else free) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    last: dict[str, dict[str, Any]] = {}
    try:
        for turn in range(turns + 1):
            for name in names if turn % 2 else reversed(names):
                last[name] = processes[name].run(steps if turn else 1)
                _tell({"turn": turn, "system": name, **last[name]})
                if turn and "seconds" in last[name]:
                    seconds[name].append(statistics.median(last[name].pop("seconds")))
    finally:
        for process in processes.values():
            process.__exit__(None, None, None)
    results = {name: _result(last[name], seconds[name], task) for name in names}
    reference, *others = names

    def ratio(name: str) -> float:
        pairs = zip(seconds[reference], seconds[name], strict=True)
        return statistics.median(theirs / ours for ours, theirs in pairs)

    return {
        "task": vars(task),
        "tokens_per_step": task.tokens,
        "machine": _machine(task),
        "systems": results,
        "ratio_median": {
            f"{reference}/{name}": ratio(name)
            for name in others
            if seconds[name] and len(seconds[name]) == len(seconds[reference])
        },
    }


def longest(name: str, task: Task, *, least: int, most: int) -> dict[str, Any]:
    """Return the longest sequence, in units of 1,024 tokens, of which two steps train.

    Args:
        name: The system.
        task: What it trains, but for the length.
        least: The first length to try, in units; what is shorter is taken to train.
        most: The last one.
    """

    def trains(units: int) -> dict[str, Any]:
        one = replace(task, seq_len=units * UNIT, sequences=1, num_microbatches=1)
        with Process(name, one) as process:
            answer = process.run(2)
        _tell({"units": units, "system": name, **answer})
        return answer

    low, high, why = least - 1, least, {}
    while high <= most:
        answer = trains(high)
        if "error" in answer:
            why = answer
            break
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > max(1, low // 16):
        middle = (low + high) // 2
        answer = trains(middle)
        if "error" in answer:
            high, why = middle, answer
        else:
            low = middle
    return {"system": name, "longest_units": low, "stopped_at_units": high, **why}


def _result(answer: dict[str, Any], seconds: list[float], task: Task) -> dict[str, Any]:
    if not seconds:
        return answer
    step = statistics.median(seconds)
    answer.pop("seconds", None)
    return {"step_seconds": step, "tokens_per_second": task.tokens / step, **answer}


def _tell(answer: dict[str, Any]) -> None:
    """Say what is known so far: whoever ends this process early has that."""
    print(json.dumps(answer), file=sys.stderr, flush=True)


def _machine(task: Task) -> str:
    device = torch.device(task.device)
    name = platform.processor() or platform.machine()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    return f"{name}, torch {torch.__version__}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--system", nargs="+", choices=sorted(SYSTEMS), default=["ours", "plain"])
    parser.add_argument("--model", default="qwen3_1_7b", help="a file in conf/model")
    parser.add_argument("--num-blocks", type=int, help="keep so many of the model's blocks")
    parser.add_argument("--width", type=int, default=1, help="divide sizes: to try the script")
    parser.add_argument("--train", choices=["full", "lora"], default="full")
    parser.add_argument("--lora-rank", type=int, default=32)
    parser.add_argument("--precision", default="bf16-mixed", help="Lightning's word")
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--sequences", type=int, default=1, help="of a microbatch")
    parser.add_argument("--microbatches", type=int, default=8, help="of a step")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=1, help="of ours, on the one device")
    parser.add_argument("--recompute", default="auto", help="of ours")
    parser.add_argument("--update", default="exact", help="of ours and of the paper's library")
    parser.add_argument("--upload-dtype", choices=["bf16", "fp16"], help="of ours")
    parser.add_argument("--gradient-dtype", choices=["bf16", "fp32"], help="of ours")
    parser.add_argument("--memory-cap-gib", type=float)
    parser.add_argument("--capped", nargs="+", default=[], help="systems it is for; default all")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="per turn")
    parser.add_argument("--longest", action="store_true")
    parser.add_argument("--least-units", type=int, default=1, help="first length to try")
    parser.add_argument("--most-units", type=int, default=512, help="longest sequence to try")
    parser.add_argument("--output", choices=["text", "json"], default="text")
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    given = _arguments()
    task = Task(
        model=given.model,
        num_blocks=given.num_blocks,
        width=given.width,
        train=given.train,
        lora_rank=given.lora_rank,
        precision=given.precision,
        sequences=given.sequences,
        seq_len=given.seq_len,
        num_microbatches=given.microbatches,
        device=given.device,
        workers=given.workers,
        recompute=given.recompute,
        update=given.update,
        upload_dtype=given.upload_dtype,
        gradient_dtype=given.gradient_dtype,
        memory_cap_gib=given.memory_cap_gib,
    )
    if given.longest:
        answers = [
            longest(name, task, least=given.least_units, most=given.most_units)
            for name in given.system
        ]
        print(json.dumps(answers, indent=2))
        return
    answer = compare(given.system, task, turns=given.turns, steps=given.steps, capped=given.capped)
    if given.output == "json":
        print(json.dumps(answer, indent=2))
        return
    for name, result in answer["systems"].items():
        if "error" in result:
            print(f"{name:14} {result['error']}")
            continue
        peak = f", {result['peak_gib']:.2f} GiB" if "peak_gib" in result else ""
        print(f"{name:14} {result['tokens_per_second']:12,.0f} tokens/s{peak}")
    for names, ratio in answer["ratio_median"].items():
        print(f"{names:32} {ratio:.3f}")


if __name__ == "__main__":
    main()
