from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
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

from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.strategy.strategy import RoundPipeStrategy
from roundpipe_lightning.testing import EmulatedStrategy
from tests.kit.comparison import assert_close, on_each
from tests.kit.training import Regressor, make_trainer, regression_data

pytestmark = [
    pytest.mark.filterwarnings("ignore:The variance of predictions"),
    pytest.mark.filterwarnings("ignore:Metric `SpearmanCorrcoef`"),
    pytest.mark.filterwarnings("ignore:The ``compute`` method of metric"),
]


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


def _compare(folder: Path, make: Callable[[], Any], *, kinds: Any, tolerance: float) -> None:
    def values(trainer: Trainer, module: Any) -> Any:
        trainer.fit(module, regression_data(23), regression_data(9))
        (values,) = (c for c in trainer.callbacks if isinstance(c, _Values))  # type: ignore[attr-defined]
        return values.seen

    found = on_each(folder, make, values, kinds=kinds, callbacks=lambda: [_Values()], max_epochs=2)
    for outcome in found[1:]:
        assert_close(outcome.result, found[0].result, tolerance=tolerance)


@pytest.mark.parametrize(
    ("name", "call", "count"),
    [*((name, "forward", 3) for name in METRICS), ("sums", "forward", 1), ("sums", "update", 3)],
)
def test_values_per_step_and_per_epoch(tmp_path: Path, name: str, call: str, count: int) -> None:
    """Metrics are the module's own, and follow their arguments to a device and back."""
    kinds: list[Any] = [lambda: EmulatedStrategy(num_microbatches=count)]
    if name == "sums":
        kinds.append(lambda: RoundPipeStrategy(num_microbatches=count))
    _compare(tmp_path, lambda: _Measured(METRICS[name](), call), kinds=kinds, tolerance=2e-4)


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
