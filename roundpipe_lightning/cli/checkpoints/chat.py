"""`roundpipe-chat MODEL`: talk to a model whose weights stream through one device."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from lightning.pytorch import Trainer
from omegaconf import OmegaConf

from roundpipe_commands import EXIT_BAD_INPUT
from roundpipe_lightning.checkpoint.folder import is_checkpoint_folder
from roundpipe_lightning.cli.build import find_checkpoint, run_folder
from roundpipe_lightning.cli.checkpoints.export import trained_module
from roundpipe_lightning.cli.objects import build
from roundpipe_lightning.errors import ModelSourceError, RoundPipeError
from roundpipe_lightning.models.export import find_pretrained
from roundpipe_lightning.models.load_module import draw_buffers
from roundpipe_lightning.modules import ModelSource, TokenizerSource
from roundpipe_lightning.modules.adapters import saved_adapters
from roundpipe_lightning.modules.chat import ChatModule
from roundpipe_lightning.planning.model.hardware import config_folder
from roundpipe_lightning.strategy.strategy import RoundPipeStrategy

_PRECISIONS: dict[str, Any] = {"float32": "32-true", "bfloat16": "bf16-true", "float16": "16-true"}


def talk(options: argparse.Namespace) -> int:
    """Talk as the command line says; return the exit status."""
    sampled = {"do_sample": True, "temperature": options.temperature}
    try:
        model, source = _load(options.model)
        if options.chat_template is not None:
            source = replace(source, chat_template=options.chat_template)
        module = ChatModule(
            model,
            source.load(),
            write=_write,
            system=options.system,
            max_new_tokens=options.max_new_tokens,
            **(sampled if options.temperature > 0 else {"do_sample": False}),
        )
        with _quiet():
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
    return 0


def _load(name: str) -> tuple[Any, TokenizerSource]:
    """The model of a checkpoint, a folder or a hub name, and its tokenizer."""
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
    where = "memory" if sys.platform == "win32" else "mmap"
    return ModelSource(architecture={}, hub_name=name, weights="pretrained", frozen_weights=where)


def _ask() -> str | None:
    while True:
        try:
            question = input("> ")
        except (EOFError, KeyboardInterrupt):
            sys.stdout.write("\n")
            return None
        if question.strip():
            return question


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep what Lightning says of devices and loaders out of the conversation."""
    loggers = [
        logging.getLogger(name)
        for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero")
    ]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="lightning")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
