"""Draws from generators of the engine's own, with the numbers that a process-wide one would give.

Most operations that draw take a generator, and dropout is an operation that does, and a product. So
neither needs the process-wide generators: nobody else sees the draw, whatever runs beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_IN_PLACE = frozenset(
    """
    bernoulli_ cauchy_ exponential_ geometric_ log_normal_ normal_ random_ uniform_
    """.split()
)
"""Methods that fill a tensor, and take a generator."""

_OF_DROPOUT = ("input", "p", "training", "inplace")


class OwnGenerators:
    """The generators of one thread, one per device."""

    def __init__(self) -> None:
        self._made: dict[torch.device, torch.Generator] = {}

    def call(
        self,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        seed: int,
    ) -> Any:
        """Call a torch function that draws as if the default generators had this seed.

        Returns:
            What it returns; `NotImplemented` if it can only draw from a default generator.
        """
        name = getattr(func, "__name__", "")
        if name in _IN_PLACE and isinstance(args[0], Tensor):
            generator = self._seeded(args[0].device, seed)
            return func(*args, **{**kwargs, "generator": generator})
        if name == "dropout":
            return self._dropout(func, args, kwargs, seed)
        return NotImplemented

    def _seeded(self, device: torch.device, seed: int) -> torch.Generator:
        if device not in self._made:
            self._made[device] = torch.Generator(device)
        return self._made[device].manual_seed(seed)

    def _dropout(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], seed: int
    ) -> Any:
        """Drop out, with the bits of PyTorch's own, forward and backward."""
        given = dict(zip(_OF_DROPOUT, args, strict=False)) | dict(kwargs)
        x, p, in_place = given["input"], given.get("p", 0.5), given.get("inplace", False)
        trains = given.get("training", given.get("train", True))
        if not trains or not 0 < p < 1 or not x.numel():
            return func(*args, **kwargs)  # draws nothing
        kind = x.device.type
        if x.layout is not torch.strided or kind not in ("cpu", "cuda"):
            return NotImplemented
        generator = self._seeded(x.device, seed)
        if kind == "cuda" and not in_place:
            return torch._fused_dropout(x, 1 - p, generator=generator)[0]  # noqa: SLF001
        factors = torch.empty_like(x).bernoulli_(1 - p, generator=generator).div_(1 - p)
        return x.mul_(factors) if in_place else x * factors
