"""A block's arguments and outputs: private copies of containers, and what a block put into them.

A block gets copies of every list, dict and object among its arguments, with other tensors inside,
so that it can be run again later from the same state. What it wrote into a copy is one of its
outputs, and is written into the user's container with a stand-in for every tensor:

```
user's code     shared ──┐                           ┌──▶ shared["k"] = stand-in for tensor 1
                         copy ──▶ block ──▶ changes ─┤
                                    └── result ──────┴──▶ stand-in for tensor 0
```
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import types
from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor, nn


class Reference:
    """Stands for a tensor in arguments that are kept."""


Swap: TypeAlias = Callable[[Any, bool], Any]
"""Function from a tensor or reference to its placeholder; the flag: it is inside an object."""

_OPAQUE = (
    str, bytes, bytearray, int, float, complex, bool, type(None), type, nn.Module, enum.Enum,
    types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType,
)  # fmt: skip


_SWAPPED = (Tensor, Reference)
_PLAIN = (dict, list)


@dataclass(frozen=True, kw_only=True)
class Change:
    """Something that a block put into a container or an object it was given."""

    target: Any  # the user's container
    key: Any  # key, index or attribute name
    value: Any
    in_object: bool  # whether the target is an object, or inside one, rather than a plain container

    def apply(self, value: Any) -> None:
        _put(self.target, self.key, value)


@dataclass(frozen=True)
class _Pair:
    original: Any
    twin: Any
    before: dict[Any, Any]
    in_object: bool


class Copies:
    """Copies of nested containers and objects with other tensors inside.

    Args:
        objects: Whether to look inside of objects that are no containers.
        known: What stands for some tensors, containers and objects, by their identity.
    """

    def __init__(
        self, swap: Swap, *, objects: bool = True, known: Mapping[int, Any] | None = None
    ) -> None:
        self._swap = swap
        self._objects = objects
        self._known = known or {}
        self._memo: dict[int, tuple[Any, Any]] = {}
        self._pairs: list[_Pair] = []

    def arguments(self, given: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        args, kwargs = given
        copied = tuple(map(self.copied, args))
        return copied, {k: self.copied(value) for k, value in kwargs.items()} if kwargs else {}

    def copied(self, node: Any, *, in_object: bool = False) -> Any:
        """Return a copy of any object; one that cannot hold a tensor is returned as it is."""
        key = id(node)
        if key in self._known:
            return self._known[key]
        if key in self._memo:
            return self._memo[key][1]
        if isinstance(node, _SWAPPED):
            return self._note(node, self._swap(node, in_object))
        if isinstance(node, _OPAQUE):
            return node
        if isinstance(node, (tuple, frozenset)):
            return self._tuple(node, in_object=in_object)
        if type(node) in _PLAIN:  # without a look at the abstract ones, which is expensive
            return self._filled(node, in_object=in_object)
        if isinstance(node, MutableSequence | MutableMapping):
            return self._filled(node, in_object=in_object)
        if self._objects and _has_state(node):
            plain = dataclasses.is_dataclass(node) or isinstance(node, Mapping)
            return self._filled(node, in_object=in_object or not plain)
        return node

    @property
    def hold_objects(self) -> bool:
        return any(pair.in_object for pair in self._pairs)

    def originals(self) -> dict[int, Any]:
        return {id(twin): original for original, twin in self._memo.values()}

    def changes(self) -> Iterator[Change]:
        """Return the values put into the copies since they were made, in a fixed order.

        Raises:
            KeyError: If something was taken out of one.
        """
        for pair in self._pairs:
            now = _children(pair.twin)
            for key in pair.before:
                if key not in now:
                    raise KeyError(key)
            for key, value in now.items():
                if key not in pair.before or pair.before[key] is not value:
                    yield Change(
                        target=pair.original, key=key, value=value, in_object=pair.in_object
                    )

    def _note(self, original: Any, twin: Any) -> Any:
        self._memo[id(original)] = (original, twin)
        return twin

    def _tuple(self, node: Any, *, in_object: bool) -> Any:
        children = [self.copied(child, in_object=in_object) for child in node]
        if all(a is b for a, b in zip(children, node, strict=True)):
            return node
        made = type(node)(*children) if hasattr(node, "_fields") else type(node)(children)
        return self._note(node, made)

    def _filled(self, node: Any, *, in_object: bool) -> Any:
        if type(node) in _PLAIN and not node:
            twin = self._note(node, type(node)())
            self._pairs.append(_Pair(node, twin, {}, in_object))
            return twin
        twin = self._note(node, copy.copy(node))
        children = {
            key: self.copied(child, in_object=in_object) for key, child in _children(node).items()
        }
        for key, child in children.items():
            _put(twin, key, child)
        self._pairs.append(_Pair(node, twin, children, in_object))
        return twin


def _has_state(node: Any) -> bool:
    return not isinstance(node, Sequence) and bool(_slots(node) or hasattr(node, "__dict__"))


def _children(node: Any) -> dict[Any, Any]:
    if type(node) is dict:
        return node
    if isinstance(node, MutableSequence):
        return dict(enumerate(node))
    if isinstance(node, MutableMapping):
        return {key: node[key] for key in node}
    in_slots = {name: getattr(node, name) for name in _slots(node) if hasattr(node, name)}
    return {**getattr(node, "__dict__", {}), **in_slots}


def _slots(node: Any) -> list[str]:
    declared = [vars(kind).get("__slots__", ()) for kind in type(node).__mro__]
    names = [name for slots in declared for name in ([slots] if isinstance(slots, str) else slots)]
    return [name for name in names if not name.startswith("__")]


def _put(node: Any, key: Any, child: Any) -> None:
    if type(node) is dict:
        node[key] = child
    elif isinstance(node, MutableSequence) and key == len(node):
        node.append(child)
    elif isinstance(node, MutableSequence | MutableMapping):
        node[key] = child
    else:
        object.__setattr__(node, key, child)  # frozen ones, too
