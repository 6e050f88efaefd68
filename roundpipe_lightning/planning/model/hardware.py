"""Machines: rates and sizes, no device, and the files that they are read from.

All figures are in operations, bytes and seconds. Rates of a data sheet are peaks; `Efficiency` says
what share of them each kind of work reaches. A machine is a number of the devices in
`conf/hardware` (`rtx4090x8`), of several kinds (`rtx4090x1+rtx3090x2`), or a file of the same form
with other figures (docs/planning.md, another machine). Settings of a run in the same file
(`accelerator`, `cpu_workers`, `workers_per_device`) are no figures of the machine and are passed
over.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from roundpipe_lightning.errors import ConfigurationError, HardwareError
from roundpipe_lightning.files import read_yaml

RESERVED_BYTES = 384 * 2**20
"""Memory that a device's runtime takes for itself: the context, its libraries, their workspaces."""

WORKSPACE_BYTES = 128 * 2**20
"""Of these, for matrix products: a workspace for each thread that computes on the device."""

_FRAGMENTED_SHARE = 0.03  # share of a named device's memory that is left to gaps between tensors


def _check_positive(name: str, value: object) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value <= 0:  # type: ignore[arg-type,operator]
        raise HardwareError(f"{name}={value!r}: give a number more than 0.")


@dataclass(frozen=True, kw_only=True)
class MatrixRates:
    """Dense matrix products of one device, operations per second (a multiply-add is two).

    Attributes:
        tfloat32: Float32 tensors, products rounded to TensorFloat32; None: the device has none.
        bfloat16: In bfloat16, sums in float32; None: the device has none.
        float16: In float16, sums in float32.
        float16_accumulate_float16: In float16, sums in float16 too, which doubles the rate of
            GeForce cards; None: not faster here.
    """

    float32: float
    tfloat32: float | None = None
    bfloat16: float | None = None
    float16: float | None = None
    float16_accumulate_float16: float | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None or name == "float32":
                _check_positive(f"matrix_rates.{name}", value)

    def of(self, dtype: str) -> float:
        """Return the rate for a dtype's name, e.g. `bfloat16`; HardwareError if there is none."""
        known = {name: rate for name, rate in vars(self).items() if rate is not None}
        if dtype not in known:
            names = ", ".join(known)
            raise HardwareError(f"No matrix rate for dtype {dtype!r}; there are those for {names}.")
        return float(known[dtype])

    def with_float32_sums(self, dtype: str) -> float:
        """Return the rate for a dtype of kernels that sum in float32, whatever products do."""
        if dtype == "float16_accumulate_float16" and self.float16 is not None:
            return float(self.float16)
        return self.of(dtype)


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Share of a peak rate that each kind of work reaches, more than 0 and at most 1.

    Attributes:
        matrix: Matrix products, of `MatrixRates`.
        attention: Fused attention, of `MatrixRates`, its rate with sums in float32.
        memory: Whatever a device's memory moves, of `HardwareSpec.memory_bytes_per_second`.
        host: What the processor does with parameters and gradients, of
            `HardwareSpec.host_bytes_per_second`; a property of the host, not a kind of work.
    """

    matrix: float = 1.0
    attention: float = 1.0
    memory: float = 1.0
    host: float = 1.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            _check_positive(f"efficiency.{name}", value)
            if value > 1:
                raise HardwareError(
                    f"efficiency.{name}={value!r}: give the share of the peak rate that is "
                    "reached, at most 1."
                )


@dataclass(frozen=True, kw_only=True)
class HardwareSpec:
    """A machine with one or several devices.

    Attributes:
        name: What it is called, e.g. `rtx4090x8`.
        num_devices: Each of them is a worker.
        matrix_rates: Matrix products of one device.
        memory_bytes_per_second: Bandwidth of a device's own memory.
        upload_bytes_per_second: Host to one device, page-locked.
        download_bytes_per_second: One device to host, page-locked.
        devices_per_root: Devices behind one shared root of the bus.
        root_upload_bytes_per_second: Host to all devices of a root together.
        root_download_bytes_per_second: All devices of a root together to the host.
        host_bytes_per_second: Bandwidth of the host's memory, for everything together.
        shares_host_memory: Whether the devices compute in host memory, as CPU workers do: nothing
            is copied, and `device_bytes` is a part of `host_bytes`.
        devices_reach_each_other: Whether each device's driver copies from every other one's memory
            without the host, as `torch.cuda.can_device_access_peer` says.
        reserved_bytes: Memory of a device that is not for plans: the runtime's context, libraries
            and their workspaces, and what a fragmented allocator cannot use.
        disk_bytes_per_second: What the disk reads, or writes, of mapped weights and of optimizer
            state that lies there.
        num_nodes: Hosts that train together, of which this is one.
        memory_share: What this one has of what they divide; None: as much as each other.
        network_bytes_per_second: Of the network between them, each way.
        efficiency: What share of the rates is reached.
        unequal: Every device as a machine of its own, where they are not equal; the rates above
            are those of the first one then, `device_bytes` are the smallest.

    Raises:
        HardwareError: A figure is negative, zero or not a number, or two do not fit together.
    """

    name: str
    device_name: str
    num_devices: int
    device_bytes: int
    matrix_rates: MatrixRates
    memory_bytes_per_second: float
    upload_bytes_per_second: float
    download_bytes_per_second: float
    devices_per_root: int
    root_upload_bytes_per_second: float
    root_download_bytes_per_second: float
    host_bytes: int
    host_bytes_per_second: float
    shares_host_memory: bool = False
    devices_reach_each_other: bool = False
    reserved_bytes: int = RESERVED_BYTES
    disk_bytes_per_second: float = 3e9
    num_nodes: int = 1
    memory_share: float | None = None
    network_bytes_per_second: float = 1.25e9
    efficiency: Efficiency = Efficiency()
    unequal: tuple[HardwareSpec, ...] = ()

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name.startswith(("num_", "devices_per")) or name.endswith("_bytes"):
                if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                    raise HardwareError(f"{name}={value!r}: give a whole number of 1 or more.")
            elif name.endswith("_per_second"):
                _check_positive(name, value)
        for name in ("shares_host_memory", "devices_reach_each_other"):
            if not isinstance(getattr(self, name), bool):
                raise HardwareError(f"{name}={getattr(self, name)!r}: give true or false.")
        if self.unequal and len(self.unequal) != self.num_devices:
            raise HardwareError(
                f"num_devices={self.num_devices}, but there are figures of {len(self.unequal)}."
            )

    @property
    def workers(self) -> tuple[HardwareSpec, ...]:
        return self.unequal or (self,) * self.num_devices

    @property
    def owned_part(self) -> float:
        """What this host has of masters, sums of gradients and optimizer's state."""
        return self.memory_share or 1 / self.num_nodes

    @property
    def num_roots(self) -> int:
        return -(-self.num_devices // self.devices_per_root)

    def operations_per_second(self, dtype: str) -> float:
        """Return what all devices together multiply in a second."""
        return sum(one.matrix_rates.of(dtype) * one.efficiency.matrix for one in self.workers)

    def matrix_seconds(self, operations: float, *, dtype: str) -> float:
        return operations / (self.matrix_rates.of(dtype) * self.efficiency.matrix)

    def attention_seconds(self, operations: float, *, dtype: str) -> float:
        rate = self.matrix_rates.with_float32_sums(dtype)
        return operations / (rate * self.efficiency.attention)

    def memory_seconds(self, num_bytes: float) -> float:
        return num_bytes / (self.memory_bytes_per_second * self.efficiency.memory)

    def host_seconds(self, num_bytes: float) -> float:
        return num_bytes / (self.host_bytes_per_second * self.efficiency.host)

    def upload_seconds(self, num_bytes: float, *, num_devices: int = 1) -> float:
        """Time to bring bytes to each of several devices at once; 0 where memory is shared."""
        own, root = self.upload_bytes_per_second, self.root_upload_bytes_per_second
        return self._copy_seconds(num_bytes, own, root, num_devices)

    def download_seconds(self, num_bytes: float, *, num_devices: int = 1) -> float:
        """Time to bring bytes from each of several devices at once; 0 where it is shared."""
        own, root = self.download_bytes_per_second, self.root_download_bytes_per_second
        return self._copy_seconds(num_bytes, own, root, num_devices)

    def _copy_seconds(self, num_bytes: float, own: float, root: float, num_devices: int) -> float:
        """The devices are spread evenly over the roots."""
        if self.shares_host_memory:
            return 0.0
        per_root = -(-num_devices // self.num_roots)
        return num_bytes / min(own, root / per_root, self.host_bytes_per_second / num_devices)


_RUN_SETTINGS = frozenset({"accelerator", "cpu_workers", "workers_per_device", "network"})
_MACHINE = re.compile(r"(?P<device>.+)x(?P<count>[1-9]\d*)")
_GIB = 2**30
_FITTED = {"matrix": 0.9, "attention": 0.7, "memory": 0.85, "host": 0.55}
"""Shares fitted to published numbers of RTX 4090 (docs/planning.md), taken over for all GPUs."""

_AROUND = (
    *("name", "num_devices", "devices_per_root"),
    *("root_upload_bytes_per_second", "root_download_bytes_per_second"),
    *("host_bytes_per_second", "disk_bytes_per_second", "network_bytes_per_second"),
)
"""Figures of a machine around its devices."""

T = TypeVar("T")


def device_names() -> tuple[str, ...]:
    paths = sorted(_folder().glob("*.yaml"))
    return tuple(path.stem for path in paths if {"defaults", "device_name"} <= _read(path).keys())


def load_hardware(source: str | os.PathLike[str]) -> HardwareSpec:
    """Return a machine by name, or from a YAML file.

    Args:
        source: Devices and their number (`rtx4090x8`, `rtx4090x1+rtx3090x2`, see `device_names`),
            `cpu`, or the path of a file with the fields of `HardwareSpec`.

    Raises:
        HardwareError: There is no such name (it says which are near) or file, or a figure in it is
            missing, negative or unknown.
    """
    path = Path(source)
    if path.suffix not in (".yaml", ".yml"):
        return hardware_from_mapping(_named(str(source)))
    try:
        return hardware_from_mapping({"name": path.stem, **_read(path)}, folder=path.parent)
    except HardwareError as error:
        raise HardwareError(f"{path}: {error}") from error


def network_rate(name: object) -> float:
    """Return the bytes per second, each way, of a network such as `10GbE`; else HardwareError."""
    found = re.fullmatch(r"([0-9]*\.?[0-9]+)GbE", str(name), re.IGNORECASE)
    if found is None or float(found[1]) <= 0:
        raise HardwareError(f"network={name}: give gigabits per second, such as network=10GbE.")
    return float(found[1]) * 1e9 / 8


def _named(name: str) -> dict[str, Any]:
    if name == "cpu":
        return {"name": name, **_read(_folder() / "cpu.yaml")}
    known = device_names()
    counts: dict[str, int] = {}
    for part in name.split("+"):
        match = None if part in known else _MACHINE.fullmatch(part)
        device, count = (match["device"], int(match["count"])) if match else (part, 1)
        if device not in known:
            near = difflib.get_close_matches(part, [*known, "cpu"], n=3, cutoff=0.4)
            hint = (
                f"The nearest are {', '.join(near)}." if near else f"There are {', '.join(known)}."
            )
            raise HardwareError(
                f"hardware={name!r} is not known. {hint} Write the number of devices behind it, as "
                "in rtx4090x8, or give a file of your own: path/to/mine.yaml."
            )
        counts[device] = counts.get(device, 0) + count
    return {"name": name, "devices": counts}


def hardware_from_mapping(
    figures: Mapping[str, Any], *, folder: Path | None = None
) -> HardwareSpec:
    """Return a machine from plain values, as a YAML file has them.

    What is missing of the machine around the devices is assumed: 3 % of their memory for gaps
    beside the runtime's; at most four on a root; 128 GiB of host memory for each device (256 for
    one of 64 or more), which is the faster the more devices and the faster their links are. A
    figure that is None is missing.

    Args:
        figures: The fields of `HardwareSpec`. `devices` is the number of devices, or the number by
            name; `defaults` names files whose figures are taken over.
        folder: Where these files are; else `conf/hardware`.

    Raises:
        HardwareError: A figure is missing, negative or unknown, or two contradict each other.
    """
    figures = _with_defaults(figures, folder)
    if figures.get("network") is not None:
        figures["network_bytes_per_second"] = network_rate(figures["network"])
    devices = figures.pop("devices", None)
    if devices == "auto":
        devices = figures.get("cpu_workers")
    figures = {
        k: int(v) if isinstance(v, float) and v.is_integer() and k.endswith("_bytes") else v
        for k, v in figures.items()
        if k not in _RUN_SETTINGS and v is not None
    }
    if isinstance(devices, Mapping):
        return _of_names(devices, figures, folder)
    if devices is not None:
        if figures.setdefault("num_devices", devices) != devices:
            raise HardwareError(
                f"devices={devices} and num_devices={figures['num_devices']}: drop one of the two."
            )
        figures = _completed(figures)
    for key, kind in (("matrix_rates", MatrixRates), ("efficiency", Efficiency)):
        if key in figures:
            figures[key] = _make(kind, _mapping(key, figures[key]), prefix=f"{key}.")
    if "unequal" in figures:
        figures["unequal"] = tuple(map(hardware_from_mapping, figures["unequal"]))
    spec = _make(HardwareSpec, figures, prefix="")
    wrong = None
    if spec.devices_per_root > spec.num_devices:
        wrong = (
            f"devices_per_root={spec.devices_per_root}, but there are {spec.num_devices} devices"
        )
    elif spec.reserved_bytes >= spec.device_bytes:
        size = spec.device_bytes
        wrong = f"reserved_bytes={spec.reserved_bytes} leaves nothing of device_bytes={size}"
    if wrong and not spec.shares_host_memory:
        raise HardwareError(f"{wrong}: correct one of the two.")
    return spec


def _with_defaults(
    figures: Mapping[str, Any], folder: Path | None, *, within: tuple[Path, ...] = ()
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    names = figures.get("defaults", ())
    for entry in [names] if isinstance(names, str) else names:
        if entry == "_self_":
            continue
        path = (folder or _folder()) / f"{entry}.yaml"
        if not path.is_file():
            path = _folder() / path.name
        if not path.is_file():
            raise HardwareError(
                f"defaults has {entry!r}, which is no file of conf/hardware: name a device, such "
                "as rtx4090, and set devices to their number."
            )
        if path in within:
            raise HardwareError(f"{path} takes its defaults from itself: give it another name.")
        found |= _with_defaults(_read(path), path.parent, within=(*within, path))
    return found | {str(key): value for key, value in figures.items() if key != "defaults"}


def _completed(figures: dict[str, Any]) -> dict[str, Any]:
    """Add what is assumed of a machine with GPUs of these figures."""
    needed = ("device_bytes", "upload_bytes_per_second", "download_bytes_per_second")
    if any(name not in figures for name in needed):
        return figures  # which is said where the figures are checked
    for name in ("num_devices", *needed):
        if not isinstance(figures[name], (int, float)) or not figures[name] > 0:
            shown = name.removeprefix("num_")
            raise HardwareError(f"{shown}={figures[name]!r}: give a number above 0.")
    count, (size, up, down) = figures["num_devices"], (figures[name] for name in needed)
    per_root = min(count, 4)
    generation = 2 if up > 40e9 else 1  # of the bus, and so of the host's memory
    return {
        "devices_per_root": per_root,
        "root_upload_bytes_per_second": per_root * up,
        "root_download_bytes_per_second": per_root * down,
        "host_bytes": count * (256 if size >= 64 * _GIB else 128) * _GIB,
        "host_bytes_per_second": generation * max(60e9, 50e9 * (1 + math.log2(count))),
        "reserved_bytes": RESERVED_BYTES + round(_FRAGMENTED_SHARE * size),
        **figures,
        "efficiency": _FITTED | _mapping("efficiency", figures.get("efficiency", {})),
    }


def _of_names(
    devices: Mapping[str, Any], figures: dict[str, Any], folder: Path | None
) -> HardwareSpec:
    """Return a machine with a number of each named device; `figures` stand above theirs."""
    for name, count in devices.items():
        if type(count) is not int or count < 1:
            raise HardwareError(f"devices.{name}={count!r}: give a whole number of 1 or more.")
        _named(str(name))
    if not devices:
        raise HardwareError("devices names none: give the number of each, as {rtx4090: 2}.")

    def machine(device: str, count: int, around: Mapping[str, Any]) -> HardwareSpec:
        wanted = {"name": device, "defaults": [device], "devices": count, **around}
        return hardware_from_mapping(wanted, folder=folder)

    kinds = {name: machine(name, 1, {}) for name in devices}
    total = sum(devices.values())
    quickest = max(kinds, key=lambda name: kinds[name].upload_bytes_per_second)
    around = machine(quickest, total, figures)
    if len(kinds) == 1:
        return around
    workers = [kind for name, kind in kinds.items() for _ in range(devices[name])]
    return replace(
        workers[0],
        **{name: getattr(around, name) for name in _AROUND},
        device_name=" and ".join(dict.fromkeys(each.device_name for each in workers)),
        device_bytes=min(each.device_bytes for each in workers),
        host_bytes=figures.get("host_bytes", sum(each.host_bytes for each in workers)),
        devices_reach_each_other=all(each.devices_reach_each_other for each in workers),
        unequal=tuple(workers),
    )


def hardware_to_mapping(spec: HardwareSpec) -> dict[str, Any]:
    """Return plain values that `hardware_from_mapping` reads back."""
    figures = dict(vars(spec), efficiency=dict(vars(spec.efficiency)))
    rates = vars(spec.matrix_rates)
    figures["matrix_rates"] = {key: value for key, value in rates.items() if value is not None}
    figures["unequal"] = list(map(hardware_to_mapping, spec.unequal))
    return figures


def config_folder() -> Path:
    """The folder `conf`: in a wheel inside the package, in a checkout beside it."""
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
        return dict(_parsed(path, path.stat().st_mtime_ns))
    except OSError as error:
        raise HardwareError(f"{path} cannot be read: {error.strerror or error}.") from error


@functools.lru_cache(maxsize=100)
def _parsed(path: Path, _changed: int) -> dict[str, Any]:
    try:
        return {str(key): value for key, value in read_yaml(path).items()}
    except ConfigurationError as error:
        raise HardwareError(str(error)) from error


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
