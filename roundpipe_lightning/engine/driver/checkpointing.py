"""Activation checkpointing of user code around blocks.

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

from torch.utils import checkpoint as checkpoint_module

_REENTRANT, _WITHOUT_REENTRY = "CheckpointFunction", "_checkpoint_without_reentrant_generator"


@contextmanager
def direct_checkpoints() -> Iterator[None]:
    """Let checkpoints of this thread call their functions directly, until the context ends."""
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

    setattr(checkpoint_module, _REENTRANT, DirectFunction)
    setattr(checkpoint_module, _WITHOUT_REENTRY, direct_generator)
    try:
        yield
    finally:
        setattr(checkpoint_module, _REENTRANT, function_class)
        setattr(checkpoint_module, _WITHOUT_REENTRY, generator)
