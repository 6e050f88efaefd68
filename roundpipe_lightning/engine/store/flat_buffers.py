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
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from roundpipe_lightning.engine.device.host_memory import (
    own_pages,
    release_pages,
    return_freed_memory,
)
from roundpipe_lightning.engine.store.mapped_parameter import is_mapped
from roundpipe_lightning.engine.store.upload_copies import NarrowCopies

_ALIGNMENT_BYTES = 64  # of every parameter in its buffer: what vector units and BLAS like


@dataclass(kw_only=True, eq=False)
class FlatBuffer:
    """Host memory of parameters of one dtype, one behind the other."""

    # the parameters' own memory, in a storage of its own: uses of the parameters' are those that
    # others make, see `strategy/updates/parameter_watch.py`
    values: Tensor
    narrow: Tensor | None  # its copy in 16 bits, which is uploaded in its place
    members: dict[nn.Parameter, int]  # what lies in it, with the first element of each
    # what is uploaded while the optimizer writes into it; see `ParameterGroup.keep`
    kept: Tensor | None = None

    @property
    def uploaded(self) -> Tensor:
        """The tensor that is uploaded as long as no second version is kept."""
        return self.values if self.narrow is None else self.narrow

    def view_of(self, parameter: nn.Parameter) -> Tensor:
        return view_like(self.values, self.members[parameter], parameter)

    def present_members(self) -> list[tuple[nn.Parameter, int]]:
        """Return the members whose values are here.

        A callback may have swapped `.data` (weight averaging does): the buffer is not the truth
        then.
        """
        first, size = self.values.data_ptr(), self.values.element_size()
        return [(p, at) for p, at in self.members.items() if p.data_ptr() == first + at * size]

    def release(self, kept: Mapping[nn.Parameter, slice]) -> None:
        """Give memory of members back, but for these elements of them; others keep theirs."""
        present, begin = dict(self.present_members()), 0
        for parameter, offset in self.members.items():
            elements = kept.get(parameter, slice(0, parameter.numel()))
            if parameter not in present:
                elements = slice(0, parameter.numel())
            if elements.start < elements.stop:
                release_pages(self.values[begin : offset + elements.start])
                begin = offset + elements.stop
        release_pages(self.values[begin:])


class ParameterGroup:
    """Parameters that travel together: a block's, or all that belong to no block.

    Args:
        parameters: Distinct parameters; their `.data` is pointed into the new buffers.
        aliased: Parameters that share memory with others and must stay where they are.
        narrow: Those that are uploaded from copies in 16 bits.
        is_shared: As of `own_pages`.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        aliased: set[nn.Parameter],
        narrow: Collection[nn.Parameter] = (),
        copies: NarrowCopies | None = None,
        is_shared: bool = True,
    ) -> None:
        self._is_shared = is_shared
        self.parameters = tuple(parameters)
        self.buffers: list[FlatBuffer] = []
        kinds: dict[tuple[torch.dtype, bool, bool], list[nn.Parameter]] = {}
        for parameter in parameters:
            if parameter not in aliased and not is_mapped(parameter):
                kind = (parameter.dtype, parameter.requires_grad, parameter in narrow)
                kinds.setdefault(kind, []).append(parameter)
        for (dtype, _, is_narrow), members in kinds.items():
            self._adopt(members, dtype, copies if is_narrow else None)
        return_freed_memory()

    def _adopt(
        self, parameters: Sequence[nn.Parameter], dtype: torch.dtype, copies: NarrowCopies | None
    ) -> None:
        narrowest = dtype if copies is None else copies.dtype
        step = max(1, _ALIGNMENT_BYTES // narrowest.itemsize)
        members, end = {}, 0
        for parameter in parameters:
            members[parameter] = end
            end += math.ceil(parameter.numel() / step) * step
        flat, narrow = own_pages(end, dtype, is_shared=self._is_shared), None
        pages = flat.view(torch.uint8).numpy()
        twin = torch.from_numpy(pages).view(dtype) if end else torch.empty_like(flat)
        for parameter, offset in members.items():
            place = view_like(twin, offset, parameter)
            place.copy_(parameter.detach())
            parameter.data = place
        if copies is not None:
            narrow = own_pages(end, copies.dtype)
            copies.add({p: view_like(narrow, offset, p) for p, offset in members.items()})
        self.buffers.append(FlatBuffer(values=flat, narrow=narrow, members=members))

    def keep(self, changing: Collection[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        """Make room beside the buffers that hold one of `changing`, in the dtype of the upload.

        Returns:
            A place, with the present values, for every parameter of these buffers, and for those of
            `changing` that are in no buffer.
        """
        places: dict[nn.Parameter, Tensor] = {}
        changing = set(changing)
        loose = {p: None for p in self.parameters if p in changing}
        for flat in self.buffers:
            for parameter in flat.members:
                loose.pop(parameter, None)
            if flat.kept is None and not flat.members.keys().isdisjoint(changing):
                flat.kept = own_pages(flat.values.numel(), flat.uploaded.dtype).copy_(flat.values)
            if flat.kept is not None:
                for parameter, offset in flat.members.items():
                    places[parameter] = view_like(flat.kept, offset, parameter)
                    places[parameter].copy_(parameter.detach())
        return places | {parameter: parameter.detach().clone() for parameter in loose}


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


def view_like(flat: Tensor, offset: int, parameter: Tensor) -> Tensor:
    """A view of a flat buffer, shaped as a parameter; with its strides if they leave no gaps."""
    strides = parameter.stride()
    dense = torch.empty_strided(parameter.shape, strides, device="meta")
    if parameter.numel() and not fills_its_memory(dense):
        strides = torch.empty(parameter.shape, device="meta").stride()
    return flat.as_strided(parameter.shape, strides, flat.storage_offset() + offset)


def fills_its_memory(tensor: Tensor) -> bool:
    span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return span == tensor.numel() and all(s > 0 for s in tensor.stride())
