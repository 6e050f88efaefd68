"""The group `peft` of a configuration, turned into adapters."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf
from torch import nn

from roundpipe_lightning.models.quantized import is_quantized, tensors_of
from roundpipe_lightning.modules import Adapters

FULL = "none"
"""The method that is none: every parameter is trained."""

_OWN = ("method", "adapter", "seed", "frozen_bits")


def read_adapters(config: DictConfig) -> Adapters | None:
    """Turn `config.peft` into adapters; None if every parameter is trained.

    Raises:
        ConfigurationError: The method or a setting is unknown, or out of its range.
    """
    found = OmegaConf.to_container(config, resolve=True)
    assert isinstance(found, dict), "a group of settings"
    entries: dict[str, Any] = {str(name): value for name, value in found.items()}
    if entries.get("method", FULL) == FULL:
        return None
    return Adapters(
        method=entries["method"],
        settings={name: value for name, value in entries.items() if name not in _OWN},
        adapter=entries.get("adapter"),
        seed=entries.get("seed"),
    )


def trained_row(module: nn.Module, config: DictConfig) -> list[tuple[str, str]]:
    """The row of the closing table that says how much is trained; none if everything is.

    Args:
        module: What was trained.
        config: The group `peft`.
    """
    if config.get("method", FULL) == FULL:
        return []
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    total = _num_parameters(module)
    share = f"{trained / total:.2%}" if total else "nothing to train"
    return [("Trained (peft)", f"{config.method}: {trained:,} of {total:,} parameters ({share})")]


def _num_parameters(module: nn.Module) -> int:
    """All parameters; a quantised weight counts as what it stands for."""
    packed = [layer for layer in module.modules() if is_quantized(layer)]
    held = {parameter for layer in packed for parameter in layer.parameters(recurse=False)}
    whole = sum(like.numel() for layer in packed for like, _, _ in tensors_of(layer).values())
    return whole + sum(p.numel() for p in module.parameters() if p not in held)
