"""Copies of trained weights in 16 bits: what is uploaded in place of float32 masters.

```
host     masters float32 [ q | k | v ]    norm, biases float32 [ n | b ]
             │ cast once per update                            │
         copies bfloat16 [ q | k | v ]                         │
             │ upload                                          │ upload
device   [ q | k | v ]                                       [ n | b ]
```

Matrices (two dimensions or more) of one block are narrow: autocast would cast them before every
product. What has fewer dimensions, norms and biases say, is uploaded as it is. A parameter that
several blocks or the code outside them use is, too.

With `update="async"` what a step computes with while the optimizer writes into the masters is kept
in 16 bits, too (`HostStore.keep_previous`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol, runtime_checkable

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

    @staticmethod
    def narrows(parameter: nn.Parameter) -> bool:
        is_matrix = parameter.dim() >= 2
        return parameter.requires_grad and parameter.dtype is torch.float32 and is_matrix

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


def _state(values: Tensor) -> tuple[int, int]:
    return values.data_ptr(), values._version
