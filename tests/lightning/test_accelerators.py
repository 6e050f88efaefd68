from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator
from lightning.pytorch.callbacks import DeviceStatsMonitor
from lightning.pytorch.plugins import DeepSpeedPrecision, FSDPPrecision, TorchSyncBatchNorm

from roundpipe_lightning.engine.device.accelerator import AcceleratorDevice
from roundpipe_lightning.errors import ConfigurationError
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


def test_gpus_can_be_compared_with_cpu_workers(tmp_path: Path, two_gpus: object) -> None:
    """As tests/gpu does: that they are not used is a warning, and warnings are errors."""
    del two_gpus
    assert isinstance(make_trainer(tmp_path).accelerator, CPUAccelerator)


@pytest.mark.parametrize(("devices", "workers"), [(3, 3), ("2", 2), ("auto", 1)])
@pytest.mark.parametrize("per_device", [1, 2])
def test_cpu_has_as_many_workers_as_devices_are_asked_for(
    tmp_path: Path, devices: Any, workers: int, per_device: int
) -> None:
    strategy = RoundPipeStrategy(workers_per_device=per_device)
    trainer = make_trainer(tmp_path, strategy=strategy, accelerator="cpu", devices=devices)
    assert strategy.num_workers == workers * per_device
    assert trainer.world_size == trainer.num_nodes == 1
    assert strategy.root_device == torch.device("cpu")
    names = [f"cpu:{index}" for index in range(workers * per_device)]
    assert [device.name for device in strategy._devices()] == names


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


# Surroundings that cannot work --------------------------------------------------------------------

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
