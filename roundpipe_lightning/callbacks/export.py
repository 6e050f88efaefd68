"""The trained model as a Hugging Face folder, written by the training itself."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.models.export import (
    ExportOptions,
    check_exportable,
    export_pretrained,
    find_pretrained,
)
from roundpipe_lightning.strategy.strategy import RoundPipeStrategy

log = logging.getLogger(__name__)


class ExportPretrained(Callback):
    """Writes the model of transformers, or the adapter of peft, that a training has made.

    The folder loads with `from_pretrained` or `PeftModel.from_pretrained`. It is written shard by
    shard without a second copy of the model, and replaced as a whole.

    Args:
        dirpath: Where to; None is `export` in the logger's folder, or in the Trainer's default one.
        every_n_steps: Also after every so many optimizer steps; None: at the end of training only.
        model: Dotted name of the model in the LightningModule; None finds it.
        tokenizer: A tokenizer, its folder or its hub name; None takes that of the data module, or
            of the folder the model was loaded from, if they have one.
        options: The other fields of `ExportOptions`: `dtype`, `merge`, `overwrite`,
            `max_shard_bytes` and `original_layout`.

    Raises:
        ConfigurationError: A setting cannot work.
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        *,
        every_n_steps: int | None = None,
        model: str | None = None,
        tokenizer: Any = None,
        **options: Any,
    ) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise ConfigurationError(
                f"ExportPretrained(every_n_steps={every_n_steps}) must be 1 or more, or None."
            )
        self._dirpath = None if dirpath is None else Path(dirpath)
        self._every_n_steps = every_n_steps
        self._model = model
        self._tokenizer = tokenizer
        self._options = ExportOptions(**options)
        self._last_step: int | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse before training what could not be exported after it.

        Raises:
            ConfigurationError: There is no model to export, or a part of it cannot be saved.
            CheckpointError: The folder holds something else than an export, or has no room.
        """
        model = find_pretrained(pl_module, self._model)
        check_exportable(model, self.folder(trainer), options=self._with_tokenizer(trainer))
        self._last_step = None

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        step = trainer.global_step
        if self._every_n_steps is not None and step and step % self._every_n_steps == 0:
            self._export(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._export(trainer, pl_module)

    def folder(self, trainer: Trainer) -> Path:
        return self._dirpath or Path(trainer.log_dir or trainer.default_root_dir) / "export"

    def _export(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._last_step == trainer.global_step or not trainer.is_global_zero:
            return
        if isinstance(trainer.strategy, RoundPipeStrategy):
            trainer.strategy.join_updates()
        folder = export_pretrained(
            find_pretrained(pl_module, self._model),
            self.folder(trainer),
            options=self._with_tokenizer(trainer),
        )
        self._last_step = trainer.global_step
        log.info("Exported step %d to %s", trainer.global_step, folder)

    def _with_tokenizer(self, trainer: Trainer) -> ExportOptions:
        tokenizer = self._tokenizer
        if tokenizer is None:
            data = getattr(trainer, "datamodule", None)
            held = getattr(data, "processor", getattr(data, "tokenizer", None))  # of images, too
            tokenizer = held if hasattr(held, "save_pretrained") else None
        return replace(self._options, tokenizer=tokenizer)
