"""The benchmark of the callbacks' cost runs, and says how sure its figure is."""

from __future__ import annotations

import json
import multiprocessing.dummy
from pathlib import Path

import pytest

from benchmarks import logging_overhead
from tests.programs import run_program


def test_the_interval_of_a_median() -> None:
    hundred = [float(number) for number in range(100, 0, -1)]
    assert logging_overhead.median_interval(hundred) == (40.0, 61.0)
    assert logging_overhead.median_interval([1.0, 3.0, 2.0]) == (1.0, 3.0)


def test_the_script_measures_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Threads instead of processes, which would import everything again.
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: multiprocessing.dummy)
    sizes = ["--pairs=6", "--rounds=1", "--width=16", "--tokens=8", "--blocks=2", "--samples=1"]
    process = run_program(logging_overhead.main, tmp_path, *sizes, "--output=json")
    assert process.returncode == 0, process.stderr
    result = json.loads(process.stdout.splitlines()[-1])
    assert result["pairs"] == 6
    assert result["ratio_medians_of_rounds"] == [result["ratio_median"]]
    assert result["ratio_low"] <= result["ratio_median"] <= result["ratio_high"]
    assert result["cpu_ratio_low"] <= result["cpu_ratio_median"] <= result["cpu_ratio_high"]
    spent = result["callback_seconds_per_batch"]
    assert set(spent) == {"PlanReport", "PipelineMonitor", "PipelineTimeline"}
    assert spent["PipelineMonitor"] > 0
    assert 0 < result["callback_seconds_share"] < 1
