"""Capture: how user code, unchanged, hands a stack of blocks to the engine.

In a view every block is a proxy. Proxies 0..n-2 note their arguments and hand a phantom on; the
last one passes the whole list of calls to the engine and returns what the real blocks make of it:

```
user code      h = embed(ids)     h = layer0(h, m)    h = layer1(h, m)         head(h)
in the view    h ────────────────▶ note ── phantom ──▶ note, run 0 and 1 ── h ──▶
```

A phantom has the shape, the dtype and the device of the tensor it stands for, but no values: any
use of it between two blocks is glue, and raises an error that names the blocks and the operation.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from roundpipe_lightning.engine.stack import BlockStack
from roundpipe_lightning.engine.trees import containers_in, map_leaves, tensors_in
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


#: Objects that a block cannot write into.
_UNCHANGING = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


class Phantom(Tensor):
    """Stands for the output of a block that has not run yet."""

    block_name: str

    @staticmethod
    def of(tensor: Tensor, block_name: str) -> Phantom:
        """Make the phantom of a tensor.

        Args:
            tensor: Gives shape, strides, dtype and device.
            block_name: The block whose output it stands for.
        """
        phantom: Phantom = torch.Tensor._make_wrapper_subclass(
            Phantom,
            tensor.shape,
            strides=tensor.stride(),
            dtype=tensor.dtype,
            device=tensor.device,
            requires_grad=tensor.requires_grad,
        )
        phantom.block_name = block_name
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
        found = [x for x in tensors_in((args, kwargs)) if isinstance(x, Phantom)]
        raise GlueError(
            f"`{name}` uses the output of block {found[0].block_name!r} before it has been "
            "computed: there is glue between this block and the next, or code that keeps the "
            "outputs of single blocks. The engine runs the blocks of a stack as one chain. Move "
            "the operation into a block, or name other blocks with RoundPipeStrategy(blocks=[...])."
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # the stub lacks `cls`
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return cls.__torch_function__(func, types, args, kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Name of the block."""
        return f"<output of {self.block_name}, not computed yet>"


class ObjectCopies:
    """Copies of the objects that blocks are given, a cache of keys and values for example.

    A block that writes into such an object writes again when it is recomputed: so each pass through
    a stage has a copy, and the object itself stays as it was when the stack was called.

    Args:
        wanted: Whether to copy; without a recompute the objects themselves are used.
    """

    def __init__(self, *, wanted: bool) -> None:
        self._wanted = wanted
        self._memo: dict[int, Any] = {}  # an object that several blocks are given stays one

    def of(self, value: Any) -> Any:
        """Return the object that stands for `value`; itself if it cannot change or be copied."""
        if not self._wanted or isinstance(value, _UNCHANGING) or callable(value):
            return value
        try:
            return copy.deepcopy(value, self._memo)
        except (AttributeError, NotImplementedError, RuntimeError, TypeError):
            return value


@dataclass(frozen=True)
class BlockCall:
    """The arguments of one block's call, the tensor that flows through the stack taken out.

    Attributes:
        args: Positional arguments; the flowing tensor's place holds None.
        kwargs: Keyword arguments, likewise.
        place: Where the flowing tensor goes: a position or a keyword.
        block_name: Whose call it is.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    place: int | str
    block_name: str

    @classmethod
    def split(
        cls, args: tuple[Any, ...], kwargs: dict[str, Any], *, block_name: str
    ) -> tuple[BlockCall, Tensor]:
        """Take the flowing tensor out: the first argument, else the first tensor keyword."""
        if args and isinstance(args[0], Tensor):
            return cls((None, *args[1:]), kwargs, 0, block_name), args[0]
        for key, value in kwargs.items():
            if isinstance(value, Tensor):
                return cls(args, {**kwargs, key: None}, key, block_name), value
        raise CaptureError(
            f"Block {block_name!r} was called without a tensor as its first argument: the engine "
            "does not know what flows through the stack."
        )

    def tensors(self) -> list[Tensor]:
        """All tensors among the arguments."""
        return list(tensors_in((self.args, self.kwargs)))

    def run(
        self,
        block: nn.Module,
        flowing: Tensor,
        *,
        swap: Callable[[Tensor], Tensor],
        copies: ObjectCopies,
        watched: AbstractContextManager[None],
    ) -> Any:
        """Call a block with these arguments.

        Args:
            block: The block, or its stand-in on a worker.
            flowing: The tensor that flows through the stack.
            swap: Brings every other tensor argument to where the block computes.
            copies: Gives what stands for arguments that are neither tensors nor containers.
            watched: Entered for the call itself.

        Raises:
            CaptureError: If the block adds to a list or a dict among them.
        """
        args, kwargs = map_leaves(
            lambda leaf: swap(leaf) if isinstance(leaf, Tensor) else copies.of(leaf),
            (self.args, self.kwargs),
        )
        lists = [(node, len(node)) for node in containers_in((args, kwargs)) if node is not kwargs]
        if isinstance(self.place, int):
            args = (flowing, *args[1:])
        else:
            kwargs = {**kwargs, self.place: flowing}
        with watched:
            result = block(*args, **kwargs)
        if any(len(node) != size for node, size in lists):
            raise CaptureError(
                f"Block {self.block_name!r} adds to a list or a dict that it is given, or takes "
                "something out: the next blocks and the code after the stack would not see it. Let "
                "it keep what it collects as an attribute, `self.collected = ...`, instead."
            )
        return result


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


class StackCapture:
    """Notes the calls of a stack's blocks until all are there.

    Args:
        stack: The blocks.
    """

    def __init__(self, stack: BlockStack) -> None:
        self._stack = stack
        self.reset()

    def reset(self) -> None:
        """Wait for block 0 again."""
        self._calls: list[BlockCall] = []
        self._entry: Tensor | None = None
        self._passed: Tensor | None = None

    def note(
        self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Phantom | tuple[Tensor, Sequence[BlockCall]]:
        """Note one block's call.

        Returns:
            The phantom to hand on; after the last block, the stack's input and the calls of all
            blocks.

        Raises:
            GlueError: If the block is not fed by the block before.
            CaptureError: If blocks were skipped, repeated or called out of order.
        """
        names, expected = self._stack.names, len(self._calls)
        if index != expected:
            due = f"block {names[expected]!r} was due"
            if expected:
                due += f" after {names[expected - 1]!r}"
            self.reset()
            raise CaptureError(
                f"Block {names[index]!r} was called where {due}. Every block of a stack must be "
                "called once, in order. Name the blocks that are with "
                "RoundPipeStrategy(blocks=[...])."
            )
        call, flowing = BlockCall.split(args, kwargs, block_name=names[index])
        if index == 0:
            self._entry = flowing
        elif flowing is not self._passed:
            raise GlueError(
                f"Block {names[index]!r} is not fed by the output of block {names[index - 1]!r}: "
                "there is glue between them. Move it into a block, or name other blocks with "
                "RoundPipeStrategy(blocks=[...])."
            )
        for tensor in call.tensors():
            if isinstance(tensor, Phantom):
                raise GlueError(
                    f"Block {names[index]!r} takes the output of block {tensor.block_name!r} as a "
                    "second input: only one tensor can flow through a stack."
                )
        self._calls.append(call)
        if index + 1 < len(names):
            assert self._entry is not None, "set with block 0"
            self._passed = Phantom.of(self._entry, names[index])
            return self._passed
        entry, calls = self._entry, self._calls
        self.reset()
        assert entry is not None, "set with block 0"
        return entry, calls

    def check_finished(self) -> None:
        """Raise if some blocks were called and the others never were.

        Raises:
            CaptureError: Naming the first block that is missing.
        """
        if self._calls:
            names, num = self._stack.names, len(self._calls)
            raise CaptureError(
                f"Blocks {names[0]!r} to {names[num - 1]!r} were called, but {names[num]!r} and "
                f"what follows were not: they would be skipped in silence. Name the {num} blocks "
                "in use with RoundPipeStrategy(blocks=[...])."
            )
