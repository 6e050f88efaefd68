"""From a composed configuration to the objects of a run; nothing is written on the way."""

from dataclasses import dataclass
from pathlib import Path

import torch
from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from omegaconf import DictConfig

from roundpipe_lightning.checkpoint.folder import is_checkpoint_folder
from roundpipe_lightning.cli.callbacks import GracefulInterrupt, RunStatistics, useful_callbacks
from roundpipe_lightning.cli.job import Job
from roundpipe_lightning.cli.objects import build, build_each
from roundpipe_lightning.cli.plan_answer import check_memory
from roundpipe_lightning.errors import CheckpointError, ConfigurationError, HardwareError
from roundpipe_lightning.planning.model.hardware import HardwareSpec


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
    """Make the objects that a configuration describes.

    Raises:
        ConfigurationError: Settings do not fit each other.
        FitError: There is no memory for the training; none has been taken then.
        BatchError: There are more microbatches than windows in a batch.
        CheckpointError: `ckpt_path` does not exist.
        ModelSourceError: Published weights were asked for and cannot be found.
    """
    checkpoint = find_checkpoint(config)
    job = Job(config)
    check_devices(job)
    job.source.check_weights()
    data: LightningDataModule = build(job.config.data)
    check_tokens(job, data)
    check_memory(job)
    job = job.with_microbatches()
    config, module = job.config, job.new_module()
    statistics, interrupt = RunStatistics(), GracefulInterrupt()
    loggers: list[Logger] = build_each(config.logger)
    callbacks = useful_callbacks(build_each(config.callbacks), config.trainer, logs=bool(loggers))
    settings, strategy = config.trainer.copy(), job.new_strategy()
    if strategy is not None:
        del settings.strategy
    trainer: Trainer = build(
        settings,
        **({} if strategy is None else {"strategy": strategy}),
        callbacks=[statistics, *callbacks, interrupt],
        logger=loggers or False,
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


def check_devices(job: Job) -> None:
    """Refuse a machine by name that is not the one at hand.

    Raises:
        HardwareError: It has other devices.
    """
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


def check_tokens(job: Job, data: LightningDataModule) -> None:
    """Refuse a model that has no number for some of the data's tokens.

    Raises:
        ConfigurationError: Its vocabulary is too small.
    """
    vocabulary = job.source.load_config().get_text_config().vocab_size
    num_tokens = getattr(data, "num_tokens", None)
    if num_tokens is not None and vocabulary < num_tokens:
        raise ConfigurationError(
            f"The model's vocabulary of {vocabulary} tokens is smaller than the "
            f"{num_tokens} tokens of the data. Set model.architecture.vocab_size to at least "
            f"{num_tokens}."
        )
