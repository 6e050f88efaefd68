"""What the planner must know about a machine: rates and sizes, no device.

All figures are in operations, bytes and seconds. Rates of a data sheet are peaks; `Efficiency` says
what share of them each kind of work reaches.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from roundpipe_lightning.errors import HardwareError


def _check_positive(name: str, value: object) -> None:
    """Refuse a rate that is not a positive finite number.

    Raises:
        HardwareError: It is not.
    """
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value <= 0:  # type: ignore[arg-type,operator]
        raise HardwareError(f"{name}={value!r}: give a number more than 0.")


def _check_count(name: str, value: object) -> None:
    """Refuse a number of things that is not a whole number of 1 or more.

    Raises:
        HardwareError: It is not.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise HardwareError(f"{name}={value!r}: give a whole number of 1 or more.")


@dataclass(frozen=True, kw_only=True)
class MatrixRates:
    """Dense matrix products of one device, operations per second (a multiply-add is two).

    Attributes:
        float32: In float32.
        tfloat32: Float32 tensors, products rounded to TensorFloat32; None: the device has none.
        bfloat16: In bfloat16, sums in float32; None: the device has none.
        float16: In float16, sums in float32.
        float16_accumulate_float16: In float16, sums in float16 too, which doubles the rate of
            GeForce cards; None: not faster here.

    Raises:
        HardwareError: A rate is not a positive number.
    """

    float32: float
    tfloat32: float | None = None
    bfloat16: float | None = None
    float16: float | None = None
    float16_accumulate_float16: float | None = None

    def __post_init__(self) -> None:
        """Refuse rates that cannot be."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None or field.name == "float32":
                _check_positive(f"matrix_rates.{field.name}", value)

    def of(self, dtype: str) -> float:
        """Return the rate for a dtype's name, e.g. `bfloat16`.

        Raises:
            HardwareError: The device has no such rate.
        """
        known = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        rate = known.get(dtype)
        if rate is None:
            names = ", ".join(name for name, value in known.items() if value is not None)
            raise HardwareError(f"No matrix rate for dtype {dtype!r}; there are those for {names}.")
        return float(rate)

    def with_float32_sums(self, dtype: str) -> float:
        """Return the rate for a dtype of kernels that sum in float32, whatever products do.

        Raises:
            HardwareError: The device has no such rate.
        """
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

    Raises:
        HardwareError: A share is not in this range.
    """

    matrix: float = 1.0
    attention: float = 1.0
    memory: float = 1.0
    host: float = 1.0

    def __post_init__(self) -> None:
        """Refuse shares that cannot be."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            _check_positive(f"efficiency.{field.name}", value)
            if value > 1:
                raise HardwareError(
                    f"efficiency.{field.name}={value!r}: give the share of the peak rate that is "
                    "reached, at most 1."
                )


@dataclass(frozen=True, kw_only=True)
class HardwareSpec:
    """A machine with one or several equal devices.

    Attributes:
        name: What it is called, e.g. `rtx4090x8`.
        device_name: What one device is called.
        num_devices: Devices, each of them a worker.
        device_bytes: Memory of one device.
        matrix_rates: Matrix products of one device.
        memory_bytes_per_second: Bandwidth of a device's own memory.
        upload_bytes_per_second: Host to one device, page-locked.
        download_bytes_per_second: One device to host, page-locked.
        devices_per_root: Devices behind one shared root of the bus.
        root_upload_bytes_per_second: Host to all devices of a root together.
        root_download_bytes_per_second: All devices of a root together to the host.
        host_bytes: Host memory.
        host_bytes_per_second: Bandwidth of the host's memory, for everything together.
        shares_host_memory: Whether the devices compute in host memory, as CPU workers do: nothing
            is copied, and `device_bytes` is a part of `host_bytes`.
        devices_reach_each_other: Whether each device's driver copies from every other one's memory
            without the host, as `torch.cuda.can_device_access_peer` says.
        efficiency: What share of the rates is reached.

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
    efficiency: Efficiency = Efficiency()

    def __post_init__(self) -> None:
        """Refuse figures that cannot be."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name.startswith(("num_", "devices_per")) or field.name.endswith("_bytes"):
                _check_count(field.name, value)
            elif field.name.endswith("_per_second"):
                _check_positive(field.name, value)
        for name in ("shares_host_memory", "devices_reach_each_other"):
            if not isinstance(getattr(self, name), bool):
                raise HardwareError(f"{name}={getattr(self, name)!r}: give true or false.")

    @property
    def num_roots(self) -> int:
        """Roots of the bus that have devices."""
        return -(-self.num_devices // self.devices_per_root)

    def matrix_seconds(self, operations: float, *, dtype: str) -> float:
        """Time of matrix products on one device."""
        return operations / (self.matrix_rates.of(dtype) * self.efficiency.matrix)

    def attention_seconds(self, operations: float, *, dtype: str) -> float:
        """Time of fused attention on one device."""
        rate = self.matrix_rates.with_float32_sums(dtype)
        return operations / (rate * self.efficiency.attention)

    def memory_seconds(self, num_bytes: float) -> float:
        """Time to read and write as many bytes of one device's memory."""
        return num_bytes / (self.memory_bytes_per_second * self.efficiency.memory)

    def host_seconds(self, num_bytes: float) -> float:
        """Time of the processor to read and write as many bytes of host memory."""
        return num_bytes / (self.host_bytes_per_second * self.efficiency.host)

    def upload_seconds(self, num_bytes: float, *, num_devices: int = 1) -> float:
        """Time to bring bytes to each of several devices at once; 0 where memory is shared."""
        if self.shares_host_memory:
            return 0.0
        return num_bytes / min(
            self.upload_bytes_per_second,
            self._share(self.root_upload_bytes_per_second, num_devices),
            self.host_bytes_per_second / num_devices,
        )

    def download_seconds(self, num_bytes: float, *, num_devices: int = 1) -> float:
        """Time to bring bytes from each of several devices at once; 0 where it is shared."""
        if self.shares_host_memory:
            return 0.0
        return num_bytes / min(
            self.download_bytes_per_second,
            self._share(self.root_download_bytes_per_second, num_devices),
            self.host_bytes_per_second / num_devices,
        )

    def _share(self, root_bytes_per_second: float, num_devices: int) -> float:
        """A device's part of a root, `num_devices` spread evenly over the roots."""
        return root_bytes_per_second / -(-num_devices // self.num_roots)
