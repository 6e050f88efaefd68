"""What several hosts must have alike, what they cannot train yet, and what they reduce."""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.distributed import ReduceOp
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from roundpipe_lightning.engine.exchange.hosts import Hosts
from roundpipe_lightning.engine.store.block_layout import fingerprint
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
    """Refuse what would not give one host's numbers on several; `hooks` may look at gradients."""
    batch_norms = [(n, m) for n, m in module.named_modules() if isinstance(m, _BatchNorm)]
    norms = [name for name, part in batch_norms if part.track_running_stats and part.training]
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
    """Refuse optimizers whose state does not lie in memory: a host keeps a part of it, there."""
    for optimizer in optimizers:
        if isinstance(optimizer, HostAdamW) and optimizer.state_place.disk_bytes:
            raise ConfigurationError(
                "HostAdamW(offload='disk') does not work on several hosts yet. Leave offload out "
                "(moments='8bit' needs a quarter of the memory), or set num_nodes=1."
            )


_SAME_OPTIONS = (
    *("microbatching", "update", "recompute", "loss", "blocks", "trust_rows"),
    *("compile", "upload_dtype", "gradient_dtype"),
)
_SAME_FLAGS = (
    *("precision", "accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm"),
    *("max_steps", "max_epochs", "val_check_interval", "check_val_every_n_epoch"),
    *("num_training_batches", "reload_dataloaders_every_n_epochs"),
)


def check_same(
    hosts: Hosts, trainer: Trainer, options: Options, *, settings: Mapping[str, Any]
) -> None:
    """Refuse hosts that would train something else; `settings` are others to compare, by name."""
    module = trainer.lightning_module
    named = list(module.named_parameters())
    hyperparameters = {f"hparams.{key}": repr(value) for key, value in module.hparams.items()}
    of_groups = {
        f"{key} of group {number} of {type(optimizer).__name__}": repr(value)
        for optimizer in trainer.optimizers
        for number, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if key != "params"
    }
    hosts.check_same(
        {
            "torch's version": torch.__version__,
            "Lightning's version": lightning.__version__,
            "the code of roundpipe_lightning": _code(Path(__file__).parents[2]),
            f"the code of {type(module).__name__}": _source(type(module)),
            **{name: getattr(trainer, name) for name in _SAME_FLAGS},
            **{name: getattr(options, name) for name in _SAME_OPTIONS},
            **hyperparameters,
            **of_groups,
            **settings,
            "the step that training begins with": trainer.global_step,
            "the list of parameters": [
                (name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in named
            ],
            "the fingerprint of a parameter (call seed_everything before the model is made)": [
                (name, fingerprint(p)) for name, p in named
            ],
        }
    )


def ending_exception(trainer: Trainer) -> BaseException | None:
    """Return the exception with which a run ends here alone, while hooks are told of it."""
    error = sys.exc_info()[1]
    return error if trainer.interrupted and not isinstance(error, SIGTERMException) else None


def _code(folder: Path) -> str:
    """Return what differs where Python files differ."""
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(file.relative_to(folder).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def _source(kind: type) -> str:
    try:
        return hashlib.sha256(inspect.getsource(kind).encode()).hexdigest()[:12]
    except (OSError, TypeError):  # typed into a console, say
        return "unknown"


def reduce(parts: Sequence[Tensor], operation: ReduceOp | str | None) -> Tensor:
    """Reduce tensors of the hosts, in their order, so that all get the same bits.

    Whole numbers have a mean that is none. `operation` is as in `torch.distributed`, or `"mean"`.
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
