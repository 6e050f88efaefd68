import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from roundpipe_lightning.errors import PlanError
from roundpipe_lightning.planning.schedule.plan import Plan
from roundpipe_lightning.strategy.strategy import RoundPipeStrategy
from tests.engine.test_chain import EncoderDecoder
from tests.kit.engine import WIDTH, Regressor
from tests.kit.training import make_trainer

NUM_STEPS = 3


class Fitted(LightningModule):
    """Trains any of the engine tests' modules by plain gradient descent."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.inner.training_step(batch, batch_idx)  # type: ignore[no-any-return]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validated", self.inner.training_step(batch, batch_idx))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Preferring(Regressor):
    """Two branches and a reference without gradients."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        with torch.no_grad():
            reference = self(x)
        better, worse = self(x), self(-x)
        return functional.mse_loss(better - reference, y) + functional.mse_loss(worse, -y)


def _inputs() -> Tensor:
    return torch.randn(4 * NUM_STEPS, WIDTH, generator=torch.Generator().manual_seed(0))


def _fit(inner: nn.Module, **options: Any) -> tuple[Trainer, Fitted]:
    module, x = Fitted(inner), _inputs()
    data = DataLoader(TensorDataset(x, x.sum(-1)), batch_size=4)
    strategy = RoundPipeStrategy(num_microbatches=2, microbatching="step", **options)
    trainer = make_trainer(strategy=strategy, devices=2, max_epochs=1)
    trainer.fit(module, data, data)
    return trainer, module


def _plainly(inner: Any) -> Any:
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
    for batch in _inputs().split(4):
        optimizer.zero_grad()
        for part in batch.split(2):
            (inner.training_step((part, part.sum(-1)), 0) / 2).backward()
        optimizer.step()
    return inner


def _check(folder: Path, inner: nn.Module, names: list[str]) -> Plan:
    plain = _plainly(copy.deepcopy(inner))
    trainer, module = _fit(inner)
    for (name, got), want in zip(module.inner.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7, msg=name)
    strategy: Any = trainer.strategy
    plan: Plan = strategy.plan
    assert list(plan.block_names) == names
    return plan


def test_an_encoder_and_a_decoder(tmp_path: Path) -> None:
    names = [f"inner.encoder.{i}" for i in range(3)] + [f"inner.decoder.{i}" for i in range(4)]
    plan = _check(tmp_path, EncoderDecoder(), names)
    assert plan.num_workers == 2
    with pytest.raises(PlanError, match=r"model has cuts at \(3,\).*no stage spans one"):
        _fit(EncoderDecoder(), recompute="none")


def test_three_calls_of_a_stack(tmp_path: Path) -> None:
    layers = [f"inner.layers.{i}" for i in range(3)]
    names = layers + [f"{n}#2" for n in layers] + [f"{n}#3" for n in layers]
    plan = _check(tmp_path, Preferring(3), names)
    plain = _plainly(Preferring(3))
    for _ in range(2):  # a plan for the three calls, from the first step on
        _, module = _fit(Preferring(3), plan=plan)
        for got, want in zip(module.inner.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)
