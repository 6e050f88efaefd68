"""A run that was stopped and resumed ends where one ends that was not."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.nn import functional
from torch.utils.data import ConcatDataset, DataLoader

from roundpipe_lightning.errors import CheckpointError
from roundpipe_lightning.strategy.resume.randomness import random_state, set_random_state
from roundpipe_lightning.strategy.strategy import RoundPipeStrategy
from tests.kit.training import (
    QUIET,
    Regressor,
    make_trainer,
    regression_data,
    same_bits,
)

pytestmark = [
    *(pytest.mark.filterwarnings(line) for line in QUIET),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
]


class _Random(Regressor):
    """Draws random numbers of every kind: dropout, noise, augmentation on the host."""

    def __init__(self) -> None:
        super().__init__("adamw", dropout=0.3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = functional.mse_loss(self(x + 0.1 * torch.randn_like(x)), y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        batch[0].add_(random.random() * 0.1 + float(np.random.rand()) * 0.1)  # noqa: NPY002

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def _fit(folder: Path, *, seed: int, num_epochs: int, path: Path | None = None) -> _Random:
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)
    module = _Random()
    trainer = make_trainer(
        folder,
        strategy=RoundPipeStrategy(num_microbatches=4),
        devices=2,
        callbacks=[ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)],
        enable_checkpointing=True,
        max_epochs=num_epochs,
        accumulate_grad_batches=2,
    )
    trainer.fit(module, regression_data(shuffle=True), regression_data(8), ckpt_path=path)
    return module


def test_resume_is_exact(tmp_path: Path) -> None:
    expected = _fit(tmp_path / "whole", seed=1, num_epochs=4)
    _fit(tmp_path / "part", seed=1, num_epochs=2)
    module = _fit(tmp_path / "rest", seed=99, num_epochs=4, path=tmp_path / "part" / "epoch=1.ckpt")
    assert same_bits(module, expected)


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")
def test_resume_from_the_middle_of_an_epoch_draws_the_same_dropout(tmp_path: Path) -> None:
    """The data's order is the loader's own matter; it is fixed here."""

    class Save(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            if trainer.global_step == 6:
                trainer.save_checkpoint(tmp_path / "middle.ckpt")

    class Skip(Regressor):
        def __init__(self) -> None:
            super().__init__(dropout=0.5)
            self.order: list[int] = []

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.order.append(batch_idx)

    modules = []
    for path in (None, tmp_path / "middle.ckpt"):
        torch.manual_seed(5 if path is None else 6)
        module = Skip()
        trainer = make_trainer(tmp_path, strategy="roundpipe", devices=2, callbacks=[Save()])
        same_batches: Any = ConcatDataset([regression_data(8).dataset] * 4)
        trainer.fit(module, DataLoader(same_batches, batch_size=8), ckpt_path=path)
        modules.append(module)
    assert modules[1].order[:2] == [2, 3]
    assert same_bits(modules[1], modules[0])


def test_random_state_is_restored_for_training_only(tmp_path: Path) -> None:
    _fit(tmp_path, seed=1, num_epochs=1)
    path = tmp_path / "epoch=0.ckpt"
    make_trainer(tmp_path, strategy="roundpipe").validate(
        _Random(), regression_data(8), ckpt_path=path
    )
    saved = torch.load(path, weights_only=True)["roundpipe"]["random_state"]["torch"]
    assert not torch.equal(torch.get_rng_state(), saved)


def test_checkpoint_of_a_newer_version(tmp_path: Path) -> None:
    _fit(tmp_path, seed=1, num_epochs=1)
    path = tmp_path / "epoch=0.ckpt"
    checkpoint = torch.load(path)
    checkpoint["roundpipe"]["format_version"] = 99
    torch.save(checkpoint, path)
    with pytest.raises(CheckpointError, match="format_version=99"):
        _fit(tmp_path, seed=1, num_epochs=2, path=path)


def test_random_state_round_trips(tmp_path: Path) -> None:
    random.gauss(0, 1)  # leaves a second number behind
    np.random.standard_normal()  # noqa: NPY002 - likewise
    torch.save(random_state(), tmp_path / "state.pt")

    def draw() -> list[float]:
        return [
            random.gauss(0, 1),
            random.random(),
            float(np.random.standard_normal()),  # noqa: NPY002
            float(np.random.rand()),  # noqa: NPY002
            float(torch.rand(())),
        ]

    expected = draw()
    draw()
    set_random_state(torch.load(tmp_path / "state.pt", weights_only=True))
    assert draw() == expected


def test_steps_leave_the_hosts_generator_to_the_data(tmp_path: Path) -> None:
    """Dropout in the model changes nothing about the order in which the data is shuffled."""
    orders = []
    for dropout in (0.0, 0.5):
        seen: list[Tensor] = []
        torch.manual_seed(7)
        module = Regressor(dropout=dropout, on_step=lambda m, b, i: seen.append(b[0].clone()))  # noqa: B023
        torch.manual_seed(8)
        trainer = make_trainer(
            tmp_path, strategy=RoundPipeStrategy(num_microbatches=1), max_epochs=3
        )
        trainer.fit(module, regression_data(shuffle=True))
        orders.append(torch.cat(seen))
    assert torch.equal(orders[0], orders[1])
