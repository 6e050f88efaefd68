"""What the commands do on several hosts: their number, each one's folder, and a restart."""

import os
import sys
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from roundpipe_lightning.cli.build import Run, exists
from roundpipe_lightning.cli.job import whole
from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.strategy.strategy import RoundPipeStrategy

_NUMBERS = ("WORLD_SIZE", "SLURM_NTASKS")
_RANKS = ("RANK", "SLURM_PROCID", "NODE_RANK")
_RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
_SAME = ("model", "module", "data", "optimizer", "scheduler", "peft", "trainer", "seed")
_OWN = (
    *("devices", "accelerator", "plan", "timeout_seconds", "workers_per_device", "path", "dir"),
    *("host_share", "num_microbatches"),
)
"""Ends of the names of settings that may be each host's own."""


def for_hosts(config: DictConfig) -> DictConfig:
    """Fill in how many hosts there are, and what this one has of its own.

    On a restart the last checkpoint of the run's folder is the one to go on from.

    Raises:
        ConfigurationError: The global batch cannot be divided among so many hosts.
    """
    config = config.copy()
    if config.trainer.get("num_nodes") == "auto":
        config.trainer.num_nodes = int(_launched(_NUMBERS, "1"))
    num, rank = config.trainer.get("num_nodes", 1), _launched(_RANKS, "0")
    if config.global_batch_size is not None:
        size = whole("global_batch_size", config.global_batch_size)
        if size % num:
            raise ConfigurationError(
                f"global_batch_size={size} cannot be divided among {num} hosts: set a multiple."
            )
        config.data.batch_size = size // num
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
    """Return what a launcher has set."""
    return next((os.environ[name] for name in names if name in os.environ), otherwise)
