from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader, TensorDataset

from roundpipe_lightning.engine.capture.compiled import BlockCompiler
from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.planning.schedule.stages import RecomputePolicy
from roundpipe_lightning.planning.search.fit import FitAnswer, TrainingJob, fit_training
from roundpipe_lightning.strategy.planning import planner as planning
from roundpipe_lightning.strategy.strategy import RoundPipeStrategy
from tests.kit.training import make_trainer, parameter_error, same_bits, train_alike

WIDTH, HEADS = 8, 2


class Attention(nn.Module):
    def __init__(self, drop: float) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.project(x).unflatten(-1, (3, HEADS, WIDTH // HEADS))
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        dropped: Tensor = self.drop(y.transpose(1, 2).flatten(2))
        return x + dropped


class Attending(LightningModule):
    def __init__(self, drop: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Attention(drop) for _ in range(4))

    def training_step(self, batch: list[Tensor]) -> Tensor:
        (x,) = batch
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def trained(
    folder: Path,
    recompute: str,
    *,
    compile: bool = False,  # noqa: A002 - the strategy's word
    drop: float = 0.1,
) -> tuple[Attending, RoundPipeStrategy]:
    strategy = RoundPipeStrategy(
        num_microbatches=2,
        recompute=recompute,
        compile=compile,
        hints=None if recompute == "none" else {"forward": [2, 1], "backward": [1, 2, 1]},
    )
    torch.manual_seed(1)
    data = DataLoader(TensorDataset(torch.randn(16, 5, WIDTH)), batch_size=4)
    module = Attending(drop)
    trainer = make_trainer(folder, strategy=strategy, devices=2, max_epochs=2)
    trainer.fit(module, data)
    return module, strategy


@pytest.mark.parametrize("policy", ["selective", "none"])
def test_every_policy_trains_as_full_does(tmp_path: Path, policy: str) -> None:
    full, _ = trained(tmp_path / "full", "full")
    module, strategy = trained(tmp_path / policy, policy)
    assert strategy.last_step is not None
    assert strategy.last_step.plan.recompute is RecomputePolicy(policy)
    assert same_bits(full, module)


@pytest.mark.parametrize(("rows", "policy"), [(1, "none"), (80, "full")])
def test_one_cpu_worker_recomputes_what_is_larger_than_the_weights(rows: int, policy: str) -> None:
    data = DataLoader(TensorDataset(torch.randn(2 * rows, 1, WIDTH)), batch_size=rows)
    strategy = RoundPipeStrategy(num_microbatches=1, replan=False)
    flags: Any = {"data": data, "devices": 1, "max_epochs": 1}
    train_alike(lambda: Attending(0.0), strategy, tolerance=0.0, **flags)
    assert strategy.last_step is not None
    assert strategy.last_step.plan.recompute is RecomputePolicy(policy)


class Sloped(Attending):
    def training_step(self, batch: list[Tensor]) -> Tensor:
        x = batch[0].clone().requires_grad_()
        output = super().training_step([x])
        (slope,) = torch.autograd.grad(output, x, create_graph=True)
        return output + slope.square().sum()


def test_gradients_of_gradients_where_blocks_are_not_recomputed() -> None:
    """With products and sums of its own: PyTorch's fused attention has no second derivative."""
    strategy = RoundPipeStrategy(num_microbatches=1, recompute="none")
    data = DataLoader(TensorDataset(torch.randn(8, 5, WIDTH)), batch_size=4)
    with sdpa_kernel(SDPBackend.MATH):
        train_alike(lambda: Sloped(0.0), strategy, data=data, max_epochs=2, tolerance=0.0)


def test_compiled_blocks_train_as_plain_ones_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With graphs as PyTorch's compiler makes them, without the code that needs a C++ compiler."""
    full, _ = trained(tmp_path / "full", "full")
    monkeypatch.setattr(BlockCompiler.__init__, "__defaults__", ("aot_eager",))
    module, strategy = trained(tmp_path / "compiled", "full", compile=True, drop=0.0)
    plain, _ = trained(tmp_path / "plain", "full", drop=0.0)
    assert strategy._seen is not None
    compiler = strategy._seen.compiler
    assert compiler is not None
    assert len(compiler._kinds) == 1
    assert not compiler.left_as_they_are
    assert parameter_error(module, plain) < 1e-5
    assert not same_bits(plain, full)


@pytest.mark.parametrize("compiles", [False, True])
def test_only_blocks_that_are_not_compiled_may_keep_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiles: bool
) -> None:
    asked: list[tuple[RecomputePolicy, ...]] = []

    def planned(job: TrainingJob) -> FitAnswer:
        asked.append(job.hints.recompute or tuple(RecomputePolicy))
        return fit_training(job)

    monkeypatch.setattr(planning, "fit_training", planned)
    monkeypatch.setattr(BlockCompiler.__init__, "__defaults__", ("eager",))
    trained(tmp_path, "auto", compile=compiles)
    assert asked
    assert all((RecomputePolicy.SELECTIVE in policies) != compiles for policies in asked)


def test_compiling_with_a_selective_recompute_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="compile=True with recompute='selective'"):
        RoundPipeStrategy(compile=True, recompute="selective")
