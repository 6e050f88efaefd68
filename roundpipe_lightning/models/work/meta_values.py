"""What a block is called with, wherever its tensors are: in containers, and in plain objects.

A cache of keys and values, for example, is an object that a block reads and writes. A block that is
measured gets a copy, so that what it writes is not seen by others, or by itself when it runs again.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from copy import copy
from typing import Any

from torch import Tensor, nn

from roundpipe_lightning.engine.capture.trees import children_of, with_children

__all__ = ["held_tensors", "map_held_tensors"]

_NO_HOLDERS = (nn.Module, type, types.ModuleType, types.FunctionType, types.MethodType)
"""What has attributes but is no value of a call."""


def map_held_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Replace every tensor in containers and objects, of which copies are made; modules stay.

    Args:
        function: Called once with each tensor, however often it is held.
        value: A tensor, a container, an object with attributes or anything else.
    """
    return _Mapper(function).map(value)


def held_tensors(value: Any) -> list[Tensor]:
    """All tensors in containers and objects, each once."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_held_tensors(note, value)
    return found


class _Mapper:
    """One walk: what has been seen, and what it became."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        self._function = function
        self._seen: dict[int, Any] = {}
        self._alive: list[Any] = []

    def map(self, value: Any) -> Any:
        if id(value) not in self._seen:
            self._alive.append(value)  # its id stays its own
            self._seen[id(value)] = value  # where something holds itself
            self._seen[id(value)] = self._mapped(value)
        return self._seen[id(value)]

    def _mapped(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._function(value)
        if isinstance(value, _NO_HOLDERS):
            return value
        before = dict(children_of(value))
        attributes = vars(value) if not before and hasattr(value, "__dict__") else {}
        after = self._changed(before or attributes)
        if not after:
            return value
        if before:
            return with_children(value, {**before, **after})
        twin = copy(value)
        vars(twin).update(after)
        return twin

    def _changed(self, children: Mapping[Any, Any]) -> dict[Any, Any]:
        mapped = {key: self.map(child) for key, child in list(children.items())}
        return {key: child for key, child in mapped.items() if child is not children[key]}
