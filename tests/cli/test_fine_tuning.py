from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from safetensors.torch import load_file

from roundpipe_lightning.cli.build import build_run
from roundpipe_lightning.cli.checkpoints.export import export
from roundpipe_lightning.cli.train import train
from roundpipe_lightning.errors import ConfigurationError, DataError
from roundpipe_lightning.planning.model.hardware import config_folder
from tests.kit.runs import REPOSITORY, summary

SMALL = (
    "model.architecture.num_hidden_layers=3",
    "model.architecture.hidden_size=32",
    "model.architecture.intermediate_size=64",
    "hardware=cpu",
    "trainer.devices=2",
    "data.batch_size=4",
    "partition.num_microbatches=2",
    "trainer.max_steps=5",
    "trainer.limit_val_batches=2",
    "trainer.val_check_interval=5",
    "scheduler.num_warmup_steps=1",
    "optimizer.lr=0.01",
)
CLEAR = ("data.batch_size=256",)  # nearly all texts: losses of two steps compare
PAIRS = ("data.batch_size=32", "optimizer.lr=0.03")
TEXTS = "data.files=[docs/quickstart.md,docs/index.md,README.md]"


def compose_experiment(name: str, folder: Path, *overrides: str) -> Any:
    everything = [f"experiment={name}", *SMALL, f"paths.output_dir={folder}", *overrides]
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        return compose("train", overrides=everything)


@pytest.mark.parametrize(
    ("name", "overrides", "metrics"),
    [
        ("chat_lora", (), {"val_loss"}),
        ("dpo", (), {"val_loss", "val_margin", "val_accuracy", "train_margin"}),
        ("dpo", (*PAIRS, "module=orpo"), {"val_loss", "val_margin", "val_accuracy"}),
        ("dpo", (*PAIRS, "module=reward"), {"val_loss", "val_margin", "val_accuracy"}),
        ("dpo", (*PAIRS, "module=kto", "data=kto"), {"val_loss", "val_kl", "train_accuracy"}),
        ("classification", CLEAR, {"val_loss", "val_accuracy", "train_accuracy"}),
        ("text_full", (TEXTS, "data.validation_share=0.4"), {"val_loss"}),
    ],
)
def test_the_experiment_runs_and_learns(
    name: str,
    overrides: tuple[str, ...],
    metrics: set[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(REPOSITORY)
    train(compose_experiment(name, tmp_path, *overrides))
    assert "computes no cross_entropy" not in capfd.readouterr().err
    figures = summary(tmp_path)
    assert figures["num_steps"] == 5
    assert figures["loss_last"] < figures["loss_first"]
    assert figures["tokens_per_second"] > 0
    columns = (tmp_path / "metrics.csv").read_text().splitlines()[0].split(",")
    assert metrics <= set(columns)
    saved = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert saved["global_step"] == 5
    assert not any(name.startswith("reference") for name in saved["state_dict"])


@pytest.mark.parametrize(
    ("name", "file"),
    [("dpo", "adapter_model.safetensors"), ("classification", "model.safetensors")],
)
def test_what_was_trained_can_be_exported(
    name: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    short = ("trainer.max_steps=1", "trainer.limit_val_batches=0", "validate=false")
    train(compose_experiment(name, tmp_path, *short, "optimized_metric=null"))
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        config = compose("export", overrides=[f"ckpt_path={tmp_path}/checkpoints/last.ckpt"])
    folder = export(config)
    tensors = load_file(folder / file)
    if name == "dpo":
        assert all("lora" in tensor for tensor in tensors)
    else:
        assert tensors["score.weight"].shape == (2, 32)


def test_data_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=r"nothing is found at 'examples/data/chat\.jsonl"):
        train(compose_experiment("chat_lora", tmp_path))


def test_a_broken_line_stops_the_run_with_its_number(tmp_path: Path) -> None:
    chat = tmp_path / "mine.jsonl"
    chat.write_text('{"messages": []}\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"mine\.jsonl, line 1: a conversation is a list"):
        train(compose_experiment("chat_lora", tmp_path, f"data.files=[{chat}]"))


def test_a_vocabulary_without_room_for_the_tokens_is_refused(tmp_path: Path) -> None:
    overrides = "model.architecture.vocab_size=257"
    with pytest.raises(ConfigurationError, match=r"257 tokens is smaller than the 259 tokens"):
        build_run(compose_experiment("chat_lora", tmp_path, overrides))
