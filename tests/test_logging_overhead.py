"""The benchmark of the callbacks' cost runs, and says how sure its figure is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import logging_overhead
from tests.kit.programs import run_program

_SIZES = ["--pairs=3", "--width=16", "--tokens=8", "--blocks=4", "--samples=1", "--output=json"]


def test_the_interval_of_a_median() -> None:
    hundred = [float(number) for number in range(100, 0, -1)]
    assert logging_overhead.median_interval(hundred) == (40.0, 61.0)
    assert logging_overhead.median_interval([1.0, 3.0, 2.0]) == (1.0, 3.0)


def test_each_pair_has_one_turn_of_each_kind_in_any_order() -> None:
    order = logging_overhead.drawn_order(50)
    assert {one ^ other for one, other in zip(order[::2], order[1::2], strict=True)} == {True}
    assert set(order[::2]) == {True, False}
    times = [(2.0, 20.0) if has_callbacks else (1.0, 10.0) for has_callbacks in order]
    assert set(logging_overhead.paired(times, order)) == {((2.0, 20.0), (1.0, 10.0))}


@pytest.mark.parametrize("where", [[], ["--emulated", "--block-seconds=0.0001"]])
def test_the_script_measures_both_ways(tmp_path: Path, where: list[str]) -> None:
    process = run_program(logging_overhead.main, tmp_path, *_SIZES, *where)
    assert process.returncode == 0, process.stderr
    result = json.loads(process.stdout.splitlines()[-1])
    assert result["pairs"] == 3
    for prefix in ("", "cpu_"):
        low, middle, high = (result[f"{prefix}ratio_{end}"] for end in ("low", "median", "high"))
        assert low <= middle <= high
    spent = result["callback_seconds_per_batch"]
    assert set(spent) == {"PlanReport", "PipelineMonitor", "PipelineTimeline"}
    assert spent["PipelineMonitor"] > 0
    assert 0 < result["callback_seconds_share"] < 1


def test_a_control_has_no_callbacks(tmp_path: Path) -> None:
    process = run_program(logging_overhead.main, tmp_path, *_SIZES, "--control")
    assert process.returncode == 0, process.stderr
    result = json.loads(process.stdout.splitlines()[-1])
    assert result["control"]
    assert result["callback_seconds_share"] == 0
