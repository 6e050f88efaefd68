from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from roundpipe_lightning.emulation.tagged_tensor import tag, tag_of, untag
from roundpipe_lightning.engine.device.base import Device
from roundpipe_lightning.engine.device.events import Event
from roundpipe_lightning.engine.store.host_store import HostStore
from roundpipe_lightning.engine.transfer.boundary import BoundaryTensor
from roundpipe_lightning.engine.transfer.copy_queue import Job
from roundpipe_lightning.engine.transfer.worker_transfers import Transfers, WorkerTransfers
from tests.kit.engine import LockingDevice


@dataclass
class Place:
    """A worker, as boundaries see it."""

    device: Device
    transfers: WorkerTransfers | None


@pytest.fixture
def places() -> Iterator[list[Place]]:
    module = nn.ModuleList([nn.Linear(2, 2)])
    store = HostStore(module, list(module))
    devices = [LockingDevice(0), LockingDevice(1)]
    transfers = Transfers(store, devices=devices, names={module[0]: "0"})
    pairs = zip(devices, transfers.transfers, strict=True)
    yield [Place(device, transfers) for device, transfers in pairs]
    assert transfers.take_error() is None
    transfers.close()
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
    boundary = BoundaryTensor(here, first, keeps=keeps)
    for worker in (second, first, second):
        there = boundary.on(worker)
        assert tag_of(there) == worker.device.name
        assert torch.equal(untag(there), tensor)
        assert there.stride() == tensor.to(tensor.dtype, copy=True).stride()
    assert torch.equal(boundary.on(None), tensor)


def test_what_its_maker_takes_again_does_not_move(places: list[Place]) -> None:
    first, second = places
    boundary = BoundaryTensor(tag(torch.ones(1000), first.device.name), first, keeps=True)
    boundary.send_to(first)
    boundary.on(first)
    for place in places:
        assert place.transfers is not None
        assert place.transfers.drain(timeout_seconds=60)
        assert place.transfers.uploads.num_bytes == place.transfers.downloads.num_bytes == 0
    boundary.send_to(second)
    boundary.on(second)
    assert second.transfers is not None
    assert second.transfers.uploads.num_bytes <= 4000


def test_a_boundary_that_could_not_be_offloaded_is_offloaded_when_it_is_asked_for(
    places: list[Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing is uploaded from memory that was never written."""
    first, second = places
    assert first.transfers is not None
    boundary = BoundaryTensor(tag(torch.ones(8), first.device.name), first, keeps=True)

    def refuse(job: Job) -> Event:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(first.transfers.downloads, "submit", refuse)
        boundary.send_to(second)
    assert torch.equal(untag(boundary.on(second)), torch.ones(8))
