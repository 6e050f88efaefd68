"""Measures the host's cost of transfers: blocks of many small tensors, and many steps.

The device is a part of host memory that is treated as a device's, so what is measured is the
engine's own work. Four figures:

- The time of a stage run (weights uploaded into a slot, gradients gathered, downloaded and summed)
  for blocks of many small tensors, as in LoRA, against blocks of one tensor of the same
  size. Both alternate in one process; the figure is the ratio of their times, pair by pair.
- What the calling thread spends on it, the same way.
- Gradients on the host: bytes per second from the moment when a stage run's gradients are gathered
  to that when they lie where they stay, against those of one `memmove`, pair by pair, in six runs.
- Growth over many steps of a small model, each of which begins while the one before is in flight:
  threads, tensors, slots and page-locked bytes.

    python benchmarks/transfer_overhead.py [--tensors 1000] [--steps 1000] [--seconds 500]
                                           [--workers 2] [--microbatches 2] [--output json]
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import math
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from roundpipe_lightning.engine.engine import Engine
from roundpipe_lightning.engine.steps import Step
from roundpipe_lightning.engine.store.host_store import HostStore
from roundpipe_lightning.engine.transfer.gradient_reduce import GradientReducer
from roundpipe_lightning.engine.transfer.weight_prefetch import StageRun
from roundpipe_lightning.engine.transfer.worker_transfers import Transfers, WaitedFor, WorkerRuns
from roundpipe_lightning.planning.schedule.stages import Stage, StageKind
from tests.kit.engine import MemoryDevice, auto_plan, engine_of, stack_of

BLOCKS = 4
STAGE_RUNS = 8


class Parameters(nn.Module):
    """A block of equal parameters.

    Args:
        num: How many.
        num_elements: Elements of all together.
    """

    def __init__(self, num: int, num_elements: int) -> None:
        super().__init__()
        size = num_elements // num
        self.all = nn.ParameterList(torch.zeros(size) for _ in range(num))


class StageRunLoop:
    """Runs a stage again and again.

    Args:
        num_tensors: Per block.
        num_elements: Per block.
    """

    def __init__(self, num_tensors: int, num_elements: int) -> None:
        module = nn.ModuleList(Parameters(num_tensors, num_elements) for _ in range(BLOCKS))
        self._blocks = tuple(module)
        store = HostStore(module, self._blocks)
        self._everybody = Transfers(
            store, devices=[MemoryDevice()], names=dict(zip(self._blocks, "abcd", strict=True))
        )
        [transfers] = self._everybody.transfers
        assert transfers is not None
        self._transfers = transfers
        self._stage = Stage(kind=StageKind.BACKWARD, index=1, blocks=range(BLOCKS))
        stage_run = StageRun(stage=self._stage, blocks=self._blocks, wanted=self._blocks)
        self._step = WorkerRuns(runs=(stage_run,) * STAGE_RUNS, num_slots=2, resident=())
        self._gradients = [torch.ones_like(p) for p in module[0].parameters()]

    def run(self) -> tuple[float, float]:
        """Run the stage; return the seconds of a run, and those of the calling thread alone."""
        reducer = GradientReducer(num_microbatches=STAGE_RUNS, num_stages=2)
        start, own = time.perf_counter(), time.thread_time()
        self._transfers.begin_step(self._step)
        self._transfers.weights.begin_ahead()
        for number in range(STAGE_RUNS):
            stage_run = self._transfers.weights.acquire(self._stage, self._blocks)
            placed = []
            for block in self._blocks:
                region = stage_run.regions[block]
                self._transfers.await_event(stage_run.events.pop(block), WaitedFor.WEIGHTS)
                leaves = list(region.leaves().values())
                for leaf, gradient in zip(leaves, self._gradients, strict=True):
                    leaf.grad = gradient
                placed.append((region.layout, leaves))
            self._transfers.gradients.send_run(
                placed, landed=partial(reducer.add_stage, 1, [number])
            )
            self._transfers.weights.release()
        own = time.thread_time() - own
        self._transfers.drain(timeout_seconds=60.0)
        self._transfers.end_step()
        return (time.perf_counter() - start) / STAGE_RUNS, own / STAGE_RUNS

    def run_gradients(self) -> float:
        """Send gradients as `run` does; return the seconds until they lie where they stay."""
        reducer = GradientReducer(num_microbatches=1, num_stages=STAGE_RUNS + 1)
        seconds = 0.0
        self._transfers.begin_step(self._step)
        for number in range(STAGE_RUNS):
            stage_run = self._transfers.weights.acquire(self._stage, self._blocks)
            placed = []
            for block in self._blocks:
                region = stage_run.regions[block]
                leaves = list(region.leaves().values())
                for leaf, gradient in zip(leaves, self._gradients, strict=True):
                    leaf.grad = gradient
                placed.append((region.layout, leaves))
            self._transfers.drain(timeout_seconds=60.0)
            self._transfers.gradients.send_run(
                placed, landed=partial(reducer.add_stage, number + 1, [0])
            )
            start = time.perf_counter()
            self._transfers.drain(timeout_seconds=60.0)
            seconds += time.perf_counter() - start
            self._transfers.weights.release()
        self._transfers.end_step()
        return seconds / STAGE_RUNS

    def close(self) -> None:
        """Give everything back."""
        self._everybody.close()


def many_small_tensors(*, num_tensors: int, num_elements: int, pairs: int) -> dict[str, Any]:
    """Measure stage runs of many tensors against stage runs of one."""
    many, one = StageRunLoop(num_tensors, num_elements), StageRunLoop(1, num_elements)
    ratios, own = [], []
    try:
        for pair in range(pairs + 1):
            loops = (many, one) if pair % 2 else (one, many)
            seconds = {loop: loop.run() for loop in loops}
            if pair:  # the first pair makes what is made once
                ratios.append(seconds[many][0] / seconds[one][0])
                own.append((seconds[many][1], seconds[one][1]))
    finally:
        many.close()
        one.close()
    return {
        "tensors_per_block": num_tensors,
        "block_bytes": 4 * num_elements,
        "stage_run_ratio_median": statistics.median(ratios),
        "own_microseconds_per_tensor": statistics.median(
            (a - b) / (BLOCKS * num_tensors) * 1e6 for a, b in own
        ),
    }


def gradient_path(*, num_elements: int, pairs: int, runs: int = 6) -> dict[str, Any]:
    """Measure the gradients' way on the host against a copy of as many bytes.

    Each of the runs gives the median of some pairs.
    """
    loop, num_bytes = StageRunLoop(1, num_elements), 4 * BLOCKS * num_elements
    source, target = (torch.ones(num_bytes, dtype=torch.uint8) for _ in range(2))
    shares, rates = [], []
    try:
        loop.run_gradients()  # makes what is made once
        for _ in range(runs):
            ratios = []
            for _ in range(pairs):
                start = time.perf_counter()
                for _ in range(STAGE_RUNS):
                    ctypes.memmove(target.data_ptr(), source.data_ptr(), num_bytes)
                copied = (time.perf_counter() - start) / STAGE_RUNS
                seconds = loop.run_gradients()
                ratios.append(copied / seconds)
                rates.append(num_bytes / seconds)
            shares.append(statistics.median(ratios))
    finally:
        loop.close()
    return {
        "gradient_bytes_per_second": statistics.median(rates),
        "gradient_share_of_memcpy": statistics.median(shares),
        "gradient_share_of_memcpy_lowest": min(shares),
    }


@contextmanager
def small_engine(num_workers: int, num_microbatches: int) -> Iterator[tuple[Engine, Any]]:
    """Yield an engine, and a function that begins a step of it."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(num_workers + 1)))
    batches = [torch.randn(2, 8) for _ in range(num_microbatches)]
    stack = stack_of(tuple(module))
    plan = auto_plan(stack, num_workers=num_workers, num_microbatches=num_microbatches)
    devices = [MemoryDevice(index) for index in range(num_workers)]
    with engine_of(module, stack, plan, devices=devices) as engine:

        def step() -> Step:
            return engine.begin_step(
                batches,
                lambda view, batch, index: view(batch).square().mean(),
                loss_scales=[1] * num_microbatches,
            )

        yield engine, step


def growth(
    num_steps: int,
    *,
    seconds: float = math.inf,
    num_workers: int = 2,
    num_microbatches: int = 2,
) -> dict[str, Any]:
    """Compare what there is after a tenth of the steps with what there is after all.

    Args:
        num_steps: How many.
        seconds: When to stop, whether all were run or not.
        num_workers: Of the small model.
        num_microbatches: Of each of its steps.
    """
    seen, begin = [], time.perf_counter()
    number = 0
    with small_engine(num_workers, num_microbatches) as (engine, step):
        while number < num_steps:
            pending = step()
            pending.outputs()
            number += 1
            is_over = number == num_steps or time.perf_counter() - begin > seconds
            if is_over or number == max(1, num_steps // 10):
                pending.result()
                del pending
                seen.append(_counted(engine))
                line = f"{number} of {num_steps} steps, {time.perf_counter() - begin:.0f} s"
                print(line, file=sys.stderr, flush=True)
            if is_over:
                break
    names = ("tensors", "threads", "page_locked_bytes", "device_bytes")
    return {
        "steps": number,
        **dict(zip(names, seen[-1], strict=True)),
        **{f"{n}_grown": b - a for n, a, b in zip(names, seen[0], seen[-1], strict=True)},
    }


def _counted(engine: Engine) -> tuple[int, int, int, int]:
    gc.collect()
    tensors = sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())
    device = sum(w.transfers.num_bytes for w in engine.workers if w.transfers)
    return tensors, threading.active_count(), engine.staging_bytes, device


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tensors", type=int, default=1000, help="per block (default 1000)")
    parser.add_argument("--mebibytes", type=int, default=16, help="of a block (default 16)")
    parser.add_argument("--pairs", type=int, default=9, help="counted pairs (default 9)")
    parser.add_argument("--steps", type=int, default=1000, help="for the growth (default 1000)")
    parser.add_argument("--workers", type=int, default=2, help="for the growth (default 2)")
    parser.add_argument("--microbatches", type=int, default=2, help="for the growth (default 2)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="for the growth, at most")
    parser.add_argument("--output", choices=("text", "json"), default="text")
    options = parser.parse_args()
    result = many_small_tensors(
        num_tensors=options.tensors,
        num_elements=options.mebibytes * 2**18,
        pairs=options.pairs,
    )
    result |= gradient_path(num_elements=options.mebibytes * 2**18, pairs=options.pairs)
    result |= growth(
        options.steps,
        seconds=options.seconds,
        num_workers=options.workers,
        num_microbatches=options.microbatches,
    )
    result |= {"torch": torch.__version__, "intra_op_threads": torch.get_num_threads()}
    if options.output == "json":
        print(json.dumps(result))
        return
    print(
        f"blocks of {options.tensors} tensors against one of the same {options.mebibytes} MiB: "
        f"{result['stage_run_ratio_median']:.2f} times the time of a stage run, "
        f"{result['own_microseconds_per_tensor']:.2f} microseconds of the thread per tensor\n"
        f"gradients to the host: {result['gradient_bytes_per_second'] / 1e9:.1f} GB/s, "
        f"{result['gradient_share_of_memcpy']:.2f} of one memmove (median of 6 runs; "
        f"lowest {result['gradient_share_of_memcpy_lowest']:.2f})\n"
        f"{result['steps']} steps: {result['tensors_grown']} more tensors, "
        f"{result['threads_grown']} more threads, {result['page_locked_bytes_grown']} more bytes "
        f"page-locked, {result['device_bytes_grown']} more bytes on the device than after a tenth"
    )


if __name__ == "__main__":
    main()
