"""Hooks come in Lightning's order and number, and see what they see on one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from roundpipe_lightning.strategy.step import loss_with_gradients
from roundpipe_lightning.strategy.strategy import RoundPipeStrategy
from tests.kit.training import (
    QUIET,
    Regressor,
    make_trainer,
    parameter_error,
    regression_data,
)

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]

HOOKS = sorted(
    name
    for name in dir(Callback)
    if name.startswith("on_")
    and not name.startswith("on_predict")
    and callable(getattr(Callback, name))
)


def _recording_callback(calls: list[str]) -> Callback:
    """A callback that notes the names of all its hooks."""

    def note(name: str) -> Any:
        return lambda *_: calls.append(name)

    callback: Callback = type("Recording", (Callback,), {name: note(name) for name in HOOKS})()
    return callback


@pytest.mark.parametrize("accumulate", [1, 3])
def test_callback_hooks_in_order(tmp_path: Path, accumulate: int) -> None:
    runs = []
    for strategy in ("auto", RoundPipeStrategy(num_microbatches=4)):
        calls: list[str] = []
        trainer = make_trainer(
            tmp_path,
            strategy=strategy,
            callbacks=[_recording_callback(calls)],
            accumulate_grad_batches=accumulate,
            max_epochs=2,
        )
        trainer.fit(Regressor(), regression_data(), regression_data(8))
        runs.append(calls)
    assert runs[1] == runs[0]
    assert "on_after_backward" in runs[0]


class _Gradients(Regressor):
    """Notes gradients wherever a user may look at them, and changes some."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, Tensor]] = []
        self.head.weight.register_hook(lambda gradient: gradient * 2)
        self.head.bias.register_post_accumulate_grad_hook(self._accumulated)

    def _note(self, where: str) -> None:
        gradient = self.head.weight.grad
        self.seen.append((where, torch.zeros(1) if gradient is None else gradient.clone()))

    def _accumulated(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.seen.append(("accumulated", parameter.grad.clone()))

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        self._note("before zero_grad")

    def on_before_backward(self, loss: Tensor) -> None:
        self.seen.append(("before backward", loss.detach().clone().reshape(1)))

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (loss * 0.5).backward()

    def on_after_backward(self) -> None:
        self._note("after backward")

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        self._note("before step")
        gradient = self.head.weight.grad
        assert gradient is not None
        gradient.mul_(0.9)

    def configure_gradient_clipping(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        self._note("before clipping")
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        self._note("after clipping")


@pytest.mark.parametrize("accumulate", [1, 3])
def test_gradients_in_hooks(tmp_path: Path, accumulate: int) -> None:
    modules = []
    for strategy in ("auto", RoundPipeStrategy(num_microbatches=4)):
        torch.manual_seed(3)
        module = _Gradients()
        trainer = make_trainer(
            tmp_path, strategy=strategy, accumulate_grad_batches=accumulate, max_epochs=2
        )
        trainer.fit(module, regression_data())
        modules.append(module)
    one, many = modules
    assert [where for where, _ in many.seen] == [where for where, _ in one.seen]
    for (where, expected), (_, value) in zip(one.seen, many.seen, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-6, msg=where)
    assert parameter_error(many, one) < 1e-5


def test_parameters_without_a_gradient_keep_none(tmp_path: Path) -> None:
    class Partial(Regressor):
        def __init__(self) -> None:
            super().__init__()
            self.unused = torch.nn.Linear(3, 3)
            self.head.bias.requires_grad_(False)

        def on_after_backward(self) -> None:
            assert self.unused.weight.grad is None
            assert self.head.bias.grad is None
            assert self.head.weight.grad is not None

    trainer = make_trainer(tmp_path, strategy="roundpipe", devices=2, max_epochs=1)
    trainer.fit(Partial(), regression_data())
    assert trainer.global_step == 4


def test_attributes_set_in_training_step_reach_the_module(tmp_path: Path) -> None:
    def remember(module: Any, batch: Any, batch_idx: int) -> None:
        module.last_index = batch_idx

    module = Regressor(on_step=remember)
    make_trainer(tmp_path, strategy="roundpipe", max_epochs=1).fit(module, regression_data())
    assert module.last_index == 3


def test_evaluation_and_prediction_equal_one_device_to_the_bit(tmp_path: Path) -> None:
    torch.manual_seed(3)
    module = Regressor(dropout=0.5)
    data = regression_data(19)
    results = []
    for strategy, devices in (("auto", 1), (RoundPipeStrategy(), 3)):
        trainer = make_trainer(tmp_path, strategy=strategy, devices=devices)
        predictions = trainer.predict(module, data)
        assert predictions is not None
        results.append(
            (
                trainer.validate(module, data, verbose=False),
                trainer.test(module, data, verbose=False),
                torch.cat([torch.as_tensor(part) for part in predictions]),
            )
        )
    assert results[1][:2] == results[0][:2]
    assert torch.equal(results[1][2], results[0][2])


def test_callbacks_see_the_trained_parameters(tmp_path: Path) -> None:
    class Watch(Callback):
        def __init__(self) -> None:
            self.sums: list[float] = []

        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
            self.sums.append(sum(float(p.detach().sum()) for p in pl_module.parameters()))

    runs = []
    for strategy in ("auto", RoundPipeStrategy(num_microbatches=2)):
        torch.manual_seed(3)
        watch = Watch()
        trainer = make_trainer(tmp_path, strategy=strategy, callbacks=[watch], max_epochs=1)
        trainer.fit(Regressor(), regression_data())
        runs.append(watch.sums)
    assert runs[1] == pytest.approx(runs[0], abs=1e-5)
    assert len(set(runs[0])) == 4


# The graph of one node ---------------------------------------------------------------------------


def test_held_gradients_are_handed_out_once_and_not_copied() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    gradient = torch.ones(3)
    address = gradient.data_ptr()
    loss = loss_with_gradients(
        torch.tensor(2.0), gradients={parameter: gradient}, backward_scale=0.25
    )
    del gradient
    (loss / 4).backward()
    assert parameter.grad is not None
    assert torch.equal(parameter.grad, torch.ones(3))
    assert parameter.grad.data_ptr() == address
    again = loss_with_gradients(
        torch.tensor(2.0), gradients={parameter: torch.ones(3)}, backward_scale=1.0
    )
    again.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"second time.*Call backward\(\) once"):
        again.backward()


def test_held_gradients_follow_what_the_user_does_with_the_loss() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    loss = loss_with_gradients(
        torch.tensor(2.0), gradients={parameter: torch.ones(3)}, backward_scale=0.5
    )
    (loss * 3).backward()
    assert parameter.grad is not None
    assert torch.equal(parameter.grad, torch.full((3,), 6.0))
