"""Reads machines from files of the `hardware` configuration group, without Hydra.

A file has the fields of `HardwareSpec`; those of the device may stand in a file of their own,
which `defaults: [device@device: NAME]` takes from the folder `device` beside it, as Hydra does.
Settings of a run in the same file (`accelerator`, `devices`, `cpu_workers`, `workers_per_device`)
are no figures of the machine and are passed over.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

from roundpipe_lightning.errors import HardwareError
from roundpipe_lightning.planning.model.hardware import Efficiency, HardwareSpec, MatrixRates

_RUN_SETTINGS = frozenset({"accelerator", "devices", "cpu_workers", "workers_per_device"})
_DEVICE_ENTRY = "device@device"

T = TypeVar("T")


def hardware_names() -> tuple[str, ...]:
    """Names of the machines that `load_hardware` knows, sorted."""
    paths = sorted(_folder().glob("*.yaml"))
    return tuple(path.stem for path in paths if "num_devices" in _read(path))


def load_hardware(source: str | os.PathLike[str]) -> HardwareSpec:
    """Return a machine by name, or from a YAML file.

    Args:
        source: A name (`rtx4090x8`, see `hardware_names`), or the path of a file of the same form.

    Raises:
        HardwareError: There is no such name (it says which are near) or file, or a figure in it is
            missing, negative or unknown.
    """
    path = Path(source)
    is_named = path.suffix not in (".yaml", ".yml")
    if is_named:
        named = _folder() / f"{path.name}.yaml"
        if str(source) != path.name or not named.is_file():
            raise HardwareError(_unknown_name(str(source)))
        path = named
    figures = _read(path)
    if is_named and "num_devices" not in figures:
        raise HardwareError(_unknown_name(str(source)))
    try:
        return hardware_from_mapping({"name": path.stem, **figures}, folder=path.parent)
    except HardwareError as error:
        raise HardwareError(f"{path}: {error}") from error


def hardware_from_mapping(
    figures: Mapping[str, Any], *, folder: Path | None = None
) -> HardwareSpec:
    """Return a machine from plain values, as a YAML file has them.

    Args:
        figures: The fields of `HardwareSpec`, those of the device perhaps in a mapping `device`.
        folder: Where a file of a device that `defaults` names is, in its folder `device`.

    Raises:
        HardwareError: A figure is missing, negative or unknown.
    """
    figures = {str(key): value for key, value in figures.items() if key not in _RUN_SETTINGS}
    device: dict[str, Any] = {}
    for entry in figures.pop("defaults", ()):
        if isinstance(entry, Mapping) and _DEVICE_ENTRY in entry:
            device.update(_read((folder or _folder()) / "device" / f"{entry[_DEVICE_ENTRY]}.yaml"))
        elif entry != "_self_":
            raise HardwareError(
                f"defaults has {entry!r}: only '{_DEVICE_ENTRY}: NAME' and '_self_' are understood."
            )
    device.update(_mapping("device", figures.pop("device", {})))
    both = {**device, **figures}
    for key, kind in (("matrix_rates", MatrixRates), ("efficiency", Efficiency)):
        if key in both:
            both[key] = _make(kind, _mapping(key, both[key]), prefix=f"{key}.")
    return _make(HardwareSpec, both, prefix="")


def hardware_to_mapping(spec: HardwareSpec) -> dict[str, Any]:
    """Return plain values that `hardware_from_mapping` reads back."""
    figures = dataclasses.asdict(spec)
    rates = figures["matrix_rates"]
    figures["matrix_rates"] = {key: value for key, value in rates.items() if value is not None}
    return figures


def config_folder() -> Path:
    """The folder `conf`: in a wheel inside the package, in a checkout beside it.

    Raises:
        HardwareError: It is in neither place.
    """
    package = Path(__file__).resolve().parents[2]
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "hardware").is_dir():
            return folder
    raise HardwareError(
        f"No conf/hardware in {package} or {package.parent}: the installation is incomplete. "
        "Reinstall roundpipe-lightning."
    )


def _folder() -> Path:
    return config_folder() / "hardware"


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise HardwareError(f"{path} cannot be read: {error.strerror or error}.") from error
    try:
        content = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise HardwareError(f"{path} is not YAML: {error}") from error
    return _mapping(str(path), content)


def _mapping(name: str, value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise HardwareError(f"{name} must have names and values, not {value!r}.")
    return {str(key): item for key, item in value.items()}


def _make(kind: type[T], figures: Mapping[str, Any], *, prefix: str) -> T:
    """Call a dataclass with its fields, after those that are missing or unknown are refused."""
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    known = [field.name for field in fields]
    for key in figures:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=3, cutoff=0.5)
            hint = f" Near names: {', '.join(near)}." if near else f" Known: {', '.join(known)}."
            raise HardwareError(f"{prefix}{key} is no figure of a machine.{hint}")
    needed = [field.name for field in fields if field.default is dataclasses.MISSING]
    missing = [prefix + name for name in needed if name not in figures]
    if missing:
        raise HardwareError(f"missing figures: {', '.join(missing)}.")
    return kind(**figures)


def _unknown_name(name: str) -> str:
    names = hardware_names()
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.4)
    hint = f"The nearest are {', '.join(near)}." if near else f"There are {', '.join(names)}."
    return f"hardware={name!r} is not known. {hint} A file of your own: hardware=path/to/mine.yaml."


class _Loader(yaml.SafeLoader):
    """YAML 1.2's numbers: `1e9` is one, as it is for Hydra."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)
