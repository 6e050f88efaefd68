import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, Trainer
from peft import LoraConfig
from torch import Tensor
from torch.utils.data import DataLoader

from roundpipe_lightning import RoundPipeStrategy
from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.modules import Adapters, ModelSource, SequenceClassificationModule
from tests.kit.architectures import TINY
from tests.kit.training import make_trainer

DEEP = {**TINY, "num_hidden_layers": 4, "initializer_range": 0.1}
ENCODER = {
    "model_type": "bert",
    "vocab_size": 264,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


class Texts(LightningDataModule):
    """Texts of different lengths; the class is whether the first token is small."""

    pad_token_id = 0

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(5)
        items = []
        for index in range(16):
            ids = torch.randint(1, 264, (8,), generator=generator)
            ids[5 + index % 4 :] = 0
            label = (ids[0] < 132).long()
            mask = (ids != 0).long()
            items.append({"input_ids": ids, "attention_mask": mask, "labels": label})
        return DataLoader(items, batch_size=8)  # type: ignore[arg-type]

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


def make(
    architecture: dict[str, Any] = DEEP, adapters: Adapters | None = None, **options: Any
) -> SequenceClassificationModule:
    return SequenceClassificationModule(
        ModelSource(architecture=architecture),
        classes=["large", "small"],
        optimizer=functools.partial(torch.optim.AdamW, lr=0.01),
        adapters=adapters,
        **options,
    )


@pytest.mark.parametrize("architecture", [DEEP, ENCODER], ids=["decoder", "encoder"])
def test_it_learns_the_same_on_any_number_of_workers(
    architecture: dict[str, Any], tmp_path: Path
) -> None:
    def run(folder: str, **options: Any) -> tuple[dict[str, Tensor], Trainer, Any]:
        module = make(architecture)
        used = make_trainer(tmp_path / folder, max_epochs=6, **options)
        used.fit(module, datamodule=Texts())
        return dict(used.callback_metrics), used, module

    expected, plain, module = run("plain", devices=1)
    strategy = RoundPipeStrategy(num_microbatches=3)
    found, _, _ = run("piped", devices=2, strategy=strategy)
    assert set(found) == {"train_loss", "train_accuracy", "val_loss", "val_accuracy"}
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=2e-3, atol=1e-4)
    assert expected["val_accuracy"] > 0.85
    [tested] = plain.test(module, datamodule=Texts(), verbose=False)
    assert tested["test_accuracy"] == pytest.approx(float(expected["val_accuracy"]))


def test_the_last_token_before_the_padding_decides(tmp_path: Path) -> None:
    module, used = make(), make_trainer(tmp_path)
    probabilities: Any = used.predict(module, datamodule=Texts())
    assert probabilities[0].shape == (8, 2)
    torch.testing.assert_close(probabilities[0].sum(dim=1), torch.ones(8))
    assert module.model is not None
    assert module.model.config.pad_token_id == 0
    batch = next(iter(Texts().train_dataloader()))
    ids = batch["input_ids"][0]
    alone = module.model(input_ids=ids[ids != 0][None]).logits.softmax(dim=-1)
    torch.testing.assert_close(probabilities[0][:1], alone.detach(), rtol=1e-4, atol=1e-6)


def test_classes_are_in_the_models_configuration() -> None:
    module = make(pad_token_id=7)
    module.configure_model()
    assert module.model is not None
    assert module.model.config.id2label == {0: "large", 1: "small"}
    assert module.model.config.pad_token_id == 7


def test_adapters_train_the_new_head_as_well() -> None:
    lora = Adapters(config=LoraConfig(r=2, target_modules=["q_proj"]))
    module = make(adapters=lora, pad_token_id=0)
    module.configure_model()
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    assert any("score" in name for name in trained)
    assert all("lora" in name or "score" in name for name in trained)


def test_classes_are_checked() -> None:
    for wrong in (["one"], ["one", "one"]):
        with pytest.raises(ConfigurationError, match=r"at least two classes, no name twice"):
            SequenceClassificationModule(
                ModelSource(architecture=TINY), classes=wrong, optimizer=torch.optim.AdamW
            )
