from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.utilities import grad_norm
from torch import Tensor

from roundpipe_lightning.checkpoint.io import RoundPipeAsyncCheckpointIO
from roundpipe_lightning.strategy.strategy import RoundPipeStrategy
from roundpipe_lightning.testing import EmulatedStrategy
from tests.kit.comparison import assert_close, compare
from tests.kit.resumption import MemoryLogger
from tests.kit.training import Regressor, regression_data


def _compare(folder: Path, make: Callable[[], Regressor], *, steps: int, **flags: Any) -> set[str]:
    """Compare all that loggers are given, too; return the names of what is logged."""

    def fit(trainer: Trainer, module: Regressor) -> Any:
        trainer.fit(module, regression_data(30), regression_data(8))
        assert isinstance(trainer.logger, MemoryLogger)
        return trainer.logger.rows

    one, *others = compare(
        folder,
        make,
        fit,
        kinds=(RoundPipeStrategy, EmulatedStrategy),
        num_microbatches=3,
        tolerance=1e-4,
        logger=MemoryLogger,
        max_epochs=2,
        **flags,
    )
    assert len({step for step, _ in one.result}) >= steps, "something was logged at every step"
    for other in others:
        assert_close(other.result, one.result, tolerance=1e-3)
    return {name for _, row in one.result for name in row}


# Logged in hooks ---------------------------------------------------------------------------------


class _LogsInHooks(Regressor):
    """Logs in every hook of a training batch, as those do who watch gradients."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("start", batch[0].abs().max(), on_step=True, on_epoch=True)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.log("weight", self.head.weight.detach().norm(), on_epoch=True)

    def on_before_backward(self, loss: Tensor) -> None:
        self.log("from_hook", loss.detach(), on_epoch=True)

    def on_after_backward(self) -> None:
        gradient = self.head.weight.grad
        assert gradient is not None
        self.log("gradient", gradient.norm(), on_step=True, on_epoch=True, reduce_fx="max")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self.layers[0], norm_type=2))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("end", outputs["loss"], on_step=True, on_epoch=True, reduce_fx="sum")

    def on_train_epoch_end(self) -> None:
        self.log("epochs", float(self.current_epoch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_hooks_log_reaches_loggers_at_every_step(tmp_path: Path, accumulate: int) -> None:
    names = _compare(
        tmp_path,
        _LogsInHooks,
        steps=8 // accumulate,
        callbacks=lambda: [LearningRateMonitor(log_momentum=True)],
        accumulate_grad_batches=accumulate,
        gradient_clip_val=0.5,
    )
    assert {"start_step", "weight_epoch", "gradient_epoch", "end_step", "lr-SGD"} <= names
    assert "grad_2.0_norm_total" in names


# Overridden --------------------------------------------------------------------------------------


class _StepsEveryOther(Regressor):
    """Runs the closure without a step at every other batch, as a GAN's trainer does."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        if batch_idx % 2:
            optimizer_closure()
        else:
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * (self.trainer.global_step + 1)  # warms up
            optimizer.step(closure=optimizer_closure)


class _KeepsGradients(Regressor):
    """Drops gradients by itself, at every third batch."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 3 == 0:
            optimizer.zero_grad(set_to_none=False)


class _MovesBatches(Regressor):
    """Changes its batches on the way."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + 0.5, batch[1]]

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return [part * 2 for part in super().transfer_batch_to_device(batch, device, 0)]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0], batch[1] - 1]


class _StepsItsScheduler(_LogsInHooks):
    """Steps its scheduler by the number of the step."""

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        if self.trainer.global_step % 2:
            scheduler.step()


@pytest.mark.parametrize(
    "kind", [_StepsEveryOther, _KeepsGradients, _MovesBatches, _StepsItsScheduler]
)
@pytest.mark.filterwarnings("ignore:You have overridden")
def test_what_a_module_overrides(tmp_path: Path, kind: type[Regressor]) -> None:
    _compare(tmp_path, kind, steps=4)


# Checkpoints by a metric of the training ---------------------------------------------------------


def test_checkpoints_chosen_by_steps_and_read_by_name(tmp_path: Path) -> None:
    """Saves, removals, `last` and `best` within an epoch, written in the background, too."""

    def run(trainer: Trainer, module: Regressor) -> Any:
        trainer.fit(module, regression_data(30))
        chooser: Any = trainer.checkpoint_callback
        kept = sorted(path.name for path in Path(chooser.dirpath).iterdir())
        best = {Path(path).name: float(value) for path, value in chooser.best_k_models.items()}
        loss = trainer.test(dataloaders=regression_data(8), ckpt_path="best", verbose=False)
        last = trainer.validate(dataloaders=regression_data(8), ckpt_path="last", verbose=False)
        return kept, Path(chooser.best_model_path).name, best, dict(loss[0]), dict(last[0])

    def in_background() -> RoundPipeStrategy:
        return RoundPipeStrategy(checkpoint_io=RoundPipeAsyncCheckpointIO())

    folders = (str(number) for number in range(3))
    one, *others = compare(
        tmp_path,
        Regressor,
        run,
        kinds=(RoundPipeStrategy, in_background),
        callbacks=lambda: [
            ModelCheckpoint(
                tmp_path / next(folders),
                monitor="loss_step",
                save_top_k=2,
                save_last=True,
                every_n_train_steps=2,
                filename="{epoch}-{step}",
            )
        ],
        enable_checkpointing=True,
        max_epochs=3,
    )
    for other in others:
        assert_close(other.result, one.result, tolerance=1e-4)
    assert len(one.result[0]) == 3
