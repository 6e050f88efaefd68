"""torchmetrics of every kind have the values of one device, per step and per epoch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics import (
    Accuracy,
    F1Score,
    MeanSquaredError,
    Metric,
    MetricCollection,
    PearsonCorrCoef,
    Precision,
    R2Score,
    Recall,
    SpearmanCorrCoef,
)
from torchmetrics.aggregation import MaxMetric, MeanMetric, RunningMean
from torchmetrics.wrappers import MetricTracker, MinMaxMetric

from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.strategy.strategy import RoundPipeStrategy
from roundpipe_lightning.testing import EmulatedStrategy
from tests.kit.comparison import assert_close, on_each
from tests.kit.training import QUIET, Regressor, make_trainer, regression_data

pytestmark = [
    *(pytest.mark.filterwarnings(line) for line in QUIET),
    pytest.mark.filterwarnings("ignore:The variance of predictions"),
    pytest.mark.filterwarnings("ignore:Metric `SpearmanCorrcoef`"),
    pytest.mark.filterwarnings("ignore:The ``compute`` method of metric"),
]


class _MeanState(Metric):
    """Holds what the last update was given, averaged: no sum of parts."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("value", torch.zeros(()), dist_reduce_fx="mean")

    def update(self, prediction: Tensor, target: Tensor) -> None:
        self.value = (prediction - target).square().mean()

    def compute(self) -> Tensor:
        return torch.as_tensor(self.value)


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


class _Classified(_Measured):
    def arguments(self, prediction: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        return (prediction.flatten() > 0.1).int(), (target.flatten() > 0).int()


class _Numbers(_Measured):
    """Gives the metric the loss: a number without samples."""

    def arguments(self, prediction: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        return (functional.mse_loss(prediction, target).detach(),)


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


def _of_classes() -> MetricCollection:
    kinds = {"f1": F1Score, "precision": Precision, "recall": Recall, "accuracy": Accuracy}
    return MetricCollection({name: kind(task="binary") for name, kind in kinds.items()})


def _with_one_that_cannot_be_merged() -> MetricCollection:
    return MetricCollection([PearsonCorrCoef(), MeanSquaredError(), R2Score()], prefix="all_")


def _tracker() -> MetricTracker:
    tracker = MetricTracker(MeanSquaredError(), maximize=False)
    tracker.increment()
    return tracker


METRICS: dict[str, tuple[type[_Measured], Callable[[], nn.Module]]] = {
    "sums": (_Measured, MeanSquaredError),
    "running moments": (_Measured, PearsonCorrCoef),
    "all samples": (_Measured, SpearmanCorrCoef),
    "a state that is averaged": (_Measured, _MeanState),
    "wrapper": (_Measured, lambda: MinMaxMetric(MeanSquaredError())),
    "tracker": (_Measured, _tracker),
    "groups": (_Classified, _of_classes),
    "a mixed collection": (_Measured, _with_one_that_cannot_be_merged),
    "largest": (_Measured, lambda: MaxMetric(nan_strategy="ignore")),
    "numbers": (_Numbers, MeanMetric),
    "the last numbers": (_Numbers, lambda: RunningMean(window=3)),
}


class _OneArgument(_Measured):
    def arguments(self, prediction: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        return (prediction.flatten(),)


METRICS["largest"] = (_OneArgument, METRICS["largest"][1])


def _compare(folder: Path, make: Callable[[], Any], *, kinds: Any, tolerance: float) -> None:
    def values(trainer: Trainer, module: Any) -> Any:
        trainer.fit(module, regression_data(23), regression_data(9))
        (values,) = (c for c in trainer.callbacks if isinstance(c, _Values))  # type: ignore[attr-defined]
        return values.seen

    found = on_each(folder, make, values, kinds=kinds, callbacks=lambda: [_Values()], max_epochs=2)
    for outcome in found[1:]:
        assert_close(outcome.result, found[0].result, tolerance=tolerance)


@pytest.mark.parametrize("call", ["update", "forward"])
@pytest.mark.parametrize("name", METRICS)
def test_values_per_step_and_per_epoch(tmp_path: Path, name: str, call: str) -> None:
    kind, make = METRICS[name]
    kinds = [lambda: RoundPipeStrategy(num_microbatches=3)]
    if call == "forward" and name in ("sums", "wrapper", "tracker", "a mixed collection"):
        kinds += [
            lambda: EmulatedStrategy(num_microbatches=3),
            lambda: EmulatedStrategy(num_microbatches=1),
        ]
    _compare(tmp_path, lambda: kind(make(), call), kinds=kinds, tolerance=2e-4)


def test_calls_of_some_microbatches_only(tmp_path: Path) -> None:
    """As on one device, where the rows of the whole batch are asked for."""

    class Selected(_Measured):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            prediction = self(batch[0])
            rows = batch[0][:, 0] > 0.8
            if rows.any():
                self.metric.update(prediction[rows].flatten(), batch[1][rows].flatten())  # type: ignore[operator]
            return functional.mse_loss(prediction, batch[1])

    kinds = [lambda: RoundPipeStrategy(num_microbatches=4)]
    module = lambda: Selected(PearsonCorrCoef(), "update")  # noqa: E731
    _compare(tmp_path, module, kinds=kinds, tolerance=1e-4)


# Other uses --------------------------------------------------------------------------------------


class _Step(_Measured):
    """Does something with its metric in training_step."""

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
def test_any_use_is_as_on_one_device(tmp_path: Path, name: str) -> None:
    _compare(
        tmp_path,
        lambda: _Step(USES[name]),
        kinds=[lambda: RoundPipeStrategy(num_microbatches=3)],
        tolerance=1e-5,
    )


def test_steps_of_microbatches_use_no_metrics(tmp_path: Path) -> None:
    strategy = RoundPipeStrategy(num_microbatches=3, microbatching="step")
    trainer = make_trainer(tmp_path, strategy=strategy, max_epochs=1)
    with pytest.raises(ConfigurationError, match=r"metric 'metric'.*microbatching='blocks'"):
        trainer.fit(_Step(USES["compute"]), regression_data())


# Metrics on the wrong device ---------------------------------------------------------------------


def test_metric_without_values(tmp_path: Path) -> None:
    module = _Measured(MeanSquaredError().to("meta"), "update")
    with pytest.raises(ConfigurationError, match=r"'metric' is on the meta device.*host memory"):
        make_trainer(tmp_path, strategy="roundpipe").fit(module, regression_data())


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_metric_that_nobody_finds_on_a_device(tmp_path: Path, num_microbatches: int) -> None:
    module = _Step(lambda m, p, t: m.kept[0](p, t))
    strategy = EmulatedStrategy(num_microbatches=num_microbatches)
    with pytest.raises(ConfigurationError, match=r"met tensors of another device.*Leave"):
        make_trainer(tmp_path, strategy=strategy).fit(module, regression_data())


def test_metric_that_nobody_finds_in_validation_on_a_device(tmp_path: Path) -> None:
    class Validating(_Step):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.kept[0](self(batch[0]), batch[1])

    module = Validating(lambda *_: None)
    with pytest.raises(ConfigurationError, match=r"another device.*Leave \.to\(device\)"):
        make_trainer(tmp_path, strategy=EmulatedStrategy()).validate(module, regression_data())
