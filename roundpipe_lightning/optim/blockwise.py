"""Moments in 8 bits: blocks of 256 numbers share a scale, the codes are spaced like powers.

Within a block the largest magnitude is the scale `s`, kept in float32. A code `c` stands for

```
first moment   c in [-127, 127]   s * sign(c) * (|c| / 127)^2
second moment  c in [0, 255]      s * (c / 255)^4
```

so numbers near zero have finer codes than large ones: between neighbours lie at most `2 / 127` of
the scale for the first moment and `4 / 255` for the second, and the smallest numbers that are not
zero are `6.2e-5 s` and `2.4e-10 s`. Such powers need only multiplications and square roots, so
everything runs in vector instructions, without a look-up.

While training, a number between two codes becomes either, with the probability that makes the mean
exact: rounded to the nearest, a second moment that shrinks by a thousandth per step would never
shrink at all. A second moment above zero never becomes zero, because the first one is divided by
its root. Numbers that are exactly codes stay what they are, so what was decoded can be encoded
again without a loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from roundpipe_lightning.optim.rounding import noise

BLOCK = 256  # numbers that share a scale
NOISE_LEVELS = 65536.0  # number of values that the noise of a rounding may have
_PART = 512 * BLOCK  # numbers encoded at a time: fewer are slower, as each operation takes the GIL


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Source of a rounding's random numbers: of a tensor and step, from an element on."""

    seed: int
    offset: int


@dataclass(frozen=True, kw_only=True)
class PowerCode:
    """A code of 8 bits."""

    signed: bool  # whether numbers may be negative
    squarings: int  # the power is 2 to this

    @property
    def largest(self) -> int:
        return 127 if self.signed else 255

    @property
    def dtype(self) -> torch.dtype:
        return torch.int8 if self.signed else torch.uint8

    def decode(self, codes: Tensor, scales: Tensor, *, out: Tensor) -> Tensor:
        """Write the numbers that codes stand for.

        Args:
            codes: 1-D.
            scales: One per block of `codes`, the last of which may be short.
            out: float32, as long as `codes`.
        """
        out.copy_(codes)
        self._power(out.div_(self.largest), signed=self.signed)
        _each_block(Tensor.mul_, out, scales)
        return out

    def encode(
        self, numbers: Tensor, *, codes: Tensor, scales: Tensor, random: Noise | None
    ) -> None:
        """Write codes and scales of numbers, which are overwritten.

        Args:
            numbers: float32, 1-D, beginning at a block.
            codes: As long.
            scales: One per block.
            random: Noise of the rounding; None rounds to the nearest.
        """
        for start in range(0, numbers.numel(), _PART):
            stop = min(start + _PART, numbers.numel())
            blocks = slice(start // BLOCK, num_blocks(stop))
            self._encode(
                numbers[start:stop],
                codes=codes[start:stop],
                scales=scales[blocks],
                random=None if random is None else replace(random, offset=random.offset + start),
            )

    def _encode(
        self, numbers: Tensor, *, codes: Tensor, scales: Tensor, random: Noise | None
    ) -> None:
        magnitude = numbers.abs() if self.signed else numbers
        _largest(magnitude, out=scales)
        _each_block(Tensor.div_, magnitude, torch.where(scales == 0, 1.0, scales))
        least = None if self.signed else magnitude.sign()  # 1 for what must not become 0
        rounded = self._rounded(magnitude, random).clamp_(max=self.largest)
        if least is not None:
            torch.maximum(rounded, least, out=rounded)
        codes.copy_(rounded.copysign_(numbers) if self.signed else rounded)

    def _rounded(self, x: Tensor, random: Noise | None) -> Tensor:
        root = x.sqrt()
        for _ in range(self.squarings - 1):
            root.sqrt_()
        root.mul_(self.largest)
        return root.round_() if random is None else self._randomly(x, root.floor_(), random)

    def _randomly(self, x: Tensor, below: Tensor, random: Noise) -> Tensor:
        low = self._power(below.mul(1 / self.largest), signed=False)
        gap = self._power((below + 1).mul_(1 / self.largest), signed=False).sub_(low)
        share = x.sub(low).div_(gap).clamp_(min=0.0)  # not below, by a rounding error
        drawn = noise(x.numel(), seed=random.seed, offset=random.offset, device=x.device)
        share.add_(drawn.to(torch.float32), alpha=1 / NOISE_LEVELS)
        return below.add_(share.floor_())  # one more with a probability of the share

    def _power(self, x: Tensor, *, signed: bool) -> Tensor:
        if signed:
            return x.mul_(x.abs())  # a square that keeps its sign
        for _ in range(self.squarings):
            x.square_()
        return x


FIRST_MOMENT = PowerCode(signed=True, squarings=1)
SECOND_MOMENT = PowerCode(signed=False, squarings=2)


def num_blocks(count: int) -> int:
    return math.ceil(count / BLOCK)


def _each_block(apply: Callable[[Tensor, Tensor], object], numbers: Tensor, by: Tensor) -> None:
    whole = numbers.numel() // BLOCK * BLOCK
    apply(numbers[:whole].view(-1, BLOCK), by[: whole // BLOCK, None])
    apply(numbers[whole:], by[whole // BLOCK :])


def _largest(numbers: Tensor, *, out: Tensor) -> None:
    whole = numbers.numel() // BLOCK * BLOCK
    torch.amax(numbers[:whole].view(-1, BLOCK), dim=1, out=out[: whole // BLOCK])
    if whole < numbers.numel():
        out[whole // BLOCK :] = numbers[whole:].amax()
