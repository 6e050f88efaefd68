"""The hosts of a training: who they are, what they tell each other, what happens when one is lost.

`torch.distributed` with gloo carries it all. Each thread that talks to other hosts has a group of
its own (a `Line`), because a small operation would wait for the large ones before it:

| group | begun by | in the order of |
|---|---|---|
| control | the Trainer's thread | the training loop: the same calls on all hosts |
| the default one | the same, after a message of the control group | the same |
| gradients | a thread of `Exchange` | blocks, agreed once a step |
| weights | a thread of `Exchange` | the same; between steps what the control group agreed |

The operations of a group must begin in the same order on all hosts: gloo ends the process where
sizes differ, and adds up what does not belong together where they do not. So a line carries nothing
more after an operation that failed or was left out, and no host begins one while an exception
travels. Nothing waits without end: every operation is asked again and again whether it is done, and
given up when `close` was called or time is up.
"""

from __future__ import annotations

import atexit
import json
import pickle
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import zip_longest
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from roundpipe_lightning.engine.exchange import heartbeat
from roundpipe_lightning.errors import ConfigurationError, HostError

_SIGNAL: Any = getattr(signal, "SIGURG", None)  # does nothing where nobody handles it
PATIENCE_SECONDS = 5.0
_GRACE_SECONDS = 1.0


class Watch:
    """What this host knows of the others' lives, and what they are told of its own.

    Others have host 0 at the address and port `main`.

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
        host = main[0] if rank == 0 else _own_address(main)
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
        self.address = (host, int(self._told.readline()), secrets.token_hex(16))
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


_POLL = timedelta(seconds=0.5)
_SHORT = timedelta(milliseconds=1)
_NAMED_SECONDS = 2.0  # after which the heartbeat has said who has ended

T = TypeVar("T")
Taken: TypeAlias = Callable[[], Sequence[Tensor]]
"""Waits for the end of an operation, and returns what each host gave: parts of one tensor."""


class Hosts:
    """All hosts of a training, as one of them sees it. Made by all at once.

    The default group of torch.distributed must be there; it is watched if it is a `WatchedGroup`.

    Args:
        timeout_seconds: After so long without an answer the others are given up.

    Attributes:
        parts: What each has of the optimizer's work and state, together 1.
        control: For small objects, from the Trainer's thread. One host's wish is heard there.
        place: Where in the training this host is, for messages.
        block: Whose gradients or values were exchanged last, for messages.
        is_asked_to_stop: Whether a signal asked this host to stop.
        stops: Whether one of them was asked: all do after this batch.
        travels: Returns the exception with which this host is about to end.
    """

    def __init__(self, *, timeout_seconds: float, watch: Watch) -> None:
        self.rank, self.num = dist.get_rank(), dist.get_world_size()
        self.parts: Sequence[float] = [1 / self.num] * self.num
        self.place, self.block = "before the first step", ""
        self.is_closed = self.is_asked_to_stop = self.stops = False
        self.travels: Callable[[], BaseException | None] = lambda: None
        self.timeout_seconds = timeout_seconds
        self.watch, watch.interrupt = watch, self._raise_lost
        self.control = Control(self, "step")
        self.gradients = Line(self, "gradients")
        self.weights = Line(self, "weights")
        if isinstance(dist.group.WORLD, WatchedGroup):
            dist.group.WORLD.hosts = self

    def check_same(self, what: Mapping[str, Any]) -> None:
        """Refuse hosts that are not set up alike: whose values of `what`, by their names, differ.

        Raises:
            ConfigurationError: Naming the first difference and who has it; on all hosts.
        """
        for host, theirs in enumerate(self.control.objects(dict(what))):
            for name in {**what, **theirs}:
                mine, other = what.get(name), theirs.get(name)
                if mine != other:
                    if isinstance(mine, list) and isinstance(other, list):
                        pairs = zip_longest(mine, other)
                        mine, other = next(pair for pair in pairs if pair[0] != pair[1])
                    with suppress(HostError):  # nobody ends before all have what they compare
                        self.control.objects(None)
                    raise ConfigurationError(
                        f"Hosts differ: {name} is {_short(mine)} on host {self.rank} and "
                        f"{_short(other)} on host {host}. Start the same code with the same "
                        "configuration everywhere; see docs/nodes.md."
                    )

    def close(self, error: BaseException, *, is_agreed: bool = False) -> None:
        """Wait for nobody any more. Whoever waits in another thread gets a `HostError`.

        Others are told the error, if they live. If it `is_agreed` that all end so, those who are
        not as far wait on for what they began.
        """
        if not self.is_closed:
            self.is_closed = True
            self.watch.close(None if is_agreed else f"raised {type(error).__name__}: {error}")

    def check_open(self) -> None:
        """Raise a HostError after `close`: nothing is begun with others while an error travels."""
        if self.is_closed:
            raise HostError(f"Host {self.rank} has given up what it does with others.")

    def wait(self, work: Any, what: str) -> None:
        """Wait for the end of an operation.

        Args:
            work: A collective: a wait for a send or receive that ends early breaks its group.
            what: Is exchanged, for messages.

        Raises:
            HostError: Another host has ended, or does not answer.
        """
        begun, patience, is_last_look = time.monotonic(), _SHORT, False
        while True:
            is_over = work.is_completed()  # asked before: it may end while its time runs out
            try:
                work.wait(patience)
            except RuntimeError as error:
                if is_over:
                    self.watch.look(_NAMED_SECONDS)
                    raise self._lost(what, str(error)) from error
            else:
                return
            if self.is_closed:
                raise HostError(f"The exchange of {what} was given up on host {self.rank}.")
            if is_last_look:
                raise self._lost(what)
            is_last_look = self.watch.lost is not None  # what it gave before may be on its way
            if time.monotonic() - begun > self.timeout_seconds:
                raise HostError(
                    f"Host {self.rank} waited {self.timeout_seconds:g} s for others while it "
                    f"exchanged {what} ({self.place}): one of them hangs, or is much slower. "
                    "RoundPipeStrategy(timeout_seconds=...) sets how long."
                )
            patience = _POLL

    def _lost(self, what: str | None, otherwise: str = "") -> HostError:
        host, why = self.watch.look(0) or (None, f"a connection ended: {otherwise}")
        where = self.place if what is None else f"while it exchanged {what}, {self.place}"
        if self.block and self.block not in (what or ""):
            where += f", last block {self.block}"
        if host == self.rank:
            return HostError(f"The other hosts gave up host {host} ({where}), because it {why}.")
        return lost_error(self.rank, host, where=where, why=f"it {why}")

    def _raise_lost(self) -> None:
        raise self._lost(None)


def lost_error(rank: int, lost: int | None, *, where: str, why: str) -> HostError:
    """Return what a host raises that has lost another one; None: it is not known which."""
    name = "another host" if lost is None else f"host {lost}"
    return HostError(
        f"Host {rank} lost {name} ({where}): {why}. Its own output may say more. Start again from "
        "the last checkpoint; see docs/nodes.md."
    )


class WatchedGroup(dist.ProcessGroup):
    """The group that Lightning, torchmetrics and user code use: waits there can be given up, too.

    The `inner` group does the work; nobody watches as long as there are no `hosts`.
    """

    hosts: Hosts | None = None

    def __init__(self, inner: Any) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]  # as in its C++
        self.inner = inner

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "gloo"


def _watched(name: str, *, waits: bool) -> Any:
    def run(self: WatchedGroup, *args: Any, **kwargs: Any) -> Any:
        if self.hosts is not None:
            self.hosts.check_open()
            if waits:
                self.hosts.control.objects(None)  # nobody waits here for a host that asks
        work = getattr(self.inner, name)(*args, **kwargs)
        if self.hosts is not None and waits:
            self.hosts.control.wait(work, f"values ({name})")
        return work

    return run


for _name in (
    *("allgather", "_allgather_base", "allgather_coalesced", "allreduce", "allreduce_coalesced"),
    *("alltoall", "alltoall_base", "barrier", "broadcast", "gather", "monitored_barrier"),
    *("reduce", "reduce_scatter", "_reduce_scatter_base", "scatter", "send", "recv"),
    *("recv_anysource",),
):
    _waits = _name not in ("send", "recv", "recv_anysource", "monitored_barrier")
    setattr(WatchedGroup, _name, _watched(_name, waits=_waits))


class Line:
    """A group of all hosts, for one thread; `what` goes over it, for messages.

    Whatever waits raises a HostError as `Hosts.wait` does.
    """

    def __init__(self, hosts: Hosts, what: str) -> None:
        self._hosts, self.what = hosts, what
        self._error: BaseException | None = None
        self._group = dist.new_group(backend="gloo")

    @contextmanager
    def kept_in_order(self) -> Iterator[None]:
        """Begin no more operations after an error: others may be left out, which all count."""
        try:
            yield
        except BaseException as error:
            self._error = self._error or error
            raise

    def wait(self, work: Any, what: str = "") -> None:
        """As `Hosts.wait`."""
        with self.kept_in_order():
            self._hosts.wait(work, what or self.what)

    def check_in_order(self) -> None:
        """Raise what kept operations from being begun or taken, if something has."""
        if self._error is not None:
            raise self._error

    def _check_open(self) -> None:
        self._hosts.check_open()
        if self._error is not None:
            raise HostError(f"Nothing more is exchanged after an error: {self._error}")

    def objects(self, value: T) -> list[T]:
        """Return every host's object, by rank. Pickled: between hosts that trust each other."""
        packed = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        num = self._hosts.num
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(num)]
        mine = torch.tensor([packed.numel()])
        self._check_open()
        self.wait(dist.all_gather(sizes, mine, group=self._group, async_op=True))
        counts = [int(size) for size in sizes]
        taken = self.swap([packed] * num, counts)
        return [pickle.loads(each.numpy().tobytes()) for each in taken]

    def swap(self, given: Sequence[Tensor], sizes: Sequence[int]) -> Sequence[Tensor]:
        """Give every host a tensor, and take one of each.

        Args:
            given: For each host, one-dimensional and of one dtype.
            sizes: Elements of what each host gives to this one.

        Returns:
            What each gave: parts of one new tensor.
        """
        return self.begin(torch.cat(list(given)), [each.numel() for each in given], sizes)()

    def begin(self, sent: Tensor, counts: Sequence[int], sizes: Sequence[int]) -> Taken:
        """Begin what `swap` does; return what waits for what each host gave.

        Args:
            sent: What is given to the hosts, one after the other.
            counts: Elements for each host.
            sizes: Elements of each host.
        """
        self._check_open()
        taken = sent.new_empty(sum(sizes))
        work = dist.all_to_all_single(
            taken, sent, list(sizes), list(counts), group=self._group, async_op=True
        )

        what = self.what  # of the next operations it is another

        def parts() -> Sequence[Tensor]:
            self.wait(work, what)
            found: Sequence[Tensor] = taken.split(list(sizes))
            return found

        return parts


class _Wish:
    """What `Control.ask` sends."""


class Control(Line):
    """Carries small objects between the Trainers' threads, and wishes of single hosts.

    `serve` does what a host may wish that all do together; it is called in the same order on all.
    """

    serve: Callable[[], None]

    def ask(self) -> None:
        """Have all hosts call `serve`: the others do when they next send an object."""
        self.objects(_Wish())

    def objects(self, value: T) -> list[T]:
        """As of `Line`; refused while an exception travels, of which others cannot know."""
        error = self._hosts.travels()
        if error is not None:
            self._hosts.close(error)
        while True:
            said = super().objects(value)
            if not any(isinstance(each, _Wish) for each in said):
                return said
            self.serve()
            if isinstance(value, _Wish):
                return said


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else f"{text[:77]}..."
