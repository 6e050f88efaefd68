"""The machine that a configuration names or describes."""

from __future__ import annotations

import re
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from roundpipe_lightning.errors import HardwareError
from roundpipe_lightning.planning.model.hardware import (
    HardwareSpec,
    hardware_from_mapping,
    load_hardware,
)

_SIZES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZES |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def read_hardware(config: DictConfig) -> HardwareSpec | None:
    """The machine that is named or described; None: the one at hand.

    Raises:
        HardwareError: A figure is missing, unknown or out of its range.
    """
    if config.hardware_file is not None:
        return load_hardware(config.hardware_file)
    name = choice("hardware")
    figures: Any = OmegaConf.to_container(config.hardware, resolve=True)
    if "device_name" not in figures and not isinstance(figures.get("devices"), dict):
        return None
    for key in ("host_memory", "device_memory"):
        figures.pop(key, None)
    try:
        return hardware_from_mapping({"name": name, **figures})
    except HardwareError as error:
        raise HardwareError(f"hardware={name}: {error}") from error


def choice(group: str) -> str:
    """The file that was chosen in a group, as far as Hydra knows it."""
    chosen = HydraConfig.get().runtime.choices if HydraConfig.initialized() else {}
    return str(chosen.get(group, group))


def size_of(name: str, value: object) -> int | None:
    """Bytes of `600GiB`, or of a number of them; None: not given.

    Raises:
        HardwareError: It is no size.
    """
    if value is None:
        return None
    found = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]*)\s*", str(value))
    if found is None or found[2].upper() not in _SIZES or float(found[1]) <= 0:
        raise HardwareError(f"{name}={value}: give a size with its unit, such as {name}=600GiB.")
    return int(float(found[1]) * _SIZES[found[2].upper()])
