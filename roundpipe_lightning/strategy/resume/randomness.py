"""The random generators in a checkpoint: a resumed run goes on with the same numbers.

Lightning does not save them. Everything random in a roundpipe run follows from them: shuffling and
augmentation directly, dropout through the step's seed, which is made from torch's seed and the
number of the batch. Beside the host's and the devices' there are those that a loader's parts own
(`DataLoader(generator=)`, its sampler's, its data's) and samplers with a state. All are stored as
tensors, numbers and tuples, so that `weights_only=True` loads them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch

from roundpipe_lightning.engine.device.accelerator import generators_in_use

State: TypeAlias = Mapping[str, Any]
"""States of generators, as tensors, numbers and tuples."""


def host_now() -> tuple[Any, ...]:
    """Return what `host_state` makes a state of, which takes long, and is rarely asked for."""
    numpy = np.random.get_state(legacy=False)  # noqa: NPY002 - the global generator is what is kept
    return torch.get_rng_state(), random.getstate(), numpy


def host_state(then: tuple[Any, ...] | None = None) -> dict[str, Any]:
    """Return the states of torch's, Python's and numpy's host generators, now or `then`."""
    of_torch, python, numpy = then or host_now()
    return {"torch": of_torch, "python": python, "numpy": _plain(numpy)}


def set_host_state(state: State) -> None:
    torch.set_rng_state(state["torch"].cpu())
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002


def random_state() -> dict[str, Any]:
    """Return the states of the host's generators and of devices in use."""
    state = host_state()
    if generators := generators_in_use():
        state["devices"] = [generator.get_state() for generator in generators]
    return state


def set_random_state(state: State) -> None:
    """Restore what `random_state` returned; devices that are not there are passed over."""
    set_host_state(state)
    for generator, saved in zip(generators_in_use(), state.get("devices", ()), strict=False):
        generator.set_state(saved.cpu())


_PARTS = ("", "sampler", "batch_sampler", "batch_sampler.sampler", "dataset")


class LoaderRandomness:
    """Reads and sets the randomness of any loader.

    Own generators are those of torch, Python and numpy that its parts hold, known by where they are
    found, such as `"sampler.generator"`.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._own = dict(_own_generators(loader))

    def now(self) -> State:
        return {
            "host": host_state(),
            "own": {place: _state_of(generator) for place, generator in self._own.items()},
            "samplers": {name: part.state_dict() for name, part in self._stateful()},
        }

    def restore(self, state: State) -> None:
        set_host_state(state["host"])
        self.restore_own(state["own"])

    def restore_own(self, states: State) -> None:
        for place, state in states.items():
            if place in self._own:
                _set_state(self._own[place], state)

    def restore_samplers(self, states: State) -> None:
        for name, part in self._stateful():
            if name in states:
                part.load_state_dict(states[name])

    def _stateful(self) -> Iterator[tuple[str, Any]]:
        for name in ("sampler", "batch_sampler"):
            part = getattr(self._loader, name, None)
            if hasattr(part, "state_dict") and hasattr(part, "load_state_dict"):
                yield name, part


def _own_generators(loader: Any) -> Iterator[tuple[str, Any]]:
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
        return generator.getstate()
    return _plain(generator.bit_generator.state)


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state.cpu())
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.bit_generator.state = state


def _plain(value: Any) -> Any:
    """Numpy's arrays and numbers as Python's, so that `weights_only=True` loads them."""
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value
