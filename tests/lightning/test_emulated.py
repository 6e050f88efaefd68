"""The Lightning face on workers whose tensors refuse to mix, as those of several GPUs do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanSquaredError, MetricCollection, PearsonCorrCoef, SpearmanCorrCoef
from torchmetrics.aggregation import CatMetric, MeanMetric
from torchmetrics.wrappers import MinMaxMetric

from roundpipe_lightning.emulation.server import EmulatedDevice
from roundpipe_lightning.emulation.tagged_tensor import tag_of
from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.strategy.strategy import RoundPipeStrategy
from roundpipe_lightning.testing import EmulatedStrategy, assert_trains_as_one_device
from tests.kit.training import (
    QUIET,
    Regressor,
    make_trainer,
    parameter_error,
    regression_data,
)
from tests.lightning.test_logging import _Logging, _Outputs

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_logs_metrics_outputs_and_parameters(tmp_path: Path, precision: Any) -> None:
    runs = []
    for strategy, devices in (("auto", 1), (EmulatedStrategy(num_microbatches=4), 3)):
        torch.manual_seed(3)
        seen = _Outputs()
        module = _Logging()
        trainer = make_trainer(
            tmp_path,
            strategy=strategy,
            devices=devices,
            callbacks=[seen],
            max_epochs=2,
            precision=precision,
        )
        trainer.fit(module, regression_data(), regression_data(9))
        trainer.test(module, regression_data(9), verbose=False)
        predictions = trainer.predict(module, regression_data(9))
        assert predictions is not None
        assert all(tag_of(torch.as_tensor(part)) is None for part in predictions)
        runs.append((module, seen))
    (expected, one), (module, many) = runs
    tolerance = 1e-5 if precision == "32-true" else 5e-2
    assert parameter_error(module.layers, expected.layers) < tolerance * 10
    for expected_metrics, metrics in zip(one.metrics, many.metrics, strict=True):
        assert list(metrics) == list(expected_metrics)
        for key, value in expected_metrics.items():
            assert tag_of(metrics[key]) is None
            torch.testing.assert_close(metrics[key], value, rtol=tolerance, atol=tolerance)
    for output in many.outputs:
        assert tag_of(output["prediction"]) is None
    for parameter in module.parameters():
        assert parameter.grad is None or tag_of(parameter.grad) is None


class _Measures(nn.Module):
    """Metrics of every kind."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.plain = nn.ModuleList([PearsonCorrCoef(), SpearmanCorrCoef(), MeanSquaredError()])
        self.collection = MetricCollection([PearsonCorrCoef(), MeanSquaredError()])
        self.wrapped = MinMaxMetric(MeanSquaredError())
        self.everything = CatMetric()
        self.number = MeanMetric()

    def update(self, module: Any, prediction: Tensor, target: Tensor) -> None:
        for metric in self.plain:
            assert isinstance(metric, (PearsonCorrCoef, SpearmanCorrCoef, MeanSquaredError))
            metric(prediction, target)
            name = f"{self.name}_{type(metric).__name__}"
            module.log(name, metric, on_step=False, on_epoch=True)
        self.collection.update(prediction, target)
        self.wrapped(prediction, target)
        self.everything.update(prediction)
        so_far = self.everything.compute().sum()
        module.log(f"{self.name}_so_far", so_far, on_epoch=True, on_step=False)
        self.number.update(len(target))
        module.log(f"{self.name}_number", self.number, on_step=False, on_epoch=True)

    def finish(self, module: Any) -> None:
        module.log_dict({f"{self.name}_c_{k}": v for k, v in self.collection.compute().items()})
        module.log_dict({f"{self.name}_w_{k}": v for k, v in self.wrapped.compute().items()})
        module.log(f"{self.name}_everything", self.everything.compute().sum())
        self.collection.reset()
        self.everything.reset()
        self.wrapped.reset()


class _Measuring(Regressor):
    """Uses metrics of every kind where nothing is split."""

    def __init__(self) -> None:
        super().__init__()
        self.training_measures = _Measures("train")
        self.validation_measures = _Measures("val")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        self.training_measures.update(self, self(x).flatten().detach(), y.flatten())
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.training_measures.finish(self)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.validation_measures.update(self, self(x).flatten(), y.flatten())

    def on_validation_epoch_end(self) -> None:
        self.validation_measures.finish(self)


@pytest.mark.filterwarnings(
    "ignore:The variance of predictions", "ignore:Metric `SpearmanCorrcoef`"
)
@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")
def test_metrics_of_every_kind_where_nothing_is_split(tmp_path: Path) -> None:
    runs: list[list[dict[str, Any]]] = []
    one_microbatch = [kind(num_microbatches=1) for kind in (RoundPipeStrategy, EmulatedStrategy)]
    for strategy in ("auto", *one_microbatch):
        torch.manual_seed(3)
        seen = _Outputs()
        devices = 1 if strategy == "auto" else 3
        trainer = make_trainer(
            tmp_path, strategy=strategy, devices=devices, callbacks=[seen], max_epochs=2
        )
        trainer.fit(_Measuring(), regression_data(), regression_data(27))
        runs.append(seen.metrics)
    for metrics in runs[1:]:
        for expected, values in zip(runs[0], metrics, strict=True):
            assert list(values) == list(expected)
            for key, value in expected.items():
                assert tag_of(values[key]) is None
                torch.testing.assert_close(values[key], value, msg=key)


def test_a_user_s_comparison_with_one_device() -> None:
    assert_trains_as_one_device(Regressor, regression_data, devices=3)

    class LooksAtTheBatchSize(Regressor):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * len(batch[0])

    with pytest.raises(AssertionError, match=r"item .*head\.bias"):
        assert_trains_as_one_device(LooksAtTheBatchSize, regression_data, max_epochs=1)


def test_devices_are_as_many_as_workers(tmp_path: Path) -> None:
    strategy = EmulatedStrategy(devices=[EmulatedDevice(0)])
    trainer = make_trainer(tmp_path, strategy=strategy, devices=2)
    with pytest.raises(ConfigurationError, match=r"1 devices .* 2 workers: give .*devices=1"):
        trainer.fit(Regressor(), regression_data())
