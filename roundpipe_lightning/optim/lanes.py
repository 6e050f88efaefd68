"""Arithmetic on the numbers of a vector register, written down as LLVM's instructions.

A `Lanes` stands for so many numbers side by side. Its operators do not compute: they append an
instruction to the function being written, so a formula in Python becomes the same formula in
machine code. Nothing is reordered or contracted: `a * b + c` rounds twice, `fma(a, b, c)` once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from llvmlite import ir

from roundpipe_lightning.optim.rounding import CUT_BITS, FIRST_FACTOR, SECOND_FACTOR

BIT, INT8, INT16, INT32, INT64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
FLOAT = ir.FloatType()
_NAMES = {BIT: "i1", INT8: "i8", INT16: "i16", INT32: "i32", FLOAT: "f32"}


@dataclass(frozen=True, eq=False)
class Lanes:
    """Numbers of one type, side by side.

    Attributes:
        builder: Appends instructions.
        value: What an instruction returned; a vector.
    """

    builder: Any
    value: Any

    @property
    def count(self) -> int:
        """How many."""
        return int(self.value.type.count)

    def constant(self, number: float) -> Lanes:
        """Return a number of this type in every lane."""
        return Lanes(self.builder, ir.Constant(self.value.type, [number] * self.count))

    # ------------------------------------------------------------------------------- arithmetic

    def __add__(self, other: Lanes | float) -> Lanes:
        return self._pair("add", other)

    def __sub__(self, other: Lanes | float) -> Lanes:
        return self._pair("sub", other)

    def __mul__(self, other: Lanes | float) -> Lanes:
        return self._pair("mul", other)

    def __truediv__(self, other: Lanes | float) -> Lanes:
        return self._pair("div", other)

    def _pair(self, what: str, other: Lanes | float) -> Lanes:
        kind = f"f{what}" if self.value.type.element == FLOAT else what
        return self._new(getattr(self.builder, kind)(self.value, self._like(other).value))

    def fma(self, factor: Lanes, addend: Lanes) -> Lanes:
        """Return `self * factor + addend`, rounded once."""
        return self._call("fma", factor, addend)

    def sqrt(self) -> Lanes:
        """Return the root."""
        return self._call("sqrt")

    def abs(self) -> Lanes:
        """Return the magnitude."""
        return self._call("fabs")

    def floor(self) -> Lanes:
        """Return the whole number below."""
        return self._call("floor")

    def with_sign_of(self, other: Lanes) -> Lanes:
        """Return the magnitude with another's sign."""
        return self._call("copysign", other)

    def at_least(self, least: Lanes | float) -> Lanes:
        """Return the larger of both; what is not a number stays so."""
        other = self._like(least)
        return self._compared("<", other).choose(other, self)

    def at_most(self, most: Lanes | float) -> Lanes:
        """Return the smaller of both; what is not a number stays so."""
        other = self._like(most)
        return self._compared(">", other).choose(other, self)

    def larger_bits(self, other: Lanes) -> Lanes:
        """Return the larger of unsigned numbers."""
        return self._call("umax", other)

    def largest_bits(self) -> Any:
        """Return the largest of all unsigned numbers, as one int32."""
        name = f"llvm.vector.reduce.umax.v{self.count}i32"
        return self.builder.call(self._function(name, INT32, 1), [self.value])

    # -------------------------------------------------------------------------------------- bits

    def __and__(self, other: Lanes | int) -> Lanes:
        return self._bits("and_", other)

    def __or__(self, other: Lanes | int) -> Lanes:
        return self._bits("or_", other)

    def __xor__(self, other: Lanes | int) -> Lanes:
        return self._bits("xor", other)

    def __lshift__(self, places: int) -> Lanes:
        return self._bits("shl", places)

    def __rshift__(self, places: int) -> Lanes:
        """Shift to the right, with zeros from the left."""
        return self._bits("lshr", places)

    def _bits(self, what: str, other: Lanes | int) -> Lanes:
        return self._new(getattr(self.builder, what)(self.value, self._like(other).value))

    # ----------------------------------------------------------------------------- type and choice

    def read_as(self, element: Any) -> Lanes:
        """Return the same bits as another type of the same size."""
        return self._new(self.builder.bitcast(self.value, ir.VectorType(element, self.count)))

    def widened(self, element: Any) -> Lanes:
        """Return unsigned numbers as numbers of more bits."""
        return self._new(self.builder.zext(self.value, ir.VectorType(element, self.count)))

    def signed(self, element: Any) -> Lanes:
        """Return signed numbers as numbers of more bits."""
        return self._new(self.builder.sext(self.value, ir.VectorType(element, self.count)))

    def narrowed(self, element: Any) -> Lanes:
        """Return the lowest bits."""
        return self._new(self.builder.trunc(self.value, ir.VectorType(element, self.count)))

    def to_float(self) -> Lanes:
        """Return signed numbers as float32."""
        return self._new(self.builder.sitofp(self.value, ir.VectorType(FLOAT, self.count)))

    def to_int(self) -> Lanes:
        """Return float32 within the range of int32 as that, towards zero; 0 for no number."""
        number = self.equals(self).choose(self, self.constant(0.0))
        return self._new(self.builder.fptosi(number.value, ir.VectorType(INT32, self.count)))

    def equals(self, other: Lanes | float) -> Lanes:
        """Say of each number whether it is the other's."""
        return self._compared("==", other)

    def differs(self, other: Lanes | float) -> Lanes:
        """Say of each number whether it is another one."""
        return self._compared("!=", other)

    def _compared(self, how: str, other: Lanes | float) -> Lanes:
        right = self._like(other).value
        if self.value.type.element == FLOAT:
            return self._new(self.builder.fcmp_ordered(how, self.value, right))
        return self._new(self.builder.icmp_unsigned(how, self.value, right))

    def above(self, other: Lanes | int) -> Lanes:
        """Say of each unsigned number whether it is larger."""
        return self._new(self.builder.icmp_unsigned(">", self.value, self._like(other).value))

    def choose(self, yes: Lanes, no: Lanes) -> Lanes:
        """Return, lane by lane, the one where this is true and the other where it is not."""
        return self._new(self.builder.select(self.value, yes.value, no.value))

    # ------------------------------------------------------------------------------------- helpers

    def _new(self, value: Any) -> Lanes:
        return Lanes(self.builder, value)

    def _like(self, other: Lanes | float) -> Lanes:
        return other if isinstance(other, Lanes) else self.constant(other)

    def _call(self, name: str, *others: Lanes) -> Lanes:
        full = f"llvm.{name}.v{self.count}{_NAMES[self.value.type.element]}"
        function = self._function(full, self.value.type, 1 + len(others))
        return self._new(self.builder.call(function, [self.value, *(o.value for o in others)]))

    def _function(self, name: str, returned: Any, num_arguments: int) -> Any:
        """Return a function of LLVM's own, declared once per module."""
        known = self.builder.module.globals.get(name)
        if known is not None:
            return known
        arguments = [self.value.type] * num_arguments
        return ir.Function(self.builder.module, ir.FunctionType(returned, arguments), name)


def splat(builder: Any, number: Any, count: int) -> Lanes:
    """Return one number in every lane."""
    vector = ir.VectorType(number.type, count)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), number, INT32(0))
    zeros = ir.Constant(ir.VectorType(INT32, count), [0] * count)
    return Lanes(builder, builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), zeros))


def numbered(builder: Any, first: Any, count: int) -> Lanes:
    """Return int32 `first`, `first + 1` and so on."""
    steps = ir.Constant(ir.VectorType(INT32, count), list(range(count)))
    return splat(builder, first, count) + Lanes(builder, steps)


def load(builder: Any, address: Any, element: Any, count: int) -> Lanes:
    """Return the numbers at an address, which need only be aligned for one of them."""
    vector = ir.VectorType(element, count)
    place = builder.inttoptr(address, ir.PointerType())
    return Lanes(builder, builder.load(place, align=_bytes(element), typ=vector))


def store(lanes: Lanes, address: Any, *, past_cache: bool = False) -> None:
    """Write numbers to an address.

    Args:
        lanes: What is written.
        address: Aligned for one number; for all of them together with `past_cache`.
        past_cache: Whether to write to memory only, which reads no line before it is overwritten.
    """
    builder, kind = lanes.builder, lanes.value.type
    size = _bytes(kind.element)
    place = builder.inttoptr(address, ir.PointerType())
    written = builder.store(lanes.value, place, align=size * kind.count if past_cache else size)
    if past_cache:
        written.set_metadata("nontemporal", builder.module.add_metadata([INT32(1)]))


def joined(first: Lanes, second: Lanes) -> Lanes:
    """Return the numbers of both, one behind the other."""
    order = ir.Constant(ir.VectorType(INT32, 2 * first.count), list(range(2 * first.count)))
    return Lanes(first.builder, first.builder.shuffle_vector(first.value, second.value, order))


def scalar(builder: Any, address: Any, kind: Any) -> Any:
    """Return one number at an address, outside of lanes."""
    return builder.load(builder.inttoptr(address, ir.PointerType()), align=_bytes(kind), typ=kind)


def repeat(builder: Any, first: Any, stop: Any, step: int, body: Callable[[Any], None]) -> Any:
    """Write a loop over `first`, `first + step` and so on, as long as `step` fits before `stop`.

    Args:
        builder: Appends instructions.
        first: int64.
        stop: int64.
        step: Between two numbers.
        body: Writes what is done with a number.

    Returns:
        The number at which the loop has ended.
    """
    before = builder.block
    head, inside, after = (builder.append_basic_block() for _ in range(3))
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(INT64)
    index.add_incoming(first, before)
    following = builder.add(index, INT64(step))
    builder.cbranch(builder.icmp_signed("<=", following, stop), inside, after)
    builder.position_at_end(inside)
    body(index)
    index.add_incoming(following, builder.block)
    builder.branch(head)
    builder.position_at_end(after)
    return index


def _bytes(element: Any) -> int:
    return 4 if element == FLOAT else int(element.width) // 8


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
