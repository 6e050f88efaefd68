"""How a moment of Adam lies in memory: in float32, in bfloat16, or in blocks of 8 bits.

A kernel works on pieces of flat tensors. For each piece a format *loads* the moment as a tensor of
the working dtype (its own memory where it already is that, else a scratch buffer), the kernel
changes it in place, and the format *saves* it. `fields` says which tensors a parameter's state has:

```
fp32   exp_avg                              exp_avg_sq
bf16   exp_avg (bfloat16)                   exp_avg_sq (bfloat16)
8bit   exp_avg_codes, exp_avg_scales        exp_avg_sq_codes, exp_avg_sq_scales
```
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from roundpipe_lightning.optim.blockwise import (
    BLOCK,
    FIRST_MOMENT,
    SECOND_MOMENT,
    Noise,
    PowerCode,
    num_blocks,
)
from roundpipe_lightning.optim.rounding import round_stochastically
from roundpipe_lightning.optim.scratch import Scratch


class MomentFormat(Enum):
    """How the moments are kept."""

    FP32 = "fp32"
    """float32: 8 bytes per parameter, the numbers of `torch.optim.AdamW(fused=True)`."""

    BF16 = "bf16"
    """bfloat16, rounded at random: 4 bytes per parameter."""

    EIGHT_BITS = "8bit"
    """Blocks of 8 bit codes (`optim/blockwise.py`): 2.03 bytes per parameter."""


@dataclass(frozen=True, kw_only=True)
class Field:
    """A tensor of a parameter's state.

    Attributes:
        dtype: Its dtype.
        numel: Its size, if it is flat; None: shape and strides are the parameter's.
    """

    dtype: torch.dtype
    numel: int | None = None

    def zeros(self, parameter: Tensor) -> Tensor:
        """Return the tensor, in memory, of zeros."""
        if self.numel is not None:
            return torch.zeros(self.numel, dtype=self.dtype)
        form = dense_like(parameter)
        return torch.zeros(form.numel(), dtype=self.dtype).as_strided(form.shape, form.stride())

    def num_bytes(self, parameter: Tensor) -> int:
        """Bytes of the tensor."""
        count = parameter.numel() if self.numel is None else self.numel
        return count * self.dtype.itemsize


class Moment(ABC):
    """One of the two moments in one format.

    Args:
        name: As `torch.optim.AdamW` calls it.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def fields(self, parameter: Tensor) -> dict[str, Field]:
        """Return the tensors that the state of a parameter has for this moment."""

    @abstractmethod
    def load(self, flat: Mapping[str, Tensor], start: int, stop: int, scratch: Scratch) -> Tensor:
        """Return elements `start` to `stop` in the working dtype.

        Args:
            flat: The fields, flat, in the order of the parameter's memory.
            start: A multiple of `BLOCK`.
            stop: End of the piece.
            scratch: Where to put what has to be converted.
        """

    @abstractmethod
    def save(self, loaded: Tensor, flat: Mapping[str, Tensor], random: Noise) -> None:
        """Write a piece back, which began at `random.offset`; `loaded` may be overwritten."""

    @abstractmethod
    def read(self, flat: Mapping[str, Tensor], like: Tensor) -> Tensor:
        """Return the whole moment in the ordinary form: a tensor like the parameter."""

    @abstractmethod
    def write(self, values: Tensor, flat: Mapping[str, Tensor]) -> None:
        """Take the whole moment, flat, from the ordinary form; rounds to the nearest."""


class PlainMoment(Moment):
    """A moment as an ordinary tensor.

    Args:
        name: As `torch.optim.AdamW` calls it.
        dtype: None: the working dtype, so nothing is converted.
    """

    def __init__(self, name: str, *, dtype: torch.dtype | None) -> None:
        super().__init__(name)
        self._dtype = dtype

    def fields(self, parameter: Tensor) -> dict[str, Field]:
        """Return the one tensor."""
        return {self.name: Field(dtype=self._dtype or working_dtype(parameter))}

    def load(self, flat: Mapping[str, Tensor], start: int, stop: int, scratch: Scratch) -> Tensor:
        """Return the piece itself, or its values in scratch memory."""
        piece = flat[self.name][start:stop]
        return piece if self._dtype is None else scratch.take(stop - start).copy_(piece)

    def save(self, loaded: Tensor, flat: Mapping[str, Tensor], random: Noise) -> None:
        """Round at random, where the piece was converted."""
        if self._dtype is not None:
            piece = flat[self.name][random.offset : random.offset + loaded.numel()]
            round_stochastically(loaded, out=piece, seed=random.seed, offset=random.offset)

    def read(self, flat: Mapping[str, Tensor], like: Tensor) -> Tensor:
        """Return the tensor itself."""
        return shaped(flat[self.name], like)

    def write(self, values: Tensor, flat: Mapping[str, Tensor]) -> None:
        """Copy."""
        flat[self.name].copy_(values)


class BlockwiseMoment(Moment):
    """A moment in codes of 8 bits.

    Args:
        name: As `torch.optim.AdamW` calls it.
        code: What the codes stand for.
    """

    def __init__(self, name: str, *, code: PowerCode) -> None:
        super().__init__(name)
        self._code = code
        self._codes, self._scales = f"{name}_codes", f"{name}_scales"

    def fields(self, parameter: Tensor) -> dict[str, Field]:
        """Return codes and scales."""
        return {
            self._codes: Field(dtype=self._code.dtype),
            self._scales: Field(dtype=torch.float32, numel=num_blocks(parameter.numel())),
        }

    def load(self, flat: Mapping[str, Tensor], start: int, stop: int, scratch: Scratch) -> Tensor:
        """Decode into scratch memory."""
        codes, scales = self._piece(flat, start, stop)
        return self._code.decode(codes, scales, out=scratch.take(stop - start))

    def save(self, loaded: Tensor, flat: Mapping[str, Tensor], random: Noise) -> None:
        """Encode, rounding at random."""
        codes, scales = self._piece(flat, random.offset, random.offset + loaded.numel())
        self._code.encode(loaded, codes=codes, scales=scales, random=random)

    def read(self, flat: Mapping[str, Tensor], like: Tensor) -> Tensor:
        """Decode into a new tensor of float32."""
        codes, scales = flat[self._codes], flat[self._scales]
        numbers = torch.empty(codes.numel(), dtype=torch.float32)
        for start in range(0, numbers.numel(), _PIECE):
            piece = slice(start, start + _PIECE)
            blocks = slice(start // BLOCK, num_blocks(start + _PIECE))
            self._code.decode(codes[piece], scales[blocks], out=numbers[piece])
        return shaped(numbers, like)

    def write(self, values: Tensor, flat: Mapping[str, Tensor]) -> None:
        """Encode, rounding to the nearest."""
        for start in range(0, values.numel(), _PIECE):
            numbers = values[start : start + _PIECE].to(torch.float32, copy=True)
            codes, scales = self._piece(flat, start, start + numbers.numel())
            self._code.encode(numbers, codes=codes, scales=scales, random=None)

    def _piece(self, flat: Mapping[str, Tensor], start: int, stop: int) -> tuple[Tensor, Tensor]:
        blocks = slice(start // BLOCK, num_blocks(stop))
        return flat[self._codes][start:stop], flat[self._scales][blocks]


_PIECE = 1 << 18  # elements that a whole moment is converted by; a multiple of BLOCK


def moments_in(form: MomentFormat) -> tuple[Moment, Moment]:
    """Return the first and the second moment in a format."""
    if form is MomentFormat.EIGHT_BITS:
        return (
            BlockwiseMoment("exp_avg", code=FIRST_MOMENT),
            BlockwiseMoment("exp_avg_sq", code=SECOND_MOMENT),
        )
    dtype = torch.bfloat16 if form is MomentFormat.BF16 else None
    return PlainMoment("exp_avg", dtype=dtype), PlainMoment("exp_avg_sq", dtype=dtype)


def working_dtype(parameter: Tensor) -> torch.dtype:
    """Return what a parameter's step is computed in: float32, or float64 for float64."""
    return torch.float64 if parameter.dtype is torch.float64 else torch.float32


def shaped(flat: Tensor, like: Tensor) -> Tensor:
    """Return a view of a flat tensor with the shape, and the order in memory, of another."""
    return flat.as_strided(dense_like(like).shape, dense_like(like).stride())


def dense_like(tensor: Tensor) -> Tensor:
    """Return a tensor without memory that has the shape and order of another, without gaps."""
    return torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format)
