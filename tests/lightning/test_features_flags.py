"""Flags and surroundings that cannot work are refused before training; sizes are searched for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import (
    DeepSpeedPrecision,
    FSDPPrecision,
    TorchSyncBatchNorm,
)
from lightning.pytorch.tuner.tuning import Tuner

from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.strategy.strategy import RoundPipeStrategy
from roundpipe_lightning.testing import EmulatedStrategy
from tests.kit.comparison import on_each
from tests.kit.training import QUIET, Regressor, make_trainer, regression_data

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]

PLUGINS: dict[str, tuple[Any, str]] = {
    "layer sync": (TorchSyncBatchNorm, r"sync_batchnorm=True: .*Set Trainer\(sync_batchnorm=False"),
    "FSDP": (lambda: FSDPPrecision("bf16-mixed"), r"FSDPPrecision .*Set|FSDPPrecision .*set"),
    "DeepSpeed": (lambda: DeepSpeedPrecision("bf16-mixed"), r"DeepSpeedPrecision .*precision="),
}


@pytest.mark.parametrize("name", PLUGINS)
def test_plugins_of_other_strategies(tmp_path: Path, name: str) -> None:
    make, message = PLUGINS[name]
    with pytest.raises(ConfigurationError, match=message):
        make_trainer(tmp_path, strategy="roundpipe", plugins=[make()])


LAUNCHERS: dict[str, dict[str, str]] = {
    "torchrun": {
        "TORCHELASTIC_RUN_ID": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1234",
        "WORLD_SIZE": "4",
        "RANK": "1",
        "LOCAL_RANK": "1",
        "GROUP_RANK": "0",
    },
    "slurm": {
        "SLURM_NTASKS": "4",
        "SLURM_NTASKS_PER_NODE": "4",
        "SLURM_JOB_NAME": "train",
        "SLURM_JOB_ID": "7",
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "0",
    },
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_several_processes_of_a_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: str
) -> None:
    for name, value in LAUNCHERS[launcher].items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=r"4 processes were launched.*without torchrun"):
        make_trainer(tmp_path, strategy="roundpipe")


@pytest.mark.parametrize(
    ("devices", "workers"), [(3, 3), ("2", 2), ("auto", 1)], ids=["number", "text", "auto"]
)
@pytest.mark.parametrize("per_device", [1, 2])
def test_devices_are_workers(tmp_path: Path, devices: Any, workers: int, per_device: int) -> None:
    strategy = RoundPipeStrategy(workers_per_device=per_device)
    trainer = make_trainer(tmp_path, strategy=strategy, devices=devices, max_epochs=1)
    assert strategy.num_workers == workers * per_device
    assert trainer.world_size == trainer.num_nodes == 1
    assert trainer.strategy.root_device == torch.device("cpu")


class _Rate(Regressor):
    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.01

    def train_dataloader(self) -> Any:
        return regression_data(32)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def test_a_learning_rate_is_found_on_devices(tmp_path: Path) -> None:
    def find(trainer: Trainer, module: Any) -> list[float]:
        finder = Tuner(trainer).lr_find(module, num_training=12, max_lr=0.5)
        assert finder is not None
        return [float(finder.suggestion(skip_begin=2, skip_end=1) or 0), module.lr]

    one, *others = on_each(tmp_path, _Rate, find, kinds=(RoundPipeStrategy, EmulatedStrategy))
    for other in others:
        assert other.result == pytest.approx(one.result)
