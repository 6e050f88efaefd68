import threading
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from roundpipe_lightning.emulation.server import EmulatedDevice
from roundpipe_lightning.emulation.tagged_tensor import untag
from roundpipe_lightning.engine.device.events import Event, HostEvent
from roundpipe_lightning.engine.store.host_store import HostStore
from roundpipe_lightning.engine.store.weight_versions import WeightVersions
from tests.engine.test_steps_in_flight import begin, module_and_plan, opened
from tests.kit.engine import Regressor
from tests.kit.moments import ObservedCondition

PATIENCE_SECONDS = 60.0


def test_a_step_with_other_values_waits_where_trained_blocks_stay() -> None:
    for resident in ((), ((0,), (), ())):
        module, plan = module_and_plan()
        with opened(module, replace(plan, resident=resident)) as engine:
            wanted = begin(engine, 0).result()
            first = begin(engine, 1)
            first.outputs()
            engine.store.versions = WeightVersions(previous=False)
            second = begin(engine, 0)
            if resident:
                assert first.is_over
            found = second.result()
            assert found.losses == wanted.losses


class _LateDevice(EmulatedDevice):
    """Has made what was launched on it when the test says so."""

    def __init__(self) -> None:
        super().__init__(0)
        self.marks: list[HostEvent] = []
        self.error: Exception | None = None

    def upload(self, tensor: Tensor, wait: object = None) -> Tensor:
        if self.error is not None:
            raise self.error
        return super().upload(tensor)

    def mark_event(self, name: str) -> Event:
        self.marks.append(HostEvent(name))
        return self.marks[-1]


def test_a_block_without_a_plan_is_read_until_its_copy_has_been_made() -> None:
    """An accelerator's copy is only launched when `upload_block` returns."""
    module, device = Regressor(2), _LateDevice()
    block = next(iter(module.layers))
    store = HostStore(module, list(module.layers))
    versions, observed = store.versions, ObservedCondition()
    versions._changed = observed
    values = store.upload_block(block, device)
    [copied] = device.marks
    updater = threading.Thread(target=versions.switch)  # to write into the parameters then
    updater.start()
    assert observed.waits.acquire(timeout=PATIENCE_SECONDS)
    assert updater.is_alive()
    copied.set()
    updater.join(PATIENCE_SECONDS)
    assert not updater.is_alive()
    assert all(torch.equal(untag(value), p) for p, value in values.items())


def test_a_block_that_could_not_be_copied_is_not_read_for_good() -> None:
    module, device = Regressor(2), _LateDevice()
    store = HostStore(module, list(module.layers))
    device.error = RuntimeError("out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        store.upload_block(next(iter(module.layers)), device)
    for mark in device.marks:
        mark.set()
    store.versions.switch()  # returns
