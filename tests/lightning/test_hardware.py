from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator
from lightning.pytorch.callbacks import DeviceStatsMonitor, LambdaCallback
from lightning.pytorch.plugins import DeepSpeedPrecision, FSDPPrecision, TorchSyncBatchNorm
from torch.utils.data import DataLoader

from roundpipe_lightning import RoundPipeStrategy
from roundpipe_lightning.engine.device.accelerator import AcceleratorDevice
from roundpipe_lightning.engine.device.probe import available_bytes
from roundpipe_lightning.engine.engine import Engine
from roundpipe_lightning.errors import ConfigurationError, FitError
from roundpipe_lightning.planning.model.hardware import HardwareSpec, load_hardware
from roundpipe_lightning.planning.schedule.plan import Plan
from roundpipe_lightning.precision import RoundPipePrecision
from roundpipe_lightning.strategy import runtime
from roundpipe_lightning.strategy.planning import inputs as machines
from roundpipe_lightning.strategy.planning.inputs import PlanEvent
from tests.kit.training import LanguageModel, Regressor, make_trainer, regression_data

GIB = 2**30
BLOCK_BYTES = 4 * (2 * 8 + 8 * 16 + 16 + 16 * 8 + 8)


def machine(**changes: int) -> HardwareSpec:
    return replace(load_hardware("rtx4090x2"), **changes)  # type: ignore[arg-type]


def fit(*, batch_size: int = 8, count: int = 4, **settings: object) -> Trainer:
    strategy = RoundPipeStrategy(num_microbatches=count, **settings)  # type: ignore[arg-type]
    trainer = make_trainer(strategy=strategy, devices=2, max_steps=1, max_epochs=-1)
    trainer.fit(Regressor("adamw"), regression_data(64, batch_size=batch_size))
    return trainer


def plan_of(trainer: Trainer) -> Plan:
    assert isinstance(trainer.strategy, RoundPipeStrategy)
    assert trainer.strategy.plan is not None
    return trainer.strategy.plan


@pytest.mark.usefixtures("steps_of_microbatches")
def test_the_plan_is_for_the_machine_that_is_named() -> None:
    roomy = plan_of(fit(hardware="rtx4090x2"))
    tight = machine(device_bytes=7 * BLOCK_BYTES, reserved_bytes=1)
    small = plan_of(fit(hardware=tight))
    assert max(small.partition.backward) < max(roomy.partition.backward)


def test_weights_come_ahead_and_stay_where_there_is_room() -> None:
    full = plan_of(fit(hardware="rtx4090x2", recompute="full"))
    assert full.weight_slots == 2
    assert any(full.resident)
    hints = {"weight_slots": 1, "resident": 0}
    hinted = plan_of(fit(hardware="rtx4090x2", recompute="full", hints=hints))
    assert (hinted.weight_slots, hinted.resident) == (1, ())
    blind = plan_of(fit(hardware="rtx4090x2", recompute="full", dry_run=False))
    assert (blind.weight_slots, blind.resident) == (2, ())


@pytest.mark.parametrize(
    ("free", "reserved", "allocated", "share", "there"),
    [
        (23.5, 0.0, 0.0, 1.0, 24.0),  # the runtime's own, which plans count
        (15.5, 8.0, 0.0, 1.0, 24.0),  # the allocator's, unused
        (15.5, 8.0, 6.0, 1.0, 18.0),
        (14.0, 0.0, 0.0, 1.0, 14.0),  # another process's
        (23.5, 0.0, 0.0, 0.5, 12.0),
        (4.0, 0.0, 0.0, 0.5, 4.0),
    ],
)
def test_a_plan_may_take_what_nobody_uses(
    monkeypatch: pytest.MonkeyPatch,
    free: float,
    reserved: float,
    allocated: float,
    share: float,
    there: float,
) -> None:
    figures = {
        "get_memory_info": (free * GIB, 24 * GIB),
        "memory_reserved": reserved * GIB,
        "memory_allocated": allocated * GIB,
    }
    for name, value in figures.items():
        monkeypatch.setattr(torch.accelerator, name, lambda _, value=value: value)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: share)
    found = available_bytes(torch.device("cuda", 0))
    assert found == pytest.approx(0.96 * there * GIB)


def test_a_model_that_cannot_fit_is_refused_before_anything_is_allocated() -> None:
    small = machine(device_bytes=2 * BLOCK_BYTES, reserved_bytes=1)
    with mock.patch.object(runtime, "Engine") as engine:
        lack = r"GiB of device memory are missing.*Not even a stage of layers\.\d alone fits\."
        with pytest.raises(FitError, match=lack):
            fit(hardware=small)
        with pytest.raises(FitError, match=r"optimizer state does not fit .*GiB of host memory"):
            fit(hardware=machine(host_bytes=BLOCK_BYTES))
    engine.assert_not_called()


def test_optimizer_state_counts() -> None:
    """Weights, gradients and AdamW's two moments: four times the parameters."""
    size = sum(p.nbytes for p in Regressor().parameters())
    with pytest.raises(FitError, match="optimizer state"):
        fit(hardware=machine(host_bytes=round(3.9 * size)))
    fit(hardware=machine(host_bytes=round(4.5 * size)))


def test_an_evaluation_needs_no_gradients() -> None:
    size = sum(p.nbytes for p in Regressor().parameters())
    strategy = RoundPipeStrategy(hardware=machine(host_bytes=round(1.5 * size)))
    trainer = make_trainer(strategy=strategy, devices=2)
    trainer.validate(Regressor(), regression_data(), verbose=False)
    strategy = RoundPipeStrategy(hardware=machine(host_bytes=size // 2))
    trainer = make_trainer(strategy=strategy, devices=2)
    with pytest.raises(FitError, match="The model does not fit rtx4090x2"):
        trainer.validate(Regressor(), regression_data(), verbose=False)


def test_activations_are_known_with_the_first_batch() -> None:
    """The parameters fit, the step does not: refused in time, with what makes it fit."""
    small = machine(device_bytes=9 * BLOCK_BYTES, reserved_bytes=1)
    with mock.patch.object(runtime, "Engine") as engine:
        with pytest.raises(FitError, match=r"The training step does not fit rtx4090x2") as refused:
            fit(hardware=small, batch_size=64, count=2)
        engine.assert_not_called()
    text = str(refused.value)
    assert "activations" in text
    count = int(text.partition("set num_microbatches=")[2].split()[0])
    fit(hardware=small, batch_size=64, count=count)


@pytest.mark.parametrize(("given", "other"), [("auto", None), (None, "auto")])
def test_the_other_uploads_are_offered_where_they_fit(
    given: str | None, other: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RoundPipeStrategy, "_computes_on_host", False)

    def train(upload_dtype: str | None, **memory: int) -> None:
        strategy = RoundPipeStrategy(hardware=machine(**memory), upload_dtype=upload_dtype)
        flags: Any = {"strategy": strategy, "devices": 2, "precision": "bf16-mixed"}
        make_trainer(**flags).fit(Regressor("adamw"), regression_data())

    size = sum(p.nbytes for p in Regressor().parameters())
    memory = {"host_bytes": round(4.2 * size)}
    if given is None:
        memory = {"device_bytes": round(3.5 * BLOCK_BYTES), "reserved_bytes": 1}
    with pytest.raises(FitError, match=f"set upload_dtype={other!r} .the same results; "):
        train(given, **memory)
    train(other, **memory)


def test_a_saved_plan_is_checked_too() -> None:
    plan = plan_of(fit())
    small = machine(device_bytes=2 * BLOCK_BYTES, reserved_bytes=1)
    with pytest.raises(FitError, match="given plan does not fit rtx4090x2"):
        fit(plan=plan, hardware=small)


def test_a_machine_has_as_many_devices_as_the_trainer() -> None:
    with pytest.raises(ConfigurationError, match=r"rtx4090x4 has 4 devices, .* devices are 2"):
        fit(hardware="rtx4090x4")
    trainer = fit(hardware="rtx4090x2", workers_per_device=2)
    assert plan_of(trainer).num_workers == 4


def test_host_memory_of_cpu_workers_is_that_of_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machines, "host_bytes", lambda: BLOCK_BYTES)
    with pytest.raises(FitError, match=r"does not fit cpu: .*GiB of host memory") as refused:
        fit()
    assert "use a machine with 16 GiB of host memory" in str(refused.value)


def test_nothing_is_refused_where_host_memory_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "host_bytes", lambda: None)
    assert plan_of(fit()).num_workers == 2


def test_cpu_workers_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "probe_hardware", mock.Mock(side_effect=AssertionError))
    fit()


ROOM = 60_000


def machine_with(room: int = ROOM) -> HardwareSpec:
    return replace(load_hardware("rtx4090x2"), device_bytes=1 + room, reserved_bytes=1)


class Lengths:
    """Tokens of given lengths, and what was planned and run for them."""

    def __init__(self, *lengths: int) -> None:
        rows = [torch.ones(4, length, dtype=torch.long) for length in lengths]
        data: Any = [{"input_ids": row, "labels": row} for row in rows]
        self.loader: Any = DataLoader(data, batch_size=None)
        self.num_planned: list[int] = []

    def train(self, folder: Path, **settings: Any) -> RoundPipeStrategy:
        events: list[PlanEvent] = []
        watch = LambdaCallback(on_train_batch_end=lambda *_: self.num_planned.append(len(events)))
        settings = {"hardware": machine_with(), "num_microbatches": 2, **settings}
        strategy = RoundPipeStrategy(microbatching="step", **settings)
        strategy.plan_listeners.append(events.append)
        trainer = make_trainer(
            folder, strategy=strategy, devices=2, max_epochs=1, callbacks=[watch]
        )
        trainer.fit(LanguageModel(), self.loader)
        return strategy


def longest_in(error: BaseException) -> int:
    found = re.search(
        r"Sequences of ([\d,]+) are too long: those of up to ([\d,]+) fit", str(error)
    )
    assert found is not None, str(error)
    return int(found[2].replace(",", ""))


def refused(folder: Path, lengths: Sequence[int], **settings: Any) -> FitError:
    with pytest.raises(FitError) as error:
        Lengths(*lengths).train(folder, **settings)
    return error.value


def test_the_first_batch_is_refused_with_the_longest_length_that_runs(tmp_path: Path) -> None:
    with mock.patch.object(runtime, "Engine") as engine:
        longest = longest_in(refused(tmp_path, [512]))
        engine.assert_not_called()
    assert 16 < longest < 512
    fitting = Lengths(longest)
    fitting.train(tmp_path)
    assert fitting.num_planned == [1]
    assert longest_in(refused(tmp_path, [longest + 1])) == longest


def test_a_later_batch_is_refused_before_anything_moves(tmp_path: Path) -> None:
    ran: list[int] = []
    run = Engine.begin_step

    def counted(self: Engine, *arguments: Any, **settings: Any) -> Any:
        ran.append(1)
        return run(self, *arguments, **settings)

    batches = Lengths(56, 52, 40, 56, 512, 32)
    with mock.patch.object(Engine, "begin_step", counted), pytest.raises(FitError) as error:
        batches.train(tmp_path)
    assert batches.num_planned == [1, 1, 1, 1]  # shorter ones need no new plan
    assert len(ran) == 4
    assert "The step has not begun" in str(error.value)
    assert 56 < longest_in(error.value) < 512


def test_a_plan_of_the_users_own_has_a_longest_length_too(tmp_path: Path) -> None:
    plan = Lengths(56).train(tmp_path).plan
    error = refused(tmp_path, [512], plan=plan)
    assert "The given plan does not fit" in str(error)
    longest = longest_in(error)
    Lengths(longest).train(tmp_path, plan=plan)
    assert longest_in(refused(tmp_path, [longest + 1], plan=plan)) == longest


def test_nothing_is_said_where_no_length_is_known_to_help() -> None:
    strategy = RoundPipeStrategy(hardware=machine_with(8_000), num_microbatches=2)
    trainer = make_trainer(strategy=strategy, devices=2, max_epochs=1)
    with pytest.raises(FitError, match="The training step does not fit") as error:
        trainer.fit(Regressor(), regression_data(1024, batch_size=1024))
    assert "Sequences" not in str(error.value)


# Accelerators -------------------------------------------------------------------------------------


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Let Lightning find two GPUs; returns the devices that are set up."""
    set_up: list[torch.device] = []
    monkeypatch.setattr(CUDAAccelerator, "is_available", staticmethod(lambda: True))
    monkeypatch.setattr(CUDAAccelerator, "auto_device_count", staticmethod(lambda: 2))
    monkeypatch.setattr(CUDAAccelerator, "parse_devices", staticmethod(lambda devices: [1, 3]))
    monkeypatch.setattr(CUDAAccelerator, "setup_device", lambda self, device: set_up.append(device))
    return set_up


@pytest.mark.parametrize("accelerator", ["gpu", "cuda", "auto"])
@pytest.mark.parametrize("workers_per_device", [1, 2])
def test_one_process_with_a_worker_per_gpu(
    two_gpus: list[torch.device],
    monkeypatch: pytest.MonkeyPatch,
    accelerator: str,
    workers_per_device: int,
) -> None:
    connector = "lightning.pytorch.trainer.connectors.accelerator_connector"
    monkeypatch.setattr(f"{connector}._select_auto_accelerator", lambda: "cuda")
    trainer = make_trainer(
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
    assert two_gpus == [torch.device("cuda", 3), torch.device("cuda", 1)]
    devices = strategy._devices()
    assert all(isinstance(device, AcceleratorDevice) for device in devices)
    assert [device.torch_device.index for device in devices] == [1, 3] * workers_per_device
    measured = mock.Mock(return_value=machine())
    monkeypatch.setattr(machines, "_probed", measured)
    assert strategy._speed()
    measured.assert_called_once_with(2, [torch.device("cuda", 1), torch.device("cuda", 3)])
    plugin = trainer.precision_plugin
    assert isinstance(plugin, RoundPipePrecision)
    assert plugin.compute_device_type == "cuda"


def test_gpus_can_be_compared_with_cpu_workers(two_gpus: object) -> None:
    """As tests/gpu does: that they are not used is a warning, and warnings are errors."""
    del two_gpus
    assert isinstance(make_trainer().accelerator, CPUAccelerator)


@pytest.mark.parametrize(("devices", "workers"), [(3, 3), ("2", 2), ("auto", 1)])
@pytest.mark.parametrize("per_device", [1, 2])
def test_cpu_has_as_many_workers_as_devices_are_asked_for(
    devices: Any, workers: int, per_device: int
) -> None:
    strategy = RoundPipeStrategy(workers_per_device=per_device)
    trainer = make_trainer(strategy=strategy, accelerator="cpu", devices=devices)
    assert strategy.num_workers == workers * per_device
    assert trainer.world_size == trainer.num_nodes == 1
    assert strategy.root_device == torch.device("cpu")
    names = [f"cpu:{index}" for index in range(workers * per_device)]
    assert [device.name for device in strategy._devices()] == names


def test_figures_of_the_host_are_those_of_the_workers(
    two_gpus: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeviceStatsMonitor asks for those of the root device, which is the host here."""
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {"used": 10 + device.index})
    strategy = RoundPipeStrategy(workers_per_device=2)
    trainer = make_trainer(strategy=strategy, accelerator="gpu", devices=2)
    accelerator = trainer.accelerator
    assert isinstance(accelerator, CUDAAccelerator)
    figures = accelerator.get_device_stats(strategy.root_device)
    assert figures == {"cuda:1.used": 11, "cuda:3.used": 13}
    assert accelerator.get_device_stats(torch.device("cuda", 1)) == {"used": 11}
    monitor = DeviceStatsMonitor()
    logged: dict[str, float] = {}
    logger: Any = SimpleNamespace(group_separator="/", log_metrics=lambda m, **_: logged.update(m))
    trainer._loggers = [logger]
    monitor._get_and_log_device_stats(trainer, "on_train_batch_end")
    assert [name.rpartition("/")[2] for name in logged] == list(figures)


def test_figures_on_cpu_workers_are_lightnings_own() -> None:
    trainer = make_trainer(strategy="roundpipe")
    assert type(trainer.accelerator) is CPUAccelerator


# Surroundings that cannot work --------------------------------------------------------------------

PLUGINS: dict[str, tuple[Any, str]] = {
    "layer sync": (TorchSyncBatchNorm, r"sync_batchnorm=True: .*Set Trainer\(sync_batchnorm=False"),
    "FSDP": (lambda: FSDPPrecision("bf16-mixed"), r"FSDPPrecision .*Set|FSDPPrecision .*set"),
    "DeepSpeed": (lambda: DeepSpeedPrecision("bf16-mixed"), r"DeepSpeedPrecision .*precision="),
}


@pytest.mark.parametrize("name", PLUGINS)
def test_plugins_of_other_strategies(name: str) -> None:
    make, message = PLUGINS[name]
    with pytest.raises(ConfigurationError, match=message):
        make_trainer(strategy="roundpipe", plugins=[make()])
