"""Boundaries under way: values and strides arrive; memory is lent, taken back and page-locked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from roundpipe_lightning.emulation.server import EmulatedDevice
from roundpipe_lightning.emulation.tagged_tensor import tag, tag_of, untag
from roundpipe_lightning.engine.device.base import Device
from roundpipe_lightning.engine.store.host_store import HostStore
from roundpipe_lightning.engine.transfer.boundary import Parcel
from roundpipe_lightning.engine.transfer.pinned_pool import Lane
from roundpipe_lightning.engine.transfer.transfers import Logistics
from roundpipe_lightning.engine.transfer.worker_transfers import WorkerTransfers
from tests.kit.engine import stack_of


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


def lane() -> Lane:
    """A lane of ordinary memory."""
    return Lane(torch.empty(0, dtype=torch.uint8))


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
    parcel = Parcel(here, first, lane=lane(), keeps=keeps)
    for worker in (second, first, second):
        there = parcel.on(worker)
        assert tag_of(there) == worker.device.name
        assert torch.equal(untag(there), tensor)
        assert there.stride() == tensor.to(tensor.dtype, copy=True).stride()
    assert torch.equal(parcel.on(None), tensor)


def test_what_its_maker_takes_again_does_not_move(places: list[Place]) -> None:
    first, second = places
    parcel = Parcel(tag(torch.ones(1000), first.device.name), first, lane=lane(), keeps=True)
    parcel.send_to(first)
    parcel.on(first)
    for place in places:
        assert place.transfers is not None
        assert place.transfers.drain(timeout_seconds=60)
        assert place.transfers.uploads.num_bytes == place.transfers.downloads.num_bytes == 0
    parcel.send_to(second)
    parcel.on(second)
    assert second.transfers is not None
    assert second.transfers.uploads.num_bytes <= 4000
