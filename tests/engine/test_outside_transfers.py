"""Parameters outside the blocks are uploaded ahead from the second step on; gradients go home."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from roundpipe_lightning.engine.device import CopyQueue
from roundpipe_lightning.engine.emulated_server import EmulatedServer
from roundpipe_lightning.engine.emulated_time import EmulatedTiming
from roundpipe_lightning.engine.events import DoneEvent, Event
from roundpipe_lightning.engine.gradients import Gradients
from roundpipe_lightning.engine.outside import OutsideGradients, OutsideWeights
from roundpipe_lightning.engine.store import HostStore
from roundpipe_lightning.engine.tagged import raw_of
from roundpipe_lightning.engine.transfers import Job, TransferQueue, Urgency
from tests.engine.tiny import (
    Regressor,
    differences,
    engine_of,
    layers_of,
    mean_step,
    plain_step,
    plan_of,
    regression_batches,
)


class _Queue(TransferQueue):
    """Notes what it is given."""

    def __init__(self, server: EmulatedServer, queue: CopyQueue) -> None:
        super().__init__(server.devices[0], queue, on_failure=_raise, name=queue.value)
        self.jobs: list[Job] = []

    def submit(self, job: Job) -> Event:
        self.jobs.append(job)
        return super().submit(job)


def _raise(error: BaseException, place: str) -> None:
    raise AssertionError(place) from error


def _wait(event: Event) -> None:
    event.wait()


@contextmanager
def uploads_of(head: nn.Parameter, tail: nn.Parameter) -> Iterator[tuple[OutsideWeights, _Queue]]:
    """Give the weights of a module outside its blocks, and the queue that they come by."""
    module = Regressor(2)
    module.head.weight, module.tail.weight = head, tail
    store = HostStore(module, tuple(module.layers))
    with EmulatedServer(1) as server:
        queue = _Queue(server, CopyQueue.UPLOAD)
        yield (
            OutsideWeights(
                server.devices[0],
                store=store,
                uploads=queue,
                updated=lambda parameters: DoneEvent(),
            ),
            queue,
        )
        queue.drain(timeout_seconds=60)
        queue.close()
    store.close()


def test_what_a_visit_has_asked_for_comes_before_it_in_the_next_step() -> None:
    head, tail = (nn.Parameter(torch.full((8, 8), x)) for x in (1.0, 2.0))
    with uploads_of(head, tail) as (outside, queue):
        for _ in range(2):
            outside.begin_step(is_planned=True)
            outside.leave()
            outside.leave()
            values = outside.values(tail, wait=_wait)
            assert torch.equal(raw_of(values), tail)
            assert outside.values(tail, wait=_wait) is values
            assert outside.num_bytes == tail.nbytes
            outside.end_step()
            assert outside.num_bytes == 0
        assert [job.urgency for job in queue.jobs] == [Urgency.WEIGHTS, Urgency.PREFETCH]
        outside.begin_step(is_planned=True)
        assert len(queue.jobs) == 2  # it is for the visit after the next
        outside.leave()
        assert len(queue.jobs) == 3
        outside.end_step()
        outside.begin_step(is_planned=False)  # an evaluation is not a habit
        outside.values(head, wait=_wait)
        outside.end_step()
        outside.begin_step(is_planned=True)
        outside.leave()
        assert len(queue.jobs) == 5


def test_what_comes_before_the_blocks_of_the_first_visit_goes_before_their_weights() -> None:
    head, tail = (nn.Parameter(torch.full((8, 8), x)) for x in (1.0, 2.0))
    with uploads_of(head, tail) as (outside, queue):
        for _ in range(2):
            outside.begin_step(is_planned=True)
            begun = len(queue.jobs)
            outside.begin_ahead()
            outside.values(head, wait=_wait, is_first=True)
            outside.values(tail, wait=_wait)
            outside.values(head, wait=_wait)  # by the next microbatch, after blocks of the first
            outside.end_step()
        assert begun == 3, "that of the head"
        assert [job.urgency for job in queue.jobs[2:]] == [Urgency.WEIGHTS, Urgency.PREFETCH]


def test_at_most_two_microbatches_gradients_are_on_their_way() -> None:
    parameter = nn.Parameter(torch.zeros(100))
    landed: list[Gradients] = []
    take: Callable[[Gradients], None] = landed.append
    with EmulatedServer(1, timing=EmulatedTiming(download_bytes_per_second=20_000)) as server:
        (device,) = server.devices
        queue = _Queue(server, CopyQueue.DOWNLOAD)
        gradients = OutsideGradients(device, queue, longest=0)
        for number in range(4):
            device.upload(torch.zeros(1))
            gradient = device.empty(torch.Size([100]), torch.float32).fill_(number)
            gradients.send({parameter: gradient}, landed=take)
            assert len(landed) >= number - 1
        assert queue.drain(timeout_seconds=60)
        queue.close()
    assert [float(some[parameter].mean()) for some in landed] == [0, 1, 2, 3]


def test_steps_on_a_slow_link_are_those_of_a_plain_loop() -> None:
    module, batches = Regressor(3), regression_batches(4)
    plain = plain_step(module, batches)
    plan = plan_of(layers_of(module), num_workers=2, num_microbatches=4)
    timing = EmulatedTiming(upload_bytes_per_second=1e5, download_bytes_per_second=1e5)
    with (
        EmulatedServer(2, timing=timing, poison=True) as server,
        engine_of(module, layers_of(module), plan, devices=server.devices) as engine,
    ):
        for _ in range(3):
            assert not differences(module, mean_step(engine, batches), plain)
