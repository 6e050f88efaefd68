"""The commands `roundpipe-train`, `roundpipe-plan`, `roundpipe-export`: Hydra around the package.

This module stands beside the package, because importing the package imports torch and Lightning,
which takes seconds. What Hydra does alone (`--help`, `--cfg job`, a wrong key) waits for neither.
"""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

EXIT_ERROR = 1
"""Exit status after an error that names its cause."""

EXIT_INTERRUPTED = 130
"""Exit status after Ctrl-C: 128 plus the number of SIGINT."""

RENAMED_KEYS = {
    "peft.method": "peft._target_",
    "peft.rank": "peft.r",
    "peft.alpha": "peft.lora_alpha",
    "peft.dropout": "peft.lora_dropout (encoder_dropout with peft=p_tuning)",
    "peft.init": "peft.init_lora_weights (init_ia3_weights, prompt_tuning_init)",
    "scheduler.warmup_steps": "scheduler.num_warmup_steps",
    "scheduler.total_steps": "scheduler.num_training_steps",
    "scheduler.final_share": "scheduler.min_lr_rate",
    "trainer.strategy.trial_run": "trainer.strategy.dry_run",
}
"""Keys of earlier versions, and what they are called now."""


def train() -> None:
    """Train, validate and test as configured."""
    _launch("train")


def plan() -> None:
    """Say what a training needs and how fast it will be, before it runs."""
    _launch("plan")


def export() -> None:
    """Write a checkpoint as a Hugging Face folder, or as an adapter folder."""
    _launch("export")


def _launch(name: str) -> None:
    """Hand the command line to Hydra, and each job to `run` of the module of that name.

    `run` returns an exit status (int), or a metric for sweepers (float or None), or exits itself.
    """
    import hydra

    statuses: list[int] = []

    def job(config: Any) -> Any:
        statuses.append(0)
        result = importlib.import_module(f"roundpipe_lightning.cli.{name}").run(config)
        if not isinstance(result, int):
            return result
        statuses.append(result)
        return None

    name_machines(_config_folder())
    try:
        hydra.main(version_base="1.3", config_path=str(_config_folder()), config_name=name)(job)()
    except KeyboardInterrupt:
        sys.stderr.write("Stopped.\n")
        sys.exit(EXIT_INTERRUPTED)
    except SystemExit:
        if not statuses:  # Hydra has refused the command line
            _name_renamed_keys(sys.argv[1:])
        raise
    status = EXIT_ERROR if EXIT_ERROR in statuses else max(statuses, default=0)
    if status:
        sys.exit(status)


def name_machines(folder: Path) -> None:
    """Let Hydra know machines by device and number: `hardware=rtx4090x8`."""
    from hydra.core.config_store import ConfigStore

    others = {"auto", "cpu", "gpu", "mixed"}
    for device in {path.stem for path in (folder / "hardware").glob("*.yaml")} - others:
        for count in (1, 2, 3, 4, 5, 6, 7, 8, 16):
            node = {"defaults": [device, "_self_"], "devices": count}
            ConfigStore.instance().store(group="hardware", name=f"{device}x{count}", node=node)


def _config_folder() -> Path:
    """The folder `conf`: in a wheel inside the package, in a checkout beside it."""
    spec = find_spec("roundpipe_lightning")
    assert spec is not None
    assert spec.origin is not None
    package = Path(spec.origin).parent
    return next(path / "conf" for path in (package, package.parent) if (path / "conf").is_dir())


def _name_renamed_keys(overrides: list[str]) -> None:
    for override in overrides:
        key = override.partition("=")[0].lstrip("+~")
        if key in RENAMED_KEYS:
            sys.stderr.write(f"\nError: {key} is called {RENAMED_KEYS[key]} now.\n")
