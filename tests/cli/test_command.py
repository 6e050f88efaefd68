import csv
import errno
import json
import logging
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

import roundpipe_commands as commands
from roundpipe_lightning import Plan
from roundpipe_lightning.cli import train
from roundpipe_lightning.planning.model.hardware import config_folder
from tests.kit.programs import run_program
from tests.kit.runs import (
    REPOSITORY,
    RUN_FILES,
    SUMMARY_KEYS,
    command,
    environment,
    files,
    run,
    run_here,
    summary,
)


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
        ("recipie=qwen3_8b/lora", "There is no setting recipie. Did you mean recipe?"),
        ("my.jsonl", "'my.jsonl' is no setting. Write them as NAME=VALUE, such as data=chats"),
        ("optimizer.lr=1e-4,", "'optimizer.lr=1e-4,' cannot be read (mismatched input '<EOF>')."),
        ("model.hub_name=[a", "Text is given as 'model.hub_name=\"[a\"'."),
        ("--data", "'--data' is no setting. Write them as NAME=VALUE"),
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
        ("data=chats", ["data=chats"]),  # an error that lists what there is
    ],
)
def test_files_and_models_are_named_by_themselves(given: str, meant: list[str]) -> None:
    words = [given] if "{" in given else given.split()
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
    (tmp_path / "a.jsonl").write_text('{"ask": "x"}', encoding="utf-8")
    done = run_program(commands.data, tmp_path, "data=a.jsonl")
    assert done.returncode == 2
    assert "Error: a.jsonl, line 1: the fields 'ask' are of no known form" in done.stderr
    pairs = [json.dumps({"prompt": "?", "chosen": f"{n}", "rejected": "no"}) for n in range(9)]
    (tmp_path / "a.jsonl").write_text("\n".join(pairs), encoding="utf-8")
    done = run_program(commands.data, tmp_path, "experiment=dpo", "data=a.jsonl")
    assert re.search(r"chosen:\n.*\[\[0.*rejected:\n.*\[\[n\|o", done.stdout, re.DOTALL)


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
    assert "roundpipe-train ckpt_path=last" in done.stdout
    assert "usage: roundpipe-chat" in done.stdout


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


def test_a_hub_that_cannot_be_reached_is_one_clear_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    done = run_here(
        tmp_path,
        "model=qwen3_0_6b",
        "model.hub_name=nobody/no-such-model",
        "model.weights=pretrained",
        "hydra.run.dir=run",
        status=2,
    )
    assert "Error: 'nobody/no-such-model' cannot be loaded" in done.stderr
    assert "model.weights=random" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.soak  # the signal reaches a run in this process in test_callbacks.py
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
