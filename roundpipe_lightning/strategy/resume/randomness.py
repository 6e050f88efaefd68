"""The random generators in a checkpoint: a resumed run goes on with the same numbers.

Lightning does not save them. Everything random in a roundpipe run follows from them: shuffling and
augmentation directly, dropout through the step's seed, which is made from torch's seed and the
number of the batch. Beside the host's and the devices' there are those that a loader's parts own
(`DataLoader(generator=)`, its sampler's, its data's) and samplers with a state. All are stored as
tensors and numbers, so that `weights_only=True` loads them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from roundpipe_lightning.engine.device.accelerator import generators_in_use


@dataclass(frozen=True, kw_only=True)
class HostRandomness:
    """States of the host's three generators; cheap to take, packed only for a checkpoint."""

    torch: Any  # torch's state, uint8; a numpy array on its way between processes
    python: Any  # `random.getstate()`
    numpy: Any  # `numpy.random.get_state()`

    @classmethod
    def now(cls) -> HostRandomness:
        numpy = np.random.get_state()  # noqa: NPY002 - the global generator is what is kept
        return cls(torch=torch.get_rng_state(), python=random.getstate(), numpy=numpy)

    def restore(self) -> None:
        torch.set_rng_state(self.torch)
        random.setstate(self.python)
        np.random.set_state(self.numpy)  # noqa: NPY002

    def packed(self) -> dict[str, Any]:
        version, words, gauss = self.python
        _, numbers, position, has_gauss, numpy_gauss = self.numpy
        return {
            "torch": self.torch,
            "python": {"version": version, "words": _tensor(words), "gauss": gauss},
            "numpy": {
                "words": _tensor(numbers.tolist()),
                "position": int(position),
                "has_gauss": int(has_gauss),
                "gauss": float(numpy_gauss),
            },
        }

    @classmethod
    def unpacked(cls, state: Mapping[str, Any]) -> HostRandomness:
        python, numpy = state["python"], state["numpy"]
        words = numpy["words"].to(torch.uint32).numpy()
        return cls(
            torch=state["torch"].cpu(),
            python=(python["version"], tuple(python["words"].tolist()), python["gauss"]),
            numpy=("MT19937", words, numpy["position"], numpy["has_gauss"], numpy["gauss"]),
        )


def random_state() -> dict[str, Any]:
    """Return the state of torch's, Python's and numpy's host generators and of devices in use."""
    state = HostRandomness.now().packed()
    if generators := generators_in_use():
        state["devices"] = [generator.get_state() for generator in generators]
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore what `random_state` returned; devices that are not there are passed over.

    Args:
        state: Host tensors and numbers.
    """
    HostRandomness.unpacked(state).restore()
    for generator, saved in zip(generators_in_use(), state.get("devices", ()), strict=False):
        generator.set_state(saved.cpu())


def _tensor(words: Any) -> Tensor:
    return torch.tensor(words, dtype=torch.int64)


# Of a loader -----------------------------------------------------------------------------------

_PARTS = ("", "sampler", "batch_sampler", "batch_sampler.sampler", "dataset")


@dataclass(frozen=True, kw_only=True)
class Randomness:
    """States of all generators that an order of batches may be drawn from."""

    host: HostRandomness
    own: Mapping[str, Any]
    samplers: Mapping[str, Any]  # the state dicts of samplers that have one

    def packed(self) -> dict[str, Any]:
        return {"host": self.host.packed(), "own": dict(self.own), "samplers": dict(self.samplers)}

    @classmethod
    def unpacked(cls, state: Mapping[str, Any]) -> Randomness:
        host = HostRandomness.unpacked(state["host"])
        return cls(host=host, own=state["own"], samplers=state["samplers"])


class LoaderRandomness:
    """Reads and sets the randomness of any loader.

    Own generators are those of torch, Python and numpy that its parts hold, known by where they are
    found, such as `"sampler.generator"`.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._own = dict(_own_generators(loader))

    def now(self) -> Randomness:
        return Randomness(
            host=HostRandomness.now(),
            own={place: _state_of(generator) for place, generator in self._own.items()},
            samplers={name: part.state_dict() for name, part in self._stateful()},
        )

    def restore(self, randomness: Randomness) -> None:
        randomness.host.restore()
        self.restore_own(randomness.own)

    def restore_own(self, states: Mapping[str, Any]) -> None:
        for place, state in states.items():
            if place in self._own:
                _set_state(self._own[place], state)

    def restore_samplers(self, states: Mapping[str, Any]) -> None:
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
