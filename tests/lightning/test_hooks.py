from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from torch import Tensor
from torch.optim import Optimizer

from roundpipe_lightning.strategy.step import loss_with_gradients
from roundpipe_lightning.strategy.strategy import RoundPipeStrategy
from roundpipe_lightning.testing import EmulatedStrategy
from tests.kit.training import (
    Regressor,
    make_trainer,
    parameter_error,
    regression_data,
    train_with,
)


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
    strategies = ["auto", RoundPipeStrategy(num_microbatches=4)]
    (one, _), (many, _) = train_with(
        tmp_path, strategies, _Gradients, accumulate_grad_batches=accumulate, max_epochs=2
    )
    assert [where for where, _ in many.seen] == [where for where, _ in one.seen]
    for (where, expected), (_, value) in zip(one.seen, many.seen, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-6, msg=where)
    assert parameter_error(many, one) < 1e-5


class _LooksIn(Regressor):
    """Notes gradients in one hook that is called between two batches of a window."""

    def __init__(self, hook: str) -> None:
        super().__init__()
        self.seen: list[Tensor | None] = []
        setattr(self, hook, self._note)

    def _note(self, *_: Any) -> None:
        gradients = [parameter.grad for parameter in self.parameters()]
        self.seen += [None if g is None else g.clone() for g in gradients]


@pytest.mark.parametrize("kind", [RoundPipeStrategy, EmulatedStrategy])
@pytest.mark.parametrize(
    "hook", ["on_train_batch_end", "on_train_batch_start", "on_validation_start"]
)
def test_gradients_between_the_batches_of_a_window(
    tmp_path: Path, hook: str, kind: type[RoundPipeStrategy]
) -> None:
    (one, _), (many, _) = train_with(
        tmp_path,
        ["auto", kind(num_microbatches=2, microbatching="step")],
        lambda: _LooksIn(hook),
        validation=regression_data(8),
        accumulate_grad_batches=4,
        val_check_interval=2,
        max_epochs=2,
    )
    assert any(gradient is not None for gradient in one.seen)
    torch.testing.assert_close(many.seen, one.seen)


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


# The graph of one node ---------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1, 3])
def test_held_gradients_are_handed_out_once_and_not_copied(factor: int) -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    gradient = torch.ones(3)
    address = gradient.data_ptr()
    loss = loss_with_gradients(
        torch.tensor(2.0), gradients={parameter: gradient}, backward_scale=0.25
    )
    del gradient
    (factor * loss / 4).backward()
    assert parameter.grad is not None
    assert torch.equal(parameter.grad, factor * torch.ones(3))
    assert parameter.grad.data_ptr() == address
    again = loss_with_gradients(
        torch.tensor(2.0), gradients={parameter: torch.ones(3)}, backward_scale=1.0
    )
    again.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"second time.*Call backward\(\) once"):
        again.backward()


# Called once per microbatch, so not as often as on one device; or no hooks.
PER_MICROBATCH = {"training_step", "forward"}
NO_HOOKS = {
    *("all_gather", "clip_gradients", "print", "freeze", "unfreeze", "manual_backward"),
    *("optimizers", "lr_schedulers", "toggle_optimizer", "untoggle_optimizer", "log", "log_dict"),
    *("toggled_optimizer", "save_hyperparameters", "from_datasets", "load_from_checkpoint"),
    *("to_onnx", "to_torchscript", "to_tensorrt", "configure_sharded_model"),
}


def hooks_of(kind: type, base: type = object) -> list[str]:
    inherited = set(dir(torch.nn.Module)) | set(dir(base)) - {"forward"}
    return [
        name
        for name in dir(kind)
        if callable(getattr(kind, name))
        and not name.startswith("_")
        and name not in inherited | NO_HOOKS | PER_MICROBATCH
    ]


def recording(kind: type, calls: list[str], names: list[str]) -> Any:
    """Return a subclass whose hooks note their names, then do what they always did."""

    def noted(name: str) -> Callable[..., Any]:
        def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(f"{kind.__name__}.{name}")
            return getattr(super(made, self), name)(*args, **kwargs)

        return hook

    made = type(kind.__name__, (kind,), {name: noted(name) for name in names})
    return made


class Data(LightningDataModule):
    def train_dataloader(self) -> Any:
        return regression_data(16)

    def val_dataloader(self) -> Any:
        return [regression_data(8), regression_data(4)]

    def test_dataloader(self) -> Any:
        return regression_data(8)

    def predict_dataloader(self) -> Any:
        return regression_data(12)


class Model(Regressor):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class Plain(Callback):
    """A callback that does nothing."""


def _calls(folder: Path, strategy: Any, **flags: Any) -> list[str]:
    calls: list[str] = []
    torch.manual_seed(3)
    module = recording(Model, calls, hooks_of(LightningModule))()
    data = recording(Data, calls, hooks_of(LightningDataModule, LightningModule.__mro__[-2]))()
    callback = recording(Plain, calls, hooks_of(Callback))()
    devices = 1 if strategy == "auto" else 2
    trainer = make_trainer(
        folder,
        strategy=strategy,
        devices=devices,
        callbacks=[callback],
        **{"max_epochs": 2, "num_sanity_val_steps": 1, **flags},
    )
    trainer.fit(module, datamodule=data)
    trainer.save_checkpoint(folder / "saved.ckpt")
    trainer.validate(module, datamodule=data, verbose=False)
    trainer.test(module, datamodule=data, verbose=False, ckpt_path=folder / "saved.ckpt")
    trainer.predict(module, datamodule=data)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, datamodule=data, ckpt_path=folder / "saved.ckpt")
    return calls


FLAGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation and clipping": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    "validation in the middle": {"val_check_interval": 1, "reload_dataloaders_every_n_epochs": 1},
    "a development run": {"fast_dev_run": True},
}


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.filterwarnings("ignore:You have overridden")
def test_all_hooks_in_order(tmp_path: Path, name: str) -> None:
    expected = _calls(tmp_path, "auto", **FLAGS[name])
    strategies = [RoundPipeStrategy(num_microbatches=2)]
    if name == "plain":
        strategies.append(EmulatedStrategy(num_microbatches=2))
    for strategy in strategies:
        assert _calls(tmp_path, strategy, **FLAGS[name]) == expected
    called = {call.partition(".")[2] for call in expected}
    assert {"setup", "teardown", "configure_model", "on_predict_batch_end"} <= called
    assert expected.count("Model.configure_model") == 5
    assert expected.count("Model.configure_optimizers") == 2


def test_training_step_is_called_once_per_microbatch(tmp_path: Path) -> None:
    numbers: list[int] = []
    module = Regressor(on_step=lambda module, batch, batch_idx: numbers.append(batch_idx))
    strategy = RoundPipeStrategy(num_microbatches=4, microbatching="step", dry_run=False)
    make_trainer(tmp_path, strategy=strategy, max_epochs=1).fit(module, regression_data(16))
    assert sorted(numbers) == [0, 0, 0, 0, 1, 1, 1, 1]
