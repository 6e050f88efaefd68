import _thread
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
from torch.nn import functional

from roundpipe_lightning.emulation.server import EmulatedDevice
from roundpipe_lightning.engine import steps as engine_steps
from roundpipe_lightning.engine.device.base import Device
from roundpipe_lightning.errors import DeviceMemoryError, WatchdogError
from tests.engine.test_memory import SmallDevice
from tests.kit.engine import (
    TIMEOUT_SECONDS,
    Regressor,
    cpu_workers,
    differences,
    emulated_workers,
    engine_for,
    mean_step,
    plain_step,
    regression_batches,
)
from tests.kit.moments import PATIENCE_SECONDS, GivenUp, WatchClock

# ------------------------------------------------------------------------------------------ Ctrl-C


@pytest.mark.parametrize("where", ["head", "stack", "tail"])
def test_ctrl_c_while_the_engine_waits(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = Regressor()
    batches = regression_batches(3)
    plain = plain_step(module, batches)
    given_up, interrupted = GivenUp(monkeypatch), threading.Event()

    def interrupt(index: int) -> None:
        if index == 1 and not interrupted.is_set():
            interrupted.set()
            _thread.interrupt_main()
            given_up.wait()

    def call(view: Any, batch: Any, index: int) -> Any:
        if where == "head":
            interrupt(index)
        hidden = view.run_blocks(view.head(batch[0]))
        if where == "tail":
            interrupt(index)
        return functional.mse_loss(view.tail(hidden).squeeze(-1), batch[1])

    if where == "stack":
        module.layers[2].register_forward_pre_hook(lambda *_: interrupt(1))
    with engine_for(module, num_workers=2, num_microbatches=3) as engine:
        with pytest.raises(KeyboardInterrupt):
            mean_step(engine, batches, call=call)
        assert not differences(module, mean_step(engine, batches, call=call), plain)


def test_ctrl_c_with_user_code_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine waits a while, then goes on without the stuck thread, which ends by itself."""
    monkeypatch.setattr(engine_steps, "grace_seconds", lambda timeout_seconds: 0.5)
    module = Regressor()
    batches = regression_batches(2)
    release = threading.Event()

    def stuck(view: Any, batch: Any, index: int) -> Any:
        if index == 1:
            _thread.interrupt_main()
            release.wait(PATIENCE_SECONDS)
        return view.training_step(batch, 0)

    plain = plain_step(module, batches)
    with engine_for(module, num_workers=2, num_microbatches=2) as engine:
        with pytest.raises(KeyboardInterrupt):
            mean_step(engine, batches, call=stuck)
        assert not differences(module, mean_step(engine, batches), plain)
        release.set()


@pytest.mark.parametrize("where", ["head", "block", "tail"])
@pytest.mark.parametrize("workers", [cpu_workers, emulated_workers])
def test_a_thread_that_was_given_up_leaves_the_next_step_alone(
    monkeypatch: pytest.MonkeyPatch, where: str, workers: Callable[[int], list[Device]]
) -> None:
    monkeypatch.setattr(engine_steps, "grace_seconds", lambda timeout_seconds: 0.0)
    module = Regressor()
    batches = regression_batches(2)
    release, held = threading.Event(), list[threading.Thread]()

    def hold() -> None:
        if not held and threading.current_thread().name.endswith("-1"):  # the last microbatch
            held.append(threading.current_thread())
            _thread.interrupt_main()
            assert release.wait(PATIENCE_SECONDS)

    def stuck(view: Any, batch: Any, index: int) -> Any:
        if where == "head":
            hold()
        hidden = view.run_blocks(view.head(batch[0]))
        if where == "tail":
            hold()
        return functional.mse_loss(view.tail(hidden).squeeze(-1), batch[1])

    def waking(view: Any, batch: Any, index: int) -> Any:
        hidden = view.run_blocks(view.head(batch[0]))
        release.set()
        held[0].join(PATIENCE_SECONDS)
        assert not held[0].is_alive()
        return functional.mse_loss(view.tail(hidden).squeeze(-1), batch[1])

    plain = plain_step(module, batches)
    if where == "block":
        module.layers[1].register_forward_pre_hook(lambda *_: hold())
    with engine_for(module, num_microbatches=2, devices=workers(2)) as engine:
        with pytest.raises(KeyboardInterrupt):
            mean_step(engine, batches, call=stuck)
        assert not differences(module, mean_step(engine, batches, call=waking), plain)


# ---------------------------------------------------------------------------------------- watchdog


def test_watchdog_shows_the_schedule_and_where_everyone_stands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = Regressor()
    batches = regression_batches(3)
    plain = plain_step(module, batches)
    clock, given_up = WatchClock(monkeypatch), GivenUp(monkeypatch)

    def stuck(view: Any, batch: Any, index: int) -> Any:
        if index == 1:
            clock.advance_with_each_look(0.7 * TIMEOUT_SECONDS)
            given_up.wait()
        return view.training_step(batch, 0)

    with engine_for(module, num_workers=2, num_microbatches=3) as engine:
        with pytest.raises(WatchdogError, match=f"for {TIMEOUT_SECONDS:g} s") as caught:
            mean_step(engine, batches, call=stuck)
        text = str(caught.value)
        assert ">F0.1<" in text
        assert re.search(r"worker 0: \d of \d+ done, runs F0\.1 for \d+\.\d s", text)
        assert "worker 1" in text
        assert "FORWARD stage 0 (the head segment, blocks layers.0" in text
        assert "timeout_seconds" in text
        clock.advance_with_each_look(0.0)
        assert not differences(module, mean_step(engine, batches), plain)


def test_watchdog_lets_a_step_be_longer_than_its_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Regressor()
    clock = WatchClock(monkeypatch)

    def slow(view: Any, batch: Any, index: int) -> Any:
        clock.await_looks(1)  # the beginning of this action has been seen
        clock.advance(0.4 * TIMEOUT_SECONDS)
        clock.await_looks(1)
        return view.training_step(batch, 0)

    with engine_for(module, num_workers=1, num_microbatches=4) as engine:
        mean_step(engine, regression_batches(4), call=slow)


def test_an_error_wins_over_the_wait_for_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_steps, "grace_seconds", lambda timeout_seconds: 0.1)
    module = Regressor()
    clock, release = WatchClock(monkeypatch), threading.Event()

    def step(view: Any, batch: Any, index: int) -> Any:
        if index == 1:
            release.wait(PATIENCE_SECONDS)
        if index == 0:
            clock.advance_with_each_look(0.7 * TIMEOUT_SECONDS)
            raise OverflowError("the cause")
        return view.training_step(batch, 0)

    devices = emulated_workers(2)
    with (
        engine_for(module, team_size=2, num_microbatches=2, devices=devices) as engine,
        pytest.raises(OverflowError, match="the cause"),
    ):
        mean_step(engine, regression_batches(2), call=step)
    release.set()  # the other thread comes to its end by itself


def test_memory_that_another_process_takes_between_two_steps() -> None:
    module = Regressor()
    batches = regression_batches(2)
    plain = plain_step(module, batches)
    devices = [SmallDevice(index, num_bytes=2**20) for index in range(2)]
    with engine_for(module, num_microbatches=2, devices=devices) as engine:
        assert not differences(module, mean_step(engine, batches), plain)
        devices[1].num_bytes = devices[1].in_use  # nothing more than what it holds
        with pytest.raises(DeviceMemoryError, match=r"worker 1 \(emulated:1\)"):
            mean_step(engine, batches)
        devices[1].num_bytes = 2**20
        assert not differences(module, mean_step(engine, batches), plain)


class GoneDevice(EmulatedDevice):
    """From some moment on every call fails, as CUDA's do after an error of the device."""

    num_left = 10**9

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self._mutex = threading.Lock()

    def _use(self) -> None:
        with self._mutex:  # several threads use a device
            self.num_left -= 1
            is_gone = self.num_left <= 0
        if is_gone:
            raise RuntimeError("CUDA error: the launch timed out and was terminated")

    def upload(self, tensor: Any, wait: Any = None) -> Any:
        self._use()
        return super().upload(tensor, wait)

    def download(self, tensor: Any) -> Any:
        self._use()
        return super().download(tensor)

    def copy(self, *args: Any, **kwargs: Any) -> Any:
        self._use()
        return super().copy(*args, **kwargs)

    def mark_event(self, name: str) -> Any:
        self._use()
        return super().mark_event(name)

    def await_event(self, event: Any) -> None:
        self._use()
        super().await_event(event)

    def synchronize(self) -> None:
        self._use()
        super().synchronize()

    def start_clock(self) -> None:
        self._use()
        super().start_clock()

    def mark(self) -> Any:
        self._use()
        return super().mark()


def test_a_device_that_disappears_is_named_whenever_it_does() -> None:
    module, batches = Regressor(3), regression_batches(2)
    counting = [GoneDevice(index) for index in range(2)]
    with engine_for(module, num_microbatches=2, devices=counting) as engine:
        mean_step(engine, batches)
        before = 10**9 - counting[1].num_left
        mean_step(engine, batches)
        after = 10**9 - counting[1].num_left
    num_calls = (after - before) * 3 // 4  # how many there are depends on who waits for whom
    for number in range(1, num_calls, max(1, num_calls // 12)):
        devices = [GoneDevice(index) for index in range(2)]
        with engine_for(module, num_microbatches=2, devices=devices, timeout_seconds=60) as engine:
            mean_step(engine, batches)
            devices[1].num_left = number
            with pytest.raises(RuntimeError, match="the launch timed out") as error:
                mean_step(engine, batches)
        notes = " ".join(getattr(error.value, "__notes__", ()))
        assert "emulated:1" in notes, (number, notes)


def test_steps_that_could_not_begin_leave_the_next_one_its_memory() -> None:
    class LateDevice(EmulatedDevice):
        num_refusals = 0

        def start_clock(self) -> None:
            if self.num_refusals:
                self.num_refusals -= 1
                raise RuntimeError("the device is not there yet")
            super().start_clock()

    module, batches = Regressor(3), regression_batches(2)
    devices = [LateDevice(index) for index in range(2)]
    plain = plain_step(module, batches)
    with engine_for(module, num_microbatches=2, devices=devices) as engine:
        mean_step(engine, batches)
        devices[1].num_refusals = 3
        for _ in range(3):
            with pytest.raises(RuntimeError, match="not there yet") as error:
                mean_step(engine, batches)
            assert "worker 1" in " ".join(getattr(error.value, "__notes__", ()))
        assert not differences(module, mean_step(engine, batches), plain)
