"""Memory on a device for weights: allocated once, used for one block after the other.

A block's leaves are views of the memory that its region is copied into. They depend on the form of
the block and on the place of the region, so they are made once and serve every block of the form,
visit after visit: bringing a block costs one copy per flat buffer, however many tensors it has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from roundpipe_lightning.engine.device.base import Device
from roundpipe_lightning.engine.device.events import Event
from roundpipe_lightning.engine.store.block_layout import BlockLayout, Form, Piece, sum_wide
from roundpipe_lightning.engine.transfer.copy_queue import cut_up


@dataclass(frozen=True)
class _Leaves:
    """The leaves of a form at a place.

    Attributes:
        leaves: In the order of the form's parameters.
        num_attributes: How many attributes each has when it is new.
    """

    leaves: tuple[nn.Parameter, ...]
    num_attributes: int

    @property
    def are_as_new(self) -> bool:
        """Whether code that used them has left nothing on them: hooks, attributes."""
        num_attributes = self.num_attributes
        for leaf in self.leaves:  # a loop: a visit may have thousands
            if leaf._backward_hooks or len(leaf.__dict__) != num_attributes:  # noqa: SLF001
                return False
        return True


class Memory:
    """A flat buffer on a device, for the regions of blocks.

    Args:
        device: Where.
        name: For messages, for example `slot 0 of worker 1`.

    Attributes:
        used_by: What is to end before something else is written into it.
        num_bytes: Its length.
        chunk_bytes: Longest copy into it.
    """

    def __init__(self, device: Device, *, name: str) -> None:
        self.name = name
        self.used_by: tuple[Event, ...] = ()
        self.num_bytes = 0
        self.chunk_bytes = device.chunk_bytes
        self._device = device
        self._buffer: Tensor | None = None
        self._leaves: dict[tuple[Form, int], _Leaves] = {}

    def grow(self, num_bytes: int) -> None:
        """Make it at least so long; what was in it is lost. Nothing may be using it."""
        if num_bytes > self.num_bytes:
            self._leaves.clear()
            self._buffer, self.num_bytes = None, 0  # before the new one is there
            with torch.inference_mode(mode=False):  # an evaluation may be the first to come here
                self._buffer = self._device.allocate(num_bytes)
            self.num_bytes = num_bytes
            self.used_by = (self._device.mark_event(f"{self.name} is new"),)

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


class _Given:
    """The leaves that a region has given last, by parameter: a tensor's hash is expensive."""

    leaves: tuple[nn.Parameter, ...] | None = None
    by_parameter: Mapping[nn.Parameter, nn.Parameter]


@dataclass(frozen=True, kw_only=True)
class Region:
    """Where a block lies on a worker.

    Attributes:
        memory: In which buffer.
        offset: Its first byte there.
        layout: The block's layout.
    """

    memory: Memory
    offset: int
    layout: BlockLayout

    def leaves(self) -> Mapping[nn.Parameter, nn.Parameter]:
        leaves = self.memory.leaves(self.layout.form, self.offset)
        if self._given.leaves is not leaves:
            self._given.leaves = leaves
            self._given.by_parameter = dict(zip(self.layout.parameters, leaves, strict=True))
        return self._given.by_parameter

    @cached_property
    def _given(self) -> _Given:
        return _Given()

    def is_staged(self, *, trained_only: bool) -> bool:
        """Say whether some of what is copied into it is not page-locked; see `pieces`."""
        return not all(piece.is_locked for piece in self._chosen(trained_only=trained_only))

    def pieces(self, *, trained_only: bool, previous: bool) -> Sequence[tuple[Tensor, Tensor]]:
        """Return what is copied into it.

        Args:
            trained_only: Leave out what is there already and does not change.
            previous: Whether from what is kept beside the parameters, where something is.
        """
        found = self._cut_up.get((trained_only, previous))
        if found is None:
            found = self._cut(self._chosen(trained_only=trained_only), previous=previous)
            self._cut_up[trained_only, previous] = found
        return found

    @cached_property
    def _cut_up(self) -> dict[tuple[bool, bool], Sequence[tuple[Tensor, Tensor]]]:
        return {}  # once for all visits

    def _chosen(self, *, trained_only: bool) -> Sequence[Piece]:
        return [piece for piece in self.layout.pieces if piece.trained or not trained_only]

    def _cut(self, pieces: Sequence[Piece], *, previous: bool) -> Sequence[tuple[Tensor, Tensor]]:
        """Cut pieces into the chunks that are copied."""
        chunks: list[tuple[Tensor, Tensor]] = []
        with torch.inference_mode(mode=False):
            for piece in pieces:
                source = piece.served(previous=previous)
                there = self.memory.bytes_at(self.offset + piece.offset, source.nbytes)
                chunks += cut_up(there, source, self.memory.chunk_bytes)
        return tuple(chunks)
