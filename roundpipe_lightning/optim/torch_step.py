"""A step of AdamW on pieces of parameters with torch's operations: what the bits are defined by.

Machine code (`optim/native.py`) does the same in one loop. Here every piece is converted, stepped
by torch's fused kernel and converted back, while it is in the cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from roundpipe_lightning.optim.blockwise import Noise
from roundpipe_lightning.optim.pieces import ROUNDED, Piece, Scratch, Task
from roundpipe_lightning.optim.rounding import round_stochastically
from roundpipe_lightning.optim.state import Moment, working_dtype

NUM_SCRATCH = 4  # tensors that may have to be converted: master, gradient and two moments


def step_with_torch(
    task: Task, scratch: Scratch, *, moments: tuple[Moment, Moment], stochastic_rounding: bool
) -> None:
    """Step pieces of parameters, in any thread."""
    first, second = moments
    values = [_loaded(piece.parameter.values, piece, scratch) for piece in task]
    gradients = [_loaded(piece.parameter.gradient, piece, scratch) for piece in task]
    firsts = [first.load(p.parameter.state, p.start, p.stop, scratch) for p in task]
    seconds = [second.load(p.parameter.state, p.start, p.stop, scratch) for p in task]
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


def _loaded(tensor: Tensor, piece: Piece, scratch: Scratch) -> Tensor:
    """Return a piece of a tensor in the working dtype; in scratch memory if it is converted."""
    dtype = working_dtype(piece.parameter.values)
    part = tensor[piece.start : piece.stop]
    if part.dtype is dtype:
        return part
    return scratch.allocate(part.numel(), dtype).copy_(part)


def _noise(piece: Piece, what: str) -> Noise:
    return Noise(seed=piece.parameter.seed + ROUNDED.index(what), offset=piece.start)
