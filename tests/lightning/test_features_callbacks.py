"""Every callback of Lightning does with the strategy what it does on one device."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch.callbacks
import pytest
import torch
from lightning.fabric.utilities.spike import TrainingSpikeException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    BasePredictionWriter,
    BatchSizeFinder,
    DeviceStatsMonitor,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    OnExceptionCheckpoint,
    RichModelSummary,
    RichProgressBar,
    SpikeDetection,
    StochasticWeightAveraging,
    ThroughputMonitor,
    Timer,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import DummyLogger
from torch import nn
from torch.optim import Optimizer

from roundpipe_lightning.strategy.strategy import RoundPipeStrategy
from roundpipe_lightning.testing import EmulatedStrategy
from tests.kit.training import (
    QUIET,
    Regressor,
    make_trainer,
    parameter_error,
    regression_data,
)

pytestmark = [
    *(pytest.mark.filterwarnings(line) for line in QUIET),
    pytest.mark.filterwarnings("ignore:Swapping scheduler"),
]


class Tunable(Regressor):
    """Has a learning rate and a batch size to be found, and a backbone to be thawed."""

    def __init__(self) -> None:
        super().__init__()
        self.lr, self.batch_size = 0.05, 4

    @property
    def backbone(self) -> nn.Module:
        return self.layers

    def train_dataloader(self) -> Any:
        return regression_data(16, batch_size=self.batch_size)

    def val_dataloader(self) -> Any:
        return regression_data(8)

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=self.lr, momentum=0.5)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class Thaw(BaseFinetuning):
    """Thaws one layer per epoch, each in a parameter group of its own."""

    def freeze_before_training(self, pl_module: LightningModule) -> None:
        self.freeze(pl_module.layers)

    def finetune_function(
        self, pl_module: LightningModule, epoch: int, optimizer: Optimizer
    ) -> None:
        layers: Any = pl_module.layers
        if epoch:
            self.unfreeze_and_add_param_group(layers[-epoch], optimizer)


class Everything(Callback):
    """Logs from hooks of its own, and keeps learning rates and metrics of every batch."""

    log: Any  # Lightning lends both to callbacks
    log_dict: Any

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        norm = torch.stack([p.detach().norm() for p in pl_module.parameters()]).norm()
        self.log("norm", norm, on_step=True, on_epoch=True)
        self.log("largest_norm", norm, reduce_fx=torch.max, on_step=False, on_epoch=True)
        rates = {f"lr_{i}": g["lr"] for i, g in enumerate(trainer.optimizers[0].param_groups)}
        metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
        self.seen.append({**rates, **metrics, "windows": float(trainer.accumulate_grad_batches)})

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.log("epoch_norm", pl_module.head.weight.norm())

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.log_dict({"a": 1.5, "b": float(trainer.global_step)})


CALLBACKS: dict[str, Callable[[], Callback]] = {
    "BackboneFinetuning": lambda: BackboneFinetuning(1, initial_denom_lr=2.0),
    "BaseFinetuning": Thaw,
    "BatchSizeFinder": lambda: BatchSizeFinder(max_trials=1, steps_per_trial=1),
    "EarlyStopping": lambda: EarlyStopping("val_loss", min_delta=0.05, patience=1),
    "GradientAccumulationScheduler": lambda: GradientAccumulationScheduler({0: 3, 1: 2, 2: 1}),
    "LearningRateFinder": lambda: LearningRateFinder(num_training_steps=6, max_lr=0.2),
    "StochasticWeightAveraging": lambda: StochasticWeightAveraging(0.02, swa_epoch_start=1),
    "EMAWeightAveraging": lambda: EMAWeightAveraging(decay=0.8),
    "WeightAveraging": WeightAveraging,
}
WATCHING: dict[str, Callable[[], Callback]] = {
    "DeviceStatsMonitor": DeviceStatsMonitor,
    "LambdaCallback": lambda: LambdaCallback(on_train_epoch_start=lambda *_: None),
    "LearningRateMonitor": LearningRateMonitor,
    "RichModelSummary": RichModelSummary,
    "RichProgressBar": RichProgressBar,
    "SpikeDetection": lambda: SpikeDetection(window=3, warmup=3, finite_only=True),
    "ThroughputMonitor": lambda: ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0])),
    "Timer": lambda: Timer(timedelta(hours=1)),
}
OTHERS = {
    *("Callback", "Checkpoint", "ProgressBar"),  # base classes
    *("ModelSummary", "TQDMProgressBar"),  # of which a Trainer has one, as of those with colours
    *("BasePredictionWriter", "ModelCheckpoint", "ModelPruning", "OnExceptionCheckpoint"),
}


def test_none_is_missing() -> None:
    names = set(lightning.pytorch.callbacks.__all__)
    assert {*CALLBACKS, *WATCHING, *OTHERS} == names


@pytest.mark.parametrize("name", [*CALLBACKS, "all that watch", "plain"])
@pytest.mark.filterwarnings("ignore:When using the `ThroughputMonitor`")
def test_parameters_metrics_and_learning_rates(tmp_path: Path, name: str) -> None:
    runs: list[Any] = []
    strategies: list[Any] = ["auto", RoundPipeStrategy()]
    if name == "BaseFinetuning":
        strategies.append(EmulatedStrategy())
    watches = name == "all that watch"
    kinds = list(WATCHING.values()) if watches else [CALLBACKS[name]] if name in CALLBACKS else []
    for strategy in strategies:
        torch.manual_seed(3)
        module, seen = Tunable(), Everything()
        trainer = make_trainer(
            tmp_path,
            strategy=strategy,
            devices=1 if strategy == "auto" else 2,
            max_epochs=3,
            callbacks=[*(make() for make in kinds), seen],
            logger=CSVLogger(tmp_path / str(len(runs)), version=0),
            enable_progress_bar=watches or name == "plain",
            enable_model_summary=watches or name == "plain",
        )
        trainer.fit(module)
        runs.append((module, trainer, seen))
    (expected, one, noted), *others = runs
    for module, many, seen in others:
        assert parameter_error(module, expected) < 1e-4
        assert many.global_step == one.global_step
        assert (module.lr, module.batch_size) == pytest.approx((expected.lr, expected.batch_size))
        assert len(seen.seen) == len(noted.seen)
        for values, wanted in zip(seen.seen, noted.seen, strict=True):
            assert values.keys() == wanted.keys()
            assert list(values.values()) == pytest.approx(list(wanted.values()), rel=1e-3, abs=1e-5)


class Uploads(DummyLogger):
    """Reads every checkpoint that it is told of, as loggers do that upload them."""

    def __init__(self) -> None:
        super().__init__()
        self.uploaded: list[str] = []
        self.sizes: list[int] = []

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        for path in checkpoint_callback.best_k_models or {checkpoint_callback.last_model_path: 0}:
            self.sizes.append(len(torch.load(path)["state_dict"]))
            self.uploaded.append(Path(path).name)


def test_loggers_find_the_checkpoints_that_were_chosen(tmp_path: Path) -> None:
    runs: list[Any] = []
    for strategy in ("auto", RoundPipeStrategy()):
        torch.manual_seed(3)
        logger = Uploads()
        folder = tmp_path / str(len(runs))
        chooser = ModelCheckpoint(
            folder, monitor="val_loss", save_top_k=2, filename="{epoch}", every_n_epochs=1
        )
        trainer = make_trainer(
            tmp_path,
            strategy=strategy,
            callbacks=[chooser],
            enable_checkpointing=True,
            logger=logger,
            max_epochs=4,
        )
        trainer.fit(Tunable())
        kept = sorted(path.name for path in folder.iterdir())
        runs.append((logger.uploaded, logger.sizes, kept, Path(chooser.best_model_path).name))
    assert runs[1] == runs[0]
    assert len(runs[0][0]) >= 4
    assert len(runs[0][2]) == 2


def test_predictions_are_written_whole_and_in_order(tmp_path: Path) -> None:
    class Writer(BasePredictionWriter):
        def __init__(self, interval: Any) -> None:
            super().__init__(interval)
            self.written: list[Any] = []

        def write_on_batch_end(
            self,
            trainer: Trainer,
            pl_module: LightningModule,
            prediction: Any,
            batch_indices: Any,
            batch: Any,
            batch_idx: int,
            dataloader_idx: int,
        ) -> None:
            self.written.append((batch_idx, batch_indices, prediction))

        def write_on_epoch_end(
            self,
            trainer: Trainer,
            pl_module: LightningModule,
            predictions: Any,
            batch_indices: Any,
        ) -> None:
            self.written.append((batch_indices, list(predictions)))

    module = Regressor()
    runs = []
    strategies: list[Any] = ["auto", RoundPipeStrategy(), EmulatedStrategy()]
    for strategy in strategies:
        devices = 1 if strategy == "auto" else 3
        writer = Writer("batch_and_epoch")
        trainer = make_trainer(tmp_path, strategy=strategy, devices=devices, callbacks=[writer])
        trainer.predict(module, regression_data(19), return_predictions=False)
        runs.append(writer.written)
    for written in runs[1:]:
        torch.testing.assert_close(written, runs[0], rtol=0, atol=0)
    assert [part[1] for part in runs[0][:-1]] == [
        list(range(8)),
        list(range(8, 16)),
        list(range(16, 19)),
    ]


@pytest.mark.parametrize("where", ["head", "layers.1.inner"])
def test_pruning(tmp_path: Path, where: str) -> None:
    """Pruning puts a mask before a parameter, which is another one then."""
    modules = []
    for strategy in ("auto", RoundPipeStrategy()):
        torch.manual_seed(3)
        module = Regressor()
        pruned: Any = module.get_submodule(where)
        pruning = ModelPruning(
            "l1_unstructured", parameters_to_prune=[(pruned, "weight")], amount=0.5
        )
        trainer = make_trainer(tmp_path, strategy=strategy, callbacks=[pruning], max_epochs=2)
        trainer.fit(module, regression_data())
        modules.append(module)
    assert parameter_error(modules[1], modules[0]) < 1e-5
    pruned = modules[1].get_submodule(where)
    assert float((pruned.weight == 0).float().mean()) > 0.4


@pytest.mark.filterwarnings("ignore:`.fit.ckpt_path=None.` was called without a model")
@pytest.mark.filterwarnings("ignore:.fit.ckpt_path=.last.. is set, but there is no last")
def test_an_error_leaves_a_checkpoint_of_the_batch_before(tmp_path: Path) -> None:
    class Failing(Regressor):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 2:
                raise RuntimeError("mine")
            return super().training_step(batch, batch_idx)

    saved: list[Any] = []
    for strategy in ("auto", RoundPipeStrategy(dry_run=False)):
        torch.manual_seed(3)
        callback = OnExceptionCheckpoint(tmp_path, filename=f"stopped_{len(saved)}")
        trainer = make_trainer(
            tmp_path, strategy=strategy, callbacks=[callback], enable_checkpointing=True
        )
        with pytest.raises(RuntimeError, match="mine"):
            trainer.fit(Failing(), regression_data())
        saved.append(torch.load(tmp_path / f"stopped_{len(saved)}.ckpt"))
    assert saved[1]["global_step"] == saved[0]["global_step"] == 2
    torch.testing.assert_close(saved[1]["state_dict"], saved[0]["state_dict"])


def test_spikes_are_found(tmp_path: Path) -> None:
    class Spiking(Regressor):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss * float("nan") if batch_idx == 2 else loss

    for strategy in ("auto", RoundPipeStrategy()):
        trainer = make_trainer(
            tmp_path,
            strategy=strategy,
            callbacks=[SpikeDetection(window=2, warmup=1, exclude_batches_path=tmp_path / "x")],
        )
        logging.getLogger("lightning").setLevel("ERROR")
        with pytest.raises(TrainingSpikeException):
            trainer.fit(Spiking(), regression_data())
        assert trainer.global_step == 3
