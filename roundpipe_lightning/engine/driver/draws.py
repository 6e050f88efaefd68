"""Random numbers that blocks draw.

A draw depends on the step, the call and the first row of the microbatch, never on the worker, and a
recompute draws what the forward pass drew:

    seed = mix(seed of the step, number of the call, first row)

Blocks draw from the default generator of their device, which others use, too. So a worker that
draws holds the generator's lock, seeds it, and puts it back as it was. CPU workers take turns for
blocks that draw, because a process has one generator for the processor. Blocks that drew nothing
when they ran first take no lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn import init
from torch.overrides import TorchFunctionMode

from roundpipe_lightning.engine.driver.calls import Call
from roundpipe_lightning.engine.driver.lazy import LazyTensor
from roundpipe_lightning.engine.driver.parameters import WatchedParameter

_MASK = (1 << 64) - 1


def mix(*parts: int) -> int:
    """Hash integers to one of 63 bits: SplitMix64 over a running sum (Steele et al., 2014)."""
    state = 0
    for part in parts:
        state = (state + 0x9E3779B97F4A7C15 + (part & _MASK)) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


class Draws:
    """The random numbers of one device's default generator.

    Thread: any. Guarded by: `lock`, which whoever draws holds.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self.lock = threading.RLock()
        self._generator = generator
        self._drew: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()  # by snapshot

    @property
    def any_block_draws(self) -> bool:
        return any(list(self._drew.values()))

    def run(self, call: Call, part: int, seed: int, function: Callable[[], Any]) -> Any:
        """Run a block on a part of a call, with its own random numbers."""
        if self._drew.get(call.runner) is False:
            return function()
        first_row = sum(call.split[:part])
        with self.lock:
            before = self._generator.get_state()
            self._generator.manual_seed(mix(seed, call.number, first_row))
            seeded = self._generator.get_state()
            try:
                return function()
            finally:
                drew = not torch.equal(self._generator.get_state(), seeded)
                self._drew[call.runner] = drew or self._drew.get(call.runner, False)
                self._generator.set_state(before)


class DeviceDraws:
    """The random numbers of a device: of all generators that its operations draw from."""

    def __init__(self, draws: Sequence[Draws]) -> None:
        self._draws = tuple(draws)
        # one order for all devices, that of the host first: nobody waits in a circle
        self.locks = tuple(one.lock for one in self._draws)

    @property
    def any_block_draws(self) -> bool:
        return any(one.any_block_draws for one in self._draws)

    def run(self, call: Call, part: int, seed: int, function: Callable[[], Any]) -> Any:
        """Run a block on a part of a call, with its own random numbers."""
        for draws in reversed(self._draws):
            function = partial(draws.run, call, part, seed, function)
        return function()


_WAITING = (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)


class DriverDraws(TorchFunctionMode):
    """Keeps user code outside of blocks from drawing while a worker has seeded the generator."""

    def __init__(self, draws: DeviceDraws) -> None:
        super().__init__()
        self._draws = draws

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _WAITING or any(issubclass(kind, LazyTensor) for kind in types):
            # it waits for workers, which must be able to draw
            return func(*args, **(kwargs or {}))
        if getattr(func, "__module__", "") == init.__name__ and any(
            isinstance(x, WatchedParameter) for x in (*args, *(kwargs or {}).values())
        ):
            return func(*args, **(kwargs or {}))  # waits for workers before it draws
        with ExitStack() as held:
            for lock in self._draws.locks:
                held.enter_context(lock)
            return func(*args, **(kwargs or {}))


@contextmanager
def own_draws(draws: DeviceDraws, *, always: bool) -> Iterator[None]:
    """Let user code draw beside workers until the context ends, if blocks draw at all."""
    if always or draws.any_block_draws:
        with DriverDraws(draws):
            yield
    else:
        yield
