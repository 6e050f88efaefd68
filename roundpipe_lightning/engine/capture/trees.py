"""Walks through what user code hands around: containers with tensors somewhere inside."""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

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
