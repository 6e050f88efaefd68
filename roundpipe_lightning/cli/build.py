"""From a composed configuration to the objects of a run; nothing is written on the way."""

import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from roundpipe_commands import EXIT_ERROR
from roundpipe_lightning.checkpoint.folder import is_checkpoint_folder
from roundpipe_lightning.cli.callbacks import GracefulInterrupt, RunStatistics, useful_callbacks
from roundpipe_lightning.errors import (
    BatchError,
    CheckpointError,
    ConfigurationError,
    RoundPipeError,
)
from roundpipe_lightning.modules import Adapters, ModelSource
from roundpipe_lightning.modules.adapters import peft_config

log = logging.getLogger(__name__)

Result = TypeVar("Result")

SETTING_ERRORS = (RoundPipeError, MisconfigurationException, OmegaConfBaseException)
"""Errors that say themselves which setting is to be changed."""

USER_ERRORS = (*SETTING_ERRORS, InstantiationException)
"""Errors that a person mends by changing a setting: their message is all there is to show."""


def run_explained(job: Callable[[DictConfig], Result], config: DictConfig) -> Result | int:
    """Run a job of a command: an error that a user can mend is one message and an exit status.

    With HYDRA_FULL_ERROR=1 it is a traceback.
    """
    try:
        return job(config)
    except USER_ERRORS as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        log.error("%s", error)
        notes = getattr(error, "__notes__", [])
        sys.stderr.write("\n".join([f"\nError: {error}", *notes]) + "\n")
        return EXIT_ERROR


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything a run needs, checked against each other.

    Attributes:
        config: The configuration it was made from, the number of devices filled in.
        module: What is trained.
        data: What it is trained on.
        trainer: Lightning's Trainer, with all callbacks.
        callbacks: All callbacks of the configuration.
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
    """Make the objects that a configuration describes.

    Raises:
        ConfigurationError: Settings do not fit each other.
        BatchError: There are more microbatches than windows in a batch.
        CheckpointError: `ckpt_path` does not exist.
        ModelSourceError: Published weights were asked for and cannot be found.
    """
    config = config.copy()
    config.trainer.devices = choose_devices(config)
    checkpoint = find_checkpoint(config)
    source: ModelSource = build(config.model)
    data: LightningDataModule = build(config.data)
    check_fit(config, source, data)
    module: LightningModule = build(config.module)(
        source,
        optimizer=build(config.optimizer),
        scheduler=build(config.scheduler),
        adapters=read_adapters(config.peft),
    )
    statistics, interrupt = RunStatistics(), GracefulInterrupt()
    loggers: list[Logger] = build_each(config.logger)
    callbacks = useful_callbacks(build_each(config.callbacks), config.trainer, logs=bool(loggers))
    trainer: Trainer = build(
        config.trainer, callbacks=[statistics, *callbacks, interrupt], logger=loggers or False
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


def build(config: Any, **extra: Any) -> Any:
    """Hydra's `instantiate`, with plain containers and with the error that really happened.

    Args:
        config: Node with a `_target_`, or null for None.
        extra: Further keyword arguments for the target.
    """
    try:
        return instantiate(config, _convert_="all", **extra)
    except InstantiationException as error:
        if isinstance(error.__cause__, SETTING_ERRORS):
            raise error.__cause__ from None
        if isinstance(error.__cause__, ModuleNotFoundError):
            missing = str(error.__cause__).splitlines()[0]
            raise ConfigurationError(
                f"{config['_target_']} needs a library that is not installed: {missing}"
            ) from None
        raise


def build_each(config: DictConfig | None) -> list[Any]:
    """The objects of a group that holds several of them, such as callbacks and loggers."""
    return [build(node) for node in (config or {}).values() if node is not None]


def read_adapters(config: DictConfig | Mapping[str, Any]) -> Adapters | None:
    """Turn the group `peft` into adapters; None if every parameter is trained.

    Raises:
        ConfigurationError: The method or a setting is unknown, or out of its range.
    """
    found = OmegaConf.to_container(config, resolve=True) if OmegaConf.is_config(config) else config
    settings: dict[str, Any] = dict(found)  # type: ignore[arg-type]
    if "method" in settings:
        raise ConfigurationError(
            "peft.method is called peft._target_ now, and names a configuration class of peft, "
            "such as peft.LoraConfig. Choose a file of conf/peft: peft=lora, or peft=none."
        )
    target, adapter, seed = (settings.pop(key, None) for key in ("_target_", "adapter", "seed"))
    settings.pop("frozen_bits", None)  # for the model, see conf/model
    if target is None:
        return None
    return Adapters(config=peft_config(target, settings), adapter=adapter, seed=seed)


def choose_devices(config: DictConfig) -> int | str | list[int]:
    """Number of workers: `trainer.devices`, or `hardware.cpu_workers` on a CPU if it is auto.

    Only round-robin workers share one process; for Lightning's own strategies, where every CPU
    device would be a process, `auto` is left to Lightning.
    """
    devices: int | str | list[int] = config.trainer.devices
    if isinstance(devices, DictConfig):  # the number of each device by name
        devices = sum(devices.values())
    strategy = config.trainer.get("strategy", "auto")
    name = strategy.get("_target_", "") if isinstance(strategy, DictConfig) else str(strategy)
    accelerator = config.trainer.accelerator
    on_cpu = accelerator == "cpu" or (
        accelerator == "auto" and not torch.accelerator.is_available()
    )
    if devices == "auto" and on_cpu and "roundpipe" in name.lower():
        return int(config.hardware.cpu_workers)
    return devices


def find_checkpoint(config: DictConfig) -> str | None:
    """The checkpoint of `ckpt_path`: a path or an address.

    `last` and `best` are the newest of all runs; of a run's folder it is the last.

    Raises:
        CheckpointError: There is none.
    """
    given: str | None = config.ckpt_path
    if given is None:
        return None
    if given in ("last", "best"):
        logs = Path(config.paths.log_dir)
        folders = (*logs.glob("*/runs/*"), *logs.glob("*/multiruns/*/*"))
        files = [folder / "checkpoints" / f"{given}.ckpt" for folder in folders]
        found = [file for file in files if file.exists()]
        if found:
            return str(max(found, key=lambda file: file.stat().st_mtime))
    if "://" in given:
        try:
            files_there, path = url_to_fs(given)
            exists = files_there.exists(path)
        except Exception as error:
            raise CheckpointError(f"ckpt_path={given} cannot be reached: {error}") from error
        if exists:
            return str(path) if isinstance(files_there, LocalFileSystem) else given
    checkpoint = Path(given).expanduser()
    if checkpoint.is_dir() and not is_checkpoint_folder(checkpoint):
        last = checkpoint / "checkpoints" / "last.ckpt"
        checkpoint = last if last.exists() else checkpoint
    if not checkpoint.exists():
        wanted = " (callbacks=best keeps it)" if given == "best" else ""
        raise CheckpointError(
            f"ckpt_path={given!r} does not exist{wanted} (looked in {Path.cwd()}). Runs keep "
            "theirs in logs/<task_name>/runs/<date>_<time>/checkpoints/last.ckpt; ckpt_path=last "
            "is the newest of them."
        )
    return str(checkpoint)


def check_fit(config: DictConfig, source: ModelSource, data: LightningDataModule) -> None:
    """Refuse a batch that cannot be split, and a model that cannot take the data's tokens.

    Raises:
        BatchError: There are more microbatches than a batch has windows.
        ConfigurationError: The windows are too long or the vocabulary is too small.
        ModelSourceError: The model's configuration cannot be found.
    """
    count, size = config.partition.num_microbatches, config.data.get("batch_size")
    if isinstance(count, int) and isinstance(size, int) and count > size:
        raise BatchError(
            f"partition.num_microbatches={count} is more than the data.batch_size={size} windows "
            "of a batch. Lower the one or raise the other."
        )
    model = source.load_config().get_text_config()
    longest = getattr(model, "max_position_embeddings", None)
    seq_len = getattr(data, "seq_len", None)
    if longest is not None and seq_len is not None and seq_len > longest:
        raise ConfigurationError(
            f"data.seq_len={seq_len} is longer than the {longest} positions of the model "
            "(max_position_embeddings). Lower data.seq_len, or choose another model."
        )
    num_tokens = getattr(data, "num_tokens", None)
    if num_tokens is not None and model.vocab_size < num_tokens:
        raise ConfigurationError(
            f"The model's vocabulary of {model.vocab_size} tokens is smaller than the "
            f"{num_tokens} tokens of the data. Set model.architecture.vocab_size to at least "
            f"{num_tokens}."
        )
