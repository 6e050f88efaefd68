"""The state of a parameter: how its two moments lie in memory, and the form that checkpoints have.

```
fp32        step                exp_avg                            exp_avg_sq
bf16        step   noise_seed   exp_avg (bfloat16)                 exp_avg_sq (bfloat16)
8bit        step   noise_seed   exp_avg_codes, exp_avg_scales      exp_avg_sq_codes, ..._scales
checkpoint  step   noise_seed   exp_avg                            exp_avg_sq
```

A parameter is seen as one flat vector in the order of its memory, and so are its gradient, its
state and its copies. A step works on pieces of it that fit a processor's cache. A piece begins at a
multiple of 1024 elements, so which of them share a vector instruction, or a scale of 8 bit codes,
does not depend on how large pieces are. For each piece a moment is *loaded* as a tensor of the
working dtype (its own memory where it already is that, else a copy), stepped in place, and *saved*.
`step_with_torch` does so with torch's operations, which define the bits. Machine code
(`optim/native.py`) does the same in one loop.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from roundpipe_lightning.errors import CheckpointError, ConfigurationError
from roundpipe_lightning.optim.rounding import (
    BLOCK,
    FIRST_MOMENT,
    SECOND_MOMENT,
    Noise,
    PowerCode,
    num_blocks,
    round_stochastically,
)

_LARGE = 1 << 20  # elements of a parameter whose bytes are those of a large model
_PIECE = 1 << 18  # elements that a whole moment is converted by; a multiple of BLOCK


class Moment:
    """One of the two moments, as an ordinary tensor.

    Args:
        name: As `torch.optim.AdamW` calls it.
        dtype: None: the working dtype, so nothing is converted.
    """

    def __init__(self, name: str, *, dtype: torch.dtype | None = None) -> None:
        self.name = name
        self._dtype = dtype

    def fields(self, parameter: Tensor) -> dict[str, Tensor]:
        return {self.name: dense_like(parameter, self._dtype or working_dtype(parameter))}

    def load(self, flat: Mapping[str, Tensor], start: int, stop: int) -> Tensor:
        """Return elements `start` (a multiple of `BLOCK`) to `stop` in the working dtype."""
        piece = flat[self.name][start:stop]
        return piece if self._dtype is None else piece.float()

    def save(self, loaded: Tensor, flat: Mapping[str, Tensor], random: Noise) -> None:
        """Write a piece back, which began at `random.offset`; `loaded` may be overwritten."""
        if self._dtype is not None:
            piece = flat[self.name][random.offset : random.offset + loaded.numel()]
            round_stochastically(loaded, out=piece, seed=random.seed, offset=random.offset)

    def export(self, flat: Mapping[str, Tensor], like: Tensor) -> Tensor:
        return shaped(flat[self.name], like)

    def restore(self, values: Tensor, flat: Mapping[str, Tensor]) -> None:
        """Take the whole moment, flat, from a checkpoint; rounds to the nearest."""
        flat[self.name].copy_(values)


class BlockwiseMoment(Moment):
    """A moment in codes of 8 bits."""

    def __init__(self, name: str, *, code: PowerCode) -> None:
        super().__init__(name)
        self._code = code
        self._codes, self._scales = f"{name}_codes", f"{name}_scales"

    def fields(self, parameter: Tensor) -> dict[str, Tensor]:
        count = num_blocks(parameter.numel())
        return {
            self._codes: dense_like(parameter, self._code.dtype),
            self._scales: torch.empty(count, dtype=torch.float32, device="meta"),
        }

    def load(self, flat: Mapping[str, Tensor], start: int, stop: int) -> Tensor:
        codes, scales = self._piece(flat, start, stop)
        return self._code.decode(codes, scales, out=torch.empty(stop - start))

    def save(self, loaded: Tensor, flat: Mapping[str, Tensor], random: Noise) -> None:
        codes, scales = self._piece(flat, random.offset, random.offset + loaded.numel())
        self._code.encode(loaded, codes=codes, scales=scales, random=random)

    def export(self, flat: Mapping[str, Tensor], like: Tensor) -> Tensor:
        numbers = torch.empty(flat[self._codes].numel(), dtype=torch.float32)
        for start in range(0, numbers.numel(), _PIECE):
            part = numbers[start : start + _PIECE]
            codes, scales = self._piece(flat, start, start + part.numel())
            self._code.decode(codes, scales, out=part)
        return shaped(numbers, like)

    def restore(self, values: Tensor, flat: Mapping[str, Tensor]) -> None:
        for start in range(0, values.numel(), _PIECE):
            numbers = values[start : start + _PIECE].to(torch.float32, copy=True)
            codes, scales = self._piece(flat, start, start + numbers.numel())
            self._code.encode(numbers, codes=codes, scales=scales, random=None)

    def _piece(self, flat: Mapping[str, Tensor], start: int, stop: int) -> tuple[Tensor, Tensor]:
        blocks = slice(start // BLOCK, num_blocks(stop))
        return flat[self._codes][start:stop], flat[self._scales][blocks]


def working_dtype(parameter: Tensor) -> torch.dtype:
    return torch.float64 if parameter.dtype is torch.float64 else torch.float32


class MomentFormat(Enum):
    """Number format of the moments, and how the state lies in memory with it."""

    FP32 = "fp32"  # float32: 8 bytes per parameter, the numbers of `torch.optim.AdamW(fused=True)`
    BF16 = "bf16"  # bfloat16, rounded at random: 4 bytes per parameter
    EIGHT_BITS = "8bit"  # blocks of 8 bit codes (`optim/rounding.py`): 2.03 bytes per parameter

    @functools.cached_property
    def moments(self) -> tuple[Moment, Moment]:
        """The first and the second moment."""
        if self is MomentFormat.EIGHT_BITS:
            return (
                BlockwiseMoment("exp_avg", code=FIRST_MOMENT),
                BlockwiseMoment("exp_avg_sq", code=SECOND_MOMENT),
            )
        dtype = torch.bfloat16 if self is MomentFormat.BF16 else None
        return Moment("exp_avg", dtype=dtype), Moment("exp_avg_sq", dtype=dtype)

    def fields(self, parameter: Tensor) -> dict[str, Tensor]:
        first, second = (moment.fields(parameter) for moment in self.moments)
        return {**first, **second}

    def rounds(self, parameter: Tensor) -> bool:
        return self is not MomentFormat.FP32 or parameter.dtype is torch.bfloat16

    def allocate(self, parameter: Tensor) -> dict[str, Tensor]:
        fields = self.fields(parameter).items()
        return {name: torch.zeros_like(field, device="cpu") for name, field in fields}

    def flat(self, state: Mapping[str, Any], parameter: Tensor) -> dict[str, Tensor]:
        """Return the tensors as vectors in the order of the parameter's memory."""
        return {
            name: state[name].as_strided((state[name].numel(),), (1,))
            for name in self.fields(parameter)
        }

    def export(self, state: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
        vectors = self.flat(state, parameter)
        moments = {m.name: m.export(vectors, parameter) for m in self.moments}
        return {**{key: state[key] for key in state if key not in vectors}, **moments}

    def restore(
        self, saved: Mapping[str, Any], state: dict[str, Any], parameter: Tensor, *, name: str
    ) -> None:
        """Take what `export` gave, or torch.optim.AdamW has; CheckpointError: it does not fit."""
        vectors = self.flat(state, parameter)
        for moment in self.moments:
            values = saved.get(moment.name)
            if not isinstance(values, Tensor) or values.shape != parameter.shape:
                found = (
                    f"has shape {tuple(values.shape)}"
                    if isinstance(values, Tensor)
                    else f"is missing (there are {', '.join(map(str, saved))})"
                )
                raise CheckpointError(
                    f"The optimizer state of parameter {name}, of shape {tuple(parameter.shape)}, "
                    f"does not fit: {moment.name} {found}. Resume with the kind of optimizer that "
                    "wrote the checkpoint, or start it anew from the weights alone."
                )
            moment.restore(flattened_like(values.to("cpu"), dense_like(parameter)), vectors)
        state["step"].fill_(float(saved["step"]))
        if "noise_seed" in saved:
            state["noise_seed"] = int(saved["noise_seed"])

    def bytes_per_parameter(self) -> float:
        large = torch.empty(_LARGE, device="meta")
        return sum(field.nbytes for field in self.fields(large).values()) / _LARGE


@dataclass(frozen=True, kw_only=True)
class StatePlace:
    """Bytes of state per parameter, of large parameters, in memory and on disk."""

    memory_bytes: float
    disk_bytes: float


def check_options(group: Mapping[str, Any]) -> None:
    """Raise a ConfigurationError naming an option that cannot be, or asks for another algorithm."""
    if group.get("amsgrad"):
        raise ConfigurationError(
            "amsgrad=True: HostAdamW keeps no largest second moment. Use amsgrad=False, or "
            "torch.optim.AdamW."
        )
    if not group.get("decoupled_weight_decay", True):
        raise ConfigurationError(
            "The parameter group is that of Adam, whose weight decay goes through the moments "
            "(decoupled_weight_decay=False). Use torch.optim.Adam, or start HostAdamW anew."
        )
    for name in ("lr", "eps", "weight_decay"):
        value = _number(group[name])
        if not (isinstance(value, float) and 0.0 <= value < float("inf")):
            raise ConfigurationError(f"{name}={value!r}: give a number of 0 or more.")
    given = group["betas"]
    betas: Any = tuple(map(_number, given)) if isinstance(given, Sequence) else given
    if (
        not isinstance(betas, tuple)
        or len(betas) != 2
        or not all(isinstance(beta, float) and 0.0 <= beta < 1.0 for beta in betas)
    ):
        raise ConfigurationError(f"betas={betas!r}: give two numbers from 0 to below 1.")


def _number(value: Any) -> Any:
    """The value as a number, where it is one."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return value


def step_with_torch(
    task: Task, *, moments: tuple[Moment, Moment], stochastic_rounding: bool
) -> None:
    """Step pieces of parameters, in any thread."""
    first, second = moments
    values = [_loaded(piece.parameter.values, piece) for piece in task]
    gradients = [_loaded(piece.parameter.gradient, piece) for piece in task]
    firsts = [first.load(p.parameter.state, p.start, p.stop) for p in task]
    seconds = [second.load(p.parameter.state, p.start, p.stop) for p in task]
    settings = task[0].parameter.settings
    torch._fused_adamw_(
        values,
        gradients,
        firsts,
        seconds,
        [],
        [piece.parameter.step for piece in task],
        lr=settings.lr,
        beta1=settings.beta1,
        beta2=settings.beta2,
        weight_decay=settings.weight_decay,
        eps=settings.eps,
        amsgrad=False,
        maximize=settings.maximize,
    )
    for index, piece in enumerate(task):
        _save_values(values[index], piece, stochastic_rounding=stochastic_rounding)
        first.save(firsts[index], piece.parameter.state, _noise(piece, "first"))
        second.save(seconds[index], piece.parameter.state, _noise(piece, "second"))


def _save_values(values: Tensor, piece: Piece, *, stochastic_rounding: bool) -> None:
    parameter = piece.parameter
    master = parameter.values[piece.start : piece.stop]
    if master.dtype is torch.bfloat16 and stochastic_rounding:
        noise = _noise(piece, "values")
        round_stochastically(values, out=master, seed=noise.seed, offset=noise.offset)
    elif master.dtype is not values.dtype:
        master.copy_(values)
    if parameter.copy is not None:
        parameter.copy[piece.start : piece.stop].copy_(master)


def _loaded(tensor: Tensor, piece: Piece) -> Tensor:
    """Return a piece of a tensor in the working dtype; its own memory where it has it already."""
    return tensor[piece.start : piece.stop].to(working_dtype(piece.parameter.values))


def _noise(piece: Piece, what: str) -> Noise:
    return Noise(seed=piece.parameter.seed + ROUNDED.index(what), offset=piece.start)


ROUNDED = ("values", "first", "second")
"""Parts of a parameter that noise is drawn for: the master and its two moments."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Hyper-parameters of a step of AdamW."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    maximize: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class FlatParameter:
    """A parameter about to be stepped; all tensors flat, in the order of the parameter's memory."""

    values: Tensor  # master
    gradient: Tensor  # of the same size, in any floating dtype
    state: Mapping[str, Tensor]  # tensors of the moments
    step: Tensor  # number of this step, a scalar tensor; 1 is the first
    copy: Tensor | None  # where the new values are also written, cast to its dtype
    seed: int  # of the roundings of this parameter in this step
    settings: Settings


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Elements `start` to `stop` of a parameter."""

    parameter: FlatParameter
    start: int
    stop: int


Task = tuple[Piece, ...]
"""Pieces with the same settings that one thread steps: small ones together, because every call of a
kernel costs some microseconds."""


def cut_into_tasks(parameters: Sequence[FlatParameter], *, size: int) -> Iterator[Task]:
    """Cut parameters into tasks of at most `size` elements, a multiple of 1024."""
    group: list[Piece] = []
    filled = 0
    for parameter in parameters:
        count = parameter.values.numel()
        for start in range(0, count, size):
            piece = Piece(parameter=parameter, start=start, stop=min(start + size, count))
            weight = math.ceil((piece.stop - start) / BLOCK) * BLOCK
            differs = group and group[0].parameter.settings != parameter.settings
            if group and (filled + weight > size or differs):
                yield tuple(group)
                group, filled = [], 0
            group.append(piece)
            filled += weight
    if group:
        yield tuple(group)


def dense_like(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty_like(tensor, dtype=dtype, device="meta", memory_format=torch.preserve_format)


def shaped(flat: Tensor, like: Tensor) -> Tensor:
    form = dense_like(like)
    return flat.as_strided(form.shape, form.stride())


def flattened_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a tensor's elements in the order of another's memory.

    They are a view; a copy where the order is another one, or there are gaps.
    """
    tensor = tensor.detach()
    if tensor.is_contiguous() and like.is_contiguous():
        return tensor.view(-1)
    form = dense_like(like)
    if tensor.stride() != form.stride() and tensor.numel() > 1:
        place = torch.empty_strided(form.shape, form.stride(), dtype=tensor.dtype)
        tensor = place.copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


def memory_of(parameter: Tensor) -> tuple[int, int]:
    return parameter.data_ptr(), parameter.numel()
