"""Parameters that travel together, laid out in flat buffers in host memory.

```
block 3   flat float32 [ q.weight | k.weight | v.weight | ... | norm.weight ]     page-locked
                          ▲ parameter.data: a view, in place
```

Trainable and frozen parameters have buffers of their own, so that saving one kind does not drag the
other kind's storage along. Frozen parameters that are views of a file (`mapped_parameter.py`) stay
there, and so do those that share memory. Beside a buffer there may be a copy in 16 bits
(`store/upload_copies.py`), and one of the values before the last update.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from roundpipe_lightning.engine.device.base import Device
from roundpipe_lightning.engine.device.host_memory import own_pages, return_freed_memory
from roundpipe_lightning.engine.store.mapped_parameter import is_mapped
from roundpipe_lightning.engine.store.upload_copies import NarrowCopies

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
        narrow: Those that are uploaded from copies in 16 bits.
        copies: Takes these copies.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        loners: set[nn.Parameter],
        narrow: Collection[nn.Parameter] = (),
        copies: NarrowCopies | None = None,
    ) -> None:
        self.parameters = tuple(parameters)
        self.buffers: list[Tensor] = []
        #: Per buffer, what stands for it while the optimizer writes into it; see `keep_previous`.
        self.previous: list[Tensor | None] = []
        #: Per buffer, its copy in 16 bits.
        self.narrow: list[Tensor | None] = []
        self._slots: dict[nn.Parameter, Slot] = {}
        kinds: dict[tuple[torch.dtype, bool, bool], list[nn.Parameter]] = {}
        for parameter in parameters:
            if parameter not in loners and not is_mapped(parameter):
                kind = (parameter.dtype, parameter.requires_grad, parameter in narrow)
                kinds.setdefault(kind, []).append(parameter)
        for (dtype, _, is_narrow), members in kinds.items():
            self._adopt(members, dtype, copies if is_narrow else None)
        return_freed_memory()

    def _adopt(
        self, members: Sequence[nn.Parameter], dtype: torch.dtype, copies: NarrowCopies | None
    ) -> None:
        narrowest = dtype if copies is None else copies.dtype
        step = max(1, _ALIGNMENT_BYTES // narrowest.itemsize)
        offsets, end = [], 0
        for parameter in members:
            offsets.append(end)
            end += math.ceil(parameter.numel() / step) * step
        flat = own_pages(end, dtype)
        for parameter, offset in zip(members, offsets, strict=True):
            place = _like(flat, offset, parameter)
            place.copy_(parameter.detach())
            parameter.data = place
            self._slots[parameter] = Slot(buffer=len(self.buffers), offset=offset)
        self.buffers.append(flat)
        self.previous.append(None)
        self.narrow.append(None)
        if copies is not None:
            self.narrow[-1] = narrow = own_pages(end, copies.dtype)
            pairs = zip(members, offsets, strict=True)
            copies.add({p: _like(narrow, offset, p) for p, offset in pairs})

    @property
    def num_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(parameter.nbytes for parameter in self.parameters)

    def keep_previous(self, changing: Collection[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        """Make room for a second copy of the buffers that hold one of `changing`.

        It has the dtype that is uploaded.

        Returns:
            A place, with the present values, for every parameter of these buffers, and for those of
            `changing` that are in no buffer.
        """
        places: dict[nn.Parameter, Tensor] = {}
        taken = {self._slots[p].buffer for p in changing if p in self._slots}
        for index in taken:
            if self.previous[index] is None:
                present, narrow = self.buffers[index], self.narrow[index]
                dtype = present.dtype if narrow is None else narrow.dtype
                self.previous[index] = own_pages(present.numel(), dtype).copy_(present)
        for parameter in self.parameters:
            slot = self._slots.get(parameter)
            if slot is None:
                if parameter in changing:
                    places[parameter] = parameter.detach().clone()
            elif (flat := self.previous[slot.buffer]) is not None:
                places[parameter] = _like(flat, slot.offset, parameter)
                places[parameter].copy_(parameter.detach())
        return places

    def kept(self) -> list[Tensor | None]:
        """Return, per flat buffer that is uploaded, what may be uploaded in its place."""
        return list(self.previous)

    def sources(self, *, previous: bool) -> list[Tensor]:
        """Return the flat buffers that are uploaded: copies in 16 bits where there are such.

        Args:
            previous: Whether those kept beside them are, where there are such.
        """
        kept = self.previous if previous else [None] * len(self.buffers)
        rows = zip(kept, self.narrow, self.buffers, strict=True)
        return [next(one for one in row if one is not None) for row in rows]

    def travelling(self) -> Iterator[Tensor]:
        """Give all flat buffers that may be uploaded."""
        for narrow, kept, present in zip(self.narrow, self.previous, self.buffers, strict=True):
            yield present if narrow is None else narrow
            if kept is not None:
                yield kept

    def members(self) -> list[list[tuple[nn.Parameter, int]]]:
        """Return, per flat buffer, the parameters that lie in it, each with its first element.

        A callback may have swapped `.data` (weight averaging does): such a one is left out, for the
        buffer is not the truth.
        """
        found: list[list[tuple[nn.Parameter, int]]] = [[] for _ in self.buffers]
        for parameter, slot in self._slots.items():
            if parameter.data_ptr() == self._address(slot):
                found[slot.buffer].append((parameter, slot.offset))
        return found

    def upload(
        self, device: Device, *, previous: Mapping[nn.Parameter, Tensor]
    ) -> dict[nn.Parameter, Tensor]:
        """Copy the group to a device: one copy per flat buffer.

        Args:
            device: Where to.
            previous: Values to take instead of the parameters'; empty: the parameters' own.

        Returns:
            Every parameter's values there, without a graph.
        """
        if device.shares_host_memory:
            return {p: previous.get(p, p).detach().to(p.dtype) for p in self.parameters}
        flats = [device.upload(buffer) for buffer in self.sources(previous=bool(previous))]
        return {p: self._uploaded(p, flats, device, previous) for p in self.parameters}

    def _uploaded(
        self,
        parameter: nn.Parameter,
        flats: Sequence[Tensor],
        device: Device,
        previous: Mapping[nn.Parameter, Tensor],
    ) -> Tensor:
        slot = self._slots.get(parameter)
        # A callback may have swapped `.data` (weight averaging does): then the buffer is not the
        # truth.
        if slot is None or parameter.data_ptr() != self._address(slot):
            return device.upload(previous.get(parameter, parameter))
        # `.data` has a version of its own: else what is done to one parameter is done to them all.
        return _like(flats[slot.buffer], slot.offset, parameter).data

    def _address(self, slot: Slot) -> int:
        buffer = self.buffers[slot.buffer]
        return buffer.data_ptr() + slot.offset * buffer.element_size()


def overlapping(parameters: Iterable[nn.Parameter]) -> set[nn.Parameter]:
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
    if parameter.numel() and not fills_its_memory(dense):
        strides = torch.empty(parameter.shape, device="meta").stride()
    return flat.as_strided(parameter.shape, strides, flat.storage_offset() + offset)


def fills_its_memory(tensor: Tensor) -> bool:
    """Say whether a tensor's memory has no gaps, whatever the order of its dimensions."""
    span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return span == tensor.numel() and all(s > 0 for s in tensor.stride())
