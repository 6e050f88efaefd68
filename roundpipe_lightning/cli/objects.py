"""Objects and the machine of a configuration, and its errors as a person can mend them."""

from __future__ import annotations

import errno
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from inspect import signature
from typing import Any, TypeVar

from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate
from lightning.fabric.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from roundpipe_commands import EXIT_BAD_INPUT, EXIT_DOES_NOT_FIT
from roundpipe_lightning.errors import ConfigurationError, FitError, HardwareError, RoundPipeError
from roundpipe_lightning.modules import Adapters
from roundpipe_lightning.modules.adapters import peft_config
from roundpipe_lightning.planning.model.hardware import (
    HardwareSpec,
    hardware_from_mapping,
    load_hardware,
)

Result = TypeVar("Result")

SETTING_ERRORS = (RoundPipeError, MisconfigurationException, OmegaConfBaseException)
"""Errors that say themselves which setting is to be changed."""


def _is_about_settings(error: Exception, folder: str) -> bool:
    """Return whether a person mends an error by a setting, or a full disk: its message is enough.

    So is that of a run's folder that cannot be made or written.

    Lightning refuses some settings with a `ValueError` or a `RuntimeError` of its own.
    """
    if isinstance(error, (*SETTING_ERRORS, InstantiationException)):
        return True
    if isinstance(error, OSError):
        file = str(error.filename)
        is_the_runs = file.startswith(folder) or folder.startswith(file)
        return is_the_runs or error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
    frame = list(traceback.walk_tb(error.__traceback__))[-1][0]
    module = str(frame.f_globals.get("__name__"))
    return isinstance(error, (ValueError, RuntimeError)) and module.startswith("lightning.")


_KEYS = {
    r"\bplan='auto'": "partition=auto",
    r"\bhardware='auto'": "hardware=auto",
    r"\bhints=None": "partition=auto",
    r"\bTrainer\((?!strategy)(\w+)=(['\"]?)([^()'\"]*)\2\)": r"trainer.\1=\3",
    r"(?<![.\w])num_microbatches=(?=\w)": "partition.num_microbatches=",
}
"""What messages for scripts call the settings, and what a command does."""


def _for_commands(text: str) -> str:
    for pattern, key in _KEYS.items():
        text = re.sub(pattern, key, text)
    return text


def visible(text: str) -> str:
    """Return a text without what a terminal would obey: a sample may set its title or clipboard."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda sign: f"\\x{ord(sign[0]):02x}", text)


def run_explained(job: Callable[[DictConfig], Result], config: DictConfig) -> Result | int:
    """Run a job of a command: an error that a user can mend is one message and an exit status.

    With HYDRA_FULL_ERROR=1 it is a traceback.
    """
    try:
        return job(config)
    except Exception as error:
        folder = str(OmegaConf.select(config, "paths.output_dir"))
        if not _is_about_settings(error, folder) or os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        text = visible(_for_commands(str(error)))
        if isinstance(error, OmegaConfBaseException):
            text = f"{error.full_key or 'conf'}: {text.splitlines()[0]}. --cfg job shows all."
        if isinstance(error, OSError) and error.errno is not None:
            text = (
                f"The run's folder cannot be written: {error}. Set hydra.run.dir or paths.log_dir."
            )
            logging.raiseExceptions = False  # the log is there, too
        logging.getLogger().error("%s", text)  # in the file; the package's loggers are on screen
        notes = getattr(error, "__notes__", [])
        sys.stderr.write("\n".join([f"\nError: {text}", *notes]) + "\n")
        return EXIT_DOES_NOT_FIT if isinstance(error, FitError) else EXIT_BAD_INPUT


def build(config: Any, **extra: Any) -> Any:
    """Hydra's `instantiate`, with plain containers and with the error that really happened.

    `config` is a node with a `_target_`, or null for None.
    """
    if config is not None and "_target_" in config:
        with suppress(ImportError):  # explained below
            _check_words(config)
    try:
        return instantiate(config, _convert_="all", **extra)
    except MissingMandatoryValue as error:
        key = error.full_key
        raise ConfigurationError(f"{key} has no value. Set it: {key}=...") from error
    except InstantiationException as error:
        if isinstance(error.__cause__, SETTING_ERRORS):
            raise error.__cause__ from None
        if isinstance(error.__cause__, ModuleNotFoundError):
            missing = str(error.__cause__).splitlines()[0]
            raise ConfigurationError(
                f"{config['_target_']} needs a library that is not installed: {missing}"
            ) from None
        if isinstance(error.__cause__, ImportError):
            raise ConfigurationError(f"There is no {config['_target_']} (_target_).") from None
        if isinstance(error.__cause__, (TypeError, ValueError)):
            key = str(error).rpartition("full_key: ")[2]
            raise ConfigurationError(f"{key}: {error.__cause__}") from error.__cause__
        raise


def _check_words(config: DictConfig) -> None:
    """Refuse text where a switch (any text counts as true) or a whole number is meant."""
    for name, parameter in signature(get_object(config["_target_"])).parameters.items():
        value, key = config.get(name), config._get_full_key(name)  # noqa: SLF001 - no other way
        if isinstance(value, DictConfig) and "_target_" in value:
            _check_words(value)
        elif isinstance(value, str) and parameter.annotation in ("bool", bool, bool | None):
            check_switch(key, value)
        elif isinstance(value, str) and parameter.annotation in ("int", "int | None", int):
            whole(key, value)


def check_switch(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigurationError(f"{name}={value!s}: give true or false.")


def whole(name: str, value: object, *, least: int = 1) -> int:
    """The value of a setting; ConfigurationError: it is no whole number of at least so much."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigurationError(f"{name}={value!r}: give a whole number.")
    if value < least:
        raise ConfigurationError(f"{name}={value} must be {least} or more.")
    return value


def call(name: str, make: Callable[..., Result], *values: Any, **named: Any) -> Result:
    """What a partial of the configuration makes; ConfigurationError: it does not take a setting."""
    try:
        return make(*values, **named)
    except TypeError as error:
        raise ConfigurationError(f"{name}: {error}") from error


def build_each(group: str, config: DictConfig | None) -> list[Any]:
    """The objects of a group that holds several of them, such as callbacks and loggers."""
    found = []
    for name, node in (config or {}).items():
        if node is not None and not (isinstance(node, DictConfig) and "_target_" in node):
            key = f"{group}.{name!s}"
            raise ConfigurationError(f"{key} has no class: set {key}._target_.")
        if node is not None:
            found.append(build(node))
    return found


def read_adapters(config: DictConfig | Mapping[str, Any]) -> Adapters | None:
    """Turn the group `peft` into adapters; None if every parameter is trained."""
    found = OmegaConf.to_container(config, resolve=True) if OmegaConf.is_config(config) else config
    settings: dict[str, Any] = dict(found)  # type: ignore[arg-type]
    target, adapter, seed = (settings.pop(key, None) for key in ("_target_", "adapter", "seed"))
    settings.pop("frozen_bits", None)  # for the model, see conf/model
    if target is None:
        return None
    return Adapters(config=peft_config(target, settings), adapter=adapter, seed=seed)


_SIZES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_LEAST_BYTES = 2**18  # less without a unit is a number whose unit was forgotten
_SIZES |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


_AT_HAND = {
    *("accelerator", "devices", "cpu_workers", "workers_per_device"),
    *("host_memory", "device_memory", "host_bytes", "disk_bytes_per_second"),
}
"""Settings of `hardware` that are read where no machine is named."""


def read_hardware(config: DictConfig) -> HardwareSpec | None:
    """The machine that is named or described; None: the one at hand."""
    if config.hardware_file is not None:
        return load_hardware(config.hardware_file)
    name = choice("hardware")
    figures: Any = OmegaConf.to_container(config.hardware, resolve=True)
    if figures.get("devices", "auto") is None:  # `mixed`, of which nothing is said
        figures["devices"] = {}
    if "device_name" not in figures and not isinstance(figures.get("devices"), dict):
        given = {key for key, figure in figures.items() if figure is not None}
        for key in given - _AT_HAND:
            raise HardwareError(
                f"hardware.{key} is not read where no machine is named: figures are those of the "
                f"one at hand. There are: {', '.join(sorted(_AT_HAND))}."
            )
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
    """Bytes of `600GiB`, or of a number of them; None: not given; HardwareError: it is no size."""
    if value is None:
        return None
    found = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]*)\s*", str(value))
    unit = None if found is None else _SIZES.get(found[2].upper())
    if found is None or unit is None or (unit == 1 and float(found[1]) < _LEAST_BYTES):
        raise HardwareError(f"{name}={value}: give a size with its unit, such as {name}=600GiB.")
    return int(float(found[1]) * unit)
