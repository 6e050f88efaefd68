"""Writes of a step's code into parameters, which reach a worker's copy and are lost with it.

They are seen where code calls torch's functions. What `.data` has given is written to later, so it
is kept until it is looked at:

```
p.mul_(0.9)            a function that writes into p
p.data.mul_(0.9)       into what p.data has given: its version tells
p.data = q             p has other memory
```
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from roundpipe_lightning.engine.capture import writes_first
from roundpipe_lightning.errors import ConfigurationError

_GET_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
#: Functions whose names end like those of functions that write. Parametrizing sets to itself.
_WITHOUT_VALUES = frozenset("detach_ requires_grad_ set_ share_memory_".split())


class ParameterWrites:
    """What code does to parameters, until it is looked at.

    Args:
        keeps_copies: Whether parameters are copies, into which nobody is to write.
    """

    def __init__(self, *, keeps_copies: bool) -> None:
        self._keeps_copies = keeps_copies
        self._written: list[nn.Parameter] = []
        self._given: list[tuple[nn.Parameter, Tensor]] = []
        self._replaced: list[tuple[nn.Parameter, Tensor]] = []  # with their memory before

    def note(self, func: Callable[..., Any], args: tuple[Any, ...]) -> Tensor | None:
        """Look at a function before it is called.

        Returns:
            What it gives, if it was called here.
        """
        if self._keeps_copies and _writes(getattr(func, "__name__", "")):
            written = args[0] if args and isinstance(args[0], (list, tuple)) else args[:1]
            self._written += [tensor for tensor in written if isinstance(tensor, nn.Parameter)]
            return None
        if type(func) is not types.MethodWrapperType or not isinstance(args[0], nn.Parameter):
            return None
        if func == _SET_DATA:
            if all(known is not args[0] for known, _ in self._replaced):
                self._replaced.append((args[0], args[0].data))
        elif func == _GET_DATA and self._keeps_copies:
            values: Tensor = func(*args)
            self._given.append((args[0], values))
            return values
        return None

    def take_written(self) -> Sequence[nn.Parameter]:
        """Return what was written to or had other memory in the end, and forget all uses."""
        if not (self._written or self._given or self._replaced):
            return ()
        written = self._written
        for parameter, values in self._given:
            if not values.is_inference() and values._version:
                written.append(parameter)
        for parameter, before in self._replaced:
            if parameter.data_ptr() != before.data_ptr():
                parameter.data = before  # a later block may find it in the same place
                written.append(parameter)
        self._written, self._given, self._replaced = [], [], []
        return written


def _writes(name: str) -> bool:
    return name not in _WITHOUT_VALUES and writes_first(name)


def refuse_write(name: str) -> NoReturn:
    """Refuse a write into a parameter.

    Raises:
        ConfigurationError: Always.
    """
    raise ConfigurationError(
        f"A step writes into the parameter {name!r}: into the copy that a worker has of it, which "
        "is dropped, so the module would never know. Make what a step changes a buffer "
        "(register_buffer), or write when no step runs, in a callback or on_train_batch_end "
        "(moving averages: lightning.pytorch.callbacks.WeightAveraging)."
    )
