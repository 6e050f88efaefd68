"""Predictions against what others measured, from configurations and the machine's file alone."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def result() -> Any:
    script = REPOSITORY / "benchmarks" / "published_throughput.py"
    process = subprocess.run(
        [sys.executable, str(script), "--output", "json"],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


def test_throughput_is_predicted(result: Any) -> None:
    assert result["throughput_error"]["median"] <= 0.10
    assert result["throughput_error"]["worst"] <= 0.25
    assert len(result["throughput"]) == 10


def test_longest_sequences_are_predicted(result: Any) -> None:
    errors = {row["model"]: row["error"] for row in result["sequences"]}
    assert len(errors) == 5
    assert max(map(abs, errors.values())) <= 0.25, errors


def test_slower_uploads_never_help(result: Any) -> None:
    rates = {row["weights"]: row["predicted"] for row in result["frozen"]}
    mapped = [rates[f"memory-mapped, {bits} bits"] for bits in (16, 8, 4)]
    assert mapped == sorted(mapped)
    for bits in (16, 8, 4):
        assert rates[f"memory-mapped, {bits} bits"] <= rates[f"page-locked, {bits} bits"]


def test_the_document_prints_these_numbers(result: Any) -> None:
    document = (REPOSITORY / "docs" / "planning.md").read_text(encoding="utf-8")
    for row in (*result["throughput"], *result["sequences"]):
        first = " | ".join(row[key] for key in ("model", "system") if key in row)
        cells = re.search(
            rf"^\| {re.escape(first)} \| [\d,]+ \| [\d,]+ \| (\S+)% \|$", document, re.MULTILINE
        )
        assert cells is not None, row
        assert float(cells[1]) / 100 == pytest.approx(row["error"], abs=0.011), row
