"""Random tiny models for race_hunt.py, and what plain PyTorch computes with them.

Gradients of parameters are rounded to multiples of 2**-10 where a parameter is used, so that sums
of a step's microbatches are exact in float32 and have one result in whatever order they are made.
"""

from __future__ import annotations

import copy
import itertools
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from roundpipe_lightning.engine.capture.randomness import RandomStream, StepDraws
from roundpipe_lightning.engine.chain.chain import BlockStack, Chain, Link
from roundpipe_lightning.engine.chain.joined import piece_sizes

WIDTH = 4
_STEPS_PER_ONE = 1024.0


class _Exact(torch.autograd.Function):
    """Rounds the gradient to what can be summed exactly."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return (gradient * _STEPS_PER_ONE).round() / _STEPS_PER_ONE


def exact(tensor: Tensor) -> Tensor:
    """Return the same values, whose gradient is rounded."""
    result: Tensor = _Exact.apply(tensor)  # type: ignore[no-untyped-call]
    return result


class Dense(nn.Module):
    """A linear layer with exact gradients.

    Attributes:
        rounds: Whether it computes with its weight rounded to bfloat16, as a copy of it is.
        takes_copy: Whether it gets that copy, by a `Function` of its own, and not whole values.
    """

    def __init__(self, inputs: int = WIDTH, outputs: int = WIDTH) -> None:
        super().__init__()
        self.rounds = self.takes_copy = False
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)
        self.bias = nn.Parameter(torch.randn(outputs) / 4)

    def forward(self, x: Tensor) -> Tensor:
        weight: Tensor = exact(self.weight) if self.takes_copy else self.weight
        if self.rounds:
            weight = weight.to(torch.bfloat16).to(x.dtype)
        return functional.linear(x, exact(weight), exact(self.bias))


class Block(nn.Module):
    """A residual block with dropout; of a second stack, with a second input.

    Attributes:
        seen: How often it has run, which it computes with.
    """

    seen: Tensor | None

    def __init__(self, *, dropout: float, crossed: bool, counts: bool) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()) if counts else None)
        self.inner, self.outer = Dense(), Dense()
        self.cross = Dense() if crossed else None
        self.dropout = dropout

    def forward(self, x: Tensor, states: Tensor | None = None) -> Tensor:
        if self.seen is not None:
            self.seen += 1
            x = x / (1 + self.seen)
        hidden = self.outer(torch.tanh(self.inner(x)))
        if self.cross is not None and states is not None:
            hidden = hidden + torch.tanh(self.cross(exact(states)))
        return x + functional.dropout(hidden, self.dropout, training=self.training)


class Experts(nn.Module):
    """A block that sends every row to one of its experts: shapes depend on the data."""

    def __init__(self, *, num_experts: int, crossed: bool) -> None:
        super().__init__()
        self.router = Dense(WIDTH, num_experts)
        self.experts = nn.ModuleList(Dense() for _ in range(num_experts))
        self.cross = Dense() if crossed else None

    def forward(self, x: Tensor, states: Tensor | None = None) -> Tensor:
        shares = torch.softmax(self.router(x), dim=-1)
        chosen = shares.argmax(dim=-1)
        result = x
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero()[:, 0]
            if rows.numel():
                made = expert(x[rows]) * shares[rows, index, None]
                result = result.index_add(0, rows, made)
        if self.cross is not None and states is not None:
            result = result + torch.tanh(self.cross(exact(states)))
        return result


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Description of a random model.

    Attributes:
        num_first: Blocks of the first stack.
        num_second: Blocks of a second stack, each of which takes what the first gives; 0: none.
        num_passes: How often the first stack is called.
        num_experts: Of every third block; 0: none.
        dropout: Of the others.
        shares: Whether two blocks share a parameter.
        tied: Whether the tail shares one with the head.
        frozen: Every how many parameters one is frozen; 0: none.
        seed: Of the values.
        rounds: Whether products are with weights in bfloat16.
        counts: Whether blocks write into buffers.
    """

    num_first: int
    num_second: int
    num_passes: int
    num_experts: int
    dropout: float
    shares: bool
    tied: bool
    frozen: int
    seed: int
    rounds: bool = False
    counts: bool = False

    @classmethod
    def drawn(cls, numbers: random.Random, *, most_blocks: int) -> ModelSpec:
        num_second = numbers.choice((0, 0, 0, 1, 2))
        return cls(
            num_first=numbers.randint(1, most_blocks),
            num_second=num_second,
            num_passes=1 if num_second else numbers.choice((1, 1, 1, 2)),
            num_experts=numbers.choice((0, 0, 2, 3)),
            dropout=numbers.choice((0.0, 0.0, 0.3)),
            shares=numbers.random() < 0.2,
            tied=numbers.random() < 0.2,
            frozen=numbers.choice((0, 0, 2, 3)),
            seed=numbers.randrange(2**31),
        )


class RaceModel(nn.Module):
    """A head, one or two stacks of blocks, and a tail."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.head, self.tail = Dense(), Dense()
        self.first = nn.ModuleList(self._block(i, crossed=False) for i in range(spec.num_first))
        self.second = nn.ModuleList(self._block(i, crossed=True) for i in range(spec.num_second))
        blocks = [*self.first, *self.second]
        layers = [[m for m in block.modules() if isinstance(m, Dense)] for block in blocks]
        for number, layer in enumerate((self.head, self.tail, *itertools.chain(*layers))):
            layer.rounds, layer.takes_copy = spec.rounds, bool(number % 3)
        if spec.shares and len(blocks) > 1:
            layers[-1][-1].weight = layers[0][-1].weight
        if spec.tied:
            self.tail.weight = self.head.weight
        for index, parameter in enumerate(p for block in blocks for p in block.parameters()):
            if spec.frozen and index % spec.frozen == 0:
                parameter.requires_grad_(False)

    def _block(self, index: int, *, crossed: bool) -> nn.Module:
        if self.spec.num_experts and index % 3 == 1:
            return Experts(num_experts=self.spec.num_experts, crossed=crossed)
        return Block(dropout=self.spec.dropout, crossed=crossed, counts=self.spec.counts)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        del batch_idx
        x, y = batch
        states = self.head(x)
        for _ in range(self.spec.num_passes):
            for block in self.first:
                states = block(states)
            states = states / 2
        hidden = states
        for block in self.second:
            hidden = block(hidden, states)
        loss: Tensor = functional.mse_loss(self.tail(hidden), y)
        return loss

    def stacks(self) -> tuple[BlockStack, ...]:
        found = []
        for name, blocks in (("first", self.first), ("second", self.second)):
            names = tuple(f"{name}.{index}" for index in range(len(blocks)))
            if names:
                found.append(BlockStack(name=name, blocks=tuple(blocks), names=names))
        return tuple(found)

    def chain(self, *, num_passes: int) -> Chain:
        links = []
        for turn in range(num_passes):
            for index, block in enumerate(self.first):
                name = f"first.{index}" if not turn else f"first.{index}#{turn + 1}"
                links.append(Link(block=block, name=name, cut=bool(turn and not index)))
        for index, block in enumerate(self.second):
            links.append(Link(block=block, name=f"second.{index}", cut=not index))
        return Chain(links=tuple(links))


def make_model(spec: ModelSpec) -> RaceModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        return RaceModel(spec).train()


def make_batches(num_microbatches: int, *, seed: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(2 + index % 3, WIDTH, generator=generator),
            torch.randn(2 + index % 3, WIDTH, generator=generator),
        )
        for index in range(num_microbatches)
    ]


# ------------------------------------------------------------------------------------ plain PyTorch


class _Streams(TorchFunctionMode):
    """Draws a microbatch's random numbers from its stream, as the engine does."""

    def __init__(self, stream: RandomStream) -> None:
        super().__init__()
        self._stream = stream
        self._num_calls = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return self._stream.call(func, args, kwargs or {})

    @contextmanager
    def block(self) -> Iterator[None]:
        self._stream.begin_block(self._num_calls)
        self._num_calls += 1
        yield
        self._stream.end_block()


class _Called(nn.Module):
    """A block that runs on so many rows after the other, each with random numbers of its own."""

    def __init__(self, block: nn.Module, pieces: list[_Piece]) -> None:
        super().__init__()
        self.block = block
        self.pieces = pieces

    def forward(self, *args: Tensor) -> Tensor:
        made = []
        for piece in self.pieces:
            parts = [piece.part_of(tensor) for tensor in args]
            with piece.stream, piece.stream.block():
                made.append(self.block(*parts))
        whole = made[0] if len(made) == 1 else torch.cat(made)
        for piece, part in zip(self.pieces, made, strict=True):
            piece.known.append((whole, part))
        return whole


@dataclass
class _Piece:
    """Some rows of a batch, and what they were given of tensors of the whole batch, each once."""

    rows: slice
    stream: _Streams
    known: list[tuple[Tensor, Tensor]]

    def part_of(self, tensor: Tensor) -> Tensor:
        for whole, part in self.known:
            if whole is tensor:
                return part
        part = (
            tensor if self.rows.stop == len(tensor) and not self.rows.start else tensor[self.rows]
        )
        self.known.append((tensor, part))
        return part


class PlainModel:
    """A copy of the model, trained by a plain loop over the microbatches, or blocks on pieces."""

    def __init__(self, model: RaceModel) -> None:
        self._model = copy.deepcopy(model)
        self._pieces: list[_Piece] = []
        self.parameters = list(self._model.parameters())
        self.buffers = list(self._model.buffers())
        for stack in (self._model.first, self._model.second):
            for index, block in enumerate(stack):
                stack[index] = _Called(block, self._pieces)

    def step(
        self, batches: Sequence[Any], *, step_seed: int, num_pieces: int = 1
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """Return the losses of batches, and gradients of their mean; blocks see pieces of each."""
        losses = []
        for number, batch in enumerate(batches):
            sizes = piece_sizes(len(batch[0]), num_pieces)
            stops = accumulate(sizes)
            self._pieces[:] = [
                _Piece(slice(stop - size, stop), _streams(step_seed, number + index), [])
                for index, (size, stop) in enumerate(zip(sizes, stops, strict=True))
                if size
            ]
            loss = self._model.training_step(batch, 0)
            loss.backward(torch.full_like(loss, 1 / len(batches)))
            losses.append(loss.detach())
        gradients = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        return losses, gradients


def _streams(step_seed: int, microbatch: int) -> _Streams:
    return _Streams(
        RandomStream(
            StepDraws(threading.Lock()),
            step_seed=step_seed,
            microbatch=microbatch,
            generators=lambda: (torch.default_generator,),
        )
    )
