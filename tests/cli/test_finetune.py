import re
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from roundpipe_lightning import finetune
from roundpipe_lightning.cli.build import build_run
from roundpipe_lightning.cli.checkpoints import export
from roundpipe_lightning.cli.objects import read_adapters
from roundpipe_lightning.cli.train import train, trained_row
from roundpipe_lightning.errors import CheckpointError, ConfigurationError
from roundpipe_lightning.modules import ModelSource, byte_level_tokenizer
from tests.kit.architectures import TINY
from tests.kit.runs import REPOSITORY, compose_small, composed, summary, train_small

QUICK = ["hardware=cpu", "trainer.devices=2", "trainer.max_steps=3", "scheduler.num_warmup_steps=0"]
RECORDS = [
    {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "Yes."}]}
    for n in range(20)
]


def test_a_model_and_records_become_a_folder_as_on_the_command_line(tmp_path: Path) -> None:
    model: Any = ModelSource(architecture=TINY, seed=1).build()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    result = finetune(
        model,
        RECORDS,
        method="full",
        tokenizer=byte_level_tokenizer(),
        seq_len=64,
        batch_size=4,
        learning_rate=0.01,
        epochs=9,
        folder=tmp_path / "run",
        overrides=QUICK,
    )
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    assert result.figures["num_steps"] == 3
    assert result.figures["loss_last"] < result.figures["loss_first"]
    assert result.plan is not None
    assert result.plan.num_workers == 2
    page = result._repr_html_()
    for part in ("<svg", "Training loss", "The plan of this training", str(result.model_folder)):
        assert part in page
    trained = AutoModelForCausalLM.from_pretrained(result.model_folder)
    weight = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(trained.state_dict()[weight], before[weight])

    config: Any = OmegaConf.load(result.folder / "config.yaml")
    config.paths.output_dir = str(tmp_path / "again")
    config.callbacks.pretrained_export = None
    train(config)
    assert summary(tmp_path / "again")["loss_last"] == result.figures["loss_last"]


_MODE = "trainer.strategy.microbatching"
PAIRS = [{"prompt": f"{n}?", "chosen": "Yes.", "rejected": "No."} for n in range(20)]


@pytest.mark.parametrize(
    ("method", "objective", "records"),
    [
        ("lora", "kto", [{"prompt": p["prompt"], "completion": "No", "label": 0} for p in PAIRS]),
        pytest.param("qlora", "sft", RECORDS, marks=pytest.mark.soak),
        pytest.param("lora", "dpo", PAIRS, marks=pytest.mark.soak),
        pytest.param("full", "orpo", PAIRS, marks=pytest.mark.soak),
        pytest.param("lora", "reward", PAIRS, marks=pytest.mark.soak),
    ],
)
def test_an_objective_is_trained_with_a_method(
    method: str, objective: str, records: Any, tmp_path: Path
) -> None:
    given: Any = {"method": method, "objective": objective, "folder": tmp_path / "run", "epochs": 9}
    result = finetune("tiny", records, **given, seq_len=64, batch_size=4, overrides=QUICK)
    assert result.figures["num_steps"] == 3
    files = {path.name for path in result.model_folder.iterdir()}
    assert ("model.safetensors" if method == "full" else "adapter_model.safetensors") in files
    config: Any = OmegaConf.load(tmp_path / "run/config.yaml")
    assert OmegaConf.select(config, _MODE) == ("blocks" if objective == "kto" else "step")
    assert (config.optimizer.lr < 1e-5) == (objective in ("dpo", "orpo", "kto"))
    columns = (tmp_path / "run" / "metrics.csv").read_text().splitlines()[0].split(",")
    assert {"sft": "val_loss", "kto": "val_kl"}.get(objective, "val_margin") in columns


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"objective": "sfx"}, r"objective='sfx' is not one of sft, text, dpo"),
        ({"data": {"train": RECORDS}}, r"one split of a data set"),
        ({"data": [{"prompt": b"a"}]}, r"of texts, numbers and lists \(Object of type bytes"),
        ({"method": "lorra"}, r"peft=lorra does not exist\. Did you mean peft=lora\?"),
        ({"overrides": ["data.seqlen=3"]}, r"no setting data\.seqlen\. Did you mean data\.seq_len"),
        ({"objective": "kto", "overrides": [*QUICK, f"{_MODE}=step"]}, r"splits batches, and what"),
        ({"data": [1, 2]}, r"data: give a file, several files, one split of .* or records such as"),
        ({"data": "no/such.jsonl"}, r"nothing is found at 'no/such\.jsonl'"),
        (
            {"model": torch.nn.Linear(1, 1)},
            r"any other module with Trainer\(strategy=",
        ),
    ],
)
def test_what_cannot_work_is_explained(given: Any, message: str, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"model": "tiny", "data": RECORDS, "overrides": QUICK, **given}
    with pytest.raises(ConfigurationError, match=message):
        finetune(**arguments, folder=tmp_path)


SMALL = (
    "model.architecture.num_hidden_layers=2",
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
PREFERENCES = ("data.batch_size=32", "optimizer.lr=0.03")
TEXTS = "data.files=[docs/quickstart.md,docs/index.md,README.md]"


def compose_experiment(name: str, folder: Path, *overrides: str) -> Any:
    return composed("train", f"experiment={name}", *SMALL, f"paths.output_dir={folder}", *overrides)


@pytest.mark.suite(
    "chat_lora-overrides0-metrics0",
    "dpo-overrides1-metrics1",
    "classification-overrides5-metrics5",
    "text_full-overrides6-metrics6",
)
@pytest.mark.parametrize(
    ("name", "overrides", "metrics"),
    [
        ("chat_lora", (), {"val_loss"}),
        ("dpo", (), {"val_loss", "val_margin", "val_accuracy", "train_margin"}),
        ("dpo", (*PREFERENCES, "module=orpo"), {"val_loss", "val_margin", "val_accuracy"}),
        ("dpo", (*PREFERENCES, "module=reward"), {"val_loss", "val_margin", "val_accuracy"}),
        (
            "dpo",
            (*PREFERENCES, "module=kto", "data=kto"),
            {"val_loss", "val_kl", "train_accuracy"},
        ),
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
    config = composed("export", f"ckpt_path={tmp_path}/checkpoints/last.ckpt")
    folder = export(config)
    tensors = load_file(folder / file)
    if name == "dpo":
        assert all("lora" in tensor for tensor in tensors)
    else:
        assert tensors["score.weight"].shape == (2, 32)


@pytest.mark.parametrize("streaming", ["false", "true"])
def test_nothing_need_be_validated_on(
    streaming: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(REPOSITORY)
    every = [f"data.streaming={streaming}", "data.validation_share=0"]
    every += ["trainer.max_steps=2", "trainer.val_check_interval=1"]
    train(compose_experiment("chat_lora", tmp_path, *every))
    assert summary(tmp_path)["val_loss"] is None
    assert summary(tmp_path)["num_steps"] == 2
    assert "Warning" not in capsys.readouterr().err
    with pytest.raises(ConfigurationError, match=r"data\.validation_share=0 leaves nothing"):
        build_run(compose_experiment("chat_lora", tmp_path, *every, "test=true"))


def test_a_word_is_no_switch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    for name in ("packing", "streaming"):
        with pytest.raises(ConfigurationError, match=rf"^data\.{name}=maybe: give true or false"):
            build_run(compose_experiment("chat_lora", tmp_path, f"data.{name}=maybe"))


def test_a_vocabulary_without_room_for_the_tokens_is_refused(tmp_path: Path) -> None:
    overrides = "model.architecture.vocab_size=257"
    with pytest.raises(ConfigurationError, match=r"257 tokens is smaller than the 259 tokens"):
        build_run(compose_experiment("chat_lora", tmp_path, overrides))


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


@pytest.mark.suite("dora", "prefix")
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
