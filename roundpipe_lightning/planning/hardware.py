"""What the planner must know about a machine: rates, sizes, and a list of machines by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

from roundpipe_lightning.errors import HardwareError

GIB = 2**30
_GB = 10**9
_TERA = 10**12
_HOST_BYTES_PER_DEVICE = 128 * GIB


@dataclass(frozen=True, kw_only=True)
class HardwareSpec:
    """A machine with equal devices.

    Attributes:
        name: For people.
        num_devices: Number of devices; each is one worker.
        device_bytes: Memory of one device.
        matrix_operations_per_second: Dense 16-bit matrix rate of one device, accumulating in 32
            bits; a multiplication and its addition are two operations.
        device_bytes_per_second: Bandwidth of one device's memory.
        upload_bytes_per_second: From the host to one device.
        download_bytes_per_second: From one device to the host.
        host_bytes: Memory of the host.
        host_bytes_per_second: Bandwidth of the host's memory, shared by all transfers.

    Raises:
        HardwareError: If a figure is not a positive number.
    """

    name: str
    num_devices: int
    device_bytes: int
    matrix_operations_per_second: float
    device_bytes_per_second: float
    upload_bytes_per_second: float
    download_bytes_per_second: float
    host_bytes: int
    host_bytes_per_second: float

    def __post_init__(self) -> None:
        """Refuse figures that no machine has."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "name":
                continue
            if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
                raise HardwareError(
                    f"Hardware {self.name!r}: {field.name}={value!r} must be a positive number."
                )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> HardwareSpec:
        """Make a spec from the keys of a configuration file.

        Raises:
            HardwareError: If a key is missing or unknown, or a figure is wrong.
        """
        known = [field.name for field in fields(cls)]
        name = values.get("name", "?")
        for key in values:
            if key not in known:
                near = get_close_matches(key, known, n=3)
                hint = f"; did you mean {' or '.join(near)}?" if near else ""
                raise HardwareError(f"Hardware {name!r} has an unknown key {key!r}{hint}")
        missing = [key for key in known if key not in values]
        if missing:
            raise HardwareError(
                f"Hardware {name!r} lacks {', '.join(missing)}: give all of {known}."
            )
        return cls(**values)


def _device(
    *,
    gib: int,
    teraflops: float,
    memory_gb: int,
    link_gb: int,
) -> HardwareSpec:
    """One device in a server that feeds each device over its own link."""
    return HardwareSpec(
        name="",
        num_devices=1,
        device_bytes=gib * GIB,
        matrix_operations_per_second=teraflops * _TERA,
        device_bytes_per_second=memory_gb * _GB,
        upload_bytes_per_second=link_gb * _GB,
        download_bytes_per_second=link_gb * _GB,
        host_bytes=_HOST_BYTES_PER_DEVICE,
        host_bytes_per_second=200 * _GB,
    )


# Vendors' data sheets: memory size, dense 16-bit rate with 32-bit accumulation, memory bandwidth.
# A x16 link carries about 25 GB/s (PCIe 4.0) or 50 GB/s (PCIe 5.0) each way from page-locked
memory. # The host is typical, not part of the name: replace it for a machine that differs.
_DEVICES = MappingProxyType(
    {
        "rtx3090": _device(gib=24, teraflops=71.0, memory_gb=936, link_gb=25),
        "rtx4090": _device(gib=24, teraflops=165.2, memory_gb=1008, link_gb=25),
        "rtx5090": _device(gib=32, teraflops=209.5, memory_gb=1792, link_gb=50),
        "a100": _device(gib=80, teraflops=312.0, memory_gb=2039, link_gb=25),
        "a800": _device(gib=80, teraflops=312.0, memory_gb=2039, link_gb=25),
        "h100": _device(gib=80, teraflops=989.4, memory_gb=3350, link_gb=50),
        "h200": _device(gib=141, teraflops=989.4, memory_gb=4800, link_gb=50),
        "w7800": _device(gib=32, teraflops=90.5, memory_gb=576, link_gb=25),
    }
)
_COUNTS = (1, 2, 4, 8)


def hardware_names() -> tuple[str, ...]:
    """Return the names that `named_hardware` knows, such as `rtx4090x8`."""
    return tuple(f"{device}x{count}" for device in _DEVICES for count in _COUNTS)


def named_hardware(name: str) -> HardwareSpec:
    """Return a machine by name.

    Args:
        name: A device and how many, such as `rtx4090x8`; without a number, one.

    Raises:
        HardwareError: If there is no such name; with the nearest ones.
    """
    full_name = f"{name}x1" if name in _DEVICES else name
    device, _, count = full_name.rpartition("x")
    if full_name not in hardware_names():
        near = get_close_matches(name, [*_DEVICES, *hardware_names()], n=3, cutoff=0.4)
        hint = f"did you mean {', '.join(near)}?" if near else "known: " + ", ".join(_DEVICES)
        raise HardwareError(f"hardware={name!r} is not known; {hint}")
    spec = _DEVICES[device]
    return replace(
        spec, name=full_name, num_devices=int(count), host_bytes=int(count) * _HOST_BYTES_PER_DEVICE
    )
