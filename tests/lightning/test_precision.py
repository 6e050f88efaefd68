import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch import Tensor, nn
from torch.nn import functional

from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.precision import SUPPORTED_PRECISIONS, RoundPipePrecision
from roundpipe_lightning.strategy.strategy import RoundPipeStrategy
from roundpipe_lightning.testing import EmulatedStrategy
from tests.kit.comparison import Outcome, on_each
from tests.kit.training import Block, Regressor, make_trainer, regression_data, same_bits

pytestmark = pytest.mark.filterwarnings(
    "ignore:You passed .*precision='16-mixed'.*not supported on CPU"
)

FLAGS = [precision for precision in SUPPORTED_PRECISIONS if precision != "16-mixed"]
"""`16-mixed` on the CPU becomes `bf16-mixed` in Lightning's hands, so it is tested as a plugin."""

MASTERS = {"64-true": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}


class _Dtypes(Regressor):
    """Notes the dtypes that its code meets, and leaves autocast for a product."""

    def __init__(self) -> None:
        super().__init__()
        self.met: set[Any] = set()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        prediction = self(x)
        self.met.add((x.dtype, self.head.weight.dtype, prediction.dtype, torch.tensor(0.5).dtype))
        with torch.autocast("cpu", enabled=False):
            wide = prediction.float().unsqueeze(-1) @ torch.full((1, 3), 0.3, dtype=torch.float32)
            loss: Tensor = functional.mse_loss(prediction.float(), y.float()) + wide.square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


def _compare(precision: Any, **options: Any) -> list[Outcome]:
    """The dtypes that the code met agree; the parameters are for the caller to compare."""

    def fit(trainer: Trainer, module: Any) -> None:
        trainer.fit(module, regression_data(), regression_data(8))

    found = on_each(_Dtypes, fit, precision=precision, max_epochs=2, **options)
    assert found[1].module.met == found[0].module.met
    return found


@pytest.mark.parametrize("precision", FLAGS)
def test_one_microbatch_is_one_device_to_the_bit(precision: Any) -> None:
    options: dict[str, Any] = {"num_microbatches": 1, "devices": 1, "gradient_clip_val": 0.5}
    expected, found = _compare(precision, **options)
    assert same_bits(found.module, expected.module)
    assert found.metrics == expected.metrics
    assert isinstance(found.trainer.precision_plugin, RoundPipePrecision)
    assert found.trainer.precision == precision
    assert {p.dtype for p in found.module.parameters()} == {MASTERS.get(precision, torch.float32)}
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
def test_microbatches_change_only_rounding(precision: Any, tolerance: float) -> None:
    found = _compare(precision, num_microbatches=4)
    expected, weight = (one.module.layers[0].inner.weight.detach() for one in found)
    assert float((weight - expected).norm() / expected.norm()) < tolerance


class _Scales(Callback):
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
    """A module whose loss is too large for float16 gradients in the fourth batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = functional.mse_loss(self(batch[0]), batch[1])
        return loss * 1e8 if batch_idx == 3 else loss


def _plain_loop(
    module: _Overflowing, scaler: torch.amp.GradScaler, *, accumulate: int, num_epochs: int
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


@pytest.mark.parametrize(("num_microbatches", "tolerance"), [(1, 0.0), (4, 2e-3)])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_loss_scaling_is_that_of_a_plain_loop(
    accumulate: int, num_microbatches: int, tolerance: float
) -> None:
    """The same steps are skipped, and the scale shrinks and grows at the same batches."""

    def scaler() -> torch.amp.GradScaler:
        return torch.amp.GradScaler(device="cpu", init_scale=2.0**12, growth_interval=2)

    torch.manual_seed(3)
    plain = _Overflowing()
    torch.manual_seed(3)
    module, seen = _Overflowing(), _Scales()
    scales, parameters = _plain_loop(plain, scaler(), accumulate=accumulate, num_epochs=2)
    trainer = make_trainer(
        strategy=RoundPipeStrategy(num_microbatches=num_microbatches),
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
        assert float((ours - expected).norm() / expected.norm()) <= tolerance


def test_lightning_says_that_it_replaces_float16_on_the_cpu() -> None:
    with pytest.warns(UserWarning, match="AMP with fp16 is not supported on CPU"):
        make_trainer(strategy="roundpipe", precision="16-mixed")
    kept = make_trainer(strategy="roundpipe", plugins=[RoundPipePrecision("16-mixed")])
    assert kept.precision == "16-mixed"


def test_scaler_given_with_lightnings_plugin_keeps_its_settings() -> None:
    scaler = torch.amp.GradScaler(device="cpu", init_scale=64.0, growth_interval=7)
    trainer = make_trainer(
        strategy="roundpipe", plugins=[MixedPrecision("16-mixed", "cpu", scaler)]
    )
    plugin = trainer.precision_plugin
    assert isinstance(plugin, RoundPipePrecision)
    assert plugin.loss_scale == 64.0
    assert plugin.scaler is not None
    assert plugin.scaler.get_growth_interval() == 7


def test_what_cannot_work_is_refused() -> None:
    class Foreign(Precision):
        pass

    with pytest.raises(ConfigurationError, match=r"precision='8-true' .* 32-true, 64-true"):
        RoundPipePrecision("8-true")
    with pytest.raises(ConfigurationError, match=r"precision='bf16-mixed' needs no loss scaling"):
        RoundPipePrecision("bf16-mixed", scaler=torch.amp.GradScaler(device="cpu"))
    with pytest.raises(ConfigurationError, match="The precision plugin Foreign does not work"):
        make_trainer(strategy="roundpipe", plugins=[Foreign()])


def test_clipping_with_an_optimizer_that_unscales_itself_is_refused() -> None:
    class Fused(Regressor):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01, fused=True)

    trainer = make_trainer(
        strategy="roundpipe", plugins=[RoundPipePrecision("16-mixed")], gradient_clip_val=0.5
    )
    with pytest.raises(ConfigurationError, match=r"gradient_clip_val=0.5 .* fused=False"):
        trainer.fit(Fused(), regression_data())


DOCUMENT = Path(__file__).resolve().parent.parent.parent / "docs" / "precision.md"
ROUNDED = "bf16-true, stochastic rounding"
NUMBERS = ("master", "gradient", "optimizer", "host", "device weights", "device gradients")


def _documented() -> dict[str, dict[str, float]]:
    table = DOCUMENT.read_text(encoding="utf-8").partition("## Bytes per parameter")[2]
    rows = re.findall(r"^\| (`[^|]+) \| (\d.*) \|$", table, flags=re.MULTILINE)
    return {
        name.replace("`", ""): dict(zip(NUMBERS, map(float, cells.split(" | ")), strict=True))
        for name, cells in rows
    }


def _share(tensors: list[Tensor], parameters: list[Tensor]) -> float:
    return sum(t.nbytes for t in tensors) / sum(p.numel() for p in parameters)


class _Watching(Block):
    """Notes what its parameters and their gradients take on the worker."""

    def __init__(self, seen: dict[str, float]) -> None:
        super().__init__()
        self.seen = [seen]

    def forward(self, x: Tensor) -> Tensor:
        (seen,) = self.seen
        weights: list[Tensor] = list(self.parameters())
        seen["device weights"] = _share(weights, weights)
        if torch.is_grad_enabled():
            for weight in weights:
                weight.register_post_accumulate_grad_hook(partial(_note_gradient, seen=seen))
        return super().forward(x)


def _note_gradient(weight: Tensor, seen: dict[str, float]) -> None:
    assert weight.grad is not None
    seen["device gradients"] = _share([weight.grad], [weight])


class _Measured(Regressor):
    """Notes what its tensors take on the host when the optimizer is about to step."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, float] = {}
        self.layers = nn.ModuleList(_Watching(self.seen) for _ in range(3))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        masters: list[Tensor] = list(self.parameters())
        self.seen["master"] = _share(masters, masters)
        self.seen["gradient"] = _share([m.grad for m in masters if m.grad is not None], masters)
        states = [t for state in optimizer.state.values() for t in state.values() if t.dim()]
        self.seen["optimizer"] = _share(states, masters)  # of the step before


@pytest.mark.parametrize("name", [*SUPPORTED_PRECISIONS, ROUNDED])
def test_bytes_per_parameter(name: str) -> None:
    precision, _, rounds = name.partition(", ")
    scaler = torch.amp.GradScaler(device="cpu", init_scale=2.0)  # so that no step is skipped
    plugin = RoundPipePrecision(
        precision,
        scaler=scaler if precision == "16-mixed" else None,
        stochastic_rounding=bool(rounds),
    )
    module = _Measured()
    trainer = make_trainer(
        strategy=EmulatedStrategy(num_microbatches=2, dry_run=False, upload_dtype=None),
        plugins=[plugin],
        max_steps=2,
    )
    trainer.fit(module, regression_data(16))
    seen = module.seen
    seen["host"] = seen["master"] + seen["gradient"] + seen["optimizer"]
    assert seen == _documented()[name]


def test_the_table_has_every_precision() -> None:
    assert set(_documented()) == {*SUPPORTED_PRECISIONS, ROUNDED}
