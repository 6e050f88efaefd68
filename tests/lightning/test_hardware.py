"""A machine that is named: its memory is checked before anything is allocated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from lightning.pytorch import Trainer

from roundpipe_lightning import RoundPipeStrategy
from roundpipe_lightning._lightning import session
from roundpipe_lightning.errors import ConfigurationError, PlanError
from roundpipe_lightning.planning.hardware import HardwareSpec
from roundpipe_lightning.planning.hardware_files import load_hardware
from roundpipe_lightning.planning.memory import RESERVED_BYTES
from roundpipe_lightning.planning.plan import Plan
from tests.lightning.tiny_training import QUIET, Regressor, regression_data

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]

BLOCK_BYTES = 4 * (2 * 8 + 8 * 16 + 16 + 16 * 8 + 8)


def machine(**changes: int) -> HardwareSpec:
    return replace(load_hardware("rtx4090x2"), **changes)  # type: ignore[arg-type]


def fit(folder: Path, **settings: object) -> RoundPipeStrategy:
    strategy = RoundPipeStrategy(num_microbatches=4, **settings)  # type: ignore[arg-type]
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(Regressor(), regression_data())
    return strategy


def test_a_machine_that_is_large_enough_changes_nothing(tmp_path: Path) -> None:
    assert fit(tmp_path, hardware="rtx4090x2").plan == fit(tmp_path).plan


def test_a_model_that_cannot_fit_is_refused_before_anything_is_allocated(tmp_path: Path) -> None:
    small = machine(device_bytes=RESERVED_BYTES + 2 * BLOCK_BYTES)
    with mock.patch.object(session, "Engine") as engine:
        with pytest.raises(PlanError, match=r"GiB of device memory are missing.*roundpipe-plan"):
            fit(tmp_path, hardware=small)
        with pytest.raises(PlanError, match="GiB of host memory are missing"):
            fit(tmp_path, hardware=machine(host_bytes=BLOCK_BYTES))
    engine.assert_not_called()


def test_a_saved_plan_is_checked_too(tmp_path: Path) -> None:
    plan = fit(tmp_path).plan
    assert isinstance(plan, Plan)
    small = machine(device_bytes=RESERVED_BYTES + 2 * BLOCK_BYTES)
    with pytest.raises(PlanError, match="does not fit rtx4090x2"):
        fit(tmp_path, plan=plan, hardware=small)


def test_a_machine_has_as_many_devices_as_the_trainer(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"rtx4090x4 has 4 devices, .* gives 2"):
        fit(tmp_path, hardware="rtx4090x4")
    assert fit(tmp_path, hardware="rtx4090x2", workers_per_device=2).num_workers == 4
