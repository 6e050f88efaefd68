import argparse
import importlib
from pathlib import Path
from types import ModuleType

import pytest

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
    assert blocks["simulated_ratio"] > 1.1  # the tail segment of both microbatches on one device
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


# Of a block. What the bare engine does not do (logging) takes the host a time of its own, which is
# a smaller share of longer steps. A lost overlap idles 10 points longer, whatever a step takes.
MILLISECONDS = (4.0, 8.0, 16.0, 32.0)


@pytest.mark.soak
def test_the_command_is_idle_no_longer_than_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost overlap warns, which is an error here, and idles 10 points longer."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    benchmark = importlib.import_module("command_overlap")
    more: dict[str, float] = {}
    for milliseconds in MILLISECONDS:
        found = benchmark.measure(seconds=milliseconds / 1e3, num_steps=4)
        more = {u: s["trainer_idle_share"] - s["engine_idle_share"] for u, s in found.items()}
        if max(more.values()) < 0.02:
            return
    pytest.fail(f"more idle than the engine, as a share of the workers' time: {more}")
