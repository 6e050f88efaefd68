"""Callbacks and logger of the command: figures, Ctrl-C between steps, last checkpoint, metrics."""

from __future__ import annotations

import csv
import io
import math
import signal
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, LearningRateMonitor, ProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from typing_extensions import Self, override

from roundpipe_lightning.callbacks.pictures import PipelineTimeline, PlanReport
from roundpipe_lightning.cli.job import is_roundpipe
from roundpipe_lightning.cli.objects import whole
from roundpipe_lightning.errors import DivergedError
from roundpipe_lightning.files import write_text
from roundpipe_lightning.strategy.compat import stop_after_batch

_SIGNALS = [
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
]
"""What a person, a machine that goes down, and SLURM (`--signal=USR1@120`) send."""


class RunStatistics(Callback):
    """Collects losses, speed and the number of steps.

    Attributes:
        loss_first: Loss of the first training step, nats per token; None before it.
        loss_last: Loss of the latest training step, nats per token; None before the first.
        num_steps: Optimizer steps of this run, those before a resume not counted.
        validated_step: Optimizer step at which val_loss was measured last; None: never.
    """

    def __init__(self) -> None:
        self.loss_first: float | None = None
        self.loss_last: float | None = None
        self.num_steps = 0
        self.validated_step: int | None = None
        self._first_step = 0
        self._started_seconds = 0.0
        self._batches: list[tuple[int, float]] = []

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens trained on per second of training step, the first step left out if it can be.

        None where batches have no `input_ids`.
        Validation, checkpoints and loading data between the steps are not counted.
        """
        batches = self._batches[1:] if len(self._batches) > 1 else self._batches
        seconds = sum(duration for _, duration in batches)
        return sum(tokens for tokens, _ in batches) / seconds if seconds > 0 else None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._first_step = trainer.global_step

    @override
    def on_train_batch_start(self, *_: Any, **__: Any) -> None:
        self._started_seconds = time.perf_counter()

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: STEP_OUTPUT,
        batch: Any,
        batch_idx: int,
    ) -> None:
        seconds = time.perf_counter() - self._started_seconds
        tokens = batch.get("input_ids") if isinstance(batch, Mapping) else None
        if isinstance(tokens, Tensor):
            self._batches.append((tokens.numel(), seconds))
        loss = trainer.callback_metrics.get("train_loss")
        if loss is None and isinstance(outputs, Mapping) and "loss" in outputs:
            loss = outputs["loss"] * trainer.accumulate_grad_batches
        if loss is not None:
            self.loss_last = float(loss)
            self.loss_first = self.loss_last if self.loss_first is None else self.loss_first
        self.num_steps = trainer.global_step - self._first_step

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self.validated_step = trainer.global_step


def useful_callbacks(
    callbacks: Iterable[Callback], trainer: Mapping[str, Any], *, logs: bool
) -> list[Callback]:
    """Leave out the callbacks that refuse what else is configured, and have nothing to do then."""
    idle: list[type[Callback]] = []
    if not logs:
        idle.append(LearningRateMonitor)
    if trainer.get("enable_progress_bar") is False:
        idle.append(ProgressBar)
    if trainer.get("enable_checkpointing") is False:
        idle.append(Checkpoint)
    if not is_roundpipe(trainer.get("strategy", "auto")):
        idle += [PlanReport, PipelineTimeline]
    return [callback for callback in callbacks if not isinstance(callback, tuple(idle))]


class GracefulInterrupt(Callback):
    """Ends a run that is asked to stop (Ctrl-C, SIGTERM, SLURM's warning) between two steps.

    Used as a context manager around the Trainer, and as the last of its callbacks. Outside a
    training step the signal interrupts at once, and so does a second Ctrl-C; any other signal that
    comes again changes nothing. Of several processes one's signal stops all, after the same step.
    The handlers of before are put back at the end. Only the main thread can take over signals;
    elsewhere nothing is changed.

    Attributes:
        signal_number: The signal that has asked the run to stop; None: none has.
    """

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self._in_step = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.world_size > 1 and self._previous:
            # Lightning's own handler would wait there until the other processes get a signal.
            signal.signal(signal.SIGTERM, self._handle)

    @override
    def on_train_batch_start(self, *_: Any, **__: Any) -> None:
        self._in_step = True

    @override
    def on_train_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        self._in_step = trainer.world_size > 1  # whoever stops alone would wait for the others
        is_asked = self.signal_number is not None
        if trainer.world_size > 1:
            is_asked = trainer.strategy.reduce_boolean_decision(is_asked, all=False)
        if is_asked:
            self.signal_number = self.signal_number or signal.SIGTERM
            stop_after_batch(trainer)

    @override
    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._in_step = False

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        again = self.signal_number is not None
        if again and number != signal.SIGINT:
            return
        if not again:
            self.signal_number = number
        if again or not self._in_step:
            raise KeyboardInterrupt
        sys.stderr.write("\nStopping after this step; Ctrl-C again stops at once.\n")


class LastCheckpoint(Checkpoint):
    """Keeps one file, `last.ckpt`: the state after the latest step that was worth saving.

    It is written every `every_n_steps` optimizer steps, after the last step, and when the run is
    interrupted between two steps. Inside a step nothing is saved, because weights may be half
    updated there; the file of before then stays. Lightning's `ModelCheckpoint` saves neither the
    last step nor, with `save_on_exception`, between two steps alone.

    Args:
        dirpath: Folder of the file; one with a scheme (`s3://...`) may be elsewhere.
        every_n_steps: Optimizer steps between two saves.
    """

    def __init__(self, dirpath: str, *, every_n_steps: int) -> None:
        super().__init__()
        self.path = f"{dirpath}/last.ckpt"
        self.every_n_steps = whole("callbacks.last_checkpoint.every_n_steps", every_n_steps)
        self._saved_step = self._num_started = 0
        self.is_saved = False
        """Whether this run has written the file."""

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._saved_step = trainer.global_step
        self._num_started = _batches(trainer).started

    @override
    def on_train_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        self._num_started = _batches(trainer).started
        step = trainer.global_step
        if step - self._saved_step >= self.every_n_steps or step == trainer.max_steps:
            self._save(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._save(trainer)  # of a run that was not ended by its number of steps

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        batches = _batches(trainer)  # one that is ready has changed nothing before it has started
        between_steps = batches.started == self._num_started or batches.ready == batches.processed
        stopped: tuple[type[BaseException], ...] = (KeyboardInterrupt, SIGTERMException)
        if trainer.world_size > 1:  # others do not know of an interrupt at once
            stopped = (SIGTERMException,)
        if isinstance(exception, stopped) and between_steps:
            self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        fast = trainer.fast_dev_run  # type: ignore[attr-defined]
        if fast or trainer.global_step == self._saved_step:
            return
        trainer.save_checkpoint(self.path, weights_only=False)
        self._saved_step = trainer.global_step
        self.is_saved = True


class FiniteCheck(Callback):
    """Ends a run whose loss or weights are no longer finite, before they are saved.

    The loss is looked at after every batch, the weights of a checkpoint before it is written.

    Raises:
        DivergedError: In the step that it happens in.
    """

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: STEP_OUTPUT,
        batch: Any,
        batch_idx: int,
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        value = float(loss) if isinstance(loss, Tensor) and loss.numel() == 1 else 0.0
        self._check(trainer, None if math.isfinite(value) else f"The loss of the step is {value}")

    @override
    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        named = pl_module.named_parameters(remove_duplicate=False)
        trained = {name for name, parameter in named if parameter.requires_grad}
        weights = ((n, value) for n, value in checkpoint["state_dict"].items() if n in trained)
        name = next((name for name, value in weights if not _is_finite(value)), None)
        self._check(trainer, None if name is None else f"{name} has values that are not finite")

    def _check(self, trainer: Trainer, reason: str | None) -> None:
        is_finite = reason is None
        if trainer.world_size > 1:  # else the others would wait for this process
            is_finite = trainer.strategy.reduce_boolean_decision(is_finite, all=True)
        if is_finite:
            return
        saved = [each for each in trainer.callbacks if isinstance(each, LastCheckpoint)]  # type: ignore[attr-defined]
        places = [each.path for each in saved if each.is_saved]
        place = places[0] if places else trainer.ckpt_path
        way_out = f"Go on from the last finite checkpoint, ckpt_path={place}" if place else "Begin"
        raise DivergedError(
            f"{reason or 'On another host the run diverged'}, after {trainer.global_step} steps: "
            f"training has diverged. {way_out}, with a lower optimizer.lr or "
            "trainer.gradient_clip_val. callbacks.finite_check=null trains on nevertheless."
        )


def hold_settings(trainer: Trainer, settings: Mapping[str, Any]) -> None:
    """Set options of the optimizers, after a checkpoint has restored those that it was saved with.

    A schedule goes on from its step: all its rates are scaled as its first one is.
    """
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            for name in settings.keys() & group.keys():
                value = settings[name]
                before = group.get("initial_lr", group["lr"]) if name == "lr" else group[name]
                value = tuple(value) if isinstance(before, tuple) else value
                if name == "lr" and "initial_lr" in group and before:
                    group["lr"], group["initial_lr"] = group["lr"] * value / before, value
                else:
                    group[name] = value
                if value != before:
                    sys.stderr.write(f"optimizer.{name}={value}: the checkpoint has {before}.\n")
    for entry in trainer.lr_scheduler_configs:
        scheduler: Any = entry.scheduler
        groups = scheduler.optimizer.param_groups
        if hasattr(scheduler, "base_lrs"):
            scheduler.base_lrs = [group.get("initial_lr", group["lr"]) for group in groups]
            scheduler._last_lr = [group["lr"] for group in groups]  # noqa: SLF001 - what is logged


_CHECKED_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _is_finite(value: Any) -> bool:
    if not isinstance(value, Tensor) or value.dtype not in _CHECKED_DTYPES or not value.numel():
        return True
    least, most = torch.aminmax(value.detach())  # of NaN both are
    return math.isfinite(least) and math.isfinite(most)


def _batches(trainer: Trainer) -> Any:
    return trainer.fit_loop.epoch_loop.batch_progress.total


class MetricsFile(Logger):
    """Writes `metrics.csv`: one line per step, one column per metric.

    Lightning's `CSVLogger` deletes the file of a run that goes on in its folder, and writes the
    metrics of a step into several lines. This one goes on after the lines of earlier steps.

    Args:
        folder: Folder of the run.
        flush_every_n_steps: Steps between two writes; the rest is written at the end.
    """

    name = "csv"
    version = ""  # every run has a folder of its own

    def __init__(self, folder: str, *, flush_every_n_steps: int = 20) -> None:
        super().__init__()
        self.path = Path(folder) / "metrics.csv"
        self.flush_every_n_steps = flush_every_n_steps
        self._trains = True
        self._columns: list[str] = []
        self._rows: list[dict[str, Any]] = []

    @property
    @override
    def save_dir(self) -> str:
        return str(self.path.parent)

    @override
    def log_hyperparams(
        self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any
    ) -> None:
        """Look whether the run trains: `config.yaml` in the same folder has every setting."""
        values = vars(params) if isinstance(params, Namespace) else params
        self._trains = values.get("train", self._trains)

    @override
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add metrics to the line of their optimizer step; None: that of the line before."""
        last = self._rows[-1]["step"] if self._rows else None
        row_step = last if step is None else step
        if not self._rows or row_step != last:
            if self._rows and len(self._rows) >= self.flush_every_n_steps:
                self.save()
            self._rows.append({"step": row_step})
        self._rows[-1].update(metrics)

    @override
    def save(self) -> None:
        """Write the lines collected so far; where there is a new column, the whole file anew."""
        rows = list(self._rows)
        new = dict.fromkeys(name for row in rows for name in row)
        if not set(new) <= set(self._columns):
            if self.path.is_file():
                with self.path.open(newline="", encoding="utf-8") as file:
                    reader = csv.DictReader(file)
                    earlier = list(reader)
                    # A run that was killed may have done steps after its checkpoint; one that goes
                    # on with the validation of its last step begins with that step's row.
                    if self._trains and not self._columns:
                        first = rows[0]["step"]
                        same = (row for row in earlier if int(row["step"]) == first)
                        rows[0] = {**next(same, {}), **rows[0]}
                        earlier = [row for row in earlier if int(row["step"]) < first]
                    rows = [*earlier, *rows]
                    new = dict.fromkeys([*(reader.fieldnames or ()), *new])
            self._columns = list(new)
            text = io.StringIO(newline="")
            writer = csv.DictWriter(text, self._columns)
            writer.writeheader()
            writer.writerows(rows)
            write_text(self.path, text.getvalue())
        elif rows:
            with self.path.open("a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, self._columns).writerows(rows)
        self._rows = []

    @override
    def finalize(self, status: str) -> None:
        self.save()
