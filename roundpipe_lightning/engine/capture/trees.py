"""Walks through what user code hands around: containers with tensors somewhere inside.

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
import operator
import types
from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

#: Types of what has no children, of all that travels most: a look at abstract classes is expensive.
_LEAVES = frozenset({Tensor, nn.Parameter, int, float, bool, str, type(None), torch.dtype})


def children_of(node: Any) -> Iterator[tuple[Any, Any]]:
    """Return the items of a container, each with its key, field name or index; none for a leaf.

    Containers are mappings (a transformers `BatchEncoding`, too), lists, tuples, named tuples and
    dataclass instances.
    """
    if isinstance(node, Tensor):
        return
    if isinstance(node, Mapping):
        yield from node.items()  # iterating over a tensordict gives its rows
    elif dataclasses.is_dataclass(node) and not isinstance(node, type):
        yield from ((f.name, getattr(node, f.name)) for f in dataclasses.fields(node))
    elif isinstance(node, list | tuple):
        yield from enumerate(node)


def _with_children(node: Any, children: Mapping[Any, Any]) -> Any:
    """Return a container like `node` that holds other children, all under the same keys."""
    if isinstance(node, MutableMapping):
        twin = copy.copy(node)
        for key, child in children.items():
            twin[key] = child
        return twin
    if dataclasses.is_dataclass(node):
        like = copy.copy(node)
        for name, child in children.items():
            object.__setattr__(like, name, child)  # frozen ones, too
        return like
    if isinstance(node, Mapping):
        return type(node)(children)  # type: ignore[call-arg]
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return type(node)(*children.values())
    return type(node)(children.values())


def map_tensors(function: Callable[[Tensor], Any], node: Any) -> Any:
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, node)


def map_leaves(function: Callable[[Any], Any], node: Any) -> Any:
    """Replace all that is no container in nested containers; what stays the same is kept."""
    kind = type(node)
    if kind in _LEAVES:
        return function(node)
    if kind is tuple or kind is list:  # as below, without keys
        mapped = [map_leaves(function, child) for child in node]
        if all(map(operator.is_, mapped, node)):
            return node or function(node)
        return kind(mapped)
    before = node if kind is dict else dict(children_of(node))
    if not before:
        return function(node)
    after = {key: map_leaves(function, child) for key, child in before.items()}
    if all(after[key] is child for key, child in before.items()):
        return node
    return _with_children(node, after)


def tensors_in(node: Any) -> list[Tensor]:
    found: list[Tensor] = []
    left = [node]
    while left:
        one = left.pop()
        kind = type(one)
        if isinstance(one, Tensor):
            found.append(one)
        elif kind is tuple or kind is list:
            left += one[::-1]
        elif kind is dict:
            left += [*one.values()][::-1]
        elif kind not in _LEAVES:
            left += [child for _, child in children_of(one)][::-1]
    return found


def parameters_in(module: nn.Module) -> list[nn.Parameter]:
    """Return what `parameters()` gives, in another order, without the names that it makes."""
    found: list[nn.Parameter] = []
    seen: set[int] = set()
    left: list[Any] = [module]
    while left:
        one = left.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            for parameter in one._parameters.values():  # noqa: SLF001
                if parameter is not None:
                    found.append(parameter)  # noqa: PERF401 - a comprehension is a call
            left += one._modules.values()  # noqa: SLF001
    return found


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
        may_hold = self._objects and not isinstance(node, Sequence)
        if may_hold and (_slots(node) or hasattr(node, "__dict__")):
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
