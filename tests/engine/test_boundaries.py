from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import nn

from roundpipe_lightning.emulation.race_checker import ProtocolChecker
from roundpipe_lightning.emulation.server import EmulatedServer
from roundpipe_lightning.emulation.tagged_tensor import tag, tag_of, untag
from roundpipe_lightning.emulation.timing import EmulatedTiming
from roundpipe_lightning.engine.device.base import Device
from roundpipe_lightning.engine.device.events import Event
from roundpipe_lightning.engine.store.host_store import HostStore
from roundpipe_lightning.engine.transfer.boundary import BoundaryTensor
from roundpipe_lightning.engine.transfer.copy_queue import Job, Priority, TransferQueue
from roundpipe_lightning.engine.transfer.worker_transfers import Transfers, WorkerTransfers
from roundpipe_lightning.planning.cost.costs import BoundaryRoute
from roundpipe_lightning.planning.cost.traffic import worker_stage_runs
from roundpipe_lightning.planning.model.profile import BlockProfile, ModelProfile
from roundpipe_lightning.planning.schedule.stages import Partition
from tests.kit.engine import (
    LockingDevice,
    Regressor,
    check_parity,
    engine_step,
    layers_of,
    plan_of,
    regression_batches,
)


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


def test_the_host_reads_a_boundary_when_it_has_landed() -> None:
    module, values = nn.ModuleList([nn.Linear(2, 2)]), torch.arange(8.0)
    with EmulatedServer(1, timing=EmulatedTiming(copy_seconds=0.02), poison=True) as server:
        (device,) = server.devices
        transfers = Transfers(
            HostStore(module, list(module)), devices=[device], names={module[0]: "0"}
        )
        boundary = BoundaryTensor(tag(values, device.name), Place(device, transfers.transfers[0]))
        assert torch.equal(boundary.on(None), values)
        transfers.close()


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


NUM_MICROBATCHES = 3


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the boundaries that went to the host."""
    sizes: list[int] = []
    submit = TransferQueue.submit

    def noted(queue: TransferQueue, job: Job) -> Event:
        if job.priority is Priority.BOUNDARY and "download" in queue.name:
            sizes.extend(source.nbytes for _, source in job.pieces)
        return submit(queue, job)

    monkeypatch.setattr(TransferQueue, "submit", noted)
    return sizes


@pytest.mark.parametrize(
    ("direct", "shares"), [(True, False), (False, False), (False, True), (True, True)]
)
def test_host_bytes_of_boundaries(on_host: list[int], *, direct: bool, shares: bool) -> None:
    timing = EmulatedTiming(
        upload_bytes_per_second=1e8,
        download_bytes_per_second=1e8,
        direct_bytes_per_second=5e7 if direct else None,
        max_delay_seconds=0.001,
    )
    with EmulatedServer(3, timing=timing, checker=ProtocolChecker(), poison=True) as server:
        devices: list[Device] = [server.devices[0]] * 3 if shares else [*server.devices]
        result = check_parity(
            Regressor(4), num_workers=3, num_microbatches=NUM_MICROBATCHES, devices=devices
        )
    assert bool(on_host) == (not direct and not shares)
    moved = sum(traffic.direct_bytes for traffic in result.traffic)
    assert bool(moved) == (direct and not shares)


def test_gradients_go_directly_where_boundaries_have_no_room(
    on_host: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    partition = Partition(forward=(4,), backward=(0, 1, 1, 1, 1))
    timing, asked = EmulatedTiming(direct_bytes_per_second=1e9), list[Device]()
    with EmulatedServer(2, timing=timing, checker=ProtocolChecker(), poison=True) as server:
        for device in server.devices:
            monkeypatch.setattr(device, "has_spare_memory", partial(asked.append, device))
        result = check_parity(
            Regressor(4),
            num_microbatches=NUM_MICROBATCHES,
            partition=partition,
            devices=[*server.devices],
        )
    one = regression_batches(1)[0][0].nbytes  # of a boundary, and of its gradient
    assert set(on_host) == {one}
    assert len(on_host) == NUM_MICROBATCHES * (4 + 1)  # and no gradient
    assert len(asked) <= len(result.timeline.entries), "once a turn"
    assert sum(traffic.direct_bytes for traffic in result.traffic) >= NUM_MICROBATCHES * one


def test_the_planner_counts_copies_that_are_made() -> None:
    module, batches = Regressor(4), regression_batches(NUM_MICROBATCHES)
    stack = layers_of(module)
    plan = plan_of(stack, num_workers=2, num_microbatches=NUM_MICROBATCHES)
    timing = EmulatedTiming(direct_bytes_per_second=1e9)
    with EmulatedServer(2, timing=timing, checker=ProtocolChecker(), poison=True) as server:
        result = engine_step(module, stack, plan, batches, devices=[*server.devices])
    size = batches[0][0].nbytes
    block = BlockProfile(
        name="block", forward_seconds=1.0, backward_seconds=1.0, boundary_bytes=size
    )
    profile = ModelProfile(blocks=(block,) * len(stack.blocks), fingerprint="")
    rows = worker_stage_runs(
        plan.schedule, partition=plan.partition, profile=profile, route=BoundaryRoute.DIRECT
    )
    counted = [sum(run.direct_bytes for run in row) for row in rows]
    made = [traffic.direct_bytes for traffic in result.traffic]
    assert min(counted) > 0
    # What is sent ahead to a turn that does not take it is not counted: one boundary here.
    assert all(
        few <= many <= few + NUM_MICROBATCHES * size
        for few, many in zip(counted, made, strict=True)
    )
