import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

from roundpipe_lightning import optim
from roundpipe_lightning.errors import ConfigurationError, OffloadError
from roundpipe_lightning.optim import HostAdamW, disk
from roundpipe_lightning.precision import RoundPipePrecision
from roundpipe_lightning.strategy.planning.inputs import storage_of
from roundpipe_lightning.strategy.strategy import RoundPipeStrategy
from roundpipe_lightning.testing import EmulatedStrategy
from tests.kit.training import ByHand, Regressor, make_trainer, regression_data, same_bits


class _Small(Regressor):
    """Trained by the optimizer that a function makes."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self._make = make

    def configure_optimizers(self) -> Any:
        optimizer = self._make(self.parameters())
        return {"optimizer": optimizer, "lr_scheduler": StepLR(optimizer, 1, gamma=0.5)}


def _train(make: Any, *, max_epochs: int = 3, seed: int = 3, **given: Any) -> Any:
    seed_everything(seed, verbose=False)
    module = _Small(make)
    trainer = make_trainer(
        strategy=RoundPipeStrategy(num_microbatches=2),
        devices=2,
        max_epochs=max_epochs,
        gradient_clip_val=0.5,
        accumulate_grad_batches=2,
    )
    trainer.fit(module, regression_data(), **given)
    return module, trainer


def _fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, fused=True)


@pytest.mark.suite("disk")
@pytest.mark.parametrize("offload", [None, "disk"])
def test_trains_as_torch_fused_to_the_bit(offload: str | None, tmp_path: Path) -> None:
    module, _ = _train(lambda p: optim.HostAdamW(p, lr=0.01, offload=offload, offload_dir=tmp_path))
    reference, _ = _train(_fused)
    assert same_bits(module, reference)


def test_a_disk_that_fills_up_in_the_middle_ends_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def fills_up(number: int, start: int, size: int) -> None:
        calls.append(size)
        if len(calls) > 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(disk, "_sync", fills_up)
    made: list[optim.HostAdamW] = []

    def make(parameters: Any) -> torch.optim.Optimizer:
        made.append(optim.HostAdamW(parameters, lr=0.01, offload="disk", offload_dir=tmp_path))
        return made[0]

    with pytest.raises(OffloadError, match=r"kept on disk.*No space left.*are free there"):
        _train(make)
    states = made[0].state_dict()["state"].values()
    assert all(state["exp_avg_sq"].isfinite().all() for state in states)  # can still be saved
    assert any(state["step"] > 1 for state in states)


@pytest.mark.suite("8bit")
@pytest.mark.parametrize("moments", ["fp32", "8bit"])
def test_resumes_to_the_bit(moments: str, tmp_path: Path) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return optim.HostAdamW(parameters, lr=0.01, moments=moments)

    whole, _ = _train(make)
    _, half = _train(make, max_epochs=1)
    half.save_checkpoint(tmp_path / "half.ckpt")
    resumed, _ = _train(make, seed=99, ckpt_path=str(tmp_path / "half.ckpt"))
    assert same_bits(resumed, whole)


def test_a_checkpoint_goes_on_with_torch_fused(tmp_path: Path) -> None:
    whole, _ = _train(_fused)
    _, half = _train(lambda p: optim.HostAdamW(p, lr=0.01), max_epochs=1)
    half.save_checkpoint(tmp_path / "half.ckpt")
    resumed, _ = _train(_fused, seed=99, ckpt_path=str(tmp_path / "half.ckpt"))
    assert same_bits(resumed, whole)


def _on_one_device(make: Any, **given: Any) -> Any:
    seed_everything(99, verbose=False)
    module = _Small(make)
    trainer = make_trainer(devices=1, max_epochs=2)
    trainer.fit(module, regression_data(), **given)
    return module, trainer


@pytest.mark.suite("fp32-disk", "bf16-None", "8bit-disk")
@pytest.mark.parametrize("offload", [None, "disk"])
@pytest.mark.parametrize("moments", ["fp32", "bf16", "8bit"])
def test_checkpoints_go_to_lightnings_one_device_and_back(
    moments: str, offload: str | None, tmp_path: Path
) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return optim.HostAdamW(
            parameters, lr=0.01, moments=moments, offload=offload, offload_dir=tmp_path
        )

    _, half = _train(make, max_epochs=1)
    half.save_checkpoint(tmp_path / "half.ckpt")
    saved = torch.load(tmp_path / "half.ckpt", weights_only=True)["optimizer_states"][0]
    wide = {"exp_avg", "exp_avg_sq", "step"}
    assert all(wide <= state.keys() for state in saved["state"].values())
    reference = _on_one_device(_fused, ckpt_path=str(tmp_path / "half.ckpt"))[1]
    assert reference.current_epoch == 2
    steps = {int(s["step"]) for s in reference.optimizers[0].state_dict()["state"].values()}
    assert steps == {2 + 4}  # one epoch of windows of two batches, one of single batches
    reference.save_checkpoint(tmp_path / "whole.ckpt")
    module, trainer = _train(make, ckpt_path=str(tmp_path / "whole.ckpt"))
    assert trainer.current_epoch == 3
    assert all(p.isfinite().all() for p in module.parameters())


@pytest.mark.parametrize(("moments", "expected"), [("fp32", 8), ("bf16", 4), ("8bit", 2 + 8 / 256)])
def test_the_plan_counts_the_state(moments: str, expected: float, tmp_path: Path) -> None:
    module = Regressor()
    module.head.requires_grad_(requires_grad=False)
    kept = optim.HostAdamW(module.parameters(), moments=moments)
    assert storage_of([kept]).optimizer_bytes == expected
    away = optim.HostAdamW(
        module.parameters(), moments=moments, offload="disk", offload_dir=tmp_path
    )
    storage = storage_of([away])
    assert (storage.optimizer_bytes, storage.disk_bytes) == (0, expected)


def test_its_threads_end_with_the_training() -> None:
    _, trainer = _train(lambda p: optim.HostAdamW(p, lr=0.01), max_epochs=1)
    assert trainer.optimizers  # still there, with its state
    assert not [t for t in threading.enumerate() if t.name.startswith("roundpipe-optimizer")]


# Stochastic rounding ------------------------------------------------------------------------------


class _SmallSteps(Regressor):
    """Steps too small for bfloat16."""

    learning_rate = 1e-5

    def __init__(self) -> None:
        super().__init__("adamw")

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate, weight_decay=0.0)


def _train_rounded(
    *,
    rounds: bool = True,
    seed: int = 3,
    make: Callable[[], Any] = _SmallSteps,
    kind: Any = RoundPipeStrategy,
    ckpt_path: Path | None = None,
    **flags: Any,
) -> Any:
    seed_everything(seed, verbose=False)
    module = make()
    strategy = kind(
        num_microbatches=2 if module.automatic_optimization else 1, stochastic_rounding=rounds
    )
    options = {"devices": 2, "precision": "bf16-true", "max_epochs": 4, **flags}
    trainer = make_trainer(strategy=strategy, **options)
    trainer.fit(module, regression_data(), ckpt_path=ckpt_path)
    return module, trainer


def _start() -> Regressor:
    seed_everything(3, verbose=False)
    return _SmallSteps().to(torch.bfloat16)


def test_moves_by_the_right_amount_on_average() -> None:
    stuck, _ = _train_rounded(rounds=False)
    module, trainer = _train_rounded()
    start, exact = _start(), _SmallSteps()
    exact.load_state_dict(start.state_dict())
    strategy = RoundPipeStrategy(num_microbatches=2)
    reference = make_trainer(strategy=strategy, devices=2, max_epochs=4)
    reference.fit(exact, regression_data())

    def moved(module: nn.Module) -> Tensor:
        weights = [p.detach().double() for p in module.parameters() if p.dim() > 1]
        origins = [p.detach().double() for p in start.parameters() if p.dim() > 1]
        return torch.cat([(w - o).flatten() for w, o in zip(weights, origins, strict=True)])

    wanted = moved(exact)
    # AdamW moves each weight by at most about the learning rate per step: 16 steps of 1e-5. Two
    # bfloat16 numbers of the size of the weights are 5e-4 to 2e-3 apart.
    assert 5e-5 < wanted.abs().mean().item() < 1.6e-4

    def along(module: nn.Module) -> float:
        return float((moved(module) * wanted.sign()).sum() / wanted.abs().sum())

    assert along(module) == pytest.approx(1.0, abs=0.4)
    assert abs(along(stuck)) < 0.15
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    state = trainer.optimizers[0].state[module.head.weight]
    assert {value.dtype for value in state.values()} == {torch.float32}


def test_same_seed_same_bits_other_seed_others() -> None:
    first, second, other = (_train_rounded(seed=s, max_epochs=1)[0] for s in (3, 3, 4))
    assert same_bits(first, second)
    assert not same_bits(first, other)


@pytest.mark.parametrize("kind", [RoundPipeStrategy, EmulatedStrategy])
def test_resume_is_exact(tmp_path: Path, kind: Any) -> None:
    how = {"kind": kind}
    whole, _ = _train_rounded(max_epochs=2, **how)
    _, half = _train_rounded(max_epochs=1, **how)
    half.save_checkpoint(tmp_path / "half.ckpt")
    state = torch.load(tmp_path / "half.ckpt", weights_only=True)["RoundPipePrecision"]
    assert state == {"rounding_seed": 3, "num_steps": 4}
    path = tmp_path / "half.ckpt"
    resumed, trainer = _train_rounded(seed=99, max_epochs=2, ckpt_path=path, **how)
    assert trainer.global_step == 8
    assert same_bits(resumed, whole)


def test_checkpoint_of_a_training_without_it_is_taken_over(tmp_path: Path) -> None:
    _, plain = _train_rounded(rounds=False, max_epochs=1)
    plain.save_checkpoint(tmp_path / "plain.ckpt")
    module, trainer = _train_rounded(max_epochs=2, ckpt_path=tmp_path / "plain.ckpt")
    assert trainer.global_step == 8
    state = trainer.optimizers[0].state[module.head.weight]
    assert {value.dtype for value in state.values()} == {torch.float32}


def test_manual_optimization() -> None:
    class Manual(ByHand, _SmallSteps):
        """Does both."""

    runs = []
    for rounds in (False, True):
        module, trainer = _train_rounded(rounds=rounds, make=Manual, max_epochs=1)
        assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
        runs.append((module, trainer.optimizers[0].state[module.head.weight]["exp_avg"].dtype))
    assert [dtype for _, dtype in runs] == [torch.bfloat16, torch.float32]
    assert not same_bits(runs[0][0], runs[1][0])


class _Hooks(_SmallSteps):
    """Notes what its hooks see of the gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, Any]] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradient = self.head.weight.grad
        assert gradient is not None
        self.seen.append(("before step", gradient.dtype))

    def on_before_zero_grad(self, optimizer: Any) -> None:
        gradient = self.head.weight.grad
        self.seen.append(("before zero_grad", None if gradient is None else gradient.dtype))


def test_hooks_see_bfloat16() -> None:
    module, _ = _train_rounded(make=_Hooks, max_steps=2, gradient_clip_val=0.1)
    assert module.seen == [
        ("before zero_grad", None),
        ("before step", torch.bfloat16),
        ("before zero_grad", torch.bfloat16),
        ("before step", torch.bfloat16),
    ]


def test_memory_of_it_is_counted() -> None:
    parameters = [nn.Parameter(torch.zeros(8, 8, dtype=torch.bfloat16))]
    optimizers = [torch.optim.AdamW(parameters)]
    assert storage_of(optimizers).optimizer_bytes == 4.0
    # Two float32 moments, and for the step a float32 parameter and gradient.
    assert storage_of(optimizers, steps_in_float32=True).optimizer_bytes == 16.0


def test_an_optimizer_that_rounds_by_itself_is_left_to_it() -> None:
    class Hosted(_SmallSteps):
        def configure_optimizers(self) -> Any:
            return HostAdamW(self.parameters(), lr=1e-5, seed=7)

    modules = []
    for rounds in (False, True):
        module, trainer = _train_rounded(rounds=rounds, make=Hosted, max_epochs=1)
        modules.append(module)
        optimizers = trainer.optimizers
        assert storage_of(optimizers, steps_in_float32=rounds) == storage_of(optimizers)
    assert same_bits(*modules)


def test_another_precision_is_refused() -> None:
    strategy = RoundPipeStrategy(stochastic_rounding=True)
    with pytest.raises(
        ConfigurationError,
        match=r"stochastic_rounding=True with precision='16-true'.*precision='bf16-true'",
    ):
        make_trainer(strategy=strategy, precision="16-true")


def test_ways_to_ask_for_it() -> None:
    def rounds(trainer: Trainer) -> bool:
        plugin = trainer.precision_plugin
        assert isinstance(plugin, RoundPipePrecision)
        return plugin.stochastic_rounding

    plugin = RoundPipePrecision("bf16-true", stochastic_rounding=True)
    assert rounds(make_trainer(strategy="roundpipe", plugins=[plugin]))
    for given in (plugin, RoundPipePrecision("bf16-true")):
        strategy = RoundPipeStrategy(stochastic_rounding=True)
        assert rounds(make_trainer(strategy=strategy, plugins=[given]))
    assert not rounds(make_trainer(strategy="roundpipe", precision="bf16-true"))


def test_a_parameter_that_is_not_trained_is_no_obstacle() -> None:
    class Mixed(_SmallSteps):
        def configure_model(self) -> None:
            self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64), requires_grad=False)

    _, trainer = _train_rounded(make=Mixed, max_steps=1)
    assert trainer.global_step == 1
