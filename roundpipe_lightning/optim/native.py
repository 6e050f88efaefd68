"""Steps of parameters in machine code, compiled by numba when they are first wanted.

Whether a compiled loop has the bits of torch's operations is tried on a small parameter.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import binding
from numba.core.errors import NumbaError
from torch import Tensor

from roundpipe_lightning.optim.blockwise import BLOCK, num_blocks
from roundpipe_lightning.optim.compiled_loops import (
    READERS,
    KernelForm,
    compiled_step,
    factors_of,
    noise_keys,
)
from roundpipe_lightning.optim.pieces import FlatParameter, Piece, Settings
from roundpipe_lightning.optim.state import MomentFormat, step_with_torch

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

    Raises:
        UnusableCodeError: The loop has not the bits of torch's operations, or cannot be made.
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
    function = compiled_step(form)
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
