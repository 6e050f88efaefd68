import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.published_schedules import (
    bound_partition,
    gpipe_schedule,
    interleaved_schedule,
    looped_bfs_schedule,
    one_f_one_b_schedule,
)
from benchmarks.throughput_systems import architecture_of
from roundpipe_lightning.errors import PlanError
from roundpipe_lightning.planning.schedule.schedule import Schedule, validate_schedule

GOLDEN = {
    "gpipe": """\
worker 0: F0.0 F0.1 F0.2 B2.0 B2.1 B2.2
worker 1: F1.0 F1.1 F1.2 X0.0 B1.0 X0.1 B1.1 X0.2 B1.2
""",
    "one_f_one_b": """\
worker 0: F0.0 F0.1 B2.0 F0.2 B2.1 B2.2
worker 1: F1.0 X0.0 B1.0 F1.1 X0.1 B1.1 F1.2 X0.2 B1.2
""",
    "interleaved": """\
worker 0: F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B4.0 F2.3 B4.1 B2.2 B2.3 B4.2 B4.3
worker 1: F1.0 F1.1 F3.0 X0.0 B1.0 F3.1 X0.1 B1.1 F1.2 B3.0 F1.3 B3.1 F3.2 X0.2 B1.2 F3.3 X0.3 \
B1.3 B3.2 B3.3
""",
    "looped_bfs": """\
worker 0: F0.0 F0.1 F2.0 F2.1 B2.0 B2.1 B4.0 B4.1
worker 1: F1.0 F1.1 F3.0 F3.1 X0.0 B1.0 X0.1 B1.1 B3.0 B3.1
""",
}

MADE = {
    "gpipe": (gpipe_schedule(num_workers=2, num_microbatches=3), 2, 3),
    "one_f_one_b": (one_f_one_b_schedule(num_workers=2, num_microbatches=3), 2, 3),
    "interleaved": (interleaved_schedule(num_stages=4, num_workers=2, num_microbatches=4), 4, 4),
    "looped_bfs": (looped_bfs_schedule(num_stages=4, num_workers=2, num_microbatches=2), 4, 2),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_published_schedule(name: str) -> None:
    schedule, num_stages, num_microbatches = MADE[name]
    assert schedule.to_text() == GOLDEN[name]
    assert Schedule.from_text(GOLDEN[name]) == schedule
    partition = bound_partition([1] * num_stages)
    validate_schedule(schedule, partition=partition, num_microbatches=num_microbatches)


def test_interleaving_needs_multiples_of_the_workers() -> None:
    with pytest.raises(PlanError, match="num_stages=3 must be a multiple of num_workers=2"):
        interleaved_schedule(num_stages=3, num_workers=2, num_microbatches=4)


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


ROOT = Path(__file__).parents[2]

PARAMETERS = {
    "gpt_oss_20b": 20_914_757_184,
    "llama3_1_8b": 8_030_261_248,
    "qwen3_0_6b": 596_049_920,
    "qwen3_1_7b": 1_720_574_976,
    "qwen3_4b": 4_022_468_096,
    "qwen3_32b": 32_762_123_264,
    "qwen3_235b_a22b": 235_093_634_560,
}


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("decoder_sizes")


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters(sizes: ModuleType, name: str) -> None:
    config = architecture_of(name)
    assert sizes.Architecture.from_config(config).num_parameters == PARAMETERS[name]
