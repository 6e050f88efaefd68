"""The arithmetic of AdamW, as torch's fused kernel does it, as machine code.

That kernel steps as many numbers at a time as a register of the processor holds, and what is left
over at the end of a parameter one by one. Its compiler has made one rounding of some products and
sums (`fma`), and not of the same ones in the two loops:

```
              at a time                                one by one
first moment  fma(pull, gradient - first, first)       the same
second        fma(share * gradient, gradient,          fma(second, beta2,
                  second * beta2)                          share * gradient * gradient)
master        decay * master + change * first / (sqrt(second) / root + eps)
```
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from fractions import Fraction
from math import sqrt
from typing import Any

from roundpipe_lightning.engine.optim.lanes import FLOAT, INT32, INT64, Lanes, scalar, splat
from roundpipe_lightning.engine.optim.pieces import Settings


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """What torch's kernel does on a processor.

    Attributes:
        width: Numbers of float32 that it steps at a time.
        contracts: Whether it rounds products and sums together.
    """

    width: int
    contracts: bool


_FACTORS: dict[str, type[ctypes.c_float | ctypes.c_int32]] = {
    "sign": ctypes.c_float,
    "decay": ctypes.c_float,
    "pull": ctypes.c_float,
    "pull_is_small": ctypes.c_int32,
    "beta2": ctypes.c_float,
    "share": ctypes.c_float,
    "root": ctypes.c_float,
    "eps": ctypes.c_float,
    "change": ctypes.c_float,
}


class Factors(ctypes.Structure):
    """The numbers that a step depends on, rounded to float32 as in torch's kernel.

    Attributes:
        sign: -1 to go up the gradient.
        decay: What weight decay leaves of a master.
        pull: Of the gradient on the first moment; less one if that is half or more.
        pull_is_small: Whether it is less, so that the moment is moved from where it is.
        beta2: What is left of the second moment.
        share: Of the squared gradient in it.
        root: By which the root of the second moment is divided.
        eps: What is added then.
        change: Minus the learning rate, over the first moment's correction.
    """

    _fields_ = list(_FACTORS.items())


def factors(settings: Settings, *, step: float, arithmetic: Arithmetic) -> Factors:
    """Return the numbers of a step.

    Args:
        settings: Of the parameter group.
        step: Number of the step.
        arithmetic: How torch computes.
    """
    decay = 1 - settings.lr * settings.weight_decay
    if arithmetic.contracts:
        decay = float(1 - Fraction(settings.lr) * Fraction(settings.weight_decay))
    pull = ctypes.c_float(1 - settings.beta1).value
    small = pull < 0.5
    return Factors(
        sign=-1 if settings.maximize else 1,
        decay=decay,
        pull=pull if small else pull - 1,
        pull_is_small=small,
        beta2=settings.beta2,
        share=1 - settings.beta2,
        root=sqrt(1 - settings.beta2**step),
        eps=settings.eps,
        change=-settings.lr / (1 - settings.beta1**step),
    )


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """Some numbers of a parameter, as float32.

    Attributes:
        values: Of the master.
        first: Of the first moment.
        second: Of the second moment.
    """

    values: Lanes
    first: Lanes
    second: Lanes


class AdamWCode:
    """Writes the formula.

    Args:
        builder: Appends instructions.
        address: int64, of the `Factors`.
        arithmetic: Order of the operations.
    """

    def __init__(self, builder: Any, address: Any, arithmetic: Arithmetic) -> None:
        self._builder = builder
        self._contracts = arithmetic.contracts
        self._factors = {
            name: scalar(
                builder,
                builder.add(address, INT64(getattr(Factors, name).offset)),
                INT32 if kind is ctypes.c_int32 else FLOAT,
            )
            for name, kind in _FACTORS.items()
        }

    def step(self, now: Numbers, gradient: Lanes, *, at_a_time: bool) -> Numbers:
        """Write one step.

        Args:
            now: What is stepped.
            gradient: As float32.
            at_a_time: Whether torch steps these numbers at a time, or one by one.
        """
        count = gradient.count
        gradient = gradient * self._of("sign", count)
        base = self._of("pull_is_small", count).differs(0).choose(now.first, gradient)
        first = self._sum(self._of("pull", count), gradient - now.first, base)
        beta2, share = self._of("beta2", count), self._of("share", count) * gradient
        if at_a_time:
            second = self._sum(share, gradient, now.second * beta2)
        else:
            second = self._sum(now.second, beta2, share * gradient)
        below = second.sqrt() / self._of("root", count) + self._of("eps", count)
        change = self._of("change", count) * first / below
        values = now.values * self._of("decay", count) + change
        return Numbers(values=values, first=first, second=second)

    def _sum(self, one: Lanes, other: Lanes, addend: Lanes) -> Lanes:
        return one.fma(other, addend) if self._contracts else one * other + addend

    def _of(self, name: str, count: int) -> Lanes:
        return splat(self._builder, self._factors[name], count)
