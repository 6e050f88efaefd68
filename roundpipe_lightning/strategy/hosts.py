"""Several hosts, one process each: how they are launched and meet, what each gets of the data.

docs/nodes.md has it for users.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.pytorch import LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.distributed import PrefixStore, ReduceOp, Store, TCPStore  # type: ignore[attr-defined]
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from roundpipe_lightning.engine.exchange.hosts import Hosts
from roundpipe_lightning.engine.update.fingerprint import fingerprint
from roundpipe_lightning.errors import ConfigurationError, DataError, HostError
from roundpipe_lightning.optim import HostAdamW
from roundpipe_lightning.precision import RoundPipePrecision
from roundpipe_lightning.strategy.options import Options

_NEEDED = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK")

# Launch ------------------------------------------------------------------------------------------


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
    if not dist.is_initialized():
        by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
        server = TCPStore(
            environment.main_address,
            environment.main_port,
            is_master=rank == 0 and not by_agent,
            wait_for_workers=False,
            timeout=timeout,
        )
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = PrefixStore(f"roundpipe/{attempt}", server)
        _check_num_nodes(store, rank=rank, num_nodes=num_nodes)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=num_nodes, timeout=timeout
        )
    return Hosts(timeout_seconds=timeout_seconds)


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


def reduce(parts: Sequence[Tensor], operation: ReduceOp | str | None) -> Tensor:
    """Reduce tensors of the hosts, in their order, so that all get the same bits.

    Args:
        parts: Every host's, of one shape; whole numbers have a mean that is none.
        operation: As in `torch.distributed`, or `"mean"`.
    """
    name = "mean" if operation is None else str(operation).rpartition(".")[2].lower()
    stacked = torch.stack(list(parts))
    ways: dict[str, Callable[[], Tensor]] = {
        "mean": lambda: (stacked if stacked.is_floating_point() else stacked.double()).mean(0),
        "sum": lambda: stacked.sum(0),
        "min": lambda: stacked.amin(0),
        "max": lambda: stacked.amax(0),
        "product": lambda: stacked.prod(0),
    }
    ways["avg"] = ways["mean"]
    if name not in ways:
        raise ConfigurationError(f"Hosts cannot reduce by {operation}; {', '.join(ways)}.")
    return ways[name]()


# Data --------------------------------------------------------------------------------------------


class HostBatches:
    """This host's part of each global batch: one of every `num` lists of a batch sampler.

    So hosts of 8 samples train on the batches of one host of 16. What is left over at the end of
    a training's epoch is shared out evenly; in an evaluation the first hosts take it.

    Args:
        lists: Yields lists of indices, on every host the same ones.
        hosts: All hosts.
        trains: Whether every host needs a part of what is left over.
    """

    def __init__(self, lists: Any, hosts: Hosts, *, trains: bool) -> None:
        self._lists, self._hosts, self._trains = lists, hosts, trains

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_lists"], name)

    @property
    def _drops(self) -> bool:
        return self._trains and bool(getattr(self._lists, "drop_last", False))

    def __len__(self) -> int:
        whole, left = divmod(len(self._lists), self._hosts.num)
        if self._trains:
            return whole + (left > 0 and not self._drops)
        return whole + (self._hosts.rank < left)

    def __iter__(self) -> Iterator[list[Any]]:
        hosts = self._hosts
        state = torch.default_generator.get_state()
        torch.default_generator.set_state(hosts.control.objects(state)[0])  # draws the order
        group: list[list[Any]] = []
        for indices in self._lists:
            group.append(list(indices))
            if len(group) == hosts.num:
                yield group[hosts.rank]
                group = []
        if not self._trains:
            yield from group[hosts.rank : hosts.rank + 1]
        elif group and not self._drops:
            left = [index for indices in group for index in indices]
            if len(left) < hosts.num:
                raise DataError(
                    f"The last batch of the epoch has {len(left)} samples for {hosts.num} hosts. "
                    "Set drop_last=True in the DataLoader, or another batch_size."
                )
            ends = [len(left) * host // hosts.num for host in (hosts.rank, hosts.rank + 1)]
            yield left[slice(*ends)]


def divided(loader: Any, hosts: Hosts, *, trains: bool) -> Any:
    """Return a loader of this host's part of the batches.

    Args:
        loader: The user's; it stays as it is. One with a `DistributedSampler` is divided already.
        hosts: All hosts.
        trains: Whether it is for training.

    Raises:
        ConfigurationError: It cannot be divided by its indices.
    """
    if isinstance(getattr(loader, "sampler", None), DistributedSampler):
        return loader
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        raise ConfigurationError(
            f"{type(loader).__name__} gives no indices, so its samples cannot be divided among "
            "hosts. Use a DataLoader of a data set with indices; or divide the samples yourself, "
            "equally many batches for every host, and set Trainer(use_distributed_sampler=False)."
        )
    if loader.batch_sampler is None:
        raise ConfigurationError(
            "DataLoader(batch_size=None) on several hosts: batches cannot be divided by indices. "
            "Set a batch_size or a batch_sampler."
        )
    mine = copy(loader)
    vars(mine).update(
        batch_sampler=HostBatches(loader.batch_sampler, hosts, trains=trains), _iterator=None
    )
    if not trains and len(loader) < hosts.num:
        raise ConfigurationError(
            f"{len(loader)} batches to evaluate for {hosts.num} hosts: some would have none. Set a "
            "smaller batch_size in the DataLoader."
        )
    return mine


# What is not there yet, and what must be the same ------------------------------------------------


def check_supported(
    module: LightningModule,
    *,
    options: Options,
    precision: RoundPipePrecision,
    checks_gradients: bool,
    hooks: Iterable[str],
) -> None:
    """Refuse a training that would not give one host's numbers on several.

    Args:
        module: The user's module.
        options: The strategy's settings.
        precision: The precision plugin.
        checks_gradients: Whether gradients that are not finite are to be refused.
        hooks: Who may look at gradients.

    Raises:
        ConfigurationError: Naming the first thing, and the way out.
    """
    norms = [name for name, part in module.named_modules() if _keeps_statistics(part)]
    hook = next(iter(hooks), None)
    reasons = {
        "update='async'": options.update == "async",
        "precision='16-mixed' (use 'bf16-mixed')": precision.scaler is not None,
        "stochastic_rounding=True": precision.stochastic_rounding,
        "automatic_optimization=False": not module.automatic_optimization,
        "check_gradients=True or detect_anomaly=True": checks_gradients,
        f"{norms[0] if norms else ''!r}, a BatchNorm whose statistics would be of one host's "
        "samples,": bool(norms),
        f"{hook}, which may look at gradients (each host has a part of their sums; a class whose "
        "hooks do not look says `requires_optimizer_sync = False`),": hook is not None,
    }
    for what, applies in reasons.items():
        if applies:
            raise ConfigurationError(
                f"{what} does not work on several hosts yet. Leave it out, or set num_nodes=1; see "
                "docs/nodes.md."
            )


def check_optimizers(optimizers: Iterable[Optimizer]) -> None:
    """Refuse optimizers whose state does not lie in memory: a host keeps a part of it, there.

    Raises:
        ConfigurationError: Naming the setting.
    """
    for optimizer in optimizers:
        if isinstance(optimizer, HostAdamW) and optimizer.state_place.disk_bytes:
            raise ConfigurationError(
                "HostAdamW(offload='disk') does not work on several hosts yet. Leave offload out "
                "(moments='8bit' needs a quarter of the memory), or set num_nodes=1."
            )


def _keeps_statistics(part: nn.Module) -> bool:
    return isinstance(part, _BatchNorm) and part.track_running_stats and part.training


def check_same(hosts: Hosts, trainer: Trainer, options: Options) -> None:
    """Refuse hosts that would train something else, before the first batch.

    Raises:
        ConfigurationError: Naming the first difference.
    """
    named = list(trainer.lightning_module.named_parameters())
    hosts.check_same(
        {
            "torch's version": torch.__version__,
            "precision": str(trainer.precision),
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "gradient_clip_val": trainer.gradient_clip_val,
            "gradient_dtype": options.gradient_dtype,
            "max_steps": trainer.max_steps,
            "max_epochs": trainer.max_epochs,
            "the number of training batches": trainer.num_training_batches,
            "the step that training begins with": trainer.global_step,
            "the list of parameters": [
                (name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in named
            ],
            "the fingerprint of the parameters (call seed_everything before the model is made)": [
                fingerprint(p) for _, p in named
            ],
        }
    )


def shares_of(counts: Sequence[float]) -> Sequence[float]:
    """Return the shares of counts in their sum; equal ones where all are 0."""
    total = sum(counts)
    return [count / total if total else 1 / len(counts) for count in counts]
