"""Trainings whose user code runs once: the same as on one device, logs and metrics included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics import MeanSquaredError
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from roundpipe_lightning.strategy.one_step import OneStepRuntime
from roundpipe_lightning.strategy.strategy import RoundPipeStrategy
from tests.kit.comparison import assert_close, compare
from tests.kit.training import (
    PaddedSequences,
    Regressor,
    make_trainer,
    regression_data,
    train_alike,
)


@pytest.fixture(autouse=True)
def _runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROUNDPIPE_ONE_STEP", "1")


class Counting(Regressor):
    """Logs, a metric, an attribute and random numbers, as a step on one device has them."""

    def __init__(self) -> None:
        super().__init__(num_blocks=3)
        self.error = MeanSquaredError()
        self.num_calls = 0
        self.draws: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.num_calls += 1
        self.draws.append(torch.rand(()).item())
        output = self(batch[0])
        self.error(output.detach(), batch[1])
        self.log("error", self.error, on_step=True, on_epoch=True)
        loss = functional.mse_loss(output, batch[1])
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_logs_metrics_and_state_are_those_of_one_device(devices: int) -> None:
    one, two = compare(Counting, devices=devices, tolerance=1e-5, max_epochs=2)
    strategy: Any = two.trainer.strategy
    assert isinstance(strategy._fit_runtime, OneStepRuntime)
    assert one.module.num_calls == two.module.num_calls
    assert one.module.draws == two.module.draws
    assert_close(two.metrics, one.metrics, tolerance=1e-5)


class Experts(LightningModule):
    """A mixture of experts whose router logits transformers collects by hooks inside blocks."""

    def __init__(self) -> None:
        super().__init__()
        sizes: dict[str, Any] = {
            "vocab_size": 48,
            "hidden_size": 16,
            "intermediate_size": 24,
            "moe_intermediate_size": 8,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        }
        self.model: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, output_router_logits=True))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        output = self.model(**batch)
        self.log("router", output.aux_loss)
        loss: Tensor = output.loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_router_losses_of_hooks_inside_blocks_are_those_of_one_device() -> None:
    loader = torch.utils.data.DataLoader(PaddedSequences(16), batch_size=8)
    train_alike(
        Experts, RoundPipeStrategy(num_microbatches=4), data=loader, max_epochs=2, tolerance=1e-4
    )


def test_evaluation_and_prediction_use_all_workers() -> None:
    module = Regressor(num_blocks=2)
    trainer = make_trainer(strategy=RoundPipeStrategy(), devices=2)
    x, y = torch.randn(16, 8), torch.randn(16, 1)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8)
    (logged,) = trainer.validate(module, loader, verbose=False)
    predictions: Any = trainer.predict(module, loader)
    with torch.no_grad():
        expected = module(x)
    torch.testing.assert_close(torch.cat(predictions), expected)
    assert logged["val_loss"] == pytest.approx(functional.mse_loss(expected, y).item(), rel=1e-5)


def test_a_step_that_raises_leaves_nothing_behind() -> None:
    class Failing(Regressor):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if batch_idx == 1:
                raise ZeroDivisionError("as asked for")
            return loss

    module = Failing(num_blocks=2)
    trainer = make_trainer(strategy=RoundPipeStrategy(), devices=2)
    with pytest.raises(ZeroDivisionError, match="as asked for"):
        trainer.fit(module, regression_data(16, batch_size=4))
    assert all("forward" not in vars(layer) for layer in module.layers)


def test_a_block_s_error_names_the_block() -> None:
    module = Regressor(num_blocks=3)
    layer: Any = module.layers[1]
    layer.norm.register_forward_pre_hook(_fail_with_a_graph)
    trainer = make_trainer(strategy=RoundPipeStrategy(), devices=2)
    with pytest.raises(ZeroDivisionError, match="as asked for") as caught:
        trainer.fit(module, regression_data(16, batch_size=4))
    assert "layers.1" in " ".join(getattr(caught.value, "__notes__", ()))


def _fail_with_a_graph(module: nn.Module, args: Any) -> None:
    if torch.is_grad_enabled():
        raise ZeroDivisionError("as asked for")
