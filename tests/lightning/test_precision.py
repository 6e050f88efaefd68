"""Every precision does what Lightning's own plugin does on one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch import Tensor
from torch.nn import functional

from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.precision import SUPPORTED_PRECISIONS, RoundPipePrecision
from roundpipe_lightning.strategy.strategy import RoundPipeStrategy
from tests.kit.training import (
    QUIET,
    Regressor,
    make_trainer,
    regression_data,
    same_bits,
)

pytestmark = [
    *(pytest.mark.filterwarnings(line) for line in QUIET),
    pytest.mark.filterwarnings("ignore:You passed .*precision='16-mixed'.*not supported on CPU"),
]

FLAGS = [precision for precision in SUPPORTED_PRECISIONS if precision != "16-mixed"]
"""`16-mixed` on the CPU becomes `bf16-mixed` in Lightning's hands, so it is tested as a plugin."""

MASTERS = {"64-true": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}


class _Dtypes(Regressor):
    """Notes the dtypes that its code meets."""

    def __init__(self) -> None:
        super().__init__()
        self.met: set[Any] = set()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        prediction = self(x)
        self.met.add((x.dtype, self.head.weight.dtype, prediction.dtype, torch.tensor(0.5).dtype))
        loss = functional.mse_loss(prediction.float(), y.float())
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


@pytest.mark.parametrize("precision", FLAGS)
def test_one_microbatch_is_one_device_to_the_bit(tmp_path: Path, precision: Any) -> None:
    runs = []
    for strategy in ("auto", RoundPipeStrategy(num_microbatches=1)):
        torch.manual_seed(3)
        module = _Dtypes()
        trainer = make_trainer(
            tmp_path, strategy=strategy, precision=precision, max_epochs=2, gradient_clip_val=0.5
        )
        trainer.fit(module, regression_data(), regression_data(8))
        runs.append((module, trainer.callback_metrics))
    (expected, metrics), (module, ours) = runs
    assert same_bits(module, expected)
    assert module.met == expected.met
    assert {p.dtype for p in module.parameters()} == {MASTERS.get(precision, torch.float32)}
    assert {k: float(v) for k, v in ours.items()} == {k: float(v) for k, v in metrics.items()}
    assert torch.get_default_dtype() is torch.float32


@pytest.mark.parametrize(
    ("precision", "tolerance"),
    [
        ("32-true", 1e-5),
        ("64-true", 1e-12),
        ("bf16-mixed", 5e-2),
        ("bf16-true", 2e-1),
        ("16-true", 5e-2),
    ],
)
def test_microbatches_change_only_rounding(
    tmp_path: Path, precision: Any, tolerance: float
) -> None:
    modules = []
    for strategy in ("auto", RoundPipeStrategy(num_microbatches=4)):
        torch.manual_seed(3)
        module = _Dtypes()
        devices = 1 if strategy == "auto" else 2
        trainer = make_trainer(
            tmp_path, strategy=strategy, devices=devices, precision=precision, max_epochs=2
        )
        trainer.fit(module, regression_data())
        modules.append(module)
    assert modules[1].met == modules[0].met
    weights = [module.get_parameter("layers.0.inner.weight").detach() for module in modules]
    assert float((weights[1] - weights[0]).norm() / weights[0].norm()) < tolerance


class _Scales(Callback):
    """Keeps the loss scale and the parameters after every batch."""

    def __init__(self) -> None:
        self.scales: list[float] = []
        self.parameters: list[Tensor] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        plugin = trainer.precision_plugin
        assert isinstance(plugin, (RoundPipePrecision, MixedPrecision))
        assert plugin.scaler is not None
        self.scales.append(plugin.scaler.get_scale())
        flat = torch.cat([p.detach().flatten() for p in pl_module.parameters()])
        self.parameters.append(flat)


class _Overflowing(Regressor):
    """Its loss is too large for float16 gradients in the fourth batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)
        return loss * 1e8 if batch_idx == 3 else loss


@pytest.mark.parametrize("accumulate", [1, 2])
def test_loss_scaling_skips_the_steps_that_lightnings_plugin_skips(
    tmp_path: Path, accumulate: int
) -> None:
    runs: list[_Scales] = []
    for ours in (False, True):
        scaler = torch.amp.GradScaler(device="cpu", init_scale=2.0**10, growth_interval=3)
        torch.manual_seed(3)
        seen = _Scales()
        plugin: Precision = MixedPrecision("16-mixed", "cpu", scaler)
        strategy: Any = "auto"
        if ours:
            plugin = RoundPipePrecision("16-mixed", scaler=scaler)
            strategy = RoundPipeStrategy(num_microbatches=4)
        trainer = make_trainer(
            tmp_path,
            strategy=strategy,
            plugins=[plugin],
            callbacks=[seen],
            max_epochs=2,
            accumulate_grad_batches=accumulate,
            gradient_clip_val=0.5,
        )
        trainer.fit(_Overflowing(), regression_data(48))
        runs.append(seen)
    one, many = runs
    assert many.scales == one.scales
    assert len(set(one.scales)) > 1
    for expected, parameters in zip(one.parameters, many.parameters, strict=True):
        assert float((parameters - expected).norm() / expected.norm()) < 2e-3
    skipped = [
        [
            index
            for index in range(1, 12)
            if torch.equal(run.parameters[index], run.parameters[index - 1])
        ]
        for run in runs
    ]
    assert skipped[1] == skipped[0]
    assert 3 in skipped[0]


class _ByHand(Regressor):
    """Overflows in its third batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = functional.mse_loss(self(x), y)
        return loss * 1e8 if batch_idx == 2 else loss


def _plain_loop(
    module: _ByHand, scaler: torch.amp.GradScaler, *, accumulate: int, num_epochs: int
) -> tuple[list[float], list[Tensor]]:
    """PyTorch's own recipe for float16, on the CPU."""
    scales, parameters = [], []
    optimizer = module.configure_optimizers()
    for _ in range(num_epochs):
        for index, batch in enumerate(regression_data(48)):
            with torch.autocast("cpu", dtype=torch.float16, cache_enabled=False):
                loss = module.training_step(batch, index)
            if index % accumulate == 0:
                optimizer.zero_grad()
            scaler.scale(loss / accumulate).backward()
            if index % accumulate == accumulate - 1:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
                scaler.step(optimizer)
                scaler.update()
            scales.append(scaler.get_scale())
            parameters.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
    return scales, parameters


@pytest.mark.parametrize("accumulate", [1, 2])
def test_loss_scaling_is_a_plain_loop_with_a_scaler_to_the_bit(
    tmp_path: Path, accumulate: int
) -> None:
    def scaler() -> torch.amp.GradScaler:
        return torch.amp.GradScaler(device="cpu", init_scale=2.0**12, growth_interval=2)

    torch.manual_seed(3)
    plain = _ByHand()
    torch.manual_seed(3)
    module, seen = _ByHand(), _Scales()
    scales, parameters = _plain_loop(plain, scaler(), accumulate=accumulate, num_epochs=2)
    trainer = make_trainer(
        tmp_path,
        strategy=RoundPipeStrategy(num_microbatches=1),
        plugins=[RoundPipePrecision("16-mixed", scaler=scaler())],
        callbacks=[seen],
        max_epochs=2,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=0.5,
    )
    trainer.fit(module, regression_data(48))
    assert seen.scales == scales
    assert len(set(scales)) > 1
    for ours, expected in zip(seen.parameters, parameters, strict=True):
        assert torch.equal(ours, expected)


def test_lightning_says_that_it_replaces_float16_on_the_cpu(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="AMP with fp16 is not supported on CPU"):
        make_trainer(tmp_path, strategy="roundpipe", precision="16-mixed")
    kept = make_trainer(tmp_path, strategy="roundpipe", plugins=[RoundPipePrecision("16-mixed")])
    assert kept.precision == "16-mixed"


def test_scaler_given_with_lightnings_plugin_keeps_its_settings(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler(device="cpu", init_scale=64.0, growth_interval=7)
    trainer = make_trainer(
        tmp_path, strategy="roundpipe", plugins=[MixedPrecision("16-mixed", "cpu", scaler)]
    )
    plugin = trainer.precision_plugin
    assert isinstance(plugin, RoundPipePrecision)
    assert plugin.loss_scale == 64.0
    assert plugin.scaler is not None
    assert plugin.scaler.get_growth_interval() == 7


@pytest.mark.parametrize("precision", FLAGS)
def test_the_flag_makes_our_plugin(tmp_path: Path, precision: Any) -> None:
    trainer = make_trainer(tmp_path, strategy="roundpipe", precision=precision)
    assert isinstance(trainer.precision_plugin, RoundPipePrecision)
    assert trainer.precision == precision
    assert trainer.strategy.precision_plugin is trainer.precision_plugin


def test_unknown_precision_names_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match=r"precision='8-true' .* 32-true, 64-true"):
        RoundPipePrecision("8-true")


def test_scaler_without_use_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"precision='bf16-mixed' needs no loss scaling"):
        RoundPipePrecision("bf16-mixed", scaler=torch.amp.GradScaler(device="cpu"))


def test_foreign_plugin_is_refused(tmp_path: Path) -> None:
    class Foreign(Precision):
        pass

    with pytest.raises(ConfigurationError, match="The precision plugin Foreign does not work"):
        make_trainer(tmp_path, strategy="roundpipe", plugins=[Foreign()])


def test_clipping_with_an_optimizer_that_unscales_itself_is_refused(tmp_path: Path) -> None:
    class Fused(Regressor):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01, fused=True)

    trainer = make_trainer(
        tmp_path,
        strategy="roundpipe",
        plugins=[RoundPipePrecision("16-mixed")],
        gradient_clip_val=0.5,
    )
    with pytest.raises(ConfigurationError, match=r"gradient_clip_val=0.5 .* fused=False"):
        trainer.fit(Fused(), regression_data())
