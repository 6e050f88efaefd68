"""Logged values are weighed by what a step has left of its batch, as on one device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, default_collate

from roundpipe_lightning.strategy.strategy import RoundPipeStrategy
from roundpipe_lightning.testing import EmulatedStrategy
from tests.kit.training import QUIET, Regressor, make_trainer, regression_data

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]


class _Takes(Regressor):
    """Takes what is no tensor, and a number that belongs to all samples, out of its batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        scale, texts = batch.pop("scale"), batch["more"].pop("texts")
        assert len(texts) == len(batch["x"])
        loss = functional.mse_loss(self(batch["x"]) * scale, batch["more"]["y"])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))


class _TakesByHand(_Takes):
    """Does so and steps its optimizer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        if self.training:
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss


KINDS = (RoundPipeStrategy, EmulatedStrategy)


def _named(samples: list[Any]) -> dict[str, Any]:
    x, y = default_collate(samples)
    texts = [f"sample {index}" for index in range(len(x))]
    return {"scale": torch.tensor(1.5), "x": x, "more": {"texts": texts, "y": y}}


class _Keeps(Callback):
    """Keeps the batches that hooks are given."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def on_train_batch_end(
        self, trainer: Trainer, module: Any, outputs: Any, batch: Any, *_: Any
    ) -> None:
        self.kept.append(batch)


@pytest.mark.parametrize("make", [_Takes, _TakesByHand])
def test_what_a_step_takes_out_is_not_looked_at(
    tmp_path: Path, make: Callable[[], Regressor]
) -> None:
    """Lightning warns of batches whose entries disagree about their size; here are none left."""
    runs = []
    count = 3 if make is _Takes else 1
    strategies: list[Any] = ["auto", *(k(num_microbatches=count) for k in KINDS)]
    for strategy in strategies:
        torch.manual_seed(3)
        keeps = _Keeps()
        trainer = make_trainer(tmp_path, strategy=strategy, max_epochs=1, callbacks=[keeps])
        data: Any = regression_data(20).dataset
        trainer.fit(
            make(),
            DataLoader(data, batch_size=8, collate_fn=_named),
            DataLoader(data, batch_size=7, collate_fn=_named),
        )
        runs.append({key: float(value) for key, value in trainer.callback_metrics.items()})
        if count > 1 and strategy != "auto":
            assert [list(batch) for batch in keeps.kept] == [["scale", "x", "more"]] * 3
    for metrics in runs[1:]:
        assert metrics == pytest.approx(runs[0], rel=1e-5)
