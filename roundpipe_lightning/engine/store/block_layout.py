"""Layouts of a block's parameters in a worker's memory, and the copies that go there.

```
host     trainable float32 [ q | k | v ]     frozen bfloat16 [ w1 | w2 ]    a parameter of its own
             │ one copy                          │ one copy                     │
region   [ q | k | v |·| w1 | w2 |·| p ]      one flat buffer of bytes, wherever the block is put
gradients [ q | k | v ]                       trainable parameters alone, in the same order
```

Blocks of the same structure have the same *form*, and what is made for a form at a place, its
leaves say, serves them all: bringing a block costs one copy per flat buffer, however many tensors
it has. Steps W2 and W5 of docs/design.md.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from roundpipe_lightning.engine.device.base import Device
from roundpipe_lightning.engine.device.events import Event
from roundpipe_lightning.engine.store.flat_buffers import fills_its_memory
from roundpipe_lightning.engine.store.host_store import HostStore

_ALIGNMENT_BYTES = 256  # of a block's buffers in its region
_TENSOR_ALIGNMENT_BYTES = 64  # of every gradient, as of every parameter on the host


@dataclass(frozen=True)
class Place:
    """A parameter's place in the region of its block."""

    offset: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]  # its strides, in elements
    trained: bool
    gradient_dtype: torch.dtype | None = None  # type of its gradient, where that is another one

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def moved(self, offset: int) -> Place:
        return replace(self, offset=self.offset + offset)

    def within(self, region: Tensor, *, offset: int) -> Tensor:
        """Return the parameter's part of a flat buffer of bytes; its block begins at `offset`."""
        start = offset + self.offset
        flat = region[start : start + self.num_bytes].view(self.dtype)
        return flat.as_strided(self.shape, self.stride)


@dataclass(frozen=True, eq=False)
class Form:
    """The places of a block's parameters, in the order of the block. Equal ones are one object."""

    places: tuple[Place, ...]  # one per parameter
    num_bytes: int

    @cached_property
    def trained(self) -> tuple[int, ...]:
        return tuple(index for index, place in enumerate(self.places) if place.trained)

    @cached_property
    def gradients(self) -> tuple[Place, ...]:
        """The places of their gradients, in a region for gradients alone."""
        places, end = [], 0
        for index in self.trained:
            place = self.places[index]
            strides = torch.empty(place.shape, device="meta").stride()
            dtype = place.gradient_dtype or place.dtype
            places.append(Place(end, dtype, place.shape, strides, trained=True))
            end += _aligned(places[-1].num_bytes, _TENSOR_ALIGNMENT_BYTES)
        return tuple(places)

    @cached_property
    def gradient_bytes(self) -> int:
        if not self.gradients:
            return 0
        last = self.gradients[-1]
        return _aligned(last.offset + last.num_bytes)


@dataclass(frozen=True, kw_only=True, eq=False)
class UploadPiece:
    """Host memory that is copied into a region."""

    source: Tensor  # flat bytes
    # those that may be copied in their place (`WeightVersions`); None: nothing
    previous: Tensor | None
    offset: int
    trained: bool  # whether it changes from step to step

    def version(self, *, previous: bool) -> Tensor:
        return self.previous if previous and self.previous is not None else self.source


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockLayout:
    """A block's parameters, where they go and where they come from."""

    parameters: tuple[nn.Parameter, ...]  # in the order of the block
    form: Form
    pieces: tuple[UploadPiece, ...]  # what is copied
    has_copies: bool  # whether a piece is a copy that this layout has made

    @cached_property
    def trained(self) -> frozenset[nn.Parameter]:
        return frozenset(self.parameters[index] for index in self.form.trained)


@dataclass(frozen=True, eq=False)
class FlatLayout:
    """Layout of gradients in a flat buffer of bytes."""

    parameters: tuple[nn.Parameter, ...]  # whose gradients
    places: tuple[Place, ...]  # where each lies
    num_bytes: int

    @cached_property
    def spans(self) -> tuple[tuple[torch.dtype, int, int], ...]:
        """Parts of one dtype, each with its first byte and that behind it."""
        found: list[tuple[torch.dtype, int, int]] = []
        for place in self.places:
            stop = place.offset + place.num_bytes
            if found and found[-1][0] == place.dtype:
                found[-1] = (place.dtype, found[-1][1], stop)
            else:
                found.append((place.dtype, place.offset, stop))
        return tuple(found)


class Layouts:
    """The layouts of a store's blocks, made once and looked at again before each step."""

    def __init__(self, store: HostStore) -> None:
        self._store = store
        self._known: dict[nn.Module, tuple[object, BlockLayout]] = {}
        self._forms: dict[tuple[tuple[Place, ...], int], Form] = {}  # by what they are made of
        self._of_gradients: dict[tuple[BlockLayout, ...], FlatLayout] = {}
        self._lock = threading.Lock()
        #: Grows when a layout is another than before.
        self.version = 0

    def is_renewed(self, block: nn.Module) -> bool:
        known = self._known.get(block)
        return known is not None and known[0] == self._state(block) and not known[1].has_copies

    def of_gradients(self, blocks: tuple[BlockLayout, ...]) -> FlatLayout:
        """Return the layout of some blocks' gradients in a row; always the same object."""
        with self._lock:
            if blocks not in self._of_gradients:
                parameters: list[nn.Parameter] = []
                places: list[Place] = []
                end = 0
                for block in blocks:
                    parameters += [block.parameters[index] for index in block.form.trained]
                    places += [place.moved(end) for place in block.form.gradients]
                    end += block.form.gradient_bytes
                self._of_gradients[blocks] = FlatLayout(tuple(parameters), tuple(places), end)
            return self._of_gradients[blocks]

    def of(self, block: nn.Module) -> BlockLayout:
        known = self._known.get(block)
        return self.renewed(block) if known is None else known[1]

    def renewed(self, block: nn.Module) -> BlockLayout:
        """Return a block's layout; a new one if a parameter's memory or what is trained is new."""
        self._store.check_unwritten(block)
        if not self.is_renewed(block):
            made = self._made(block, self._store.parameters_of(block))
            self._known[block] = (self._state(block), made)
            self.version += 1
            self._of_gradients.clear()
        return self._known[block][1]

    def _state(self, block: nn.Module) -> Any:
        parameters = self._store.parameters_of(block)
        return (
            [p.data_ptr() for p in parameters],
            [gradient_dtype(p) if p.requires_grad else None for p in parameters],
            len(self._store.previous),
        )

    def _made(self, block: nn.Module, parameters: tuple[nn.Parameter, ...]) -> BlockLayout:
        has_copies = False
        pieces: list[UploadPiece] = []
        places: dict[nn.Parameter, Place] = {}
        end = 0
        for flat in self._store.buffers_of(block):
            buffer, members = flat.uploaded, flat.present_members()
            if not members:
                continue
            pieces.append(
                UploadPiece(
                    source=bytes_of(buffer),
                    previous=None if flat.kept is None else bytes_of(flat.kept),
                    offset=end,
                    trained=any(p.requires_grad for p, _ in members),
                )
            )
            for parameter, offset in members:
                first = end + offset * buffer.element_size()
                places[parameter] = _place(parameter, first, dtype=buffer.dtype)
            end += _aligned(buffer.nbytes)
        for parameter in parameters:
            if parameter in places:
                continue
            # In no buffer of this block: another block has it, or it lies in a file.
            values, kept = self._store.memory_of(parameter), self._store.previous.get(parameter)
            is_narrow = kept is not None and kept.dtype is not values.dtype
            if is_narrow or not fills_its_memory(values):  # until the next step begins
                values = self._store.current_values(parameter).detach()
                kept, has_copies = None, True
                values = values.to(parameter.dtype).contiguous()
            pieces.append(
                UploadPiece(
                    source=bytes_of(values),
                    previous=None if kept is None else bytes_of(kept),
                    offset=end,
                    trained=parameter.requires_grad,
                )
            )
            places[parameter] = _place(parameter, end, stride=values.stride())
            end += _aligned(values.nbytes)
        form = (tuple(places[p] for p in parameters), end)
        return BlockLayout(
            parameters=parameters,
            form=self._forms.setdefault(form, Form(*form)),
            pieces=tuple(pieces),
            has_copies=has_copies,
        )


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the memory of a tensor without gaps as flat bytes."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return flat.view(torch.uint8)


def fingerprint(values: Tensor) -> int:
    """Return a checksum of a host tensor's values: it shows writes that PyTorch does not count.

    It counts neither those through `tensor.data` nor those of compiled kernels.
    """
    return zlib.crc32(bytes_of(values.contiguous()).numpy().data)


def region_bytes(sizes: Sequence[int]) -> int:
    return sum(_aligned(size) for size in sizes)


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    return parameter.grad_dtype or parameter.dtype


def sum_wide(leaf: Tensor, dtype: torch.dtype) -> None:
    """Sum up a leaf's gradients in a type that loses nothing of its own or of `dtype`."""
    wide = torch.promote_types(leaf.dtype, dtype)
    if wide is not leaf.dtype:
        leaf.grad_dtype = wide


def _place(
    parameter: nn.Parameter,
    offset: int,
    *,
    dtype: torch.dtype | None = None,
    stride: tuple[int, ...] | None = None,
) -> Place:
    dtype = dtype or parameter.dtype
    sums = gradient_dtype(parameter) if parameter.requires_grad else dtype
    return Place(
        offset,
        dtype,
        parameter.shape,
        parameter.stride() if stride is None else stride,
        parameter.requires_grad,
        None if sums is dtype else sums,
    )


def _aligned(num_bytes: int, alignment: int = _ALIGNMENT_BYTES) -> int:
    return -(-num_bytes // alignment) * alignment


@dataclass(frozen=True)
class _Leaves:
    """The leaves of a form at a place."""

    leaves: tuple[nn.Parameter, ...]  # in the order of the form's parameters
    num_attributes: int  # how many attributes each has when it is new

    @property
    def are_as_new(self) -> bool:
        """Whether code that used them has left nothing on them: hooks, attributes."""
        num_attributes = self.num_attributes
        for leaf in self.leaves:  # a loop: a stage run may have thousands
            if leaf._backward_hooks or len(leaf.__dict__) != num_attributes:  # noqa: SLF001
                return False
        return True


@dataclass(eq=False)
class Memory:
    """A flat buffer on a device, for regions of blocks.

    What `used_by` has is to end before something else is written into it.
    """

    device: Device
    _: KW_ONLY
    name: str  # for messages, for example `slot 0 of worker 1`

    def __post_init__(self) -> None:
        self.used_by: tuple[Event, ...] = ()
        self.num_bytes = 0
        self._buffer: Tensor | None = None
        self._leaves: dict[tuple[Form, int], _Leaves] = {}

    def grow(self, num_bytes: int) -> None:
        """Make the buffer at least so long. Its content is lost: nothing may be using it."""
        if num_bytes > self.num_bytes:
            self._leaves.clear()
            self._buffer, self.num_bytes = None, 0  # before the new one is there
            with torch.inference_mode(mode=False):  # an evaluation may be the first to come here
                self._buffer = self.device.allocate(num_bytes)
            self.num_bytes = num_bytes
            self.used_by = (self.device.mark_event(f"{self.name} is new"),)

    def bytes_at(self, offset: int, num_bytes: int) -> Tensor:
        assert self._buffer is not None, "it has grown"
        with torch.inference_mode(mode=False):
            return self._buffer[offset : offset + num_bytes]

    def leaves(self, form: Form, offset: int) -> tuple[nn.Parameter, ...]:
        known = self._leaves.get((form, offset))
        if known is None or not known.are_as_new:
            known = self._leaves[form, offset] = self._made(form, offset)
        for leaf, place in zip(known.leaves, form.places, strict=True):
            if leaf.requires_grad != place.trained:  # code that used it has changed it
                leaf.requires_grad_(place.trained)
        return known.leaves

    def _made(self, form: Form, offset: int) -> _Leaves:
        assert self._buffer is not None, "it has grown"
        leaves = []
        with torch.inference_mode(mode=False), torch.no_grad():
            for place in form.places:
                # `.data` has a version of its own: what is done to one leaf is not done to all.
                values = place.within(self._buffer, offset=offset).data
                # Also where no gradient is wanted: PyTorch folds other products where a weight
                # needs none, and other products round differently.
                leaf = nn.Parameter(values, requires_grad=place.trained)
                if place.gradient_dtype is not None:
                    sum_wide(leaf, place.gradient_dtype)
                leaves.append(leaf)
        return _Leaves(tuple(leaves), len(leaves[0].__dict__) if leaves else 0)

    def clear(self) -> None:
        self._leaves.clear()
        self._buffer = None
        self.num_bytes = 0


@dataclass(kw_only=True, eq=False)
class Region:
    """Memory of a block on a worker."""

    memory: Memory
    offset: int
    layout: BlockLayout

    def __post_init__(self) -> None:
        self._leaves: tuple[nn.Parameter, ...] | None = None  # that were given last
        self._by_parameter: Mapping[nn.Parameter, nn.Parameter] = {}
        self._pieces: dict[tuple[bool, bool], Sequence[tuple[Tensor, Tensor]]] = {}

    def leaves(self) -> Mapping[nn.Parameter, nn.Parameter]:
        """Return a leaf for each of the block's parameters, in their order."""
        leaves = self.memory.leaves(self.layout.form, self.offset)
        if self._leaves is not leaves:  # made once: a tensor's hash is expensive
            self._leaves = leaves
            self._by_parameter = dict(zip(self.layout.parameters, leaves, strict=True))
        return self._by_parameter

    def pieces(self, *, trained_only: bool, previous: bool) -> Sequence[tuple[Tensor, Tensor]]:
        """Return what is copied into it, put together once for all stage runs.

        What is there already and does not change is left out, if it is `trained_only`; what is kept
        beside the parameters goes in their place, if that is `previous`.
        """
        pieces = self._pieces.get((trained_only, previous))
        if pieces is None:
            pieces = self._pieces[trained_only, previous] = [
                (self.memory.bytes_at(self.offset + piece.offset, source.nbytes), source)
                for piece in self.layout.pieces
                if piece.trained or not trained_only
                for source in [piece.version(previous=previous)]
            ]
        return pieces
