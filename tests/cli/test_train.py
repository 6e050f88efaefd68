from __future__ import annotations

import csv
import inspect
import math
import os
import re
import shlex
import shutil
import signal
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hydra.errors import MissingConfigException
from hydra.utils import get_object
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.loggers import Logger
from torch import Tensor
from torch.nn import functional

import roundpipe_commands
from roundpipe_lightning import Plan
from roundpipe_lightning.cli import job
from roundpipe_lightning.cli.build import build_run, check_batches, find_checkpoint
from roundpipe_lightning.cli.callbacks import FiniteCheck
from roundpipe_lightning.cli.job import Job, MetaModel
from roundpipe_lightning.cli.plan.answer import cheapest_changes
from roundpipe_lightning.cli.train import train
from roundpipe_lightning.data import ClassificationDataModule
from roundpipe_lightning.errors import (
    BatchError,
    CheckpointError,
    ConfigurationError,
    DivergedError,
    ModelSourceError,
)
from roundpipe_lightning.modules import (
    CausalLanguageModule,
    ModelSource,
    SequenceClassificationModule,
)
from roundpipe_lightning.planning.search.fit import fit_training
from roundpipe_lightning.planning.search.remedies import Price
from tests.kit.architectures import TINY
from tests.kit.programs import run_program
from tests.kit.runs import SMALL, SUMMARY_KEYS, compose_small, files, run_here, summary, train_small
from tests.kit.training import Regressor, make_trainer, regression_data
from tests.lightning.test_checkpoint import flip_bit


def test_the_same_seed_gives_the_same_run_on_any_number_of_workers(tmp_path: Path) -> None:
    four = train_small(tmp_path / "four")
    one = train_small(tmp_path / "one", "trainer.devices=1")
    assert (four["num_workers"], one["num_workers"]) == (4, 1)
    assert four["loss_last"] == one["loss_last"]
    assert four["val_loss"] == one["val_loss"]


def test_goes_on_from_a_checkpoint_as_if_never_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fixed = "scheduler.num_training_steps=4"
    whole = train_small(tmp_path / "whole", "trainer.max_steps=4", fixed)
    train_small(tmp_path / "half", "trainer.max_steps=2", fixed)
    last = tmp_path / "half" / "checkpoints" / "last.ckpt"
    rest = train_small(tmp_path / "rest", "trainer.max_steps=4", fixed, f"ckpt_path={last}")
    assert rest["num_steps"] == 2
    assert rest["loss_last"] == whole["loss_last"]
    assert rest["val_loss"] == whole["val_loss"]
    assert "Warning" not in capsys.readouterr().err
    other = ("data.text.train_bytes=19000", "trainer.max_steps=3", f"ckpt_path={last}")
    train_small(tmp_path / "other", *other)
    said = capsys.readouterr().err
    assert f"the run of ckpt_path={last} trained on other samples (data.text={{" in said
    assert "'train_bytes': 20000" in said


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
    names: ClassVar[set[str]] = set()

    def __init__(self, id: str | None = None) -> None:  # noqa: A002
        super().__init__()
        self.version = id or f"run{len(self.begun)}"
        self.begun.append(self.version)

    def log_metrics(self, metrics: dict[str, float], *_: object, **__: object) -> None:
        self.names.update(metrics)

    def log_hyperparams(self, *_: object, **__: object) -> None:
        self.begun.append("settings")


def test_loggers_go_on_in_the_run_of_the_checkpoint(tmp_path: Path) -> None:
    target = f"+logger.named._target_={__name__}.NamedRuns"
    resumed = f"ckpt_path={tmp_path}/first/checkpoints/last.ckpt"
    more = (resumed, "trainer.max_steps=4")
    for folder, overrides in ("first", ()), ("first", (resumed, "train=false")), ("more", more):
        train_small(tmp_path / folder, target, "+logger.named.id=null", *overrides)
    assert NamedRuns.begun == ["run0", "settings", "run2", "settings", "run0"]
    columns = (tmp_path / "more" / "metrics.csv").read_text().partition("\n")[0].split(",")
    assert {"train_loss", "val_loss"} <= NamedRuns.names & set(columns), "several at once"
    several = compose_small(tmp_path, "logger=[tensorboard,csv,wandb,mlflow]").logger
    assert list(several) == ["tensorboard", "csv", "wandb", "mlflow"]
    for node in several.values():  # that a library is missing is said before its settings are read
        settings: dict[str, Any] = dict(node)
        taken = inspect.signature(get_object(settings.pop("_target_"))).parameters
        assert settings.keys() <= {*taken, "tags"}  # which wandb.init takes


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


class Ending(CausalLanguageModule):
    """Ends a child that it has forked, and then the second step, as if its data had ended."""

    statuses: ClassVar[list[int]] = []

    def configure_model(self) -> None:
        super().configure_model()
        self.get_submodule("model.model.layers.1").register_forward_hook(self.end)

    def end(self, *_: object) -> None:
        if self.global_step == 1 and not self.statuses:
            self.statuses.append(-1)
            child = os.fork()
            if child == 0:
                signal.alarm(20)
                sys.exit(7)
            self.statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            raise StopIteration


STEPPED: list[int] = []


class Counting(torch.optim.SGD):
    """Has a step of its own."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        STEPPED.append(len(self.param_groups[0]["params"]))
        return result


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_code_of_ones_own_ends_as_it_would_alone(tmp_path: Path) -> None:
    done = run_here(tmp_path, f"module._target_={__name__}.Ending", "hydra.run.dir=run", status=1)
    assert Ending.statuses == [-1, 7]
    assert "RuntimeError: StopIteration was raised, by code that is no iterator." in done.stderr
    assert re.search(r"This happened in .* stage \d.*, microbatch \d, worker \d", done.stderr)
    own = ("optimizer=sgd", f"optimizer._target_={__name__}.Counting")
    train_small(tmp_path, *own, "trainer.strategy.update=async")
    assert [num for num in STEPPED if num > 4] == [24] * 3, "once a step, after trials of four"


@pytest.mark.suite("default", "fast_dev_run")
@pytest.mark.parametrize("debug", ["default", "fast_dev_run", "limit", "overfit", "profiler"])
def test_debugging_presets_run(tmp_path: Path, debug: str) -> None:
    if debug in ("overfit", "profiler"):
        train_small(tmp_path, f"debug={debug}", "trainer.max_steps=3")
    else:
        config = compose_small(tmp_path, f"debug={debug}", "optimized_metric=null")
        assert train(config) is None
    assert ("checkpoints/last.ckpt" in files(tmp_path)) == (debug != "fast_dev_run")


@pytest.mark.parametrize("callbacks", ["best", "minimal"])
def test_callbacks_can_be_chosen(tmp_path: Path, callbacks: str) -> None:
    train_small(tmp_path, f"callbacks={callbacks}", "trainer.val_check_interval=2")
    assert ("checkpoints/best.ckpt" in files(tmp_path)) == (callbacks == "best")
    assert "checkpoints/last.ckpt" in files(tmp_path)


def test_returns_the_metric_for_a_sweeper_and_needs_no_logger(tmp_path: Path) -> None:
    value = train(compose_small(tmp_path, "optimized_metric=train_loss", "logger=none"))
    assert value is not None
    assert 4 < value < 6
    assert "metrics.csv" not in files(tmp_path)


def test_a_metric_of_a_validation_that_is_left_out_is_not_missed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(compose_small(tmp_path, "train=false", "validate=false")) is None
    assert "was not measured" not in capsys.readouterr().err


REFUSED = {
    "ckpt_path": (["ckpt_path=none.ckpt"], CheckpointError, "none.ckpt"),
    "a number": (["ckpt_path=5"], CheckpointError, "ckpt_path='5' does not exist"),
    "attention": (["model.attention=none"], ConfigurationError, "model.attention=none: "),
    "weights": (["model.weights=zero"], ConfigurationError, "random, pretrained"),
    "no name": (["model.weights=pretrained"], ConfigurationError, "model.hub_name"),
    "seq_len": (["data.seq_len=2048"], ConfigurationError, "1024 positions"),
    "vocabulary": (["model.architecture.vocab_size=256"], ConfigurationError, "at least 259"),
    "architecture": (["model.architecture.model_type=x"], ConfigurationError, "model_type='x'"),
    "microbatches": (["partition.num_microbatches=0"], ConfigurationError, "num_microbatches"),
    "folder": (["model.weights=pretrained", "model.hub_name=."], ModelSourceError, "local folder"),
    "hub": (["model=qwen3_0_6b", "model.weights=pretrained"], ModelSourceError, "HF_HUB_OFFLINE"),
    "split": (["data.batch_size=3"], BatchError, "data.batch_size=3"),
    "steps": (["scheduler.num_warmup_steps=-1"], ConfigurationError, "num_warmup_steps=-1"),
    "a group of ours": (["+trainer.logger=false"], ConfigurationError, "choose logger=..."),
    "precision": (["trainer.precision=12"], ConfigurationError, "trainer.precision=12"),
    "text": (["data.text.train_bytes=0"], ConfigurationError, "train_bytes"),
    "r": (["peft=lora", "peft.r=0"], ConfigurationError, "peft.r=0 must be a whole number"),
    "method": (["peft=lora", "peft._target_=peft.Lora"], ConfigurationError, "are LoraConfig"),
    "unknown figure": (["+scheduler.final_share=0"], ConfigurationError, "is not an argument of"),
    "bits": (["peft=lora", "peft.frozen_bits=3"], ConfigurationError, "not one of 16, 8, 4"),
}
"""Overrides, the error, and what its message names."""

MISTAKES = {
    "hardware=rtx4090x8": "has no accelerators. Train with hardware=auto",
    "hardware.host_memory=lots": "such as hardware.host_memory=600GiB",
    "hardware=rtx4090x2 trainer.accelerator=cpu": "drop one of the two",
    "hardware=mixed": "devices names none: give the number of each",
    "hardware=rtx4090 hardware.reserved_bytes=30000000000": "leaves nothing of device_bytes",
    "hardware_file=rtx409x8": "The nearest are rtx4090",
    "module=preference": "module=preference and data=preference go together",
    "optimizer.lr=abc": "optimizer.lr=abc: lr='abc': give a number of 0 or more",
    "optimizer.lr=null": "optimizer.lr=None: lr=None: give a number of 0 or more",
    "optimizer.betas=3": "optimizer.betas=3: betas=3: give two numbers",
    "optimizer=sgd optimizer.lr=abc": "optimizer.lr=abc: ",
    "trainer.val_check_interval=0": "trainer.val_check_interval=0: give a number above 0",
    "trainer.log_every_n_steps=abc": "trainer.log_every_n_steps='abc': give a whole number",
    "trainer.limit_val_batches=abc": "trainer.limit_val_batches=abc: give a number",
    "trainer.strategy.timeout_seconds=abc": "timeout_seconds='abc': give the seconds",
    "trainer.strategy.workers_per_device=abc": "workers_per_device='abc': give a whole number",
    "partition.limits=3": "partition.limits=3: give the most blocks",
    "data.seed=abc": "data.seed=abc must be a whole number",
    "data.text.train_bytes=abc": "data.text.train_bytes='abc': give a whole number",
    "callbacks.progress_bar.refresh_rate=x": "callbacks.progress_bar.refresh_rate='x': give a whol",
    "+data.foo=1": "data: FileOptions.__init__() got an unexpected keyword argument 'foo'",
    "seed=-1": "seed=-1 must be 0 or more",
    "callbacks.last_checkpoint.every_n_steps=0": "every_n_steps=0 must be 1 or more",
    "trainer.devices=0": "trainer.devices=0 must be 1 or more",
    "trainer.max_steps=abc": "trainer.max_steps='abc': give a whole number",
    "trainer.gradient_clip_val=abc": "trainer.gradient_clip_val=abc: give a number",
    "trainer.devices=abc": "trainer.devices=abc: give a number, or auto",
    "model.architecture.hidden_act=foo": "model.architecture cannot be built: KeyError: 'foo'",
    "model.architecture.head_dim=0": "model.architecture cannot be built: ZeroDivisionError",
    "model.pretrained_options=3": "model.pretrained_options=3: give arguments",
    "module._target_=foo.Bar": "There is no foo.Bar (_target_)",
    "peft=lora peft.lora_alpha=abc": "peft=lora cannot be applied to this model: ",
    "peft=lora peft.target_modules=3": "peft.target_modules=3: name the layers to adapt",
    "scheduler.min_lr_rate=abc": "scheduler.min_lr_rate=abc must be between 0.0 and 1.0",
    "+trainer.strategy.foo=1": "trainer.strategy: RoundPipeStrategy.__init__() got an unexpected",
    "+model.architecture.hidden_sice=64": "hidden_sice: a configuration of 'qwen3' has no such "
    "field. The nearest are hidden_size",
    "+module.foo=1": "module: TransformersModule.__init__() got an unexpected",
    "+callbacks.foo.x=1": "callbacks.foo has no class: set callbacks.foo._target_",
    "hardware=auto +hardware.foo=1": "hardware.foo is not read where no machine",
    "trainer.num_sanity_val_steps=x": "trainer.num_sanity_val_steps='x': give a whole number",
    "trainer.deterministic=maybe": "trainer.deterministic=maybe: give true, false or warn",
    "checkpoint=distributed checkpoint.max_file_bytes=4GB": "max_file_bytes='4GB': give a whole",
    "checkpoint=async checkpoint.max_copy_bytes=4GB": "max_copy_bytes='4GB': give a whole",
    "+callbacks.early._target_=lightning.EarlyStopin": "There is no lightning.EarlyStopin (_targ",
    "nodes=[1,2]": "nodes=[1, 2]: give a whole number",
    "train=maybe": "train=maybe: give true or false",
    "trainer.strategy.replan=maybe": "trainer.strategy.replan=maybe: give true or false",
    "trainer.enable_progress_bar=maybe": "trainer.enable_progress_bar=maybe: give true or false",
}
"""Overrides, and what a `ConfigurationError` names."""


@pytest.mark.parametrize(
    ("overrides", "error", "named"),
    [*REFUSED.values(), *((x.split(), ConfigurationError, MISTAKES[x]) for x in MISTAKES)],
    ids=[*REFUSED, *MISTAKES],
)
def test_refuses_before_anything_is_written(
    tmp_path: Path, overrides: list[str], error: type[Exception], named: str
) -> None:
    with pytest.raises(error) as raised:
        train(compose_small(tmp_path, *overrides))
    assert named in str(raised.value)
    assert "\n" not in str(raised.value)
    assert files(tmp_path) == set()


def test_an_unknown_experiment_lists_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(MissingConfigException, match="single_device"):
        compose_small(tmp_path, "experiment=nonesuch")


def test_settings_of_lightning_do_what_they_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    config = compose_small(
        tmp_path / "logs" / "train" / "runs" / "mine",
        f"paths.log_dir={tmp_path}/logs",
        "trainer.enable_progress_bar=false",
        "trainer.val_check_interval=1.0",
        "trainer.max_steps=-1",
        "trainer.max_epochs=1",
        "data.text.train_bytes=200",
        "callbacks=best",
        "test=true",
        "optimized_metric=nonesuch",
    )
    assert train(config) is None
    shown = capsys.readouterr()
    assert "optimized_metric=nonesuch was not measured; there are: idle" in caplog.text
    assert "Epoch" not in shown.err
    assert "Test loss" in shown.out
    folder = Path(config.paths.output_dir)
    assert summary(folder)["test_loss"] > 0
    assert "checkpoints/best.ckpt" in files(folder), "an epoch has ended"
    for given, name in (
        ("last", "last"),
        ("best", "best"),
        (str(folder), "last"),
        (str(folder / "checkpoints"), "last"),
        (f"file://{folder}/checkpoints/best.ckpt", "best"),
    ):
        config.ckpt_path = given
        assert find_checkpoint(config) == str(folder / "checkpoints" / f"{name}.ckpt")
    swept = folder.parents[1] / "multiruns" / "swept" / "0" / "checkpoints" / "last.ckpt"
    swept.parent.mkdir(parents=True)
    swept.touch()
    for seconds, newest in ((0, folder / "checkpoints" / "last.ckpt"), (4e9, swept)):
        os.utime(swept, (seconds, seconds))
        config.ckpt_path = "last"
        assert find_checkpoint(config) == str(newest)
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
        ("", (4, "32-true"), ("auto", "bf16-mixed")),
        ("hardware=cpu", (4, "32-true"), (4, "32-true")),
        ("trainer.devices=2", (2, "32-true"), (2, "bf16-mixed")),
        ("trainer.precision=16-mixed", (4, "16-mixed"), ("auto", "16-mixed")),
        ("trainer.precision=bf16-true", (4, "bf16-true"), ("auto", "bf16-true")),
        ("hardware=rtx4090x2", (2, "bf16-mixed"), (2, "bf16-mixed")),
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
        job = Job(config)
        assert (job.config.trainer.devices, job.config.trainer.precision) == expected
        assert job.config.optimizer._target_.endswith(".HostAdamW")
        assert job.options.upload_dtype == "auto", "in the precision's dtype"


def test_each_cpu_device_of_other_strategies_would_be_a_process(tmp_path: Path) -> None:
    job = Job(compose_small(tmp_path, "trainer.strategy=auto"))
    assert job.config.trainer.devices == "auto"


def test_the_configuration_that_was_given_is_left_alone(tmp_path: Path) -> None:
    config = compose_small(tmp_path)
    run = build_run(config)
    assert config.trainer.devices == "auto"
    assert run.config.trainer.devices == 4
    assert run.trainer.num_devices == 4


def test_bytes_may_be_written_as_a_number_of_any_kind(tmp_path: Path) -> None:
    for hardware in ("auto", "cpu", "rtx4090"):
        given = (f"hardware={hardware}", "hardware.host_bytes=24e9")
        assert Job(compose_small(tmp_path, *given)).machine.host_bytes == 24 * 10**9
        if hardware != "rtx4090":  # which is not here
            strategy: Any = build_run(compose_small(tmp_path, *given)).trainer.strategy
            assert strategy.options.hardware.host_bytes == 24 * 10**9


def test_parts_of_ones_own_are_not_refused() -> None:
    check_batches(LightningModule(), object.__new__(ClassificationDataModule))
    check_batches(object.__new__(SequenceClassificationModule), LightningDataModule())


def test_an_interrupt_within_a_step_saves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = CausalLanguageModule.training_step, []

    def interrupted(self: CausalLanguageModule, batch: object) -> object:
        calls.append(batch)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(self, batch)

    monkeypatch.setattr(CausalLanguageModule, "training_step", interrupted)
    config = compose_small(
        tmp_path, "experiment=single_device", "callbacks.last_checkpoint.every_n_steps=1"
    )
    with pytest.raises(KeyboardInterrupt):
        train(config)
    last = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert last["global_step"] == 2


def test_an_interrupt_before_a_step_begins_saves_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: object, batch: object, batch_idx: int) -> None:
        if batch_idx == 2:
            raise KeyboardInterrupt

    train(compose_small(tmp_path / "whole", "trainer.max_steps=4"))
    config = compose_small(tmp_path / "run", "trainer.max_steps=4")
    with monkeypatch.context() as patch:
        patch.setattr(CausalLanguageModule, "on_train_batch_start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(config)
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    assert torch.load(last, weights_only=True)["global_step"] == 2
    train(compose_small(tmp_path / "run", "trainer.max_steps=4", f"ckpt_path={last}"))
    whole = torch.load(tmp_path / "whole" / "checkpoints" / "last.ckpt", weights_only=True)
    again = torch.load(last, weights_only=True)
    assert again["global_step"] == whole["global_step"] == 4
    for name, values in whole["state_dict"].items():
        assert torch.equal(values, again["state_dict"][name]), name


OPEN = [override for override in SMALL if not override.startswith("partition.")]


def plan_small(folder: Path, *overrides: str) -> str:
    done = run_program(roundpipe_commands.plan, folder, *OPEN, *overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def figures(text: str) -> list[float]:
    """The memory of a device and the seconds of a step in a report."""
    patterns = (r"device at stage X0\S* ([\d.]+) MiB", r"Predicted step: (\S+) s")
    return [float(re.findall(pattern, text)[0]) for pattern in patterns]


def test_what_is_planned_is_what_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # Logits are most of a device's memory, and no loss is fused for as few.
    few = ("data.seq_len=64", "data.text.validation_bytes=1200")
    given = (*few, "model.architecture.vocab_size=60000")
    page = plan_small(tmp_path, *given, "hydra.run.dir=plan")
    run_here(tmp_path, *given, "hydra.run.dir=run", "partition.num_microbatches=auto")
    assert figures(caplog.text) == pytest.approx(figures(page), rel=0.1)
    planned, ran = (Plan.load(tmp_path / name / "plan.json") for name in ("plan", "run"))
    assert planned.num_microbatches == ran.num_microbatches
    assert (planned.team_size, planned.round_size) == (ran.team_size, ran.round_size)
    assert planned.block_names == ran.block_names
    line = page.strip().splitlines()[-1]
    assert line.startswith("Train it: python train.py ")
    assert line.endswith(f" partition=saved partition.plan={tmp_path}/plan/plan.json")
    again = shlex.split(line)[4:]
    done = run_program(roundpipe_commands.train, tmp_path, *again, "hydra.run.dir=again")
    assert done.returncode == 0, done.stderr
    assert Plan.load(tmp_path / "again" / "plan.json") == planned


@pytest.mark.parametrize(
    ("override", "kind", "factor"),
    [
        ("trainer.strategy.update=async", "optimizer state", 12 / 8),
        ("trainer.precision=bf16-true", "gradients", 1 / 2),
        ("+trainer.strategy.gradient_dtype=bf16", "gradients", 1 / 2),
        ("optimizer=sgd", "optimizer state", 4 / 8),
        ("trainer.accumulate_grad_batches=2", "gradients", 2),
        ("train=false", "optimizer state", 0),
    ],
)
def test_a_plan_honours_what_training_honours(
    tmp_path: Path, override: str, kind: str, factor: float
) -> None:
    models: dict[str, MetaModel] = {}

    def host(*overrides: str) -> int:
        config = compose_small(tmp_path, *overrides)
        memory = Job(config, models=models).answer().memory.host
        return {name.value: size for name, size in memory.num_bytes}.get(kind, 0)

    assert host(override.lstrip("+")) == pytest.approx(factor * host(), rel=0.01)


def test_a_training_without_room_is_refused_before_it_takes_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roundpipe_lightning.cli.plan.answer.free_host_bytes", lambda: 300_000)
    monkeypatch.setattr(ModelSource, "_load_pretrained", None)
    done = run_here(tmp_path, "optimizer.lr=1e-5", status=3)
    assert "of host memory are missing" in done.stderr
    assert "What makes room for it: (1) " in done.stderr
    assert re.search(r"\(\d\) hardware\.host_memory=\d+GiB \(the same results, on", done.stderr)
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_pure_bfloat16_with_small_steps_is_offered_with_its_warning(tmp_path: Path) -> None:
    models: dict[str, MetaModel] = {}
    for rate, warns in (("1e-5", True), ("1e-3", False)):
        few = ("hardware=rtx4090x2", "hardware.host_memory=0.6MB", f"optimizer.lr={rate}")
        job = Job(compose_small(tmp_path, *few), models=models)
        found = cheapest_changes(job, is_measured=False, count=30)
        costs = {" ".join(remedy.change.overrides): remedy.change.cost for remedy, _ in found}
        assert costs["optimizer=adamw_8bit"] == "AdamW's moments are rounded to 8 bits"
        assert ("WARNING" in costs["trainer.precision=bf16-true"]) == warns


def test_rounded_copies_are_a_change_where_host_or_devices_lack_memory(tmp_path: Path) -> None:
    models: dict[str, MetaModel] = {}
    for place, given, change in (
        ("host", "bf16", "null"),
        ("device", "null", "auto"),
    ):
        cards = ("hardware=rtx4090x2", f"trainer.strategy.upload_dtype={given}")
        job = Job(compose_small(tmp_path, *cards), models=models)
        need = getattr(fit_training(job.first_job).memory, place).total_bytes
        less = f"hardware.{place}_bytes={need - 1000}"
        job = Job(compose_small(tmp_path, *cards, less), models=models)
        found = cheapest_changes(job, is_measured=False, count=30)
        [wanted] = [r for r, _ in found if f"upload_dtype={change}" in r.change.overrides[0]]
        assert wanted.price is Price.NOTHING
        assert wanted.change.cost.startswith("the same results;")


@pytest.mark.suite("given0")
@pytest.mark.parametrize("given", [(), ("peft=lora", "trainer.strategy.upload_dtype=null")])
def test_what_fits_is_offered_by_a_machine_that_has_just_enough(
    tmp_path: Path, given: tuple[str, ...]
) -> None:
    models: dict[str, MetaModel] = {}
    cards = ("hardware=rtx4090x2", *given)

    def changes(*overrides: str) -> dict[tuple[str, ...], int]:
        job = Job(compose_small(tmp_path, *cards, *overrides), models=models)
        found = cheapest_changes(job, is_measured=False, count=30)
        return {r.change.overrides: answer.memory.host.total_bytes for r, answer in found}

    need = fit_training(Job(compose_small(tmp_path, *cards), models=models).first_job)
    offered = changes(f"hardware.host_bytes={need.memory.host.total_bytes - 1}")
    offered = {change: size for change, size in offered.items() if "hardware" not in str(change)}
    assert len(offered) > 2
    for change, size in [*offered.items()][::4]:
        assert change in changes(f"hardware.host_bytes={size}")


def test_a_pair_of_changes_or_more_hosts_leave_all_parameters_trained(tmp_path: Path) -> None:
    four = "model.architecture.num_hidden_layers=4"
    few = ("hardware=rtx4090x2", "hardware.host_memory=0.4MB", "partition.num_microbatches=2", four)
    found = cheapest_changes(Job(compose_small(tmp_path, *few)), is_measured=False)
    first = found[0][0].change
    assert first.overrides == ("optimizer=adamw_8bit", "trainer.precision=bf16-true")
    assert first.cost.startswith("AdamW's moments are rounded to 8 bits; weights are kept in bfl")
    assert len({remedy.change.overrides for remedy, _ in found}) == len(found) >= 3
    little = Job(compose_small(tmp_path, *few, "hardware.host_memory=0.6MB"))
    every = cheapest_changes(little, is_measured=False, count=30)
    assert ("nodes=2", "data.batch_size=2") in {remedy.change.overrides for remedy, _ in every}
    costs = [remedy.change.cost for remedy, _ in every]
    assert not any("rounded" in cost and "the same results" in cost for cost in costs), costs


def test_another_hub_name_alone_means_its_weights(tmp_path: Path) -> None:
    ModelSource(architecture=TINY).build().save_pretrained(tmp_path / "model")
    name = f"model.hub_name={tmp_path / 'model'}"
    assert Job(compose_small(tmp_path, name)).source.is_pretrained
    sizes = [each for each in SMALL if not each.startswith("model.")]
    for overrides, pretrained in (("", False), (f" {name}", True)):
        chosen = f"model=qwen3_0_6b{overrides}".split()
        job = Job(compose_small(tmp_path, *sizes, *chosen))
        assert job.source.is_pretrained == pretrained


def test_a_checkpoint_that_cannot_be_gone_on_from_is_one_line(tmp_path: Path) -> None:
    """However it is damaged; the run that it would have gone on in leaves no folder."""
    run_here(tmp_path, "hydra.run.dir=run", "checkpoint=distributed")
    run_program(roundpipe_commands.merge, tmp_path, "run", "one.ckpt")
    torch.save({**torch.load(tmp_path / "one.ckpt"), "roundpipe": 3}, tmp_path / "entry.ckpt")
    flip_bit(tmp_path / "one.ckpt")
    for name in ("index", "part"):
        shutil.copytree(tmp_path / "run" / "checkpoints" / "last.ckpt", tmp_path / name)
    flip_bit(next((tmp_path / "part").glob("*.distcp")))
    (tmp_path / "index" / ".metadata").write_bytes(b"\xff\xfe{}")
    for given, named in (
        ("one.ckpt", "differs from its digest"),
        ("part", "differs from its digest"),
        ("index", ".metadata does not end as it"),
        ("entry.ckpt", "entry 'roundpipe' does not fit here"),
        ("run optimizer=sgd", "of another optimizer than SGD: it has no dampening"),
    ):
        done = run_here(tmp_path, "hydra.run.dir=more", *f"ckpt_path={given}".split(), status=2)
        [line] = done.stderr.partition("Error: ")[2].strip().splitlines()
        assert named in line
        assert not (tmp_path / "more").exists()


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ("hardware_file=mine.yaml", "mine.yaml: devices_per_root"),
        ("model.hub_name=empty", "holds no weights"),
        ("model.hub_name=./nowhere", "'./nowhere' is neither on the hub nor a folder here"),
        ("partition=saved partition.plan=plan.json", "The plan is for 2 workers"),
        ("partition=saved", "plan='plan.json' does not exist. Runs and roundpipe-plan"),
        ("seed=abc", "seed='abc': give a whole number"),
        ("hardware_file=broken.yaml", "broken.yaml is not YAML: while parsing"),
        ("callbacks.last_checkpoint.dirpath=mine.yaml/x", "yaml/x cannot be written: Not a"),
        ("callbacks.run_report.dirpath=mine.yaml/x", "run_report.dirpath=mine.yaml/x cannot be"),
        ("callbacks.timeline.dirpath=mine.yaml/x", "timeline.dirpath=mine.yaml/x cannot be"),
        ("callbacks.last_checkpoint.dirpath=foo://bar", "foo://bar cannot be reached"),
        (
            "experiment=dpo data.text.train_bytes=9",
            "There is no setting data.text.train_bytes. --cfg",
        ),
        ("hardware.cpu_workers=0", "hardware.cpu_workers=0 must be 1 or more"),
        ("trainer.val_check_interval=99999 trainer.check_val_every_n_epoch=1", "must be less than"),
        ("~logger", "logger: Missing key logger. --cfg job shows"),
        ("paths.log_dir=s3://bucket", "paths.log_dir=s3://bucket: a run's folder is on this"),
    ],
)
def test_bad_input_ends_with_2_and_leaves_nothing(
    tmp_path: Path, overrides: str, named: str
) -> None:
    ModelSource(architecture=TINY).load_config().save_pretrained(tmp_path / "empty")
    (tmp_path / "mine.yaml").write_text("devices: {rtx4090: 2}\ndevices_per_root: 3\n")
    (tmp_path / "broken.yaml").write_text("a: [1\n")
    if "plan.json" in overrides:
        plan_small(tmp_path, "hardware.cpu_workers=2", "hydra.run.dir=.", "data.batch_size=4")
    before = sorted(tmp_path.iterdir())
    sizes = [each for each in SMALL if "num_microbatches" not in each and "hardware" not in each]
    done = run_program(roundpipe_commands.train, tmp_path, *sizes, *overrides.split())
    assert done.returncode == 2, done.stdout + done.stderr
    assert named in done.stderr
    assert len(done.stderr.partition("Error:")[2].strip().splitlines()) == 1
    assert sorted(tmp_path.iterdir()) == before


def test_a_run_that_diverges_keeps_its_last_finite_checkpoint(tmp_path: Path) -> None:
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    words = ("trainer.gradient_clip_val=null", "trainer.max_steps=9", "validate=false")
    rate = ("optimizer=sgd", "optimizer.lr=1e30")
    often = (*words, *rate, "callbacks.last_checkpoint.every_n_steps=1")
    done = run_here(tmp_path, "hydra.run.dir=run", *often, status=2)
    [line] = done.stderr.partition("Error: ")[2].strip().splitlines()
    assert "training has diverged. Go on from the last finite checkpoint, ckpt_path=" in line
    content = torch.load(last, weights_only=True)
    assert 0 < content["global_step"] < 9
    assert all(value.isfinite().all() for value in content["state_dict"].values())
    run_here(tmp_path, "hydra.run.dir=further", *often, "callbacks.finite_check=null")
    content = torch.load(tmp_path / "further" / "checkpoints" / "last.ckpt", weights_only=True)
    assert content["global_step"] == 9


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_not_saved(value: float, tmp_path: Path) -> None:
    """A buffer, and a parameter that is not trained, may have any values."""
    module = Regressor()
    module.register_buffer("mask", torch.tensor([-math.inf]))
    trainer = make_trainer(callbacks=[FiniteCheck()], max_steps=2)
    trainer.fit(module, regression_data())
    trainer.save_checkpoint(tmp_path / "whole.ckpt")
    name, parameter = next(iter(module.named_parameters()))
    with torch.no_grad():
        parameter.view(-1)[0] = value
    with pytest.raises(DivergedError, match=f"{name} has values that are not finite, after 2"):
        trainer.save_checkpoint(tmp_path / "broken.ckpt")
    assert not (tmp_path / "broken.ckpt").exists()
    parameter.requires_grad_(False)
    trainer.save_checkpoint(tmp_path / "frozen.ckpt")


def test_an_optimizer_s_option_that_is_typed_holds_for_a_run_that_goes_on(tmp_path: Path) -> None:
    """The schedule goes on from its step; what is not typed is the checkpoint's."""
    words = ("validate=false", "optimizer.weight_decay=0.3")
    first = ("optimizer.lr=0.001", "optimizer.betas=[0.8,0.9]")
    run_here(tmp_path, "hydra.run.dir=run", *words, *first)
    last = "ckpt_path=run/checkpoints/last.ckpt"
    for lr in ("0.004", None):
        typed = [] if lr is None else [f"optimizer.lr={lr}"]
        name = f"hydra.run.dir=on{lr}"
        done = run_here(tmp_path, name, *words, last, "trainer.max_steps=5", *typed)
        assert ("optimizer.lr=0.004: the checkpoint has 0.001." in done.stderr) == (lr is not None)
        content = torch.load(tmp_path / f"on{lr}/checkpoints/last.ckpt", weights_only=True)
        [group] = content["optimizer_states"][0]["param_groups"]
        assert group["initial_lr"] == float(lr or 0.001)
        assert group["betas"] == (0.8, 0.9)
        assert group["weight_decay"] == 0.3
        scheduler = content["lr_schedulers"][0]
        assert scheduler["base_lrs"] == [float(lr or 0.001)]
        assert 0 < group["lr"] <= group["initial_lr"]
        assert scheduler["_last_lr"] == [group["lr"]]


@pytest.mark.parametrize("key", [*job._MOST])
def test_a_number_that_no_machine_has_is_refused_at_once(key: str, tmp_path: Path) -> None:
    most = job._MOST[key]
    with pytest.raises(ConfigurationError, match=rf"{key}={most + 1}: give {most:,} or less"):
        train_small(tmp_path, f"++{key}={most + 1}")
