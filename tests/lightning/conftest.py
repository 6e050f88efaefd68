import functools
import time
from pathlib import Path
from typing import Any

import pytest

from roundpipe_lightning.engine.update.partial_step import CapturedStep
from roundpipe_lightning.engine.update.updater import Updater, UpdateUnit
from roundpipe_lightning.strategy import runtime
from roundpipe_lightning.strategy.strategy import RoundPipeStrategy


@pytest.fixture(autouse=True)
def in_own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Trainers write where the test runs."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def slow_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the update of every unit take a while, so that nobody who waits too little gets by."""

    def run(unit: UpdateUnit, step: CapturedStep) -> None:
        time.sleep(0.003)
        step.run(unit.parameters)

    monkeypatch.setattr(runtime, "Updater", functools.partial(Updater, run_unit=run))


@pytest.fixture
def steps_of_microbatches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let strategies run `training_step` once per microbatch, from the first batch on."""
    defaults: Any = RoundPipeStrategy.__init__.__kwdefaults__
    monkeypatch.setitem(defaults, "microbatching", "step")
