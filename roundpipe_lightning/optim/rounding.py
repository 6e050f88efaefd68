"""Stochastic rounding, and steps of any optimizer on bfloat16 parameters that use it.

float32 is rounded to bfloat16 so that the mean of the results is the exact value.

A bfloat16 number keeps 8 bits of a float32's 24. Rounded to the nearest, a weight of 1.0 swallows
every update smaller than 0.004, however many there are. Rounded at random, up with a probability
equal to the part that is cut off, it moves by the right amount on average:

```
float32   s eeeeeeee mmmmmmm|mmmmmmmmmmmmmmmm
          + noise            |nnnnnnnnnnnnnnnn     uniform in [0, 2^16)
          = cut here         ^                     the carry is the rounding up
```

The noise is a hash of (seed, number of the element), so it does not depend on threads, on chunks or
on the order in which tensors are rounded: a kernel that follows the three lines of `noise` gives
the same bits. The hash is the 32 bit finaliser "lowbias32" found by Wellons (Prospecting for Hash
Functions, 2018).

An optimizer adds its update to the parameter in the parameter's own dtype, so nothing that comes
after it can bring back what was rounded away. For the time of a step the parameters and their
gradients are therefore float32, and the optimizer, whichever it is, sees no bfloat16:

```
bfloat16 parameter ── widen ──▶ float32 ── optimizer.step() ── round ──▶ bfloat16, in place
bfloat16 gradient  ── widen ──▶ float32
                                float32 moments, made by the optimizer, kept
```

The memory for it is 8 bytes per parameter that has a gradient, until the step has ended.

Moments in 8 bits: blocks of 256 numbers share a scale, the codes are spaced like powers. Within a
block the largest magnitude is the scale `s`, kept in float32. A code `c` stands for

```
first moment   c in [-127, 127]   s * sign(c) * (|c| / 127)^2
second moment  c in [0, 255]      s * (c / 255)^4
```

so numbers near zero have finer codes than large ones: between neighbours lie at most `2 / 127` of
the scale for the first moment and `4 / 255` for the second, and the smallest numbers that are not
zero are `6.2e-5 s` and `2.4e-10 s`. Such powers need only multiplications and square roots, so
everything runs in vector instructions, without a look-up. A number between two codes becomes either
at random: rounded to the nearest, a second moment that shrinks by a thousandth per step would never
shrink at all. A second moment above zero never becomes zero, because the first one is divided by
its root. Numbers that are exactly codes stay what they are, so what was decoded can be encoded
again without a loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_CHUNK = 1 << 16  # elements at a time: the temporaries stay in the processor's cache

CUT_BITS = 16  # bits that a float32 has more than a bfloat16

FIRST_FACTOR, SECOND_FACTOR = 0x7FEB352D, 0x846CA68B - (1 << 32)
"""The multipliers of the hash, as signed numbers."""


def round_stochastically(source: Tensor, *, out: Tensor, seed: int, offset: int = 0) -> Tensor:
    """Round float32 values to bfloat16 without bias.

    Infinities and what is not a number stay what they are; a value between the largest finite
    bfloat16 and the next step becomes either.

    Args:
        source: float32, on any device, without a graph.
        out: bfloat16 of the same shape and device; written.
        seed: Two calls with the same seed and offset draw the same noise.
        offset: Number of the first element, where a tensor is rounded in parts.

    Returns:
        `out`.
    """
    assert source.dtype is torch.float32, source.dtype
    assert out.dtype is torch.bfloat16, out.dtype
    assert source.shape == out.shape, (source.shape, out.shape)
    flat = source.detach().reshape(-1)
    contiguous = out.is_contiguous()
    rounded = out.detach().view(-1) if contiguous else torch.empty_like(flat, dtype=out.dtype)
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK]
        rounded[start : start + _CHUNK] = _round(part, seed=seed, offset=offset + start)
    if not contiguous:
        out.detach().copy_(rounded.view(out.shape))
    return out


def _round(part: Tensor, *, seed: int, offset: int) -> Tensor:
    drawn = noise(part.numel(), seed=seed, offset=offset, device=part.device)
    cut = drawn.add_(part.view(torch.int32)).bitwise_and_(-(1 << CUT_BITS))
    rounded = cut.view(torch.float32)
    if not torch.isfinite(part.sum()):  # the carry would turn some of what is not a number into one
        rounded = torch.where(torch.isfinite(part), rounded, part)
    return rounded.to(torch.bfloat16)


def noise(count: int, *, seed: int, offset: int, device: torch.device) -> Tensor:
    """Return `count` uniform numbers of 16 bits, as int32."""
    low, high = _signed(seed ^ (offset >> 32)), _signed(seed >> 32)
    first = _signed(offset)
    x = torch.arange(count, dtype=torch.int32, device=device)
    x.add_(first).bitwise_xor_(low)
    _shift_xor(x, 16).mul_(FIRST_FACTOR).add_(high)
    _shift_xor(x, 15).mul_(SECOND_FACTOR)
    return _logical_shift(x, 16)


def _shift_xor(x: Tensor, places: int) -> Tensor:
    return x.bitwise_xor_(_logical_shift(x, places))


def _logical_shift(x: Tensor, places: int) -> Tensor:
    return (x >> places).bitwise_and_((1 << (32 - places)) - 1)


def _signed(value: int) -> int:
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value


def step_in_float32(
    optimizer: Optimizer, *, closure: Callable[[], Any], seed_of: Callable[[int], int], **given: Any
) -> Any:
    """Call `optimizer.step(closure)` with float32 parameters; return what it returns.

    Should the step raise, the parameters are as they were before it.

    Args:
        optimizer: Any optimizer that calls the closure before it looks at gradients.
        closure: Computes the loss and the gradients, on bfloat16 parameters.
        seed_of: The seed of a parameter, by its number in the optimizer.
    """
    narrow: list[tuple[Tensor, Tensor, Tensor, int]] = []

    def widened() -> Any:
        result = closure()
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        for number, parameter in enumerate(parameters):
            gradient = parameter.grad
            if parameter.dtype is torch.bfloat16 and gradient is not None:
                narrow.append((parameter, parameter.data, gradient, seed_of(number)))
                parameter.data = parameter.data.float()
                parameter.grad = gradient.float()
        return result

    try:
        result = optimizer.step(closure=widened, **given)
        for parameter, own, _, seed in narrow:
            round_stochastically(parameter.data, out=own, seed=seed)
    finally:
        for parameter, own, gradient, _ in narrow:
            parameter.data = own
            parameter.grad = gradient
    return result


def rounds_itself(optimizer: object) -> bool:
    return bool(getattr(optimizer, "rounds_stochastically", False))


def keep_wide_state(optimizer: Optimizer) -> None:
    """Keep the state of bfloat16 parameters in float32 when it is loaded.

    `Optimizer.load_state_dict` casts floating point state to the dtype of the parameter. What a
    float32 step has made is float32 and must stay so; bfloat16 state, of a training without
    stochastic rounding, becomes float32.
    """
    loaded: list[Mapping[str, Any]] = []

    def before(_: Optimizer, state_dict: Mapping[str, Any]) -> None:
        loaded[:] = [state_dict]

    def after(optimizer: Optimizer) -> None:
        (source,) = loaded
        loaded.clear()
        numbers = [number for group in source["param_groups"] for number in group["params"]]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            if parameter.dtype is not torch.bfloat16:
                continue
            for key, value in source["state"].get(number, {}).items():
                if isinstance(value, Tensor) and value.is_floating_point():
                    dtype = torch.promote_types(value.dtype, torch.float32)
                    optimizer.state[parameter][key] = value.detach().to(dtype, copy=True)

    optimizer.register_load_state_dict_pre_hook(before)
    optimizer.register_load_state_dict_post_hook(after)


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
        """Write what 1-D codes stand for to `out`, float32; there is a scale for every block."""
        out.copy_(codes)
        self._power(out.div_(self.largest), signed=self.signed)
        _each_block(Tensor.mul_, out, scales)
        return out

    def encode(
        self, numbers: Tensor, *, codes: Tensor, scales: Tensor, random: Noise | None
    ) -> None:
        """Write codes and scales of 1-D float32 numbers, from a block on; they are overwritten."""
        for start in range(0, numbers.numel(), _PART):
            stop = min(start + _PART, numbers.numel())
            part, scale = numbers[start:stop], scales[start // BLOCK : num_blocks(stop)]
            drawn = None if random is None else replace(random, offset=random.offset + start)
            magnitude = part.abs() if self.signed else part
            _largest(magnitude, out=scale)
            _each_block(Tensor.div_, magnitude, torch.where(scale == 0, 1.0, scale))
            least = None if self.signed else magnitude.sign()  # 1 for what must not become 0
            rounded = self._rounded(magnitude, drawn).clamp_(max=self.largest)
            if least is not None:
                torch.maximum(rounded, least, out=rounded)
            codes[start:stop].copy_(rounded.copysign_(part) if self.signed else rounded)

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
