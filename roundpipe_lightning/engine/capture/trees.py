"""Walks through what user code hands around: containers with tensors somewhere inside."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor


def children_of(node: Any) -> Iterator[tuple[Any, Any]]:
    """Return the items of a container, each with its key, field name or index; none for a leaf.

    Containers are mappings (a transformers `BatchEncoding`, too), lists, tuples, named tuples and
    dataclass instances.
    """
    if isinstance(node, Tensor):
        return  # without a look at abstract classes, which is expensive
    if isinstance(node, Mapping):
        yield from ((key, node[key]) for key in node)
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
    before = dict(children_of(node))
    if not before:
        return function(node)
    after = {key: map_leaves(function, child) for key, child in before.items()}
    if all(after[key] is child for key, child in before.items()):
        return node
    return _with_children(node, after)


def tensors_in(node: Any) -> Iterator[Tensor]:
    if isinstance(node, Tensor):
        yield node
    for _, child in children_of(node):
        yield from tensors_in(child)


def containers_in(node: Any) -> Iterator[list[Any] | dict[Any, Any]]:
    if isinstance(node, list | dict):
        yield node
    for _, child in children_of(node):
        yield from containers_in(child)
