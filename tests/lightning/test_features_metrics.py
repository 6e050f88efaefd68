from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics import (
    MeanSquaredError,
    MetricCollection,
    PearsonCorrCoef,
    R2Score,
    SpearmanCorrCoef,
)
from torchmetrics.wrappers import MetricTracker, MinMaxMetric

from roundpipe_lightning.checkpoint.io import RoundPipeAsyncCheckpointIO
from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.strategy.strategy import RoundPipeStrategy
from roundpipe_lightning.testing import EmulatedStrategy
from tests.kit.comparison import assert_close, compare, on_each
from tests.kit.resumption import MemoryLogger
from tests.kit.training import Regressor, make_trainer, regression_data

pytestmark = pytest.mark.filterwarnings(
    "ignore:The variance of predictions",
    "ignore:Metric `SpearmanCorrcoef`",
    "ignore:The ``compute`` method of metric",
)


class _Measured(Regressor):
    """Calls a metric for the whole batch and logs it."""

    def __init__(self, metric: nn.Module, call: str) -> None:
        super().__init__()
        self.metric = metric
        self.evaluated = MeanSquaredError()
        self.call = call

    def arguments(self, prediction: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        return prediction.flatten(), target.flatten()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        prediction = self(batch[0])
        arguments = self.arguments(prediction, batch[1])
        if self.call == "update":
            self.metric.update(*arguments)  # type: ignore[operator]
        else:
            self.metric(*arguments)
        if isinstance(self.metric, MetricCollection):
            self.log_dict(self.metric, on_step=self.call == "forward", on_epoch=True)
        elif not isinstance(self.metric, (MinMaxMetric, MetricTracker)):
            metric: Any = self.metric
            self.log("metric", metric, on_step=self.call == "forward", on_epoch=True)
        return functional.mse_loss(prediction, batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.evaluated(self(batch[0]).flatten(), batch[1].flatten())
        self.log("evaluated", self.evaluated)


class _Values(Callback):
    """Everything that is known of metrics after every batch and epoch, wrappers computed."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.seen.append({key: value.clone() for key, value in trainer.callback_metrics.items()})

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        metric: Any = pl_module.metric
        value = metric.compute()
        self.seen.append(dict(value) if isinstance(value, dict) else {"value": value})
        if isinstance(metric, MetricTracker):
            metric.increment()
        self.seen.append({key: value.clone() for key, value in trainer.callback_metrics.items()})


def _with_one_that_cannot_be_merged() -> MetricCollection:
    return MetricCollection([PearsonCorrCoef(), MeanSquaredError(), R2Score()], prefix="all_")


def _tracker() -> MetricTracker:
    tracker = MetricTracker(MeanSquaredError(), maximize=False)
    tracker.increment()
    return tracker


METRICS: dict[str, Callable[[], nn.Module]] = {
    "sums": MeanSquaredError,
    "all samples": SpearmanCorrCoef,
    "wrapper": lambda: MinMaxMetric(MeanSquaredError()),
    "tracker": _tracker,
    "a mixed collection": _with_one_that_cannot_be_merged,
}


def _compare(make: Callable[[], Any], *, kinds: Any, tolerance: float) -> None:
    def values(trainer: Trainer, module: Any) -> Any:
        trainer.fit(module, regression_data(23), regression_data(9))
        (values,) = (c for c in trainer.callbacks if isinstance(c, _Values))  # type: ignore[attr-defined]
        return values.seen

    found = on_each(make, values, kinds=kinds, callbacks=lambda: [_Values()], max_epochs=2)
    for outcome in found[1:]:
        assert_close(outcome.result, found[0].result, tolerance=tolerance)


@pytest.mark.long("sums-forward-3", "all samples-forward-3", "sums-forward-1")
@pytest.mark.parametrize(
    ("name", "call", "count"),
    [*((name, "forward", 3) for name in METRICS), ("sums", "forward", 1), ("sums", "update", 3)],
)
def test_values_per_step_and_per_epoch(name: str, call: str, count: int) -> None:
    """Metrics are the module's own, and follow their arguments to a device and back."""
    kinds: list[Any] = [lambda: EmulatedStrategy(num_microbatches=count)]
    if name == "sums":
        kinds.append(lambda: RoundPipeStrategy(num_microbatches=count))
    _compare(lambda: _Measured(METRICS[name](), call), kinds=kinds, tolerance=2e-4)


# Other uses --------------------------------------------------------------------------------------


class _Step(_Measured):
    def __init__(self, do: Callable[[Any, Tensor, Tensor], Any]) -> None:
        super().__init__(MeanSquaredError(), "update")
        self.do = do
        self.kept = [MeanSquaredError()]
        self.aliases = {"mse": self.metric}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        prediction = self(batch[0])
        self.do(self, prediction.flatten().detach(), batch[1].flatten())
        self.log("computed", self.metric.compute())  # type: ignore[operator]
        return functional.mse_loss(prediction, batch[1])


USES: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "compute": lambda m, p, t: m.metric.update(p, t),
    "list": lambda m, p, t: (m.kept[0](p, t), m.metric.update(p, t)),
    "alias": lambda m, p, t: m.aliases["mse"](p, t),
}


@pytest.mark.parametrize("name", USES)
def test_any_use_is_as_on_one_device(name: str) -> None:
    _compare(
        lambda: _Step(USES[name]),
        kinds=[lambda: RoundPipeStrategy(num_microbatches=3)],
        tolerance=1e-5,
    )


def test_steps_of_microbatches_use_no_metrics() -> None:
    strategy = RoundPipeStrategy(num_microbatches=3, microbatching="step")
    trainer = make_trainer(strategy=strategy, max_epochs=1)
    with pytest.raises(ConfigurationError, match=r"metric 'metric'.*microbatching='blocks'"):
        trainer.fit(_Step(USES["compute"]), regression_data())


# Metrics on the wrong device ---------------------------------------------------------------------


def test_metric_without_values() -> None:
    module = _Measured(MeanSquaredError().to("meta"), "update")
    with pytest.raises(ConfigurationError, match=r"'metric' is on the meta device.*host memory"):
        make_trainer(strategy="roundpipe").fit(module, regression_data())


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_metric_that_nobody_finds_on_a_device(num_microbatches: int) -> None:
    module = _Step(lambda m, p, t: m.kept[0](p, t))
    strategy = EmulatedStrategy(num_microbatches=num_microbatches)
    with pytest.raises(ConfigurationError, match=r"met tensors of another device.*Leave"):
        make_trainer(strategy=strategy).fit(module, regression_data())


def test_metric_that_nobody_finds_in_validation_on_a_device() -> None:
    class Validating(_Step):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.kept[0](self(batch[0]), batch[1])

    module = Validating(lambda *_: None)
    with pytest.raises(ConfigurationError, match=r"another device.*Leave \.to\(device\)"):
        make_trainer(strategy=EmulatedStrategy()).validate(module, regression_data())


def _compare_overrides(make: Callable[[], Regressor], *, steps: int, **flags: Any) -> set[str]:
    """Compare all that loggers are given, too; return the names of what is logged."""

    def fit(trainer: Trainer, module: Regressor) -> Any:
        trainer.fit(module, regression_data(30), regression_data(8))
        assert isinstance(trainer.logger, MemoryLogger)
        return trainer.logger.rows

    one, *others = compare(
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


@pytest.mark.suite("2")
@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_hooks_log_reaches_loggers_at_every_step(accumulate: int) -> None:
    names = _compare_overrides(
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
def test_what_a_module_overrides(kind: type[Regressor]) -> None:
    _compare_overrides(kind, steps=4)


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
