import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, default_collate
from torchmetrics import MeanAbsoluteError, MeanSquaredError, MetricCollection
from torchmetrics.aggregation import CatMetric

from roundpipe_lightning.emulation.server import EmulatedServer
from roundpipe_lightning.emulation.tagged_tensor import tag_of
from roundpipe_lightning.strategy import logging as strategy_logging
from roundpipe_lightning.strategy.logging import weighted_mean
from roundpipe_lightning.strategy.strategy import RoundPipeStrategy
from roundpipe_lightning.testing import EmulatedStrategy
from tests.kit.training import ByHand, Regressor, make_trainer, regression_data, train_alike


class _Outputs(Callback):
    """Keeps what hooks are given and what is known of metrics after every batch."""

    def __init__(self) -> None:
        self.outputs: list[Any] = []
        self.metrics: list[dict[str, Tensor]] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any
    ) -> None:
        self.outputs.append(outputs)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.metrics.append({k: v.clone() for k, v in trainer.callback_metrics.items()})


class _Logging(Regressor):
    def __init__(self) -> None:
        super().__init__()
        self.mse = MeanSquaredError()
        self.seen = CatMetric()
        self.inner = nn.ModuleDict({"mae": MeanAbsoluteError()})
        self.collection = MetricCollection(
            {"mae": MeanAbsoluteError(), "mse": MeanSquaredError()}, prefix="all_"
        )
        self.val_mse = MeanSquaredError()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        prediction = self(x)
        loss = functional.mse_loss(prediction, y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("loss_with_size", loss, on_step=True, on_epoch=True, batch_size=len(x))
        self.log_dict({"a": loss * 2, "b": loss.item()}, on_epoch=True, prog_bar=True)
        self.log("summed_loss", loss, reduce_fx="sum", on_epoch=True)
        self.log("samples", float(len(x)), reduce_fx="sum", on_step=False, on_epoch=True)
        self.log("largest", prediction.max(), reduce_fx=torch.max, on_epoch=True)
        self.log("smallest", prediction.min(), reduce_fx="min", on_step=True)
        self.log("constant", 0.1)
        for value in (1.0, float(batch_idx)):
            self.log("twice", value, on_step=False, on_epoch=True)
        self.mse(prediction, y)
        self.log("mse", self.mse, on_step=True, on_epoch=True)
        self.seen.update(prediction.detach().flatten())
        mae = self.inner["mae"]
        assert isinstance(mae, MeanAbsoluteError)
        mae(prediction, y)
        self.log("mae", mae, on_step=False, on_epoch=True)
        self.collection(prediction, y)
        self.log_dict(self.collection, on_step=True, on_epoch=True)
        return {"loss": loss, "prediction": prediction.detach(), "name": "kept"}

    def on_train_epoch_end(self) -> None:
        self.log("seen_sum", self.seen.compute().sum())
        self.seen.reset()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        prediction = self(x)
        self.val_mse(prediction, y)
        self.val_mse.update(prediction, y)
        self.log("val_mse", self.val_mse)
        self.log("val_loss", functional.mse_loss(prediction, y))


@pytest.mark.parametrize(
    ("kind", "precision", "tolerance"),
    [
        (RoundPipeStrategy, "32-true", 1e-5),
        (EmulatedStrategy, "32-true", 1e-5),
        (EmulatedStrategy, "bf16-mixed", 5e-2),
    ],
)
def test_values_of_every_kind(tmp_path: Path, kind: Any, precision: Any, tolerance: float) -> None:
    runs: list[_Outputs] = []
    files = []
    for strategy, devices in (("auto", 1), (kind(num_microbatches=3), 2)):
        torch.manual_seed(3)
        module, seen, folder = _Logging(), _Outputs(), tmp_path / str(devices)
        trainer = make_trainer(
            folder,
            strategy=strategy,
            devices=devices,
            callbacks=[seen],
            max_epochs=3,
            precision=precision,
            logger=CSVLogger(folder, version=0, flush_logs_every_n_steps=1),
        )
        trainer.fit(module, regression_data(31), regression_data(9))
        predictions: Any = trainer.predict(module, regression_data(9))
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        metrics = [value for known in seen.metrics for value in known.values()]
        kept = [output["prediction"] for output in seen.outputs]
        assert {tag_of(x) for x in (*predictions, *gradients, *metrics, *kept)} == {None}
        runs.append(seen)
        files.append((folder / "lightning_logs/version_0/metrics.csv").read_text())
    one, many = runs
    assert len(many.metrics) == len(one.metrics) == 3
    near: Any = {"rtol": tolerance, "atol": tolerance}
    for expected, known in zip(one.metrics, many.metrics, strict=True):
        assert list(known) == list(expected)
        for key, value in expected.items():
            torch.testing.assert_close(known[key], value, **near)
    csv_rows = pytest.approx(_numbers(files[0]), rel=10 * tolerance, abs=tolerance)
    assert _numbers(files[1]) == csv_rows
    for expected, output in zip(one.outputs, many.outputs, strict=True):
        torch.testing.assert_close(output["loss"], expected["loss"], **near)
        torch.testing.assert_close(output["prediction"], expected["prediction"], **near)


def _numbers(file: str) -> dict[tuple[int, str], float]:
    rows = csv.DictReader(file.splitlines())
    return {(i, key): float(x) for i, row in enumerate(rows) for key, x in row.items() if x}


def test_what_was_logged_is_known_inside_the_step() -> None:
    seen: list[float] = []

    def log(module: Any, batch: Any, batch_idx: int) -> None:
        module.log("number", 3.0 + batch_idx)
        seen.append(float(module.trainer.callback_metrics["number"]))

    strategy = RoundPipeStrategy(num_microbatches=3, dry_run=False)
    trainer = make_trainer(strategy=strategy, max_steps=2)
    trainer.fit(Regressor(on_step=log), regression_data())
    assert seen[:1] == [3.0]
    assert seen[-1] == 4.0


class _Measures(Regressor):
    """Logs a value and, in whole batches, a metric twice; the last step asks what was logged."""

    def __init__(self, mode: str, seen: list[float]) -> None:
        super().__init__()
        self.mse = MeanSquaredError()
        self.names = ("first", "second") if mode == "blocks" else ()
        self.seen = seen

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        prediction = self(batch[0])
        loss = functional.mse_loss(prediction, batch[1])
        for name in self.names:
            self.mse(prediction * len(name), batch[1])
            self.log(name, self.mse, on_step=True, on_epoch=True)
        self.log("loss", loss, on_step=True, on_epoch=True)
        if batch_idx == 3 and self.names:
            known = self.trainer.callback_metrics
            self.seen += [float(known[name]) for name in ("first_step", "second_step", "loss")]
        return loss


@pytest.mark.parametrize("mode", ["blocks", "step"])
def test_what_is_logged_comes_by_copies_beside_the_backward_pass(
    monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """`cpu()` would wait for all that the device computes, the backward pass too."""
    waits: list[int] = []

    def counted(wait: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            waits[-1] += 1
            return wait(*args, **kwargs)

        return call

    class Counted(_Outputs):
        def on_train_batch_start(self, *_: Any) -> None:
            waits.append(0)

    def bring(metric: Any) -> None:
        leaves = tree_leaves(vars(metric))
        waits[-1] += any(isinstance(x, Tensor) and tag_of(x) is not None for x in leaves)
        bring_to_host(metric)

    bring_to_host = strategy_logging._bring_to_host
    monkeypatch.setattr(strategy_logging, "_bring_to_host", bring)
    runs: list[tuple[list[float], _Outputs]] = []
    with EmulatedServer(2) as server:
        for device in server.devices:
            monkeypatch.setattr(device, "download", counted(device.download))
        monkeypatch.setattr(server, "move", counted(server.move))
        ours = EmulatedStrategy(devices=server.devices, num_microbatches=2, microbatching=mode)
        for strategy in ("auto", ours):
            torch.manual_seed(3)
            runs.append(([], Counted()))
            seen, outputs = runs[-1]
            trainer = make_trainer(
                devices=2 if strategy is ours else 1,
                max_epochs=2,
                limit_train_batches=4,
                strategy=strategy,
                callbacks=[outputs],
            )
            trainer.fit(_Measures(mode, seen), regression_data())
    (expected, one), (found, many) = runs
    ours_waited = waits[-8:]  # the first step is checked
    assert not any(ours_waited[step] for step in (1, 2, 4, 5, 6))
    assert found == pytest.approx(expected, rel=1e-5)
    for wanted, known in zip(one.metrics, many.metrics, strict=True):
        assert list(known) == list(wanted)
        for key, value in wanted.items():
            torch.testing.assert_close(known[key], value, rtol=1e-5, atol=1e-6)


def test_a_function_of_the_loss_is_averaged_over_microbatches() -> None:
    """`loss.exp()` of the batch is not what is logged, but the mean of the microbatches' own."""
    seen: list[tuple[float, int]] = []

    class Perplexed(Regressor):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = functional.mse_loss(self(batch[0]), batch[1])
            seen.append((float(loss.detach()), len(batch[0])))
            self.log("perplexity", loss.exp())
            self.log("loss", loss, batch_size=1)  # weighs as it does in the batch's loss
            self.log("more", loss + 1, batch_size=1)
            return loss

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.log("of_the_batch", outputs["loss"].exp())

    strategy = RoundPipeStrategy(num_microbatches=3, microbatching="step", dry_run=False)
    trainer = make_trainer(strategy=strategy, max_steps=1)
    trainer.fit(Perplexed(), regression_data(8))
    assert len(seen) == 3
    losses, sizes = torch.tensor(seen, dtype=torch.float64).T
    shares, metrics = sizes / sizes.sum(), trainer.callback_metrics
    assert float(metrics["perplexity"]) == pytest.approx(float((losses.exp() * shares).sum()))
    assert float(metrics["loss"]) == pytest.approx(float((losses * shares).sum()))
    assert float(metrics["more"]) == pytest.approx(float(losses.mean()) + 1)
    assert float(metrics["of_the_batch"]) == pytest.approx(float((losses * shares).sum().exp()))
    assert metrics["perplexity"] - metrics["of_the_batch"] > 1e-3


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_batches_that_return_none_are_skipped() -> None:
    class Skipping(Regressor):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx % 2 else super().training_step(batch, batch_idx)

    train_alike(Skipping, RoundPipeStrategy(), devices=1, max_epochs=2, tolerance=1e-6)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ({"prediction": 1.0}, "the 'loss' key needs to be present"),
        (1.0, "must return a Tensor, a dict, or None"),
    ],
)
def test_output_without_loss_is_lightnings_own_error(output: Any, message: str) -> None:
    class Forgetful(Regressor):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return output

    for strategy in ("auto", RoundPipeStrategy()):
        with pytest.raises(MisconfigurationException, match=message):
            make_trainer(strategy=strategy).fit(Forgetful(), regression_data())


def test_wrong_arguments_of_log_are_lightnings_own_errors() -> None:
    def log_twice(module: Any, batch: Any, batch_idx: int) -> None:
        module.log("x", 1.0)
        module.log("x", 1.0, prog_bar=True)

    with pytest.raises(Exception, match="twice in `training_step` with different arguments"):
        make_trainer(strategy=RoundPipeStrategy()).fit(
            Regressor(on_step=log_twice), regression_data()
        )
    with pytest.raises(Exception, match="reduce_fx"):
        make_trainer(strategy=RoundPipeStrategy()).fit(
            Regressor(on_step=lambda m, *_: m.log("x", 1.0, reduce_fx="median")), regression_data()
        )


# Merging by itself -------------------------------------------------------------------------------


NAN, HALF = torch.tensor(float("nan")), torch.tensor([1.0, 2.0], dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("values", "weights", "expected"),
    [
        ([0.1, 0.1, 0.1], [0.2, 0.5, 0.3], 0.1),  # equal values give that value
        ([NAN, torch.tensor(2.0)], [0.0, 1.0], torch.tensor(2.0)),  # no weight, no say
        ([1.0, 2.0], [1, 3], 1.75),
        (list(HALF), [1, 3], torch.tensor(1.75)),  # at least float32
        (list(HALF.double()), [0, 0], torch.tensor(1.5, dtype=torch.float64)),
    ],
)
def test_weighted_means(values: list[Any], weights: list[float], expected: Any) -> None:
    found = weighted_mean(values, weights=weights)
    assert torch.equal(torch.as_tensor(found), torch.as_tensor(expected))
    assert getattr(found, "dtype", None) is getattr(expected, "dtype", None)


class _Takes(Regressor):
    """Takes what is no tensor, and a number that belongs to all samples, out of its batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        scale, texts = batch.pop("scale"), batch["more"].pop("texts")
        assert len(texts) == len(batch["x"])
        loss = functional.mse_loss(self(batch["x"]) * scale, batch["more"]["y"])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))


class _TakesByHand(ByHand, _Takes):
    """Does so and steps its optimizer itself."""


KINDS = (RoundPipeStrategy, EmulatedStrategy)


def _named(samples: list[Any]) -> dict[str, Any]:
    x, y = default_collate(samples)
    texts = [f"sample {index}" for index in range(len(x))]
    return {"scale": torch.tensor(1.5), "x": x, "more": {"texts": texts, "y": y}}


class _Keeps(Callback):
    def __init__(self) -> None:
        self.kept: list[Any] = []

    def on_train_batch_end(
        self, trainer: Trainer, module: Any, outputs: Any, batch: Any, *_: Any
    ) -> None:
        self.kept.append(batch)


@pytest.mark.parametrize("make", [_Takes, _TakesByHand])
def test_what_a_step_takes_out_is_not_looked_at(make: Callable[[], Regressor]) -> None:
    """Lightning warns of batches whose entries disagree about their size; here are none left."""
    runs = []
    count = 3 if make is _Takes else 1
    strategies: list[Any] = ["auto", *(k(num_microbatches=count) for k in KINDS)]
    for strategy in strategies:
        torch.manual_seed(3)
        keeps = _Keeps()
        trainer = make_trainer(strategy=strategy, max_epochs=1, callbacks=[keeps])
        data: Any = regression_data(20).dataset
        trainer.fit(
            make(),
            DataLoader(data, batch_size=8, collate_fn=_named),
            DataLoader(data, batch_size=7, collate_fn=_named),
        )
        runs.append({key: float(value) for key, value in trainer.callback_metrics.items()})
        if count > 1 and strategy != "auto":
            assert [list(batch) for batch in keeps.kept] == [["scale", "x", "more"]] * 3
    for metrics in runs[1:]:
        assert metrics == pytest.approx(runs[0], rel=1e-5)
