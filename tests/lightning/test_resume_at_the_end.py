import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, Timer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from roundpipe_lightning.strategy.strategy import CHECKPOINT_KEY, PREVIOUS_KEY, RoundPipeStrategy
from tests.kit.resumption import (
    MemoryLogger,
    Moment,
    Restless,
    SaveEverywhere,
    assert_same_end,
    plain,
    train,
)
from tests.kit.training import make_trainer, regression_data, same_bits
from tests.lightning.test_updates import RATES, Sum, by_hand, vectors

HOOKS = [
    "on_train_batch_end",
    "on_validation_batch_end",
    "on_validation_end",
    "on_train_epoch_end",
]


class _Following(Restless):
    """A module whose learning rate follows a metric, after a step and after an epoch."""

    def configure_optimizers(self) -> Any:
        optimizers, schedulers = super().configure_optimizers()
        each_step = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizers[0], factor=0.9, patience=0, threshold=10.0
        )
        schedulers.append({"scheduler": each_step, "interval": "step", "monitor": "loss_step"})
        return optimizers, schedulers


class _SaveLast(SaveEverywhere, Checkpoint):
    """Comes after the other callbacks, as `ModelCheckpoint` does."""


class _StopAfter(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.should_stop = True


class _Clock(Timer):
    num_batches = 0

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.num_batches += 1
        super().on_train_batch_end(trainer)

    def time_elapsed(self, stage: str = "train") -> float:
        return float(self._offset + self.num_batches) if stage == "train" else 0.0


def _early() -> EarlyStopping:
    return EarlyStopping("val_loss", mode="max", patience=1, min_delta=100.0)


LIMITS: dict[str, tuple[int, dict[str, Any]]] = {
    "steps, a validation is due": (4, {"max_steps": 5, "val_check_interval": 2}),
    "steps, nothing is due": (2, {"max_steps": 4, "val_check_interval": 3}),
    "steps, at an epoch's end": (4, {"max_steps": 6}),
    "steps of windows": (3, {"max_steps": 3, "accumulate_grad_batches": 2, "max_epochs": -1}),
    "asked to stop": (4, {"callbacks": [_StopAfter(4)]}),
    "asked too early": (3, {"callbacks": [_StopAfter(2)], "min_steps": 5}),
    "time": (4, {"callbacks": [_Clock({"seconds": 4})]}),
    "early stopping": (4, {"callbacks": [_early()], "max_epochs": 4}),
}


def _options(**given: Any) -> dict[str, Any]:
    return {
        "train_data": lambda: regression_data(24, shuffle=True),
        "validation_data": regression_data(8),
        "make": _Following,
        "enable_checkpointing": True,
        **given,
    }


@pytest.mark.suite("steps, a validation is due", "time", "steps of windows", "asked too early")
@pytest.mark.parametrize("limit", LIMITS)
def test_after_the_last_step(tmp_path: Path, limit: str) -> None:
    num_moments, given = LIMITS[limit]
    options = _options(**given)
    saver = _SaveLast(tmp_path, HOOKS)
    own = list(given.get("callbacks", ()))
    expected = train(tmp_path, seed=1, **{**options, "callbacks": [*own, saver]})
    for moment in saver.moments[-num_moments:]:
        for callback in own:
            if isinstance(callback, _Clock):
                callback.num_batches = 0
        run = train(tmp_path, seed=99, path=moment.path, **options)
        assert_same_end(run, expected, moment)


@pytest.mark.parametrize("limit", [{}, {"max_steps": 4}])
def test_a_training_that_has_ended_still_has_its_metrics(
    tmp_path: Path, limit: dict[str, int]
) -> None:
    saver = _SaveLast(tmp_path, ["on_train_end"])
    expected = train(tmp_path, seed=1, callbacks=[saver], **_options(**limit)).trainer
    run = train(tmp_path, seed=9, path=saver.moments[-1].path, **_options(**limit)).trainer
    assert "val_loss" in expected.callback_metrics
    for name in ("callback_metrics", "logged_metrics", "progress_bar_metrics"):
        assert getattr(run, name) == getattr(expected, name)


def test_a_higher_limit_outweighs_an_early_stop(tmp_path: Path) -> None:
    saver = _SaveLast(tmp_path, HOOKS)
    options = _options(max_epochs=2)
    stopped = train(tmp_path, seed=1, callbacks=[_StopAfter(2), saver], **options)
    assert stopped.trainer.global_step == 2
    run = train(tmp_path, seed=9, path=saver.moments[-1].path, **{**options, "max_epochs": 3})
    assert run.trainer.global_step > 2
    assert run.trainer.current_epoch == 3


def test_a_trainer_that_has_trained_before(tmp_path: Path) -> None:
    saver = _SaveLast(tmp_path, ["on_validation_end"])
    run = train(tmp_path, seed=1, callbacks=[saver], **_options(max_epochs=2))
    metrics = plain(run.trainer.callback_metrics)
    resumed = _Following()
    loaders = (regression_data(24, shuffle=True), regression_data(8))
    run.trainer.fit(resumed, *loaders, ckpt_path=saver.moments[0].path)
    assert same_bits(resumed, run.module)
    assert plain(run.trainer.callback_metrics) == metrics


def test_saved_after_the_training_and_trained_longer(tmp_path: Path) -> None:
    whole = train(tmp_path, seed=1, **_options(max_epochs=2))
    part = train(tmp_path, seed=1, **_options(max_epochs=1))
    part.trainer.save_checkpoint(tmp_path / "ended.ckpt")
    run = train(tmp_path, seed=9, path=tmp_path / "ended.ckpt", **_options(max_epochs=2))
    assert_same_end(run, whole, Moment(tmp_path / "ended.ckpt", len(part.rows), "none"))


def _stale(*, max_epochs: int, path: Path | None = None) -> tuple[Sum, Trainer]:
    module = Sum(RATES)
    strategy = RoundPipeStrategy(num_microbatches=2, update="async")
    trainer = make_trainer(strategy=strategy, limit_val_batches=0, max_epochs=max_epochs)
    trainer.fit(module, vectors(), ckpt_path=path)
    return module, trainer


def test_stale_updates_saved_after_the_training_and_trained_longer(tmp_path: Path) -> None:
    _, trainer = _stale(max_epochs=1)
    trainer.save_checkpoint(tmp_path / "ended.ckpt")
    longer, _ = _stale(max_epochs=2, path=tmp_path / "ended.ckpt")
    assert longer.history == by_hand(1)[4:]


@pytest.mark.parametrize("is_counted", [True, False])
def test_parameters_written_after_the_training_are_not_stale(
    tmp_path: Path, *, is_counted: bool
) -> None:
    module, trainer = _stale(max_epochs=1)
    for parameter in module.parameters():
        written = parameter.detach() if is_counted else parameter.data
        written.zero_()
    trainer.save_checkpoint(tmp_path / "other.ckpt")
    assert not torch.load(tmp_path / "other.ckpt")[CHECKPOINT_KEY][PREVIOUS_KEY]
    longer, _ = _stale(max_epochs=2, path=tmp_path / "other.ckpt")
    assert longer.history == [0.0] * 4  # zero weights have no gradient; older ones have


class _Terminate(Callback):
    """Ends the process in a batch by a signal; Lightning ends after it, and this saves."""

    def __init__(self, batch: int, path: Path) -> None:
        self.batch, self.path = batch, path
        self.num_rows = 0

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.fit_loop.epoch_loop.total_batch_idx == self.batch:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_exception(self, trainer: Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.path)
        assert isinstance(trainer.logger, MemoryLogger)
        self.num_rows = len(trainer.logger.rows)


@pytest.mark.suite("0-1", "4-2", "1-1")
@pytest.mark.parametrize(("batch", "window"), [(0, 1), (1, 1), (2, 1), (4, 1), (0, 2), (4, 2)])
def test_told_to_end_by_the_system(tmp_path: Path, batch: int, window: int) -> None:
    options = _options(max_epochs=2, val_check_interval=2, accumulate_grad_batches=window)
    expected = train(tmp_path, seed=1, **options)
    stopping = _Terminate(batch, tmp_path / "stopped.ckpt")
    with pytest.raises(SIGTERMException):
        train(tmp_path, seed=1, callbacks=[stopping], **options)
    run = train(tmp_path, seed=9, path=stopping.path, **options)
    assert_same_end(run, expected, Moment(stopping.path, stopping.num_rows, "on_exception"))


def test_inside_the_batch_after_a_validation(tmp_path: Path) -> None:
    saver = SaveEverywhere(tmp_path, ["on_before_zero_grad"])
    options = _options(max_epochs=2, val_check_interval=2)
    expected = train(tmp_path, seed=1, callbacks=[saver], **options)
    for moment in (saver.moments[2], saver.moments[5]):
        run = train(tmp_path, seed=9, path=moment.path, **options)
        assert_same_end(run, expected, moment)
