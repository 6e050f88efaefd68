"""Machines that the planning tests share."""

from __future__ import annotations

from roundpipe_lightning.planning.model.hardware import HardwareSpec, MatrixRates


def machine(
    num_devices: int,
    *,
    link: float = 100.0,
    host: float = 1e30,
    device_bytes: int = 10**12,
    shares_host_memory: bool = False,
) -> HardwareSpec:
    """Return a machine whose links carry `link` bytes per second each way."""
    return HardwareSpec(
        name=f"testx{num_devices}",
        device_name="test",
        num_devices=num_devices,
        device_bytes=device_bytes,
        matrix_rates=MatrixRates(float32=1.0),
        memory_bytes_per_second=1.0,
        upload_bytes_per_second=link,
        download_bytes_per_second=link,
        devices_per_root=num_devices,
        root_upload_bytes_per_second=1e30,
        root_download_bytes_per_second=1e30,
        host_bytes=10**15,
        host_bytes_per_second=host,
        shares_host_memory=shares_host_memory,
    )
