"""Whether a checkpoint fits: who wrote it, and of which model and optimizer it is."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import lightning
from lightning.pytorch import LightningModule
from packaging.version import InvalidVersion, Version
from torch import Tensor
from torch.optim import Optimizer

from roundpipe_lightning.errors import CheckpointError
from roundpipe_lightning.strategy.resume.resume import InexactResumeWarning

_MOST_NAMED = 3


def check_versions(checkpoint: Mapping[str, Any], *, path: Any, newest: int) -> None:
    """Refuse a checkpoint of a newer version of Lightning or of this package.

    Args:
        checkpoint: As it was read.
        path: Where from.
        newest: The newest form of our own part that is understood.

    Raises:
        CheckpointError: It is newer.
    """
    ours = checkpoint.get("roundpipe")
    if isinstance(ours, Mapping) and ours.get("format_version", 0) > newest:
        raise CheckpointError(
            f"The checkpoint {path} was written by a newer roundpipe_lightning: its part has "
            f"format_version={ours['format_version']}, and this version reads up to {newest}. "
            "Update roundpipe_lightning."
        )
    written = checkpoint.get("pytorch-lightning_version")
    here = Version(lightning.__version__)
    try:
        version = here if written is None else Version(str(written))
    except InvalidVersion:
        return
    if version.release[:2] > here.release[:2]:
        raise CheckpointError(
            f"The checkpoint {path} was written by Lightning {version}, and this is {here}, whose "
            f"loops may not understand it. Install lightning>={version}, or resume with the "
            "version that wrote it."
        )


def differences(module: LightningModule, state: Mapping[str, Any]) -> str:
    """Name what a module and the state of a checkpoint do not have in common."""
    own = module.state_dict()
    shapes = [
        f"{name} is {tuple(own[name].shape)} here and {tuple(value.shape)} there"
        for name, value in state.items()
        if isinstance(value, Tensor)
        and isinstance(own.get(name), Tensor)
        and own[name].shape != value.shape
    ]
    missing = [name for name in own if name not in state]
    extra = [name for name in state if name not in own]
    parts = [
        _listed("", shapes),
        _listed("missing in the checkpoint: ", missing),
        _listed("without a place in the module: ", extra),
    ]
    return "; ".join(part for part in parts if part)


def check_optimizer_states(
    optimizers: Sequence[Optimizer], states: Sequence[Mapping[str, Any]]
) -> None:
    """Refuse the states of other optimizers; none at all are as if they had just been made.

    Raises:
        CheckpointError: Their number, or that of their groups or parameters, is another one.
    """
    if optimizers and not states:
        warnings.warn(
            "The checkpoint has no states of optimizers: they begin anew, and the resumed run is "
            "not the one that was stopped. If that was not meant, name a checkpoint that has them.",
            category=InexactResumeWarning,
            stacklevel=2,
        )
        return
    if len(optimizers) != len(states):
        raise CheckpointError(
            f"The checkpoint has the states of {len(states)} optimizers, and configure_optimizers "
            f"returned {len(optimizers)}. Return as many as it was trained with."
        )
    for optimizer, state in zip(optimizers, states, strict=True):
        here = [len(group["params"]) for group in optimizer.param_groups]
        there = [len(group["params"]) for group in state.get("param_groups", ())]
        if here != there:
            raise CheckpointError(
                f"{type(optimizer).__name__} has parameter groups of {_counts(here)} parameters, "
                f"and the checkpoint's optimizer {_counts(there)}. Build the optimizer as it was, "
                "or begin anew with the weights alone: "
                "module.load_state_dict(torch.load(path)['state_dict'])."
            )


def _counts(counts: Sequence[int]) -> str:
    return " + ".join(map(str, counts)) or "none"


def _listed(title: str, names: Sequence[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"{title}{', '.join(names[:_MOST_NAMED])}{more}"
