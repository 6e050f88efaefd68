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
takes the model's memory and one block's. Matrices may have copies in 16 bits, which are uploaded in
their place (`engine/narrow.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from roundpipe_lightning.engine.device import Device
from roundpipe_lightning.engine.mapped import MappedParameter, is_mapped
from roundpipe_lightning.engine.narrow import NarrowCopies
from roundpipe_lightning.engine.pages import own_pages, return_freed_memory
from roundpipe_lightning.engine.serving import Serving
from roundpipe_lightning.errors import ConfigurationError

_ALIGNMENT_BYTES = 64  # of every parameter in its buffer: what vector units and BLAS like


TakeGradients: TypeAlias = Callable[[dict[nn.Parameter, Tensor]], Collection[nn.Parameter]]
"""Given gradients that are complete while others are not; returns whose it takes over."""


class UpdateGate(Protocol):
    """Where whoever reads parameters waits for the optimizer; see `engine/updates.py`."""

    def await_updated(self, parameters: Iterable[nn.Parameter]) -> None:
        """Wait until parameters have the values that the next step computes with."""

    def is_updated(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Say whether they have them now."""

    def when_updated(
        self,
        parameters: Iterable[nn.Parameter],
        callback: Callable[[BaseException | None], None],
    ) -> None:
        """Call back when they have, or with the reason why they never will."""


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


class HostStore:
    """All parameters of a module in host memory, grouped by block.

    Args:
        module: The user's module; its parameters stay in it.
        blocks: The blocks of its stacks, each once.
        upload_dtype: That of the copies from which blocks' trained matrices of float32 are
            uploaded; None: there are none.

    Raises:
        ConfigurationError: If a parameter has no values (meta device), or was mapped from a file
            and has been converted or written to.
    """

    def __init__(
        self,
        module: nn.Module,
        blocks: Sequence[nn.Module],
        *,
        upload_dtype: torch.dtype | None = None,
    ) -> None:
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
        #: What is uploaded in place of some parameters.
        self.copies = None if upload_dtype is None else NarrowCopies(upload_dtype)
        alone = owners.keys() - self.shared if self.copies is not None else set()
        narrow = {p for p in alone if NarrowCopies.narrows(p)}

        def group(parameters: Iterable[nn.Parameter]) -> ParameterGroup:
            mine = [parameter for parameter in parameters if parameter not in taken]
            taken.update(mine)
            return ParameterGroup(mine, loners=loners, narrow=narrow, copies=self.copies)

        self._blocks = {block: group(block.parameters()) for block in blocks}
        self._outside = group(module.parameters())
        self._of_block = {block: tuple(block.parameters()) for block in blocks}
        self._pinned_by: Device | None = None
        #: Set where parameters change while a step runs.
        self.gate: UpdateGate | None = None
        #: Set where parameters are stepped as soon as their gradients are there.
        self.take_gradients: TakeGradients | None = None
        #: Values that stand for parameters while the optimizer writes into them; empty: nothing.
        #: In the dtype that is uploaded.
        self.previous: dict[nn.Parameter, Tensor] = {}
        #: Which of the two the steps that begin now are given.
        self.serving = Serving(previous=False)

    def pin(self, device: Device) -> None:
        """Page-lock all buffers that are uploaded, for copies to devices of this kind."""
        self._pinned_by = device
        for group in (*self._blocks.values(), self._outside):
            for buffer in group.travelling():
                device.pin(buffer)

    def close(self) -> None:
        """Give page locks back. The parameters stay as they are."""
        if self.copies is not None:
            self.copies.close()
        if self._pinned_by is not None:
            for group in (*self._blocks.values(), self._outside):
                for buffer in group.travelling():
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

    @property
    def longest_outside(self) -> int:
        """Bytes of the longest trained parameter that lies outside the blocks, or is shared."""
        candidates = (*self._outside.parameters, *self.shared)
        return max((p.nbytes for p in candidates if p.requires_grad), default=0)

    def block_bytes(self, block: nn.Module) -> int:
        """Bytes of a block's parameters."""
        return sum(parameter.nbytes for parameter in self._of_block[block])

    def parameters_of(self, block: nn.Module) -> tuple[nn.Parameter, ...]:
        """Return a block's parameters, those it shares with others included."""
        return self._of_block[block]

    def buffers_of(
        self, block: nn.Module
    ) -> list[tuple[Tensor, Tensor | None, Sequence[tuple[nn.Parameter, int]]]]:
        """Return a block's flat buffers, those kept beside them, and what lies in them."""
        group = self._blocks[block]
        rows = zip(group.sources(previous=False), group.kept(), group.members(), strict=True)
        return [(flat, kept, members) for flat, kept, members in rows if members]

    @property
    def serves_previous(self) -> bool:
        """Whether workers are given the values in `previous`, rather than the parameters."""
        return self.serving.previous

    @serves_previous.setter
    def serves_previous(self, serves: bool) -> None:
        if serves != self.serving.previous:
            self.serving = Serving(previous=serves)

    def served(self, parameter: nn.Parameter) -> Tensor:
        """Return what workers compute with, without waiting."""
        return self._served.get(parameter, parameter)

    def keep_previous(self, changing: Collection[nn.Parameter]) -> None:
        """Make room in `previous` for parameters that are to change while a step runs.

        Their whole buffers are kept, so that a block still travels in one copy.
        """
        for group in (*self._blocks.values(), self._outside):
            before = list(group.previous)
            self.previous |= group.keep_previous(changing)
            for kept, old in zip(group.previous, before, strict=True):
                if self._pinned_by is not None and kept is not None and old is None:
                    self._pinned_by.pin(kept)

    # ---------------------------------------------------------------------------- 16-bit copies

    def renew_copies(self) -> None:
        """Cast what has changed since it was cast, but for what the optimizer is at.

        That is cast when it has been updated. Called between steps.
        """
        if self.copies is None:
            return
        for parameters in self._of_block.values():
            if self.gate is None or self.gate.is_updated(parameters):
                self.copies.renew({p: p for p in parameters if p not in self._served})

    def updated(self, parameters: Iterable[nn.Parameter], *, by: Optimizer) -> None:
        """Cast parameters that an optimizer has stepped. Called before their gate opens."""
        if self.copies is not None:
            self.copies.updated({p: p for p in parameters}, by)

    # ------------------------------------------------------------------------------------ values

    def await_updated(self, block: nn.Module) -> None:
        """Wait until a block may be read: the optimizer is done with it."""
        if self.gate is not None:
            self.gate.await_updated(self._of_block[block])

    def value(self, parameter: nn.Parameter) -> Tensor:
        """Return what workers compute with, when the optimizer is done with it."""
        if self.gate is not None:
            self.gate.await_updated([parameter])
        return self._served.get(parameter, parameter)

    @property
    def _served(self) -> Mapping[nn.Parameter, Tensor]:
        return self.previous if self.serves_previous else {}

    def check_unwritten(self, block: nn.Module) -> None:
        """Raise if a parameter that is mapped from a file was written to.

        Raises:
            ConfigurationError: Naming it.
        """
        for parameter in self._of_block[block] if self._mapped else ():
            if isinstance(parameter, MappedParameter) and parameter in self._mapped:
                parameter.check_unwritten(self._mapped[parameter])

    def upload_block(self, block: nn.Module, device: Device) -> dict[nn.Parameter, Tensor]:
        """Copy a block's parameters, those it shares with others included, to a device.

        It waits for the optimizer first.

        Raises:
            ConfigurationError: If one that is mapped from a file was written to.
        """
        self.check_unwritten(block)
        self.await_updated(block)
        with self.serving.reading() as reads_previous:
            served = self.previous if reads_previous else {}
            values = self._blocks[block].upload(device, previous=served)
            for parameter in self._of_block[block]:
                if parameter not in values:
                    values[parameter] = device.upload(served.get(parameter, parameter))
        return values


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
    if parameter.numel() and not fills_its_memory(dense):
        strides = torch.empty(parameter.shape, device="meta").stride()
    return flat.as_strided(parameter.shape, strides, flat.storage_offset() + offset)


def fills_its_memory(tensor: Tensor) -> bool:
    """Say whether a tensor's memory has no gaps, whatever the order of its dimensions."""
    span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return span == tensor.numel() and all(s > 0 for s in tensor.stride())
