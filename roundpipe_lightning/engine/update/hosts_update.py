"""One optimizer step on several hosts: each steps the elements it owns, and all get the results.

```
updater's thread    agree ─▶ [step b0] ─────▶ [step b1] ─────▶ [step b2]
gradients' thread   [sum b0][sum b1][sum b2]
weights' thread              [gather b0 ──▶ its uploads begin][gather b1]...
```

The optimizer's state of a parameter is that of the piece that this host owns, one-dimensional.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from roundpipe_lightning.engine.exchange.exchange import Exchange
from roundpipe_lightning.engine.exchange.ranges import Piece
from roundpipe_lightning.engine.update.partial_step import CapturedStep
from roundpipe_lightning.engine.update.separable import is_elementwise
from roundpipe_lightning.errors import ConfigurationError, HostError

_SMALL = 1e-6  # what torch adds to the norm


class NormClip:
    """Clips gradients by the norm of all of them, which is known when all hosts' sums are.

    Args:
        limit: The largest norm.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._factor = 1.0

    def set_norm(self, norm: float) -> None:
        self._factor = min(1.0, self._limit / (norm + _SMALL))

    def __call__(self, gradient: Tensor) -> Tensor:
        return gradient.mul_(self._factor)


class HostsUpdate:
    """Makes steps together with other hosts, in the updater's thread.

    Args:
        exchange: What carries gradients and values.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._whole: dict[Optimizer, bool] = {}
        self._num_steps = 0

    def prepare(self, optimizer: Optimizer) -> None:
        """Find out what an optimizer may own; in the Trainer's thread, whose generator is used."""
        if optimizer not in self._whole:
            self._whole[optimizer] = not is_elementwise(optimizer)

    def step(
        self,
        units: Sequence[Sequence[Tensor]],
        step: CapturedStep,
        *,
        run: Callable[[int, Sequence[Tensor]], None],
        ended: Callable[[int], None],
    ) -> None:
        """Make a captured step; every host calls this for the same step.

        Args:
            units: Parameters that are stepped together; the step's own are stepped.
            step: Has this host's gradients.
            run: Called with a unit's number and parameters: makes their step.
            ended: Called with a unit's number, in another thread, when all hosts' values are there.

        Raises:
            ConfigurationError: The hosts' steps differ.
            HostError: Another host is lost.
        """
        exchange, optimizer = self._exchange, step.optimizer
        members = [[p for p in unit if p in step.parameters and p.requires_grad] for unit in units]
        self._divide(optimizer, members)
        self._num_steps += 1
        present = self._agree(step, [p for some in members for p in some])
        trained = [[p for p in some if p in present] for some in members]
        sums: list[Future[dict[Tensor, Tensor]]] = [
            exchange.sum(some, [step.take(p) for p in some]) for some in trained
        ]
        if isinstance(step.clip, NormClip):
            step.clip.set_norm(self._norm([each.result() for each in sums]))
        gathered = []
        for number, some in enumerate(trained):
            owned = {p: exchange.owned(p) for p in some}
            pieces = {p: piece for p, piece in owned.items() if piece is not None}
            mine = sums[number].result()
            step.give({p: _shaped(mine[p], piece) for p, piece in pieces.items()})
            step.values_of = partial(_values_of, pieces)
            run(number, tuple(pieces))
            gathered.append(exchange.gather(some, partial(ended, number)))
            sums[number] = Future()  # lets go of the gradients
        for each in gathered:
            each.result()

    def _agree(self, step: CapturedStep, parameters: Sequence[Tensor]) -> set[Tensor]:
        """Return the parameters of which some host has a gradient."""
        mine = [step.has_gradient(p) for p in parameters]
        options = _digest(step)
        said = self._exchange.agree((self._num_steps, options, mine))
        for host, (number, theirs, flags) in enumerate(said):
            if number != self._num_steps or len(flags) != len(mine):
                raise HostError(f"Host {host} makes another optimizer step than this one.")
            if theirs != options:
                raise ConfigurationError(
                    f"Host {host} steps {type(step.optimizer).__name__} with another learning rate "
                    "or other options than this one. What changes them must see the same on all "
                    "hosts: log what a scheduler monitors in a step, or with sync_dist=True."
                )
        flags = [any(some) for some in zip(*(flags for *_, flags in said), strict=True)]
        return {p for p, flag in zip(parameters, flags, strict=True) if flag}

    def _norm(self, sums: Sequence[Mapping[Tensor, Tensor]]) -> float:
        squares = [
            float(torch.linalg.vector_norm(piece, dtype=torch.float64)) ** 2
            for some in sums
            for piece in some.values()
        ]
        return float(sum(self._exchange.agree(sum(squares))) ** 0.5)

    def _divide(self, optimizer: Optimizer, members: Sequence[Sequence[Tensor]]) -> None:
        """Give parameters owners, and leave of their state what this host owns."""
        new = [p for some in members for p in some if not self._exchange.is_divided(p)]
        if not new:
            return
        whole = any(self._exchange.agree(self._whole[optimizer]))
        for some in members:
            self._exchange.divide(some, whole=whole)
        for parameter in new:
            state, piece = optimizer.state.pop(parameter, None), self._exchange.owned(parameter)
            if state and piece is not None:
                optimizer.state[parameter] = {
                    key: _shaped(piece.of(value).clone(), piece)
                    if isinstance(value, Tensor) and value.shape == parameter.shape
                    else value
                    for key, value in state.items()
                }

    # In a checkpoint -----------------------------------------------------------------------------

    def whole_state(
        self, optimizer: Optimizer, *, waits: bool
    ) -> tuple[dict[str, Any], Sequence[StatePart]]:
        """Return an optimizer's `state_dict()`: on host 0 the whole state, else none.

        Every host calls this. Nothing may be stepped meanwhile.

        Args:
            optimizer: Of which each host has a part.
            waits: Whether values may wait until they are written, so that no host needs memory for
                all of them: then tensors have none before `bring` was called for their parts.

        Returns:
            The state, and what waits: the same parts on all hosts.
        """
        tensors = [p for group in optimizer.param_groups for p in group["params"]]
        mine = [
            {key: _described(value) for key, value in optimizer.state.get(p, {}).items()}
            for p in tensors
        ]
        whole, parts = copy.copy(optimizer.state), list[StatePart]()
        whole.clear()
        for parameter, *of_hosts in zip(tensors, *self._exchange.agree(mine), strict=True):
            if not self._exchange.is_divided(parameter):
                of_hosts = of_hosts[:1]
            state: dict[str, Any] = {}
            for key in next(filter(None, of_hosts), {}):
                described = [of.get(key) for of in of_hosts]
                first = next(each for each in described if each is not None)
                state[key] = first
                if isinstance(first, _Shape):
                    parts.append(StatePart.of(optimizer, parameter, key, described))
                    state[key] = parts[-1].values
            if state and self._exchange.hosts.rank == 0:
                whole[parameter] = state
        for part in () if waits else parts:
            self.bring(part)
        form = _state_dict(optimizer, whole)
        written = {each.data_ptr() for state in form["state"].values() for each in _tensors(state)}
        if not waits:
            return form, ()
        if self._exchange.agree(written >= {part.values.data_ptr() for part in parts})[0]:
            return form, parts
        for part in parts:  # it is written in another form, which is made of the values
            self.bring(part)
        return _state_dict(optimizer, whole), ()

    def bring(self, part: StatePart) -> None:
        """Bring values of the optimizer's state to host 0. Every host calls this."""
        rank, values = self._exchange.hosts.rank, part.values.view(-1)
        mine = values[:0]
        if part.sizes[rank]:
            mine = part.optimizer.state[part.parameter][part.key].detach().reshape(-1)
        sizes = part.sizes if rank == 0 else [0] * len(part.sizes)
        taken = self._exchange.to_first(mine, sizes)
        if rank == 0:
            values.copy_(torch.cat(list(taken)))


@dataclass(frozen=True)
class _Shape:
    shape: torch.Size
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True, eq=False)
class StatePart:
    """Values of an optimizer's state that hosts have pieces of.

    Attributes:
        optimizer: Whose state it is.
        parameter: Of the optimizer.
        key: Of the state.
        sizes: Elements that host 0 gets of each host, by rank.
        values: Host 0's place for them; memory is taken when it is written to.
    """

    optimizer: Optimizer
    parameter: Tensor
    key: str
    sizes: Sequence[int]
    values: Tensor

    @classmethod
    def of(
        cls, optimizer: Optimizer, parameter: Tensor, key: str, described: Sequence[_Shape | None]
    ) -> StatePart:
        sizes = [0 if each is None else each.shape.numel() for each in described]
        known = [each for each in described if each is not None]
        shape = known[0].shape
        if sum(sizes) == parameter.numel():
            shape = parameter.shape
        else:  # the same on all that have it
            first = described.index(known[0])
            sizes = [size if host == first else 0 for host, size in enumerate(sizes)]
        values = torch.empty(shape, dtype=known[0].dtype)
        return cls(optimizer=optimizer, parameter=parameter, key=key, sizes=sizes, values=values)


def _described(value: Any) -> Any:
    is_large = isinstance(value, Tensor) and value.dim()
    return _Shape(value.shape, value.dtype) if is_large else value


def _state_dict(optimizer: Optimizer, state: Any) -> dict[str, Any]:
    mine, optimizer.state = optimizer.state, state
    try:
        return optimizer.state_dict()
    finally:
        optimizer.state = mine


def _tensors(state: Mapping[str, Any]) -> list[Tensor]:
    return [value for value in state.values() if isinstance(value, Tensor)]


def _values_of(pieces: Mapping[Tensor, Piece], parameter: Tensor) -> Tensor:
    return _shaped(pieces[parameter].of(parameter), pieces[parameter])


def _shaped(values: Tensor, piece: Piece) -> Tensor:
    return values.view(piece.tensor.shape) if piece.is_whole else values


def _digest(step: CapturedStep) -> str:
    """Return what shows whether the captured options are the same elsewhere."""
    options = [sorted((key, repr(value)) for key, value in some.items()) for some in step.options]
    return hashlib.sha256(repr(options).encode()).hexdigest()
