"""Memory on a device for weights: allocated once, used for one block after the other.

Steps W2 and W5 of docs/design.md.

A block's leaves are views of the memory that its region is copied into. They depend on the form of
the block and on the place of the region, so they are made once and serve every block of the form,
run after run: bringing a block costs one copy per flat buffer, however many tensors it has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from roundpipe_lightning.engine.device.base import Device
from roundpipe_lightning.engine.device.events import Event
from roundpipe_lightning.engine.store.block_layout import BlockLayout, Form, sum_wide


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


class Memory:
    """A flat buffer on a device, for the regions of blocks.

    Args:
        name: For messages, for example `slot 0 of worker 1`.

    Attributes:
        used_by: What is to end before something else is written into it.
    """

    def __init__(self, device: Device, *, name: str) -> None:
        self.name = name
        self.used_by: tuple[Event, ...] = ()
        self.num_bytes = 0
        self._device = device
        self._buffer: Tensor | None = None
        self._leaves: dict[tuple[Form, int], _Leaves] = {}

    def grow(self, num_bytes: int) -> None:
        """Make the buffer at least so long. Its content is lost: nothing may be using it."""
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


class Region:
    """Memory of a block on a worker."""

    def __init__(self, *, memory: Memory, offset: int, layout: BlockLayout) -> None:
        self.memory = memory
        self.layout = layout
        self._offset = offset
        self._leaves: tuple[nn.Parameter, ...] | None = None  # that were given last
        self._by_parameter: Mapping[nn.Parameter, nn.Parameter] = {}
        self._pieces: dict[tuple[bool, bool], Sequence[tuple[Tensor, Tensor]]] = {}

    def leaves(self) -> Mapping[nn.Parameter, nn.Parameter]:
        """Return a leaf for each of the block's parameters, in their order."""
        leaves = self.memory.leaves(self.layout.form, self._offset)
        if self._leaves is not leaves:  # made once: a tensor's hash is expensive
            self._leaves = leaves
            self._by_parameter = dict(zip(self.layout.parameters, leaves, strict=True))
        return self._by_parameter

    def is_staged(self, *, trained_only: bool) -> bool:
        return not all(p.is_locked for p in self.layout.pieces if p.trained or not trained_only)

    def pieces(self, *, trained_only: bool, previous: bool) -> Sequence[tuple[Tensor, Tensor]]:
        """Return what is copied into it, put together once for all stage runs.

        Args:
            trained_only: Leave out what is there already and does not change.
            previous: Whether from what is kept beside the parameters, where something is.
        """
        pieces = self._pieces.get((trained_only, previous))
        if pieces is None:
            pieces = self._pieces[trained_only, previous] = [
                (self.memory.bytes_at(self._offset + piece.offset, source.nbytes), source)
                for piece in self.layout.pieces
                if piece.trained or not trained_only
                for source in [piece.version(previous=previous)]
            ]
        return pieces
