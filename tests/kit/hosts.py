from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import socket
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

from lightning.pytorch import Trainer

from roundpipe_lightning import RoundPipeStrategy
from roundpipe_lightning.testing import EmulatedStrategy
from tests.kit.training import make_trainer

_SECONDS = 600.0  # a host that waits for another one says so long before
_LEAVE_SECONDS = 5.0  # for an orderly end

_PATH = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
_context = multiprocessing.get_context("forkserver")
# The server imports once what hosts need, the modules of the functions that they run among it.
_context.set_forkserver_preload(
    [
        "tests.kit.hosts",
        "tests.lightning.test_checkpoint_exchange",
        "tests.lightning.test_hosts",
        "tests.lightning.test_hosts_memory",
    ]
)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def run_on_hosts(
    num: int,
    function: Callable[..., Any],
    *args: Any,
    environments: Sequence[Mapping[str, str]] = (),
) -> list[Any]:
    """Run a function of a test's module on several hosts, and return what each gave.

    Args:
        num: How many hosts.
        function: Called with the host's number and `args`.
        args: Can be pickled.
        environments: Variables of each host; empty: those of a launch by hand.

    Returns:
        By host: what the function returned, or the exception that it raised.
    """
    started = start_hosts(num, function, *args, environments=environments)
    return [host.result() for host in started]


def host_trainer(
    folder: Path,
    options: Mapping[str, Any] | None = None,
    *,
    kind: type[RoundPipeStrategy] = RoundPipeStrategy,
    **flags: Any,
) -> Trainer:
    strategy = kind(**{"timeout_seconds": 60, **(options or {})})
    return make_trainer(folder, strategy=strategy, **{"num_nodes": 2, **flags})


def raised(runs: Sequence[Any]) -> Sequence[Any]:
    """Raise the first error of a host; else return what all of them gave."""
    for seen in runs:
        if isinstance(seen, BaseException):
            raise seen
    return runs


class PlannedAsGpu(EmulatedStrategy):
    """Plans are made as for devices with memory of their own."""

    _computes_on_host = False


class HostsAtWork:
    """Hosts that run one function after the other. A context manager.

    After an exception of a host they may be out of step: others are started.
    """

    def __init__(self, num: int) -> None:
        self._num = num
        self._start()

    def _start(self) -> None:
        pipes = [_context.Pipe() for _ in range(self._num)]
        self._mine = [mine for mine, _ in pipes]
        self._started = start_hosts(self._num, _work, [theirs for _, theirs in pipes])
        for _, theirs in pipes:
            theirs.close()

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """As `run_on_hosts`."""
        for each in self._mine:
            each.send_bytes(pickle.dumps((function, args)))
        found = [_received(each) for each in self._mine]
        if any(isinstance(each, BaseException) for each in found):
            self._stop()
            self._start()
        return found

    def _stop(self) -> None:
        for mine, host in zip(self._mine, self._started, strict=True):
            mine.close()
            host.process.join(_LEAVE_SECONDS)
            host.process.kill()

    def __enter__(self) -> HostsAtWork:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()


def _work(rank: int, pipes: Sequence[Connection]) -> None:
    for host, other in enumerate(pipes):
        if host != rank:
            other.close()  # else nobody sees that it was killed
    with suppress(EOFError):
        while True:
            faulthandler.cancel_dump_traceback_later()
            _answer(pipes[rank], rank, *pickle.loads(pipes[rank].recv_bytes()))


def _answer(
    results: Connection, rank: int, function: Callable[..., Any], args: Sequence[Any]
) -> None:
    """Send what a function returns, or its error; show where it is if it hangs."""
    faulthandler.dump_traceback_later(_SECONDS - 5)
    try:
        result = function(rank, *args)
    except BaseException as error:  # noqa: BLE001 - the test looks at it
        traceback.print_exc()
        result = error
    results.send_bytes(pickle.dumps(result))


def _received(results: Connection) -> Any:
    if not results.poll(_SECONDS):
        return TimeoutError("a host hangs")
    try:
        return pickle.loads(results.recv_bytes())
    except (EOFError, ConnectionResetError):
        return ProcessLookupError("a host was killed")


@dataclass(frozen=True)
class StartedHost:
    """A host that runs.

    Attributes:
        process: Its own.
        results: Where what it returns will come from.
    """

    process: Any
    results: Connection

    def result(self) -> Any:
        """Wait for its end; return what the function returned, or the exception it raised."""
        result = _received(self.results)
        if isinstance(result, TimeoutError):
            self.process.kill()
        self.process.join(_SECONDS)
        return result


def start_hosts(
    num: int,
    function: Callable[..., Any],
    *args: Any,
    environments: Sequence[Mapping[str, str]] = (),
) -> list[StartedHost]:
    """Do what `run_on_hosts` does, but do not wait."""
    port = str(free_port())
    by_hand = [
        {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NODE_RANK": str(rank)}
        for rank in range(num)
    ]
    started = []
    for rank, variables in enumerate(environments or by_hand):
        mine, theirs = _context.Pipe(duplex=False)
        given = {"MASTER_PORT": port, **variables}
        process = _context.Process(target=_serve, args=(theirs, rank, given, function, args))
        with mock.patch.dict(os.environ, PYTHONPATH=_PATH):  # the first one starts the server
            process.start()
        theirs.close()
        started.append(StartedHost(process, mine))
    return started


def _serve(
    results: Connection,
    rank: int,
    variables: Mapping[str, str],
    function: Callable[..., Any],
    args: Sequence[Any],
) -> None:
    os.environ.update(variables)
    _answer(results, rank, function, args)
