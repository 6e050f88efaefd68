"""What becomes of a checkpoint: `roundpipe-export` writes it out, `roundpipe-chat` talks to it."""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from lightning.pytorch import LightningModule, Trainer
from omegaconf import DictConfig, OmegaConf

from roundpipe_commands import EXIT_BAD_INPUT
from roundpipe_lightning.checkpoint.compatibility import check_versions, left_out, load_state
from roundpipe_lightning.checkpoint.folder import check_form, is_checkpoint_folder
from roundpipe_lightning.checkpoint.io import read_checkpoint
from roundpipe_lightning.cli.build import find_checkpoint, run_folder
from roundpipe_lightning.cli.objects import build, read_adapters, run_explained
from roundpipe_lightning.cli.train import write_card
from roundpipe_lightning.engine.device.host_memory import check_host_memory
from roundpipe_lightning.errors import ConfigurationError, ModelSourceError, RoundPipeError
from roundpipe_lightning.models.export import (
    ExportOptions,
    check_replaceable,
    export_pretrained,
    find_pretrained,
)
from roundpipe_lightning.models.load import draw_buffers
from roundpipe_lightning.models.weight_files import make_repository, push_folder
from roundpipe_lightning.modules import CausalLanguageModule, ModelSource, TokenizerSource
from roundpipe_lightning.modules.adapters import saved_adapters
from roundpipe_lightning.modules.chat import ChatModule
from roundpipe_lightning.planning.model.hardware import config_folder
from roundpipe_lightning.strategy.strategy import CHECKPOINT_VERSION, RoundPipeStrategy


def run(config: DictConfig) -> int:
    result = run_explained(export, config)
    if isinstance(result, int):
        return result
    sys.stdout.write(f"{result}\n")
    return 0


def export(config: DictConfig) -> Path:
    """Write the folder of a configuration (`conf/export.yaml`), and return it."""
    found = find_checkpoint(config)
    if found is not None and "://" in found:
        raise ConfigurationError(f"ckpt_path={found}: copy it to this machine first.")
    checkpoint = None if found is None else Path(found)
    if checkpoint is not None and checkpoint.is_dir():
        check_form(checkpoint)
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
        found = None if source is None else build(source)
        return found and getattr(found, "load_processor", found.load)()
    except RoundPipeError as error:  # without a network, say
        warnings.warn(
            f"The tokenizer is the model's, not the run's, which could not be read: {error}",
            stacklevel=2,
        )
        return None


def trained_module(config: DictConfig, checkpoint: Path | None) -> LightningModule:
    """The module of a checkpoint, whose tensors stay in its file; None: of published weights."""
    given = _with_run(config, checkpoint)
    if checkpoint is None:
        return _build_module(given)
    content = read_checkpoint(checkpoint, map_location="cpu", weights_only=True)
    check_versions(content, path=checkpoint, form=CHECKPOINT_VERSION)
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
        raise ConfigurationError(
            "ckpt_path=null: name a checkpoint, such as ckpt_path=last; or output_dir=..., a "
            "folder to write published weights to."
        )
    run = run_folder(checkpoint)
    return (checkpoint.parent if run is None else run) / "export"


def _with_run(config: DictConfig, checkpoint: Path | None) -> DictConfig:
    """The configuration with what it leaves to the checkpoint's run filled in."""
    run = None if checkpoint is None else run_folder(checkpoint)
    filled = config.copy()
    OmegaConf.set_struct(filled, False)
    saved: Any = OmegaConf.create() if run is None else OmegaConf.load(run / "config.yaml")
    for group in ("model", "module", "peft"):
        given = filled.get(group) or {}
        if "_target_" not in given:  # changes to the run's
            if given and not OmegaConf.select(saved, f"{group}._target_"):
                raise ConfigurationError(
                    f"+{group}.{next(iter(given))}=...: the run of the checkpoint has no {group} "
                    f"that it could change. Leave it out, or choose one with {group}=..."
                )
            filled[group] = OmegaConf.merge(saved.get(group) or {}, given) or None
    if filled.model is None:
        raise ConfigurationError(
            f"ckpt_path={config.ckpt_path}: there is no config.yaml of a run beside it that says "
            "which model it is of. Name it to roundpipe-export: model=..., and peft=... if it has "
            "adapters."
        )
    return filled


def _build_module(config: DictConfig, *, has_base: bool | None = None) -> LightningModule:
    """The module that is exported; without weights where a checkpoint has them all.

    `has_base` says whether the checkpoint has all weights; None: there is no checkpoint.
    """
    source: ModelSource = build(config.model)
    adapters = None if config.peft is None else read_adapters(config.peft)
    make = CausalLanguageModule if config.module is None else build(config.module)
    module: LightningModule = make(source, optimizer=torch.optim.SGD, adapters=adapters)
    if has_base is None and not source.is_pretrained:
        raise ConfigurationError(
            "ckpt_path=null exports published weights, and model.weights=random has none. Name a "
            "checkpoint, or set model.weights=pretrained."
        )
    if not has_base or source.keeps_weights_in_files:
        if not source.is_pretrained:
            with torch.device("meta"):
                size = sum(each.nbytes for each in source.build().parameters())
            way_out = "Use the machine that trained it."
            check_host_memory(size, what="The base, which is drawn anew,", way_out=way_out)
        module.configure_model()
        return module
    with torch.device("meta"):
        module.configure_model()
    return module


_PRECISIONS: dict[str, Any] = {"float32": "32-true", "bfloat16": "bf16-true", "float16": "16-true"}


def talk(options: argparse.Namespace) -> int:
    sampled = {"do_sample": True, "temperature": options.temperature}
    try:
        for name, least in (("max_new_tokens", 1), ("temperature", 0)):
            if not least <= (value := getattr(options, name)) < math.inf:
                flag = name.replace("_", "-")
                raise ConfigurationError(f"--{flag}={value} must be {least} or more.")
        model, source = _load(options.model)
        if options.chat_template is not None:
            source = replace(source, chat_template=options.chat_template)
        module = ChatModule(
            model,
            source.load(),
            write=partial(print, end="", flush=True),
            system=options.system,
            max_new_tokens=options.max_new_tokens,
            **(sampled if options.temperature > 0 else {"do_sample": False}),
        )
        logging.disable(logging.INFO)  # what Lightning says of devices and loaders
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="lightning")
            trainer = Trainer(
                strategy=RoundPipeStrategy(),
                devices=1,
                precision=_PRECISIONS.get(str(model.dtype).removeprefix("torch."), "32-true"),
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
            )
            trainer.predict(module, module.questions(_ask), return_predictions=False)
    except RoundPipeError as error:
        sys.stderr.write(f"Error: {error}\n")
        return EXIT_BAD_INPUT
    finally:
        logging.disable(logging.NOTSET)
    return 0


def _load(name: str) -> tuple[Any, TokenizerSource]:
    path = Path(name).expanduser()
    is_run = path.is_file() or is_checkpoint_folder(path) or (path / "config.yaml").is_file()
    if name == "last" or is_run:
        with initialize_config_dir(str(config_folder()), version_base="1.3"):
            config = compose("export", overrides=[f"ckpt_path={json.dumps(name)}"])
        found = find_checkpoint(config)
        assert found is not None
        module = trained_module(config, Path(found))
        draw_buffers(module)
        run = run_folder(Path(found))
        saved: Any = None if run is None else OmegaConf.load(run / "config.yaml")
        tokenizer = OmegaConf.select(saved, "data.tokenizer") if saved else None
        return find_pretrained(module), build(tokenizer) or TokenizerSource()
    adapter = path / "adapter_config.json"
    if not adapter.is_file():
        return _source(name).build(), TokenizerSource(name=name)
    base = json.loads(adapter.read_text("utf-8")).get("base_model_name_or_path")
    if not base:
        raise ModelSourceError(
            f"{name} is an adapter that names no base: its base had random weights. Talk to the "
            "run's checkpoint, or to a merged export (roundpipe-export merge=true)."
        )
    has_tokenizer = (path / "tokenizer_config.json").is_file()
    model = saved_adapters(str(path)).apply(_source(base).build())
    return model, TokenizerSource(name=str(path) if has_tokenizer else base)


def _source(name: str) -> ModelSource:
    """A published model, its weights left in their files where the system can do that."""
    source = ModelSource(architecture={}, hub_name=name, weights="pretrained", dtype="auto")
    is_packed = getattr(source.load_config(), "quantization_config", None) is not None
    where = "memory" if is_packed or sys.platform == "win32" else "mmap"
    return replace(source, frozen_weights=where)


def _ask() -> str | None:
    while True:
        try:
            question = input("> ")
        except (EOFError, KeyboardInterrupt):
            sys.stdout.write("\n")
            return None
        if question.strip():
            return question
