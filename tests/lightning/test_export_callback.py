import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from roundpipe_lightning import ExportPretrained
from roundpipe_lightning.errors import CheckpointError, ConfigurationError
from roundpipe_lightning.models.weight_files import MARKER
from roundpipe_lightning.modules import ModelSource
from tests.kit.architectures import TINY
from tests.kit.training import Regressor, make_trainer


class Language(LightningModule):
    """A model of transformers, with adapters or not."""

    def __init__(self, *, adapted: bool = False) -> None:
        super().__init__()
        model: Any = ModelSource(architecture=TINY).build()
        if adapted:
            model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
        self.language = model

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.language(input_ids=ids, labels=ids, use_cache=False).loss
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD((p for p in self.parameters() if p.requires_grad), lr=0.1)


def fit(module: LightningModule, callback: ExportPretrained, **flags: Any) -> Any:
    ids = torch.arange(64 * 6).reshape(-1, 6) % 264
    trainer = make_trainer(
        strategy="roundpipe", devices=2, callbacks=[callback], **{"max_steps": 3, **flags}
    )
    rows: Any = list(ids)
    trainer.fit(module, DataLoader(rows, batch_size=4))
    return trainer


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        result: Tensor = model.eval()(torch.arange(9)[None]).logits
    return result


def test_the_trained_model_is_exported_at_the_end(tmp_path: Path) -> None:
    module = Language()
    fit(module, ExportPretrained(tmp_path / "out"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(loaded), logits(module.language))


def test_an_adapter_is_exported_and_replaced_on_the_way(tmp_path: Path) -> None:
    module = Language(adapted=True)
    callback = ExportPretrained(tmp_path / "out", every_n_steps=2)
    trainer = fit(module, callback, max_steps=5, limit_train_batches=5)
    assert trainer.global_step == 5
    loaded = PeftModel.from_pretrained(ModelSource(architecture=TINY).build(), tmp_path / "out")
    assert torch.equal(logits(loaded), logits(module.language))
    assert {path.name for path in tmp_path.iterdir() if "out" in path.name} == {"out"}


@pytest.mark.parametrize(
    "settings",
    [{"temperature": 0.7}, {"top_k": 1}, {"early_stopping": True}, {"pad_token_id": -1}],
    ids=str,
)
def test_a_generation_configuration_is_exported_or_refused_before_training(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    module = Language()
    for name, value in settings.items():
        setattr(module.language.generation_config, name, value)
    steps: list[int] = []
    module.on_train_batch_end = lambda *_: steps.append(1)  # type: ignore[method-assign]
    with pytest.raises(ConfigurationError, match=r"(?s)generation_config cannot be saved.*Mend"):
        fit(module, ExportPretrained(tmp_path / "out"))
    assert steps == []
    fit(Language(adapted=True), ExportPretrained(tmp_path / "out"))  # an adapter has none


def test_what_has_no_room_on_the_disk_is_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(
        CheckpointError, match=r"the export takes .* GiB, and its disk has 0\.0 GiB"
    ):
        fit(Language(), ExportPretrained(tmp_path / "new" / "out"))
    assert not (tmp_path / "new").exists()


def test_exports_every_n_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    callback = ExportPretrained(tmp_path / "out", every_n_steps=2)
    export = callback._export

    def counting(trainer: Any, module: Any) -> None:
        export(trainer, module)
        steps.append(trainer.global_step)

    monkeypatch.setattr(callback, "_export", counting)
    fit(Language(), callback, max_steps=6, accumulate_grad_batches=2)
    assert sorted(set(steps)) == [2, 4, 6]


def test_without_a_folder_the_trainers_is_used(tmp_path: Path) -> None:
    fit(Language(), ExportPretrained(dtype="bf16"))
    [marker] = tmp_path.rglob(MARKER)
    assert marker.parent.name == "export"
    assert AutoModelForCausalLM.from_pretrained(marker.parent).dtype == torch.bfloat16


def test_refuses_before_training(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("x")
    with pytest.raises(CheckpointError, match=r"precious.*overwrite=true"):
        fit(Language(), ExportPretrained(tmp_path / "out"))
    with pytest.raises(ConfigurationError, match=r"Regressor has none"):
        fit(Regressor(), ExportPretrained(tmp_path / "new"))
    with pytest.raises(ConfigurationError, match=r"every_n_steps=0"):
        ExportPretrained(every_n_steps=0)
    with pytest.raises(ConfigurationError, match=r"dtype='int8'"):
        ExportPretrained(dtype="int8")
    assert (tmp_path / "out" / "precious").read_text() == "x"
