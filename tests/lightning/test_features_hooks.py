"""Every hook of a module, a data module and a callback is called as often and in the same order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule

from roundpipe_lightning.strategy.strategy import RoundPipeStrategy
from roundpipe_lightning.testing import EmulatedStrategy
from tests.kit.training import QUIET, Regressor, make_trainer, regression_data

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]

# Called once per microbatch, so not as often as on one device; or no hooks.
PER_MICROBATCH = {"training_step", "forward"}
NO_HOOKS = {
    *("all_gather", "clip_gradients", "print", "freeze", "unfreeze", "manual_backward"),
    *("optimizers", "lr_schedulers", "toggle_optimizer", "untoggle_optimizer", "log", "log_dict"),
    *("toggled_optimizer", "save_hyperparameters", "from_datasets", "load_from_checkpoint"),
    *("to_onnx", "to_torchscript", "to_tensorrt", "configure_sharded_model"),
}


def hooks_of(kind: type, base: type = object) -> list[str]:
    """Names of the methods that Lightning offers to be overridden."""
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
    strategy = RoundPipeStrategy(num_microbatches=4, dry_run=False)
    make_trainer(tmp_path, strategy=strategy, max_epochs=1).fit(module, regression_data(16))
    assert sorted(numbers) == [0, 0, 0, 0, 1, 1, 1, 1]
