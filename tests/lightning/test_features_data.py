from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from roundpipe_lightning.errors import BatchError
from roundpipe_lightning.strategy.strategy import RoundPipeStrategy
from roundpipe_lightning.testing import EmulatedStrategy
from tests.kit.comparison import assert_close, compare
from tests.kit.training import Regressor, make_trainer, regression_data


class Combined(Regressor):
    """Learns from every loader that gave a batch, and notes what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        parts = batch.values() if isinstance(batch, dict) else batch
        self.seen.append((batch_idx, [None if part is None else len(part[0]) for part in parts]))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        parts = batch.values() if isinstance(batch, dict) else batch
        losses = [functional.mse_loss(self(x), y) for x, y in (p for p in parts if p is not None)]
        loss = torch.stack(losses).sum()
        size = sum(len(part[0]) for part in parts if part is not None)
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=size)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen.append(("val", batch_idx, dataloader_idx))
        x, y = batch if not isinstance(batch, dict) else batch["a"] or batch["b"]
        self.log("val_loss", functional.mse_loss(self(x), y), batch_size=len(x))
        only = f"only_{dataloader_idx}"
        self.log(only, functional.l1_loss(self(x), y), batch_size=len(x), add_dataloader_idx=False)


@pytest.mark.suite("max_size_cycle-6-auto", "min_size-8-2", "max_size-8-1", "max_size-6-2")
@pytest.mark.parametrize(
    ("mode", "other", "num_microbatches"),
    [
        *((mode, 8, num) for mode in ("min_size", "max_size_cycle", "max_size") for num in (1, 2)),
        *((mode, 6, num) for mode in ("max_size_cycle", "max_size") for num in (2, "auto")),
    ],
)
def test_combined_loaders(tmp_path: Path, mode: Any, other: int, num_microbatches: Any) -> None:
    """Of the same batch size, or of another one."""

    def fit(trainer: Trainer, module: Any) -> None:
        loaders = {"a": regression_data(24), "b": regression_data(2 * other, batch_size=other)}
        validation = {"a": regression_data(8), "b": regression_data(8, batch_size=2)}
        trainer.fit(module, CombinedLoader(loaders, mode), CombinedLoader(validation, mode))

    compare(tmp_path, Combined, fit, num_microbatches=num_microbatches, max_epochs=2)


def test_parts_that_cannot_be_divided_alike(tmp_path: Path) -> None:
    loaders = [regression_data(8), regression_data(5, batch_size=5)]
    strategy = RoundPipeStrategy(num_microbatches=2, microbatching="step")
    trainer = make_trainer(tmp_path, strategy=strategy, devices=2)
    with pytest.raises(BatchError, match=r"first dimensions of \[5, 8\].*microbatching='blocks'"):
        trainer.fit(Combined(), CombinedLoader(loaders, "min_size"))


def test_loaders_one_after_the_other(tmp_path: Path) -> None:
    """Lightning has this mode for evaluation only."""

    def run(trainer: Trainer, module: Any) -> Any:
        loaders = {"a": regression_data(12), "b": regression_data(4)}
        with pytest.raises(ValueError, match=r"does not support .*sequential"):
            trainer.fit(module, CombinedLoader(loaders, "sequential"))
        trainer.fit(module, [regression_data(8)], CombinedLoader(loaders, "sequential"))

    compare(tmp_path, Combined, run, num_microbatches=2)


def test_several_validation_loaders_and_predictions_in_order(tmp_path: Path) -> None:
    class Predicting(Combined):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step([batch], batch_idx)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            pass

        def predict_step(  # type: ignore[override]
            self, batch: Any, batch_idx: int, dataloader_idx: int = 0
        ) -> dict[str, Any]:
            return {"y": self(batch[0]), "place": (dataloader_idx, batch_idx)}

    def run(trainer: Trainer, module: Any) -> Any:
        trainer.fit(module, regression_data(), [regression_data(8), regression_data(13)])
        return trainer.predict(module, [regression_data(9), regression_data(17, batch_size=3)])

    kinds = (RoundPipeStrategy, EmulatedStrategy)
    one, *others = compare(tmp_path, Predicting, run, kinds=kinds, num_microbatches=2)
    assert [[p["place"] for p in part] for part in one.result] == [
        [(0, 0), (0, 1)],
        [(1, index) for index in range(6)],
    ]
    for other in others:
        assert_close(other.result, one.result, tolerance=1e-4)
        assert all(p["y"].device.type == "cpu" for part in other.result for p in part)


class Fetching(Regressor):
    """Takes two batches a step; the loader ends within one."""

    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        (x, y), _, _ = next(dataloader_iter)
        first = functional.mse_loss(self(x), y)
        (x, y), _, _ = next(dataloader_iter)
        loss = functional.mse_loss(self(x), y) + first
        with pytest.raises(MisconfigurationException, match="batch_size"):
            self.log("loss", loss)
        self.log("loss", loss, batch_size=len(x))
        return loss


@pytest.mark.filterwarnings("ignore:.*dataloader_iter")
@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter`")
def test_steps_that_fetch_their_own_batches(tmp_path: Path) -> None:
    def fit(trainer: Trainer, module: Any) -> None:
        trainer.fit(module, regression_data(20))  # five batches

    compare(tmp_path, Fetching, fit, num_microbatches=2, max_epochs=2)


class _Stream(IterableDataset[Any]):
    """Samples without a known number."""

    def __iter__(self) -> Iterator[Any]:
        data: Any = regression_data(27).dataset
        return (data[index] for index in range(len(data)))


def test_data_without_a_length(tmp_path: Path) -> None:
    def fit(trainer: Trainer, module: Any) -> None:
        trainer.fit(module, DataLoader(_Stream(), batch_size=8), regression_data(8))

    compare(tmp_path, Regressor, fit, val_check_interval=2, max_steps=7, max_epochs=-1)


class _Module(LightningDataModule):
    """Grows by a batch whenever its training loader is made anew."""

    def __init__(self) -> None:
        super().__init__()
        self.made = 0
        self.stages: list[str] = []

    def setup(self, stage: str) -> None:
        self.stages.append(stage)

    def train_dataloader(self) -> Any:
        self.made += 1
        return regression_data(8 * self.made)

    def val_dataloader(self) -> Any:
        return regression_data(8)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [part * 1.5 for part in batch]


def test_loaders_that_are_made_anew(tmp_path: Path) -> None:
    def run(trainer: Trainer, module: Any) -> Any:
        data = _Module()
        trainer.fit(module, datamodule=data)
        trainer.validate(module, datamodule=data, verbose=False)
        return data.made, data.stages, data.trainer is trainer

    options: dict[str, Any] = {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 3}
    for outcome in compare(tmp_path, Regressor, run, num_microbatches=2, **options):
        assert outcome.result == (3, ["fit", "validate"], True)


class _Position(Callback):
    """Saves in the middle of an epoch, and notes which samples are trained on."""

    def __init__(self, path: Path, *, save_after: int | None) -> None:
        self.path = path
        self.save_after = save_after
        self.samples: list[float] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        self.samples += batch[0][:, 0].tolist()
        if trainer.global_step == self.save_after:
            trainer.save_checkpoint(self.path)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_stateful_loader_goes_on_where_it_was(tmp_path: Path, num_workers: int) -> None:
    """torchdata's loader: a resumed run trains on the samples that were left, each once."""

    def loader() -> Any:
        data: Any = regression_data(32).dataset
        return StatefulDataLoader(data, batch_size=8, shuffle=True, num_workers=num_workers)

    runs: list[list[float]] = []
    for make in (lambda: "auto", lambda: RoundPipeStrategy(num_microbatches=2)):
        torch.manual_seed(3)
        path = tmp_path / f"{len(runs)}.ckpt"
        whole = _Position(path, save_after=2)
        trainer = make_trainer(tmp_path, strategy=make(), callbacks=[whole], max_epochs=1)
        trainer.fit(Regressor(), loader())
        torch.manual_seed(4)
        rest = _Position(path, save_after=None)
        trainer = make_trainer(tmp_path, strategy=make(), callbacks=[rest], max_epochs=1)
        trainer.fit(Regressor(), loader(), ckpt_path=path)
        assert rest.samples == whole.samples[16:]
        runs.append(whole.samples)
    assert runs[1] == runs[0]
    assert len(set(runs[0])) == 32


LIMITS: dict[str, dict[str, Any]] = {
    "batches": {"limit_train_batches": 3, "limit_val_batches": 1, "num_sanity_val_steps": 0},
    "shares": {"limit_train_batches": 0.5, "limit_val_batches": 0.5, "num_sanity_val_steps": -1},
    "no validation": {"limit_val_batches": 0, "use_distributed_sampler": False},
    "validation at shares of an epoch": {
        "val_check_interval": 0.5, "min_epochs": 2, "max_epochs": 3,
    },
    "validation every third batch": {
        "val_check_interval": 3, "check_val_every_n_epoch": None, "min_steps": 6, "max_epochs": 3,
    },
    "validation every second epoch": {"check_val_every_n_epoch": 2, "max_epochs": 4},
    "the same batches again": {"overfit_batches": 2},
    "a share of the batches again": {"overfit_batches": 0.5},
    "a development run": {"fast_dev_run": 3},
    "steps": {"max_steps": 5, "max_epochs": -1},
    "no epoch": {"max_epochs": 0},
    "windows that end early": {"accumulate_grad_batches": 3, "limit_train_batches": 4},
    "tests and predictions": {"limit_test_batches": 2, "limit_predict_batches": 3},
}  # fmt: skip


@pytest.mark.suite(
    "validation at shares of an epoch",
    "validation every third batch",
    "windows that end early",
    "steps",
    "a share of the batches again",
    "no epoch",
    "a development run",
)
@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.filterwarnings("ignore:You requested to overfit")
def test_limits(tmp_path: Path, name: str) -> None:
    class Counting(Regressor):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Any] = []

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.seen.append(("train", batch_idx, float(batch[0].sum())))

        def on_validation_batch_start(
            self, batch: Any, batch_idx: int, dataloader_idx: int = 0
        ) -> None:
            self.seen.append(("val", batch_idx))

    def run(trainer: Trainer, module: Any) -> int:
        trainer.fit(module, regression_data(shuffle=True), regression_data(12))
        if name != "tests and predictions":
            return 3
        trainer.test(module, regression_data(), verbose=False)
        return len(trainer.predict(module, regression_data()) or ())

    options = {"max_epochs": 2, **LIMITS[name]}
    for outcome in compare(tmp_path, Counting, run, num_microbatches=2, **options):
        assert outcome.result == 3
