"""Tells other hosts that this one lives, and hears it of them: a process beside each host's.

It is a program of its own (`hosts.py` starts it) that imports nothing but the standard library. A
thread could not do it: where Python's lock is held for long, it would be silent, and a process that
is stopped (SIGSTOP) could not be told from one that computes.

Every host is connected with every other one. Messages are lines of JSON: `{}` says that a host
lives, `{"stopped": true}` that it is stopped, one with `"why"` is its last word.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

BEAT_SECONDS = 0.5


class Peer:
    """Another host, as far as it is heard.

    Attributes:
        rank: Its number; None before it has said it.
        heard: When it said last that it lives, seconds.
        is_stopped: Whether it said that it is stopped.
    """

    def __init__(self, connection: socket.socket, rank: int | None) -> None:
        self.connection, self.rank = connection, rank
        self.heard, self.is_stopped = time.monotonic(), False
        self._unread = b""

    def send(self, message: Any) -> None:
        with suppress(OSError):  # reading says so
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def read(self) -> list[Any] | None:
        """Return what it has said; None: it has ended, or speaks of something else."""
        try:
            new = self.connection.recv(1 << 16)
        except OSError:
            new = b""
        *lines, self._unread = (self._unread + new).split(b"\n")
        try:
            return [dict(json.loads(line)) for line in lines] if new else None
        except (TypeError, ValueError):
            return None


class Beats:
    """All connections of this host.

    Args:
        rank: Its number.
        secret: What shows that somebody is a host of this training.
        listener: Where hosts with higher numbers come.
        addresses: Of all hosts, by rank.
        patience: After so many seconds of silence a host is lost.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        rank: int,
        secret: str,
        addresses: list[tuple[str, int]],
        patience: float,
    ) -> None:
        self._patience = patience
        self._parent, self._listener, self._secret = os.getppid(), listener, secret
        self._peers: list[Peer] = []
        self._looked, self._begun = 0.0, time.monotonic()
        self._awaited = {*range(rank + 1, len(addresses))}
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(sys.stdin, selectors.EVENT_READ)
        for host, (name, port) in enumerate(addresses[:rank]):
            try:
                connection = connect((name, port), patience / 2)
            except OSError as error:
                tell({"host": host, "why": f"cannot be reached ({error})"})
                continue
            self._add(connection, host).send({"rank": rank, "secret": secret})

    def run(self) -> None:
        """Go on until the parent ends or says its last word on the standard input."""
        while os.getppid() == self._parent:
            for key, _ in self._selector.select(BEAT_SECONDS / 2):
                if key.fileobj is self._listener:
                    self._add(self._listener.accept()[0], None)
                elif key.data is None:
                    self._end(sys.stdin.readline())
                    return
                else:
                    self._hear(key.data)
            now = time.monotonic()
            if now - self._looked >= BEAT_SECONDS:
                self._beat(now)
                self._looked = now

    def _add(self, connection: socket.socket, rank: int | None) -> Peer:
        connection.settimeout(self._patience)
        peer = Peer(connection, rank)
        self._peers.append(peer)
        self._selector.register(connection, selectors.EVENT_READ, peer)
        return peer

    def _remove(self, peer: Peer, why: str, **said: Any) -> None:
        self._selector.unregister(peer.connection)
        self._peers.remove(peer)
        peer.connection.close()
        if peer.rank is not None:
            tell({"host": peer.rank, "why": why, **said})

    def _hear(self, peer: Peer) -> None:
        said = peer.read()
        if said is None:
            self._remove(peer, "has ended")
        for message in said or ():
            if peer.rank is None and message.get("secret") != self._secret:
                self._remove(peer, "is a stranger")
                return
            if "why" in message:
                self._remove(peer, **message)
                return
            if peer.rank is None:
                peer.rank = message["rank"]
                self._awaited.discard(peer.rank)
            peer.is_stopped = "stopped" in message
            peer.heard = peer.heard if peer.is_stopped else time.monotonic()

    def _beat(self, now: float) -> None:
        beat = {"stopped": True} if is_stopped(self._parent) else {}
        if now - self._begun > self._patience:
            while self._awaited:
                tell({"host": self._awaited.pop(), "why": "was lost before it could be heard"})
        slept = now - self._looked > self._patience / 2  # this machine: nobody could be heard
        for peer in [*self._peers]:
            peer.send(beat)
            peer.heard = now if slept else peer.heard
            if now - peer.heard > self._patience:
                state = "is stopped" if peer.is_stopped else "or the link to it is down"
                self._remove(peer, f"{state} (not heard for {self._patience:g} s)")

    def _end(self, last_word: str) -> None:
        for peer in self._peers if last_word else ():
            peer.send(json.loads(last_word))
            with suppress(OSError):
                peer.connection.shutdown(socket.SHUT_WR)
        if last_word:
            time.sleep(BEAT_SECONDS)  # an end with beats unread would take it back


def main() -> None:
    """Run beside the parent, which reads a port and writes who the hosts are."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    listener = socket.create_server(("", 0), family=family, backlog=1024, dualstack_ipv6=both)
    tell(listener.getsockname()[1])
    hosts = json.loads(sys.stdin.readline() or "{}")
    if "rank" in hosts:  # else the parent has ended before all had met
        Beats(listener, **hosts).run()


def connect(address: tuple[str, int], seconds: float) -> socket.socket:
    """Return a connection with a host, from which nothing is heard where it has ended.

    Raises:
        OSError: For so long it could not be reached; a link may just have come up.
    """
    end = time.monotonic() + seconds
    while True:
        try:
            return socket.create_connection(address, seconds)
        except ConnectionRefusedError:
            return socket.socket()
        except OSError:
            if time.monotonic() >= end:
                raise
        time.sleep(BEAT_SECONDS / 10)


def tell(message: Any) -> None:
    with suppress(BrokenPipeError):
        os.write(1, json.dumps(message).encode() + b"\n")


def is_stopped(process: int) -> bool:
    """Whether a process has been stopped by a signal; only Linux says so here."""
    with suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


if __name__ == "__main__":
    main()
