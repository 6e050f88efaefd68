from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from roundpipe_lightning import linear_cross_entropy
from roundpipe_lightning.models.losses.lazy_logits import LossMode
from roundpipe_lightning.strategy.strategy import RoundPipeStrategy
from roundpipe_lightning.testing import EmulatedStrategy
from tests.kit.architectures import build_model
from tests.kit.engine import VOCABULARY
from tests.kit.training import make_trainer

NUM_STEPS = 2
TOKENS = 10


class _LanguageModel(LightningModule):
    """A model of transformers and its own loss; what else is done with the logits is a switch."""

    def __init__(self, name: str = "gemma2", *, returns_logits: bool = False) -> None:
        super().__init__()
        options: dict[str, Any] = {"n_layer": 2}
        if name == "gemma2":
            options = {"num_hidden_layers": 2, "final_logit_softcapping": 3.0}
        self.model = build_model(name, **options)
        self.returns_logits = returns_logits
        self.returned: list[Tensor] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        output = self.model(**batch, use_cache=False)
        self.log("loss", output.loss, on_step=False, on_epoch=True)
        if self.returns_logits:
            return {"loss": output.loss, "logits": output.logits.detach()}
        return output.loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.returns_logits:
            self.returned.append(outputs["logits"])

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch, use_cache=False).loss)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return self.model(**batch, use_cache=False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class _CallsIt(_LanguageModel):
    """Calls the function itself, with labels that were brought to another worker."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        hidden = self.model.model(batch["input_ids"], batch["attention_mask"]).last_hidden_state
        return linear_cross_entropy(
            hidden[:, :-1], self.model.lm_head.weight, batch["labels"][:, 1:], softcap=3.0
        )


class _Sentences(Dataset[dict[str, Tensor]]):
    """Sentences of different lengths, padded; the padding has no target."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(4)
        shape = (8 * NUM_STEPS, TOKENS)
        self.ids = torch.randint(3, VOCABULARY, shape, generator=generator)
        self.lengths = torch.randint(3, TOKENS + 1, (len(self.ids),), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        present = torch.arange(TOKENS) < self.lengths[index]
        ids = self.ids[index].where(present, 0)
        return {
            "input_ids": ids,
            "attention_mask": present.long(),
            "labels": ids.where(present, -100),
        }


def _sentences() -> DataLoader[dict[str, Tensor]]:
    return DataLoader(_Sentences(), batch_size=8)


def _trained(
    strategy: RoundPipeStrategy,
    module: _LanguageModel | None = None,
    *,
    devices: int = 3,
    precision: Any = "32-true",
) -> tuple[_LanguageModel, dict[str, float]]:
    module = module or _LanguageModel()
    trainer = make_trainer(strategy=strategy, devices=devices, max_epochs=1, precision=precision)
    trainer.fit(module, _sentences(), _sentences())
    return module, {key: float(value) for key, value in trainer.callback_metrics.items()}


def _distance(a: LightningModule, b: LightningModule) -> float:
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return max(float((x - y).detach().abs().max()) for x, y in pairs)


@pytest.mark.parametrize(
    ("kind", "name"), [(EmulatedStrategy, "gemma2"), (RoundPipeStrategy, "gpt2")]
)
def test_fused_losses_train_as_the_model_s_own(kind: type[RoundPipeStrategy], name: str) -> None:
    own, metrics = _trained(
        RoundPipeStrategy(num_microbatches=1, loss="eager"), _LanguageModel(name), devices=1
    )
    strategy = kind(num_microbatches=4, microbatching="step", loss="fused")
    fused, fused_metrics = _trained(strategy, _LanguageModel(name))
    report = strategy.fused_losses
    assert report is not None
    assert (
        report.num_fused == NUM_STEPS * 4 + NUM_STEPS + 2
    )  # microbatches, validation, its dry run
    assert report.made == {}
    assert _distance(fused, _LanguageModel(name)) > 1e-2
    assert _distance(fused, own) < 1e-5
    assert fused_metrics == pytest.approx(metrics, rel=1e-5)


def test_a_module_may_call_it() -> None:
    own = _trained(
        RoundPipeStrategy(num_microbatches=1, loss="eager"), _LanguageModel(), devices=1
    )[0]
    strategy = EmulatedStrategy(num_microbatches=4)
    called = _trained(strategy, _CallsIt())[0]
    assert _distance(called, own) < 1e-5


def test_small_logits_are_left_alone_by_default() -> None:
    strategy = RoundPipeStrategy(num_microbatches=4)
    auto, metrics = _trained(strategy)
    own, own_metrics = _trained(RoundPipeStrategy(num_microbatches=4, loss="eager"))
    assert strategy.fused_losses is not None
    assert strategy.fused_losses.num_fused == 0
    assert _distance(auto, own) == 0
    assert metrics == own_metrics


def test_mixed_precision() -> None:
    runs = {}
    modes: list[LossMode] = ["eager", "fused"]
    for mode in modes:
        strategy = RoundPipeStrategy(num_microbatches=4, loss=mode)
        runs[mode] = _trained(strategy, precision="bf16-mixed")
    (own, metrics), (fused, fused_metrics) = runs["eager"], runs["fused"]
    assert _distance(fused, own) < 0.02
    assert fused_metrics == pytest.approx(metrics, rel=1e-2)


def test_logits_that_are_returned_are_the_plain_ones() -> None:
    modules = []
    modes: list[LossMode] = ["eager", "fused"]
    for mode in modes:
        strategy = EmulatedStrategy(num_microbatches=2, loss=mode)
        module = _LanguageModel(returns_logits=True)
        modules.append(_trained(strategy, module, devices=2)[0])
    own, fused = modules
    assert all(type(logits) is Tensor for logits in fused.returned)
    assert torch.equal(fused.returned[0], own.returned[0])
    assert _distance(fused, own) < 1e-5


def test_predictions_are_the_plain_ones() -> None:
    outputs = []
    modes: list[LossMode] = ["eager", "fused"]
    for mode in modes:
        strategy = EmulatedStrategy(num_microbatches=4, loss=mode)
        trainer = make_trainer(strategy=strategy, devices=2)
        outputs.append(trainer.predict(_LanguageModel(), _sentences()))
    for own, fused in zip(*outputs, strict=True):
        assert type(fused.logits) is Tensor
        assert torch.equal(fused.logits, own.logits)
        torch.testing.assert_close(fused.loss, own.loss)
