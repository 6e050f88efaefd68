"""From a composed configuration to the objects of a run; nothing is written on the way."""

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from omegaconf import DictConfig, OmegaConf

from roundpipe_lightning.checkpoint.folder import is_checkpoint_folder
from roundpipe_lightning.cli.callbacks import GracefulInterrupt, RunStatistics, useful_callbacks
from roundpipe_lightning.cli.job import Job
from roundpipe_lightning.cli.objects import build, build_each, whole
from roundpipe_lightning.cli.plan.answer import check_memory
from roundpipe_lightning.cli.run_folder import find_run, written_settings
from roundpipe_lightning.data import (
    ClassificationDataModule,
    FileDataModule,
    JudgedDataModule,
    PreferenceDataModule,
    VisionDataModule,
)
from roundpipe_lightning.errors import CheckpointError, ConfigurationError, HardwareError
from roundpipe_lightning.modules import (
    KahnemanTverskyModule,
    PairModule,
    SequenceClassificationModule,
    VisionLanguageModule,
)
from roundpipe_lightning.planning.model.hardware import HardwareSpec
from roundpipe_lightning.strategy.strategy import RoundPipeStrategy

_SAMPLES = ("_target_", "files", "text")  # settings of `data` that say what is trained on
_RUN_NAMES = ("id", "run_id")  # settings of loggers that name one of their runs


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything a run needs, checked against each other.

    Attributes:
        config: The configuration it was made from, the number of devices filled in.
        statistics: The callback that collects the figures of the summary.
        interrupt: The callback that makes Ctrl-C stop between two steps.
        checkpoint: Checkpoint to go on from or to evaluate; None: none.
    """

    config: DictConfig
    module: LightningModule
    data: LightningDataModule
    trainer: Trainer
    callbacks: tuple[Callback, ...]
    statistics: RunStatistics
    interrupt: GracefulInterrupt
    checkpoint: str | None


def build_run(config: DictConfig) -> Run:
    """Make the objects that a configuration describes; RoundPipeError: they do not fit."""
    for name in ("log_dir", "output_dir"):
        if "://" in config.paths[name]:
            raise ConfigurationError(
                f"paths.{name}={config.paths[name]}: a run's folder is on this machine. "
                "Checkpoints may go elsewhere: callbacks.last_checkpoint.dirpath=s3://bucket/run."
            )
    for name in ("callbacks", "logger"):
        if name in config.trainer:
            raise ConfigurationError(f"trainer.{name} is not read: choose {name}=..., see --help.")
    checkpoint = find_checkpoint(config)
    job = Job(config)
    check_devices(job)
    job.source.check_weights()
    data: LightningDataModule = build(job.config.data)
    check_tokens(job, data)
    check_memory(job)
    job = job.with_microbatches()
    config, module = job.config, job.new_module()
    check_batches(module, data)
    if isinstance(data, FileDataModule) and not data.options.validates:
        _leave_out_validation(config)
    statistics, interrupt = RunStatistics(), GracefulInterrupt()
    _go_on_from(checkpoint, config)
    loggers: list[Logger] = build_each("logger", config.logger)
    callbacks = build_each("callbacks", config.callbacks)
    callbacks = useful_callbacks(callbacks, config.trainer, logs=bool(loggers))
    check_folders(config)
    settings, strategy = config.trainer.copy(), job.new_strategy()
    extra: dict[str, Any] = {}
    if strategy is None and str(checkpoint).startswith("http"):
        raise ConfigurationError(
            f"ckpt_path={checkpoint}: Lightning's own strategies keep what an address had before "
            "under the file's name. Copy it to this machine first."
        )
    if strategy is not None:
        del settings.strategy
        extra["strategy"] = strategy
    if SLURMEnvironment.detect() and "plugins" not in settings:
        # Lightning would look for what it requeues in the run's folder, which is a new one
        extra["plugins"] = [SLURMEnvironment(auto_requeue=False)]
    trainer: Trainer = build(
        settings, **extra, callbacks=[statistics, *callbacks, interrupt], logger=loggers or False
    )
    return Run(
        config=config,
        module=module,
        data=data,
        trainer=trainer,
        callbacks=tuple(callbacks),
        statistics=statistics,
        interrupt=interrupt,
        checkpoint=checkpoint,
    )


def _leave_out_validation(config: DictConfig) -> None:
    """Settings of a run whose samples are all trained on."""
    if config.test:
        raise ConfigurationError(
            "test=true tests what is validated on, and data.validation_share=0 leaves nothing."
        )
    config.validate, config.trainer.limit_val_batches = False, 0
    if str(config.optimized_metric).startswith("val_"):
        config.optimized_metric = None


def _go_on_from(checkpoint: str | None, config: DictConfig) -> None:
    """Let loggers that name their runs go on in those of the run that wrote the checkpoint.

    The jobs of a sweep begin runs of their own. Samples that are not that run's are said.
    """
    if checkpoint is None or not config.train or "://" in checkpoint:
        return
    earlier = find_run(Path(checkpoint))
    if earlier is None:
        return
    samples = written_settings(config)["data"]
    differing = [
        f"data.{key}={earlier.value(f'data.{key}')}"
        for key in _SAMPLES
        if earlier.value(f"data.{key}") != samples.get(key)
    ]
    if differing:
        sys.stderr.write(
            f"Warning: the run of ckpt_path={config.ckpt_path} trained on other samples "
            f"({', '.join(differing)}). Set the same data if this one is to go on with them.\n"
        )
    if HydraConfig.initialized() and HydraConfig.get().mode is RunMode.MULTIRUN:
        return
    for name, node in (config.logger or {}).items():
        for key in _RUN_NAMES:
            if node is not None and key in node and node[key] is None:
                identity = earlier.value(f"logger.{name}.{key}")
                node[key] = identity if re.fullmatch(r"[\w.-]+", str(identity)) else None


def log_settings(run: Run) -> None:
    """Have the loggers log the configuration, and write the names of their runs into it.

    A run that goes on has its settings already; MLflow lets nobody change them.
    """
    settings = written_settings(run.config)
    nodes = [node for node in (run.config.logger or {}).values() if node is not None]
    for node, logger in zip(nodes, run.trainer.loggers, strict=False):  # a short trial has one
        key = next((key for key in _RUN_NAMES if key in node), None)
        if key is None or node[key] is None:
            logger.log_hyperparams(settings)
        if key is not None:
            node[key] = logger.version or None


def find_checkpoint(config: DictConfig) -> str | None:
    """The checkpoint of `ckpt_path`: a path or an address; CheckpointError: there is none.

    `last` and `best` are the newest of all runs; of the folder of a run or its checkpoints it is
    the last.
    """
    if config.ckpt_path is None:
        return None
    given = str(config.ckpt_path)
    if given in ("last", "best"):
        logs = Path(config.paths.log_dir)
        folders = (*logs.glob("*/runs/*"), *logs.glob("*/multiruns/*/*"))
        files = [folder / "checkpoints" / f"{given}.ckpt" for folder in folders]
        found = [file for file in files if file.exists()]
        if found:
            return str(max(found, key=lambda file: file.stat().st_mtime))
    if "://" in given and exists(given):
        return given.removeprefix("file://")
    checkpoint = Path(given).expanduser()
    if checkpoint.is_dir() and not is_checkpoint_folder(checkpoint):
        places = (checkpoint / "checkpoints" / "last.ckpt", checkpoint / "last.ckpt")
        checkpoint = next((last for last in places if last.exists()), checkpoint)
    if not checkpoint.exists():
        wanted = " (callbacks=best keeps it)" if given == "best" else ""
        raise CheckpointError(
            f"ckpt_path={given!r} does not exist{wanted} (looked in {Path.cwd()}). Runs keep "
            "theirs in logs/<task_name>/runs/<date>_<time>/checkpoints/last.ckpt; ckpt_path=last "
            "is the newest of them."
        )
    return str(checkpoint)


def exists(address: str) -> bool:
    """Return whether a file is there; CheckpointError: its place cannot be reached."""
    try:
        files, path = url_to_fs(address)
        return bool(files.exists(path))
    except Exception as error:
        raise CheckpointError(f"{address} cannot be reached: {error}") from error


def check_devices(job: Job) -> None:
    """Refuse a machine by name that is not the one at hand; HardwareError: it has other devices."""
    spec = job.hardware
    if job.computes_on_host or not isinstance(spec, HardwareSpec):
        return
    there = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    if there < job.num_devices:
        raise HardwareError(
            f"hardware={spec.name} has {job.num_devices} x {spec.device_name}, and this machine "
            f"has {there or 'no'} accelerators. Train with hardware=auto; roundpipe-plan plans for "
            "machines that are elsewhere."
        )


def check_batches(module: LightningModule, data: LightningDataModule) -> None:
    """Refuse a module that learns something else than the data has."""
    if not all(type(part).__module__.startswith("roundpipe_lightning.") for part in (module, data)):
        return
    for name, (learns, has) in {
        "preference": (PairModule, PreferenceDataModule),
        "kto": (KahnemanTverskyModule, JudgedDataModule),
        "vision": (VisionLanguageModule, VisionDataModule),
        "classification": (SequenceClassificationModule, ClassificationDataModule),
    }.items():
        if isinstance(module, learns) != isinstance(data, has):
            raise ConfigurationError(
                f"{type(module).__name__} does not learn from a {type(data).__name__}: "
                f"module={name} and data={name} go together."
            )


def check_tokens(job: Job, data: LightningDataModule) -> None:
    """Refuse a model that has no number for some of the data's tokens."""
    vocabulary = job.source.load_config().get_text_config().vocab_size
    num_tokens = getattr(data, "num_tokens", None)
    if num_tokens is not None and vocabulary < num_tokens:
        raise ConfigurationError(
            f"The model's vocabulary of {vocabulary} tokens is smaller than the "
            f"{num_tokens} tokens of the data. Set model.architecture.vocab_size to at least "
            f"{num_tokens}."
        )


def check_folders(config: DictConfig) -> None:
    """Refuse folders of callbacks that cannot be written; the run's own is made later."""
    for name, options in config.callbacks.items():
        folder = (options or {}).get("dirpath")
        if folder is None or Path(folder).is_relative_to(config.paths.output_dir):
            continue
        if "://" in folder:
            exists(folder)  # that it can be reached
            continue
        path = Path(folder)
        try:
            with TemporaryFile(dir=next(p for p in (path, *path.parents) if p.exists())):
                pass
        except OSError as error:
            raise ConfigurationError(
                f"callbacks.{name!s}.dirpath={folder} cannot be written: "
                f"{error.strerror or error}. Name another folder."
            ) from error


_NUMBERS = ("WORLD_SIZE", "SLURM_NTASKS")
_RANKS = ("RANK", "SLURM_PROCID", "NODE_RANK")
_RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
_SAME = ("model", "module", "data", "optimizer", "scheduler", "peft", "trainer", "seed")
_OWN = (
    *("devices", "accelerator", "plan", "timeout_seconds", "workers_per_device", "path", "dir"),
    *("host_share", "memory_share", "num_microbatches"),
)
"""Ends of the names of settings that may be each host's own."""


def for_hosts(config: DictConfig) -> DictConfig:
    """Fill in how many hosts there are, and what this one has of its own.

    On a restart the last checkpoint of the run's folder is the one to go on from.
    """
    config = config.copy()
    if config.trainer.get("num_nodes") == "auto":
        config.trainer.num_nodes = int(_launched(_NUMBERS, "1"))
    num, rank = whole("nodes", config.trainer.get("num_nodes", 1)), _launched(_RANKS, "0")
    share_batch(config, num)
    folder = Path(config.paths.output_dir)
    if config.train and config.ckpt_path is None and int(_launched(_RESTARTS, "0")):
        last = str(folder / "checkpoints" / "last.ckpt")
        if exists(last):
            config.ckpt_path = last
            sys.stderr.write(f"Restarted: going on from {last}.\n")
        else:
            sys.stderr.write(
                f"Restarted: there is no {last}, so training begins anew. Name the run's folder, "
                "on a file system of all hosts (hydra.run.dir=...), to have restarts go on.\n"
            )
    if num > 1 and rank != "0":
        config.paths.output_dir = str(folder / f"host{rank}")
    return config


def share_batch(config: DictConfig, num_hosts: int) -> None:
    """Make `global_batch_size`, where it is given, the batch of each host."""
    if config.global_batch_size is not None:
        size = whole("global_batch_size", config.global_batch_size)
        if size % num_hosts:
            raise ConfigurationError(
                f"global_batch_size={size} cannot be divided among {num_hosts} hosts: set a "
                "multiple."
            )
        config.data.batch_size = size // num_hosts


def tell_settings(run: Run) -> None:
    """Have hosts with other settings refused before the first batch."""
    strategy = run.trainer.strategy
    if isinstance(strategy, RoundPipeStrategy):
        sections = {name: OmegaConf.select(run.config, name) for name in _SAME}
        strategy.host_settings.update(
            (name, value)
            for name, value in _flat("", OmegaConf.to_container(OmegaConf.create(sections)))
            if not name.endswith(_OWN)
        )


def _flat(name: str, value: Any) -> list[tuple[str, Any]]:
    if not isinstance(value, dict):
        return [(name, value)]
    return [
        leaf for key, part in value.items() for leaf in _flat(f"{name}.{key}".lstrip("."), part)
    ]


def _launched(names: tuple[str, ...], otherwise: str) -> str:
    return next((os.environ[name] for name in names if name in os.environ), otherwise)
