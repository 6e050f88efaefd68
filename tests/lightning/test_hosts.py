"""Trainings on several hosts, which are processes here, against the same on one."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from roundpipe_lightning import RoundPipeStrategy
from tests.kit.hosts import run_on_hosts
from tests.kit.training import (
    LanguageModel,
    PaddedSequences,
    Regressor,
    make_trainer,
    regression_data,
)

GLOBAL_BATCH = 12
NUM_SAMPLES = 41  # the last batch is not full


@dataclass(frozen=True)
class Case:
    """A training.

    Attributes:
        optimizer: As of the modules; `"muon"` needs whole matrices.
        padded: Whether samples have different numbers of targets.
        dropout: Inside the blocks.
        flags: Of the Trainer.
        options: Of the strategy.
        num_microbatches: Of the global batch.
    """

    optimizer: str = "sgd"
    padded: bool = False
    dropout: float = 0.0
    flags: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    num_microbatches: int | None = None


class WithMuon(Regressor):
    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.layers.parameters() if p.dim() == 2]
        return torch.optim.Muon(matrices, lr=0.02)


def train(rank: int, num: int, folder: Path, case: Case) -> dict[str, Any]:
    """Train on one of `num` hosts; return what it has seen."""
    torch.manual_seed(3)
    size, module, validation = GLOBAL_BATCH // num, nn.Module(), None
    num_samples = NUM_SAMPLES if case.num_microbatches is None else 3 * GLOBAL_BATCH
    if case.padded:
        module = LanguageModel(case.optimizer)
        data = DataLoader(PaddedSequences(num_samples), batch_size=size, shuffle=True)
    else:
        kind = WithMuon if case.optimizer == "muon" else Regressor
        module = kind(case.optimizer, num_blocks=3, dropout=case.dropout)
        data = regression_data(num_samples, batch_size=size, shuffle=True)
        validation = regression_data(30, batch_size=size)
    options = dict(case.options)
    if case.num_microbatches is not None:
        options["num_microbatches"] = case.num_microbatches // num
    trainer = make_trainer(
        folder / f"host{rank}",
        strategy=RoundPipeStrategy(timeout_seconds=60, **options),
        num_nodes=num,
        **{"max_epochs": 2, **case.flags},
    )
    trainer.fit(module, data, validation)
    return {
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "parameters": [p.detach().clone() for p in module.parameters()],
        "steps": trainer.global_step,
    }


def train_all(rank: int, num: int, folder: Path, cases: dict[str, Case]) -> dict[str, Any]:
    return {name: train(rank, num, folder, case) for name, case in cases.items()}


def difference(one: list[Tensor], other: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


CASES = {
    "sgd": Case(),
    "sgd again": Case(),
    "adamw, clipped": Case("adamw", flags={"gradient_clip_val": 0.1}),
    "padded": Case(padded=True),
    "padded, step": Case(padded=True, options={"microbatching": "step"}, num_microbatches=6),
    "padded, blocks": Case(padded=True, options={"microbatching": "blocks"}, num_microbatches=6),
    "accumulated": Case(
        padded=True, flags={"accumulate_grad_batches": 3, "gradient_clip_val": 0.5}
    ),
    "values clipped": Case(flags={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "dropout": Case(dropout=0.3, options={"microbatching": "step"}, num_microbatches=6),
    "muon": Case("muon"),
}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return train_all(0, 1, tmp_path_factory.mktemp("one"), CASES)


@pytest.mark.parametrize("num", [2, 3])
def test_numbers_of_one_host(tmp_path: Path, num: int, expected: dict[str, Any]) -> None:
    for seen in run_on_hosts(num, train_all, num, tmp_path, CASES):
        if isinstance(seen, BaseException):
            raise seen
        for name, one in expected.items():
            assert seen[name]["steps"] == one["steps"], name
            assert difference(seen[name]["parameters"], one["parameters"]) < 1e-6, name
            assert seen[name]["metrics"] == pytest.approx(one["metrics"], rel=1e-5), name
        assert difference(seen["sgd"]["parameters"], seen["sgd again"]["parameters"]) == 0
