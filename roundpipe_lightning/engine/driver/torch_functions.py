"""Functions of PyTorch that take lazy tensors past `__torch_function__`.

An `autograd.Function` of user code takes the node of its arguments. That of a lazy tensor leads to
the call that made it, past what user code has written into it since: so it is given the values.

Workers recompute blocks anyway. A checkpoint around calls of blocks, or around the loss, would post
these calls a second time in the middle of the backward pass. So while a step runs,
`torch.utils.checkpoint.checkpoint` calls its function directly in the driver's thread. In workers'
threads, inside blocks, it works as ever.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import checkpoint as checkpoint_module

from roundpipe_lightning.engine.driver.lazy import gathered, is_lazy

_REENTRANT, _WITHOUT_REENTRY = "CheckpointFunction", "_checkpoint_without_reentrant_generator"


@contextmanager
def lazy_arguments() -> Iterator[None]:
    """Let such functions of this thread take lazy tensors, until the context ends."""
    driver = threading.get_ident()
    function_class = getattr(checkpoint_module, _REENTRANT)
    generator = getattr(checkpoint_module, _WITHOUT_REENTRY)

    class DirectFunction:
        @staticmethod
        def apply(function: Any, preserves: Any, *args: Any) -> Any:
            if threading.get_ident() == driver:
                return function(*args)
            return function_class.apply(function, preserves, *args)

    def direct_generator(*args: Any, **kwargs: Any) -> Iterator[None]:
        if threading.get_ident() == driver:
            return iter((None,))
        return iter(generator(*args, **kwargs))

    def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == driver:
            args = tuple(gathered(x) if is_lazy(x) and x.was_written else x for x in args)
        return plain_apply(cls, *args, **kwargs)

    plain_apply = torch.autograd.Function.__dict__["apply"].__func__
    setattr(checkpoint_module, _REENTRANT, DirectFunction)
    setattr(checkpoint_module, _WITHOUT_REENTRY, direct_generator)
    function: Any = torch.autograd.Function
    function.apply = classmethod(apply)
    try:
        yield
    finally:
        function.apply = classmethod(plain_apply)
        setattr(checkpoint_module, _REENTRANT, function_class)
        setattr(checkpoint_module, _WITHOUT_REENTRY, generator)
