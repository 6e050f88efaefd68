"""The group `peft` of a configuration, turned into adapters."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf
from torch import nn

from roundpipe_lightning.errors import ConfigurationError
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


def check_frozen_bits(config: DictConfig) -> None:
    """Refuse what only `roundpipe-plan` knows so far.

    Raises:
        ConfigurationError: Frozen weights of fewer bits are asked for.
    """
    bits = config.get("frozen_bits", 16)
    if bits != 16:
        raise ConfigurationError(
            f"peft.frozen_bits={bits} can be planned (roundpipe-plan) but not trained yet. Use "
            "peft.frozen_bits=16, which stands for the precision of the run."
        )


def trained_row(module: nn.Module, config: DictConfig) -> list[tuple[str, str]]:
    """The row of the closing table that says how much is trained; none if everything is.

    Args:
        module: What was trained.
        config: The group `peft`.
    """
    if config.get("method", FULL) == FULL:
        return []
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in module.parameters()]
    total = sum(size for size, _ in sizes)
    trained = sum(size for size, is_trained in sizes if is_trained)
    share = f"{trained / total:.2%}" if total else "nothing to train"
    return [("Trained (peft)", f"{config.method}: {trained:,} of {total:,} parameters ({share})")]
