import argparse
import importlib
import threading
from collections import Counter
from functools import partial
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from roundpipe_lightning.engine.update.partial_step import CapturedStep
from roundpipe_lightning.engine.update.updater import UpdateUnit
from tests.kit.moments import call_in_backward

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TIMINGS = """
num_devices: 2
num_microbatches: 2
models:
  tiny:
    num_layers: 3
    layer_forward_ms: 4
    layer_backward_ms: 8
    lm_head_forward_ms: 4
    lm_head_backward_ms: 8
    hop_ms: 0.1
    layer_bytes: 40000000
    lm_head_bytes: 40000000
"""


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("emulated_server")


def test_measured_beside_simulated(benchmark: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "timings.yaml"
    path.write_text(TIMINGS, encoding="utf-8")
    timings = benchmark.load_timings(path)
    options = argparse.Namespace(
        steps=1,
        time_scale=1.0,
        tags=False,
        optimizer_seconds_share=0.5,
        speeds=(1.0, 0.5),
        blocks=True,
    )
    row = benchmark.run_model(timings.models[0], timings, options)
    work_ms = 2 * (3 * 12 + 12)  # without recomputes, of both microbatches
    assert row["measured_makespan_ms"] >= work_ms / 2
    assert 0 <= row["measured_idle_share"] <= row["measured_worst_share"] < 1
    assert 0 <= row["simulated_worst_share"] < 1
    idle, makespan = row["measured_idle_share"], row["measured_makespan_ms"]
    assert makespan * 2 * (1 - idle) == pytest.approx(
        row["simulated_makespan_ms"] * 2 * (1 - row["simulated_idle_share"]), rel=1e-3
    )
    assert row["optimizer"]["exact_step_ms"] > 0
    blocks = row["blocks"]
    assert blocks["measured_makespan_ms"] >= 0.97 * blocks["simulated_makespan_ms"]
    assert blocks["simulated_ratio"] > 1.05  # the tail segment of both microbatches on one device
    text = benchmark.format_text({"models": {"tiny": row}})
    assert f"measured {blocks['measured_ratio']:.3f}" in text
    assert "updates of 0.5 steps: none" in text


@pytest.mark.parametrize(("number", "kept"), [(0, None), (1, {5}), (2, {3, 5}), (9, {2, 3, 5})])
def test_threads_keep_to_some_of_the_cores_that_are_allowed(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, number: int, kept: set[int] | None
) -> None:
    calls: list[tuple[int, set[int]]] = []
    monkeypatch.setattr(benchmark.os, "sched_getaffinity", lambda pid: {5, 2, 3}, raising=False)
    monkeypatch.setattr(
        benchmark.os,
        "sched_setaffinity",
        lambda pid, cores: calls.append((pid, set(cores))),
        raising=False,
    )
    assert benchmark.keep_to_cores(number) == (3 if kept is None else len(kept))
    assert calls == ([] if kept is None else [(0, kept)])


def test_all_cores_are_kept_where_the_system_does_not_say(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(benchmark.os, "sched_setaffinity", raising=False)
    assert benchmark.keep_to_cores(1) == 0


@pytest.mark.parametrize("update", ["exact", "async"])
def test_the_command_goes_on_while_updates_and_backward_passes_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, update: str
) -> None:
    """With the callbacks, loggers and clipping of the shipped configuration; in any order of time.

    An update waits for the next batch's step, with `async` already the backward pass does.
    """
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    benchmark = importlib.import_module("command_overlap")
    measurement = benchmark.Measurement(seconds=1e-4, num_steps=2)
    begun = [threading.Event() for _ in range(measurement.num_steps)]
    counts = Counter[str]()
    make, step = benchmark.TimedBlock.__init__, benchmark.TimedModule.training_step
    forward, numbers = benchmark.TimedBlock.forward, count()

    def wait(place: str, *, calls: int) -> None:
        number = counts[place] // calls
        counts[place] += 1
        if 0 < number < len(begun) - 1:  # the first batch of an engine is waited for
            assert begun[number + 1].wait(60), f"{place} of batch {number} ends before the next"

    def noted_step(module: Any, batch: Any, batch_idx: int) -> Any:
        begun[batch_idx].set()
        return step(module, batch, batch_idx)

    def numbered(block: Any, *given: Any) -> None:
        make(block, *given)
        block.number = next(numbers)

    def held_forward(block: Any, x: Any) -> Any:
        out = forward(block, x)
        if update == "exact" or block.number:
            return out
        return call_in_backward(out, partial(wait, "backward", calls=benchmark.NUM_MICROBATCHES))

    def held_update(unit: UpdateUnit, captured: CapturedStep) -> None:
        if unit.name == f"layers.{benchmark.NUM_BLOCKS - 1}":
            wait("update", calls=1)
        captured.run(unit.parameters)

    monkeypatch.setattr(benchmark.TimedModule, "training_step", noted_step)
    monkeypatch.setattr(benchmark.TimedBlock, "__init__", numbered)
    monkeypatch.setattr(benchmark.TimedBlock, "forward", held_forward)
    monkeypatch.setattr(measurement, "run_unit", held_update)
    measurement.trainer(update, tmp_path)
    assert counts["update"] == len(begun)
