import csv
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hydra.errors import MissingConfigException
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.loggers import Logger
from torch import Tensor
from torch.nn import functional

from roundpipe_lightning.cli.build import build_run, check_batches, find_checkpoint
from roundpipe_lightning.cli.job import Job
from roundpipe_lightning.cli.train import train
from roundpipe_lightning.data import ClassificationDataModule
from roundpipe_lightning.errors import (
    BatchError,
    CheckpointError,
    ConfigurationError,
    ModelSourceError,
)
from roundpipe_lightning.modules import CausalLanguageModule, SequenceClassificationModule
from tests.kit.runs import SUMMARY_KEYS, compose_small, files, summary, train_small


def test_the_same_seed_gives_the_same_run_on_any_number_of_workers(tmp_path: Path) -> None:
    four = train_small(tmp_path / "four")
    one = train_small(tmp_path / "one", "trainer.devices=1")
    assert (four["num_workers"], one["num_workers"]) == (4, 1)
    assert four["loss_last"] == one["loss_last"]
    assert four["val_loss"] == one["val_loss"]


def test_goes_on_from_a_checkpoint_as_if_never_stopped(tmp_path: Path) -> None:
    fixed = "scheduler.num_training_steps=4"
    whole = train_small(tmp_path / "whole", "trainer.max_steps=4", fixed)
    train_small(tmp_path / "half", "trainer.max_steps=2", fixed)
    last = tmp_path / "half" / "checkpoints" / "last.ckpt"
    rest = train_small(tmp_path / "rest", "trainer.max_steps=4", fixed, f"ckpt_path={last}")
    assert rest["num_steps"] == 2
    assert rest["loss_last"] == whole["loss_last"]
    assert rest["val_loss"] == whole["val_loss"]


def test_checkpoints_may_have_addresses_with_a_scheme(tmp_path: Path) -> None:
    there = "callbacks.last_checkpoint.dirpath=memory://bucket/run"
    train_small(tmp_path / "half", "trainer.max_steps=2", there)
    last = "ckpt_path=memory://bucket/run/last.ckpt"
    assert train_small(tmp_path / "rest", last, there)["num_steps"] == 1
    assert not any(path.suffix == ".ckpt" for path in tmp_path.rglob("*"))


class NamedRuns(Logger):
    """A logger whose runs have names, as Weights & Biases' have."""

    name = "named"
    version = ""
    begun: ClassVar[list[str]] = []

    def __init__(self, id: str | None = None) -> None:  # noqa: A002
        super().__init__()
        self.version = id or f"run{len(self.begun)}"
        self.begun.append(self.version)

    def log_metrics(self, *_: object, **__: object) -> None: ...

    def log_hyperparams(self, *_: object, **__: object) -> None:
        self.begun.append("settings")


def test_loggers_go_on_in_the_run_of_the_checkpoint(tmp_path: Path) -> None:
    target = f"+logger.named._target_={__name__}.NamedRuns"
    resumed = f"ckpt_path={tmp_path}/first/checkpoints/last.ckpt"
    more = (resumed, "trainer.max_steps=4")
    for folder, overrides in ("first", ()), ("first", (resumed, "train=false")), ("more", more):
        train_small(tmp_path / folder, target, "+logger.named.id=null", *overrides)
    assert NamedRuns.begun == ["run0", "settings", "run2", "settings", "run0"]


def test_evaluates_a_checkpoint_without_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = train_small(tmp_path / "trained")
    last = tmp_path / "trained" / "checkpoints" / "last.ckpt"
    again = train_small(tmp_path / "trained", "train=false", "test=true", f"ckpt_path={last}")
    assert set(again) == SUMMARY_KEYS
    rows = (tmp_path / "trained" / "metrics.csv").read_text().splitlines()
    assert [row.partition(",")[0] for row in rows] == ["step", *"0123", *"00"]
    train_small(tmp_path / "done", "trainer.max_steps=2", f"ckpt_path={last}")
    assert f"nothing was trained: {last} is of step 3" in capsys.readouterr().err
    assert again["val_loss"] == trained["val_loss"]
    assert again["loss_first"] is None


class Contrastive(CausalLanguageModule):
    """Compares every sequence with all others of its batch."""

    def training_step(self, batch: Any) -> Tensor:
        logits = self(batch).logits
        one, other = (functional.normalize(part.mean(1), dim=1) for part in logits.chunk(2, dim=1))
        targets = torch.arange(len(one), device=one.device)
        loss = functional.cross_entropy(one @ other.T / 0.1, targets)
        self.log("train_loss", loss, on_step=True, on_epoch=False)
        return loss


def test_a_module_of_ones_own_has_the_losses_of_one_device(tmp_path: Path) -> None:
    """In the mode `step`, that of the configuration, it has not."""

    def losses(name: str, *overrides: str) -> list[float]:
        module = f"module._target_={__name__}.Contrastive"
        train_small(tmp_path / name, module, "trainer.limit_val_batches=0", *overrides)
        rows = csv.DictReader((tmp_path / name / "metrics.csv").read_text().splitlines())
        return [float(row["train_loss"]) for row in rows if row["train_loss"]]

    single = losses("single", "trainer=single_device")
    assert len(single) == 3
    assert summary(tmp_path / "single")["bubble_measured"] is None
    assert "plan.json" not in files(tmp_path / "single")
    for mode in ("blocks", "auto"):
        chosen = f"trainer.strategy.microbatching={mode}"
        assert losses(mode, chosen) == pytest.approx(single, rel=1e-4)


def test_a_saved_plan_is_used_again(tmp_path: Path) -> None:
    first = train_small(tmp_path / "first")
    plan = f"partition.plan={tmp_path / 'first' / 'plan.json'}"
    again = train_small(tmp_path / "again", "partition=saved", plan)
    assert again["loss_last"] == first["loss_last"]


@pytest.mark.parametrize("debug", ["default", "fast_dev_run", "limit", "overfit", "profiler"])
def test_debugging_presets_run(tmp_path: Path, debug: str) -> None:
    if debug in ("overfit", "profiler"):
        train_small(tmp_path, f"debug={debug}", "trainer.max_steps=3")
    else:
        train(compose_small(tmp_path, f"debug={debug}"))
    assert ("checkpoints/last.ckpt" in files(tmp_path)) == (debug != "fast_dev_run")


@pytest.mark.parametrize("callbacks", ["best", "minimal"])
def test_callbacks_can_be_chosen(tmp_path: Path, callbacks: str) -> None:
    train_small(tmp_path, f"callbacks={callbacks}", "trainer.val_check_interval=2")
    assert ("checkpoints/best.ckpt" in files(tmp_path)) == (callbacks == "best")
    assert "checkpoints/last.ckpt" in files(tmp_path)


def test_needs_no_logger(tmp_path: Path) -> None:
    train_small(tmp_path, "logger=none")
    assert "metrics.csv" not in files(tmp_path)


def test_returns_the_metric_for_a_sweeper(tmp_path: Path) -> None:
    value = train(compose_small(tmp_path, "optimized_metric=train_loss"))
    assert value is not None
    assert 4 < value < 6
    assert train(compose_small(tmp_path, "optimized_metric=null")) is None


REFUSED = {
    "ckpt_path": (["ckpt_path=none.ckpt"], CheckpointError, "none.ckpt"),
    "weights": (["model.weights=zero"], ConfigurationError, "random, pretrained"),
    "no name": (["model.weights=pretrained"], ConfigurationError, "model.hub_name"),
    "seq_len": (["data.seq_len=2048"], ConfigurationError, "1024 positions"),
    "vocabulary": (["model.architecture.vocab_size=256"], ConfigurationError, "at least 257"),
    "architecture": (["model.architecture.model_type=x"], ConfigurationError, "model_type='x'"),
    "microbatches": (["partition.num_microbatches=0"], ConfigurationError, "num_microbatches"),
    "folder": (["model.weights=pretrained", "model.hub_name=."], ModelSourceError, "local folder"),
    "split": (["data.batch_size=3"], BatchError, "data.batch_size=3"),
    "steps": (["scheduler.num_warmup_steps=-1"], ConfigurationError, "num_warmup_steps=-1"),
    "precision": (["trainer.precision=12"], ConfigurationError, "trainer.precision=12"),
    "text": (["data.text.train_bytes=0"], ConfigurationError, "train_bytes"),
    "r": (["peft=lora", "peft.r=0"], ConfigurationError, "peft.r=0 must be a whole number"),
    "method": (["peft=lora", "peft._target_=peft.Lora"], ConfigurationError, "are LoraConfig"),
    "unknown figure": (["+scheduler.final_share=0"], ConfigurationError, "is not an argument of"),
    "bits": (["peft=lora", "peft.frozen_bits=3"], ConfigurationError, "not one of 16, 8, 4"),
}
"""Overrides, the error, and what its message names."""


@pytest.mark.parametrize(("overrides", "error", "named"), REFUSED.values(), ids=list(REFUSED))
def test_refuses_before_anything_is_written(
    tmp_path: Path, overrides: list[str], error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        train(compose_small(tmp_path, *overrides))
    assert files(tmp_path) == set()


def test_an_unknown_experiment_lists_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(MissingConfigException, match="single_device"):
        compose_small(tmp_path, "experiment=nonesuch")


def test_settings_of_lightning_do_what_they_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = compose_small(
        tmp_path / "logs" / "train" / "runs" / "mine",
        f"paths.log_dir={tmp_path}/logs",
        "trainer.enable_progress_bar=false",
        "trainer.val_check_interval=1.0",
        "data.text.train_bytes=200",
        "callbacks=best",
        "test=true",
        "optimized_metric=nonesuch",
    )
    assert train(config) is None
    shown = capsys.readouterr()
    assert "optimized_metric=nonesuch was not measured; there are: idle" in shown.err
    assert "Epoch" not in shown.err
    assert "Test loss" in shown.out
    folder = Path(config.paths.output_dir)
    assert summary(folder)["test_loss"] > 0
    assert "checkpoints/best.ckpt" in files(folder), "an epoch has ended"
    for given, name in (
        ("last", "last"),
        ("best", "best"),
        (str(folder), "last"),
        (f"file://{folder}/checkpoints/best.ckpt", "best"),
    ):
        config.ckpt_path = given
        assert find_checkpoint(config) == str(folder / "checkpoints" / f"{name}.ckpt")
    config.ckpt_path = "nonesuch://bucket/last.ckpt"
    with pytest.raises(CheckpointError, match=r"nonesuch://bucket/last\.ckpt cannot be reached"):
        find_checkpoint(config)


def test_the_plan_is_there_when_the_first_step_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def first_step(*_: object) -> None:
        raise InterruptedError(", ".join(sorted(files(tmp_path))))

    monkeypatch.setattr(CausalLanguageModule, "on_train_batch_end", first_step, raising=False)
    with pytest.raises(InterruptedError, match=r"config\.yaml, plan\.json"):
        train(compose_small(tmp_path))


@pytest.mark.parametrize(
    ("overrides", "on_cpu", "on_gpu"),
    [
        ("", (4, "32-true", None), ("auto", "bf16-mixed", "bf16")),
        ("hardware=cpu", (4, "32-true", None), (4, "32-true", None)),
        ("trainer.devices=2", (2, "32-true", None), (2, "bf16-mixed", "bf16")),
        ("trainer.precision=16-mixed", (4, "16-mixed", None), ("auto", "16-mixed", "fp16")),
        ("trainer.precision=bf16-true", (4, "bf16-true", None), ("auto", "bf16-true", None)),
        ("hardware=rtx4090x2", (2, "bf16-mixed", "bf16"), (2, "bf16-mixed", "bf16")),
    ],
)
def test_words_are_filled_in_for_the_machine(
    tmp_path: Path,
    overrides: str,
    on_cpu: tuple[object, ...],
    on_gpu: tuple[object, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = compose_small(tmp_path, "hardware=auto", *overrides.split())
    for available, expected in ((False, on_cpu), (True, on_gpu)):
        monkeypatch.setattr(torch.accelerator, "is_available", lambda found=available: found)
        trainer = Job(config).config.trainer
        assert (trainer.devices, trainer.precision, trainer.strategy.upload_dtype) == expected


def test_each_cpu_device_of_other_strategies_would_be_a_process(tmp_path: Path) -> None:
    job = Job(compose_small(tmp_path, "trainer.strategy=auto"))
    assert job.config.trainer.devices == "auto"


def test_the_configuration_that_was_given_is_left_alone(tmp_path: Path) -> None:
    config = compose_small(tmp_path)
    run = build_run(config)
    assert config.trainer.devices == "auto"
    assert run.config.trainer.devices == 4
    assert run.trainer.num_devices == 4


def test_a_strategy_can_be_named(tmp_path: Path) -> None:
    run = build_run(compose_small(tmp_path, "trainer.strategy=roundpipe"))
    assert type(run.trainer.strategy).__name__ == "RoundPipeStrategy"


def test_parts_of_ones_own_are_not_refused() -> None:
    check_batches(LightningModule(), object.__new__(ClassificationDataModule))
    check_batches(object.__new__(SequenceClassificationModule), LightningDataModule())


def test_a_mistake_in_the_code_keeps_its_place(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"^data: .*argument 'nonsense'"):
        build_run(compose_small(tmp_path, "+data.nonsense=1"))


def test_an_interrupt_within_a_step_saves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = CausalLanguageModule.training_step, []

    def interrupted(self: CausalLanguageModule, batch: object) -> object:
        calls.append(batch)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(self, batch)  # type: ignore[arg-type]

    monkeypatch.setattr(CausalLanguageModule, "training_step", interrupted)
    config = compose_small(
        tmp_path, "experiment=single_device", "callbacks.last_checkpoint.every_n_steps=1"
    )
    with pytest.raises(KeyboardInterrupt):
        train(config)
    last = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert last["global_step"] == 2
