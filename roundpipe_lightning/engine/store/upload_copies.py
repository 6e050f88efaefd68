"""Copies of trained weights in 16 bits: what is uploaded in place of float32 masters.

```
host     masters float32 [ q | k | v ]    norm, biases float32 [ n | b ]
             │ cast once per update                            │
         copies bfloat16 [ q | k | v ]                         │
             │ upload                                          │ upload
device   [ q | k | v ]                                       [ n | b ]
```

Matrices (two dimensions or more) of one block are narrow: autocast would cast them before every
product. So are the weights of linear layers outside the blocks, the LM head say. What has fewer
dimensions, norms and biases say, is uploaded as it is. So is a parameter with several uses, a tied
LM head say, and an embedding, whose rows autocast leaves wide.

With `update="async"` what a step computes with while the optimizer writes into the masters is kept
in 16 bits, too (`HostStore.keep_previous`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


@runtime_checkable
class WritesCopies(Protocol):
    """An optimizer that can cast in the pass that makes its step, as `HostAdamW` can."""

    def write_copies(self, copies: Mapping[nn.Parameter, Tensor]) -> None:
        """Set the tensors into which every step also writes new values, cast."""


class NarrowCopies:
    """The copies of a store's matrices, and which of them are to be cast again."""

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
    uses = Counter(parameter for block in blocks for parameter in block.parameters())
    outside = list(modules_outside(module, set(blocks)))
    uses.update(parameter for one in outside for parameter in one.parameters(recurse=False))
    heads: list[Any] = [one.weight for one in outside if type(one).forward is nn.Linear.forward]
    inside = [parameter for block in blocks for parameter in block.parameters()]
    return {
        p
        for p in (*heads, *inside)
        if uses[p] == 1 and p.requires_grad and p.dtype is torch.float32 and p.dim() >= 2
    }


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
