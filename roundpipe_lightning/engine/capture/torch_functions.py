"""Torch's functions by their names, and the stack of modes around them."""

from __future__ import annotations

# ruff: noqa: SLF001 - PyTorch has no public way to the stack of modes
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

#: Functions that ask about a tensor and give no tensor that its gradient flows through.
QUESTIONS = frozenset(
    """
    __get__ __hash__ __len__ __repr__ __format__ backward dim element_size is_contiguous
    is_floating_point item ndimension nelement numel register_hook requires_grad_ retain_grad size
    stride tolist
    """.split()
)
#: Functions and attributes that give a tensor and know its place themselves.
KEEP_PLACE = frozenset("H T cpu cuda imag mH mT real to".split())
#: Functions and attributes that a tensor answers without its values.
METADATA = frozenset(
    """
    __hash__ __len__ device dim dtype element_size get_device grad_fn is_complex is_contiguous
    is_cpu is_cuda is_floating_point is_inference is_leaf is_meta is_nested is_quantized is_sparse
    itemsize layout name names nbytes ndim ndimension nelement numel requires_grad shape size stride
    """.split()
)


def name_of(func: Callable[..., Any]) -> str:
    """Return a function's name, or that of the attribute that it gets if it makes a tensor."""
    name: str = getattr(func, "__name__", "")
    if name == "__get__":
        attribute = attribute_or_name(func)
        return attribute if attribute in KEEP_PLACE else name
    return name


def attribute_or_name(func: Callable[..., Any]) -> str:
    """Return the name of the attribute that a function gets, or else its own."""
    name: str = getattr(func, "__name__", str(func))
    if name == "__get__":
        return str(getattr(getattr(func, "__self__", None), "__name__", ""))
    return name


def is_called_from(*modules: str) -> bool:
    """Return whether code of a module is among the callers."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__") not in modules:
        frame = frame.f_back
    return frame is not None


class ModeStack:
    """The modes of one thread that are put away while the engine runs."""

    def __init__(self) -> None:
        self._away: list[Any] = []

    @contextmanager
    def without(self) -> Iterator[None]:
        """Put all modes away until the end of the context."""
        num_modes = torch._C._len_torch_function_stack()
        taken = [torch._C._pop_torch_function_stack() for _ in range(num_modes)][::-1]
        self._away = self._away + taken
        try:
            yield
        finally:
            if taken:
                self._away = self._away[: -len(taken)]
                _push(taken)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Put removed modes back until the end of the context."""
        back, self._away = self._away, []
        _push(back)
        try:
            yield
        finally:
            for _ in back:
                torch._C._pop_torch_function_stack()
            self._away = back


def _push(modes: list[Any]) -> None:
    for mode in modes:
        torch._C._push_on_torch_function_stack(mode)
