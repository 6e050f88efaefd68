"""Events: moments that others wait for, such as the end of a copy.

An event is *done* once, or it *fails*. Three kinds stand behind one face:

- `DoneEvent`: has happened already.
- `HostEvent`: a host thread says when. Whoever waits for one of a step that was given up gets
  `StepAborted`, so nobody waits for good.
- `StreamEvent` (`device/accelerator.py`): an accelerator itself says when.

Host threads `wait()`. A device's compute queue waits without stopping a host thread
(`Device.await_event`); it needs the event of the copy itself, which is there when a transfer queue
has given the copy to the device: `issued()` waits for that moment only.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable

Callback = Callable[[], None]


class StepAborted(BaseException):
    """Unwinds the threads of a step that failed elsewhere. It never leaves the engine.

    Not an `Exception`, so that user code with `except Exception` cannot swallow it.
    """


class UpdateAborted(Exception):  # noqa: N818 - nobody catches it but the updater's owner
    """The update that a parameter waits for has failed; `Updater.join` raises the cause."""


class Event(ABC):
    """A moment that others wait for."""

    name: str = ""  # for messages, for example `upload of layers.3 to cuda:1`

    @property
    @abstractmethod
    def is_done(self) -> bool:
        """Whether the event has happened. Never waits; a failure counts as having happened."""

    @abstractmethod
    def wait(self) -> None:
        """Stop the calling thread until the event has happened.

        Raises what made it fail; `StepAborted` if its step was given up.
        """

    @abstractmethod
    def when_done(self, callback: Callback) -> None:
        """Call back once the event has happened or failed, from any thread; at once if it has."""

    def issued(self) -> Event:
        """Return the event it stands for once that is known, or itself; raises as `wait` does."""
        return self

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}, {'done' if self.is_done else 'to come'}>"


def block_until(call_back: Callable[[Callback], None]) -> None:
    """Stop the calling thread until a callback comes.

    An event has no gate of its own, which would cost more to make than all else of it: most are
    never waited for by a thread.
    """
    gate = threading.Lock()
    gate.acquire()
    call_back(gate.release)
    gate.acquire()


class DoneEvent(Event):
    """An event that has happened."""

    def __init__(self, name: str = "") -> None:
        self.name = name

    @property
    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        """Return at once."""

    def when_done(self, callback: Callback) -> None:
        callback()


class HostEvent(Event):
    """An event that a host thread sets."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self._lock = threading.Lock()
        self._is_over = False
        self._is_known = False  # what stands behind it, or that it is over
        self._behind: Event | None = None
        self._error: BaseException | None = None
        self._callbacks: list[Callback] = []  # for its end
        self._when_known: list[Callback] = []

    @property
    def is_done(self) -> bool:
        return self._is_over

    def set(self) -> None:
        """Mark the event as happened. Events happen once: later calls change nothing."""
        self._end(None)

    def fail(self, error: BaseException) -> None:
        """Mark the event as failed: its one waiter raises `error`."""
        self._end(error)

    def abort(self) -> None:
        """Mark the event as given up: every waiter raises `StepAborted`."""
        self._end(StepAborted())

    def stand_for(self, event: Event) -> None:
        """Bind to an event of a device; this event must still be set when that one is done."""
        with self._lock:
            self._behind = event
            callbacks = self._now_known()
        for callback in callbacks:
            callback()

    def _now_known(self) -> list[Callback]:
        self._is_known = True
        callbacks, self._when_known = self._when_known, []
        return callbacks

    def _end(self, error: BaseException | None) -> None:
        with self._lock:
            if self._is_over:
                return
            self._error = error
            self._is_over = True
            callbacks = self._now_known() + self._callbacks
            self._callbacks = []
        for callback in callbacks:
            callback()

    def wait(self) -> None:
        if not self._is_over:
            block_until(self.when_done)
        self._check()

    def _check(self) -> None:
        if isinstance(self._error, (StepAborted, UpdateAborted)):
            # A new one: an error keeps the frames of who raised it alive.
            raise type(self._error)
        if self._error is not None:
            raise self._error

    def when_done(self, callback: Callback) -> None:
        with self._lock:
            if not self._is_over:
                self._callbacks.append(callback)
                return
        callback()

    def _call_when_known(self, callback: Callback) -> None:
        with self._lock:
            if not self._is_known:
                self._when_known.append(callback)
                return
        callback()

    def issued(self) -> Event:
        """Return the event it stands for once that is known, or itself; raises as `wait` does."""
        if not self._is_known:
            block_until(self._call_when_known)
        self._check()
        return self if self._behind is None else self._behind
