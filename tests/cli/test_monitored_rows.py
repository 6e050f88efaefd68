"""What a monitor has measured of a run, in the table that ends it."""

from __future__ import annotations

import pytest

from roundpipe_lightning import PipelineMonitor, PlanReport
from roundpipe_lightning.cli.pipeline import monitored_rows

FIGURES = {
    "tflop_per_second": 12.345,
    "share_of_peak": 0.1234,
    "idle_share": 0.4,
    "idle_fill_share": 0.05,
    "idle_drain_share": 0.004,
    "idle_upload_share": 0.0,
    "idle_boundary_share": 0.1,
    "idle_optimizer_share": 0.0,
    "idle_data_share": 0.236,
    "idle_other_share": 0.01,
}


def rows(monkeypatch: pytest.MonkeyPatch, figures: dict[str, float]) -> list[tuple[str, str]]:
    monkeypatch.setattr(PipelineMonitor, "figures", property(lambda _: figures))
    return monitored_rows([PlanReport(), PipelineMonitor()])


def test_speed_and_idle_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rows(monkeypatch, FIGURES) == [
        ("Arithmetic", "12.3 TFLOP/s, 12.3% of the devices' peak"),
        (
            "Idle altogether",
            "40% of the time: data 24%, boundary 10%, fill 5%, other 1%",
        ),
    ]


def test_what_is_not_known_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rows(monkeypatch, {"tflop_per_second": 0.5}) == [("Arithmetic", "0.5 TFLOP/s")]
    assert rows(monkeypatch, {}) == []
    assert monitored_rows([PlanReport()]) == []
