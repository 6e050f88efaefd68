"""One pass over a piece of a parameter, as a function in machine code.

```
elements   |----|----|----| ... |----|    |--|                  |-|-|-|
           16 at a time                   torch's width         one by one, as torch does
```

How many numbers are computed at a time changes no bit, except in torch's last loop.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import sqrt
from typing import Any

import torch
from llvmlite import ir

from roundpipe_lightning.optim.blockwise import (
    BLOCK,
    FIRST_MOMENT,
    NOISE_LEVELS,
    SECOND_MOMENT,
    PowerCode,
)
from roundpipe_lightning.optim.lanes import (
    FLOAT,
    INT8,
    INT32,
    INT64,
    Draw,
    Lanes,
    converted,
    joined,
    load,
    noise,
    read,
    repeat,
    rounded_at_random,
    scalar,
    splat,
    store,
    wide,
)
from roundpipe_lightning.optim.moments import MomentFormat
from roundpipe_lightning.optim.pieces import Settings


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


NAME = "step"
"""The function of the module, `void step(int64 jobs, int64 num_jobs)`: address and number."""

_WIDE = 16  # numbers at a time: a register of AVX-512; two or four of smaller processors
_LINE = 64  # bytes of a cache line
_NARROW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class Form:
    """What a step reads and writes.

    Attributes:
        values: Dtype of the master.
        gradient: Dtype of the gradient.
        copy: Dtype of the copy; None: there is none.
        moments: How the moments are kept.
        stochastic: Whether a master of bfloat16 is rounded at random.
        arithmetic: How torch computes on this processor.
    """

    values: torch.dtype
    gradient: torch.dtype
    copy: torch.dtype | None
    moments: MomentFormat
    stochastic: bool
    arithmetic: Arithmetic


_JOB = (
    "values",
    "gradient",
    "first",
    "first_scales",
    "second",
    "second_scales",
    "copy",
    "factors",
    "count",
    "start",
    "values_seed",
    "first_seed",
    "second_seed",
)


class Job(ctypes.Structure):
    """A piece of a parameter. Everything but numbers are addresses; 0 for what there is not.

    Attributes:
        values: The piece of the master.
        gradient: Of the gradient.
        first: Of the first moment, or of its codes.
        first_scales: Of their scales.
        second: Of the second moment, or of its codes.
        second_scales: Of their scales.
        copy: Of the copy.
        factors: The `Factors`.
        count: Number of elements.
        start: Number of the first one in its parameter.
        values_seed: Number that the master's rounding depends on.
        first_seed: The first moment's.
        second_seed: The second moment's.
    """

    _fields_ = [(name, ctypes.c_uint64) for name in _JOB]


def written(form: Form) -> str:
    """Return a module in LLVM's assembly, whose function steps pieces of a form."""
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [INT64, INT64]), NAME)
    builder = ir.IRBuilder(function.append_basic_block())
    jobs, num_jobs = function.args
    in_blocks = form.moments is MomentFormat.EIGHT_BITS
    block = ir.ArrayType(FLOAT, BLOCK)
    scratch = [builder.ptrtoint(builder.alloca(block), INT64) for _ in range(2 * in_blocks)]

    def one(number: Any) -> None:
        job = builder.add(jobs, builder.mul(number, INT64(ctypes.sizeof(Job))))
        kind = _BlockPiece if in_blocks else _PlainPiece
        kind(builder, form, job, scratch).write()

    repeat(builder, INT64(0), num_jobs, 1, one)
    builder.fence("seq_cst")  # what went past the cache is there before anybody is told so
    builder.ret_void()
    return str(module)


@dataclass(frozen=True, kw_only=True)
class _Some:
    """Elements that are computed side by side.

    Attributes:
        index: int64, the first one.
        count: How many.
        at_a_time: Whether torch steps them at a time, or one by one.
    """

    index: Any
    count: int
    at_a_time: bool


def _on_some(
    body: Callable[[_Some], None], *, count: int, at_a_time: bool
) -> Callable[[Any], None]:
    """Return what writes a body for `count` elements from an index on."""
    return lambda index: body(_Some(index=index, count=count, at_a_time=at_a_time))


@dataclass(frozen=True, kw_only=True)
class _Stepped:
    """What is to be saved of a step.

    Attributes:
        first: The first moment.
        second: The second moment.
        copy: Of the master, in its dtype; None: there is none.
    """

    first: Lanes
    second: Lanes
    copy: Lanes | None


class _Piece:
    """Writes the code that steps one piece.

    Args:
        builder: Appends instructions.
        form: What is read and written.
        job: int64, address of the `Job`.
        scratch: int64, addresses of memory for a block of each moment.
    """

    def __init__(self, builder: Any, form: Form, job: Any, scratch: Sequence[Any]) -> None:
        self._builder, self._form, self._scratch = builder, form, scratch
        self._job = {
            name: scalar(builder, builder.add(job, INT64(getattr(Job, name).offset)), INT64)
            for name in _JOB
        }
        self._formula = AdamWCode(builder, self._job["factors"], form.arithmetic)

    def _loops(self, first: Any, stop: Any, body: Callable[[_Some], None]) -> None:
        """Write the loops over the elements from `first` to `stop`, both int64."""
        width = self._form.arithmetic.width
        for count, at_a_time in dict.fromkeys([(_WIDE, True), (width, True), (1, False)]):
            inside = _on_some(body, count=count, at_a_time=at_a_time)
            first = repeat(self._builder, first, stop, count, inside)

    def _at(self, name: str, index: Any, dtype: torch.dtype) -> Any:
        """Return the address of an element."""
        size = INT64(dtype.itemsize)
        return self._builder.add(self._job[name], self._builder.mul(index, size))

    def _read(self, name: str, some: _Some, dtype: torch.dtype) -> Lanes:
        return read(self._builder, self._at(name, some.index, dtype), dtype, some.count)

    def _draw(self, name: str, some: _Some) -> Draw:
        number = self._builder.add(self._job["start"], some.index)
        return Draw(seed=self._job[f"{name}_seed"], index=number)

    def _save(
        self, name: str, lanes: Lanes, some: _Some, dtype: torch.dtype, *, at_random: bool
    ) -> Lanes:
        """Write float32 in a dtype, and return what it has become."""
        if at_random:
            stored = rounded_at_random(lanes, self._draw(name, some))
        else:
            stored = converted(lanes, dtype)
        store(stored, self._at(name, some.index, dtype))
        return wide(stored, dtype)

    def _step(self, first: Lanes, second: Lanes, some: _Some) -> _Stepped:
        """Write a step, whose master is saved."""
        form = self._form
        now = Numbers(values=self._read("values", some, form.values), first=first, second=second)
        gradient = self._read("gradient", some, form.gradient)
        new = self._formula.step(now, gradient, at_a_time=some.at_a_time)
        saved = self._save("values", new.values, some, form.values, at_random=form.stochastic)
        copy = None if form.copy is None else converted(saved, form.copy)
        return _Stepped(first=new.first, second=new.second, copy=copy)

    def _save_copy(self, copy: Lanes | None, some: _Some) -> None:
        if copy is not None:
            assert self._form.copy is not None, "there is a copy"
            store(copy, self._at("copy", some.index, self._form.copy))


class _PlainPiece(_Piece):
    """A piece whose moments are tensors of numbers."""

    def write(self) -> None:
        """Write all loops."""
        first = INT64(0)
        if self._form.copy in _NARROW:
            first = self._write_past_cache()
        self._loops(
            first, self._job["count"], lambda some: self._save_copy(self._step_some(some), some)
        )

    def _write_past_cache(self) -> Any:
        """Write a loop that writes whole lines of the copy, if the copy begins with one.

        Nobody reads the copy before the next step but the device, so it need not pass through the
        cache, which would read every line from memory before it is overwritten.
        """
        builder, copy = self._builder, self._form.copy
        assert copy is not None, "asked only for a copy"
        odd = builder.and_(self._job["copy"], INT64(_LINE - 1))
        aligned = builder.icmp_unsigned("==", odd, INT64(0))

        def line(index: Any) -> None:
            halves = [
                self._step_some(_Some(index=start, count=_WIDE, at_a_time=True))
                for start in (index, builder.add(index, INT64(_WIDE)))
            ]
            low, high = (half for half in halves if half is not None)
            store(joined(low, high), self._at("copy", index, copy), past_cache=True)

        stop = builder.select(aligned, self._job["count"], INT64(0))
        return repeat(builder, INT64(0), stop, 2 * _WIDE, line)

    def _step_some(self, some: _Some) -> Lanes | None:
        """Write a step of some elements, and return their copy."""
        small = self._form.moments is MomentFormat.BF16
        dtype = torch.bfloat16 if small else torch.float32
        now = [self._read(name, some, dtype) for name in ("first", "second")]
        new = self._step(now[0], now[1], some)
        self._save("first", new.first, some, dtype, at_random=small)
        self._save("second", new.second, some, dtype, at_random=small)
        return new.copy


@dataclass(frozen=True, kw_only=True)
class _Block:
    """One moment of a block, in codes.

    Attributes:
        name: `"first"` or `"second"`.
        code: What the codes stand for.
        scale_address: int64, of its scale.
        scale: float32, before the step.
        scratch: int64, address of memory for the block's numbers.
    """

    name: str
    code: PowerCode
    scale_address: Any
    scale: Any
    scratch: Any


class _BlockPiece(_Piece):
    """A piece whose moments are codes of 8 bits, block by block.

    The moments of a block are stepped into scratch memory, because the largest of them is what the
    others are encoded with.
    """

    def write(self) -> None:
        """Write the loop over the blocks."""
        builder, count = self._builder, self._job["count"]
        last = builder.add(count, INT64(BLOCK - 1))

        def block(first: Any) -> None:
            end = builder.add(first, INT64(BLOCK))
            fits = builder.icmp_signed("<=", end, count)
            self._write_block(first, builder.select(fits, end, count))

        repeat(builder, INT64(0), last, BLOCK, block)

    def _write_block(self, first: Any, stop: Any) -> None:
        one, two = (
            self._block(name, code, first, scratch)
            for name, code, scratch in zip(
                ("first", "second"), (FIRST_MOMENT, SECOND_MOMENT), self._scratch, strict=True
            )
        )

        def step(some: _Some) -> None:
            new = self._step(self._decoded(one, some), self._decoded(two, some), some)
            for lanes, block in ((new.first, one), (new.second, two)):
                store(lanes, self._scratch_at(block, some, first))
            self._save_copy(new.copy, some)

        self._loops(first, stop, step)
        for block in (one, two):
            self._encode(block, first, stop)

    def _block(self, name: str, code: PowerCode, first: Any, scratch: Any) -> _Block:
        number = self._builder.udiv(first, INT64(BLOCK))
        address = self._at(f"{name}_scales", number, torch.float32)
        clear(self._builder, scratch, _WIDE)
        return _Block(
            name=name,
            code=code,
            scale_address=address,
            scale=scalar(self._builder, address, FLOAT),
            scratch=scratch,
        )

    def _decoded(self, block: _Block, some: _Some) -> Lanes:
        address = self._at(block.name, some.index, block.code.dtype)
        return decode(block.code, address, block.scale, self._builder, some.count)

    def _encode(self, block: _Block, first: Any, stop: Any) -> None:
        builder = self._builder
        scale = largest_magnitude(builder, block.scratch, _WIDE)
        builder.store(scale, builder.inttoptr(block.scale_address, ir.PointerType()), align=4)

        def encode_some(some: _Some) -> None:
            address = self._scratch_at(block, some, first)
            numbers = read(builder, address, torch.float32, some.count)
            place = self._at(block.name, some.index, block.code.dtype)
            encode(block.code, numbers, scale, self._draw(block.name, some), place)

        self._loops(first, stop, encode_some)

    def _scratch_at(self, block: _Block, some: _Some, first: Any) -> Any:
        builder = self._builder
        return builder.add(block.scratch, builder.mul(builder.sub(some.index, first), INT64(4)))


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
