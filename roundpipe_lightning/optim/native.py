"""Steps of AdamW as loops that numba compiles when they are first wanted.

A step is one pass over the memory: gradient, master and moments are read, the copy is written in
the same loop. Moments of 8 bits go block by block, because the largest number of a block is what
the others are encoded with:

```
codes ── decode ──▶ 256 numbers in the L1 cache ── step ──▶ the same ── encode ──▶ codes
```

The bits are those of torch's fused kernel, which rounds certain products and sums together. Whether
a compiled loop has them is tried on a small parameter.
"""

from __future__ import annotations

import functools
import math
import platform
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeVar, cast

import numba
import numpy as np
import torch
from llvmlite import binding, ir
from numba import types
from numba.core.errors import NumbaError
from numba.extending import intrinsic
from torch import Tensor

from roundpipe_lightning.optim.rounding import (
    BLOCK,
    CUT_BITS,
    FIRST_FACTOR,
    FIRST_MOMENT,
    NOISE_LEVELS,
    SECOND_FACTOR,
    SECOND_MOMENT,
    PowerCode,
    num_blocks,
)
from roundpipe_lightning.optim.state import (
    ROUNDED,
    FlatParameter,
    MomentFormat,
    Piece,
    Settings,
    step_with_torch,
)

_NEEDED = ("avx2", "fma", "f16c")  # of x86: without them LLVM calls functions that may be missing
_WIDTHS = (8, 4, 16)  # numbers that torch's kernel may step at a time; in torch 2.13 it is 8
_TRIED = 2 * BLOCK + 31  # numbers that a new loop is compared on: whole blocks, and what is left
_TRIED_SETTINGS = (
    Settings(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, maximize=False),
    Settings(lr=0.1, beta1=0.4, beta2=0.95, eps=1e-5, weight_decay=0.3, maximize=True),
)
_NARROW = (torch.bfloat16, torch.float16)


class UnusableCodeError(Exception):
    """A loop cannot be compiled, or has other bits than torch's operations."""


class PieceStep:
    """Steps pieces of a parameter, in any thread, without Python's lock."""

    def __init__(
        self, parameter: FlatParameter, form: KernelForm, function: Callable[..., None], width: int
    ) -> None:
        self._function, self._width, self._seed = function, width, parameter.seed
        self._values, self._gradient = _array(parameter.values), _array(parameter.gradient)
        self._copy = _array(torch.empty(0) if parameter.copy is None else parameter.copy)
        self._factors = factors_of(parameter.settings, float(parameter.step))
        self._state = [_array(vector) for vector in parameter.state.values()]
        self._in_blocks = form.moments is MomentFormat.EIGHT_BITS

    def __call__(self, start: int, stop: int) -> None:
        """Step the elements from `start`, a multiple of 1024, to `stop`."""
        if self._in_blocks:
            codes, scales, other_codes, other_scales = self._state
            blocks = slice(start // BLOCK, num_blocks(stop))
            moments = [
                (codes[start:stop], scales[blocks]),
                (other_codes[start:stop], other_scales[blocks]),
            ]
        else:
            moments = [moment[start:stop] for moment in self._state]
        self._function(
            self._values[start:stop],
            self._gradient[start:stop],
            *moments,
            self._copy[start:stop],
            self._factors,
            noise_keys(self._seed, start),
            (np.uint64(0), np.uint64(0), stop - start, self._width),
        )


def prepare(
    parameter: FlatParameter, *, moments: MomentFormat, stochastic_rounding: bool
) -> PieceStep | None:
    """Return the step of a parameter; None: torch's operations have to.

    UnusableCodeError: the loop has not the bits of torch's operations, or cannot be made.
    """
    if not _is_readable(parameter, moments):
        return None
    values, copy = parameter.values, parameter.copy
    form = KernelForm(
        values=values.dtype,
        gradient=parameter.gradient.dtype,
        copy=None if copy is None else copy.dtype,
        moments=moments,
        stochastic=stochastic_rounding and values.dtype is torch.bfloat16,
    )
    try:
        function, width = checked(form)
    except (RuntimeError, NumbaError) as error:  # of this processor or this system's memory
        raise UnusableCodeError(f"numba makes no machine code ({error})") from error
    if width is None:
        raise UnusableCodeError(
            f"torch {torch.__version__} computes AdamW in an order that is not known "
            f"({torch.backends.cpu.get_cpu_capability()}, {form})"
        )
    return PieceStep(parameter, form, function, width)


def reason_not_usable() -> str | None:
    """Return why nothing can be stepped in machine code on this machine; None: it can."""
    if getattr(numba.core.config, "DISABLE_JIT", False):
        return "NUMBA_DISABLE_JIT is set"
    has = binding.get_host_cpu_features()
    missing = [name for name in _NEEDED if not has.get(name)]
    if platform.machine().lower() in ("x86_64", "amd64") and missing:
        return f"this processor, or virtual machine, has no {' and no '.join(missing)}"
    return None


@functools.cache
def checked(form: KernelForm) -> tuple[Callable[..., None], int | None]:
    """Return the function of a form, and the width with which it has the bits of torch, if any."""
    function = _blockwise(form) if form.moments is MomentFormat.EIGHT_BITS else _plain(form)
    with torch.device("cpu"):  # whatever the caller's default is
        same = (width for width in _WIDTHS if _has_bits_of_torch(form, function, width))
        return function, next(same, None)


def _has_bits_of_torch(form: KernelForm, function: Callable[..., None], width: int) -> bool:
    for settings in _TRIED_SETTINGS:
        mine, theirs = (_sample_parameter(form, settings) for _ in range(2))
        for number in (1, 2, 3):
            mine.step.fill_(number)
            theirs.step.fill_(number)
            PieceStep(mine, form, function, width)(0, _TRIED)
            step_with_torch(
                (Piece(parameter=theirs, start=0, stop=_TRIED),),
                moments=form.moments.moments,
                stochastic_rounding=form.stochastic,
            )
        if not all(map(torch.equal, _written(mine), _written(theirs))):
            return False
    return True


def _sample_parameter(form: KernelForm, settings: Settings) -> FlatParameter:
    """Return a small parameter, always the same one."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(2, _TRIED, generator=generator, dtype=torch.float32)
    values = drawn[0].to(form.values)
    return FlatParameter(
        values=values,
        gradient=drawn[1].to(form.gradient),
        state=form.moments.allocate(values),
        step=torch.zeros((), dtype=torch.float32),
        copy=None if form.copy is None else torch.zeros(_TRIED, dtype=form.copy),
        seed=1,
        settings=settings,
    )


def _written(parameter: FlatParameter) -> list[Tensor]:
    copies = [] if parameter.copy is None else [parameter.copy]
    return [parameter.values, *copies, *parameter.state.values()]


def _is_readable(parameter: FlatParameter, moments: MomentFormat) -> bool:
    """Return whether all tensors are what numpy can share, and what compiled code expects."""
    values, state = parameter.values, parameter.state
    whole = [t for t in (values, parameter.gradient, parameter.copy) if t is not None]
    fields = moments.fields(values)
    return (
        all(type(t) is Tensor and t.device.type == "cpu" for t in (*whole, *state.values()))
        and all(t.dtype in READERS and t.numel() == values.numel() for t in whole)
        and all(
            state[name].dtype is field.dtype and state[name].numel() == field.numel()
            for name, field in fields.items()
        )
    )


def _array(tensor: Tensor) -> Any:
    return (tensor.view(torch.uint16) if tensor.dtype in _NARROW else tensor).numpy()


# Instructions that numba has not got.
Code = TypeVar("Code", bound=Callable[..., Any])
_FLOAT, _HALF, _INT16, _INT32 = ir.FloatType(), ir.HalfType(), ir.IntType(16), ir.IntType(32)


def _compiled(function: Code) -> Code:
    """Compile when it is called first; it runs without Python's lock and divides by 0 as IEEE."""
    return cast("Code", numba.njit(nogil=True, error_model="numpy")(function))


def _instruction(given: Any, made: Any, write: Callable[[Any, Any], Any]) -> Any:
    """Make a function of one number for compiled code out of one that writes LLVM code."""

    @intrinsic
    def call(_typing: Any, _number: Any) -> Any:
        return made(given), lambda context, builder, signature, x: write(builder, x[0])

    return call


def _instruction_of_three(kind: Any, write: Callable[..., Any]) -> Any:
    """Return the same for three numbers of one type."""

    @intrinsic
    def call(_typing: Any, _one: Any, _two: Any, _three: Any) -> Any:
        return kind(kind, kind, kind), lambda context, builder, signature, x: write(builder, *x)

    return call


def _write_noise(builder: Any, index: Any, low: Any, high: Any) -> Any:
    """Write the hash of `rounding.noise`; with numba's 64 bits it would be half as fast."""

    def folded(x: Any, places: int) -> Any:
        return builder.xor(x, builder.lshr(x, _INT32(places)))

    x = folded(builder.xor(index, low), 16)
    x = builder.add(builder.mul(x, _INT32(FIRST_FACTOR)), high)
    x = builder.mul(folded(x, 15), _INT32(SECOND_FACTOR))
    return builder.lshr(x, _INT32(CUT_BITS))


_fma = _instruction_of_three(types.float32, lambda builder, a, b, c: builder.fma(a, b, c))
_noise = _instruction_of_three(types.uint32, _write_noise)
_bits_of = _instruction(types.float32, types.uint32, lambda builder, x: builder.bitcast(x, _INT32))
_number_of = _instruction(
    types.uint32, types.float32, lambda builder, x: builder.bitcast(x, _FLOAT)
)
_from_float16 = _instruction(
    types.uint16,
    types.float32,
    lambda builder, x: builder.fpext(builder.bitcast(x, _HALF), _FLOAT),
)
_float16_bits = _instruction(
    types.float32,
    types.uint16,
    lambda builder, x: builder.bitcast(builder.fptrunc(x, _HALF), _INT16),
)

# numba computes with wider numbers where a result is not made narrow again.
_uint32, _uint16, _float32 = np.uint32, np.uint16, np.float32
_CUT, _QUIET, _UP, _ONE, _NONE = map(np.uint32, (CUT_BITS, 1 << 22, 0x7FFF, 1, 0))
_INFINITY = np.float32(math.inf)


@_compiled
def _same(number: Any) -> Any:
    return number


@_compiled
def _from_bfloat16(bits: Any) -> Any:
    return _number_of(_uint32(_uint32(bits) << _CUT))


# What writes takes noise, too, although only the last one uses it.


@_compiled
def _to_float32(number: Any, _noise: Any) -> Any:
    return number


@_compiled
def _to_float16(number: Any, _noise: Any) -> Any:
    return _float16_bits(number)


@_compiled
def _to_bfloat16(number: Any, _noise: Any) -> Any:
    """Round to the nearest, of two as near to the even one."""
    bits = _bits_of(number)
    up = _uint32(((bits >> _CUT) & _ONE) + _UP)
    is_number = number == number
    return _uint16(_uint32(bits + up if is_number else bits | _QUIET) >> _CUT)


@_compiled
def _to_bfloat16_at_random(number: Any, noise: Any) -> Any:
    """Round as `round_stochastically`: infinities and what is no number stay so."""
    up = noise if abs(number) < _INFINITY else _NONE
    is_number = number == number
    quiet = _NONE if is_number else _QUIET
    return _uint16(_uint32(_uint32(_bits_of(number) + up) | quiet) >> _CUT)


READERS = {torch.float32: _same, torch.bfloat16: _from_bfloat16, torch.float16: _from_float16}
_WRITERS = {torch.float32: _to_float32, torch.bfloat16: _to_bfloat16, torch.float16: _to_float16}


def factors_of(settings: Settings, step: float) -> tuple[Any, ...]:
    """Return the factors of a step of AdamW, rounded to float32 where torch's kernel does."""
    pull = np.float32(1 - settings.beta1)
    is_small = bool(pull < 0.5)
    numbers = (
        -1 if settings.maximize else 1,
        float(1 - Fraction(settings.lr) * Fraction(settings.weight_decay)),  # an fma, too
        pull if is_small else pull - np.float32(1),
        settings.beta2,
        1 - settings.beta2,
        math.sqrt(1 - settings.beta2**step),
        settings.eps,
        -settings.lr / (1 - settings.beta1**step),
    )
    return (*map(np.float32, numbers), is_small)


def noise_keys(seed: int, start: int) -> tuple[Any, ...]:
    """Return the keys of the noise from element `start` on, as in `rounding.noise`."""
    keys = [start]
    for number in range(len(ROUNDED)):
        keys += [(seed + number) ^ (start >> 32), (seed + number) >> 32]
    return tuple(np.uint32(key & 0xFFFFFFFF) for key in keys)


@_compiled
def _adamw(number: Any, gradient: Any, moments: Any, factors: Any, whole: Any) -> Any:
    """Return master and moments after a step.

    `whole`: torch computes these numbers in a vector; what is left of a parameter one by one, and
    then it rounds the second moment in another order.
    """
    sign, decay, pull, beta2, share, root, eps, change, pull_is_small = factors
    first, second = moments
    gradient = sign * gradient
    # As torch's `lerp`: from the end that is nearer.
    first = _fma(pull, gradient - first, first if pull_is_small else gradient)
    part = share * gradient
    if whole:
        second = _fma(part, gradient, second * beta2)
    else:
        second = _fma(second, beta2, part * gradient)
    below = math.sqrt(second) / root + eps
    return number * decay + change * first / below, first, second


@dataclass(frozen=True, kw_only=True)
class KernelForm:
    """Types of the arrays that a step reads and writes."""

    values: torch.dtype
    gradient: torch.dtype
    copy: torch.dtype | None
    moments: MomentFormat
    stochastic: bool


def _plain(form: KernelForm) -> Callable[..., None]:
    """Return the function that steps a piece whose moments are arrays of numbers.

    It takes master `p`, gradient `g`, moments `m` and `v`, copy `c` (may be empty), `factors_of`
    the step, `noise_keys`, and a span: the first element, its place in the moments, how many there
    are, and how many torch steps at a time. Places are unsigned: numba looks for negative ones,
    which LLVM then makes no vectors of, and slices count references.
    """
    read, read_gradient = READERS[form.values], READERS[form.gradient]
    read_moment: Any = _same
    write_moment: Any = _to_float32
    if form.moments is MomentFormat.BF16:
        read_moment, write_moment = _from_bfloat16, _to_bfloat16_at_random
    write = _to_bfloat16_at_random if form.stochastic else _WRITERS[form.values]
    write_copy = _to_float32 if form.copy is None else _WRITERS[form.copy]

    @_compiled
    def loop(p: Any, g: Any, m: Any, v: Any, c: Any, factors: Any, keys: Any, span: Any) -> None:
        first, low, high, m_low, m_high, v_low, v_high = keys
        start, shift, count, whole = span
        first = _uint32(first + _uint32(start))
        for i in range(count):
            at, here = start + np.uint64(i), shift + np.uint64(i)
            number, gradient = read(p[at]), read_gradient(g[at])
            before = read_moment(m[here]), read_moment(v[here])
            number, mean, square = _adamw(number, gradient, before, factors, whole)
            index = _uint32(first + _uint32(i))
            m[here] = write_moment(mean, _noise(index, m_low, m_high))
            v[here] = write_moment(square, _noise(index, v_low, v_high))
            kept = write(number, _noise(index, low, high))
            p[at] = kept
            if len(c):
                c[at] = write_copy(read(kept), _NONE)

    @_compiled
    def step(p: Any, g: Any, m: Any, v: Any, c: Any, factors: Any, keys: Any, span: Any) -> None:
        start, shift, count, width = span
        end = count // width * width
        rest = np.uint64(end)
        loop(p, g, m, v, c, factors, keys, (start, shift, end, True))
        loop(p, g, m, v, c, factors, keys, (start + rest, shift + rest, count - end, False))

    return step


def _blockwise(form: KernelForm) -> Callable[..., None]:
    """Return the same for moments that are (codes, scales)."""
    plain = _plain(form)
    decode_first, decode_second = _decoder(FIRST_MOMENT), _decoder(SECOND_MOMENT)
    encode_first, encode_second = _encoder(FIRST_MOMENT), _encoder(SECOND_MOMENT)

    @_compiled
    def step(p: Any, g: Any, m: Any, v: Any, c: Any, factors: Any, keys: Any, span: Any) -> None:
        (means, mean_scales), (squares, square_scales) = m, v
        _, _, total, width = span
        one, two = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
        for block in range(-(-total // BLOCK)):
            count = min(BLOCK, total - block * BLOCK)
            start = np.uint64(block * BLOCK)
            decode_first(means, start, mean_scales[block], one, count)
            decode_second(squares, start, square_scales[block], two, count)
            plain(p, g, one, two, c, factors, keys, (start, np.uint64(0), count, width))
            first = _uint32(keys[0] + _uint32(start))
            m_keys, v_keys = (first, keys[3], keys[4]), (first, keys[5], keys[6])
            mean_scales[block] = encode_first(one, count, means, start, m_keys)
            square_scales[block] = encode_second(two, count, squares, start, v_keys)

    return step


@_compiled
def _squared(x: Any) -> Any:
    return x * x


@_compiled
def _fourth_power(x: Any) -> Any:
    return x * x * (x * x)


@_compiled
def _fourth_root(x: Any) -> Any:
    return math.sqrt(math.sqrt(x))


@functools.cache
def _decoder(code: PowerCode) -> Callable[..., None]:
    """Return the function that decodes a block, with the bits of `PowerCode.decode`."""
    signed, largest = code.signed, np.float32(code.largest)
    power = _fourth_power if code.squarings == 2 else _squared
    inverse = np.float32(1) / largest

    @_compiled
    def decode(codes: Any, start: Any, scale: Any, numbers: Any, count: Any) -> None:
        for i in range(count):
            code = _float32(codes[start + np.uint64(i)])
            part = code * inverse
            part = _fma(_fma(-part, largest, code), inverse, part)  # code / largest, to the bit
            numbers[i] = (part * abs(part) if signed else power(part)) * scale

    return decode


@functools.cache
def _encoder(code: PowerCode) -> Callable[..., Any]:
    """Return the function that encodes a block, and returns its scale, as `PowerCode.encode`."""
    signed, largest, stored = code.signed, np.float32(code.largest), _STORED[code.dtype]
    power = _fourth_power if code.squarings == 2 else _squared
    root = _fourth_root if code.squarings == 2 else math.sqrt
    step, level = np.float32(1 / code.largest), np.float32(1 / NOISE_LEVELS)
    nothing, one, magnitude = np.float32(0), np.float32(1), np.uint32(0x7FFFFFFF)

    @_compiled
    def encode(numbers: Any, count: Any, codes: Any, start: Any, keys: Any) -> Any:
        first, low, high = keys
        most = _uint32(0)  # as bits: in the same order, and beyond them what is not a number
        for i in range(count):
            most = max(most, _uint32(_bits_of(numbers[i]) & magnitude))
        scale = _number_of(most)
        unit = one if scale == nothing else scale
        for i in range(count):
            x = (abs(numbers[i]) if signed else numbers[i]) / unit
            below = np.floor(root(x) * largest)
            near = power(below * step)
            share = (x - near) / (power((below + one) * step) - near)
            if share < nothing:  # by a rounding error
                share = nothing
            drawn = _float32(np.int32(_noise(_uint32(first + _uint32(i)), low, high)))
            chosen = below + np.floor(share + drawn * level)
            if chosen > largest:
                chosen = largest
            if signed:
                chosen = math.copysign(chosen, numbers[i])
            elif chosen < one and x != nothing:  # what is not 0 must not become 0
                chosen = one
            is_number = chosen == chosen
            codes[start + np.uint64(i)] = stored(np.int32(chosen if is_number else nothing))
        return scale

    return encode


_STORED: dict[torch.dtype, Any] = {torch.int8: np.int8, torch.uint8: np.uint8}
