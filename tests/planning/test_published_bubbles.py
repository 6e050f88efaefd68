"""The benchmark of published schedules: replays within tolerance, plans that beat the published."""

from __future__ import annotations

import importlib
import json
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

TOLERANCES = {"gpt_oss_20b": 0.015, "qwen3_32b": 0.015}

UNKNOWN_MODEL = """\
num_devices: 4
num_microbatches: 8
models:
  other:
    num_layers: 12
    layer_forward_ms: 10.0
    layer_backward_ms: 22.0
    lm_head_forward_ms: 15.0
    lm_head_backward_ms: 30.0
    hop_ms: 1.0
    bound_partition: {one_f_one_b_and_gpipe: [3, 3, 3, 3], interleaved_and_looped_bfs: "12 of 1"}
"""


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("published_bubbles")


def test_published_rows_are_replayed(benchmark: ModuleType) -> None:
    timings = benchmark.load_timings(benchmark.DEFAULT_TIMINGS)
    checked = 0
    for model in timings.models:
        for name, seconds in benchmark.replay(model, timings).items():
            tolerance = TOLERANCES.get(model.name, 0.001)
            assert seconds * 1e3 == pytest.approx(model.published_ms[name], rel=tolerance), name
            checked += 1
    assert checked == 25


def test_words_for_blocks_per_stage(benchmark: ModuleType) -> None:
    parse = importlib.import_module("published_timings").parse_counts
    assert parse([3, 1]) == (3, 1)
    assert parse("2 stages of 2, then 3 of 3") == (2, 2, 3, 3, 3)
    assert parse("0, then 4 of 1") == (0, 1, 1, 1, 1)
    assert parse("one of 0, then 2 of 1, then one of 0 (the head alone)") == (0, 1, 1, 0)


def check_actions(row: dict[str, Any], *, num_microbatches: int) -> None:
    """Check a plan from its rows alone: every action once, in time, on a worker at a time."""
    forward, backward = row["forward_partition"], row["backward_partition"]
    assert sum(forward) + backward[0] == sum(backward) == 12
    ends: dict[tuple[str, int, int], float] = {}
    workers = defaultdict(list)
    for action in row["actions"]:
        key = (action["kind"], action["stage"], action["microbatch"])
        assert key not in ends
        ends[key] = action["end_ms"]
        workers[action["worker"]].append((action["start_ms"], action["end_ms"]))
    assert len(ends) == (len(forward) + len(backward)) * num_microbatches
    for times in workers.values():
        times.sort()
        assert all(a[1] <= b[0] + 1e-6 for a, b in pairwise(times))
    for (kind, stage, microbatch), end in ends.items():
        if kind == "backward":
            before = ("backward", stage - 1) if stage > 1 else ("fused", 0)
            assert end >= ends[before[0], before[1], microbatch] + 22.0 * backward[stage] - 1e-6
    assert max(ends.values()) == pytest.approx(row["makespan_ms"])


def test_an_unknown_model_is_planned_by_its_hop_alone(
    benchmark: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "timings.yaml"
    path.write_text(UNKNOWN_MODEL)
    arguments = ["published_bubbles.py", "--timings", str(path), "--output", "json"]
    monkeypatch.setattr(sys, "argv", arguments)
    benchmark.main()
    result = json.loads(capsys.readouterr().out)
    assert set(result["replayed"]["other"]) == {
        "gpipe",
        "one_f_one_b",
        "interleaved_1f1b",
        "looped_bfs",
    }
    assert result["replayed"]["other"]["gpipe"]["published_ms"] is None
    planned = result["planned"]["other"]
    for name, row in planned.items():
        check_actions(row, num_microbatches=64 if name == "stream" else 8)
    assert planned["team_1"]["team_size"] == 1
    best = result["replayed"]["other"]["looped_bfs"]["makespan_ms"]
    assert planned["team_1"]["makespan_ms"] < best
    assert planned["teams"]["idle_share"] < 0.03
    assert planned["stream"]["idle_share"] < 0.02

    monkeypatch.setattr(sys, "argv", arguments[:-2])
    benchmark.main()
    text = capsys.readouterr().out
    assert "other looped_bfs" in text
    assert "worker 3: " in text
