"""The benchmarks of updates, on something small: they measure what they say."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

from tests.emulation.test_benchmark import BENCHMARKS, TIMINGS


@pytest.fixture
def overlapped(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("overlapped_updates")


@pytest.fixture
def stale(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("stale_updates")


def test_every_way_on_the_emulated_server(
    overlapped: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "timings.yaml"
    path.write_text(TIMINGS, encoding="utf-8")
    arguments = ["--timings", str(path), "--steps", "1", "--time-scale", "0.5"]
    overlapped.main([*arguments, "--output", "json"])
    out, told = capsys.readouterr()
    row = json.loads(out)["models"]["tiny"]
    assert row["optimizer_ms"] == pytest.approx(0.5 * 16)  # of 4 blocks' forward on two workers
    assert list(row["step_ms"]) == list(overlapped.WAYS)
    # All that two workers compute, without recomputes.
    assert all(step >= 2 * 48 / 2 for step in row["step_ms"].values())
    assert row["overhead"]["after"] == pytest.approx(
        row["step_ms"]["after"] / row["step_ms"]["none"] - 1
    )
    assert "early: step 1 took" in told
    text = overlapped.format_text({"models": {"tiny": row}})
    assert "tiny, optimizer 8 ms; median, least, against 'none'" in text


def test_a_model_that_the_file_has_not(overlapped: ModuleType) -> None:
    with pytest.raises(SystemExit, match="--models gpt: the file has qwen3"):
        overlapped.main(["--models", "gpt"])


def test_on_this_processor(overlapped: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    overlapped.main(
        ["--processor", "--blocks", "2", "--width", "8", "--tokens", "4", "--steps", "1"]
    )
    out, _ = capsys.readouterr()
    assert [line.split()[0] for line in out.splitlines()[1:]] == ["after", "exact", "early"]


def test_curves_of_staleness(
    stale: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    drawn = tmp_path / "new" / "curves.svg"
    sizes = ["--steps", "4", "--batch", "2", "--length", "9", "--width", "8", "--blocks", "2"]
    stale.main([*sizes, "--window", "2", "--output", "json", "--svg", str(drawn)])
    out, _ = capsys.readouterr()
    losses = json.loads(out.splitlines()[-1])["losses"]
    assert [len(curve) for curve in losses.values()] == [2, 2]
    assert losses["exact"] != losses["async"]
    assert drawn.read_text(encoding="utf-8").count("<polyline") == 2
