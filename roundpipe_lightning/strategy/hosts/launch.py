"""How hosts are launched and meet: docs/nodes.md has it for users."""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import Future, wait
from datetime import timedelta
from threading import Thread
from typing import Any

import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning_utilities.core.rank_zero import rank_zero_only
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _get_default_store

from roundpipe_lightning.engine.exchange import hosts
from roundpipe_lightning.engine.exchange.hosts import Hosts, WatchedGroup, lost_error
from roundpipe_lightning.errors import ConfigurationError, HostError

_BACKEND = "roundpipe"
_AT_THE_START = "before all had met"
_POLL_SECONDS = 0.1
_NEEDED = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK")


def check_launch(environment: ClusterEnvironment | None, num_nodes: int) -> None:
    """Refuse everything but one process on each of `num_nodes` hosts."""
    right = (
        f"Start one process on each host, and Trainer(num_nodes={num_nodes}): torchrun "
        f"--nnodes={num_nodes} --nproc-per-node=1 --rdzv-backend=c10d --rdzv-endpoint=HOST0:PORT "
        f"train.py trainer.num_nodes={num_nodes}, or SLURM's --nodes={num_nodes} "
        "--ntasks-per-node=1, or by hand with MASTER_ADDR, MASTER_PORT and NODE_RANK set; see "
        "docs/nodes.md."
    )
    by_hand = environment is None or type(environment) is LightningEnvironment
    if by_hand:
        missing = [name for name in _NEEDED if name not in os.environ] if num_nodes > 1 else []
        if missing:
            raise ConfigurationError(f"num_nodes={num_nodes}, but {missing[0]} is not set. {right}")
        num, local = num_nodes, int(os.environ.get("LOCAL_RANK", "0"))
        rank = int(os.environ.get("NODE_RANK", "0")) if num_nodes > 1 else 0
        if not 0 <= rank < num_nodes:
            raise ConfigurationError(
                f"NODE_RANK={rank} with num_nodes={num_nodes}: hosts count from 0. {right}"
            )
    else:
        assert environment is not None
        try:
            num, local = environment.world_size(), environment.local_rank()
        except KeyError:  # SLURMEnvironment() outside of a job step has launched none
            num, local = 1, 0
    if num == num_nodes and local == 0:
        return
    if by_hand:
        raise ConfigurationError(
            f"LOCAL_RANK={local} is set, which says that this is not the first process of its "
            "host, but strategy='roundpipe' drives all devices of a host from one. Unset it; see "
            "docs/nodes.md."
        )
    if num_nodes == 1:
        raise ConfigurationError(
            f"{num} processes were launched, but strategy='roundpipe' drives all devices of a host "
            "from one process. On one host, start the script once, without torchrun or with one "
            "task per node (--ntasks-per-node=1), and set Trainer(devices=N). On several, set "
            "Trainer(num_nodes=...), too; see docs/nodes.md."
        )
    raise ConfigurationError(
        f"{num} processes were launched for num_nodes={num_nodes}, this one as number {local} of "
        f"its host; strategy='roundpipe' drives all devices of a host from one process. {right}"
    )


def take_rank(environment: ClusterEnvironment | None, num_nodes: int) -> int:
    """Return this host's number, and tell Lightning."""
    if environment is None or type(environment) is LightningEnvironment:
        rank = int(os.environ["NODE_RANK"])
    else:
        rank = environment.global_rank()
    if environment is not None:
        environment.set_global_rank(rank)
        environment.set_world_size(num_nodes)
    rank_zero_only.rank = fabric_rank_zero_only.rank = rank  # type: ignore[attr-defined]
    return rank


def connect(
    environment: ClusterEnvironment, *, rank: int, num_nodes: int, timeout_seconds: float
) -> Hosts:
    """Meet the other hosts; raises as `Meeting.hold`."""
    world = dist.group.WORLD
    known = world.hosts if isinstance(world, WatchedGroup) else None
    if known is None:
        known = Meeting(environment, rank, num_nodes, timedelta(seconds=timeout_seconds)).hold()
    known.timeout_seconds = timeout_seconds
    return known


class Meeting:
    """Hosts that come one after the other. What waits for them cannot be interrupted: a thread."""

    def __init__(
        self, environment: ClusterEnvironment, rank: int, num_nodes: int, timeout: timedelta
    ) -> None:
        self._rank, self._num, self._timeout = rank, num_nodes, timeout
        self._main = (environment.main_address, environment.main_port)  # of host 0
        self._answered: float | None = None  # when the store did last, while others are waited for
        try:
            self._watch = hosts.Watch(rank, main=self._main)
        except OSError as error:
            raise self._no_main(error) from error

    def hold(self) -> Hosts:
        """Return when all have met.

        Raises:
            ConfigurationError: They were started for another number of hosts.
            HostError: One of them has not come in time, or was lost since.
        """
        met = Future[Hosts]()
        Thread(target=self._run, args=(met,), name="roundpipe-meeting", daemon=True).start()
        try:
            while not wait([met], _POLL_SECONDS).done:
                lost, answered = self._watch.look(0), self._answered
                if answered is not None and time.monotonic() - answered > hosts.PATIENCE_SECONDS:
                    lost = (0, "or the link to it is down")
                if lost is not None:
                    raise lost_error(self._rank, lost[0], where=_AT_THE_START, why=f"it {lost[1]}")
            return met.result()
        except BaseException as error:
            self._watch.close(f"raised {type(error).__name__}: {error}")
            raise

    def _run(self, met: Future[Hosts]) -> None:
        try:
            store = _get_default_store() if dist.is_initialized() else self._store()
            addresses = self._wait_for_all(store)
            self._watch.begin(addresses)
            if not dist.is_initialized():
                if _BACKEND not in dist.Backend.backend_list:
                    dist.Backend.register_backend(_BACKEND, _watched_gloo, devices=["cpu"])
                dist.init_process_group(
                    _BACKEND,
                    store=PrefixStore(addresses[0][2], store),
                    rank=self._rank,
                    world_size=self._num,
                    timeout=self._timeout,
                )
            seconds = self._timeout.total_seconds()
            met.set_result(Hosts(timeout_seconds=seconds, watch=self._watch))
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            met.set_exception(error)

    def _store(self) -> Store:
        try:
            server = TCPStore(
                *self._main,
                is_master=self._rank == 0 and not _by_agent(),
                wait_for_workers=False,
                timeout=self._timeout,
            )
        except dist.DistNetworkError as error:
            raise self._no_main(error) from error
        return PrefixStore("roundpipe", server)

    def _wait_for_all(self, store: Store) -> list[Any]:
        """Return what every host has told of itself, by rank.

        An agent's store still has what hosts told before a restart. So each tells the secrets that
        it has read, again and again: who knows this host's is there now.
        """
        *_, mine = address = self._watch.address
        begun = time.monotonic()
        told, heard = dict[int, Any](), dict[int, float]()  # when it was new
        try:
            while True:
                now = self._answered = time.monotonic()
                for host in range(self._num):
                    if store.check([f"host/{host}"]):
                        new = json.loads(store.get(f"host/{host}"))
                        heard[host] = heard[host] if told.get(host) == new else now
                        told[host] = new
                known = [of["address"][2] for of in told.values()]
                said = {"num": self._num, "address": address, "known": known, "time": now}
                store.set(f"host/{self._rank}", json.dumps(said))
                there = [host for host in told if mine in told[host]["known"]]
                for host, theirs in ((host, told[host]["num"]) for host in there):
                    if theirs != self._num:
                        raise ConfigurationError(
                            f"num_nodes={self._num} on host {self._rank}, but {theirs} on host "
                            f"{host}. Set the same number on every host."
                        )
                if len(there) == self._num:
                    self._answered = None
                    return [told[host]["address"] for host in range(self._num)]
                lost = min(there if _by_agent() else told, key=heard.__getitem__, default=None)
                if lost is not None and now - heard[lost] > hosts.PATIENCE_SECONDS:
                    why = f"it came, and is not heard since {hosts.PATIENCE_SECONDS:g} s"
                    raise lost_error(self._rank, lost, where=_AT_THE_START, why=why)
                if now - begun > self._timeout.total_seconds():
                    missing = ", ".join(str(n) for n in range(self._num) if n not in there)
                    raise HostError(
                        f"Host {self._rank} has waited {now - begun:.0f} s for hosts that have not "
                        f"come: {missing} of {self._num}. Start them, or look at their output."
                    )
                time.sleep(_POLL_SECONDS)
        except HostError:
            raise
        except RuntimeError as error:
            why = f"it has ended ({error})"
            raise lost_error(self._rank, 0, where=_AT_THE_START, why=why) from error

    def _no_main(self, error: Exception) -> HostError:
        address, port = self._main
        return HostError(
            f"Host {self._rank} cannot have port {port} of {address}: host 0 has not been started, "
            "its address or its port is another one, or something between the hosts does not let "
            f"it through. ({error})"
        )


def _by_agent() -> bool:
    """Whether torchrun's agent has the store, also while it restarts the hosts."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def _watched_gloo(store: Store, rank: int, num: int, timeout: timedelta) -> WatchedGroup:
    return WatchedGroup(ProcessGroupGloo(store, rank, num, timeout))


def disconnect() -> None:
    """Close all connections, after an error."""
    if dist.is_initialized():
        dist.destroy_process_group()
