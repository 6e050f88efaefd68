from __future__ import annotations

from functools import partial

import pytest

from roundpipe_lightning.emulation.race_checker import ProtocolChecker
from roundpipe_lightning.emulation.server import EmulatedServer
from roundpipe_lightning.emulation.timing import EmulatedTiming
from roundpipe_lightning.engine.device.base import Device
from roundpipe_lightning.engine.device.events import Event
from roundpipe_lightning.engine.transfer.copy_queue import Job, Priority, TransferQueue
from roundpipe_lightning.planning.cost.costs import BoundaryRoute
from roundpipe_lightning.planning.cost.traffic import worker_stage_runs
from roundpipe_lightning.planning.model.profile import BlockProfile, ModelProfile
from roundpipe_lightning.planning.schedule.stages import Partition
from tests.kit.engine import (
    Regressor,
    differences,
    engine_step,
    layers_of,
    plain_step,
    plan_of,
    regression_batches,
)

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
    module, batches = Regressor(4), regression_batches(NUM_MICROBATCHES)
    stack = layers_of(module)
    plan = plan_of(stack, num_workers=3, num_microbatches=NUM_MICROBATCHES)
    timing = EmulatedTiming(
        upload_bytes_per_second=1e8,
        download_bytes_per_second=1e8,
        direct_bytes_per_second=5e7 if direct else None,
        max_delay_seconds=0.001,
    )
    with EmulatedServer(3, timing=timing, checker=ProtocolChecker(), poison=True) as server:
        devices: list[Device] = [server.devices[0]] * 3 if shares else [*server.devices]
        result = engine_step(module, stack, plan, batches, devices=devices)
    assert not differences(module, result, plain_step(module, batches))
    assert bool(on_host) == (not direct and not shares)
    moved = sum(traffic.direct_bytes for traffic in result.traffic)
    assert bool(moved) == (direct and not shares)


def test_gradients_go_directly_where_boundaries_have_no_room(
    on_host: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, batches = Regressor(4), regression_batches(NUM_MICROBATCHES)
    stack = layers_of(module)
    partition = Partition(forward=(4,), backward=(0, 1, 1, 1, 1))
    plan = plan_of(stack, num_workers=2, num_microbatches=NUM_MICROBATCHES, partition=partition)
    timing, asked = EmulatedTiming(direct_bytes_per_second=1e9), list[Device]()
    with EmulatedServer(2, timing=timing, checker=ProtocolChecker(), poison=True) as server:
        for device in server.devices:
            monkeypatch.setattr(device, "has_spare_memory", partial(asked.append, device))
        result = engine_step(module, stack, plan, batches, devices=[*server.devices])
    assert not differences(module, result, plain_step(module, batches))
    one = batches[0][0].nbytes  # of a boundary, and of its gradient
    assert set(on_host) == {one}
    assert len(on_host) == NUM_MICROBATCHES * (len(stack.blocks) + 1)  # and no gradient
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
