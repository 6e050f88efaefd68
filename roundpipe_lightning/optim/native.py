"""Steps of AdamW in machine code, made for this processor when they are first wanted.

The code is written by `piece_code.py` and compiled by LLVM, which comes with llvmlite, in some
hundredths of a second; no compiler has to be installed. It is used only if it gives, on a parameter
made for the purpose, the bits that torch's operations give here: a torch that computes in another
order is noticed, and its own operations are used.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import llvmlite.binding as llvm
import torch
from torch import Tensor

from roundpipe_lightning.optim.blockwise import BLOCK, num_blocks
from roundpipe_lightning.optim.moments import Field, MomentFormat, moments_in
from roundpipe_lightning.optim.piece_code import (
    NAME,
    Arithmetic,
    Factors,
    Form,
    Job,
    factors,
    written,
)
from roundpipe_lightning.optim.pieces import ROUNDED, Piece, Settings, Stepped
from roundpipe_lightning.optim.scratch import Scratch
from roundpipe_lightning.optim.torch_step import NUM_SCRATCH, TorchStep

log = logging.getLogger(__name__)

_READ = (torch.float32, torch.bfloat16, torch.float16)
_TRIED = 2 * BLOCK + 31  # numbers that a new function is compared on: all of its loops run
_TRIED_SETTINGS = (
    Settings(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, maximize=False),
    Settings(lr=0.1, beta1=0.4, beta2=0.95, eps=1e-5, weight_decay=0.3, maximize=True),
)
_NEEDED: dict[str, tuple[str, ...]] = {
    "x86_64": ("avx2", "fma"),
    "amd64": ("avx2", "fma"),
    "aarch64": (),
    "arm64": (),
}  # instructions without which LLVM would call functions that the process need not have
_KNOWN = (
    Arithmetic(width=8, contracts=True),  # torch 2.13 with AVX2 or AVX-512
    Arithmetic(width=8, contracts=False),  # the same without
    Arithmetic(width=4, contracts=True),
    Arithmetic(width=16, contracts=True),
)


class Function:
    """A compiled step. Stays in memory as long as the object.

    Args:
        form: What it reads and writes.
    """

    def __init__(self, form: Form) -> None:
        self.form = form
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        machine = llvm.Target.from_default_triple().create_target_machine(
            cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3
        )
        module = llvm.parse_assembly(written(form))
        module.verify()
        passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options())
        passes.getModulePassManager().run(module, passes)
        self._engine = llvm.create_mcjit_compiler(module, machine)
        self._engine.finalize_object()
        kind = ctypes.CFUNCTYPE(None, ctypes.c_uint64, ctypes.c_uint64)
        self._call = kind(self._engine.get_function_address(NAME))

    def run(self, jobs: ctypes.Array[Job]) -> None:
        """Step pieces, without Python's lock."""
        self._call(ctypes.addressof(jobs), len(jobs))


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A parameter that is stepped by machine code.

    Attributes:
        function: Steps its pieces.
        of: The parameter.
        factors: What the step depends on.
    """

    function: Function
    of: Stepped
    factors: Factors

    def job(self, start: int, stop: int) -> Job:
        """Return what the function is told of the elements from `start` to `stop`."""
        of, state = self.of, self.of.state
        fields: dict[str, Any] = {
            "values": _address(of.values, start),
            "gradient": _address(of.gradient, start),
            "copy": 0 if of.copy is None else _address(of.copy, start),
            "factors": ctypes.addressof(self.factors),
            "count": stop - start,
            "start": start,
        }
        for number, what in enumerate(ROUNDED):
            fields[f"{what}_seed"] = (of.seed + number) % (1 << 64)
        for what, name in (("first", "exp_avg"), ("second", "exp_avg_sq")):
            if self.function.form.moments is MomentFormat.EIGHT_BITS:
                fields[what] = _address(state[f"{name}_codes"], start)
                fields[f"{what}_scales"] = _address(state[f"{name}_scales"], start // BLOCK)
            else:
                fields[what] = _address(state[name], start)
        return Job(**fields)


def prepare(entry: Stepped, *, moments: MomentFormat, stochastic_rounding: bool) -> Prepared | None:
    """Return how machine code steps a parameter; None: torch's operations have to."""
    known = arithmetic_of_torch()
    if known is None or not _readable(entry, moments):
        return None
    function = _function(
        Form(
            values=entry.values.dtype,
            gradient=entry.gradient.dtype,
            copy=None if entry.copy is None else entry.copy.dtype,
            moments=moments,
            stochastic=stochastic_rounding and entry.values.dtype is torch.bfloat16,
            arithmetic=known,
        )
    )
    return None if function is None else prepared(function, entry)


@functools.cache
def _function(form: Form) -> Function | None:
    """Return the function of a form, or say once in the log that torch's operations are used."""
    function = checked(form)
    if function is None:
        log.warning(
            "Machine code for a step with %s has other bits than torch %s, whose operations are "
            "used instead, which takes longer.",
            form,
            torch.__version__,
        )
    return function


def _readable(entry: Stepped, moments: MomentFormat) -> bool:
    """Say whether all tensors are what machine code takes them for: it knows addresses only."""
    whole = [t for t in (entry.values, entry.gradient, entry.copy) if t is not None]
    count = entry.values.numel()
    sizes = (count, num_blocks(count))
    state = _state_of(moments)
    return (
        all(type(t) is Tensor and t.device.type == "cpu" for t in (*whole, *entry.state.values()))
        and all(t.dtype in _READ and t.numel() == count for t in whole)
        and all(
            t.dtype is state[name].dtype and t.numel() == sizes[state[name].numel is not None]
            for name, t in entry.state.items()
        )
    )


@functools.cache
def _state_of(moments: MomentFormat) -> Mapping[str, Field]:
    """Return the tensors of a parameter's state, by the example of one of float32."""
    example = torch.empty(1, dtype=torch.float32, device="cpu")
    fields = [moment.fields(example) for moment in moments_in(moments)]
    return MappingProxyType({**fields[0], **fields[1]})


def prepared(function: Function, entry: Stepped) -> Prepared:
    """Return how a function steps a parameter."""
    numbers = factors(entry.settings, step=float(entry.step), arithmetic=function.form.arithmetic)
    return Prepared(function=function, of=entry, factors=numbers)


def run(pieces: Sequence[tuple[Prepared, Piece]]) -> None:
    """Step pieces, in any thread; several of one function in one call."""
    if not pieces:
        return
    function = pieces[0][0].function
    if any(how.function is not function for how, _ in pieces):
        for pair in pieces:
            run([pair])
        return
    function.run((Job * len(pieces))(*(how.job(piece.start, piece.stop) for how, piece in pieces)))


@functools.cache
def why_not() -> str | None:
    """Return why nothing can be stepped in machine code on this machine; None: it can."""
    machine = platform.machine()
    needed = _NEEDED.get(machine.lower())
    if needed is None:
        return f"machine code is not written for processors of the kind {machine}"
    try:
        has = llvm.get_host_cpu_features()
        if missing := [name for name in needed if not has.get(name)]:
            return f"this processor, or virtual machine, has no {' and no '.join(missing)}"
        known = arithmetic_of_torch()
    except RuntimeError as error:  # LLVM's, about this processor or this system's memory
        return f"LLVM makes no machine code for it: {error}"
    if known is None:
        return (
            f"torch {torch.__version__} computes AdamW in an order that is not known "
            f"({torch.backends.cpu.get_cpu_capability()})"
        )
    return None


@functools.cache
def arithmetic_of_torch() -> Arithmetic | None:
    """Return how torch's kernel computes on this machine; None: in no known way."""
    for known in _KNOWN:
        form = Form(
            values=torch.float32,
            gradient=torch.float32,
            copy=None,
            moments=MomentFormat.FP32,
            stochastic=False,
            arithmetic=known,
        )
        if checked(form) is not None:
            return known
    return None


@functools.cache
def checked(form: Form) -> Function | None:
    """Return the function of a form; None if its bits are not those of torch's operations.

    Remembered, because it depends on nothing but the form and the machine.
    """
    function = Function(form)
    with torch.device("cpu"):  # whatever the caller's default is
        return function if _has_bits_of_torch(function) else None


def _has_bits_of_torch(function: Function) -> bool:
    form = function.form
    reference = TorchStep(moments=moments_in(form.moments), stochastic_rounding=form.stochastic)
    for settings in _TRIED_SETTINGS:
        mine, theirs = (_trial(form, settings) for _ in range(2))
        for step in (1, 2, 3):
            mine.step.fill_(step)
            theirs.step.fill_(step)
            run([(prepared(function, mine), Piece(of=mine, start=0, stop=_TRIED))])
            whole = Piece(of=theirs, start=0, stop=_TRIED)
            reference.run([whole], Scratch(NUM_SCRATCH * _TRIED))
        if not _same(mine, theirs):
            return False
    return True


def _trial(form: Form, settings: Settings) -> Stepped:
    """Return a small parameter, always the same one."""
    generator = torch.Generator().manual_seed(0)
    values, gradient = (
        torch.randn(_TRIED, generator=generator, dtype=torch.float32) for _ in range(2)
    )
    values = values.to(form.values)
    state = {
        name: field.zeros(values)
        for moment in moments_in(form.moments)
        for name, field in moment.fields(values).items()
    }
    return Stepped(
        values=values,
        gradient=gradient.to(form.gradient),
        state=state,
        step=torch.zeros((), dtype=torch.float32),
        copy=None if form.copy is None else torch.zeros(_TRIED, dtype=form.copy),
        seed=1,
        settings=settings,
    )


def _same(one: Stepped, other: Stepped) -> bool:
    pairs = [
        (one.values, other.values),
        *zip(one.state.values(), other.state.values(), strict=True),
    ]
    if one.copy is not None and other.copy is not None:
        pairs.append((one.copy, other.copy))
    return all(torch.equal(mine, theirs) for mine, theirs in pairs)


def _address(tensor: Tensor, element: int) -> int:
    return tensor.data_ptr() + element * tensor.element_size()
