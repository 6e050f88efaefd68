"""Which of the other hosts live, and what becomes of those who wait for one that does not."""

from __future__ import annotations

import atexit
import json
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from roundpipe_lightning.engine.exchange import heartbeat

_SIGNAL: Any = getattr(signal, "SIGURG", None)  # does nothing where nobody handles it
PATIENCE_SECONDS = 5.0
_GRACE_SECONDS = 1.0


class Watch:
    """What this host knows of the others' lives, and what they are told of its own.

    Args:
        rank: The number of this host.
        main: Address and port that others have of host 0.

    Attributes:
        address: What the others' watches need: where this one listens, and a secret.
        trains: Whether to interrupt.
        interrupt: Called in the main thread, wherever it is, some time after a host is lost.
    """

    interrupt: Callable[[], None]

    def __init__(self, rank: int, *, main: tuple[str, int]) -> None:
        self._rank, self.trains = rank, False
        self._lost: dict[bool, tuple[int, str]] = {}  # by whether it was to be expected
        self._changed = threading.Event()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", heartbeat.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is not meant for it
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._told, self._tells = self._process.stdout, self._process.stdin
        port = int(self._told.readline())
        host = main[0] if rank == 0 else _own_address(main)
        self.address = (host, port, secrets.token_hex(16))
        self._previous: Any = None
        if _SIGNAL is not None and threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(_SIGNAL, self._heed)
        threading.Thread(target=self._listen, name="roundpipe-hosts", daemon=True).start()
        atexit.register(self.close)

    def begin(self, addresses: Sequence[tuple[str, int, str]]) -> None:
        """Connect with the others, of which each does this now."""
        hosts = {"addresses": [each[:2] for each in addresses], "patience": PATIENCE_SECONDS}
        self._tell({"rank": self._rank, "secret": addresses[0][2], **hosts})

    @property
    def lost(self) -> tuple[int, str] | None:
        """Number of a host that was lost, and why; None: all live, or have ended as they should."""
        return self._lost.get(False)

    def look(self, seconds: float) -> tuple[int, str] | None:
        """Return `lost`, or who has ended, for which a moment is waited."""
        self._changed.wait(seconds)
        return self.lost or self._lost.get(True)

    def close(self, why: str | None = None) -> None:
        """Say the last word, which the others' messages have; `why`: where it is unexpected."""
        self.trains = False
        atexit.unregister(self.close)
        host, because = self.lost or (self._rank, why or "has ended")
        is_expected = self.lost is None and why is None
        self._tell({"of": host, "why": because, "expected": is_expected})
        with suppress(OSError):
            self._tells.close()
        if self._previous is not None and threading.current_thread() is threading.main_thread():
            signal.signal(_SIGNAL, self._previous)

    def _tell(self, message: Any) -> None:
        with suppress(OSError, ValueError):
            self._tells.write(json.dumps(message) + "\n")
            self._tells.flush()

    def _listen(self) -> None:
        with self._told:
            for line in self._told:
                told = json.loads(line)
                is_expected = told.get("expected", False)
                if is_expected not in self._lost:
                    self._lost[is_expected] = (told.get("of", told["host"]), told["why"])
                    self._changed.set()
                    if not is_expected and self._previous is not None:
                        threading.Thread(target=self._insist, daemon=True).start()
        self._process.wait()

    def _heed(self, *_: Any) -> None:
        if self.trains:
            self.interrupt()

    def _insist(self) -> None:
        """Interrupt until somebody heeds it: who waits in an exchange raises by itself before."""
        main = threading.main_thread().ident
        while main is not None:
            time.sleep(_GRACE_SECONDS)
            if not self.trains:
                return
            signal.pthread_kill(main, _SIGNAL)


def _own_address(towards: tuple[str, int]) -> str:
    """Return the address of this machine in the network in which another one is."""
    family, kind, protocol, _, address = socket.getaddrinfo(*towards, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as found:
        found.connect(address)  # sends nothing
        return str(found.getsockname()[0])
