"""What becomes of a checkpoint: `roundpipe-export` writes it out, `roundpipe-chat` talks to it."""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from lightning.pytorch import LightningModule, Trainer
from omegaconf import DictConfig, OmegaConf

from roundpipe_commands import EXIT_BAD_INPUT, as_setting, explain, for_export
from roundpipe_lightning.checkpoint.compatibility import check_versions, left_out, load_state
from roundpipe_lightning.checkpoint.folder import Folder, check_form, is_checkpoint_folder
from roundpipe_lightning.checkpoint.io import read_checkpoint
from roundpipe_lightning.cli.build import find_checkpoint
from roundpipe_lightning.cli.objects import build, read_adapters, run_explained, visible
from roundpipe_lightning.cli.run_folder import SavedRun, find_run, is_run
from roundpipe_lightning.cli.train import write_card
from roundpipe_lightning.engine.device.host_memory import check_host_memory
from roundpipe_lightning.errors import (
    CheckpointError,
    ConfigurationError,
    ModelSourceError,
    RoundPipeError,
)
from roundpipe_lightning.models.export import (
    ExportOptions,
    check_replaceable,
    export_pretrained,
    find_pretrained,
)
from roundpipe_lightning.models.gguf import is_gguf
from roundpipe_lightning.models.load import draw_buffers
from roundpipe_lightning.models.weight_files import make_repository, push_folder
from roundpipe_lightning.modules import CausalLanguageModule, ModelSource, TokenizerSource
from roundpipe_lightning.modules.adapters import saved_adapters
from roundpipe_lightning.modules.chat import ChatModule
from roundpipe_lightning.planning.model.hardware import config_folder
from roundpipe_lightning.strategy.strategy import CHECKPOINT_VERSION, RoundPipeStrategy


def run(config: DictConfig) -> int:
    result = run_explained(verify if config.verify is True else export, config)
    if isinstance(result, int):
        return result
    sys.stdout.write(f"{result}\n")
    return 0


def verify(config: DictConfig) -> int:
    """Say which checkpoints of a run are whole, or whether one is; return the exit status."""
    chosen = Path(str(config.ckpt_path)).expanduser()
    checkpoint = Path(str(find_checkpoint(config)))
    paths = [checkpoint]
    if chosen.is_dir() and not is_checkpoint_folder(chosen):
        paths = sorted(checkpoint.parent.glob("*.ckpt"))
    faults = [_fault(path) for path in paths]
    return EXIT_BAD_INPUT if any(faults) else 0


def _fault(path: Path) -> CheckpointError | None:
    """Print whether a checkpoint is whole, and return what is wrong with it."""
    try:
        content = Folder(path).checkpoint if path.is_dir() else read_checkpoint(path)
        check_versions(content, path=path, form=CHECKPOINT_VERSION)
    except CheckpointError as error:
        sys.stdout.write(f"{path}: not whole. {error}\n")
        return error
    sys.stdout.write(f"{path}: whole, after {content.get('global_step')} steps\n")
    return None


def export(config: DictConfig) -> Path:
    """Write the folder of a configuration (`conf/export.yaml`), and return it."""
    found = find_checkpoint(config)
    if found is not None and "://" in found:
        raise ConfigurationError(f"ckpt_path={found}: copy it to this machine first.")
    checkpoint = None if found is None else Path(found)
    if checkpoint is not None and checkpoint.is_dir():
        check_form(checkpoint)
    names = ("dtype", "merge", "overwrite", "max_shard_bytes", "original_layout")
    run = None if checkpoint is None else find_run(checkpoint)
    parts = _parts(config, run)
    tokenizer = config.tokenizer or _tokenizer_of_run(parts["data.tokenizer"])
    options = ExportOptions(**{name: config[name] for name in names}, tokenizer=tokenizer)
    folder = _output_folder(config, checkpoint, run)
    check_replaceable(folder, overwrite=options.overwrite)
    if config.push_to_hub is not None:
        make_repository(config.push_to_hub)
    module = trained_module(parts, checkpoint)
    export_pretrained(find_pretrained(module, config.name), folder, options=options)
    if run is not None:
        write_card(folder, run.folder, name=config.push_to_hub)
    if config.push_to_hub is not None:
        sys.stdout.write(f"{push_folder(folder, config.push_to_hub)}\n")
    return folder


def _tokenizer_of_run(source: DictConfig | None) -> Any:
    """The tokenizer that a run was trained with, its chat template included; None: not known."""
    try:
        found = None if source is None else build(source)
        return found and getattr(found, "load_processor", found.load)()
    except RoundPipeError as error:  # without a network, say
        warnings.warn(
            f"The tokenizer is the model's, not the run's, which could not be read: {error}",
            stacklevel=2,
        )
        return None


def trained_module(parts: Mapping[str, Any], checkpoint: Path | None) -> LightningModule:
    """The module of a checkpoint, whose tensors stay in its file; None: of published weights.

    `parts` are those of `_parts`.
    """
    if checkpoint is None:
        return _build_module(parts)
    content = read_checkpoint(checkpoint, map_location="cpu", weights_only=True)
    check_versions(content, path=checkpoint, form=CHECKPOINT_VERSION)
    module = _build_module(parts, has_base=not left_out(content))
    load_state(module, content, strict=True, assign=True)
    for part in module.modules():
        if hasattr(part, "tie_weights"):  # a model of transformers
            tie_weights: Any = part.tie_weights
            tie_weights()
    return module


def _output_folder(config: DictConfig, checkpoint: Path | None, run: SavedRun | None) -> Path:
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
    return (checkpoint.parent if run is None else run.folder) / "export"


def _parts(config: DictConfig, run: SavedRun | None) -> dict[str, Any]:
    """The configurations of model, module, adapters and tokenizer: of the run, and as typed."""
    typed: dict[str, Any] = {}
    for group in ("model", "module", "peft", "data"):
        node = OmegaConf.select(config, group)
        typed[group] = {} if node is None else OmegaConf.to_container(node, resolve=True)
        is_change = bool(typed[group]) and group != "data" and "_target_" not in typed[group]
        if is_change and (run is None or run.value(f"{group}._target_") is None):
            raise ConfigurationError(
                f"{group}.{next(iter(typed[group]))}=...: the run of the checkpoint has no {group} "
                f"that it could change. Leave it out, or choose one with {group}=..."
            )
    groups = (run or SavedRun(folder=Path(), settings={})).groups(typed)
    if groups["model"] is None:
        raise ConfigurationError(
            f"ckpt_path={config.ckpt_path}: it is in no folder of a run (run.json and config.yaml) "
            "that says which model it is of. Name it: model=..., and peft=... if it has adapters."
        )
    return {name: None if node is None else OmegaConf.create(node) for name, node in groups.items()}


def _build_module(parts: Mapping[str, Any], *, has_base: bool | None = None) -> LightningModule:
    """The module that is exported; without weights where a checkpoint has them all.

    `has_base` says whether the checkpoint has all weights; None: there is no checkpoint.
    """
    source: ModelSource = build(parts["model"])
    adapters = None if parts["peft"] is None else read_adapters(parts["peft"])
    make = CausalLanguageModule if parts["module"] is None else build(parts["module"])
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
        model, source = _load(options.model, options.settings)
        if options.chat_template is not None:
            source = replace(source, chat_template=options.chat_template)
        module = ChatModule(
            model,
            source.load(),
            write=lambda text: print(visible(text), end="", flush=True),
            system=options.system and os.fsencode(options.system).decode(errors="replace"),
            max_new_tokens=options.max_new_tokens,
            **(sampled if options.temperature > 0 else {"do_sample": False}),
        )
        logging.disable(logging.INFO)  # what Lightning says of devices and loaders
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="lightning")
            # of a model of one block: every token passes through it as a whole
            warnings.filterwarnings("ignore", message="No stack of blocks was found in ChatModule")
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
        sys.stderr.write(f"Error: {visible(str(error))}\n")
        return EXIT_BAD_INPUT
    finally:
        logging.disable(logging.NOTSET)
    return 0


def _load(name: str, settings: Sequence[str]) -> tuple[Any, TokenizerSource]:
    path = Path(name).expanduser()
    is_file = path.is_file() and not is_gguf(name)
    if name == "last" or is_file or is_checkpoint_folder(path) or is_run(path):
        words = for_export([f"ckpt_path={as_setting(name)}", *settings])
        try:
            with initialize_config_dir(str(config_folder()), version_base="1.3"):
                config = compose("export", overrides=words)
        except HydraException as error:
            raise ConfigurationError(explain(error, "export", config_folder())) from error
        checkpoint = Path(str(find_checkpoint(config)))
        parts = _parts(config, find_run(checkpoint))
        module = trained_module(parts, checkpoint)
        draw_buffers(module)
        return find_pretrained(module), build(parts["data.tokenizer"]) or TokenizerSource()
    if settings:
        raise ConfigurationError(
            f"{settings[0]}: settings are for the checkpoint of a run, and {name} is none."
        )
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
    is_read = is_packed or is_gguf(name) or sys.platform == "win32"
    where = "memory" if is_read else "mmap"
    return replace(source, frozen_weights=where)


def _ask() -> str | None:
    while True:
        try:
            question = input("> ")
        except (EOFError, KeyboardInterrupt, ValueError):  # a closed standard input, too
            sys.stdout.write("\n")
            return None
        if question.strip():
            return question
