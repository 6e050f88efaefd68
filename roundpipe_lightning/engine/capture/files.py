"""What code of the user's writes outside the process: files, folders, and lines on the screen."""

from __future__ import annotations

import builtins
import io
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch

_WRITERS: tuple[tuple[Any, str], ...] = (
    (builtins, "open"),
    (io, "open"),
    (os, "mkdir"),
    (torch, "save"),
    (builtins, "print"),
)
_ALONE = threading.RLock()  # these functions are the process's: put back in order


@contextmanager
def watched_writes(may_write: Callable[[str], bool]) -> Iterator[None]:
    """Ask, by the name of the function, before this thread writes; False: it is left out."""
    thread = threading.get_ident()

    def around(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(own)
        def call(*args: Any, **kwargs: Any) -> Any:
            mode = kwargs.get("mode", (*args, "r", "r")[1]) if name == "open" else "w"
            asks = threading.get_ident() == thread and not {*mode}.isdisjoint("wax+")
            return None if asks and not may_write(name) else own(*args, **kwargs)

        return call

    with _ALONE, ExitStack() as stack:
        for owner, name in _WRITERS:
            stack.enter_context(patch.object(owner, name, around(name, getattr(owner, name))))
        yield
