"""The host store: where the model lives.

The user's own parameters are the masters. The store lays each block's parameters out in flat
buffers in host memory, one per dtype, and points the parameters into them, so that a block travels
in one copy, whatever the number of its tensors:

```
block 3   flat float32 [ q.weight | k.weight | v.weight | ... | norm.weight ]     page-locked
                          ▲ parameter.data: a view, in place
```

Trainable and frozen parameters have buffers of their own, so that saving one kind does not drag the
other kind's storage along. Frozen parameters that are views of a file (`engine/mapped.py`) stay
there. A block's old memory is free before the next block's buffers are made, so opening the store
takes the model's memory and one block's.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from roundpipe_lightning.engine.device import Device
from roundpipe_lightning.engine.mapped import MappedParameter, is_mapped
from roundpipe_lightning.errors import ConfigurationError

_ALIGNMENT_BYTES = 64  # of every parameter in its buffer: what vector units and BLAS like


@dataclass(frozen=True, kw_only=True)
class Slot:
    """A parameter's place in its flat buffer.

    Attributes:
        buffer: Index of the flat buffer.
        offset: First element.
    """

    buffer: int
    offset: int


class ParameterGroup:
    """Parameters that travel together: a block's, or all that belong to no block.

    Args:
        parameters: Distinct parameters; their `.data` is pointed into the new buffers.
        loners: Parameters that share memory with others and must stay where they are.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], *, loners: set[nn.Parameter]) -> None:
        self.parameters = tuple(parameters)
        self.buffers: list[Tensor] = []
        self._slots: dict[nn.Parameter, Slot] = {}
        kinds: dict[tuple[torch.dtype, bool], list[nn.Parameter]] = {}
        for parameter in parameters:
            if parameter not in loners and not is_mapped(parameter):
                kinds.setdefault((parameter.dtype, parameter.requires_grad), []).append(parameter)
        for (dtype, _), members in kinds.items():
            self._adopt(members, dtype)
        _return_freed_memory()

    def _adopt(self, members: Sequence[nn.Parameter], dtype: torch.dtype) -> None:
        step = max(1, _ALIGNMENT_BYTES // dtype.itemsize)
        offsets, end = [], 0
        for parameter in members:
            offsets.append(end)
            end += math.ceil(parameter.numel() / step) * step
        flat = torch.zeros(end, dtype=dtype)
        for parameter, offset in zip(members, offsets, strict=True):
            place = _like(flat, offset, parameter)
            place.copy_(parameter.detach())
            parameter.data = place
            self._slots[parameter] = Slot(buffer=len(self.buffers), offset=offset)
        self.buffers.append(flat)

    @property
    def num_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(parameter.nbytes for parameter in self.parameters)

    def upload(self, device: Device) -> dict[nn.Parameter, Tensor]:
        """Copy the group to a device: one copy per flat buffer.

        Returns:
            Every parameter's values there, without a graph.
        """
        if device.shares_host_memory:
            return {parameter: parameter.detach() for parameter in self.parameters}
        flats = [device.upload(buffer) for buffer in self.buffers]
        return {
            parameter: self._uploaded(parameter, flats, device) for parameter in self.parameters
        }

    def _uploaded(self, parameter: nn.Parameter, flats: Sequence[Tensor], device: Device) -> Tensor:
        slot = self._slots.get(parameter)
        # A callback may have swapped `.data` (weight averaging does): then the buffer is not the
        # truth.
        if slot is None or parameter.data_ptr() != self._address(slot):
            return device.upload(parameter)
        # `.data` has a version of its own: else what is done to one parameter is done to them all.
        return _like(flats[slot.buffer], slot.offset, parameter).data

    def _address(self, slot: Slot) -> int:
        buffer = self.buffers[slot.buffer]
        return buffer.data_ptr() + slot.offset * buffer.element_size()


class HostStore:
    """All parameters of a module in host memory, grouped by block.

    Args:
        module: The user's module; its parameters stay in it.
        blocks: The blocks of its stacks, each once.

    Raises:
        ConfigurationError: If a parameter has no values (meta device), or was mapped from a file
            and has been converted or written to.
    """

    def __init__(self, module: nn.Module, blocks: Sequence[nn.Module]) -> None:
        for name, parameter in module.named_parameters():
            if parameter.is_meta:
                raise ConfigurationError(
                    f"Parameter {name!r} is on the meta device: it has a shape but no values. Load "
                    "or initialise the weights in `configure_model`."
                )
            if isinstance(parameter, MappedParameter):
                parameter.check_unconverted(name)
                parameter.check_unwritten(name)
        self._mapped = {p: name for name, p in module.named_parameters() if is_mapped(p)}
        owners: dict[nn.Parameter, int] = {}
        for block in blocks:
            for parameter in block.parameters():
                owners[parameter] = owners.get(parameter, 0) + 1
        outside = _parameters_outside(module, set(blocks))
        #: Parameters used in more than one place: their gradients have several sources.
        self.shared = {p for p, count in owners.items() if count > 1 or p in outside}
        loners = _overlapping(module.parameters())
        taken: set[nn.Parameter] = set()

        def group(parameters: Iterable[nn.Parameter]) -> ParameterGroup:
            mine = [parameter for parameter in parameters if parameter not in taken]
            taken.update(mine)
            return ParameterGroup(mine, loners=loners)

        self._blocks = {block: group(block.parameters()) for block in blocks}
        self._outside = group(module.parameters())
        self._of_block = {block: tuple(block.parameters()) for block in blocks}
        self._pinned_by: Device | None = None

    def pin(self, device: Device) -> None:
        """Page-lock all buffers for copies to devices of this kind."""
        self._pinned_by = device
        for group in (*self._blocks.values(), self._outside):
            for buffer in group.buffers:
                device.pin(buffer)

    def close(self) -> None:
        """Give page locks back. The parameters stay as they are."""
        if self._pinned_by is not None:
            for group in (*self._blocks.values(), self._outside):
                for buffer in group.buffers:
                    self._pinned_by.unpin(buffer)
            self._pinned_by = None

    def check_blocks(self) -> None:
        """Raise if a block has parameters that it had not when the store was made.

        Raises:
            ConfigurationError: Naming them.
        """
        for block, known in self._of_block.items():
            if not set(known).issuperset(block.parameters()):
                names = [name for name, p in block.named_parameters() if p not in set(known)]
                raise ConfigurationError(
                    f"A block ({type(block).__name__}) has parameters that it had not when the "
                    f"strategy set the workers up: {', '.join(names[:3])}. Load values in place, "
                    "with load_state_dict(...) without assign=True; add or replace parameters in "
                    "`configure_model`, which runs before. Some modules replace theirs while they "
                    "run (peft's LoRA on nn.MultiheadAttention). Adapt other layers, linear ones "
                    "say."
                )

    def block_bytes(self, block: nn.Module) -> int:
        """Bytes of a block's parameters."""
        return sum(parameter.nbytes for parameter in self._of_block[block])

    def upload_block(self, block: nn.Module, device: Device) -> dict[nn.Parameter, Tensor]:
        """Copy a block's parameters, those it shares with others included, to a device.

        Raises:
            ConfigurationError: If one that is mapped from a file was written to.
        """
        for parameter in self._of_block[block]:
            if isinstance(parameter, MappedParameter) and parameter in self._mapped:
                parameter.check_unwritten(self._mapped[parameter])
        values = self._blocks[block].upload(device)
        for parameter in self._of_block[block]:
            if parameter not in values:
                values[parameter] = device.upload(parameter)
        return values


def _return_freed_memory() -> None:
    """Give what was freed back to the system: the C library keeps pieces below 32 MiB.

    Without it, opening a store may take the memory of the model twice. Only glibc needs this.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def _parameters_outside(module: nn.Module, blocks: set[nn.Module]) -> set[nn.Parameter]:
    """Parameters that a module or a submodule of it has without going through a block."""
    found: set[nn.Parameter] = set()
    seen: set[nn.Module] = set()
    pending = [module]
    while pending:
        current = pending.pop()
        if current in seen or current in blocks:
            continue
        seen.add(current)
        found.update(current.parameters(recurse=False))
        pending.extend(current.children())
    return found


def _overlapping(parameters: Iterable[nn.Parameter]) -> set[nn.Parameter]:
    """Distinct parameters whose memory overlaps another's: moving one would part them."""
    spans = sorted(
        ((p.data_ptr(), p.data_ptr() + p.nbytes, p) for p in parameters if p.numel()),
        key=lambda span: span[:2],
    )
    found: set[nn.Parameter] = set()
    reach, holder = 0, None
    for start, end, parameter in spans:
        if holder is not None and start < reach:
            found.update((parameter, holder))
        if end > reach:
            reach, holder = end, parameter
    return found


def _like(flat: Tensor, offset: int, parameter: Tensor) -> Tensor:
    """A view of a flat buffer, shaped as a parameter; with its strides if they leave no gaps."""
    strides = parameter.stride()
    dense = torch.empty_strided(parameter.shape, strides, device="meta")
    if parameter.numel() and not _fills_its_memory(dense):
        strides = torch.empty(parameter.shape, device="meta").stride()
    return flat.as_strided(parameter.shape, strides, flat.storage_offset() + offset)


def _fills_its_memory(tensor: Tensor) -> bool:
    span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return span == tensor.numel() and all(s > 0 for s in tensor.stride())
