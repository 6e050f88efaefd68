"""Parameters cut into pieces that fit a processor's cache.

A parameter is seen as one flat vector in the order of its memory, and so are its gradient, its
state and its copies. A piece begins at a multiple of 1024 elements, so which of them share a vector
instruction, or a scale of 8 bit codes, does not depend on how large pieces are. Small parameters
with the same settings share a task, because every call of a kernel costs some microseconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from roundpipe_lightning.optim.blockwise import BLOCK

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


Task = tuple[Piece, ...]  # pieces with the same settings that one thread steps


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


# ------------------------------------------------------------------------------- order in memory


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
