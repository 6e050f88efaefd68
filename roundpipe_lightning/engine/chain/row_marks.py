"""Marks on what a block computes from the rows of a batch, while it is tried on a few of them.

Values tell little about that: a mean over rows can be the same for other rows, such as the balance
of a router that begins with zeros.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from roundpipe_lightning.engine.capture.placeholder import writes_first
from roundpipe_lightning.engine.capture.torch_functions import METADATA, attribute_or_name
from roundpipe_lightning.engine.capture.trees import tensors_in


class RowMarks(TorchFunctionMode):
    """Marks results of torch's functions that have a marked argument, while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self._marked: dict[int, weakref.ref[Tensor]] = {}

    def mark(self, tensor: Tensor) -> Tensor:
        self._marked[id(tensor)] = weakref.ref(tensor)
        return tensor

    def has(self, tensor: Tensor) -> bool:
        known = self._marked.get(id(tensor))
        return known is not None and known() is tensor

    def alive(self, *, besides: Iterable[Tensor]) -> bool:
        """Return whether anybody keeps a marked tensor that is not one of those given.

        Those are often views, which keep what they are views of.
        """
        given = {id(t) for tensor in besides for t in (tensor, tensor._base)}  # noqa: SLF001
        for collect in (False, True):
            if collect:
                gc.collect()
            if all(ref() is None or key in given for key, ref in self._marked.items()):
                return False
        return True

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = attribute_or_name(func)
        if name not in METADATA and any(map(self.has, tensors_in((args, kwargs)))):
            written = args[:1] if writes_first(name) else kwargs.get("out")
            for tensor in tensors_in((result, written)):
                self.mark(tensor)
        return result
