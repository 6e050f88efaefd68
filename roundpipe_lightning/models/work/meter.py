"""Counts what runs on the meta device: operations, bytes, and the memory in use.

Every operation that PyTorch dispatches is of one kind. Matrix products count two operations per
multiply-add, and the bytes that they read and write. Fused attention counts the pairs of tokens
that its mask leaves, four operations per pair and feature forward and ten backward (FlashAttention
recomputes the scores; arXiv 2205.14135). All others count the bytes that they read and write, in
whole sectors where elements lie apart. Views and allocations cost nothing.

On the meta device PyTorch would spell attention out, with a matrix of scores for every head. What
runs on an accelerator is a fused kernel. So `FusedAttention` gives attention the fused kernel's own
operation there, which keeps no scores and is counted by its shapes. No result is computed.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from roundpipe_lightning.engine.capture.trees import tensors_in

aten = torch.ops.aten

_FREE = frozenset(
    {
        aten.empty.memory_format,
        aten.empty_like.default,
        aten.empty_strided.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
        aten._unsafe_view.default,  # noqa: SLF001
    }
)
_MATRIX = frozenset({"mm", "addmm", "addmm_", "bmm", "baddbmm", "dot", "mv", "addmv"})
_GROUPED = "_grouped_mm"
_CONVOLUTION = frozenset({"convolution", "convolution_backward", "_convolution"})
_GATHER = frozenset({"index", "embedding", "gather", "index_select"})
_SCATTER = frozenset({"index_put", "index_put_", "_index_put_impl_", "index_add", "index_add_"})
_PADDED = {"slice_backward": aten.slice.Tensor, "select_backward": aten.select.int}
"""Operations that write zeros, and then a part of them again, which is this view."""
_SECTOR_BYTES = 32  # the least that a device's memory reads or writes at a time
_ATTENTION_FORWARD = "_flash_attention_forward"
_ATTENTION_BACKWARD = "_flash_attention_backward"


@dataclass(kw_only=True)
class Count:
    """Operations and bytes that have been counted."""

    matrix_operations: float = 0.0  # of matrix products, those of a mixture's experts among them
    matrix_bytes: float = 0.0  # what they read and write
    attention_operations: float = 0.0  # of fused attention
    attention_bytes: float = 0.0  # what its forward pass returns and its backward pass needs
    memory_bytes: float = 0.0  # what everything else reads and writes


class Meter(TorchDispatchMode):
    """A mode that counts the operations under it.

    Values are not known on the meta device. Code that asks whether something holds (masks without
    padding, one sequence per row) gets the answer yes; other questions raise as they always do.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = Count()
        self.live_bytes = 0  # memory of the tensors that were made under this mode and still exist
        self.peak_bytes = 0  # the most of it since `reset`
        self._known: MutableMapping[Any, bool] = WeakIdKeyDictionary()

    def reset(self) -> None:
        self.count = Count()
        self.peak_bytes = self.live_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default and _is_question(args[0]):  # noqa: SLF001
            return True
        result = without_values(func, args, kwargs)
        made, read = tensors_in(result), tensors_in((args, kwargs))
        for tensor in read:  # what was there before is not counted when a view of it is made
            self._known.setdefault(tensor.untyped_storage(), True)
        for tensor in made:
            storage = tensor.untyped_storage()
            if storage in self._known:
                continue
            self._known[storage] = True
            num_bytes = storage.nbytes()
            self.live_bytes += num_bytes
            weakref.finalize(storage, self._forget, num_bytes).atexit = False
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        if func not in _FREE and not func.is_view:
            self._add(func.overloadpacket.__name__, args, kwargs, read, made)
        return result

    def _add(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        read: list[Tensor],
        made: list[Tensor],
    ) -> None:
        count = self.count
        if name in _MATRIX:
            first = read[1] if name.startswith(("add", "badd")) else read[0]
            count.matrix_operations += 2.0 * made[0].numel() * first.shape[-1]
            count.matrix_bytes += _num_bytes(read) + _num_bytes(made)
        elif name == _GROUPED:  # every row meets one group's matrix
            count.matrix_operations += 2.0 * read[0].numel() * read[1].shape[-1]
            count.matrix_bytes += _num_bytes(read) + _num_bytes(made)
        elif name in _CONVOLUTION:
            count.matrix_operations += _convolution_operations(name, args, made)
            count.matrix_bytes += _num_bytes(read) + _num_bytes(made)
        elif name == _ATTENTION_FORWARD:
            count.attention_operations += 4 * _attention_pairs(args, kwargs, first=0)
            count.attention_bytes += _num_bytes(made[:2])  # the result, and its sums
        elif name == _ATTENTION_BACKWARD:
            count.attention_operations += 10 * _attention_pairs(args[1:], kwargs, first=1)
        elif name in _GATHER:
            count.memory_bytes += 2 * _num_bytes(made)
        elif name in _SCATTER:
            count.memory_bytes += 3 * _num_bytes(read[1:])
        elif name in _PADDED:
            part = _PADDED[name](made[0], *args[2:])
            count.memory_bytes += _num_bytes([*read, *made, part])
        else:
            count.memory_bytes += _num_bytes(read) + _num_bytes(made)

    def _forget(self, num_bytes: int) -> None:
        self.live_bytes -= num_bytes


def _is_question(value: Tensor) -> bool:
    return value.device.type == "meta" and value.dtype is torch.bool


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes that are touched: what is broadcast is read once, what lies apart in whole sectors."""
    return sum(_touched_bytes(tensor) for tensor in tensors)


def _touched_bytes(tensor: Tensor) -> int:
    elements, gap = 1, 0
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if size == 0:
            return 0
        if size > 1 and stride:
            elements *= size
            gap = min(gap or stride, stride)
    item = tensor.element_size()
    return elements * max(item, min(gap * item, _SECTOR_BYTES))


def _convolution_operations(name: str, args: tuple[Any, ...], made: list[Tensor]) -> float:
    backward = name == "convolution_backward"
    weight: Tensor = args[2] if backward else args[1]
    output = args[0] if backward else made[0]
    passes = sum(tensor.dim() > 1 for tensor in made) if backward else 1
    return 2.0 * passes * output.numel() * weight[0].numel()


def _attention_pairs(args: tuple[Any, ...], kwargs: Mapping[str, Any], *, first: int) -> float:
    """Pairs of tokens that see each other, times heads and features.

    `first` is 1 for the backward pass, which has the result and its sums after the value.
    """
    query, key = args[0], args[1]
    is_causal = args[10 if first else 8]
    sequences, length, heads, features = query.shape
    others = key.shape[1]
    window = kwargs.get("window_size_left")
    pairs = float(length * others)
    if is_causal:
        seen = others if window is None else min(window + 1, others)
        pairs = length * seen - seen * (seen - 1) / 2 if length == others else pairs
    return pairs * float(sequences * heads * features)


def without_values(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call an operation on the meta device, where PyTorch has grouped products in bfloat16 only.

    PyTorch works out the shape of a result in Python, which may take a millisecond. So the forms of
    results are kept: an operation that meets the same forms again gives empty tensors of them.
    """
    if func is aten._grouped_mm.default and args[0].is_meta:  # noqa: SLF001
        return _grouped_product(*args, **kwargs)
    try:
        key = (func, torch.get_default_dtype(), _form(args), _form((*kwargs.items(),)))
    except _NoFormError:
        return func(*args, **kwargs)
    if key in _forms:
        return _empty(_forms[key])
    result = func(*args, **kwargs)
    if len(_forms) < _MOST_FORMS and _depends_on_forms(func) and _is_new(result, (args, kwargs)):
        _forms[key] = _form(result)
    return result


_forms: dict[Any, Any] = {}  # of results, by operations and the forms of their arguments
_MOST_FORMS = 50_000
_KEPT = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout)


class _NoFormError(TypeError):
    """A value is not known by its shape."""


def _form(value: Any) -> Any:
    kind = type(value)
    if kind in (Tensor, nn.Parameter) and value.is_meta and value.layout is torch.strided:
        return (Tensor, value.shape, value.stride(), value.dtype)
    if kind in (tuple, list):
        return (kind, *map(_form, value))
    if kind in _KEPT:
        return (kind, value)
    raise _NoFormError


def _empty(form: Any) -> Any:
    kind, *values = form
    if kind is Tensor:
        return aten.empty_strided.default(*values[:2], dtype=values[2], device="meta")
    return kind(map(_empty, values)) if kind in (tuple, list) else values[0]


@functools.cache
def _depends_on_forms(func: Any) -> bool:
    """Return whether an operation draws no numbers, and neither writes nor gives views."""
    if getattr(func, "namespace", "") != "aten":
        return False
    schema = func._schema  # noqa: SLF001
    is_pure = not any(each.alias_info for each in (*schema.arguments, *schema.returns))
    return is_pure and torch.Tag.nondeterministic_seeded not in func.tags


def _is_new(result: Any, given: Any) -> bool:
    """Return whether every tensor of a result has memory of its own, and all of that."""
    try:
        again = _empty(_form(result))
    except _NoFormError:
        return False
    made, taken, sizes = (
        [tensor.untyped_storage() for tensor in tensors_in(tree)] for tree in (result, given, again)
    )
    own = {storage._cdata for storage in made} - {storage._cdata for storage in taken}  # noqa: SLF001
    return len(own) == len(made) and [s.nbytes() for s in made] == [s.nbytes() for s in sizes]


def _grouped_product(
    first: Tensor, second: Tensor, offs: Tensor | None = None, *_: Any, **__: Any
) -> Tensor:
    """Shape of a grouped product, in any dtype: rows by group, or one result per group."""
    if second.dim() == 2:
        assert offs is not None
        return first.new_empty((offs.shape[0], first.shape[0], second.shape[1]))
    return first.new_empty((*first.shape[:-1], second.shape[-1]))


class FusedAttention(TorchFunctionMode):
    """Turns `scaled_dot_product_attention` into the fused kernel's operation."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.scaled_dot_product_attention:
            return _scaled_dot_product(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _scaled_dot_product(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,  # noqa: ARG001
    dropout_p: float = 0.0,  # noqa: ARG001
    is_causal: bool = False,  # noqa: FBT001, FBT002
    **_: Any,
) -> Tensor:
    if query.dim() != 4:
        shaped = [tensor.reshape(-1, 1, *tensor.shape[-2:]) for tensor in (query, key, value)]
        result = _fused_attention(shaped[0], shaped[1], shaped[2], is_causal=is_causal)
        return result.reshape(*query.shape[:-1], value.shape[-1])
    return _fused_attention(query, key, value, is_causal=is_causal)


def transformers_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001
    *,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = causal and query.shape[2] > 1
    result = _fused_attention(query, key, value, is_causal=causal, window=sliding_window)
    return result.transpose(1, 2).contiguous(), None


def _fused_attention(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, window: int | None = None
) -> Tensor:
    """Return an empty result, through the fused kernel's operation.

    Args:
        query: Shape (sequences, heads, tokens, features).
        key: Shape (sequences, heads or a divisor of them, tokens, features).
        value: Shape like `key`, perhaps with other features, which the result has, too.
        window: Tokens that each one sees; None: no limit.
    """
    features = value.shape[-1]
    if features != query.shape[-1]:
        value = functional.pad(value, (0, query.shape[-1] - features))
    tokens_first = [tensor.transpose(1, 2) for tensor in (query, key, value)]
    result = torch.ops.aten._flash_attention_forward(  # noqa: SLF001
        *tokens_first,
        None,
        None,
        query.shape[2],
        key.shape[2],
        0.0,
        is_causal,
        False,
        window_size_left=None if window is None else window - 1,
        window_size_right=0 if is_causal else None,
    )[0]
    return cast(Tensor, result.transpose(1, 2)[..., :features])
