"""The live view shows what the workers do, and nothing where there is no terminal."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from torch import Tensor

from roundpipe_lightning import LiveView, PipelineMonitor, RoundPipeStrategy
from roundpipe_lightning.callbacks.live import curve
from tests.kit.training import QUIET, Block, Regressor, make_trainer, regression_data

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]


class _Looking(Block):
    """Draws the view while a worker runs it."""

    view: LiveView
    seen: list[str]

    def forward(self, x: Tensor) -> Tensor:
        if self.view.is_shown:
            self.seen.append(self.view.text())
        return super().forward(x)


def _fit(folder: Path, *, is_terminal: bool) -> tuple[str, list[str]]:
    file = StringIO()
    console = Console(file=file, force_terminal=is_terminal, width=110)
    view, seen = LiveView(console=console), list[str]()
    module: Any = Regressor()
    for layer in module.layers:
        layer.__class__ = _Looking
    _Looking.view, _Looking.seen = view, seen
    trainer = make_trainer(
        folder,
        strategy=RoundPipeStrategy(microbatching="step"),
        devices=2,
        max_steps=3,
        callbacks=[view, PipelineMonitor()],
        enable_progress_bar=True,
    )
    trainer.fit(module, regression_data(24))
    assert not view.is_shown
    return file.getvalue(), seen


def test_lanes_speed_and_loss(tmp_path: Path) -> None:
    shown, seen = _fit(tmp_path, is_terminal=True)
    assert any("runs F0.0" in text for text in seen)
    running = [text for text in seen if " runs " in text]  # others are of the run without values
    assert all("worker 0" in text and "worker 1" in text for text in running)
    last = shown.rpartition("roundpipe")[2]
    assert "step 3 of 3" in last
    assert "worker 1" in last
    assert "between steps" in last
    assert "loss " in last
    assert "host" in last


def test_nothing_where_there_is_no_terminal(tmp_path: Path) -> None:
    assert _fit(tmp_path, is_terminal=False) == ("", [])


def test_the_curve_of_losses() -> None:
    assert curve([1.0, 2.0, float("nan"), 8.0]) == "▁▂?█"
    assert curve([3.0, 3.0]) == "▁▁"
    assert curve([float("nan")]) == "?"
