"""Events: waiting for them, being called back, and what a step that is given up does to them."""

from __future__ import annotations

import threading

import pytest
import torch

from roundpipe_lightning.emulation.server import EmulatedDevice
from roundpipe_lightning.emulation.tagged_tensor import tag_of, untag
from roundpipe_lightning.engine.device.base import CopyQueue
from roundpipe_lightning.engine.device.events import DoneEvent, Event, HostEvent, StepAborted


def _waiting(event: HostEvent, method: str) -> tuple[threading.Thread, list[object]]:
    """Start a thread that waits, and note what comes of it."""
    found: list[object] = []

    def wait() -> None:
        try:
            found.append(getattr(event, method)())
        except BaseException as error:  # noqa: BLE001 - it is what the test looks at
            found.append(type(error))

    thread = threading.Thread(target=wait)
    thread.start()
    return thread, found


def test_waiters_are_released_and_called_back_once() -> None:
    event, calls = HostEvent("a copy"), []
    event.when_done(lambda: calls.append("before"))
    thread, found = _waiting(event, "wait")
    assert not event.is_done
    event.set()
    event.set()
    event.abort()  # too late
    thread.join(60)
    event.when_done(lambda: calls.append("after"))
    assert found == [None]
    assert calls == ["before", "after"]
    event.wait()
    assert event.issued() is event
    assert str(event) == "<HostEvent 'a copy', done>"


@pytest.mark.parametrize("method", ["wait", "issued"])
def test_an_abort_releases_every_waiter(method: str) -> None:
    event, calls = HostEvent(), []
    event.when_done(lambda: calls.append(event.is_done))
    threads = [_waiting(event, method) for _ in range(3)]
    event.abort()
    for thread, _ in threads:
        thread.join(60)
    assert [found for _, found in threads] == [[StepAborted]] * 3
    assert calls == [True]


def test_a_failure_reaches_who_waits() -> None:
    event = HostEvent()
    event.fail(ValueError("the bus is gone"))
    with pytest.raises(ValueError, match="the bus is gone"):
        event.wait()


def test_an_event_is_issued_before_it_is_done() -> None:
    event, behind = HostEvent(), HostEvent("the last chunk")
    thread, found = _waiting(event, "issued")
    event.stand_for(behind)
    behind.set()
    thread.join(60)
    assert found == [behind]
    assert not event.is_done


def test_a_copy_waits_for_events_and_bytes_arrive() -> None:
    device = EmulatedDevice(2)
    slot = device.allocate(16)
    assert (tag_of(slot), slot.dtype, slot.shape) == (device.name, torch.uint8, (16,))
    values = torch.arange(16, dtype=torch.uint8)
    after: list[Event] = [DoneEvent()]
    done = device.copy(slot[8:], values[:8], queue=CopyQueue.UPLOAD, after=after)
    device.await_event(done)
    landed = torch.empty(8, dtype=torch.uint8)
    done = device.copy(landed, slot[8:], queue=CopyQueue.DOWNLOAD, after=[device.mark_event("x")])
    done.wait()
    assert torch.equal(landed, values[:8])
    assert torch.equal(untag(slot[8:]), values[:8])
