from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from peft import LoraConfig, get_peft_model
from torch import Tensor

from roundpipe_lightning.checkpoint.compatibility import check_base, describe_frozen, load_state
from roundpipe_lightning.errors import CheckpointError
from roundpipe_lightning.strategy.strategy import RoundPipeStrategy
from tests.kit.architectures import build_model, token_data
from tests.kit.training import QUIET, make_trainer, same_bits

pytestmark = [
    *(pytest.mark.filterwarnings(line) for line in QUIET),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
]


class Tuned(LightningModule):
    """A base that is the same every time, with adapters that are not."""

    def __init__(
        self, *, targets: tuple[str, ...] = ("q_proj",), base: dict[str, Any] | None = None
    ) -> None:
        super().__init__()
        self.targets, self.base = targets, base or {}
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is None:
            with torch.random.fork_rng(devices=[]):
                model = build_model("qwen3", **self.base)
            config = LoraConfig(r=2, target_modules=list(self.targets), lora_dropout=0.1)
            self.model = get_peft_model(model, config)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch, labels=batch["input_ids"], use_cache=False).loss
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)


def fit(folder: Path, *, num_epochs: int, module: Tuned | None = None, **options: Any) -> Tuned:
    torch.manual_seed(1)
    module = Tuned() if module is None else module
    excludes = options.pop("excludes", True)
    trainer = make_trainer(
        folder,
        strategy=RoundPipeStrategy(num_microbatches=2, exclude_frozen_parameters=excludes),
        devices=2,
        callbacks=[ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)],
        enable_checkpointing=True,
        max_epochs=num_epochs,
    )
    trainer.fit(module, token_data(), **options)
    return module


def checkpoint_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(folder / "epoch=0.ckpt", weights_only=True)
    return found


def test_only_what_is_trained_is_saved_and_a_resume_is_exact(tmp_path: Path) -> None:
    expected = fit(tmp_path / "whole", num_epochs=2)
    fit(tmp_path / "part", num_epochs=1)
    state = checkpoint_of(tmp_path / "part")["state_dict"]
    assert state
    assert all("lora_" in name for name in state)
    path = tmp_path / "part" / "epoch=0.ckpt"
    again = fit(tmp_path / "rest", num_epochs=2, ckpt_path=path)
    assert same_bits(again, expected)


def test_everything_is_saved_unless_asked_otherwise(tmp_path: Path) -> None:
    module = fit(tmp_path, num_epochs=1, excludes=False)
    checkpoint = checkpoint_of(tmp_path)
    assert set(checkpoint["state_dict"]) == set(module.state_dict())
    assert "roundpipe_frozen" not in checkpoint


def test_it_can_be_validated_and_read_by_one_device(tmp_path: Path) -> None:
    trained = fit(tmp_path, num_epochs=1)
    path, losses = tmp_path / "epoch=0.ckpt", []
    for strategy in ("auto", "roundpipe"):
        module = Tuned()
        module.strict_loading = strategy != "auto"
        trainer = make_trainer(tmp_path, strategy=strategy)
        losses += trainer.validate(module, token_data(), ckpt_path=path, verbose=False)
        assert same_bits(module, trained)
    assert losses[0]["val_loss"] == pytest.approx(losses[1]["val_loss"], rel=1e-5)


REFUSED: list[tuple[Tuned, str]] = [
    (Tuned(base={"initializer_range": 0.5}), r"q_proj.base_layer.weight has other values"),
    (Tuned(base={"intermediate_size": 64}), r"gate_proj.weight is \(64, 32\) here, \(48, 32\)"),
    (Tuned(base={"num_hidden_layers": 3}), r"layers.3.* does not exist here"),
    (Tuned(targets=("q_proj", "v_proj")), r"v_proj.weight does not exist here"),
]


@pytest.mark.parametrize(("module", "message"), REFUSED)
def test_another_base_is_refused(tmp_path: Path, module: Tuned, message: str) -> None:
    fit(tmp_path, num_epochs=1)
    trainer = make_trainer(tmp_path, strategy="roundpipe")
    with pytest.raises(CheckpointError, match=message):
        trainer.validate(module, token_data(), ckpt_path=tmp_path / "epoch=0.ckpt", verbose=False)


def test_a_base_in_fewer_bits_is_the_same_base() -> None:
    module = torch.nn.Linear(7, 5)
    described = {"roundpipe_frozen": describe_frozen(module, ["weight", "bias"])}
    check_base(module.to(torch.bfloat16), described)
    check_base(module.to(torch.float32), described)
    with torch.no_grad():
        module.weight.add_(0.1)
    with pytest.raises(CheckpointError, match="weight has other values"):
        check_base(module, described)


def test_a_base_of_whole_numbers_is_compared_too() -> None:
    module = torch.nn.Module()
    codes = torch.arange(100, dtype=torch.uint8)
    module.register_parameter("codes", torch.nn.Parameter(codes, requires_grad=False))
    described = {"roundpipe_frozen": describe_frozen(module, ["codes"])}
    check_base(module, described)
    codes.add_(1)
    with pytest.raises(CheckpointError, match="codes has other values"):
        check_base(module, described)


def test_what_was_trained_must_fit() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    module[0].requires_grad_(False)
    described = describe_frozen(module, ["0.weight", "0.bias"])
    state = {"1.weight": torch.ones(2, 2), "2.bias": torch.ones(2)}
    checkpoint = {"roundpipe_frozen": described, "state_dict": state}
    message = r"missing: 1\.bias, \(2,\); extra: 2\.bias, \(2,\)"
    with pytest.raises(CheckpointError, match=message):
        load_state(module, checkpoint, strict=True)
    load_state(module, checkpoint, strict=False)
    assert torch.equal(module.get_parameter("1.weight"), torch.ones(2, 2))
