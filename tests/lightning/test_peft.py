from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig
from torch import Tensor
from torch.nn import functional

from roundpipe_lightning.strategy.strategy import RoundPipeStrategy
from roundpipe_lightning.testing import EmulatedStrategy
from tests.engine.test_peft import EXPERTS, Q_V, SOFT, adapted, base
from tests.kit.architectures import token_data
from tests.kit.comparison import compare


class Tuned(LightningModule):
    """Trains what peft has added, in plain Lightning."""

    def __init__(self, model: Any, *, prefers: bool = False) -> None:
        super().__init__()
        self.model = model
        self.prefers = prefers

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        output = self.model(**batch, labels=batch["input_ids"])
        loss: Tensor = output.loss
        if self.prefers:
            with torch.no_grad(), self.model.disable_adapter():
                wanted = self.model(**batch).logits
            loss = loss - functional.logsigmoid(output.logits - wanted).mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        policy = self.model(**batch).logits
        with self.model.disable_adapter():
            reference = self.model(**batch).logits
        self.log("drift", (policy - reference).abs().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


KINDS: dict[str, tuple[Callable[[], Any], Any]] = {
    "lora": (base, LoraConfig(**Q_V)),
    "experts": (
        lambda: base("qwen3_moe"),
        LoraConfig(r=2, target_modules=["q_proj"], target_parameters=EXPERTS),
    ),
    "prompt": (base, PromptTuningConfig(**SOFT)),
    "prefix": (base, PrefixTuningConfig(**SOFT)),
}


def check(tmp_path: Path, make: Callable[[], Any], config: Any, **options: Any) -> None:
    def fit(trainer: Trainer, module: Any) -> None:
        trainer.fit(module, token_data(), token_data() if options else None)
        states = trainer.optimizers[0].state
        assert set(states) == {p for p in module.parameters() if p.requires_grad}

    compare(
        tmp_path,
        lambda: Tuned(adapted(make(), config).model, **options),
        fit,
        kinds=(RoundPipeStrategy, EmulatedStrategy),
        num_microbatches=2,
        tolerance=1e-4,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_trains_as_on_one_device(tmp_path: Path, kind: str) -> None:
    make, config = KINDS[kind]
    check(tmp_path, make, config)


def test_adapters_off_in_training_and_in_validation(tmp_path: Path) -> None:
    check(tmp_path, base, LoraConfig(**Q_V), prefers=True)
