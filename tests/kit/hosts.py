import faulthandler
import multiprocessing
import os
import pickle
import socket
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

_SECONDS = 600.0  # a host that waits for another one says so long before

_context = multiprocessing.get_context("forkserver")
# The server imports once what every host needs.
_context.set_forkserver_preload(["roundpipe_lightning", "tests.kit.training", "tests.kit.hosts"])


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
        if not self.results.poll(_SECONDS):
            self.process.kill()
            return TimeoutError("a host hangs")
        try:
            result = pickle.loads(self.results.recv_bytes())
        except EOFError:
            result = ProcessLookupError("a host was killed")
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
        given = {**variables, "MASTER_PORT": port}
        process = _context.Process(target=_serve, args=(theirs, rank, given, function, args))
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
    faulthandler.dump_traceback_later(_SECONDS - 5)
    try:
        result = function(rank, *args)
    except BaseException as error:  # noqa: BLE001 - the test looks at it
        traceback.print_exc()
        result = error
    results.send_bytes(pickle.dumps(result))
