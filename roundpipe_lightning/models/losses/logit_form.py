"""Operations on logits between the output projection and the loss, recorded, not computed.

```
F.linear(hidden, weight)      LogitForm(hidden, weight)
  [:, :-1]                    LogitForm(hidden[:, :-1], weight)
  .float()                    the same, in float32
  / 30, tanh, * 30            the same, scaled and capped
  .view(-1, vocabulary)       LogitForm(hidden.view(-1, width), weight)
F.cross_entropy(logits, y)    linear_cross_entropy(hidden, weight, y)
```

A form knows what models do to logits whole: changes of the leading dimensions, which are made to
the hidden states instead, wider types, factors, a tanh, and log-softmax. All else it declines.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from roundpipe_lightning.engine.capture.torch_functions import Autocast
from roundpipe_lightning.engine.driver.lazy import LazyTensor
from roundpipe_lightning.models.losses.linear_cross_entropy import linear_cross_entropy
from roundpipe_lightning.models.losses.token_losses import posted_cross_entropy

__all__ = ["LogitForm", "form_after", "loss_of_form"]


@dataclass(frozen=True, kw_only=True)
class LogitForm:
    """Logits as a function of hidden states."""

    hidden: Tensor  # shape (..., H); its leading dimensions are those of the logits
    weight: Tensor  # shape (V, H)
    bias: Tensor | None  # shape (V), or None
    autocast: Autocast  # of the projection
    dtype: torch.dtype
    factor: float = 1.0  # the outputs of the projection are multiplied by it
    # then they go through tanh and are multiplied by this; None where there is no tanh
    cap: float | None = None
    log_softmax: bool = False  # then the log-softmax is taken
    classes_second: bool = False  # the vocabulary is the second of three dimensions, not the last

    @property
    def vocabulary(self) -> int:
        return self.weight.shape[0]

    @property
    def shape(self) -> torch.Size:
        leading = self.hidden.shape[:-1]
        if self.classes_second:
            return torch.Size((leading[0], self.vocabulary, leading[1]))
        return torch.Size((*leading, self.vocabulary))

    @property
    def is_plain(self) -> bool:
        return not (self.log_softmax or self.classes_second)

    def dtype_after(self, function: Callable[[Tensor], Tensor]) -> torch.dtype:
        """Return the type that a function of the logits gives: autocast widens some, it depends."""
        return function(self.hidden.new_zeros((1, 1), dtype=self.dtype)).dtype

    def losses(self, labels: Tensor, *, dtype: torch.dtype, **options: Any) -> Tensor | None:
        """Return the loss of one label per token; None where the cap cannot be fused."""
        softcap, scale = self.cap, self.factor
        if softcap is not None:
            scale *= softcap
            if not softcap > 0:
                return None
        options |= {"softcap": softcap, "scale": scale, "bias": self.bias}
        with self.autocast.restored():
            labels = labels.to(self.hidden.device)
            if isinstance(self.hidden, LazyTensor):
                loss = posted_cross_entropy(self.hidden, self.weight, labels, **options)
            else:
                loss = linear_cross_entropy(self.hidden, self.weight, labels, **options)
        return loss.to(dtype)


def form_after(
    form: LogitForm, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> LogitForm | None:
    """Return the form of a function's result, or None where it is not known.

    `args` are the function's arguments after the logits.
    """
    rule = _RULES.get(name)
    if rule is None:
        return None
    try:
        inspect.signature(rule).bind(form, *args, **kwargs)
    except TypeError:  # an argument that is not known here
        return None
    return rule(form, *args, **kwargs)


def _cast(form: LogitForm, dtype: torch.dtype) -> LogitForm | None:
    if not dtype.is_floating_point or torch.promote_types(form.dtype, dtype) != dtype:
        return None
    return replace(form, dtype=dtype)


def _to(
    form: LogitForm,
    *args: Any,
    dtype: torch.dtype | None = None,
    device: Any = None,
    non_blocking: bool = False,  # noqa: ARG001 - PyTorch's signature
) -> LogitForm | None:
    for given in args:
        if isinstance(given, torch.dtype):
            dtype = given
        elif isinstance(given, str | torch.device):
            device = given
        else:
            return None
    if device is not None and torch.device(device) != form.hidden.device:
        return None
    return form if dtype is None else _cast(form, dtype)


def _times(form: LogitForm, factor: Any) -> LogitForm | None:
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not form.is_plain:
        return None
    if form.cap is not None:
        return replace(form, cap=form.cap * factor)
    return replace(form, factor=form.factor * factor)


def _divided(form: LogitForm, divisor: Any) -> LogitForm | None:
    if isinstance(divisor, bool) or not isinstance(divisor, int | float) or divisor == 0:
        return None
    return _times(form, 1 / divisor)


def _tanh(form: LogitForm) -> LogitForm | None:
    return replace(form, cap=1.0) if form.cap is None and form.is_plain else None


def _log_softmax(
    form: LogitForm, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> LogitForm | None:
    if dim not in (-1, len(form.shape) - 1) or not form.is_plain:
        return None
    cast = _cast(form, form.dtype_after(lambda x: torch.log_softmax(x, -1, dtype=dtype)))
    return None if cast is None else replace(cast, log_softmax=True)


# Leading dimensions: what is done to the logits is done to the hidden states.


def _item(form: LogitForm, index: Any) -> LogitForm | None:
    items = index if isinstance(index, tuple) else (index,)
    if form.classes_second or any(x is None or isinstance(x, bool) for x in items):
        return None
    after = items
    for place, item in enumerate(items):
        if item is Ellipsis:
            after = items[place + 1 :]
    touches_last = bool(after) if len(after) < len(items) else _consumed(items) == len(form.shape)
    if _consumed(items) > len(form.shape):
        return None
    if touches_last and not _is_whole(items[-1], form.vocabulary):
        return None
    here = (*items[:-1], slice(None)) if touches_last else items
    return replace(form, hidden=form.hidden[here])


def _consumed(items: tuple[Any, ...]) -> int:
    masks = [x for x in items if isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8)]
    return sum(x is not Ellipsis for x in items) + sum(mask.dim() - 1 for mask in masks)


def _is_whole(item: Any, size: int) -> bool:
    return isinstance(item, slice) and item.indices(size) == (0, size, 1)


def _reshape(form: LogitForm, *shape: Any, **kwargs: Any) -> LogitForm | None:
    sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], list | tuple) else shape
    if kwargs or form.classes_second or not all(isinstance(x, int) for x in sizes) or not sizes:
        return None
    sizes, total = list(sizes), math.prod(form.shape)
    if sizes.count(-1) == 1:
        known = -math.prod(sizes)
        if known <= 0 or total % known:
            return None
        sizes[sizes.index(-1)] = total // known
    if sizes[-1] != form.vocabulary or math.prod(sizes) != total or total == 0:
        return None
    return replace(form, hidden=form.hidden.reshape(*sizes[:-1], form.hidden.shape[-1]))


def _flatten(form: LogitForm, start_dim: int = 0, end_dim: int = -1) -> LogitForm | None:
    last = len(form.shape) - 1
    if form.classes_second or end_dim % (last + 1) == last:
        return None
    return replace(form, hidden=form.hidden.flatten(start_dim, end_dim))


def _squeeze(form: LogitForm, dim: Any = None) -> LogitForm | None:
    last = len(form.shape) - 1
    if form.classes_second or not isinstance(dim, int) or dim % (last + 1) == last:
        return None
    return replace(form, hidden=form.hidden.squeeze(dim))


def _transpose(form: LogitForm, dim0: int, dim1: int) -> LogitForm | None:
    num_dims = len(form.shape)
    dims = {dim0 % num_dims, dim1 % num_dims}
    if num_dims == 3 and dims == {1, 2} and not form.log_softmax:
        return replace(form, classes_second=not form.classes_second)
    if form.classes_second or num_dims - 1 in dims:
        return None
    return replace(form, hidden=form.hidden.transpose(dim0, dim1))


def _permute(form: LogitForm, *dims: Any) -> LogitForm | None:
    order = dims[0] if len(dims) == 1 and isinstance(dims[0], list | tuple) else dims
    swaps = tuple(order) in ((0, 2, 1), (0, -1, 1), (0, -1, -2), (0, 2, -2))
    return _transpose(form, 1, 2) if swaps else None


_RULES: Mapping[str, Callable[..., LogitForm | None]] = {
    "contiguous": lambda form: form,
    "float": lambda form: _cast(form, torch.float32),
    "double": lambda form: _cast(form, torch.float64),
    "to": _to,
    "mul": _times,
    "multiply": _times,
    "__mul__": _times,
    "__rmul__": _times,
    "div": _divided,
    "divide": _divided,
    "true_divide": _divided,
    "__truediv__": _divided,
    "tanh": _tanh,
    "log_softmax": _log_softmax,
    "__getitem__": _item,
    "view": _reshape,
    "reshape": _reshape,
    "flatten": _flatten,
    "squeeze": _squeeze,
    "transpose": _transpose,
    "swapaxes": _transpose,
    "permute": _permute,
}


def loss_of_form(
    form: LogitForm, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Tensor | None:
    rule = _LOSSES.get(name)
    return None if rule is None else rule(form, args, kwargs)


def _reduced(
    form: LogitForm,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    function: Callable[..., Tensor],
) -> Tensor | None:
    if form.log_softmax != (function is functional.nll_loss):
        return None
    given = inspect.signature(function).bind(None, *args, **kwargs)
    given.apply_defaults()
    options = given.arguments
    if any(options[x] is not None for x in ("weight", "size_average", "reduce")):
        return None
    labels: Tensor = options["target"]
    whole_numbers = labels.dtype in (torch.int64, torch.uint8)
    classes_first = len(form.shape) < 3 or form.classes_second
    if not (whole_numbers and classes_first and labels.shape == form.hidden.shape[:-1]):
        return None
    return form.losses(
        labels,
        dtype=form.dtype_after(lambda x: function(x, x.new_zeros(1, dtype=labels.dtype))),
        ignore_index=options["ignore_index"],
        reduction=options["reduction"],
        label_smoothing=options.get("label_smoothing", 0.0),
    )


def _gather(form: LogitForm, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    if not form.log_softmax or kwargs or len(args) != 2:
        return None
    dim, index = args
    if dim not in (-1, len(form.shape) - 1) or index.shape != (*form.shape[:-1], 1):
        return None
    losses = form.losses(index.squeeze(-1), dtype=form.dtype, ignore_index=-1, reduction="none")
    return None if losses is None else -losses.unsqueeze(-1)


_LOSSES: Mapping[str, Callable[..., Tensor | None]] = {
    "cross_entropy": partial(_reduced, function=functional.cross_entropy),
    "nll_loss": partial(_reduced, function=functional.nll_loss),
    "gather": _gather,
}
