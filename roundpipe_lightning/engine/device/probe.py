"""Measures the machine it runs on: `hardware="auto"`.

Copies between host and devices, alone and all at once, copies within a device's memory, and a
matrix product per dtype are timed for a fraction of a second each; the whole takes less than ten
seconds. The result is kept in the user's cache folder under the devices' name and number and the
version of torch. Whether devices reach each other is asked of their driver each time. Nothing is
measured when this module is imported.

Measured rates are reached, not peaks, so the efficiencies of matrix products and of memory are 1;
that of attention is its ratio to matrix products on an RTX 4090 (docs/planning.md).
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

import torch

from roundpipe_lightning.engine.device.accelerator import all_reach, runtime_of
from roundpipe_lightning.engine.device.host_memory import UNKNOWN_BYTES, host_bytes
from roundpipe_lightning.errors import HardwareError
from roundpipe_lightning.files import write_text
from roundpipe_lightning.planning.model.hardware import (
    Efficiency,
    HardwareSpec,
    MatrixRates,
    hardware_from_mapping,
    hardware_to_mapping,
)

_ATTENTION_SHARE = 0.7 / 0.9
_HOST_SHARE = 0.55
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_COPY_BYTES = 2**27
_LITTLE_BYTES = 2**30  # of a device: what the runtime takes for this process, and a screen
_LEFT_TO_ALLOCATOR = 0.04  # of what there is
_SHORTEST_SECONDS = 0.1
_LONG_PRODUCT_SECONDS = 5e-3  # long enough to fill a device, and a larger one would take 64 times
_LARGEST_PRODUCT = 8192
_MOST_REPEATS = 64


def probe_hardware(
    *,
    num_workers: int | None = None,
    devices: Sequence[torch.device] = (),
    folder: Path | None = None,
    fresh: bool = False,
) -> HardwareSpec:
    """Measure this machine, or return what was measured before, unless a `fresh` one is wanted.

    Args:
        num_workers: Devices to count on: accelerators (None: all of them), or CPU workers where
            there is no accelerator (None: 1).
        devices: The accelerators; empty: the first ones. No other one is touched.
        folder: Where measurements are kept. None: the user's cache folder.
    """
    machine = _Machine.found(num_workers, devices)
    path = (folder or cache_folder()) / machine.file_name
    if not fresh and (known := _read(path)) is not None:
        return replace(known, devices_reach_each_other=machine.reaches_itself)
    if not machine.is_cpu and not all(runtime_of(one).counts_memory for one in machine.devices):
        raise HardwareError(f"{machine.name} does not say how much memory it has: name the machine")
    try:
        spec = machine.measured()
    finally:
        if not machine.is_cpu:
            _give_back()
    _write(path, spec)
    return spec


def cache_folder() -> Path:
    """The folder with what was measured: `$XDG_CACHE_HOME` or `~/.cache`, then our name."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "roundpipe_lightning" / "hardware"


def available_bytes(device: torch.device) -> int:
    """Return the bytes of an accelerator that a plan may use.

    That is all of it, or the share that this process may have, but for what is in use: by other
    processes, if that is more than a runtime takes, and by tensors of this one. A part is left to
    the allocator, which cannot use every gap.
    """
    memory = torch.accelerator
    free, total = memory.get_memory_info(device)
    allocated = memory.memory_allocated(device)
    others = total - free - memory.memory_reserved(device)
    most = min(
        total - (others if others > _LITTLE_BYTES else 0), total * runtime_of(device).fraction()
    )
    return max(0, int((1 - _LEFT_TO_ALLOCATOR) * (most - allocated)))


@dataclass(frozen=True, kw_only=True)
class _Machine:
    """The devices that are measured."""

    devices: tuple[torch.device, ...]  # accelerators; the one CPU without any
    name: str  # what the devices are called
    num_workers: int  # accelerators, or CPU workers

    @classmethod
    def found(cls, num_workers: int | None, given: Sequence[torch.device] = ()) -> _Machine:
        kind = torch.accelerator.current_accelerator(check_available=True)
        if kind is None:
            name = platform.processor() or platform.machine() or "CPU"
            cpu = torch.device("cpu")
            return cls(devices=(cpu,), name=f"CPU {name}", num_workers=num_workers or 1)
        count = torch.accelerator.device_count()
        if num_workers is not None and not 1 <= num_workers <= count:
            raise HardwareError(f"{num_workers} devices were asked for; this machine has {count}.")
        first = [torch.device(kind.type, index) for index in range(num_workers or count)]
        devices = tuple(given or first)
        names = [_name(device) for device in devices]
        if len(set(names)) == 1:
            names = names[:1]
        return cls(devices=devices, name=" and ".join(names), num_workers=len(devices))

    @property
    def is_cpu(self) -> bool:
        return self.devices[0].type == "cpu"

    @property
    def reaches_itself(self) -> bool:
        return not self.is_cpu and all_reach(self.devices)

    @property
    def file_name(self) -> str:
        words = [self.name, f"x{self.num_workers}", f"torch-{torch.__version__}"]
        if self.is_cpu:
            words.insert(2, f"{torch.get_num_threads()}-threads")
        elif (numbers := [device.index for device in self.devices]) != [*range(len(numbers))]:
            words.insert(2, "-".join(map(str, ("of", *numbers))))
        return re.sub(r"[^A-Za-z0-9.+_-]+", "-", "_".join(words)) + ".json"

    def measured(self) -> HardwareSpec:
        """Measure a device of each kind alone, and the links of all at once."""
        in_host, host_rate = host_bytes() or UNKNOWN_BYTES, _copy_rate(torch.device("cpu"))
        # CPU workers share cores, memory and bandwidth evenly.
        share = 1 / self.num_workers if self.is_cpu else 1.0
        kinds: dict[tuple[str, int], HardwareSpec] = {}
        workers = []
        for device in self.devices:
            kind = (self.name, int(in_host * share))
            if not self.is_cpu:
                kind = (_name(device), torch.accelerator.get_memory_info(device)[1])
            if kind not in kinds:
                up = down = rate = host_rate * share
                if not self.is_cpu:
                    rate = _copy_rate(device)
                    up, down = (_transfer_rate([device], upload=up) for up in (True, False))
                kinds[kind] = HardwareSpec(
                    name="auto",
                    device_name=kind[0],
                    num_devices=1,
                    device_bytes=kind[1],
                    matrix_rates=_matrix_rates(device, share=share),
                    memory_bytes_per_second=rate,
                    upload_bytes_per_second=up,
                    download_bytes_per_second=down,
                    devices_per_root=1,
                    root_upload_bytes_per_second=up,
                    root_download_bytes_per_second=down,
                    host_bytes=in_host,
                    host_bytes_per_second=host_rate,
                    shares_host_memory=self.is_cpu,
                    efficiency=Efficiency(attention=_ATTENTION_SHARE, host=_HOST_SHARE),
                )
            workers.append(kinds[kind])
        root_up = root_down = host_rate
        if not self.is_cpu:
            root_up, root_down = (_transfer_rate(self.devices, upload=up) for up in (True, False))
        first = workers[0]
        return replace(
            first,
            device_name=self.name,
            num_devices=self.num_workers,
            device_bytes=min(one.device_bytes for one in workers),
            devices_per_root=self.num_workers,
            root_upload_bytes_per_second=max(first.upload_bytes_per_second, root_up),
            root_download_bytes_per_second=max(first.download_bytes_per_second, root_down),
            devices_reach_each_other=self.reaches_itself,
            unequal=tuple(workers) if len(kinds) > 1 else (),
        )


def _name(device: torch.device) -> str:
    properties = getattr(torch.get_device_module(device), "get_device_properties", None)
    return device.type if properties is None else getattr(properties(device), "name", device.type)


def _seconds(work: Callable[[], object], devices: Sequence[torch.device]) -> float:
    """Time of one run of some work: the average over as many as take long enough."""
    work()
    _wait(devices)
    repeats = 1
    while True:
        start = perf_counter()
        for _ in range(repeats):
            work()
        _wait(devices)
        seconds = perf_counter() - start
        if seconds >= _SHORTEST_SECONDS or repeats >= _MOST_REPEATS:
            return max(seconds, 1e-9) / repeats
        repeats = min(_MOST_REPEATS, 2 * repeats)


def _wait(devices: Sequence[torch.device]) -> None:
    for device in devices:
        if device.type != "cpu":
            with torch.accelerator.device_index(device.index):  # else device 0 gets a context
                torch.accelerator.synchronize(device)


def _give_back() -> None:
    """Free the measurement's memory, which PyTorch would keep: a training wants other sizes."""
    torch.accelerator.empty_cache()
    empty_host_cache = getattr(torch.accelerator, "empty_host_cache", None)  # not in torch 2.11
    if empty_host_cache is not None:
        empty_host_cache()


def _matrix_rates(device: torch.device, *, share: float) -> MatrixRates:
    rates = {}
    for dtype in _DTYPES:
        seconds, size = 0.0, 128
        while seconds < _LONG_PRODUCT_SECONDS and size < _LARGEST_PRODUCT:
            size *= 4
            seconds = _product_seconds(device, dtype, size)
        rates[str(dtype).removeprefix("torch.")] = share * 2 * size**3 / seconds
    return MatrixRates(**rates)


def _product_seconds(device: torch.device, dtype: torch.dtype, size: int) -> float:
    first, second, result = (torch.ones((size, size), dtype=dtype, device=device) for _ in range(3))
    return _seconds(lambda: torch.mm(first, second, out=result), [device])


def _copy_rate(device: torch.device) -> float:
    """Bytes per second that a copy within one memory reads and writes."""
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * _COPY_BYTES / _seconds(lambda: target.copy_(source), [device])


def _transfer_rate(devices: Sequence[torch.device], *, upload: bool) -> float:
    """Bytes per second between page-locked host memory and devices, all of them at once."""
    pinned = devices[0].type != "cpu"
    pairs = []
    for device in devices:
        host = torch.ones(_COPY_BYTES, dtype=torch.uint8, pin_memory=pinned)
        there = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)
        pairs.append((there, host) if upload else (host, there))

    def work() -> None:
        for target, source in pairs:
            target.copy_(source, non_blocking=True)

    return len(devices) * _COPY_BYTES / _seconds(work, devices)


def _read(path: Path) -> HardwareSpec | None:
    try:
        figures = json.loads(path.read_text(encoding="utf-8"))
        return hardware_from_mapping(figures) if isinstance(figures, dict) else None
    except (OSError, ValueError):  # HardwareError and a bad JSON text are ValueErrors
        return None


def _write(path: Path, spec: HardwareSpec) -> None:
    """Keep a measurement where that is possible; else the next one takes its seconds again."""
    with contextlib.suppress(OSError):
        write_text(path, json.dumps(hardware_to_mapping(spec), indent=2))
