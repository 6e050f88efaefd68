"""How hosts are launched and meet: docs/nodes.md has it for users."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning_utilities.core.rank_zero import rank_zero_only
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, TCPStore  # type: ignore[attr-defined]

from roundpipe_lightning.engine.exchange.hosts import Hosts, WatchedGroup
from roundpipe_lightning.errors import ConfigurationError, HostError

_BACKEND = "roundpipe"
_NEEDED = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK")


def check_launch(environment: ClusterEnvironment | None, num_nodes: int) -> None:
    """Refuse everything but one process on each of `num_nodes` hosts.

    Raises:
        ConfigurationError: Naming the command that would be right.
    """
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
    """Meet the other hosts.

    Raises:
        ConfigurationError: They were started for another number of hosts.
    """
    timeout = timedelta(seconds=timeout_seconds)
    main = (environment.main_address, environment.main_port)
    if not dist.is_initialized():
        by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
        is_server = rank == 0 and not by_agent
        server = TCPStore(*main, is_master=is_server, wait_for_workers=False, timeout=timeout)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = PrefixStore(f"roundpipe/{attempt}", server)
        _check_num_nodes(store, rank=rank, num_nodes=num_nodes)
        if _BACKEND not in dist.Backend.backend_list:
            dist.Backend.register_backend(_BACKEND, _watched_gloo, devices=["cpu"])
        dist.init_process_group(
            _BACKEND, store=store, rank=rank, world_size=num_nodes, timeout=timeout
        )
    world = dist.group.WORLD
    known = world.hosts if isinstance(world, WatchedGroup) else None
    hosts = known or Hosts(timeout_seconds=timeout_seconds, main=main)
    hosts.timeout_seconds = timeout_seconds
    return hosts


def _watched_gloo(store: Store, rank: int, num: int, timeout: timedelta) -> WatchedGroup:
    return WatchedGroup(ProcessGroupGloo(store, rank, num, timeout))


def disconnect() -> None:
    """Close all connections, after an error."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _check_num_nodes(store: Store, *, rank: int, num_nodes: int) -> None:
    store.set(f"num_nodes/{rank}", str(num_nodes))
    for host in range(num_nodes) if rank == 0 else [0]:
        try:
            theirs = int(store.get(f"num_nodes/{host}"))
        except RuntimeError as error:
            raise HostError(
                f"Host {rank} lost host 0 at the start: its own output says why. ({error})"
            ) from error
        if theirs != num_nodes:
            raise ConfigurationError(
                f"num_nodes={num_nodes} on host {rank}, but {theirs} on host {host}. Set the same "
                "number on every host."
            )
