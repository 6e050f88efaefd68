"""Capture: how user code, unchanged, hands a stack of blocks to the engine.

In a view every block is a proxy. A proxy gives its call to the engine, which runs the block on the
worker of its stage, and gets phantoms of the block's outputs for the user's code to hand on:

```
user code      h = embed(ids)     h, w = layer0(h, m)    h, w = layer1(h, m)      head(h)
in the view    h ───────────────▶ run 0 ── phantoms ───▶ run 1 ── the outputs ──▶
```

A phantom has the shape, the dtype and the device of the tensor it stands for, but no values: using
it between two blocks is glue, which the recompute would miss, and raises an error that names the
block and the operation. After the last block, phantoms that the user's code has kept (hidden
states, router logits) stand for their values, with a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from roundpipe_lightning.engine.stack import BlockStack
from roundpipe_lightning.engine.trees import map_tensors, tensors_in
from roundpipe_lightning.engine.view import View, ViewClasses, ViewMaker
from roundpipe_lightning.errors import CaptureError, GlueError

#: What may be asked of a tensor without its values.
_METADATA = frozenset(
    """
    __hash__ __len__ dim dtype element_size is_complex is_contiguous is_floating_point ndimension
    nelement numel size stride
    """.split()
)
_METADATA_ATTRIBUTES = frozenset(
    """
    device dtype grad_fn is_cpu is_cuda is_leaf is_meta is_nested is_quantized is_sparse itemsize
    layout name names nbytes ndim requires_grad shape
    """.split()
)


_PAST_FUNCTIONS = (
    "{} received an output of a block past PyTorch's functions (a custom autograd.Function, "
    "probably), where the engine cannot put in its values. Give it a tensor made by an operation, "
    "`x + 0` say, or move it into a block."
)


class Standing(Protocol):
    """What a phantom stands for."""

    @property
    def block_name(self) -> str:
        """The block that made it."""

    def real(self) -> Tensor | None:
        """Return the tensor, where the user's code may use it; None while blocks are to come."""

    def detached(self) -> Tensor | None:
        """Return the values, which may be used at any time; None if they have been dropped."""


class Phantom(Tensor):
    """Stands for a tensor that a block has made and that user code only hands on."""

    value: Any  # a Standing

    @staticmethod
    def of(tensor: Tensor, value: Standing, *, requires_grad: bool) -> Phantom:
        """Make the phantom of a tensor.

        Args:
            tensor: Gives shape, strides, dtype and device.
            value: What it stands for.
            requires_grad: What it says of itself.
        """
        phantom: Phantom = torch.Tensor._make_wrapper_subclass(
            Phantom,
            tensor.shape,
            strides=tensor.stride(),
            dtype=tensor.dtype,
            device=tensor.device,
            requires_grad=requires_grad,
        )
        phantom.value = value
        if requires_grad:
            with torch._C.DisableTorchFunctionSubclass():
                phantom.register_hook(_refuse_gradient)  # type: ignore[no-untyped-call]
        return phantom

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name, allowed = getattr(func, "__name__", str(func)), _METADATA
        if name == "__get__":
            getter: Any = func
            name, allowed = getter.__self__.__name__, _METADATA_ATTRIBUTES
        if name in allowed:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        real: dict[Phantom, Tensor] = {}
        for phantom in tensors_in((args, kwargs)):
            if isinstance(phantom, Phantom):
                value: Standing = phantom.value
                without_graph = name == "detach" or not torch.is_grad_enabled()
                tensor = value.detached() if without_graph else value.real()
                if tensor is None:
                    raise GlueError(
                        f"`{name}` uses an output of block {value.block_name!r} between "
                        "the blocks of its stack: there is glue, which the recompute would miss. "
                        "Move the operation into a block, or name other blocks with "
                        "RoundPipeStrategy(blocks=[...])."
                    )
                real[phantom] = tensor
        args, kwargs = map_tensors(
            lambda x: real[x] if isinstance(x, Phantom) else x, (args, kwargs)
        )
        return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # the stub lacks `cls`
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        raise CaptureError(_PAST_FUNCTIONS.format(f"`{func}`"))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Name of the block."""
        return f"<output of {self.value.block_name}>"


def _refuse_gradient(gradient: Tensor) -> None:  # noqa: ARG001 - a tensor's hook
    """Raise when a gradient arrives at a phantom: it belongs to the tensor behind it."""
    raise CaptureError(_PAST_FUNCTIONS.format("An operation"))


def without_phantoms(node: Any) -> Any:
    """Return nested containers with the tensors that phantoms among theirs stand for."""

    def real(tensor: Tensor) -> Tensor:
        value = tensor.value.real() if isinstance(tensor, Phantom) else tensor
        assert isinstance(value, Tensor), "asked after the last block"
        return value

    return map_tensors(real, node)


class RunHere(Enum):
    """What a proxy is told."""

    RUN_HERE = "run here"
    """The call is not part of the pipelined pass: run the block as part of the segment."""


RUN_HERE = RunHere.RUN_HERE


class BlockProxy(View):
    """Stands for a block in a view: the call goes to the microbatch, all else is as in any view."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Ask whether the call is part of a pass through the stack; else run as any view does."""
        own = self.__dict__
        answer = own["_called"](own["_block_index"], args, kwargs)
        plain: Any = super()
        return plain.__call__(*args, **kwargs) if answer is RUN_HERE else answer


def make_proxies(
    stack: BlockStack,
    *,
    maker: ViewMaker,
    classes: ViewClasses,
    called: Callable[[int, tuple[Any, ...], dict[str, Any]], Any],
) -> dict[nn.Module, nn.Module]:
    """Make a proxy for every block.

    Args:
        stack: The blocks.
        maker: Fills the proxies as views, for user code that looks inside a block.
        classes: The classes of views.
        called: What the proxies call: index, positional and keyword arguments. It returns the
            block's output, or RUN_HERE.
    """
    proxies: dict[nn.Module, nn.Module] = {}
    for index, block in enumerate(stack.blocks):
        proxy: Any = object.__new__(classes.of(type(block), BlockProxy))
        maker.fill(proxy, block)
        proxy.__dict__.update(_called=called, _block_index=index)
        proxies[block] = proxy
    return proxies


def check_order(stack: BlockStack, *, index: int, num_called: int) -> None:
    """Raise unless it is a block's turn.

    Args:
        stack: The blocks.
        index: The block that is called.
        num_called: How many were called before.

    Raises:
        CaptureError: If blocks were skipped, repeated or called out of order.
    """
    if index != num_called:
        due = f"block {stack.names[num_called]!r} was due"
        if num_called:
            due += f" after {stack.names[num_called - 1]!r}"
        raise CaptureError(
            f"Block {stack.names[index]!r} was called where {due}. Every block of a stack must be "
            "called once, in order. Name the blocks that are with RoundPipeStrategy(blocks=[...])."
        )


def check_finished(stack: BlockStack, *, num_called: int) -> None:
    """Raise if some blocks were called and the others never were.

    Args:
        stack: The blocks.
        num_called: How many were called.

    Raises:
        CaptureError: Naming the first block that is missing.
    """
    if num_called < len(stack.names):
        raise CaptureError(
            f"Blocks {stack.names[0]!r} to {stack.names[num_called - 1]!r} were called, but "
            f"{stack.names[num_called]!r} and what follows were not: they would be skipped in "
            f"silence. Name the {num_called} blocks in use with RoundPipeStrategy(blocks=[...])."
        )
