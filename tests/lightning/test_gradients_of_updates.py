"""What is done to gradients before a step: clipped, scaled, refused; in overlapped steps, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule

from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.precision import RoundPipePrecision
from roundpipe_lightning.strategy.strategy import RoundPipeStrategy
from roundpipe_lightning.testing import EmulatedStrategy
from tests.kit.training import QUIET, make_trainer, regression_data, same_bits, train_with
from tests.lightning.test_updates import Grouped, Overlapping, PlainLoop

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]


def fit(folder: Path, strategy: Any, module: LightningModule, **flags: Any) -> LightningModule:
    trainer = make_trainer(folder, strategy=strategy, **{"max_epochs": 2, **flags})
    trainer.fit(module, regression_data(29, shuffle=True), regression_data(9))
    return module


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize(("algorithm", "limit"), [("norm", 0.05), ("value", 0.01)])
def test_clipping_is_that_of_one_device(
    tmp_path: Path, algorithm: str, limit: float, window: int
) -> None:
    kinds = (PlainLoop(2), Overlapping(num_microbatches=2), EmulatedStrategy(num_microbatches=2))
    runs = train_with(
        tmp_path,
        kinds,
        Grouped,
        regression_data(29, shuffle=True),
        gradient_clip_val=limit,
        gradient_clip_algorithm=algorithm,
        accumulate_grad_batches=window,
        max_epochs=2,
    )
    assert all(same_bits(module, runs[0][0]) for module, _ in runs)


class Scales(Grouped):
    """Notes the loss scale after every batch, and overflows with the largest one."""

    def __init__(self) -> None:
        super().__init__()
        self.scales: list[float] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        plugin: Any = self.trainer.precision_plugin
        self.scales.append(plugin.loss_scale)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # the first is skipped
@pytest.mark.parametrize("update", ["exact", "async"])
@pytest.mark.parametrize("strategy", [Overlapping, EmulatedStrategy])
def test_steps_whose_gradients_overflow_are_skipped(
    tmp_path: Path, strategy: Any, update: str
) -> None:
    modules: list[Any] = []
    for kind in (RoundPipeStrategy, strategy):
        torch.manual_seed(3)
        scaler = torch.amp.GradScaler(device="cpu", init_scale=2.0**24, growth_interval=3)
        module = fit(
            tmp_path,
            kind(num_microbatches=2, update=update, dry_run=False),
            Scales(),
            devices=2,
            max_epochs=4,
            plugins=[RoundPipePrecision("16-mixed", scaler=scaler)],
            gradient_clip_val=0.5,
        )
        modules.append(module)
    one, other = modules
    assert one.scales == other.scales
    fallen = [after < before for before, after in zip(one.scales, one.scales[1:], strict=False)]
    assert any(fallen), "a step is skipped"
    assert not all(fallen), "one is made"
    assert same_bits(one, other)


def test_an_optimizer_that_steps_on_accelerators_only(tmp_path: Path) -> None:
    class Captured(Grouped):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), capturable=True)

    with pytest.raises(ConfigurationError, match=r"AdamW\(capturable=True\) .* Leave capturable"):
        fit(tmp_path, RoundPipeStrategy(num_microbatches=1), Captured())
