"""`python train.py` and `roundpipe-train`: the Hydra application that trains."""

import logging
import os
import sys
from pathlib import Path
from typing import NoReturn

import hydra
import lightning
from omegaconf import DictConfig, OmegaConf

from roundpipe_lightning.cli.build import USER_ERRORS, Run, build_run
from roundpipe_lightning.cli.configs import find_config_folder
from roundpipe_lightning.cli.last_checkpoint import LastCheckpoint
from roundpipe_lightning.cli.pipeline import monitored_rows, save_plan, uncrowded_threads
from roundpipe_lightning.cli.summary import summarize, trained_row
from roundpipe_lightning.errors import ConfigurationError, RoundPipeError
from roundpipe_lightning.files import write_text

log = logging.getLogger(__name__)

EXIT_ERROR = 1
"""Exit status after an error that names its cause."""

EXIT_INTERRUPTED = 130
"""Exit status after Ctrl-C: 128 plus the number of SIGINT."""


def main() -> None:
    """Run the command line. `--help` lists the groups, `--cfg job` prints the configuration."""
    try:
        folder = find_config_folder()
        hydra.main(version_base="1.3", config_path=str(folder), config_name="train")(_job)()
    except RoundPipeError as error:
        _exit_with(error)
    except KeyboardInterrupt:
        sys.stderr.write("Stopped.\n")
        sys.exit(EXIT_INTERRUPTED)


def _job(config: DictConfig) -> float | None:
    """One run on the command line: an error a user can mend is one message, not a traceback."""
    try:
        return train(config)
    except USER_ERRORS as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        _exit_with(error)
    except Exception:
        log.exception("The run failed.")
        raise


def _exit_with(error: Exception) -> NoReturn:
    log.error("%s", error)
    notes = getattr(error, "__notes__", [])
    sys.stderr.write("\n".join([f"\nError: {error}", *notes]) + "\n")
    sys.exit(EXIT_ERROR)


def train(config: DictConfig) -> float | None:
    """Train, validate and test as configured, and fill the run's folder.

    Args:
        config: The composed configuration, see `conf/train.yaml`.

    Returns:
        The metric named by `optimized_metric`, for sweepers; None if there is none.

    Raises:
        RoundPipeError: The configuration cannot work; nothing was written then.
        KeyboardInterrupt: Ctrl-C; the last checkpoint is in the folder.
    """
    lightning.seed_everything(config.seed, workers=True, verbose=False)
    run = build_run(config)
    folder = Path(run.config.paths.output_dir)
    write_text(folder / "config.yaml", OmegaConf.to_yaml(run.config, resolve=True))
    log.info("Run folder %s, tags %s", folder, list(config.tags))
    metrics: dict[str, float] = {}
    with run.interrupt, uncrowded_threads(run.trainer):
        try:
            _run_stages(run, folder, metrics)
        except SystemExit as error:  # how Lightning ends after a KeyboardInterrupt
            if isinstance(error.__context__, KeyboardInterrupt):
                save_plan(run.trainer, folder)
                _report_interrupt(run)
                raise KeyboardInterrupt from None
            raise
    summary = summarize(run, val_loss=metrics.get("val_loss"))
    log.info("Finished: %s", summary)
    summary.save(folder / "summary.json")
    summary.print(
        folder,
        rows=trained_row(run.module),
        last_rows=monitored_rows(run.callbacks),
    )
    return _choose_metric(run.config.optimized_metric, metrics)


def _run_stages(run: Run, folder: Path, metrics: dict[str, float]) -> None:
    """Fit, validate and test as configured; `metrics` receives what they measured."""
    config, trainer = run.config, run.trainer
    checkpoint = None if run.checkpoint is None else str(run.checkpoint)
    if config.train:
        trainer.fit(run.module, datamodule=run.data, ckpt_path=checkpoint)
        checkpoint = None  # from here on the weights are those that were trained
        save_plan(trainer, folder)
        _keep_metrics(run, metrics)
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


def _choose_metric(name: str | None, metrics: dict[str, float]) -> float | None:
    if name is None:
        return None
    if name not in metrics:
        raise ConfigurationError(
            f"optimized_metric={name!r} was not measured by this run, which has "
            f"{', '.join(sorted(metrics)) or 'no metric'}. Name one of these, or null."
        )
    return metrics[name]


def _report_interrupt(run: Run) -> None:
    for callback in run.callbacks:
        if isinstance(callback, LastCheckpoint) and callback.path.exists():
            sys.stderr.write(f"Go on with: ckpt_path={callback.path}\n")


if __name__ == "__main__":
    main()
