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
from tests.kit.comparison import assert_close, compare, on_each
from tests.kit.training import Regressor, regression_data


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
ON_DEVICES = ("BaseFinetuning", "LearningRateFinder")
OTHERS = {
    *("Callback", "Checkpoint", "ProgressBar"),  # base classes
    *("ModelSummary", "TQDMProgressBar"),  # of which a Trainer has one, as of those with colours
    *("BasePredictionWriter", "ModelCheckpoint", "ModelPruning", "OnExceptionCheckpoint"),
}


def test_none_is_missing() -> None:
    names = set(lightning.pytorch.callbacks.__all__)
    assert {*CALLBACKS, *WATCHING, *OTHERS} == names


@pytest.mark.suite(
    "LearningRateFinder",
    "BaseFinetuning",
    "BatchSizeFinder",
    "all that watch",
    "EarlyStopping",
    "plain",
    "EMAWeightAveraging",
    "StochasticWeightAveraging",
    "GradientAccumulationScheduler",
)
@pytest.mark.parametrize("name", [*CALLBACKS, "all that watch", "plain"])
@pytest.mark.filterwarnings("ignore:When using the `ThroughputMonitor`")
def test_parameters_metrics_and_learning_rates(tmp_path: Path, name: str) -> None:
    watches = name == "all that watch"
    kinds = list(WATCHING.values()) if watches else [CALLBACKS[name]] if name in CALLBACKS else []

    def run(trainer: Trainer, module: Tunable) -> Any:
        trainer.fit(module)
        (noted,) = (c for c in trainer.callbacks if isinstance(c, Everything))  # type: ignore[attr-defined]
        return [float(module.lr), float(module.batch_size)], noted.seen

    one, *others = compare(
        tmp_path,
        Tunable,
        run,
        kinds=[RoundPipeStrategy, *([EmulatedStrategy] if name in ON_DEVICES else [])],
        tolerance=1e-4,
        max_epochs=3,
        callbacks=lambda: [*(make() for make in kinds), Everything()],
        logger=lambda: CSVLogger(tmp_path),
        enable_progress_bar=watches or name == "plain",
        enable_model_summary=watches or name == "plain",
    )
    for other in others:
        assert_close(other.result, one.result, tolerance=1e-3)


class Uploads(DummyLogger):
    """Reads every checkpoint that it is given, as loggers do that upload them."""

    def __init__(self) -> None:
        super().__init__()
        self.uploaded: list[str] = []
        self.sizes: list[int] = []

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        for path in checkpoint_callback.best_k_models or {checkpoint_callback.last_model_path: 0}:
            self.sizes.append(len(torch.load(path)["state_dict"]))
            self.uploaded.append(Path(path).name)


def test_loggers_find_the_checkpoints_that_were_chosen(tmp_path: Path) -> None:
    def run(trainer: Trainer, module: Tunable) -> Any:
        trainer.fit(module)
        chooser: Any = trainer.checkpoint_callback
        logger: Any = trainer.logger
        kept = sorted(path.name for path in Path(chooser.dirpath).iterdir())
        return logger.uploaded, logger.sizes, kept, Path(chooser.best_model_path).name

    folders = (str(number) for number in range(2))
    one, other = compare(
        tmp_path,
        Tunable,
        run,
        callbacks=lambda: [
            ModelCheckpoint(
                tmp_path / next(folders), monitor="val_loss", save_top_k=2, filename="{epoch}"
            )
        ],
        enable_checkpointing=True,
        logger=Uploads,
        max_epochs=4,
    )
    assert other.result == one.result
    assert len(one.result[0]) >= 4
    assert len(one.result[2]) == 2


class Writer(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.written: list[Any] = []

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, *rest: Any) -> None:
        indices, _, number, _ = rest
        self.written.append([number, list(indices), prediction])

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
        self.written.append([indices, list(predictions)])


def test_predictions_are_written_whole_and_in_order(tmp_path: Path) -> None:
    def run(trainer: Trainer, module: Any) -> Any:
        trainer.predict(module, regression_data(19), return_predictions=False)
        (writer,) = (c for c in trainer.callbacks if isinstance(c, Writer))  # type: ignore[attr-defined]
        return writer.written

    kinds = (RoundPipeStrategy, EmulatedStrategy)
    one, *others = compare(
        tmp_path, Regressor, run, kinds=kinds, devices=3, callbacks=lambda: [Writer()]
    )
    for other in others:
        assert_close(other.result, one.result, tolerance=0.0)
    rows = [list(range(8)), list(range(8, 16)), list(range(16, 19))]
    assert [part[1] for part in one.result[:-1]] == rows


@pytest.mark.filterwarnings("ignore:Block 'layers.1' runs on the whole batch")
@pytest.mark.parametrize("where", ["head", "layers.1.inner"])
def test_pruning(tmp_path: Path, where: str) -> None:
    """Pruning puts a mask before a parameter, which is another one then."""

    def run(trainer: Trainer, module: Any) -> float:
        pruned = [(module.get_submodule(where), "weight")]
        pruning = ModelPruning("l1_unstructured", parameters_to_prune=pruned, amount=0.5)
        trainer.callbacks.append(pruning)  # type: ignore[attr-defined]
        trainer.fit(module, regression_data())
        return float((module.get_submodule(where).weight == 0).float().mean())

    assert compare(tmp_path, Regressor, run, max_epochs=2)[1].result > 0.4


def test_spikes_are_found(tmp_path: Path) -> None:
    class Spiking(Regressor):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss * float("nan") if batch_idx == 2 else loss

    def run(trainer: Trainer, module: Any) -> int:
        with pytest.raises(TrainingSpikeException):
            trainer.fit(module, regression_data())
        return trainer.global_step

    logging.getLogger("lightning").setLevel("ERROR")
    found = on_each(
        tmp_path,
        Spiking,
        run,
        callbacks=lambda: [SpikeDetection(window=2, warmup=1, exclude_batches_path=tmp_path / "x")],
    )
    assert [outcome.result for outcome in found] == [3, 3]
