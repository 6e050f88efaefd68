from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    LearningRateMonitor,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from roundpipe_lightning.errors import BatchError
from roundpipe_lightning.strategy.strategy import NoBlocksWarning, RoundPipeStrategy
from roundpipe_lightning.testing import EmulatedStrategy
from tests.kit.training import (
    Block,
    LanguageModel,
    PaddedSequences,
    Regressor,
    make_trainer,
    parameter_error,
    regression_data,
    same_bits,
    train_with,
)

TOLERANCE = {"sgd": 1e-5, "adamw": 1e-3}


def fit(folder: Path, strategy: Any, module: LightningModule, data: Any, **flags: Any) -> Trainer:
    trainer = make_trainer(folder, strategy=strategy, **flags)
    trainer.fit(module, data)
    return trainer


@pytest.mark.suite("sgd-4-8", "adamw-2-auto", "sgd-1-1")
@pytest.mark.parametrize(
    ("optimizer", "devices", "num_microbatches"),
    [("sgd", 1, 1), ("adamw", 1, 3), ("sgd", 2, "auto"), ("adamw", 2, "auto"), ("sgd", 4, 8)],
)
def test_20_steps_on_padded_batches(
    tmp_path: Path, optimizer: str, devices: int, num_microbatches: Any
) -> None:
    data = DataLoader(PaddedSequences(32), batch_size=8)
    ours = RoundPipeStrategy(num_microbatches=num_microbatches)
    ((expected, one),) = train_with(
        tmp_path, ["auto"], lambda: LanguageModel(optimizer), data, max_epochs=5
    )
    ((module, many),) = train_with(
        tmp_path, [ours], lambda: LanguageModel(optimizer), data, max_epochs=5, devices=devices
    )
    assert one.global_step == many.global_step == 20
    assert parameter_error(module, expected) < TOLERANCE[optimizer]
    for key, value in one.callback_metrics.items():
        torch.testing.assert_close(many.callback_metrics[key], value, rtol=1e-5, atol=1e-6)


def test_number_of_workers_changes_no_bit(tmp_path: Path) -> None:
    modules = []
    for devices, per_device in ((1, 1), (2, 1), (2, 2), (4, 1)):
        torch.manual_seed(3)
        module = Regressor("adamw", dropout=0.3)
        strategy = RoundPipeStrategy(num_microbatches=4, workers_per_device=per_device)
        fit(tmp_path, strategy, module, regression_data(shuffle=True), devices=devices)
        modules.append(module)
        assert strategy.num_workers == devices * per_device
    assert all(same_bits(module, modules[0]) for module in modules)


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
    runs = train_with(
        tmp_path,
        ["auto", RoundPipeStrategy()],
        lambda: _Scheduled(kind),
        validation=regression_data(8),
        logger=lambda: CSVLogger(tmp_path),
        callbacks=lambda: [LearningRateMonitor()],
    )
    rates = []
    for module, trainer in runs:
        header = (Path(str(trainer.log_dir)) / "metrics.csv").read_text().splitlines()[0]
        assert "lr-SGD" in header
        rates.append([group["lr"] for group in trainer.optimizers[0].param_groups])
        assert parameter_error(module, runs[0][0]) < 1e-5
    assert rates[1] == rates[0]


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


def test_running_statistics_of_one_microbatch_and_the_pass_of_weight_averaging(
    tmp_path: Path,
) -> None:
    runs = train_with(
        tmp_path,
        ["auto", *(kind(num_microbatches=1) for kind in (RoundPipeStrategy, EmulatedStrategy))],
        _Normalised,
        callbacks=lambda: [StochasticWeightAveraging(0.02, swa_epoch_start=1)],
    )
    for module, _ in runs[1:]:
        torch.testing.assert_close(module.state_dict(), runs[0][0].state_dict(), rtol=0, atol=0)


def test_last_batch_smaller_than_the_number_of_microbatches(tmp_path: Path) -> None:
    ours = RoundPipeStrategy()
    (one, _), (module, _) = train_with(tmp_path, ["auto", ours], Regressor, regression_data(9))
    assert ours.num_microbatches == 4
    assert ours.last_step is not None
    assert ours.last_step.plan.num_microbatches == 1
    assert parameter_error(module, one) < 1e-5


def test_first_batch_smaller_than_wanted_limits_the_number_of_microbatches(tmp_path: Path) -> None:
    strategy = RoundPipeStrategy()
    fit(tmp_path, strategy, Regressor(), regression_data(8, batch_size=2), devices=2, max_epochs=1)
    assert strategy.num_microbatches == 2
    assert strategy.plan is not None
    assert strategy.plan.num_workers == 2


def test_batch_smaller_than_a_number_that_was_asked_for(tmp_path: Path) -> None:
    strategy = RoundPipeStrategy(num_microbatches=4, microbatching="step")
    with pytest.raises(BatchError, match="A batch of 1 rows cannot be split into 4"):
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

    with pytest.warns(NoBlocksWarning, match="blocks='model.layers'"):
        (one, _), (module, _) = train_with(tmp_path, ["auto", RoundPipeStrategy()], OneLayer)
    assert parameter_error(module, one) < 1e-5
