import _thread
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from roundpipe_lightning.emulation.server import EmulatedDevice
from roundpipe_lightning.errors import WatchdogError
from roundpipe_lightning.strategy.strategy import RoundPipeStrategy
from roundpipe_lightning.testing import EmulatedStrategy
from tests.kit.moments import GivenUp, WatchClock
from tests.kit.training import Block, Regressor, make_trainer, regression_data, same_bits

NUM_MICROBATCHES = 4


class UserError(Exception):
    """Raised by user code here."""


class _Fuse:
    """Blows at the third microbatch of the second step, found by the microbatch's data."""

    def __init__(self) -> None:
        self.marker: float | None = None
        self.blown = False

    def blow_for(self, x: Tensor) -> None:
        if self.marker is not None and float(x.detach().flatten()[0]) == self.marker:
            self.marker = None
            self.blown = True
            raise UserError("the fuse has blown")


class _FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fuse: _Fuse) -> Tensor:
        ctx.fuse, ctx.first = fuse, x.flatten()[:1].clone()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.fuse.blow_for(ctx.first)
        return gradients[0], None


class _FailingBlock(Block):
    """Passes a sample's first number on, by which a microbatch is known, and fails for one."""

    def __init__(self, fuse: _Fuse, place: str) -> None:
        super().__init__()
        self.fuse = [fuse]  # in a list: no module may deep-copy it apart
        self.place = place

    def forward(self, x: Tensor) -> Tensor:
        fuse = self.fuse[0]
        if self.place == "block forward":
            fuse.blow_for(x)
        y = super().forward(x)
        if self.place == "block backward":
            y = torch.cat([x[..., :1], y[..., 1:]], dim=-1)
            y = _FailingBackward.apply(y, fuse)  # type: ignore[no-untyped-call]
        return torch.cat([x[..., :1], y[..., 1:]], dim=-1)


class _Failing(Regressor):
    def __init__(self, place: str) -> None:
        super().__init__()
        self.fuse = [_Fuse()]
        self.place = place
        self.layers = nn.ModuleList(_FailingBlock(self.fuse[0], place) for _ in range(4))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        third = batch[0].tensor_split(NUM_MICROBATCHES)[2]
        first_run = not self.fuse[0].blown
        self.fuse[0].marker = float(third[0, 0]) if batch_idx == 1 and first_run else None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.place == "training_step":
            self.fuse[0].blow_for(batch[0])
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        module = self

        class Optimizer(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                loss = closure()
                if module.place == "optimizer" and module.fuse[0].marker is not None:
                    module.fuse[0].marker, module.fuse[0].blown = None, True
                    raise UserError("the fuse has blown")
                super().step()
                return loss

        return Optimizer(self.parameters(), lr=0.05)


@pytest.mark.parametrize(
    ("place", "devices"),
    [("training_step", 1), ("block forward", 2), ("block backward", 2), ("optimizer", 2)],
)
def test_error_in_user_code_and_training_again(place: str, devices: int) -> None:
    def fit(module: LightningModule) -> None:
        strategy = RoundPipeStrategy(num_microbatches=NUM_MICROBATCHES, microbatching="step")
        trainer = make_trainer(strategy=strategy, devices=devices, max_epochs=2)
        trainer.fit(module, regression_data())

    torch.manual_seed(3)
    module = _Failing(place)
    start = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(UserError, match="the fuse has blown") as error:
        fit(module)
    assert type(error.value) is UserError
    assert module.fuse[0].blown
    lines = "".join(traceback.format_tb(error.tb))
    assert "blow_for" in lines or "in backward" in lines or "in step" in lines
    if place != "optimizer" and hasattr(error.value, "add_note"):  # Python 3.11
        assert "microbatch 2" in " ".join(getattr(error.value, "__notes__", []))
    assert not [thread for thread in threading.enumerate() if "roundpipe" in thread.name]

    module.load_state_dict(start)
    fit(module)
    torch.manual_seed(3)
    unharmed = _Failing("nowhere")
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


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Put the handler of Ctrl-C back, which Lightning takes away for its shutdown."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_in_a_step_and_training_again(tmp_path: Path) -> None:
    class Save(Callback):
        def on_exception(
            self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
        ) -> None:
            assert isinstance(exception, KeyboardInterrupt)
            trainer.save_checkpoint(tmp_path / "interrupted.ckpt")

    pressed: list[int] = []

    def press(module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and not pressed:
            pressed.append(batch_idx)
            _thread.interrupt_main()

    module = Regressor(on_step=press)
    trainer = make_trainer(strategy="roundpipe", devices=2, callbacks=[Save()])
    with pytest.raises(SystemExit):
        trainer.fit(module, regression_data())
    assert trainer.interrupted
    assert trainer.global_step == 1
    assert torch.load(tmp_path / "interrupted.ckpt")["global_step"] == 1
    assert not [thread for thread in threading.enumerate() if "roundpipe" in thread.name]

    again = make_trainer(strategy="roundpipe", devices=2)
    again.fit(module, regression_data())
    assert again.global_step == 12


def test_step_without_progress_is_given_up_with_the_schedule(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, given_up = WatchClock(monkeypatch), GivenUp(monkeypatch)

    def hang(module: Any, batch: Any, batch_idx: int) -> None:
        clock.advance_with_each_look(70)
        given_up.wait()

    strategy = RoundPipeStrategy(timeout_seconds=100, microbatching="step", dry_run=False)
    trainer = make_trainer(strategy=strategy, devices=2)
    with pytest.raises(WatchdogError, match="worker 0: ") as error:
        trainer.fit(Regressor(on_step=hang), regression_data())
    assert "timeout_seconds" in str(error.value)
    grid = re.search(r"worker 0 \| .*\nworker 1 \| .*\n", str(error.value))
    assert grid is not None
    assert ">X0.0<" in grid[0]
    assert re.search(r"worker \d: \d of \d+ done, runs X0\.0 for \d+\.\d s", str(error.value))


def test_trainer_and_strategy_can_be_used_again_and_again() -> None:
    module = Regressor()
    trainer = make_trainer(strategy="roundpipe", devices=2, max_epochs=1)
    data, other = regression_data(), regression_data(8)
    trainer.fit(module, data, other)
    first = trainer.validate(module, other)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, data, other)
    second = trainer.validate(module, other)
    assert trainer.global_step == 8
    assert second[0]["val_loss"] < first[0]["val_loss"]
    assert trainer.test(module, other)[0]["test_loss"] == second[0]["val_loss"]
    predictions = trainer.predict(module, other)
    assert predictions is not None
    assert isinstance(trainer.strategy, RoundPipeStrategy)
    assert trainer.strategy.last_step is not None
    assert trainer.strategy.peak_device_bytes is not None


def test_two_trainers_in_turn_on_one_module() -> None:
    runs: list[Callable[[], Trainer]] = [
        lambda: make_trainer(strategy="roundpipe", devices=2, max_epochs=1),
        lambda: make_trainer(max_epochs=1),
        lambda: make_trainer(strategy="roundpipe", devices=3, max_epochs=1),
    ]
    module = Regressor()
    for make in runs:
        trainer = make()
        trainer.fit(module, regression_data())
        assert trainer.global_step == 4


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
Way = Callable[[Trainer, Any], Any]


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
