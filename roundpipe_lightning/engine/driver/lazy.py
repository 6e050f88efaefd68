"""Lazy tensors: what a posted call returns to user code.

A lazy tensor has the shape of the whole batch. Another call takes its parts; row-wise operations on
it are posted, too. Any other operation gathers its values: in the driver's thread alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from roundpipe_lightning.engine.driver.calls import Output
from roundpipe_lightning.engine.driver.forms import Rows
from roundpipe_lightning.engine.driver.rows import NotABlockError

METADATA = frozenset(
    """
    __len__ _version device dim dtype element_size grad_fn is_complex is_contiguous is_cpu is_cuda
    is_floating_point is_inference is_leaf is_meta is_mps is_nested is_quantized is_sparse is_xpu
    itemsize layout names nbytes ndim ndimension nelement numel output_nr requires_grad shape size
    stride is_signed __hash__ _backward_hooks retains_grad dense_dim sparse_dim is_conj is_neg
    """.split()
)
"""Attributes and methods of tensors that need no values."""

_HOOKS = frozenset(("register_hook", "retain_grad", "register_post_accumulate_grad_hook"))

_WRITES = frozenset(
    f"__{name}__"
    for name in (
        "setitem iadd isub imul itruediv ifloordiv imod ipow imatmul iand ior ixor ilshift irshift"
    ).split()
)
_VIEWS = frozenset(
    """
    __getitem__ chunk contiguous detach diagonal expand expand_as flatten float mT T H mH moveaxis
    movedim narrow permute reshape select split squeeze swapaxes swapdims tensor_split to transpose
    type_as unbind unflatten unfold unsqueeze view view_as double half bfloat16 reshape_as
    split_with_sizes
    """.split()
)
"""Functions whose result may share the memory of their argument."""


def function_name(func: Any) -> str:
    """Return the name of a torch function; that of the attribute for a reader of one."""
    name: str = getattr(func, "__name__", "")
    return func.__self__.__name__ if name == "__get__" else name


class LazyTensor(Tensor):
    """One output of a call for the whole batch.

    Attributes:
        whole: The values of the whole batch in the driver's graph, once user code asked for them.
        has_hooks: Whether a hook looks at its gradient.
        base: The lazy tensor whose memory this one would share, and the function that made it:
            what is written into the one is seen in the other.
    """

    output: Output
    whole: Tensor | None
    has_hooks: bool
    base: tuple[LazyTensor, Callable[[Tensor], Tensor]] | None
    #: Losses without whole logits take it as a plain tensor (`models/losses/lazy_logits.py`).
    computes_as_plain_tensor = True

    @staticmethod
    def wrap(output: Output, device: torch.device) -> LazyTensor:
        lazy: LazyTensor = Tensor._make_wrapper_subclass(
            LazyTensor, output.shape, dtype=output.form.dtype, device=device, requires_grad=False
        )
        lazy.output, lazy.whole, lazy.has_hooks, lazy.base = output, None, False, None
        weakref.finalize(lazy, output.call.step.close_output, output)
        return lazy

    @property
    def rows(self) -> Rows | None:
        return self.output.form.rows

    @property
    def num_rows(self) -> int:
        return self.output.call.num_rows

    @property
    def was_written(self) -> bool:
        """Whether user code has changed or hooked the values: later calls must take these."""
        whole = self.whole
        if self.has_hooks:
            return True
        if whole is not None and not whole.is_inference() and whole._version > 0:
            return True
        if self.base is not None and self.base[0].was_written:
            return True
        with torch._C.DisableTorchFunctionSubclass():
            node = self.grad_fn
        # An `autograd.Function` that returns its input, such as that of a full backward hook.
        return node is not None and getattr(node, "output", None) is not self.output

    def share_memory_of_base(self) -> None:
        """Let the values be a view of those of the tensor that it was made from."""
        if self.base is not None and self.whole is None:
            base, view = self.base
            base.share_memory_of_base()
            step = base.output.call.step
            self.whole = view(step.gather(base))

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = function_name(func)
        if name in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if name.startswith("new_"):  # a tensor of its own, of the same dtype on the same device
            like = torch.empty((), dtype=args[0].dtype, device=args[0].device)
            return func(like, *args[1:], **kwargs)
        if name in _HOOKS:
            _check_untaken(args[0])
            args[0].has_hooks = True
        elif func is torch.autograd.grad:
            inputs = kwargs["inputs"] if "inputs" in kwargs else args[1]
            for tensor in [inputs] if isinstance(inputs, Tensor) else inputs:
                _check_untaken(tensor)
        if writes_first(name) and isinstance(args[0], LazyTensor):
            args[0].share_memory_of_base()
        leaves, structure = tree_flatten((args, kwargs))
        step = next(x for x in leaves if isinstance(x, LazyTensor)).output.call.step
        is_posted, result = step.post_operation(func, args, kwargs, leaves, structure)
        if is_posted:
            if name in _VIEWS and isinstance(args[0], LazyTensor):
                _note_base(args[0], result, partial(_again, func, args[1:], kwargs))
            return result
        args, kwargs = gathered(args), gathered(kwargs)
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # the stub lacks `cls`
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run what code in C++ asks for, past the functions of Python."""
        args, kwargs = tree_map(_detached, gathered((args, kwargs or {})))
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyTensor(shape={tuple(self.shape)}, of call {self.output.call.name!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return gathered(self).__reduce_ex__(protocol)


class LeftTensor(Tensor):
    """Stands in snapshots for a lazy tensor that a block has left in an attribute.

    Snapshots are equal whichever lazy tensor it is, and keep none of them alive.
    """

    @staticmethod
    def of(lazy: Tensor) -> LeftTensor:
        tensor: LeftTensor = Tensor._make_wrapper_subclass(
            LeftTensor, lazy.shape, dtype=lazy.dtype, device=lazy.device, requires_grad=False
        )
        return tensor

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function_name(func) in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise NotABlockError("it reads a tensor that a block has left in an attribute")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # the stub lacks `cls`
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        raise NotABlockError("it reads a tensor that a block has left in an attribute")


def writes_first(name: str) -> bool:
    """Return whether a torch function writes into its first argument."""
    return (name.endswith("_") and not name.endswith("__")) or name in _WRITES


def _again(func: Any, args: Any, kwargs: Any, base: Tensor) -> Any:
    return func(base, *args, **kwargs)


def _note_base(base: LazyTensor, result: Any, view: Callable[[Tensor], Any]) -> None:
    if isinstance(result, LazyTensor):
        result.base = (base, view)
    elif isinstance(result, list | tuple):
        for index, lazy in enumerate(result):
            if isinstance(lazy, LazyTensor):
                lazy.base = (base, lambda whole, index=index: view(whole)[index])


def _check_untaken(leaf: Any) -> None:
    """Refuse a look at the gradient of an output that workers pass on among themselves."""
    if isinstance(leaf, LazyTensor) and leaf.output.was_taken:
        raise RuntimeError(
            f"The gradient of an output of {leaf.output.call.name!r} is asked for after the output "
            "was given to another block or operation. Call output.retain_grad(), or register the "
            "hook, directly after the block."
        )


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def is_lazy(leaf: Any) -> bool:
    return isinstance(leaf, LazyTensor)


def gathered(tree: Any) -> Any:
    """Return a tree with the values of the whole batch in place of lazy tensors."""

    def values(leaf: Any) -> Any:
        return leaf.output.call.step.gather(leaf) if isinstance(leaf, LazyTensor) else leaf

    return tree_map(values, tree)
