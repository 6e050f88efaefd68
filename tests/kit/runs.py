import copy
import functools
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig

import roundpipe_commands
from roundpipe_lightning.cli.train import train
from roundpipe_lightning.planning.model.hardware import config_folder
from tests.kit.programs import run_program

REPOSITORY = Path(__file__).parents[2]

SMALL = (
    "model.architecture.num_hidden_layers=2",
    "model.architecture.hidden_size=16",
    "model.architecture.intermediate_size=32",
    "data.seq_len=16",
    "data.batch_size=4",
    "data.text.train_bytes=20000",
    "data.text.validation_bytes=200",
    "hardware=cpu",
    "partition.num_microbatches=4",
    "scheduler.num_warmup_steps=1",
    "trainer.max_steps=3",
)
"""Overrides."""

SUMMARY_KEYS = {
    "tokens_per_second",
    "loss_first",
    "loss_last",
    "val_loss",
    "test_loss",
    "metrics",
    "bubble_predicted",
    "bubble_measured",
    "peak_device_bytes",
    "peak_host_bytes",
    "num_workers",
    "num_microbatches",
    "num_steps",
    "left_out",
    "answers",
}

RUN_FILES = {
    "config.yaml",
    "run.json",
    "metrics.csv",
    "plan.json",
    "checkpoints/last.ckpt",
    "timeline.json",
    "timeline.svg",
    "report.html",
    "loss.svg",
    "summary.json",
    "train.log",
    ".hydra/config.yaml",
    ".hydra/hydra.yaml",
    ".hydra/overrides.yaml",
    *(["timeline.png", "loss.png"] if find_spec("PIL") else []),
}


def composed(name: str, *overrides: str) -> DictConfig:
    """Compose a command's configuration; what its choices of files give is composed once."""
    parsed = [_parsed(override) for override in overrides]
    files = [(config_folder() / one.key_or_group).is_dir() for one in parsed]
    chosen = tuple(text for text, is_file in zip(overrides, files, strict=True) if is_file)
    config = copy.deepcopy(_composed(name, chosen))
    values = [one for one, is_file in zip(parsed, files, strict=True) if not is_file]
    ConfigLoaderImpl._apply_overrides_to_config(values, config)
    return config


@functools.cache
def _composed(name: str, chosen: tuple[str, ...]) -> DictConfig:
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        return compose(name, overrides=list(chosen))


@functools.cache
def _parsed(override: str) -> Override:
    [parsed] = OverridesParser.create().parse_overrides([override])
    return parsed


def compose_small(folder: Path, *overrides: str) -> DictConfig:
    return composed("train", *SMALL, f"paths.output_dir={folder}", *overrides)


def train_small(folder: Path, *overrides: str) -> dict[str, Any]:
    train(compose_small(folder, *overrides))
    return summary(folder)


def environment(**variables: str) -> dict[str, str]:
    """The environment of a command: one thread per worker, our warnings are errors."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "error::UserWarning,error::DeprecationWarning:roundpipe_lightning",
        **variables,
    }


def command(*overrides: str, options: tuple[str, ...] = ()) -> list[str]:
    return [sys.executable, str(REPOSITORY / "train.py"), *options, *SMALL, *overrides]


def run(
    folder: Path,
    *overrides: str,
    options: tuple[str, ...] = (),
    status: int = 0,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command(*overrides, options=options),
        cwd=folder,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done


def run_here(
    folder: Path, *overrides: str, options: tuple[str, ...] = (), status: int = 0
) -> subprocess.CompletedProcess[str]:
    done = run_program(roundpipe_commands.train, folder, *options, *SMALL, *overrides)
    assert done.returncode == status, done.stdout + done.stderr
    return done


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def summary(folder: Path) -> dict[str, Any]:
    figures: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return figures
