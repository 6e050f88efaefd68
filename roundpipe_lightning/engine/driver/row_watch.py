"""What a block does with rows while it runs: which tensors it computes from them, and more.

Values do not tell it: a mean over rows can be the same for other rows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from roundpipe_lightning.engine.driver.forms import Rows

_SMALL_WEIGHT = 1e-2
_WEIGHT_TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_TOLERANCES = {8: 1e-9, 4: 1e-4, 2: 5e-2, 1: 1e-1}  # by bytes of the narrowest type computed in
_METADATA = re.compile("aten::(new_|nonzero)|_like")  # and indices, which say where tokens go
_NUMBERS = {
    "aten::_local_scalar_dense": 0,
    "aten::_pack_padded_sequence": 1,
    "aten::allclose": 0,
    "aten::equal": 0,
    "cond": 0,
}
"""Operations that read numbers, and of which argument."""


def cosines(like: Tensor) -> Tensor:
    """Return numbers that differ, in the shape of a tensor."""
    numbers = torch.arange(like.numel(), device=like.device, dtype=torch.float32).cos()
    return numbers.to(like.dtype).view(like.shape)


class RowWatch(TorchDispatchMode):
    """Sees the operations of runs: marks what is computed from rows.

    Storages are marked: a view is another tensor of the same storage.

    Attributes:
        sees_numbers: Whether Python code was given a number that was computed from rows.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sees_numbers = False
        self._narrowest = 8
        self._marked: set[StorageWeakRef] = set()
        self._weights = WeakTensorKeyDictionary()

    @property
    def tolerance(self) -> float:
        return _TOLERANCES[self._narrowest]

    def mark(self, tensor: Tensor) -> None:
        self._marked.update(_storages_of(tensor))

    def unmark(self, tensor: Tensor) -> None:
        self._marked.difference_update(_storages_of(tensor))

    def mark_rows(self, arguments: Sequence[Any], places: Sequence[Rows | None]) -> None:
        for argument, place in zip(arguments, places, strict=True):
            if place is not None:
                self.mark(argument)

    def is_marked(self, value: Any) -> bool:
        return not self._marked.isdisjoint(_storages_of(value))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = getattr(func, "_schema", None)  # no operator of higher order has one
        is_mutable = schema is not None and schema.is_mutable
        if not is_mutable:
            args, kwargs = tree_map(self._weight, (args, kwargs))
        kwargs = kwargs or {}
        if schema is not None and torch.Tag.nondeterministic_seeded in func.tags:
            result = _draw_constant(func, args, kwargs)
        else:
            result = func(*args, **kwargs)
        if (place := _NUMBERS.get(func.name())) is not None:
            self.sees_numbers |= self.is_marked(args[place])
        outputs = (args[:1], kwargs.get("out")) if is_mutable else ()
        self._mark_results(func.name(), (args, kwargs), (result, outputs))
        return result

    def _mark_results(self, name: str, arguments: Any, results: Any) -> None:
        has_values = not _METADATA.search(name)
        is_from_rows = has_values and any(map(self.is_marked, tree_leaves(arguments)))
        for tensor in tree_leaves(results):
            if isinstance(tensor, Tensor):
                if is_from_rows:
                    self.mark(tensor)
                if tensor.is_floating_point():
                    size = tensor.element_size()
                    is_tf32 = size == 4 and tensor.device.type != "cpu"
                    self._narrowest = min(self._narrowest, 2 if is_tf32 else size)

    def _weight(self, value: Any) -> Any:
        """Return a parameter, or one with larger numbers in place of one with small ones."""
        if type(value) is not nn.Parameter or value.dtype not in _WEIGHT_TYPES or not value.numel():
            return value
        if value not in self._weights:
            weight = value.detach()
            largest = max(abs(float(extreme)) for extreme in weight.aminmax())
            if largest < _SMALL_WEIGHT:
                weight = weight * (0.1 / largest) if largest else cosines(weight) * 0.1
            self._weights[value] = weight
        return self._weights[value]


class NumberWatch(TorchFunctionMode):
    """Sees what the operations of one of PyTorch's functions are for.

    Code that asks whether all numbers are finite guards against an overflow, and goes by no row.
    A list of integers, such as the number of tokens for each expert, is no number that code goes
    by: it says how tensors are split, and what follows is seen in the results.
    """

    def __init__(self, watch: RowWatch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        sees_numbers = self._watch.sees_numbers
        name = getattr(func, "__name__", "")
        if name in ("tolist", "numpy", "__array__"):
            sees_numbers |= args[0].is_floating_point() and self._watch.is_marked(args[0])
        result = func(*args, **(kwargs or {}))
        if name in ("isfinite", "isinf", "isnan"):
            self._watch.unmark(result)
        if sees_numbers or func is torch.nn.functional.one_hot:  # it checks its argument
            self._watch.sees_numbers = sees_numbers
        return result


def _storages_of(value: Any) -> list[StorageWeakRef]:
    try:
        return [StorageWeakRef(value.untyped_storage())] if isinstance(value, Tensor) else []
    except NotImplementedError:  # it is sparse, or what a function sees that torch.func transforms
        return []


def _draw_constant(func: Any, args: Any, kwargs: Any) -> Any:
    """Draw the same random number for every row, and drop nothing."""
    names = [argument.name for argument in func._schema.arguments]  # noqa: SLF001
    dropouts = {"p", "dropout_p", "dropout"}.intersection(names)
    args = [0.0 if name in dropouts else x for name, x in zip(names, args, strict=False)]
    result = func(*args, **{name: 0.0 if name in dropouts else x for name, x in kwargs.items()})
    name = func.name()
    if dropouts and "bernoulli" not in name and "geometric" not in name:
        return result
    bounds = dict(zip(names, args, strict=False)) | kwargs if "uniform" in name else {}
    middle = (bounds.get("from", 0.0) + bounds.get("to", 1.0)) / 2
    for tensor in tree_leaves(result):
        is_whole = not tensor.is_floating_point()
        tensor.fill_(1 if "bernoulli" in name else 0 if is_whole else middle)
    return result
