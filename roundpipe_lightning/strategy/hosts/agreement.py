"""What several hosts must have alike, what they cannot train yet, and what they reduce."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from roundpipe_lightning.engine.exchange.hosts import Hosts
from roundpipe_lightning.engine.update.fingerprint import fingerprint
from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.optim import HostAdamW
from roundpipe_lightning.precision import RoundPipePrecision
from roundpipe_lightning.strategy.options import Options


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
