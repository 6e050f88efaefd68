"""Parameters that travel together, laid out in flat buffers in host memory.

```
block 3   flat float32 [ q.weight | k.weight | v.weight | ... | norm.weight ]     page-locked
                          ▲ parameter.data: a view, in place
```

Trainable and frozen parameters have buffers of their own, so that saving one kind does not drag the
other kind's storage along. Frozen parameters that are views of a file (`MappedParameter`) stay
there, and so do those that share memory. Beside a buffer there may be a copy in 16 bits
(`NarrowCopies`), and one of the values before the last update.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from roundpipe_lightning.engine.device.host_memory import (
    own_pages,
    release_pages,
    return_freed_memory,
)
from roundpipe_lightning.errors import ConfigurationError

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

        Returns a place, with the present values, for every parameter of these buffers, and for
        those of `changing` that are in no buffer.
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


class MappedParameter(nn.Parameter):
    """A frozen parameter that is a view of a private mapping of a file.

    The kernel reads its pages when they are used and drops them again when memory is short. A write
    would make private copies of them, so what was written to is refused when it is used next.
    """

    file: Path  # what it is a view of, for messages
    _address: int
    _written: int

    def __new__(cls, data: Tensor, *, file: Path) -> MappedParameter:
        """Make a parameter that needs no gradient, of a plain host tensor that is the view."""
        parameter = super().__new__(cls, data, requires_grad=False)
        parameter.file = file
        parameter._address = data.data_ptr()
        parameter._written = parameter._version
        return parameter

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Copy the values into memory: whoever copies a module may write to the copy."""
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.data.clone(), requires_grad=self.requires_grad)
        copied: nn.Parameter = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as an ordinary parameter, with its values."""
        return nn.Parameter(self.data, requires_grad=self.requires_grad).__reduce_ex__(protocol)

    def check_unconverted(self, name: str) -> None:
        """Raise a ConfigurationError, naming the file, if it was converted, and is in memory."""
        if not self.requires_grad and self.data_ptr() != self._address:
            raise ConfigurationError(
                f"Parameter {name} was a view of {self.file} (model.frozen_weights=mmap) and has "
                f"been converted to {self.dtype} in memory. Choose a precision that keeps the "
                "dtype of the files (trainer.precision=bf16-mixed or 32-true), or "
                "model.frozen_weights=memory."
            )

    @property
    def is_mapped(self) -> bool:
        """Whether the values are still those of the file, and to stay so.

        A parameter that is to be trained, or was converted to another dtype, is ordinary.
        """
        return self.data_ptr() == self._address and not self.requires_grad

    def check_unwritten(self, name: str) -> None:
        """Raise a ConfigurationError, naming the file, if the parameter was written to in place."""
        if self.data_ptr() == self._address and self._version != self._written:
            raise ConfigurationError(
                f"Parameter {name} of shape {tuple(self.shape)} was written to, but it is a "
                f"read-only view of {self.file} (model.frozen_weights=mmap); the file is as it "
                "was. Keep the weights in memory (model.frozen_weights=memory), or do not change "
                "frozen parameters."
            )


def is_mapped(parameter: Tensor) -> bool:
    return isinstance(parameter, MappedParameter) and parameter.is_mapped


@runtime_checkable
class WritesCopies(Protocol):
    """An optimizer that can cast in the pass that makes its step, as `HostAdamW` can."""

    def write_copies(self, copies: Mapping[nn.Parameter, Tensor]) -> None:
        """Set the tensors into which every step also writes new values, cast."""


class NarrowCopies:
    """The copies of a store's matrices in 16 bits, and which of them are to be cast again.

    Matrices (two dimensions or more) of one block are narrow: autocast would cast them before every
    product. So are the weights of linear layers outside the blocks, the LM head say. Others are
    uploaded as they are: what has fewer dimensions, norms and biases say, a parameter with several
    uses, and an embedding, whose rows autocast leaves wide.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._places: dict[nn.Parameter, Tensor] = {}
        self._cast: dict[nn.Parameter, tuple[int, int]] = {}  # memory and version of the source
        self._writers: list[WritesCopies] = []

    def add(self, places: Mapping[nn.Parameter, Tensor]) -> None:
        self._places |= places

    def __contains__(self, parameter: Tensor) -> bool:
        return parameter in self._places

    def of(self, parameter: Tensor) -> Tensor:
        """Return a parameter's copy, of its shape."""
        return self._places[parameter]  # type: ignore[index]  # asked for those it has

    def written_by(self, optimizers: Iterable[Optimizer]) -> None:
        """Let the optimizers that can do so write the copies in the pass that makes a step."""
        self._writers = [o for o in optimizers if isinstance(o, WritesCopies)]
        for optimizer in self._writers:
            optimizer.write_copies(self._places)

    def updated(self, values: Mapping[nn.Parameter, Tensor], by: Optimizer) -> None:
        """Cast what an optimizer has changed, if it has not done so itself."""
        if id(by) in map(id, self._writers):
            self.note({p: v for p, v in values.items() if p in self._places})
        else:
            self.cast(values)

    def cast(self, values: Mapping[nn.Parameter, Tensor]) -> None:
        mine = {p: v.detach() for p, v in values.items() if p in self._places}
        if mine:
            with torch.no_grad():
                torch._foreach_copy_([self._places[p] for p in mine], list(mine.values()))
            self.note(mine)

    def note(self, values: Mapping[nn.Parameter, Tensor]) -> None:
        """Say that copies have been written: they are those of the present values."""
        self._cast |= {parameter: _state(value) for parameter, value in values.items()}

    def renew(self, values: Mapping[nn.Parameter, Tensor]) -> None:
        """Cast what has changed since it was cast. Nobody may be writing into it."""
        self.cast({p: v for p, v in values.items() if self._cast.get(p) != _state(v)})

    @property
    def are_cast(self) -> bool:
        return self._cast.keys() >= self._places.keys()

    def forget(self) -> None:
        """Mark all copies as old: parameters may have been written to unseen."""
        self._cast.clear()

    def close(self) -> None:
        for optimizer in self._writers:
            optimizer.write_copies({})
        self._writers = []


def narrow_parameters(module: nn.Module, blocks: Collection[nn.Module]) -> set[nn.Parameter]:
    """Return the parameters of a module that are uploaded from copies."""
    uses, outside = num_uses(module, blocks), modules_outside(module, blocks)
    heads: list[Any] = [one.weight for one in outside if type(one).forward is nn.Linear.forward]
    return {
        p
        for p in (*heads, *(p for block in blocks for p in block.parameters()))
        if uses[p] == 1 and p.requires_grad and p.dtype is torch.float32 and _is_matrix(p)
    }


def num_uses(module: nn.Module, blocks: Collection[nn.Module]) -> Counter[nn.Parameter]:
    """Count the blocks, and modules outside of them, that have a parameter."""
    uses = Counter(parameter for block in blocks for parameter in block.parameters())
    for one in modules_outside(module, blocks):
        uses.update(one.parameters(recurse=False))
    return uses


def _is_matrix(parameter: Tensor) -> bool:
    """Return whether it is no vector, such as the (1, 1, width) that attention adds to its keys."""
    return parameter.dim() == 2 or (
        parameter.dim() > 2 and parameter.numel() > max(parameter.shape)
    )


def modules_outside(module: nn.Module, blocks: Collection[nn.Module]) -> Iterator[nn.Module]:
    """Yield a module and the submodules that it has without going through a block, each once."""
    seen: set[nn.Module] = set(blocks)
    pending = [module]
    while pending:
        current = pending.pop()
        if current not in seen:
            seen.add(current)
            yield current
            pending.extend(current.children())


def _state(values: Tensor) -> tuple[int, int]:
    return values.data_ptr(), values._version
