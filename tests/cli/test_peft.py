import re
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from roundpipe_lightning.cli.build import build_run
from roundpipe_lightning.cli.objects import read_adapters
from roundpipe_lightning.cli.summary import trained_row
from roundpipe_lightning.cli.train import train
from roundpipe_lightning.errors import CheckpointError
from tests.kit.runs import compose_small, train_small

FIXED = "scheduler.num_training_steps=4"
STEPS = ("trainer.max_steps=4", FIXED)


def last(folder: Path) -> Path:
    return folder / "checkpoints" / "last.ckpt"


def test_lora_trains_goes_on_and_is_evaluated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = train_small(tmp_path / "whole", "peft=lora", *STEPS)
    printed = capsys.readouterr().out
    assert re.search(r"lora: [\d,]+ of [\d,]+ parameters \(\d+\.\d\d%\)", printed), printed
    assert whole["loss_last"] < whole["loss_first"]
    train_small(tmp_path / "half", "peft=lora", "trainer.max_steps=2", FIXED)
    resumed = f"ckpt_path={last(tmp_path / 'half')}"
    rest = train_small(tmp_path / "rest", "peft=lora", *STEPS, resumed)
    assert (rest["loss_last"], rest["val_loss"]) == (whole["loss_last"], whole["val_loss"])
    state = torch.load(last(tmp_path / "whole"), weights_only=True)
    assert all("lora_" in name for name in state["state_dict"])
    saved = f"ckpt_path={last(tmp_path / 'whole')}"
    again = train_small(tmp_path / "again", "peft=lora", "train=false", saved)
    assert again["val_loss"] == whole["val_loss"]
    with pytest.raises(CheckpointError, match="has other values"):
        train(compose_small(tmp_path / "other", "peft=lora", "train=false", saved, "seed=7"))


def test_a_base_in_four_bits_counts_as_what_it_stands_for(tmp_path: Path) -> None:
    rows = []
    for choice in ("qlora", "lora"):
        config = compose_small(tmp_path, f"peft={choice}", "peft.target_modules=all-linear")
        run = build_run(config)
        run.module.configure_model()
        rows.append(trained_row(run.module))
    assert rows[0] == rows[1]
    figures = train_small(tmp_path, "peft=qlora", "trainer.max_steps=2", "logger=none")
    assert 4 < figures["val_loss"] < 6


@pytest.mark.parametrize("choice", ["dora", "rslora", "ia3", "prompt", "prefix", "p_tuning"])
def test_every_choice_trains(tmp_path: Path, choice: str) -> None:
    figures = train_small(tmp_path, f"peft={choice}", "trainer.max_steps=2", "logger=none")
    assert figures["num_steps"] == 2
    assert 4 < figures["loss_last"] < 6
    assert 4 < figures["val_loss"] < 6


def test_settings_reach_the_adapters(tmp_path: Path) -> None:
    run = build_run(compose_small(tmp_path, "peft=lora", "peft.r=2", "peft.adapter=folder"))
    adapters: Any = run.module.adapters
    assert (adapters.config.r, adapters.adapter, adapters.seed) == (2, "folder", 42)


def test_full_fine_tuning_has_no_adapters_and_no_row() -> None:
    config = OmegaConf.create({"_target_": None})
    assert read_adapters(config) is None
    assert trained_row(nn.Linear(2, 2)) == []
