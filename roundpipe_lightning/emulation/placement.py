"""Places of emulated devices: their names, and which may meet in one operation.

An emulated device is called `"emulated:<index>"`. A place is such a name, or None for the host. The
rules are those of CUDA, so that what passes here passes on hardware.
"""

# ruff: noqa: SLF001 - operations whose name begins with an underscore are PyTorch's too

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_aten = torch.ops.aten

# Operations that write values into a tensor wherever the values come from.
_CROSSING = frozenset({_aten.copy, _aten.copy_, _aten._foreach_copy, _aten._foreach_copy_})
# Operations that are not element-wise and yet take a host tensor of no dimension.
_TAKES_HOST_SCALAR = frozenset(
    getattr(_aten, name)
    for name in "fill fill_ index_fill index_fill_ index_put index_put_ _index_put_impl_ "
    "masked_fill masked_fill_ where".split()
)
# Operations whose `indices` may be on the host.
_INDEXING = frozenset(
    {_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_, _aten._unsafe_index}
)


class DeviceMismatchError(RuntimeError):
    """An operation met tensors of different places; on hardware it would have raised as well."""


@functools.cache
def device_of(device_name: str) -> torch.device:
    """Return the value of `.device` for a device: `cpu:3` for `"emulated:3"`."""
    return torch.device("cpu", int(device_name.rpartition(":")[2]))


def place_of_device(device: torch.device | str | None) -> str | None:
    """Return the place a `device=` argument means: `cpu:2` is a device, `cpu` the host."""
    device = torch.device("cpu" if device is None else device)
    if device.type != "cpu" or device.index is None:
        return None
    return f"emulated:{device.index}"


@dataclass(kw_only=True, slots=True)
class Operand:
    """A tensor argument of an operation and where it is."""

    name: str  # the argument's name in the operation's schema
    tensor: torch.Tensor
    place: str | None
    column: int | None  # its position, where the argument is a list of tensors
    written: bool

    def __str__(self) -> str:
        position = "" if self.column is None else f"[{self.column}]"
        return f"{self.name}{position} {tuple(self.tensor.shape)} on {self.place or 'the host'}"


def operands_of(
    func: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    place_of: Callable[[torch.Tensor], str | None],
) -> Iterator[Operand]:
    for i, (name, written) in enumerate(_arguments(func)):
        value: Any = args[i] if i < len(args) else kwargs.get(name)
        if value is None:
            continue
        listed = isinstance(value, list | tuple)
        values: Sequence[Any] = value if listed else [value]
        for column, tensor in enumerate(values):
            if isinstance(tensor, torch.Tensor):
                yield Operand(
                    name=name,
                    tensor=tensor,
                    place=place_of(tensor),
                    column=column if listed else None,
                    written=written,
                )


@functools.cache
def _arguments(func: torch._ops.OpOverload) -> tuple[tuple[str, bool], ...]:
    return tuple(
        (a.name, a.alias_info is not None and a.alias_info.is_write) for a in func._schema.arguments
    )


def is_foreach(func: torch._ops.OpOverload) -> bool:
    return func._schema.name.startswith("aten::_foreach_")


def check_places(func: torch._ops.OpOverload, operands: list[Operand]) -> None:
    """Raise a DeviceMismatchError unless the operands of `func` may meet."""
    if func.overloadpacket in _CROSSING:
        return
    for group in _columns(operands) if is_foreach(func) else [operands]:
        first = next((o for o in group if o.place is not None), None)
        if first is None:
            continue
        for operand in group:
            if operand.place == first.place or _host_is_taken(func, operand):
                continue
            raise DeviceMismatchError(
                f"{func}: expected all tensors to be on the same device, "
                f"but found {first} and {operand}"
            )


def _columns(operands: list[Operand]) -> Iterator[list[Operand]]:
    shared = [o for o in operands if o.column is None]
    for column in sorted({o.column for o in operands if o.column is not None}):
        yield [o for o in operands if o.column == column] + shared


def _host_is_taken(func: torch._ops.OpOverload, operand: Operand) -> bool:
    """Whether a host operand may stand beside operands on a device, as on CUDA."""
    if operand.place is not None:
        return False
    packet = func.overloadpacket
    if packet in _INDEXING and operand.name == "indices":
        return True
    if operand.tensor.dim() != 0 or operand.written:
        return False
    if torch.is_grad_enabled() and operand.tensor.requires_grad:
        return False
    if is_foreach(func):
        return operand.column is None
    return packet in _TAKES_HOST_SCALAR or torch.Tag.pointwise in func.tags
