"""Placeholders by which user code, unchanged, hands a stack of blocks to the engine.

In a view every block is a proxy. A proxy gives its call to the engine, which runs the block on the
worker of its stage, and gets lazy tensors for the block's outputs for the user's code to hand on:

```
user code      h = embed(ids)     h, w = layer0(h, m)    h, w = layer1(h, m)      head(h)
in the view    h ───────────────▶ run 0 ── lazy ──────▶ run 1 ── the outputs ──▶
```

What becomes of a lazy tensor: docs/engine.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from roundpipe_lightning.engine.capture.torch_functions import METADATA, attribute_or_name
from roundpipe_lightning.engine.capture.trees import map_tensors, tensors_in
from roundpipe_lightning.engine.capture.view import View, ViewClasses, ViewMaker
from roundpipe_lightning.errors import CaptureError, GlueError

WRITTEN = (
    "`{}` writes into an output of block {!r} past its graph (`x.detach()`, `x.data`, "
    "torch.no_grad()), whose values later blocks and its recompute use: the change would be lost. "
    "Write into `x` itself, work on a copy (`x.detach().clone()`), move the operation into a "
    "block, or name other blocks with RoundPipeStrategy(blocks=[...])."
)
_GRADIENT_HOOKS = frozenset("register_hook register_post_accumulate_grad_hook retain_grad".split())
_HOOKED = (
    "`{}` on an output of block {!r}, which is recomputed: no tensor of the step's own has its "
    "whole gradient. Make one and go on with it: `h = h.clone()`, then `h.{}(...)`."
)
_PAST_FUNCTIONS = (
    "{} received an output of a block past PyTorch's functions (by code in C++, probably), where "
    "the engine cannot put in its values. Give it a tensor made by an operation, `x + 0` say, or "
    "move it into a block."
)


class Form(NamedTuple):
    """All that is known of a tensor without its values."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Form:
        return cls(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


class LazyTensor(Tensor):
    """A tensor that a block has made and that user code only hands on."""

    value: Any  # a `Value` of chain/values.py

    @staticmethod
    def standing_for(value: Any, *, form: Form, requires_grad: bool) -> LazyTensor:
        lazy: LazyTensor = torch.Tensor._make_wrapper_subclass(
            LazyTensor,
            form.shape,
            strides=form.strides,
            dtype=form.dtype,
            device=form.device,
            requires_grad=requires_grad,
        )
        lazy.value = value
        if requires_grad:
            with torch._C.DisableTorchFunctionSubclass():
                lazy._backward_hooks = _REFUSING  # without the handle that `register_hook` makes
        return lazy

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = attribute_or_name(func)
        if name in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if name in _GRADIENT_HOOKS and isinstance(args[0], LazyTensor):
            raise CaptureError(_HOOKED.format(name, args[0].value.block_name, name))
        written = args[0] if args and writes_first(name) else (kwargs or {}).get("out")
        found: dict[LazyTensor, Tensor] = {}
        for lazy in tensors_in((args, kwargs)):
            if isinstance(lazy, LazyTensor):
                if lazy is written:
                    raise GlueError(WRITTEN.format(name, lazy.value.block_name))
                without_graph = name in ("data", "detach") or not torch.is_grad_enabled()
                found[lazy] = lazy.value.detached() if without_graph else lazy.value.materialize()
        args, kwargs = map_tensors(
            lambda x: found[x] if isinstance(x, LazyTensor) else x, (args, kwargs)
        )
        return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # the stub lacks `cls`
        raise CaptureError(_PAST_FUNCTIONS.format(f"`{func}`"))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<output of {self.value.block_name}>"


def _refuse_gradient(gradient: Tensor) -> None:  # noqa: ARG001 - a tensor's hook
    """Raise when a gradient arrives at a lazy tensor: it belongs to the tensor behind it."""
    raise CaptureError(_PAST_FUNCTIONS.format("An operation"))


_REFUSING: Any = {0: _refuse_gradient}


def materialized(node: Any) -> Any:
    return map_tensors(lambda x: x.value.materialize() if isinstance(x, LazyTensor) else x, node)


Called: TypeAlias = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]
"""Function that a proxy calls: block, positional and keyword arguments. Returns the block's output,
or `NotImplemented` where the block is to run as part of the user's code around it."""


class BlockProxy(View):
    """Stands for a block in a view: the call goes to the microbatch, all else is as in any view."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own = self.__dict__
        answer = own["_called"](own["_view_of"], args, kwargs)
        plain: Any = super()
        return plain.__call__(*args, **kwargs) if answer is NotImplemented else answer


def make_proxy(
    block: nn.Module, *, maker: ViewMaker, classes: ViewClasses, called: Called
) -> nn.Module:
    """Make a proxy for a block, and fill it as a view: user code may look inside a block."""
    proxy: Any = object.__new__(classes.class_for(type(block), BlockProxy))
    maker.fill(proxy, block)
    dict.update(proxy.__dict__, _called=called)
    return proxy  # type: ignore[no-any-return]


def writes_first(name: str) -> bool:
    if name.startswith("__"):
        return name == "__setitem__" or (
            name.startswith("__i") and name not in ("__invert__", "__index__", "__int__")
        )
    return name.endswith("_")
