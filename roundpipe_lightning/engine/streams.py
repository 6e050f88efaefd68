"""Events of an accelerator's streams, and the thread that tells when they have happened."""

from __future__ import annotations

import contextlib
import queue
import threading
from typing import Any

from roundpipe_lightning.engine.events import Callback, Event


class CompletionWatcher:
    """Waits for the events of one stream in their order, and calls back.

    Its thread sleeps in the driver. Without it every transfer queue would have to ask again and
    again whether what its copies wait for has been computed.

    Args:
        name: Of its thread.
    """

    def __init__(self, name: str) -> None:
        self._watched: queue.SimpleQueue[tuple[StreamEvent, Callback] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def watch(self, event: StreamEvent, callback: Callback) -> None:
        """Call back when the event has happened, or can no longer happen."""
        self._watched.put((event, callback))

    def _serve(self) -> None:
        while (watched := self._watched.get()) is not None:
            event, callback = watched
            # A device that fails tells whoever uses it next, who is called back here.
            with contextlib.suppress(RuntimeError):
                event.wait()
            callback()
            del watched, event, callback

    def close(self, *, timeout_seconds: float = 10.0) -> None:
        """End the thread; one that hangs in the driver is left behind, a daemon."""
        self._watched.put(None)
        self._thread.join(timeout_seconds)


class StreamEvent(Event):
    """A moment on an accelerator's stream.

    Args:
        raw: The backend's event, recorded.
        name: For people.
        watcher: Tells of the events of the stream on which it was recorded.
    """

    def __init__(self, raw: Any, *, name: str, watcher: CompletionWatcher) -> None:
        self.raw = raw
        self.name = name
        self._watcher = watcher

    @property
    def is_done(self) -> bool:
        """Whether the device has come to it."""
        return bool(self.raw.query())

    def wait(self) -> None:
        """Stop the calling thread until the device has come to it."""
        self.raw.synchronize()

    def when_done(self, callback: Callback) -> None:
        """Call back once the device has come to it, from the watcher's thread."""
        self._watcher.watch(self, callback)
