"""Codes of 8 bits (`engine/optim/blockwise.py`) as machine code, with the same bits."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from roundpipe_lightning.engine.optim.blockwise import BLOCK, NOISE_LEVELS, PowerCode
from roundpipe_lightning.engine.optim.lanes import (
    FLOAT,
    INT8,
    INT32,
    INT64,
    Lanes,
    load,
    repeat,
    splat,
    store,
)
from roundpipe_lightning.engine.optim.stored import Draw, noise


def decode(code: PowerCode, address: Any, scale: Any, builder: Any, count: int) -> Lanes:
    """Return the numbers of codes.

    Args:
        code: What they stand for.
        address: int64, of the first code.
        scale: float32, of their block.
        builder: Appends instructions.
        count: How many.
    """
    codes = load(builder, address, INT8, count)
    wide = codes.signed(INT32) if code.signed else codes.widened(INT32)
    part = wide.to_float() / float(code.largest)
    return _power(code, part, signed=code.signed) * splat(builder, scale, count)


def encode(code: PowerCode, numbers: Lanes, scale: Any, draw: Draw, address: Any) -> None:
    """Write codes of numbers, rounded at random.

    Args:
        code: What they stand for.
        numbers: float32.
        scale: float32, the largest magnitude of their block.
        draw: Where the noise comes from.
        address: int64, of the first code.
    """
    builder, count = numbers.builder, numbers.count
    lanes = splat(builder, scale, count)
    magnitude = (numbers.abs() if code.signed else numbers) / lanes.equals(0.0).choose(
        lanes.constant(1.0), lanes
    )
    rounded = _randomly(code, magnitude, draw).at_most(float(code.largest))
    if code.signed:
        rounded = rounded.with_sign_of(numbers)
    else:  # what is not 0 must not become 0
        least = magnitude.equals(0.0).choose(lanes.constant(0.0), lanes.constant(1.0))
        rounded = rounded.at_least(least)
    store(rounded.to_int().narrowed(INT8), address)


def largest_magnitude(builder: Any, address: Any, count: int) -> Any:
    """Return the largest magnitude of a whole block of float32 at an address.

    Args:
        builder: Appends instructions.
        address: int64.
        count: Numbers at a time.
    """
    bits = _magnitude_bits(builder, address, count)
    for start in range(count, BLOCK, count):
        there = builder.add(address, INT64(4 * start))
        bits = bits.larger_bits(_magnitude_bits(builder, there, count))
    return builder.bitcast(bits.largest_bits(), FLOAT)


def clear(builder: Any, address: Any, count: int) -> None:
    """Write zeros to a block of float32."""
    zeros = splat(builder, ir.Constant(FLOAT, 0.0), count)
    repeat(
        builder,
        INT64(0),
        INT64(4 * BLOCK),
        4 * count,
        lambda start: store(zeros, builder.add(address, start)),
    )


def _magnitude_bits(builder: Any, address: Any, count: int) -> Lanes:
    """Return magnitudes as their bits: in the same order, and beyond them what is not a number."""
    return load(builder, address, INT32, count) & 0x7FFFFFFF


def _randomly(code: PowerCode, x: Lanes, draw: Draw) -> Lanes:
    root = x.sqrt()
    for _ in range(code.squarings - 1):
        root = root.sqrt()
    below = (root * float(code.largest)).floor()
    step = 1 / code.largest
    low = _power(code, below * step, signed=False)
    gap = _power(code, (below + 1.0) * step, signed=False) - low
    share = ((x - low) / gap).at_least(0.0)
    drawn = noise(x.builder, draw, x.count).to_float()
    return below + (share + drawn * (1 / NOISE_LEVELS)).floor()


def _power(code: PowerCode, x: Lanes, *, signed: bool) -> Lanes:
    if signed:
        return x * x.abs()
    for _ in range(code.squarings):
        x = x * x
    return x
