"""`roundpipe-export`: a checkpoint as a Hugging Face folder, or as an adapter folder."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from omegaconf import DictConfig, OmegaConf

from roundpipe_lightning.checkpoint.compatibility import check_versions, left_out, load_state
from roundpipe_lightning.checkpoint.io import read_checkpoint
from roundpipe_lightning.cli.build import find_checkpoint, run_folder
from roundpipe_lightning.cli.checkpoints.model_card import write_card
from roundpipe_lightning.cli.objects import build, read_adapters, run_explained
from roundpipe_lightning.errors import ConfigurationError, RoundPipeError
from roundpipe_lightning.models.export import (
    ExportOptions,
    check_replaceable,
    export_pretrained,
    find_pretrained,
)
from roundpipe_lightning.models.hub import make_repository, push_folder
from roundpipe_lightning.modules import CausalLanguageModule, ModelSource
from roundpipe_lightning.strategy.strategy import CHECKPOINT_VERSION


def run(config: DictConfig) -> int:
    """Write the folder of a configuration, print its path, and return the exit status."""
    result = run_explained(export, config)
    if isinstance(result, int):
        return result
    sys.stdout.write(f"{result}\n")
    return 0


def export(config: DictConfig) -> Path:
    """Write the folder of a configuration, and return it.

    Args:
        config: The composed configuration, see `conf/export.yaml`.

    Raises:
        RoundPipeError: The configuration cannot work, the checkpoint is of another model, or the
            folder cannot be written. What was there before is untouched.
    """
    found = find_checkpoint(config)
    if found is not None and "://" in found:
        raise ConfigurationError(f"ckpt_path={found}: copy it to this machine first.")
    checkpoint = None if found is None else Path(found)
    names = ("dtype", "merge", "overwrite", "max_shard_bytes", "original_layout")
    tokenizer = config.tokenizer or _tokenizer_of_run(checkpoint)
    options = ExportOptions(**{name: config[name] for name in names}, tokenizer=tokenizer)
    folder = _output_folder(config, checkpoint)
    check_replaceable(folder, overwrite=options.overwrite)
    if config.push_to_hub is not None:
        make_repository(config.push_to_hub)
    module = trained_module(config, checkpoint)
    export_pretrained(find_pretrained(module, config.name), folder, options=options)
    run = None if checkpoint is None else run_folder(checkpoint)
    if run is not None:
        write_card(folder, run, name=config.push_to_hub)
    if config.push_to_hub is not None:
        sys.stdout.write(f"{push_folder(folder, config.push_to_hub)}\n")
    return folder


def _tokenizer_of_run(checkpoint: Path | None) -> Any:
    """The tokenizer that a run was trained with, its chat template included; None: not known."""
    run = None if checkpoint is None else run_folder(checkpoint)
    saved: Any = {} if run is None else OmegaConf.load(run / "config.yaml")
    source = OmegaConf.select(saved, "data.tokenizer") if saved else None
    try:
        return None if source is None else build(source).load()
    except RoundPipeError as error:  # without a network, say
        warnings.warn(
            f"The tokenizer is the model's, not the run's, which could not be read: {error}",
            stacklevel=2,
        )
        return None


def trained_module(config: DictConfig, checkpoint: Path | None) -> LightningModule:
    """The module of a checkpoint, whose tensors stay in its file; None: of published weights.

    Raises:
        RoundPipeError: The configuration cannot work, or the checkpoint is of another model.
    """
    given = _with_run(config, checkpoint)
    if checkpoint is None:
        return _build_module(given)
    content = read_checkpoint(checkpoint, map_location="cpu", weights_only=True, mmap=True)
    check_versions(content, path=checkpoint, newest=CHECKPOINT_VERSION)
    module = _build_module(given, has_base=not left_out(content))
    load_state(module, content, strict=True, assign=True)
    for part in module.modules():
        if hasattr(part, "tie_weights"):  # a model of transformers
            tie_weights: Any = part.tie_weights
            tie_weights()
    return module


def _output_folder(config: DictConfig, checkpoint: Path | None) -> Path:
    if "://" in str(config.output_dir):
        raise ConfigurationError(
            f"output_dir={config.output_dir}: an export is a folder on this machine; copy it there."
        )
    if config.output_dir is not None:
        return Path(config.output_dir).expanduser()
    if checkpoint is None:
        raise ConfigurationError("output_dir=null: name the folder that is to be written.")
    run = run_folder(checkpoint)
    return (checkpoint.parent if run is None else run) / "export"


def _with_run(config: DictConfig, checkpoint: Path | None) -> DictConfig:
    """The configuration with what it leaves to the checkpoint's run filled in."""
    run = None if checkpoint is None else run_folder(checkpoint)
    filled = config.copy()
    OmegaConf.set_struct(filled, False)
    saved: Any = {} if run is None else OmegaConf.load(run / "config.yaml")
    for group in ("model", "module", "peft"):
        if filled.get(group) is None:
            filled[group] = saved.get(group)
    if filled.model is None:
        raise ConfigurationError(
            f"ckpt_path={config.ckpt_path}: there is no config.yaml of a run beside it that says "
            "which model it is of. Name it: model=..., and peft=... if it has adapters."
        )
    return filled


def _build_module(config: DictConfig, *, has_base: bool | None = None) -> LightningModule:
    """The module that is exported; without weights where a checkpoint has them all.

    Args:
        config: With the model's groups.
        has_base: Whether the checkpoint has all weights; None: there is no checkpoint.
    """
    source: ModelSource = build(config.model)
    adapters = None if config.peft is None else read_adapters(config.peft)
    make = CausalLanguageModule if config.module is None else build(config.module)
    module: LightningModule = make(source, optimizer=_no_optimizer, adapters=adapters)
    if has_base is None and not source.is_pretrained:
        raise ConfigurationError(
            "ckpt_path=null exports published weights, and model.weights=random has none. Name a "
            "checkpoint, or set model.weights=pretrained."
        )
    if not has_base or source.keeps_weights_in_files:
        module.configure_model()
        return module
    with torch.device("meta"):
        module.configure_model()
    return module


def _no_optimizer(parameters: Any) -> Any:
    raise ConfigurationError(f"An export steps no optimizer over {parameters}.")
