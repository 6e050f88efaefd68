"""A step of AdamW on pieces of parameters with torch's operations: what the bits are defined by.

Machine code (`optim/native.py`) does the same in one loop, and is used where its bits are
these. Here every piece is converted, stepped by torch's fused kernel and converted back, while it
is in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from roundpipe_lightning.optim.blockwise import Noise
from roundpipe_lightning.optim.moments import Moment, working_dtype
from roundpipe_lightning.optim.pieces import ROUNDED, Piece
from roundpipe_lightning.optim.rounding import round_stochastically
from roundpipe_lightning.optim.scratch import Scratch

NUM_SCRATCH = 4
"""Tensors that may have to be converted: master, gradient and two moments."""


class TorchStep:
    """Steps pieces, in any thread.

    Args:
        moments: How the two moments are kept.
        stochastic_rounding: Whether masters of bfloat16 are rounded at random.
    """

    def __init__(self, *, moments: tuple[Moment, Moment], stochastic_rounding: bool) -> None:
        self._moments = moments
        self._stochastic = stochastic_rounding

    def run(self, pieces: Sequence[Piece], scratch: Scratch) -> None:
        """Step pieces of parameters that have the same settings."""
        first, second = self._moments
        values = [_loaded(piece.of.values, piece, scratch) for piece in pieces]
        gradients = [_loaded(piece.of.gradient, piece, scratch) for piece in pieces]
        firsts = [first.load(p.of.state, p.start, p.stop, scratch) for p in pieces]
        seconds = [second.load(p.of.state, p.start, p.stop, scratch) for p in pieces]
        settings = pieces[0].of.settings
        torch._fused_adamw_(
            values,
            gradients,
            firsts,
            seconds,
            [],
            [piece.of.step for piece in pieces],
            lr=settings.lr,
            beta1=settings.beta1,
            beta2=settings.beta2,
            weight_decay=settings.weight_decay,
            eps=settings.eps,
            amsgrad=False,
            maximize=settings.maximize,
        )
        for index, piece in enumerate(pieces):
            self._save_values(values[index], piece)
            first.save(firsts[index], piece.of.state, _noise(piece, "first"))
            second.save(seconds[index], piece.of.state, _noise(piece, "second"))

    def _save_values(self, values: Tensor, piece: Piece) -> None:
        master = piece.of.values[piece.start : piece.stop]
        if master.dtype is torch.bfloat16 and self._stochastic:
            noise = _noise(piece, "values")
            round_stochastically(values, out=master, seed=noise.seed, offset=noise.offset)
        elif master.dtype is not values.dtype:
            master.copy_(values)
        if piece.of.copy is not None:
            piece.of.copy[piece.start : piece.stop].copy_(master)


def _loaded(tensor: Tensor, piece: Piece, scratch: Scratch) -> Tensor:
    """Return a piece of a tensor in the working dtype; in scratch memory if it is converted."""
    dtype = working_dtype(piece.of.values)
    part = tensor[piece.start : piece.stop]
    if part.dtype is dtype:
        return part
    return scratch.take(part.numel(), dtype).copy_(part)


def _noise(piece: Piece, what: str) -> Noise:
    return Noise(seed=piece.of.seed + ROUNDED.index(what), offset=piece.start)
