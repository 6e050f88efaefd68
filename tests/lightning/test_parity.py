"""Training with the strategy gives what one device gives on the full batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    StochasticWeightAveraging,
)
from lightning.pytorch.callbacks.weight_averaging import EMAWeightAveraging
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner.tuning import Tuner
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from roundpipe_lightning.errors import BatchError
from roundpipe_lightning.strategy.strategy import NoBlocksWarning, RoundPipeStrategy
from tests.kit.training import (
    QUIET,
    Block,
    LanguageModel,
    PaddedSequences,
    Regressor,
    make_trainer,
    parameter_error,
    regression_data,
    same_bits,
)

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]


def one_and_many(strategy: RoundPipeStrategy) -> list[Any]:
    """Lightning's strategy for one device, and ours."""
    return ["auto", strategy]


TOLERANCE = {"sgd": 1e-5, "adamw": 1e-3}


def fit(folder: Path, strategy: Any, module: LightningModule, data: Any, **flags: Any) -> Trainer:
    trainer = make_trainer(folder, strategy=strategy, **flags)
    trainer.fit(module, data)
    return trainer


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(("devices", "num_microbatches"), [(1, 1), (1, 3), (2, "auto"), (4, 8)])
def test_20_steps_on_padded_batches(
    tmp_path: Path, optimizer: str, devices: int, num_microbatches: Any
) -> None:
    modules = []
    for strategy in one_and_many(RoundPipeStrategy(num_microbatches=num_microbatches)):
        torch.manual_seed(3)
        module = LanguageModel(optimizer)
        data = DataLoader(PaddedSequences(32), batch_size=8)
        workers = 1 if strategy == "auto" else devices
        trainer = fit(tmp_path, strategy, module, data, devices=workers, max_epochs=5)
        assert trainer.global_step == 20
        modules.append((module, trainer))
    (expected, one), (module, many) = modules
    assert parameter_error(module, expected) < TOLERANCE[optimizer]
    for key, value in one.callback_metrics.items():
        torch.testing.assert_close(many.callback_metrics[key], value, rtol=1e-5, atol=1e-6)


def test_number_of_workers_changes_no_bit(tmp_path: Path) -> None:
    modules = []
    for devices in (1, 2, 4):
        torch.manual_seed(3)
        module = Regressor("adamw", dropout=0.3)
        strategy = RoundPipeStrategy(num_microbatches=4)
        fit(tmp_path, strategy, module, regression_data(shuffle=True), devices=devices)
        modules.append(module)
        assert strategy.num_workers == devices
    assert same_bits(modules[1], modules[0])
    assert same_bits(modules[2], modules[0])


def test_several_workers_on_one_device_are_as_good_as_several_devices(tmp_path: Path) -> None:
    modules = []
    for devices, workers_per_device in ((4, 1), (2, 2)):
        torch.manual_seed(3)
        module = Regressor()
        strategy = RoundPipeStrategy(workers_per_device=workers_per_device)
        fit(tmp_path, strategy, module, regression_data(), devices=devices)
        assert strategy.num_workers == 4
        assert strategy.num_microbatches == 8
        modules.append(module)
    assert same_bits(modules[1], modules[0])


FEATURES: dict[str, dict[str, Any]] = {
    "accumulation": {"accumulate_grad_batches": 3},
    "accumulation that changes": {
        "callbacks": lambda: [GradientAccumulationScheduler({1: 2, 2: 3})]
    },
    "clipping by norm": {"gradient_clip_val": 0.05},
    "clipping by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "weight averaging": {"callbacks": lambda: [StochasticWeightAveraging(0.02, swa_epoch_start=1)]},
    "moving average": {"callbacks": lambda: [EMAWeightAveraging(decay=0.9)]},
    "profiler": {"profiler": "simple", "max_epochs": 1},
    "development run": {"fast_dev_run": 2},
    "some steps": {"max_steps": 6},
    "half an epoch": {"limit_train_batches": 2, "accumulate_grad_batches": 3},
    "one batch": {"overfit_batches": 1},
    "anomaly detection": {"detect_anomaly": True},
}


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.filterwarnings("ignore:Swapping scheduler", "ignore:Anomaly Detection")
@pytest.mark.filterwarnings("ignore:You requested to overfit")
def test_trainer_features(tmp_path: Path, name: str) -> None:
    modules = []
    for strategy in one_and_many(RoundPipeStrategy()):
        torch.manual_seed(3)
        module = Regressor()
        flags = dict(FEATURES[name])
        if "callbacks" in flags:
            flags["callbacks"] = flags["callbacks"]()
        devices = 1 if strategy == "auto" else 2
        data = regression_data(27, shuffle=True)
        fit(tmp_path, strategy, module, data, devices=devices, **flags)
        modules.append(module)
    assert parameter_error(modules[1], modules[0]) < 1e-5


def test_tuner_finds_what_it_finds_on_one_device(tmp_path: Path) -> None:
    class Tunable(Regressor):
        def __init__(self) -> None:
            super().__init__()
            self.batch_size, self.lr = 2, 0.01

        def train_dataloader(self) -> Any:
            return regression_data(64, batch_size=self.batch_size)

        def val_dataloader(self) -> Any:
            return regression_data(8)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    found = []
    for strategy in one_and_many(RoundPipeStrategy()):
        torch.manual_seed(3)
        module = Tunable()
        trainer = make_trainer(
            tmp_path, strategy=strategy, devices=1 if strategy == "auto" else 2, max_epochs=1
        )
        size = Tuner(trainer).scale_batch_size(module, max_trials=2)
        finder = Tuner(trainer).lr_find(module, num_training=20, max_lr=0.1)
        assert finder is not None
        found.append((size, finder.results["loss"]))
    assert found[1][0] == found[0][0]
    assert found[1][1] == pytest.approx(found[0][1], rel=1e-4)


class _Scheduled(Regressor):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        if self.kind == "plateau":
            scheduler: Any = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"},
            }
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        return [optimizer], [{"scheduler": scheduler, "interval": self.kind}]


@pytest.mark.parametrize("kind", ["step", "epoch", "plateau"])
def test_schedulers_and_learning_rates(tmp_path: Path, kind: str) -> None:
    runs: list[Any] = []
    for strategy in one_and_many(RoundPipeStrategy()):
        torch.manual_seed(3)
        module = _Scheduled(kind)
        folder = tmp_path / str(len(runs))
        trainer = make_trainer(
            folder,
            strategy=strategy,
            devices=1 if strategy == "auto" else 2,
            logger=CSVLogger(folder, version=0),
            callbacks=[LearningRateMonitor()],
        )
        trainer.fit(module, regression_data(), regression_data(8))
        rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
        header = (folder / "lightning_logs/version_0/metrics.csv").read_text().splitlines()[0]
        assert "lr-SGD" in header
        runs.append((module, rates))
    assert runs[1][1] == runs[0][1]
    assert parameter_error(runs[1][0], runs[0][0]) < 1e-5


class _Normalised(Regressor):
    """Has layers with running statistics, inside and outside the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.BatchNorm1d(8)
        for layer in self.layers:
            assert isinstance(layer, Block)
            layer.norm = nn.BatchNorm1d(8)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.before(x))


@pytest.mark.filterwarnings("ignore:Swapping scheduler")
def test_running_statistics_of_one_microbatch_and_the_pass_of_weight_averaging(
    tmp_path: Path,
) -> None:
    modules = []
    for strategy in one_and_many(RoundPipeStrategy(num_microbatches=1)):
        torch.manual_seed(3)
        module = _Normalised()
        averaging = StochasticWeightAveraging(0.02, swa_epoch_start=1)
        devices = 1 if strategy == "auto" else 2
        fit(tmp_path, strategy, module, regression_data(), devices=devices, callbacks=[averaging])
        modules.append(module)
    assert same_bits(modules[1], modules[0])
    for (name, buffer), (_, expected) in zip(
        modules[1].named_buffers(), modules[0].named_buffers(), strict=True
    ):
        assert torch.equal(buffer, expected), name


def test_running_statistics_do_not_depend_on_the_number_of_workers(tmp_path: Path) -> None:
    modules = []
    for devices in (1, 3):
        torch.manual_seed(3)
        module = _Normalised()
        strategy = RoundPipeStrategy(num_microbatches=4)
        fit(tmp_path, strategy, module, regression_data(), devices=devices)
        modules.append(module)
    for (name, buffer), (_, expected) in zip(
        modules[1].named_buffers(), modules[0].named_buffers(), strict=True
    ):
        assert torch.equal(buffer, expected), name


class _Unfreeze(BaseFinetuning):
    def freeze_before_training(self, pl_module: LightningModule) -> None:
        self.freeze(pl_module.layers)

    def finetune_function(
        self, pl_module: LightningModule, epoch: int, optimizer: Optimizer
    ) -> None:
        if epoch == 2:
            self.unfreeze_and_add_param_group(pl_module.layers, optimizer)


class _FrozenAware(Regressor):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05)


def test_parameters_that_thaw_during_training(tmp_path: Path) -> None:
    modules = []
    for strategy in one_and_many(RoundPipeStrategy()):
        torch.manual_seed(3)
        module = _FrozenAware()
        devices = 1 if strategy == "auto" else 2
        fit(tmp_path, strategy, module, regression_data(), devices=devices, callbacks=[_Unfreeze()])
        modules.append(module)
    assert all(parameter.requires_grad for parameter in modules[1].parameters())
    assert parameter_error(modules[1], modules[0]) < 1e-5


def test_last_batch_smaller_than_the_number_of_microbatches(tmp_path: Path) -> None:
    modules = []
    for strategy in one_and_many(RoundPipeStrategy()):
        torch.manual_seed(3)
        module = Regressor()
        devices = 1 if strategy == "auto" else 2
        fit(tmp_path, strategy, module, regression_data(9), devices=devices)
        modules.append(module)
        if strategy != "auto":
            assert strategy.num_microbatches == 4
            assert strategy.last_plan.num_microbatches == 1
    assert parameter_error(modules[1], modules[0]) < 1e-5


def test_first_batch_smaller_than_wanted_limits_the_number_of_microbatches(tmp_path: Path) -> None:
    strategy = RoundPipeStrategy()
    fit(tmp_path, strategy, Regressor(), regression_data(8, batch_size=2), devices=2, max_epochs=1)
    assert strategy.num_microbatches == 2
    assert strategy.plan is not None
    assert strategy.plan.num_workers == 2


def test_batch_smaller_than_a_number_that_was_asked_for(tmp_path: Path) -> None:
    strategy = RoundPipeStrategy(num_microbatches=4)
    with pytest.raises(BatchError, match="A batch of 1 samples cannot be split into 4"):
        fit(tmp_path, strategy, Regressor(), regression_data(9), devices=2)


def test_model_without_blocks_trains_as_one_stage(tmp_path: Path) -> None:
    class OneLayer(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return functional.mse_loss(self.layer(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05)

    torch.manual_seed(3)
    expected = OneLayer()
    fit(tmp_path, "auto", expected, regression_data())
    torch.manual_seed(3)
    module = OneLayer()
    with pytest.warns(NoBlocksWarning, match="blocks='model.layers'"):
        fit(tmp_path, RoundPipeStrategy(), module, regression_data(), devices=2)
    assert parameter_error(module, expected) < 1e-5


class _Manual(Regressor):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            loss = functional.mse_loss(self(batch[0]), batch[1])
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(self.layers.parameters(), lr=0.05),
            torch.optim.AdamW(self.head.parameters(), lr=0.01),
        ]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_manual_optimization_with_several_optimizers_and_one_microbatch(
    tmp_path: Path, precision: Any
) -> None:
    modules = []
    for strategy in one_and_many(RoundPipeStrategy(num_microbatches=1)):
        torch.manual_seed(3)
        module = _Manual()
        fit(tmp_path, strategy, module, regression_data(), precision=precision, max_epochs=2)
        modules.append(module)
    assert same_bits(modules[1], modules[0])


def test_early_stopping_stops_at_the_same_batch(tmp_path: Path) -> None:
    steps = []
    for strategy in one_and_many(RoundPipeStrategy()):
        torch.manual_seed(3)
        trainer = make_trainer(
            tmp_path,
            strategy=strategy,
            devices=1 if strategy == "auto" else 2,
            callbacks=[EarlyStopping("val_loss", patience=1, min_delta=0.02)],
            max_epochs=30,
        )
        trainer.fit(Regressor(), regression_data(), regression_data(8))
        steps.append(trainer.global_step)
    assert steps[1] == steps[0]
    assert steps[0] < 120
