"""The generators that a loader's parts own: `DataLoader(generator=)`, its sampler's, its data's."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

_PARTS = ("", "sampler", "batch_sampler", "batch_sampler.sampler", "dataset")


class OwnGenerators:
    """Every `torch.Generator`, `random.Random` and numpy generator held by a loader's parts.

    Generators are known by where they are found, such as `"sampler.generator"`.

    Args:
        loader: Any loader.
    """

    def __init__(self, loader: Any) -> None:
        self._found = dict(_find(loader))

    def now(self) -> dict[str, Any]:
        """Where they stand: tensors and numbers."""
        return {place: _state_of(generator) for place, generator in self._found.items()}

    def restore(self, states: Mapping[str, Any]) -> None:
        """Put those that are there still back to where they stood."""
        for place, state in states.items():
            if place in self._found:
                _set_state(self._found[place], state)


def _find(loader: Any) -> Iterator[tuple[str, Any]]:
    seen: set[int] = set()
    for part in _PARTS:
        owner = loader
        for name in filter(None, part.split(".")):
            owner = getattr(owner, name, None)
        for name, value in getattr(owner, "__dict__", {}).items():
            known = isinstance(value, (torch.Generator, random.Random, np.random.Generator))
            if known and id(value) not in seen:
                seen.add(id(value))
                yield f"{part}.{name}", value


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        version, words, gauss = generator.getstate()
        return {"version": version, "words": list(words), "gauss": gauss}
    return _plain(generator.bit_generator.state)


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state.cpu())
    elif isinstance(generator, random.Random):
        generator.setstate((state["version"], tuple(state["words"]), state["gauss"]))
    else:
        generator.bit_generator.state = state


def _plain(value: Any) -> Any:
    """Numpy's arrays and numbers as Python's, so that `weights_only=True` loads them."""
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value
