import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roundpipe_lightning.precision import SUPPORTED_PRECISIONS, RoundPipePrecision
from roundpipe_lightning.testing import EmulatedStrategy
from tests.kit.training import QUIET, Block, Regressor, make_trainer, regression_data

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]

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
def test_bytes_per_parameter(tmp_path: Path, name: str) -> None:
    precision, _, rounds = name.partition(", ")
    scaler = torch.amp.GradScaler(device="cpu", init_scale=2.0)  # so that no step is skipped
    plugin = RoundPipePrecision(
        precision,
        scaler=scaler if precision == "16-mixed" else None,
        stochastic_rounding=bool(rounds),
    )
    module = _Measured()
    trainer = make_trainer(
        tmp_path,
        strategy=EmulatedStrategy(num_microbatches=2, dry_run=False),
        plugins=[plugin],
        max_steps=2,
    )
    trainer.fit(module, regression_data(16))
    seen = module.seen
    seen["host"] = seen["master"] + seen["gradient"] + seen["optimizer"]
    assert seen == _documented()[name]


def test_the_table_has_every_precision() -> None:
    assert set(_documented()) == {*SUPPORTED_PRECISIONS, ROUNDED}
