import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn

from roundpipe_lightning.emulation.server import EmulatedDevice
from roundpipe_lightning.strategy.strategy import RoundPipeStrategy
from roundpipe_lightning.testing import EmulatedStrategy
from tests.kit.training import QUIET, Block, Regressor, make_trainer, regression_data

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]


class UserError(Exception):
    """Raised by user code here."""


class _Failing(Regressor):
    """A module whose third block fails, or its code outside the blocks."""

    fails_in = "nothing"

    def __init__(self) -> None:
        super().__init__()
        module = self

        class Fails(Block):
            def forward(self, x: Tensor) -> Tensor:
                if module.fails_in == "block" and not torch.is_grad_enabled():
                    raise UserError("not today")
                return super().forward(x)

        self.layers = nn.ModuleList([Block(), Block(), Fails(), Block()])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.fails_in == "step":
            raise UserError("not today")
        super().validation_step(batch, batch_idx)


class _FailingDevice(EmulatedDevice):
    fails = False

    def copy(self, *args: Any, **kwargs: Any) -> Any:
        if self.fails:
            self.fails = False
            raise RuntimeError("the device fell off the bus")
        return super().copy(*args, **kwargs)


def _validate(trainer: Trainer, module: Any) -> Any:
    return trainer.validate(module, regression_data(8), verbose=False)


def _predict(trainer: Trainer, module: Any) -> Any:
    return trainer.predict(module, regression_data(8))


def _fit(trainer: Trainer, module: Any) -> Any:
    return trainer.fit(module, regression_data(8), regression_data(8))


WAYS = {"validate": _validate, "predict": _predict, "fit": _fit}
Way = Callable[[Trainer, Any], Any]


@pytest.mark.parametrize("kind", [RoundPipeStrategy, EmulatedStrategy])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore:Found .* in eval mode at the start of training")
def test_a_block_that_raises(tmp_path: Path, way: str, kind: type[RoundPipeStrategy]) -> None:
    module = _Failing()
    module.fails_in = "block"
    trainer = make_trainer(tmp_path, strategy=kind(), devices=2, max_epochs=1)
    with pytest.raises(UserError, match="not today") as error:
        WAYS[way](trainer, module)
    text = "".join(traceback.format_exception(error.value))
    assert "StepAborted" not in text
    assert text.count("Error: not today") == 1
    (note,) = getattr(error.value, "__notes__", [])
    assert "block layers.2, " in note
    assert " stage " in note
    assert " of an evaluation, worker " in note
    module.fails_in = "nothing"
    again = make_trainer(tmp_path, strategy=kind(), devices=2, max_epochs=1)
    WAYS[way](again, module)
    assert again.state.finished


def test_code_outside_the_blocks_that_raises(tmp_path: Path) -> None:
    module = _Failing()
    module.fails_in = "step"
    with pytest.raises(UserError, match="not today") as error:
        _validate(make_trainer(tmp_path, strategy="roundpipe", devices=2), module)
    (note,) = getattr(error.value, "__notes__", [])
    assert "in code outside the blocks, " in note


class _FailsLater(_Failing):
    """A module whose devices fail when an evaluation has begun."""

    def __init__(self, devices: list[_FailingDevice]) -> None:
        super().__init__()
        self.devices = devices

    def on_validation_start(self) -> None:
        self._break()

    def on_predict_start(self) -> None:
        self._break()

    def _break(self) -> None:
        for device in self.devices:
            device.fails = True


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_that_fails(tmp_path: Path, way: str) -> None:
    devices = [_FailingDevice(index) for index in range(2)]
    trainer = make_trainer(
        tmp_path,
        strategy=EmulatedStrategy(devices=devices),
        devices=2,
        max_epochs=1,
        num_sanity_val_steps=0,
    )
    with pytest.raises(RuntimeError, match="fell off the bus") as error:
        WAYS[way](trainer, _FailsLater(devices))
    text = "".join(traceback.format_exception(error.value))
    assert "StepAborted" not in text
    assert "worker 0 (emulated:0)" in " ".join(getattr(error.value, "__notes__", []))
