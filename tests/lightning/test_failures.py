import copy
import os
import signal
import sys
import threading
import traceback
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from roundpipe_lightning.emulation.server import EmulatedDevice
from roundpipe_lightning.strategy.strategy import RoundPipeStrategy
from roundpipe_lightning.testing import EmulatedStrategy
from tests.kit.training import Block, Regressor, make_trainer, regression_data, same_bits


class UserError(Exception):
    """Raised by user code here."""


class _Failing(Regressor):
    """Fails in its second step, in its own code or in its optimizer."""

    fails_in = ""

    def _fail(self, place: str) -> None:
        if self.fails_in == place and self.global_step == 1:
            raise UserError("not today")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self._fail("training_step")
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        optimizer.register_step_pre_hook(lambda *_: self._fail("optimizer"))
        return optimizer


@pytest.mark.parametrize("place", ["training_step", "optimizer"])
def test_error_in_user_code_and_training_again(place: str) -> None:
    def fit(module: LightningModule) -> None:
        strategy = RoundPipeStrategy(num_microbatches=4, microbatching="step")
        make_trainer(strategy=strategy, devices=2, max_epochs=1).fit(module, regression_data())

    module = _Failing()
    unharmed = copy.deepcopy(module)
    module.fails_in = place
    with pytest.raises(UserError, match="not today"):
        fit(module)
    assert not [thread for thread in threading.enumerate() if "roundpipe" in thread.name]
    module.fails_in = ""
    module.load_state_dict(unharmed.state_dict())
    fit(module)
    fit(unharmed)
    assert same_bits(module, unharmed)


@pytest.mark.filterwarnings("ignore:Found .* in eval mode at the start of training")
def test_error_in_validation_and_training_again() -> None:
    class Invalid(Regressor):
        fails = True

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            if self.fails:
                raise UserError("not valid")
            super().validation_step(batch, batch_idx)

    module = Invalid()
    with pytest.raises(UserError, match="not valid"):
        make_trainer(strategy="roundpipe").fit(module, regression_data(), regression_data(8))
    module.fails = False
    trainer = make_trainer(strategy="roundpipe", max_epochs=1)
    trainer.fit(module, regression_data(), regression_data(8))
    assert trainer.global_step == 4


class _Forking(Regressor):
    """Forks once in a microbatch; the child ends with `sys.exit(7)`, by SIGALRM if that hangs."""

    status: int | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1 and _Forking.status is None:
            _Forking.status = -1
            child = os.fork()
            if child == 0:
                signal.alarm(20)
                sys.exit(7)
            _Forking.status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return loss


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
@pytest.mark.filterwarnings("ignore:The step, or another thread, writes status")
def test_a_child_that_is_forked_in_a_step_ends() -> None:
    strategy = RoundPipeStrategy(microbatching="step")
    trainer = make_trainer(strategy=strategy, max_epochs=1)
    trainer.fit(_Forking(), regression_data(16))
    assert _Forking.status == 7


class _Stopping(Regressor):
    """Raises `StopIteration` in one of its hooks, which Lightning takes for the end of the data."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place
        if place == "block":
            self.layers[1].register_forward_hook(self._stop)

    def _stop(self, *_: Any) -> None:
        raise StopIteration

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return self._stop() if self.place == "training_step" else loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self._stop()

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        if self.place == "optimizer":
            optimizer.register_step_post_hook(self._stop)
        return optimizer


@pytest.mark.filterwarnings("ignore:Block 'layers.1' runs on the whole batch")
@pytest.mark.parametrize("place", ["block", "training_step", "optimizer", "validation_step"])
def test_stop_iteration_is_an_error_with_its_place(place: str) -> None:
    module = _Stopping(place)
    trainer = make_trainer(strategy="roundpipe", max_epochs=1)
    run = trainer.validate if place == "validation_step" else trainer.fit
    with pytest.raises(RuntimeError, match="StopIteration was raised") as caught:
        run(module, regression_data(8))
    notes = getattr(caught.value, "__notes__", [])
    assert place != "block" or any("happened in F" in note for note in notes), notes


class _FailingEvaluation(Regressor):
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


@pytest.mark.parametrize("kind", [RoundPipeStrategy, EmulatedStrategy])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore:Found .* in eval mode at the start of training")
def test_a_block_that_raises(way: str, kind: type[RoundPipeStrategy]) -> None:
    module = _FailingEvaluation()
    module.fails_in = "block"
    trainer = make_trainer(strategy=kind(), devices=2, max_epochs=1)
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
    again = make_trainer(strategy=kind(), devices=2, max_epochs=1)
    WAYS[way](again, module)
    assert again.state.finished


def test_code_outside_the_blocks_that_raises() -> None:
    module = _FailingEvaluation()
    module.fails_in = "step"
    with pytest.raises(UserError, match="not today") as error:
        _validate(make_trainer(strategy="roundpipe", devices=2), module)
    (note,) = getattr(error.value, "__notes__", [])
    assert "in code outside the blocks, " in note


class _FailsLater(_FailingEvaluation):
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
def test_a_copy_that_fails(way: str) -> None:
    devices = [_FailingDevice(index) for index in range(2)]
    trainer = make_trainer(
        strategy=EmulatedStrategy(devices=devices), devices=2, max_epochs=1, num_sanity_val_steps=0
    )
    with pytest.raises(RuntimeError, match="fell off the bus") as error:
        WAYS[way](trainer, _FailsLater(devices))
    text = "".join(traceback.format_exception(error.value))
    assert "StepAborted" not in text
    assert "worker 0 (emulated:0)" in " ".join(getattr(error.value, "__notes__", []))
