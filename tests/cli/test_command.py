import contextlib
import csv
import errno
import functools
import gc
import json
import logging
import pickle
import re
import shlex
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule
from omegaconf import OmegaConf

import roundpipe_commands as commands
from roundpipe_lightning import PipelineMonitor, Plan, PlanReport
from roundpipe_lightning.cli import train
from roundpipe_lightning.cli.callbacks import GracefulInterrupt, MetricsFile
from roundpipe_lightning.cli.train import monitored_rows, summary_rows
from roundpipe_lightning.modules import CausalLanguageModule
from roundpipe_lightning.planning.model.hardware import config_folder
from tests.kit.programs import run_program
from tests.kit.runs import (
    REPOSITORY,
    RUN_FILES,
    SMALL,
    SUMMARY_KEYS,
    command,
    composed,
    environment,
    files,
    run,
    run_here,
    summary,
    train_small,
)
from tests.kit.training import Regressor, regression_data


def test_the_main_job_leaves_a_complete_folder(tmp_path: Path) -> None:
    done = run(tmp_path)
    [folder] = (tmp_path / "logs" / "train" / "runs").iterdir()
    assert files(folder) == RUN_FILES

    figures = summary(folder)
    assert set(figures) == SUMMARY_KEYS
    assert (figures["num_workers"], figures["num_microbatches"], figures["num_steps"]) == (4, 4, 3)
    assert 4.5 < figures["loss_first"] < 6.5
    assert figures["loss_last"] < figures["loss_first"]
    assert 0 <= figures["bubble_predicted"] < 1
    assert 0 < figures["bubble_measured"] < 1
    assert figures["tokens_per_second"] > 0
    assert figures["peak_host_bytes"] > 2**20

    plan = Plan.load(folder / "plan.json")
    assert (plan.num_workers, len(plan.block_names)) == (4, 2)
    config = OmegaConf.load(folder / "config.yaml")
    assert config.trainer.devices == 4
    assert json.loads((folder / "timeline.json").read_text())["traceEvents"]
    ET.parse(folder / "timeline.svg")
    with (folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert float(rows[0]["train_loss"]) == pytest.approx(figures["loss_first"])
    assert "Training loss" in done.stdout
    assert str(folder) in done.stdout


def test_prints_the_configuration_of_a_job(tmp_path: Path) -> None:
    done = run_here(tmp_path, "experiment=long_windows", options=("--cfg", "job"))
    assert OmegaConf.create(done.stdout).tags == ["long_windows"]
    assert files(tmp_path) == set()


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("trainer.strategy.dryrun=false", "Did you mean trainer.strategy.dry_run"),
        ("lr=1", "There is no setting lr. Did you mean optimizer.lr?"),
        ("trainer.fast_dev_run=true", "conf/trainer does not: +trainer.fast_dev_run=... hands it"),
        ("trainer.callbacks=[]", "Did you mean callbacks?"),
        ("data.seqlen=3", "Did you mean data.seq_len"),
        ("optimizer.learning_rate=1", "Did you mean optimizer.lr?"),
        ("base_model=gpt2", "Did you mean model?"),
        ("lr_scheduler=cosine", "Did you mean scheduler?"),
        ("logger=tensorbord", "Did you mean logger=tensorboard? There are: csv, mlflow, none"),
        ("hydra.run.dir=/dev/null/run", "The run's folder cannot be made"),
        ("task_name=a/b", "Set hydra.run.dir, paths.log_dir or task_name"),
        ("data.files=[a", "no viable alternative"),
        ("recipe=qwen3_8b/loraa", "Did you mean recipe=qwen3_8b/lora? There are: qwen3_8b/dpo, q"),
        ("recipie=qwen3_8b/lora", "There is no setting recipie. Did you mean recipe?"),
        ("my.jsonl", "'my.jsonl' is no setting. Write them as NAME=VALUE, such as data=chats"),
        ("optimizer.lr=1e-4,", "'optimizer.lr=1e-4,' cannot be read (mismatched input '<EOF>')."),
        ("model.hub_name=[a", "Text is given as 'model.hub_name=\"[a\"'."),
        ("--data", "'--data' is no setting. Write them as NAME=VALUE"),
        ("+push_to_hub=a/b", "There is no setting push_to_hub. roundpipe-export has it."),
        ("+partition.team=2", "Did you mean partition.team_size or"),
        ("hardware=4090", "hardware=4090 does not exist. Did you mean hardware=rtx4090?"),
        ("--config", "'--config' is no setting. Write them as NAME=VALUE"),
    ],
)
def test_what_the_command_line_gets_wrong_is_one_line(
    tmp_path: Path, override: str, named: str
) -> None:
    done = run_here(tmp_path, "peft=lora", override, status=2)
    assert named in done.stderr
    assert done.stderr.count("\n") == 1
    assert files(tmp_path) == set()


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("data=a.jsonl", ["data=chat", "data.files=['a.jsonl']"]),
        ("data=my/chats", ["data=chat", "data.files=['my/chats']"]),
        ("data.files=a.jsonl", ["data=chat", "data.files=['a.jsonl']"]),
        ("data=text data.files=[a.txt]", ["data=text", "data.files=[a.txt]"]),
        ("data={a.jsonl: 2, b.json: 0.5}", ["data=chat", "data.files={a.jsonl: 2, b.json: 0.5}"]),
        (
            "recipe=qwen3_8b/dpo data=it's.json",
            ["recipe=qwen3_8b/dpo", r"data.files=['it\'s.json']"],
        ),
        ("experiment=dpo data=a.csv", ["experiment=dpo", "data.files=['a.csv']"]),
        ("data=text model=tiny", ["data=text", "model=tiny"]),
        ("model=Qwen/Qwen3-8B", ["model=qwen3_8b", "model.weights=pretrained"]),
        ("model=me/mine", ["model=hub", "model.hub_name='me/mine'"]),
        ("hardware=my/own.yaml", ["hardware_file=my/own.yaml"]),
        ("+w=2 data.seq_len=${w} ++v=1", ["+w=2", "data.seq_len=${w}", "v=1"]),
        ("data=chats", ["data=chats"]),  # an error that lists what there is
    ],
)
def test_files_and_models_are_named_by_themselves(given: str, meant: list[str]) -> None:
    words = [given] if "{a" in given else given.split()
    assert commands.in_settings(words, config_folder()) == meant


def test_a_folder_that_is_here_needs_no_slash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "tiny"):
        (tmp_path / name).mkdir()
    words = commands.in_settings(["data=mine", "model=mine"], config_folder())
    assert words == ["data=chat", "data.files=['mine']", "model=hub", "model.hub_name='mine'"]
    assert commands.in_settings(["model=tiny"], config_folder()) == ["model=tiny"]


def test_words_of_yaml_and_python_are_values() -> None:
    words = ["data.packing=no", "train=off", "+trainer.benchmark=yes", "ckpt_path=None", "a='no'"]
    meant = ["data.packing=false", "train=false", "+trainer.benchmark=true", "ckpt_path=null"]
    assert commands.in_settings(words, config_folder()) == [*meant, "a='no'"]


def test_a_module_that_is_none_does_not_choose_the_data() -> None:
    words = commands.in_settings(["module=dpo", "data=a.jsonl"], config_folder())
    assert words == ["module=dpo", "data=chat", "data.files=['a.jsonl']"]


def test_data_is_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    lines = [json.dumps({"instruction": "ask", "reply": f"answer {n}"}) for n in range(9)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines), encoding="utf-8")
    words = ("data=a.jsonl", "data.seq_len=64", "data.fields={output: reply}")
    done = run_program(commands.data, tmp_path, *words)
    assert "a.jsonl: Alpaca" in done.stdout
    assert "[[a|n|s|w|e|r| |0|<|im_end|>]]" in done.stdout
    assert (done.stdout + caplog.text).count("Data: a.jsonl (Alpaca); 8 samples in") == 1
    assert "Data: a.jsonl (Alpaca); 8 samples in" in done.stdout
    done = run_program(commands.data, tmp_path, *words, "data.batch_size=0")
    assert (done.returncode, done.stderr) == (2, "\nError: data.batch_size=0 must be 1 or more.\n")
    (tmp_path / "a.jsonl").write_text('{"ask": "x"}', encoding="utf-8")
    done = run_program(commands.data, tmp_path, "data=a.jsonl")
    assert done.returncode == 2
    assert "Error: a.jsonl, line 1: the fields 'ask' are of no known form" in done.stderr
    pairs = [json.dumps({"prompt": "?", "chosen": f"{n}", "rejected": "no"}) for n in range(9)]
    (tmp_path / "a.jsonl").write_text("\n".join(pairs), encoding="utf-8")
    done = run_program(commands.data, tmp_path, "experiment=dpo", "data=a.jsonl")
    assert re.search(r"chosen:\n.*\[\[0.*rejected:\n.*\[\[n\|o", done.stdout, re.DOTALL)
    (tmp_path / "a.csv").write_text("text,label\n" + "fine,good\n" * 9, encoding="utf-8")
    words = ("module=classification", "data=a.csv", "data.classes=[bad,good]")
    assert "class good:\nf|i|n|e\n" in run_program(commands.data, tmp_path, *words).stdout
    for word, message in {
        "data.files=null": "data files: there are none",
        "tokens=few": "tokens='few': give a whole number",
    }.items():
        done = run_program(commands.data, tmp_path, *words, word)
        assert f"Error: {message}" in done.stderr


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, _: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(train, "write_text", fail)
    monkeypatch.setattr(logging, "raiseExceptions", True)  # the command switches it off
    done = run_here(tmp_path, "hydra.run.dir=run", status=2)
    assert "The run's folder cannot be written: [Errno 28] No space left on device" in done.stderr
    assert "config.yaml'. Set hydra.run.dir or paths.log_dir." in done.stderr
    assert "Traceback" not in done.stderr


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    done = run_here(tmp_path, "paths.output_dir=/dev/null/run", status=2)
    assert "The run's folder cannot be written: [Errno 20] Not a directory" in done.stderr
    assert "Traceback" not in done.stderr


def test_help_does_not_wait_for_torch(tmp_path: Path) -> None:
    code = """if True:
        import contextlib, sys, roundpipe_commands
        for name in ("train", "plan", "data", "export", "chat", "merge"):
            sys.argv = [name, "--help"]
            with contextlib.suppress(SystemExit):
                getattr(roundpipe_commands, name)()
        slow = {"torch", "lightning", "transformers", "peft", "datasets", "numpy"}
        assert not slow & set(sys.modules), slow & set(sys.modules)
    """
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment(PYTHONPATH=str(REPOSITORY)),
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "trainer" in done.stdout
    page = " ".join(done.stdout.split())
    for words in (
        "roundpipe-train ckpt_path=last",
        "roundpipe-plan model=qwen3_32b hardware=rtx4090x8",
        "roundpipe-data data=chats.json",
        "roundpipe-export ckpt_path=last",
        "roundpipe-merge makes one file of a folder",
        "usage: roundpipe-chat",
        "A folder of Hugging Face is what roundpipe-export writes",
        "Example: roundpipe-merge",
    ):
        assert words in page


def test_sweeps_with_the_basic_launcher(tmp_path: Path) -> None:
    jobs = "optimizer.lr=0.001,-1,abc,0.01"
    done = run_here(tmp_path, jobs, "-m", "hydra.sweep.dir=sweep", status=2)
    losses = [summary(tmp_path / "sweep" / number)["val_loss"] for number in ("0", "3")]
    assert losses[0] != losses[1]
    table = done.stdout.partition("This sweep")[2]
    assert all(f"{loss:.5g}" in table for loss in losses)
    assert table.count("failed:") == 2
    assert "lr=-1.0: give a number of 0 or more" in done.stderr
    assert "Traceback" not in done.stderr


def test_ctrl_c_in_a_sweep_leaves_a_table_of_the_jobs_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: CausalLanguageModule) -> None:
        if self.trainer.max_steps == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(CausalLanguageModule, "on_train_start", interrupted)
    jobs = ("trainer.max_steps=1,2,3", "-m", "hydra.sweep.dir=sweep")
    done = run_here(tmp_path, *jobs, status=130)
    table = done.stdout.partition("This sweep")[2]
    assert f"{summary(tmp_path / 'sweep' / '0')['val_loss']:.5g}" in table
    assert table.count("failed:") == 1
    assert not (tmp_path / "sweep" / "2").exists()


def test_a_job_with_a_bug_does_not_end_a_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: CausalLanguageModule) -> None:
        assert self.trainer.max_steps != 1, "a bug"

    monkeypatch.setattr(CausalLanguageModule, "on_train_start", fails)
    done = run_here(tmp_path, "trainer.max_steps=1,2", "-m", "hydra.sweep.dir=sweep", status=1)
    table = done.stdout.partition("This sweep")[2]
    assert f"{summary(tmp_path / 'sweep' / '1')['val_loss']:.5g}" in table
    assert table.count("failed:") == 1
    assert "AssertionError: a bug" in (tmp_path / "sweep" / "0" / "train.log").read_text()


@pytest.mark.soak  # below, signals reach a run in this process
def test_ctrl_c_leaves_a_checkpoint_to_go_on_from(tmp_path: Path) -> None:
    process = subprocess.Popen(
        command(
            "trainer.max_steps=100000",
            "trainer.enable_progress_bar=false",
            "~callbacks.progress_bar",
            "hydra.run.dir=run",
            "logger.csv.flush_every_n_steps=1",
        ),
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for(tmp_path / "run" / "metrics.csv", process)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=250)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130, errors
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    assert last.is_file()
    assert f"ckpt_path={last}" in errors
    assert "Traceback" not in errors
    kept = tmp_path / "logs" / "train" / "runs" / "first" / "checkpoints" / "last.ckpt"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(last.read_bytes())
    done = torch.load(last, weights_only=True)["global_step"]
    run_here(
        tmp_path,
        "hydra.run.dir=more",
        f"trainer.max_steps={done + 2}",
        "ckpt_path=last",
    )


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    """Wait until a file is there; fail if the process ends first."""
    deadline = time.monotonic() + 250
    while not path.exists():
        assert process.poll() is None, "ended before it trained"
        assert time.monotonic() < deadline, f"{path} was not written"
        time.sleep(0.1)


# Callbacks ----------------------------------------------------------------------------------------


@pytest.mark.suite("2-training_step-130", "15-on_validation_start-143")
@pytest.mark.parametrize(
    ("number", "hook", "status"),
    [
        (signal.SIGINT, "training_step", 130),
        (signal.SIGTERM, "training_step", 143),
        (signal.SIGTERM, "on_validation_start", 143),
        (signal.SIGUSR1, "training_step", 138),  # SLURM's warning
    ],
)
def test_a_run_that_is_asked_to_stop_saves_and_says_how_to_go_on(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    number: int,
    hook: str,
    status: int,
) -> None:
    caplog.set_level(logging.INFO)
    for name, value in (("NTASKS", "1"), ("JOB_NAME", "mine"), ("JOB_ID", "7")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    before = signal.getsignal(number)
    original: Any = getattr(CausalLanguageModule, hook)

    signals = [number]

    @functools.wraps(original)
    def asked(self: CausalLanguageModule, *arguments: Any) -> Any:
        if self.global_step == 2 and signal.getsignal(number) != before:
            with contextlib.suppress(IndexError):  # another microbatch has raised it
                signal.raise_signal(signals.pop())
        return original(self, *arguments)

    monkeypatch.setattr(CausalLanguageModule, hook, asked)
    done = run_here(
        tmp_path,
        "hydra.run.dir=run",
        "hydra.job.chdir=false",
        "trainer.val_check_interval=2",
        "trainer.max_steps=9",
        status=status,
    )
    assert signal.getsignal(number) == before
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    num_steps = torch.load(last)["global_step"]
    assert num_steps == (3 if hook == "training_step" else 2)
    with (tmp_path / "run" / "metrics.csv").open(newline="") as file:
        losses = [row for row in csv.DictReader(file) if row["train_loss"]]
    assert len(losses) == num_steps, "no row is lost"
    assert f"trainer.max_steps=9 ckpt_path={last}" in done.stderr
    assert " hydra.run.dir=run hydra.job.chdir=false " in done.stderr
    assert "auto-requeueing" not in caplog.text
    assert (tmp_path / "run" / "plan.json").is_file()


class Silent(Regressor):
    """Logs nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__("adamw")

    def log(self, *_: Any, **__: Any) -> None: ...


class Numbers(LightningDataModule):
    """Has no tokens."""

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def train_dataloader(self) -> Any:
        return regression_data()

    def val_dataloader(self) -> Any:
        return regression_data(8)


def test_a_module_that_logs_nothing_and_has_no_tokens(tmp_path: Path) -> None:
    figures = train_small(
        tmp_path, f"module._target_={__name__}.Silent", f"data._target_={__name__}.Numbers"
    )
    assert figures["num_steps"] == 3
    assert 0 < figures["loss_last"] < figures["loss_first"]
    assert figures["tokens_per_second"] is figures["val_loss"] is None


def test_a_second_ctrl_c_interrupts_within_the_step() -> None:
    with GracefulInterrupt() as interrupt:
        interrupt.on_train_batch_start()
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_job_can_be_handed_to_another_process() -> None:
    job = commands._Job("train")
    copied = pickle.loads(pickle.dumps(job))
    assert copied.name == "train"
    path = Path(copied._path)
    path.write_text("".join(json.dumps({"number": n}) + "\n" for n in (1, 0)))
    assert [entry["number"] for entry in job.entries()] == [0, 1]
    del job, copied
    gc.collect()
    assert not path.exists()


@pytest.mark.soak
def test_a_sweep_runs_in_processes(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher", reason="no joblib launcher here")
    asked = ["-m", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "optimizer.lr=1e-3,3e-3"]
    words = [sys.executable, "train.py", *asked, *SMALL, f"hydra.sweep.dir={tmp_path}"]
    done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for number, rate in enumerate(("0.001", "0.003")):
        assert re.search(rf"{number} .* optimizer\.lr={rate} .*\d\.\d", done.stdout)
        assert (tmp_path / str(number) / "summary.json").is_file()


def test_metrics_share_the_line_of_their_step_also_after_a_resume(tmp_path: Path) -> None:
    metrics = MetricsFile(str(tmp_path), flush_every_n_steps=1)
    metrics.log_hyperparams({"lr": 1})
    metrics.save()
    assert list(tmp_path.iterdir()) == []
    metrics.log_metrics({"lr": 0.5}, step=0)
    metrics.log_metrics({"train_loss": 3.0}, step=0)
    metrics.log_metrics({"train_loss": 2.0}, step=1)
    metrics.log_metrics({"val_loss": 9.0}, step=2)  # a column that comes later
    metrics.finalize("success")
    resumed = MetricsFile(str(tmp_path))
    resumed.log_metrics({"val_loss": 9.5}, step=2)  # the step is done again
    resumed.log_metrics({"train_loss": 1.0}, step=3)
    resumed.save()
    evaluated = MetricsFile(str(tmp_path))
    evaluated.log_hyperparams({"train": False})
    evaluated.log_metrics({"val_loss": 9.0}, step=0)  # an evaluation's only step
    evaluated.save()
    rows = read(tmp_path / "metrics.csv")
    assert rows.pop()["val_loss"] == "9.0"
    assert rows == [
        {"step": "0", "lr": "0.5", "train_loss": "3.0", "val_loss": ""},
        {"step": "1", "lr": "", "train_loss": "2.0", "val_loss": ""},
        {"step": "2", "lr": "", "train_loss": "", "val_loss": "9.5"},
        {"step": "3", "lr": "", "train_loss": "1.0", "val_loss": ""},
    ]


@pytest.mark.parametrize(
    "runs",
    [
        [[("train", 0), ("train", 1)], [("train", 2), ("val", 2)]],
        [[("train", 0), ("train", 1), ("train", 2)], [("train", 1), ("train", 2)]],
        [[("train", 0), ("train", 1), ("val", 1)], [("val", 1), ("train", 2)]],
        [[("train", 0), ("train", 1)], [("val", 1), ("train", 2)]],
        [[("train", 0)], [("val", 0), ("train", 1)], [("val", 1), ("train", 2)]],
    ],
    ids=["a step", "killed", "validated", "killed in a validation", "twice"],
)
def test_a_validation_that_was_due_keeps_the_row_of_its_step(tmp_path: Path, runs: Any) -> None:
    for logged in runs:
        metrics = MetricsFile(str(tmp_path))
        for stage, step in logged:
            metrics.log_metrics({f"{stage}_loss": 1.0}, step=step)
            metrics.save()
    rows = read(tmp_path / "metrics.csv")
    assert [row["step"] for row in rows if row["train_loss"]] == ["0", "1", "2"]


WHOLE: dict[str, Any] = {
    "tokens_per_second": 12345.6,
    "loss_first": 5.5512,
    "loss_last": 2.0049,
    "val_loss": 2.1,
    "test_loss": 2.2,
    "metrics": {"test_accuracy": 0.51239},
    "bubble_predicted": 0.1,
    "bubble_measured": 0.156,
    "peak_device_bytes": 3 * 2**20,
    "peak_host_bytes": 5 * 2**29,
    "num_workers": 4,
    "num_microbatches": 8,
    "num_steps": 1,
    "left_out": ["2 of 9 samples left out: longer than data.seq_len=8 tokens"],
}


def test_the_table_reads_well() -> None:
    assert summary_rows(WHOLE, unit=" nats per token") == [
        ("Training", "1 step of 8 microbatches on 4 workers"),
        ("Not trained on", "2 of 9 samples left out: longer than data.seq_len=8 tokens"),
        ("Training loss", "from 5.55 to 2.00 nats per token"),
        ("Validation loss", "2.10 nats per token"),
        ("Test loss", "2.20 nats per token"),
        ("test_accuracy", "0.5124"),
        ("Speed", "12,346 tokens a second"),
        ("Workers waited", "16% of the time (10% expected)"),
        ("Most memory on a device", "3.0 MiB"),
        ("Most memory of the process", "2.50 GiB"),
    ]
    empty = {**dict.fromkeys(SUMMARY_KEYS), "peak_host_bytes": 5 * 2**29, "num_workers": 4}
    empty |= {"metrics": {}, "num_steps": 0, "num_microbatches": 1}
    assert summary_rows(empty, unit="") == [  # without what the run did not have
        ("Training", "0 steps of 1 microbatch on 4 workers"),
        ("Most memory of the process", "2.50 GiB"),
    ]


IDLE = {
    "idle_share": 0.4,
    "idle_fill_share": 0.05,
    "idle_drain_share": 0.004,
    "idle_upload_share": 0.0,
    "idle_boundary_share": 0.1,
    "idle_optimizer_share": 0.0,
    "idle_data_share": 0.236,
    "idle_other_share": 0.01,
}


@pytest.mark.parametrize(
    ("figures", "rows"),
    [
        (
            {"tflop_per_second": 12.345, "share_of_peak": 0.1234, **IDLE},
            [
                ("Arithmetic", "12.3 TFLOP/s, 12.3% of the devices' peak"),
                ("Idle altogether", "40% of the time: data 24%, boundary 10%, fill 5%, other 1%"),
            ],
        ),
        ({"tflop_per_second": 0.5}, [("Arithmetic", "0.5 TFLOP/s")]),
        ({}, []),
    ],
)
def test_rows_of_a_monitor(
    figures: dict[str, float],
    rows: list[tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PipelineMonitor, "figures", property(lambda _: figures))
    assert monitored_rows([PlanReport(), PipelineMonitor()]) == rows
    assert monitored_rows([PlanReport()]) == []


def test_a_refused_run_leaves_what_others_have_put_beside_it(tmp_path: Path) -> None:
    runs = tmp_path / "logs" / "train" / "runs"
    (runs / "other").mkdir(parents=True)
    run_here(tmp_path, "data.batch_size=0", status=2)
    assert [path.name for path in runs.iterdir()] == ["other"]


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (commands.train, ["data.batch_size=0"]),
        (commands.data, ["data=nothing/here.jsonl"]),
        (commands.export, ["ckpt_path=none.ckpt"]),
        (commands.plan, ["data.batch_size=0"]),
    ],
)
@pytest.mark.parametrize("is_current", [True, False])
def test_a_refused_run_leaves_a_folder_of_ones_own(
    tmp_path: Path,
    program: Callable[[], object],
    words: list[str],
    is_current: bool,
) -> None:
    """Files that look like those of a run, too; nothing of the command stays."""
    mine = tmp_path / "mine"
    (mine / "sub").mkdir(parents=True)
    (mine / "empty").mkdir()
    for name in ("experiment.yaml", "results.log", "sub/k8s.yaml", "config.yaml", "run.json"):
        (mine / name).write_text("mine")
    (mine / "link").symlink_to(tmp_path / "not_there")
    before = sorted(mine.rglob("*"))
    here = mine if is_current else tmp_path
    done = run_program(program, here, f"hydra.run.dir={'.' if is_current else mine}", *words)
    assert done.returncode == 2, done.stderr
    assert sorted(mine.rglob("*")) == before
    assert all(path.read_text() == "mine" for path in before if path.is_file())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a stream that is full")
@pytest.mark.parametrize("ends", ["2>&1 | head -n 1", ">/dev/full", "2>&-", ">&- 2>&-"])
def test_a_stream_that_ends_does_not_end_a_training(tmp_path: Path, ends: str) -> None:
    words = shlex.join(command("hydra.run.dir=run", "validate=false"))
    done = subprocess.run(
        ["bash", "-c", f"{words} {ends}; exit ${{PIPESTATUS[0]}}"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert (tmp_path / "run" / "summary.json").is_file()
    assert "Finished" in (tmp_path / "run" / "train.log").read_text()


@pytest.mark.parametrize("name", ["back\\slash", "it's", "a\\'b", "end\\", 'quo"te', "a=b,[c]"])
def test_a_path_is_read_as_it_is(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.mkdir()
    words = commands.in_settings([f"data={path}/."], config_folder())
    assert composed("train", *words).data.files == [f"{path}/."]
    assert composed("train", f"task_name={commands.as_setting(name)}").task_name == name


def test_a_name_that_is_too_long_is_one_line(tmp_path: Path) -> None:
    done = run_here(tmp_path, f"hydra.run.dir={'n' * 300}", status=2)
    assert "Error: The run's folder cannot be made: " in done.stderr
    assert "Traceback" not in done.stderr


def test_a_process_without_memory_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(train, "run", run)
    done = run_here(tmp_path, status=commands.EXIT_DOES_NOT_FIT)
    assert done.stderr.startswith("Error: this process may have no more memory. ")
