"""The machine that a training is planned for: named, measured, or this one's CPU workers."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Sequence, Set
from dataclasses import replace

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn
from torch.optim import Optimizer

from roundpipe_lightning.engine.device.accelerator import all_reach
from roundpipe_lightning.engine.device.host_memory import UNKNOWN_BYTES, host_bytes
from roundpipe_lightning.engine.device.probe import available_bytes, probe_hardware
from roundpipe_lightning.engine.store.block_layout import gradient_dtype
from roundpipe_lightning.errors import ConfigurationError, HardwareError
from roundpipe_lightning.optim import HostAdamW
from roundpipe_lightning.optim.float32_step import rounds_itself
from roundpipe_lightning.planning.model.hardware import HardwareSpec, load_hardware
from roundpipe_lightning.planning.model.storage import ParameterStorage


def find_machine(
    source: HardwareSpec | str | os.PathLike[str],
    *,
    num_workers: int,
    workers_per_device: int,
    computes_on_host: bool,
    accelerators: Sequence[torch.device] = (),
) -> HardwareSpec:
    """Return the machine, every worker a device.

    Args:
        source: What the user gave for it. `"auto"` is this machine: its accelerators, measured once
            in less than ten seconds; or its processor, with rates that are assumed, because CPU
            workers are alike whatever their speed, and the memory that there is.
        num_workers: Workers.
        workers_per_device: Workers that share each device.
        computes_on_host: Whether they are CPU workers.
        accelerators: The devices; empty: the first ones of the machine.

    Raises:
        HardwareError: The machine is not known, or a figure in its file is wrong.
        ConfigurationError: It has another number of devices.
    """
    num_devices = num_workers // workers_per_device
    if source == "auto":
        if computes_on_host:
            return cpu_workers(num_workers)
        spec = _probed(num_devices, accelerators)
    else:
        spec = source if isinstance(source, HardwareSpec) else load_hardware(source)
    if spec.num_devices != num_devices:
        raise ConfigurationError(
            f"hardware={spec.name} has {spec.num_devices} devices, but Trainer(devices=...) "
            f"gives {num_devices}. Change one of them, or set hardware='auto'."
        )
    if workers_per_device == 1:
        return spec
    return replace(
        spec,
        num_devices=num_workers,
        device_bytes=spec.device_bytes // workers_per_device,
        devices_reach_each_other=spec.devices_reach_each_other or num_devices == 1,
    )


def cpu_workers(num_workers: int) -> HardwareSpec:
    """Return this machine as equal CPU workers: assumed rates, and the memory that there is."""
    size = host_bytes() or UNKNOWN_BYTES
    return replace(
        load_hardware("cpu"),
        num_devices=num_workers,
        devices_per_root=num_workers,
        device_bytes=size,
        host_bytes=size,
    )


def _probed(num_devices: int, accelerators: Sequence[torch.device]) -> HardwareSpec:
    """Measure the accelerators, or take what was measured before; memory is what there is now."""
    try:
        spec = probe_hardware(num_workers=num_devices)
        return replace(
            spec,
            device_bytes=_least_available(spec, num_devices, accelerators),
            devices_reach_each_other=all_reach(_devices(num_devices, accelerators)),
            host_bytes=host_bytes() or UNKNOWN_BYTES,  # another container may have another limit
        )
    except (RuntimeError, HardwareError) as error:
        spec = load_hardware("rtx4090x1")
        rank_zero_info(
            f"roundpipe: the accelerators could not be measured ({error}); plans assume the rates "
            f"of an {spec.device_name}. Name the machine with RoundPipeStrategy(hardware=...)."
        )
    size = host_bytes() or UNKNOWN_BYTES
    return replace(
        spec,
        name="auto",
        num_devices=num_devices,
        devices_per_root=num_devices,
        device_bytes=_least_available(spec, num_devices, accelerators),
        devices_reach_each_other=all_reach(_devices(num_devices, accelerators)),
        host_bytes=size,
    )


def _least_available(
    spec: HardwareSpec, num_devices: int, accelerators: Sequence[torch.device]
) -> int:
    """What a plan may take of the accelerator with the least memory; a machine's where none is."""
    devices = _devices(num_devices, accelerators)
    return max(1, min(map(available_bytes, devices), default=spec.device_bytes))


def _devices(num_devices: int, accelerators: Sequence[torch.device]) -> Sequence[torch.device]:
    """The accelerators, or the machine's first ones; none where it has none."""
    kind = torch.accelerator.current_accelerator()
    if kind is None:
        return ()
    return accelerators or [torch.device(kind.type, index) for index in range(num_devices)]


def rate_name(machine: HardwareSpec, dtype: torch.dtype) -> str:
    """Return the name of a dtype's matrix rate; that of float32 where a machine has none."""
    name = str(dtype).removeprefix("torch.")
    try:
        machine.matrix_rates.of(name)
    except HardwareError:
        return "float32"
    return name


def storage_of(
    optimizers: Sequence[Optimizer],
    *,
    steps_in_float32: bool = False,
    keeps_previous: bool = False,
    masters: Set[nn.Parameter] = frozenset(),
) -> ParameterStorage:
    """Return what is kept for each parameter beside what is uploaded.

    Args:
        optimizers: Those of a training, or none.
        steps_in_float32: Whether bfloat16 parameters and gradients are float32 during the step, and
            the optimizer's state always.
        keeps_previous: Whether steps compute with a copy from before the last update; it counts
            as state.
        masters: Parameters that are uploaded from copies in 16 bits.
    """
    trained = {
        parameter
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad
    }
    num = sum(parameter.numel() for parameter in trained)
    gradients = sum(p.numel() * gradient_dtype(p).itemsize for p in trained)
    widened = [o for o in optimizers if steps_in_float32 and not rounds_itself(o)]
    state = sum(
        _state_bytes(optimizer, in_float32=optimizer in widened) for optimizer in optimizers
    )
    state += sum(8 * _num_narrow(optimizer) for optimizer in widened)
    if keeps_previous:
        state += sum(p.numel() * (2 if p in masters else p.itemsize) for p in trained)
    on_disk = sum(_num_trained(o) * o.state_place.disk_bytes for o in _hosted(optimizers))
    return ParameterStorage(
        master_bytes=sum(p.nbytes for p in masters) / num if num else 0.0,
        gradient_bytes=gradients / num if num else 0.0,
        optimizer_bytes=state / num if num else 0.0,
        disk_bytes=on_disk / num if num else 0.0,
    )


def _num_narrow(optimizer: Optimizer) -> int:
    """Numbers in the bfloat16 parameters that an optimizer trains."""
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return sum(p.numel() for p in parameters if p.requires_grad and p.dtype is torch.bfloat16)


def _hosted(optimizers: Sequence[Optimizer]) -> Iterator[HostAdamW]:
    """Yield the optimizers that say themselves what their state takes."""
    yield from (optimizer for optimizer in optimizers if isinstance(optimizer, HostAdamW))


def _num_trained(optimizer: Optimizer) -> int:
    """Numbers in the parameters that an optimizer trains."""
    return sum(
        parameter.numel()
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad
    )


def _state_bytes(optimizer: Optimizer, *, in_float32: bool) -> float:
    """Bytes of an optimizer's state: one small matrix per group is stepped by one of its kind.

    Nothing is known of an optimizer that cannot be made from its own settings.
    """
    kind = _torchs_own(type(optimizer))
    if isinstance(optimizer, HostAdamW):
        return _num_trained(optimizer) * optimizer.state_place.memory_bytes
    total = 0.0
    for group in optimizer.param_groups:
        trained = [parameter for parameter in group["params"] if parameter.requires_grad]
        if not trained:
            continue
        dtype = trained[0].dtype
        if in_float32 and dtype is torch.bfloat16:
            dtype = torch.float32
        sample = torch.nn.Parameter(torch.zeros(64, 64, dtype=dtype))
        sample.grad = torch.zeros_like(sample)
        accepted = inspect.signature(kind).parameters
        settings = {key: value for key, value in group.items() if key in accepted}
        settings.pop("params", None)
        try:
            with torch.enable_grad():
                twin = kind([sample], **settings)
                twin.step()
        except (AttributeError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError):
            continue
        tensors = [t for state in twin.state.values() for t in state.values() if torch.is_tensor(t)]
        per_parameter = sum(t.nbytes for t in tensors if t.numel() > 1) / sample.numel()
        total += per_parameter * sum(parameter.numel() for parameter in trained)
    return total


def _torchs_own(kind: type[Optimizer]) -> type[Optimizer]:
    """Return the class of PyTorch's that `kind` extends, else itself.

    What a user has added to a `step` is for the steps of the training alone: it may count or print.
    """
    own = (c for c in kind.__mro__ if issubclass(c, Optimizer) and c is not Optimizer)
    return next((c for c in own if c.__module__.startswith("torch.optim.")), kind)
