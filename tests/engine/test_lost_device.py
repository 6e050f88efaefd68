"""Devices that change after planning: others take their memory, or they disappear."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from roundpipe_lightning.emulation.server import EmulatedDevice
from roundpipe_lightning.errors import DeviceMemoryError
from tests.engine.test_out_of_memory import SmallDevice
from tests.kit.engine import (
    Regressor,
    differences,
    engine_of,
    layers_of,
    mean_step,
    plain_step,
    plan_of,
    regression_batches,
)


def test_memory_that_another_process_takes_between_two_steps() -> None:
    module = Regressor()
    stack, batches = layers_of(module), regression_batches(2)
    plan, plain = plan_of(stack, num_workers=2, num_microbatches=2), plain_step(module, batches)
    devices = [SmallDevice(index, num_bytes=2**20) for index in range(2)]
    with engine_of(module, stack, plan, devices=devices) as engine:
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

    def upload(self, tensor: Any) -> Any:
        self._use()
        return super().upload(tensor)

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
    module = Regressor(3)
    stack, batches = layers_of(module), regression_batches(2)
    plan = plan_of(stack, num_workers=2, num_microbatches=2)
    counting = [GoneDevice(index) for index in range(2)]
    with engine_of(module, stack, plan, devices=counting) as engine:
        mean_step(engine, batches)
        before = 10**9 - counting[1].num_left
        mean_step(engine, batches)
        after = 10**9 - counting[1].num_left
    num_calls = (after - before) * 3 // 4  # how many there are depends on who waits for whom
    for number in range(1, num_calls, max(1, num_calls // 12)):
        devices = [GoneDevice(index) for index in range(2)]
        with engine_of(module, stack, plan, devices=devices, timeout_seconds=60) as engine:
            mean_step(engine, batches)
            devices[1].num_left = number
            with pytest.raises(RuntimeError, match="the launch timed out") as error:
                mean_step(engine, batches)
        notes = " ".join(getattr(error.value, "__notes__", ()))
        assert "emulated:1" in notes, (number, notes)
