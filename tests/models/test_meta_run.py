"""Tensors in what a block is called with: containers, objects, and what they share."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from roundpipe_lightning.models.work.meta_run import held_tensors, map_held_tensors


class Layer:
    """Keys of one layer, as a cache holds them."""

    def __init__(self, keys: Tensor) -> None:
        self.keys = keys
        self.library = math
        self.module = nn.Linear(2, 2)


@dataclass
class Cache:
    layers: list[Layer]
    notes: dict[str, object] = field(default_factory=dict)


def test_objects_are_copied_where_they_hold_tensors() -> None:
    cache = Cache(layers=[Layer(torch.ones(2))], notes={"name": "c"})
    copied = map_held_tensors(torch.Tensor.neg, ((cache,), {"cache": cache}))
    (first,), named = copied
    assert first is named["cache"] is not cache
    assert first.layers[0].keys.tolist() == [-1, -1]
    assert cache.layers[0].keys.tolist() == [1, 1]
    assert first.layers[0].module is cache.layers[0].module
    assert first.notes is cache.notes


def test_a_tensor_that_is_held_twice_becomes_one() -> None:
    tensor = torch.ones(1)
    first, second = map_held_tensors(torch.clone, [tensor, tensor])
    assert first is second is not tensor
    assert held_tensors({"a": [tensor], "b": (tensor, None, 3)}) == [tensor]


def test_what_holds_itself_is_walked_once() -> None:
    layer = Layer(torch.ones(1))
    layer.itself = layer  # type: ignore[attr-defined]
    assert held_tensors(layer) == [layer.keys]


def test_what_holds_no_tensor_stays() -> None:
    arguments = {"flag": True, "names": ["a"], "layer": Cache(layers=[])}
    assert map_held_tensors(torch.clone, arguments) is arguments
