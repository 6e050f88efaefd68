"""Boundaries under way: values and strides arrive; memory is lent, taken back and page-locked."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from roundpipe_lightning.engine.arena import HostArena
from roundpipe_lightning.engine.device import Device
from roundpipe_lightning.engine.emulated import EmulatedDevice
from roundpipe_lightning.engine.logistics import Logistics
from roundpipe_lightning.engine.parcels import Parcel
from roundpipe_lightning.engine.store import HostStore
from roundpipe_lightning.engine.tagged import tag, tag_of, untag
from roundpipe_lightning.engine.traffic import WorkerTransfers
from tests.engine.tiny import stack_of


class LockingDevice(EmulatedDevice):
    """Notes which bytes it was asked to page-lock."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.locked: list[tuple[int, int]] = []

    def pin(self, buffer: Tensor) -> None:
        if buffer.nbytes:
            self.locked.append((buffer.data_ptr(), buffer.nbytes))

    def unpin(self, buffer: Tensor) -> None:
        if buffer.nbytes:
            self.locked.remove((buffer.data_ptr(), buffer.nbytes))


@dataclass
class Place:
    """A worker, as parcels see it."""

    device: Device
    transfers: WorkerTransfers | None


@pytest.fixture
def places() -> Iterator[list[Place]]:
    module = nn.ModuleList([nn.Linear(2, 2)])
    store, stack = HostStore(module, list(module)), stack_of(tuple(module))
    devices = [LockingDevice(0), LockingDevice(1)]
    logistics = Logistics(store, devices=devices, stacks=[stack])
    pairs = zip(devices, logistics.transfers, strict=True)
    yield [Place(device, transfers) for device, transfers in pairs]
    assert logistics.take_error() is None
    logistics.close()
    assert not devices[0].locked


FORMS = {
    "dense": torch.arange(24.0).reshape(2, 3, 4),
    "transposed": torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "with gaps": torch.arange(24.0).reshape(4, 6)[:, ::2],
    "expanded": torch.arange(3.0).expand(4, 3),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
    "flags": torch.tensor([True, False, True]),
    "bfloat16": torch.randn(5).bfloat16(),
    "complex": torch.randn(3, dtype=torch.complex64),
}


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_values_and_strides_arrive(places: list[Place], form: str, *, keeps: bool) -> None:
    tensor, (first, second) = FORMS[form], places
    here = tag(tensor, first.device.name)
    parcel = Parcel(here, first, keeps=keeps)
    for worker in (second, first, second):
        there = parcel.on(worker)
        assert tag_of(there) == worker.device.name
        assert torch.equal(untag(there), tensor)
        assert there.stride() == tensor.to(tensor.dtype, copy=True).stride()
    assert torch.equal(parcel.on(None), tensor)


def test_what_its_maker_takes_again_does_not_move(places: list[Place]) -> None:
    first, second = places
    parcel = Parcel(tag(torch.ones(1000), first.device.name), first, keeps=True)
    parcel.send_to(first)
    parcel.on(first)
    for place in places:
        assert place.transfers is not None
        assert place.transfers.drain(timeout_seconds=10)
        assert place.transfers.uploads.num_bytes == place.transfers.downloads.num_bytes == 0
    parcel.send_to(second)
    parcel.on(second)
    assert second.transfers is not None
    assert second.transfers.uploads.num_bytes <= 4000


def test_memory_is_lent_and_comes_back_when_nobody_refers_to_it() -> None:
    device = LockingDevice(0)
    arena = HostArena(device)
    for sizes in ((1000, 300, 5000), (300, 1000, 5000), (5000, 300, 1000), (100, 6000)):
        lent = [arena.lend(size) for size in sizes]
        spans = sorted((one.tensor.data_ptr(), one.tensor.nbytes) for one in lent)
        assert all(a + n <= b for (a, n), (b, _) in pairwise(spans))
        assert [one.tensor.nbytes for one in lent] == list(sizes)
        first = lent.pop(0)
        del first
        again = arena.lend(sizes[0])  # fits where the first one was
        lent.append(again)
        del lent, again
        arena.end_step()
        assert [nbytes for _, nbytes in device.locked] == [arena.num_bytes]
    # As long as the most that was lent at once: 1000 + 300 + 5000, each to 256 bytes.
    assert arena.num_bytes == 1024 + 512 + 5120
    inside = arena.lend(6000)
    start, nbytes = device.locked[0]
    assert start <= inside.tensor.data_ptr() < start + nbytes
    beyond = arena.lend(6000)  # more than there is: ordinary memory
    assert not start <= beyond.tensor.data_ptr() < start + nbytes
    arena.end_step()  # somebody holds a part: the buffer stays
    assert [nbytes for _, nbytes in device.locked] == [nbytes]
    del inside, beyond
    gc.collect()
    arena.close()
    assert not device.locked
