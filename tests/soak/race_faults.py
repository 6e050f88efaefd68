"""Waits that race_hunt.py leaves out on purpose, to see what the hunt can find."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from roundpipe_lightning.emulation.server import EmulatedServer, ServedDevice
from roundpipe_lightning.engine.device.base import CopyQueue
from roundpipe_lightning.engine.device.events import DoneEvent, Event


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A wait that is left out.

    Attributes:
        what: For messages.
        ends_early: Queues whose copies are said to have been made when they were issued.
        compute_waits: Whether compute waits for copies.
        marks_early: Marks of what was computed whose names have one of these in them are said to
            be done when they are launched.
    """

    what: str
    ends_early: frozenset[CopyQueue] = frozenset()
    compute_waits: bool = True
    marks_early: tuple[str, ...] = ()


FAULTS = {
    "compute": Fault(what="compute does not wait for copies to it", compute_waits=False),
    "upload_landed": Fault(
        what="no thread waits for the end of an upload", ends_early=frozenset({CopyQueue.UPLOAD})
    ),
    "download_landed": Fault(
        what="no thread waits for the end of a download",
        ends_early=frozenset({CopyQueue.DOWNLOAD}),
    ),
    "slot": Fault(what="slots are filled while they are read", marks_early=("has left",)),
    "boundary": Fault(
        what="boundaries go down before they are made", marks_early=("a boundary is made",)
    ),
    "outside": Fault(
        what="gradients of parameters outside the blocks go down before they are made",
        marks_early=("gradients outside",),
    ),
    "gathered": Fault(what="gradients go down before they are gathered", marks_early=("gathered",)),
}
"""Values of `--fault`."""


class ForgetfulDevice(ServedDevice):
    def __init__(self, index: int, *, server: EmulatedServer, fault: Fault) -> None:
        super().__init__(index, server=server)
        self._fault = fault

    def copy(
        self, dst: Tensor, src: Tensor, *, queue: CopyQueue, after: Sequence[Event] = ()
    ) -> Event:
        event = super().copy(dst, src, queue=queue, after=after)
        return DoneEvent(event.name) if queue in self._fault.ends_early else event

    def await_event(self, event: Event) -> None:
        if self._fault.compute_waits:
            super().await_event(event)

    def mark_event(self, name: str) -> Event:
        event = super().mark_event(name)
        early = any(part in name for part in self._fault.marks_early)
        return DoneEvent(name) if early else event


class ForgetfulServer(EmulatedServer):
    def __init__(self, num_devices: int, *, fault: Fault, **given: Any) -> None:
        self._fault = fault
        super().__init__(num_devices, **given)

    def _device(self, index: int) -> ServedDevice:
        return ForgetfulDevice(index, server=self, fault=self._fault)
