import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor
from torch.nn import functional
from torchmetrics import MeanMetric

from roundpipe_lightning.strategy import compat
from roundpipe_lightning.strategy.strategy import RoundPipeStrategy
from tests.kit.training import Regressor, make_trainer


class MemoryLogger(Logger):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    @property
    def name(self) -> str:
        return "memory"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, *_: Any, **__: Any) -> None: ...

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))


class Restless(Regressor):
    """Draws random numbers of every kind, logs in every way, and follows what it measures."""

    def __init__(self) -> None:
        super().__init__("adamw", dropout=0.3, num_blocks=2)
        self.seen = MeanMetric()

    def on_train_epoch_start(self) -> None:
        torch.rand(())  # before the epoch's order is drawn

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        batch[0].add_(random.random() * 0.1 + float(np.random.rand()) * 0.1)  # noqa: NPY002

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch[:2]
        loss = functional.mse_loss(self(x + 0.1 * torch.randn_like(x)), y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("largest", x.detach().max(), reduce_fx="max", on_step=False, on_epoch=True)
        self.log("positive", (x > 0).float().mean(), on_step=False, on_epoch=True)
        self.seen.update(loss.detach())
        self.log("seen", self.seen, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        each_step = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return [optimizer], [
            {"scheduler": each_step, "interval": "step"},
            {"scheduler": plateau, "interval": "epoch", "monitor": "loss_epoch"},
        ]


@dataclass
class Moment:
    """A checkpoint of a run and how many rows had been logged then."""

    path: Path
    num_rows: int
    hook: str


@dataclass
class SaveEverywhere(Callback):
    """Writes a checkpoint in the named hooks, as often as they are called."""

    folder: Path
    hooks: Sequence[str]
    moments: list[Moment] = field(default_factory=list)

    def _save(self, trainer: Trainer, *_: Any) -> None:
        hook = compat.current_hook(trainer)
        if hook is None or hook not in self.hooks or trainer.sanity_checking:
            return
        path = self.folder / f"{len(self.moments)}-{hook}.ckpt"
        trainer.save_checkpoint(path, weights_only=False)
        assert isinstance(trainer.logger, MemoryLogger)
        self.moments.append(Moment(path, len(trainer.logger.rows), hook))

    on_train_batch_end = on_validation_end = on_validation_batch_end = _save  # type: ignore[assignment]
    on_train_epoch_end = on_train_end = on_before_zero_grad = _save  # type: ignore[assignment]


@dataclass
class Run:
    """State that a finished training leaves behind."""

    module: LightningModule
    trainer: Trainer
    rows: list[tuple[int | None, dict[str, float]]]
    batches: list[Tensor]


def train(
    folder: Path,
    *,
    train_data: Any,
    seed: int,
    validation_data: Any = None,
    path: Path | None = None,
    callbacks: Sequence[Callback] = (),
    more_callbacks: Callable[[], Sequence[Callback]] = tuple,
    make: Callable[[], LightningModule] = Restless,
    **flags: Any,
) -> Run:
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = make()
    batches: list[Tensor] = []

    class See(Callback):
        def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, _: int) -> None:
            batches.append(first_tensor(batch).clone())

    logger = MemoryLogger()
    defaults: dict[str, Any] = {
        "strategy": RoundPipeStrategy(num_microbatches=2, replan=False),
        "devices": 2,
        "logger": logger,
        "max_epochs": 3,
    }
    made = {name: value() if callable(value) else value for name, value in flags.items()}
    everyone = [See(), *more_callbacks(), *callbacks]
    trainer = make_trainer(folder, **{**defaults, **made}, callbacks=everyone)
    trainer.fit(module, train_data(), validation_data, ckpt_path=path)
    return Run(module, trainer, logger.rows, batches)


def first_tensor(batch: Any) -> Tensor:
    while not isinstance(batch, Tensor):
        batch = next(iter(batch.values())) if isinstance(batch, Mapping) else batch[0]
    return batch


def resumed_everywhere(
    folder: Path, hooks: Sequence[str], *, picked: Sequence[int] | None = None, **options: Any
) -> int:
    """Stop a training in every call of the hooks, and compare.

    Args:
        folder: For the checkpoints.
        hooks: Where they are written.
        picked: Which of them are resumed from; None: all.
        **options: Of `train`.

    Returns:
        The number of resumed runs.
    """
    folder.mkdir(exist_ok=True)
    saver = SaveEverywhere(folder, hooks)
    expected = train(folder, seed=1, callbacks=[saver], **options)
    moments = saver.moments if picked is None else [saver.moments[index] for index in picked]
    for moment in moments:
        run = train(folder, seed=99, path=moment.path, **options)
        assert_same_end(run, expected, moment)
    return len(moments)


def assert_same_end(run: Run, expected: Run, moment: Moment) -> None:
    where = moment.path.name
    left = len(run.batches)
    for index, (batch, other) in enumerate(
        zip(run.batches, expected.batches[len(expected.batches) - left :], strict=True)
    ):
        assert torch.equal(batch, other), f"{where}: batch {index} after the resume is another one"
    for name, value in expected.module.state_dict().items():
        assert torch.equal(run.module.state_dict()[name], value), f"{where}: {name} differs"
    states = [one.trainer.optimizers[0].state_dict() for one in (run, expected)]
    assert plain(states[0]) == plain(states[1]), where
    schedulers = [
        [config.scheduler.state_dict() for config in one.trainer.lr_scheduler_configs]
        for one in (run, expected)
    ]
    assert plain(schedulers[0]) == plain(schedulers[1]), where
    rows = expected.rows[moment.num_rows :]
    if moment.hook == "on_train_batch_end" and len(rows) == len(run.rows) + 1:
        rows = rows[1:]  # the batch's own values were logged by the run that was stopped
    assert run.rows == rows, where
    assert plain(run.trainer.callback_metrics) == plain(expected.trainer.callback_metrics), where
    assert run.trainer.current_epoch == expected.trainer.current_epoch, where
    assert run.trainer.global_step == expected.trainer.global_step, where
    plugins: list[Any] = [one.trainer.precision_plugin for one in (run, expected)]
    scalers = [plugin.scaler and plugin.scaler.state_dict() for plugin in plugins]
    assert scalers[0] == scalers[1], where


def plain(value: Any) -> Any:
    """Tensors as lists of numbers with their format, so that `==` compares all of it."""
    if isinstance(value, Tensor):
        return value.dtype, value.tolist()
    if isinstance(value, Mapping):
        return {key: plain(entry) for key, entry in value.items()}
    return [plain(entry) for entry in value] if isinstance(value, (list, tuple)) else value
