"""One process per host with any number of devices: what Lightning is told, the plugins it gets."""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.accelerators import Accelerator, CUDAAccelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor
from torch.distributed import ReduceOp

from roundpipe_lightning.checkpoint.io import RoundPipeCheckpointIO
from roundpipe_lightning.engine.exchange.hosts import Hosts
from roundpipe_lightning.errors import ConfigurationError, HostError
from roundpipe_lightning.precision import RoundPipePrecision
from roundpipe_lightning.strategy import checks, compat
from roundpipe_lightning.strategy.hosts import agreement, launch

T = TypeVar("T")


class OneProcessStrategy(ParallelStrategy):
    """The part of a strategy that knows of devices, processes and plugins, and of no training."""

    num_nodes = 1  # number of hosts; the Trainer sets it to its flag

    world_size = 1
    _rank = 0
    _hosts: Hosts | None = None
    """All hosts, where there are several; Lightning's own group carries next to nothing."""

    _evaluated = ""
    """The step of an evaluation in which this host is; nothing between two."""

    stochastic_rounding = False  # whether the precision is to round stochastically

    def __repr__(self) -> str:
        name = f"{type(self).__module__}.{type(self).__qualname__}"
        return f"<{name}, a strategy for lightning.pytorch.Trainer>"

    @property
    def _precision(self) -> NoReturn:
        """Fabric, and nobody else, asks a strategy for this."""
        checks.refuse_fabric()

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def global_rank(self) -> int:
        """The host's; 0 where there is one, whatever a cluster's environment knows."""
        return self._rank

    @property
    def local_rank(self) -> int:
        return 0

    @property
    def node_rank(self) -> int:
        return self._rank

    @property
    def is_distributed(self) -> bool:
        return self.num_nodes > 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.num_nodes, "rank": self._rank}

    def model_to_device(self) -> None:
        """Leave the module in host memory."""

    def reduce(
        self, tensor: Any, group: Any = None, reduce_op: ReduceOp | str | None = "mean"
    ) -> Any:
        """As `agreement.reduce`; `group` is that of all hosts."""
        del group
        if self._hosts is None or not isinstance(tensor, Tensor):
            return tensor
        return agreement.reduce(self._of_hosts(self._hosts, tensor.detach().cpu()), reduce_op)

    def all_gather(
        self,
        tensor: Tensor,
        group: Any = None,
        sync_grads: bool = False,  # noqa: FBT001, FBT002 - Lightning's signature
    ) -> Tensor:
        if self._hosts is None:
            return tensor
        if sync_grads:
            raise ConfigurationError("all_gather(sync_grads=True) does not work on several hosts.")
        del group
        return torch.stack(self._of_hosts(self._hosts, tensor.detach().cpu())).to(tensor.device)

    def _of_hosts(self, hosts: Hosts, value: T) -> list[T]:
        """Return every host's value, by rank; HostError: they are not of the same step."""
        told: list[Any] = hosts.control.objects((self._evaluated, value))
        for host, each in enumerate(told):
            theirs = each[0] if isinstance(each, tuple) else "something else"
            if theirs != self._evaluated:
                steps = (self._evaluated, theirs)
                mine, other = (f"in {step}" if step else "past its last step" for step in steps)
                raise HostError(
                    f"Host {hosts.rank} is {mine}, host {host} {other}: they have different "
                    "numbers of batches to evaluate, so steps cannot put anything together "
                    "(all_gather). Do that in on_validation_epoch_end, or give all as many."
                )
        return [value for _, value in told]

    def barrier(self, name: str | None = None) -> None:  # noqa: ARG002 - Lightning's signature
        if self._hosts is not None:
            self._hosts.control.objects(None)

    def broadcast(self, obj: T, src: int = 0) -> T:
        if self._hosts is None:
            return obj
        return self._hosts.control.objects(obj if self._rank == src else None)[src]  # type: ignore[return-value]

    # Plugins that the strategy imposes -----------------------------------------------------------

    @property
    def precision_plugin(self) -> RoundPipePrecision:
        """The precision; Lightning's own plugins are replaced by ours with the same precision."""
        plugin = self._precision_plugin
        return plugin if isinstance(plugin, RoundPipePrecision) else RoundPipePrecision()

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        rounds = self.stochastic_rounding
        self._precision_plugin = (
            None
            if plugin is None
            else RoundPipePrecision.from_lightning(plugin, stochastic_rounding=rounds)
        )

    @property
    def accelerator(self) -> Accelerator | None:
        """Lightning's accelerator; the one for CUDA also knows the workers' devices."""
        return self._trainers_accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Accelerator | None) -> None:
        if type(accelerator) is CUDAAccelerator:
            accelerator = checks.WorkersOnCuda(lambda: self.parallel_devices or ())
        self._trainers_accelerator = accelerator

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """Plugin that writes checkpoints; an empty wrapper (`AsyncCheckpointIO()`) gets ours."""
        io = self._checkpoint_io
        if io is None:
            io = self._checkpoint_io = RoundPipeCheckpointIO()
        elif isinstance(io, compat.WrappingCheckpointIO) and io.checkpoint_io is None:
            io.checkpoint_io = RoundPipeCheckpointIO()
        return io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        self._checkpoint_io = io

    def _configure_launcher(self) -> None:
        """Check the Trainer's flags: this is the last the Trainer does with a strategy it makes."""
        checks.check_trainer_flags(self)
        launch.check_launch(self.cluster_environment, self.num_nodes)
        self.world_size = self.num_nodes
        if self.num_nodes > 1:
            self._rank = launch.take_rank(self.cluster_environment, self.num_nodes)

    def setup_environment(self) -> None:
        """Prepare the devices; nothing is to be done for CPU workers."""
        if self._computes_on_host:
            return
        assert self.accelerator is not None
        for device in reversed(self.parallel_devices or ()):  # the first one stays the current one
            self.accelerator.setup_device(device)

    @property
    def _computes_on_host(self) -> bool:
        return all(device.type == "cpu" for device in self.parallel_devices or ())
