"""How compiled code reads numbers from memory as float32, and writes float32 back.

The conversions are those of `Tensor.copy_`, to the bit: to the nearest, a tie to the even one. They
are written with integers, so they need no instruction that some processors lack. What is not a
number stays so; its bits may be others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from roundpipe_lightning.engine.optim.lanes import FLOAT, INT16, INT32, Lanes, load, numbered, splat
from roundpipe_lightning.engine.optim.rounding import CUT_BITS, FIRST_FACTOR, SECOND_FACTOR

_MAGNITUDE, _INFINITY, _NAN = 0x7FFFFFFF, 0x7F800000, 0x7FC00000  # bits of float32
_HALF_INFINITY, _HALF_NAN = 0x7C00, 0x7E00
_REBIAS = 112  # what is added to the exponent of a float16 to make it that of a float32
_HALF_CUT = 13  # bits that a float32 has more
_LEAST_NORMAL_HALF = (_REBIAS + 1) << 23
_BEYOND_HALF = (_REBIAS + 31) << 23
_BITS_OF_HALF = 0x3F000000  # of 0.5


@dataclass(frozen=True, kw_only=True)
class Draw:
    """Where the noise of some lanes comes from.

    Attributes:
        seed: int64.
        index: int64, number of the first lane's element.
    """

    seed: Any
    index: Any


def read(builder: Any, address: Any, dtype: torch.dtype, count: int) -> Lanes:
    """Return numbers of a dtype as float32."""
    return wide(load(builder, address, FLOAT if dtype is torch.float32 else INT16, count), dtype)


def wide(stored: Lanes, dtype: torch.dtype) -> Lanes:
    """Return what is stored in a dtype as float32."""
    if dtype is torch.float32:
        return stored
    bits = stored.widened(INT32)
    if dtype is torch.bfloat16:
        return (bits << CUT_BITS).read_as(FLOAT)
    assert dtype is torch.float16, dtype
    magnitude = bits & 0x7FFF
    moved = (magnitude << _HALF_CUT).read_as(FLOAT) * 2.0**_REBIAS  # exact, also below normal
    special = ((magnitude << _HALF_CUT) | _INFINITY).read_as(FLOAT)
    value = magnitude.above(_HALF_INFINITY - 1).choose(special, moved)
    return (value.read_as(INT32) | ((bits & 0x8000) << 16)).read_as(FLOAT)


def converted(lanes: Lanes, dtype: torch.dtype) -> Lanes:
    """Return float32 numbers as they are stored in a dtype, rounded to the nearest."""
    if dtype is torch.float32:
        return lanes
    bits = lanes.read_as(INT32)
    if dtype is torch.bfloat16:
        return _bfloat16(bits)
    assert dtype is torch.float16, dtype
    return _float16(bits)


def rounded_at_random(lanes: Lanes, draw: Draw) -> Lanes:
    """Return float32 numbers as bfloat16, rounded as `round_stochastically` does."""
    bits = lanes.read_as(INT32)
    drawn = noise(lanes.builder, draw, lanes.count)
    finite = (bits & _INFINITY).differs(_INFINITY)
    cut = ((bits + drawn) >> CUT_BITS).narrowed(INT16)
    return finite.choose(cut, _bfloat16(bits))


def noise(builder: Any, draw: Draw, count: int) -> Lanes:
    """Return the numbers of `rounding.noise`, as int32."""
    upper = builder.trunc(builder.lshr(draw.index, draw.index.type(32)), INT32)
    low = builder.xor(builder.trunc(draw.seed, INT32), upper)
    high = builder.trunc(builder.lshr(draw.seed, draw.seed.type(32)), INT32)
    first = builder.trunc(draw.index, INT32)
    x = numbered(builder, first, count) ^ splat(builder, low, count)
    x = (x ^ (x >> 16)) * FIRST_FACTOR + splat(builder, high, count)
    x = (x ^ (x >> 15)) * SECOND_FACTOR
    return x >> CUT_BITS


def _bfloat16(bits: Lanes) -> Lanes:
    even = (bits >> CUT_BITS) & 1
    nearest = (bits + even + 0x7FFF) >> CUT_BITS
    unordered = (bits & _MAGNITUDE).above(_INFINITY)
    return unordered.choose(bits.constant(_NAN >> CUT_BITS), nearest).narrowed(INT16)


def _float16(bits: Lanes) -> Lanes:
    magnitude = bits & _MAGNITUDE
    even = (magnitude >> _HALF_CUT) & 1
    normal = (magnitude - (_REBIAS << 23) + even + 0xFFF) >> _HALF_CUT
    # 0.5 has the exponent at which float32's last bit is that of the least float16
    small = (magnitude.read_as(FLOAT) + 0.5).read_as(INT32) - _BITS_OF_HALF
    value = bits.constant(_LEAST_NORMAL_HALF).above(magnitude).choose(small, normal)
    value = magnitude.above(_BEYOND_HALF - 1).choose(bits.constant(_HALF_INFINITY), value)
    value = magnitude.above(_INFINITY).choose(bits.constant(_HALF_NAN), value)
    return (value | ((bits >> 16) & 0x8000)).narrowed(INT16)
