"""What the strategy makes of GPUs, as far as it can be seen without one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator
from lightning.pytorch.callbacks import DeviceStatsMonitor

from roundpipe_lightning.engine.device.accelerator import AcceleratorDevice
from roundpipe_lightning.precision import RoundPipePrecision
from roundpipe_lightning.strategy.strategy import RoundPipeStrategy
from tests.kit.training import make_trainer


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Let Lightning find two GPUs; returns the devices that are set up."""
    set_up: list[torch.device] = []
    monkeypatch.setattr(CUDAAccelerator, "is_available", staticmethod(lambda: True))
    monkeypatch.setattr(CUDAAccelerator, "auto_device_count", staticmethod(lambda: 2))
    monkeypatch.setattr(CUDAAccelerator, "parse_devices", staticmethod(lambda devices: [0, 1]))
    monkeypatch.setattr(CUDAAccelerator, "setup_device", lambda self, device: set_up.append(device))
    return set_up


@pytest.mark.parametrize("accelerator", ["gpu", "cuda", "auto"])
@pytest.mark.parametrize("workers_per_device", [1, 2])
def test_one_process_with_a_worker_per_gpu(
    tmp_path: Path,
    two_gpus: list[torch.device],
    monkeypatch: pytest.MonkeyPatch,
    accelerator: str,
    workers_per_device: int,
) -> None:
    connector = "lightning.pytorch.trainer.connectors.accelerator_connector"
    monkeypatch.setattr(f"{connector}._select_auto_accelerator", lambda: "cuda")
    trainer = make_trainer(
        tmp_path,
        strategy=RoundPipeStrategy(workers_per_device=workers_per_device),
        accelerator=accelerator,
        devices=2,
        precision="bf16-mixed",
    )
    strategy: Any = trainer.strategy
    assert strategy.num_workers == 2 * workers_per_device
    assert strategy.root_device == torch.device("cpu")
    assert trainer.world_size == 1
    strategy.setup_environment()
    assert two_gpus == [torch.device("cuda", 1), torch.device("cuda", 0)]
    devices = strategy._devices()
    assert all(isinstance(device, AcceleratorDevice) for device in devices)
    assert [device.torch_device.index for device in devices] == [0, 1] * workers_per_device
    plugin = trainer.precision_plugin
    assert isinstance(plugin, RoundPipePrecision)
    assert plugin.compute_device_type == "cuda"


def test_cpu_has_as_many_workers_as_devices_are_asked_for(tmp_path: Path) -> None:
    strategy = RoundPipeStrategy()
    make_trainer(tmp_path, strategy=strategy, accelerator="cpu", devices=3)
    assert [device.name for device in strategy._devices()] == ["cpu:0", "cpu:1", "cpu:2"]
    auto = RoundPipeStrategy()
    make_trainer(tmp_path, strategy=auto, accelerator="cpu", devices="auto")
    assert auto.num_workers == 1


def test_figures_of_the_host_are_those_of_the_workers(
    tmp_path: Path, two_gpus: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeviceStatsMonitor asks for those of the root device, which is the host here."""
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {"used": 10 + device.index})
    strategy = RoundPipeStrategy(workers_per_device=2)
    trainer = make_trainer(tmp_path, strategy=strategy, accelerator="gpu", devices=2)
    accelerator = trainer.accelerator
    assert isinstance(accelerator, CUDAAccelerator)
    figures = accelerator.get_device_stats(strategy.root_device)
    assert figures == {"cuda:0.used": 10, "cuda:1.used": 11}
    assert accelerator.get_device_stats(torch.device("cuda", 1)) == {"used": 11}
    monitor = DeviceStatsMonitor()
    logged: dict[str, float] = {}
    logger: Any = SimpleNamespace(group_separator="/", log_metrics=lambda m, **_: logged.update(m))
    trainer._loggers = [logger]
    monitor._get_and_log_device_stats(trainer, "on_train_batch_end")
    assert [name.rpartition("/")[2] for name in logged] == list(figures)


def test_figures_on_cpu_workers_are_lightnings_own(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, strategy="roundpipe")
    assert type(trainer.accelerator) is CPUAccelerator
