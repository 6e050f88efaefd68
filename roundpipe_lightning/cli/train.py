"""`python train.py` and `roundpipe-train`: the Hydra application that trains."""

import json
import logging
import shlex
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

import lightning
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from roundpipe_lightning.callbacks import ExportPretrained
from roundpipe_lightning.cli.build import (
    Run,
    build_run,
    exists,
    for_hosts,
    log_settings,
    tell_settings,
)
from roundpipe_lightning.cli.callbacks import LastCheckpoint
from roundpipe_lightning.cli.job import whole
from roundpipe_lightning.cli.objects import run_explained
from roundpipe_lightning.cli.summary import print_summary, summarize, write_card
from roundpipe_lightning.files import write_text
from roundpipe_lightning.strategy.strategy import RoundPipeStrategy

log = logging.getLogger(__name__)

_OF_SWEEPS = ("hydra.mode=", "hydra.sweep", "hydra.launcher")
"""Overrides that start several jobs."""


def run(config: DictConfig) -> float | int | None:
    """One run on the command line: the metric for a sweeper, or an exit status."""
    try:
        return run_explained(train, config)
    except Exception:
        log.exception("The run failed.")
        raise


def train(config: DictConfig) -> float | None:
    """Train, validate and test as configured, and fill the run's folder.

    Args:
        config: The composed configuration, see `conf/train.yaml`.

    Returns:
        The metric named by `optimized_metric`, for sweepers; None if there is none.

    Raises:
        RoundPipeError: The configuration cannot work; nothing was written then.
        KeyboardInterrupt: Ctrl-C; the last checkpoint is in the folder.
        SystemExit: Another signal asked the run to stop, likewise; 128 plus its number.
    """
    run, metrics, figures = run_training(config)
    print_summary(run, figures)
    return _choose_metric(run.config.optimized_metric, metrics)


def run_training(config: DictConfig) -> tuple[Run, dict[str, float], dict[str, Any]]:
    """As `train`: the run that has ended, what it measured, and the figures of its summary."""
    whole("seed", config.seed, least=0)
    lightning.seed_everything(config.seed, workers=True, verbose=False)
    run = build_run(_with_interval(for_hosts(config)))
    folder = Path(run.config.paths.output_dir)
    tell_settings(run)
    _save_config(run)
    _save_first_plan(run)
    log_settings(run)
    _save_config(run)
    log.info("Run folder %s, tags %s", folder, list(config.tags))
    metrics: dict[str, float] = {}
    with run.interrupt:
        try:
            _run_stages(run, metrics)
        except SystemExit as error:  # how Lightning ends after an interrupt
            if isinstance(error.__context__, KeyboardInterrupt):  # one that was no signal, too
                _end_interrupted(run, run.interrupt.signal_number or signal.SIGINT)
            if run.interrupt.signal_number is None:
                raise
        if run.interrupt.signal_number is not None:
            _end_interrupted(run, run.interrupt.signal_number)
    figures = summarize(run, metrics)
    log.info("Finished: %s", figures)
    write_text(folder / "summary.json", json.dumps(figures, indent=2) + "\n")
    for callback in run.callbacks:
        if isinstance(callback, ExportPretrained) and config.train:
            write_card(callback.folder(run.trainer), folder)
    return run, metrics, figures


def _run_stages(run: Run, metrics: dict[str, float]) -> None:
    """Fit, validate and test as configured; `metrics` receives what they measured."""
    config, trainer = run.config, run.trainer
    checkpoint = run.checkpoint
    if config.train:
        trainer.fit(run.module, datamodule=run.data, ckpt_path=checkpoint)
        if checkpoint is not None and not run.statistics.num_steps:
            sys.stderr.write(
                f"Warning: nothing was trained: {checkpoint} is of step {trainer.global_step}. "
                f"Raise trainer.max_steps={trainer.max_steps}, or what else ended that run.\n"
            )
        checkpoint = None  # from here on the weights are those that were trained
        _save_plan(run)
        _keep_metrics(run, metrics)
    is_asked = run.interrupt.signal_number is not None  # while the last step ended
    if trainer.world_size > 1:
        is_asked = trainer.strategy.reduce_boolean_decision(is_asked, all=False)
    if is_asked:
        return
    if config.validate and run.statistics.validated_step != trainer.global_step:
        trainer.validate(run.module, datamodule=run.data, ckpt_path=checkpoint, verbose=False)
        _keep_metrics(run, metrics)
    if config.test:
        trainer.test(run.module, datamodule=run.data, ckpt_path=checkpoint, verbose=False)
        _keep_metrics(run, metrics)


def _keep_metrics(run: Run, metrics: dict[str, float]) -> None:
    metrics.update({name: float(value) for name, value in run.trainer.callback_metrics.items()})
    if run.statistics.validated_step != run.trainer.global_step:
        metrics.pop("val_loss", None)  # measured before the last step


def _with_interval(config: DictConfig) -> DictConfig:
    """The configuration, in which a share of an epoch as `val_check_interval` may stand alone."""
    interval = config.trainer.get("val_check_interval")
    if isinstance(interval, float) and config.trainer.get("check_val_every_n_epoch") is None:
        config = config.copy()
        config.trainer.check_val_every_n_epoch = 1
    return config


def _choose_metric(name: str | None, metrics: dict[str, float]) -> float | None:
    if name is not None and name not in metrics:
        there = ", ".join(sorted(n for n in metrics if "/" not in n)) or "none"
        log.warning("optimized_metric=%s was not measured; there are: %s", name, there)
        sys.stderr.write(f"Warning: optimized_metric={name} was not measured; there are: {there}\n")
    return None if name is None else metrics.get(name)


def _end_interrupted(run: Run, signal_number: int) -> NoReturn:
    """Say how the run goes on, and end with the status that the signal stands for."""
    _save_plan(run)
    for callback in run.callbacks:
        if isinstance(callback, LastCheckpoint) and exists(callback.path):
            sys.stderr.write(f"Go on with: {_command(f'ckpt_path={callback.path}')}\n")
    if signal_number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + signal_number)


def _command(*overrides: str) -> str:
    """The command line of this run with other overrides at its end."""
    if not HydraConfig.initialized():
        return " ".join(overrides)
    program = Path(sys.argv[0])
    words = ["python", str(program)] if program.suffix == ".py" else [program.name]
    named = {override.partition("=")[0] for override in overrides}
    given = HydraConfig.get().overrides
    kept = [
        override
        for override in (*given.hydra, *given.task)
        if override.partition("=")[0] not in named and not override.startswith(_OF_SWEEPS)
    ]
    return shlex.join([*words, *kept, *overrides])


def _save_config(run: Run) -> None:
    """Write what is run; an evaluation leaves what the training whose folder it is in has run."""
    path = Path(run.config.paths.output_dir) / "config.yaml"
    if run.config.train or not path.exists():
        write_text(path, OmegaConf.to_yaml(run.config, resolve=True))


def _save_first_plan(run: Run) -> None:
    """Have the plan written before the first step runs by it."""
    strategy, path = run.trainer.strategy, Path(run.config.paths.output_dir) / "plan.json"
    if isinstance(strategy, RoundPipeStrategy):
        strategy.plan_listeners.append(
            lambda event: None if path.exists() else event.description.plan.save(path)
        )


def _save_plan(run: Run) -> None:
    strategy = run.trainer.strategy
    if isinstance(strategy, RoundPipeStrategy) and strategy.plan is not None:
        strategy.plan.save(Path(run.config.paths.output_dir) / "plan.json")
