"""One optimizer step on several hosts: each steps the elements it owns, and all get the results.

```
backward pass           b2       b1       b0       others
gradients' thread          [sum b2] [sum b1] [sum b0][others]
updater's thread                 [step b2] [step b1] [step b0][others]
weights' thread                        [gather b2]      [others][b0][b1]
next forward pass                                          [others][b0][b1][b2]
```

What happens when: docs/nodes.md. Blocks go in one order on all hosts, the last one first. The
optimizer's state of a parameter is that of the piece that this host owns, one-dimensional.
"""

from __future__ import annotations

import copy
import hashlib
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from roundpipe_lightning.engine.exchange.exchange import Exchange, Given, Piece, Sums
from roundpipe_lightning.engine.store.host_store import HostStore
from roundpipe_lightning.engine.transfer.gradient_reduce import add_to_grad
from roundpipe_lightning.engine.update.partial_step import CapturedStep, is_elementwise
from roundpipe_lightning.errors import ConfigurationError, HostError

_SMALL = 1e-6  # what torch adds to the norm
_MOST_WAITING = 2  # units whose gradients wait to be sent, and that are added up ahead of the step
_POLL_SECONDS = 0.2


class NormClip:
    """Clips gradients to the limit, by the norm of all, which is known when all hosts' sums are."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._factor = 1.0

    def set_norm(self, norm: float) -> None:
        # In this order: what is no number stays none.
        self._factor = min(self._limit / (norm + _SMALL), 1.0)

    def __call__(self, gradient: Tensor) -> Tensor:
        return gradient.mul_(self._factor)


@dataclass(eq=False)
class JointStep:
    """A step that all hosts make together. Its gradients come in any order.

    Attributes:
        number_of: In which of the units a parameter is.
        submitted: Done when the step is submitted.
    """

    step: CapturedStep
    # trained parameters that are stepped together, by unit, as their gradients come
    units: Mapping[str, Sequence[Tensor]]
    _: KW_ONLY
    begins_early: bool  # whether they come during the backward pass
    waits: bool  # whether nothing may be stepped before the step is submitted
    adds_up: bool = False  # whether `.grad` has gradients of earlier batches, which belong to it
    read_whole: Collection[Tensor] = ()  # as of `Given`

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._num_waiting, self._has_failed = 0, False
        self._awaited: int | None = None  # the unit that is taken, or was last
        self._is_second = True  # a batch before may not be over
        self.names, self.members = tuple(self.units), tuple(self.units.values())
        self.number_of = {p: number for number, some in enumerate(self.members) for p in some}
        self._share, self.submitted = Future[float](), Future[None]()
        self._given = [Future[tuple[Mapping[Tensor, Tensor], bool]]() for _ in self.members]
        if not self.waits:
            self.submit()

    def submit(self) -> None:
        """Say that all is known: all gradients are given, and how to clip them."""
        _settle(self.submitted, None)

    def weigh(self, share: float | None) -> None:
        """As of `Updater`; gradients that are not multiplied by the share yet will be."""
        self._is_second = False
        if share is not None:
            _settle(self._share, share)

    def give(
        self, number: int, gradients: Mapping[Tensor, Tensor], *, is_weighed: bool = True
    ) -> None:
        with self._changed:
            self._num_waiting += 1
        _settle(self._given[number], (gradients, is_weighed))

    def await_room(self, is_given_up: Callable[[], bool]) -> None:
        """Wait while gradients of several units wait to be sent: they take memory.

        Not while others are waited for, which come behind these perhaps: also those of a batch
        before.
        """

        def has_room() -> bool:
            is_missing = self._awaited is not None and not self.is_given(self._awaited)
            is_free = is_missing or self._has_failed or self._is_second
            return is_free or self._num_waiting < _MOST_WAITING or is_given_up()

        with self._changed:
            while not self._changed.wait_for(has_room, _POLL_SECONDS):
                pass  # nobody says that a step is given up

    @property
    def is_weighed(self) -> bool:
        """Whether this host's share is known: others wait for its gradients."""
        return self._share.done()

    def is_given(self, number: int) -> bool:
        return self._given[number].done()

    def take(self, number: int) -> Given:
        """Wait for a unit's gradients, and let go of them; called once."""
        with self._changed:
            self._awaited = number
            self._changed.notify_all()
        gradients, is_weighed = self._given[number].result()
        nothing = Future[tuple[Mapping[Tensor, Tensor], bool]]()
        nothing.set_result(({}, True))
        self._given[number] = nothing  # `is_given` all the time, to who asks in another thread
        share = 1.0 if is_weighed else self._share.result()
        with self._changed:
            self._num_waiting -= 1
            self._changed.notify_all()
        if self.adds_up and not is_weighed:
            add_to_grad(gradients, share=share)
            gradients, share = grads_of(self.members[number]), 1.0
        return Given(
            gradients=gradients if share else {}, share=share or 1.0, read_whole=self.read_whole
        )

    def fail(self, error: BaseException) -> None:
        """Let go of everybody who waits for gradients that will not come."""
        with self._changed:
            self._has_failed = True
            self._changed.notify_all()
        waited_for: list[Future[Any]] = [self._share, self.submitted, *self._given]
        for each in waited_for:
            with suppress(InvalidStateError):  # it has come
                each.set_exception(error)


class HostsUpdate:
    """Makes steps together with other hosts, in the updater's thread."""

    def __init__(self, exchange: Exchange, store: HostStore) -> None:
        self._exchange, self._store = exchange, store
        self._ownership = exchange.ownership
        self._whole: dict[Optimizer, bool] = {}
        self._num_steps = 0

    def prepare(self, optimizer: Optimizer) -> None:
        """Find out what an optimizer may own; in the Trainer's thread, whose generator is used."""
        if optimizer not in self._whole:
            self._whole[optimizer] = not is_elementwise(optimizer)

    def give_up(self, joint: JointStep, error: BaseException) -> None:
        """Make nothing more of a step: others, who cannot know of the error, are not waited for."""
        self._exchange.hosts.close(error)
        joint.fail(HostError("The step was given up on this host."))

    def step(
        self,
        joint: JointStep,
        *,
        num_early: int,
        run: Callable[[int, Sequence[Tensor]], None],
        ended: Callable[[int, Mapping[Tensor, slice]], None],
    ) -> None:
        """Make a step; every host calls this for the same step.

        Args:
            num_early: New values of so many units are sent as soon as they are there, those of the
                others in the opposite order.
            run: Makes the step of a unit's parameters; given its number, too.
            ended: Called in another thread, when all hosts' values of a unit are there, with its
                number and the parameters of which copies have come in the place of values, with the
                elements that this host owns.

        Raises:
            ConfigurationError: The hosts' steps differ.
            HostError: Another host is lost.
        """
        exchange, step = self._exchange, joint.step
        self._divide(step.optimizer, joint.members)
        self._num_steps += 1
        forward = list(reversed(range(len(joint.members))))
        order = forward[::-1] if self._agree(joint) else forward
        sums, left = dict[int, Future[Sums]](), iter(order)

        def add_up(num: int) -> None:
            for number in islice(left, num):
                given = partial(joint.take, number)
                sums[number] = exchange.sum(joint.names[number], joint.members[number], given)

        # Sums take memory until they are stepped.
        add_up(_MOST_WAITING if joint.submitted.done() and step.clip is None else len(order))
        joint.submitted.result()
        if step.clip is not None:
            order = forward
        if isinstance(step.clip, NormClip):
            step.clip.set_norm(self._norm([each.result().owned for each in sums.values()]))
        later, gathered = [], list[Future[None]]()
        for number in order:
            new = self._step_unit(joint, sums.pop(number).result(), partial(run, number))
            add_up(1)
            end = partial(ended, number, self._copied(new))
            begin = partial(exchange.gather, joint.names[number], new, end)
            if order is forward or number < num_early:
                gathered.append(begin())
            else:
                later.append(begin)
        gathered += [begin() for begin in reversed(later)]
        for each in gathered:
            each.result()

    def _step_unit(
        self, joint: JointStep, sums: Sums, run: Callable[[Sequence[Tensor]], None]
    ) -> Mapping[Tensor, Tensor]:
        """Step what this host owns of a unit; return what all hosts need of it, by parameter."""
        owned = {p: self._owned(p) for p in sums.present}
        pieces = {p: piece for p, piece in owned.items() if piece is not None}
        joint.step.give({p: _shaped(sums.owned[p], piece) for p, piece in pieces.items()})
        joint.step.values_of = partial(_values_of, pieces)
        run(tuple(pieces))
        copies = self._store.copies
        needed: dict[Tensor, Tensor] = {p: p for p in sums.present}
        for parameter in sums.present:
            if copies is not None and parameter in copies and parameter not in sums.read_whole:
                needed[parameter] = copies.of(parameter)
                if parameter in pieces:
                    piece = pieces[parameter]
                    piece.of(needed[parameter]).copy_(piece.of(parameter))
        return needed

    def _owned(self, parameter: Tensor) -> Piece | None:
        pieces = self._ownership.pieces(parameter)
        return pieces[self._exchange.hosts.rank] if pieces else None

    def _copied(self, new: Mapping[Tensor, Tensor]) -> Mapping[Tensor, slice]:
        pieces = {p: self._owned(p) for p, values in new.items() if values is not p}
        return {p: each.elements if each else slice(0, 0) for p, each in pieces.items()}

    def make_whole(self, units: Mapping[str, Sequence[Tensor]]) -> None:
        """Bring all values that this host has a part of here; every host calls this.

        All parameters are given, by the names of units, in one order on all hosts.
        """
        in_part = {n: [p for p in some if p in self._store.in_part] for n, some in units.items()}
        gathered = [
            self._exchange.gather(name, {p: p for p in some}, lambda: None)
            for name, some in in_part.items()
            if some
        ]
        for each in gathered:
            each.result()
        self._store.in_part.clear()

    def round_rest(self) -> bool:
        """Take copies for what others own, after an error; return whether there was any."""
        copies, in_part = self._store.copies, {**self._store.in_part}
        for parameter, mine in in_part.items():
            assert copies is not None, "there are copies of what is here in part"
            values, rounded = parameter.detach().view(-1), copies.of(parameter).view(-1)
            values[: mine.start].copy_(rounded[: mine.start])
            values[mine.stop :].copy_(rounded[mine.stop :])
        self._store.in_part.clear()
        return bool(in_part)

    def _agree(self, joint: JointStep) -> bool:
        """Compare what hosts are about to do; return whether gradients come early on all."""
        groups = joint.step.options
        options = [sorted((key, repr(value)) for key, value in group.items()) for group in groups]
        mine = hashlib.sha256(repr(options).encode()).hexdigest()
        sizes = [[p.numel() for p in some] for some in joint.members]
        said = self._exchange.agree((self._num_steps, mine, sizes, joint.begins_early))
        for host, (number, theirs, of_units, _) in enumerate(said):
            if number != self._num_steps or of_units != sizes:
                raise HostError(f"Host {host} makes another optimizer step than this one.")
            if theirs != mine:
                raise ConfigurationError(
                    f"Host {host} steps {type(joint.step.optimizer).__name__} with another "
                    "learning rate or other options than this one. What changes them must see the "
                    "same on all hosts: log what a scheduler monitors in a step, or with "
                    "sync_dist=True."
                )
        return all(begins_early for *_, begins_early in said)

    def _norm(self, sums: Sequence[Mapping[Tensor, Tensor]]) -> float:
        squares = [
            float(torch.linalg.vector_norm(piece, dtype=torch.float64)) ** 2
            for some in sums
            for piece in some.values()
        ]
        return float(sum(self._exchange.agree(sum(squares))) ** 0.5)

    def _divide(self, optimizer: Optimizer, members: Sequence[Sequence[Tensor]]) -> None:
        """Give parameters owners, and leave of their state what this host owns."""
        new = [p for some in members for p in some if p not in self._ownership]
        if not new:
            return
        whole = any(self._exchange.agree(self._whole[optimizer]))
        for some in members:
            self._ownership.divide(some, whole=whole)
        for parameter in new:
            state, piece = optimizer.state.pop(parameter, None), self._owned(parameter)
            if state and piece is not None:
                optimizer.state[parameter] = {
                    key: _shaped(piece.of(value).clone(), piece)
                    if isinstance(value, Tensor) and value.shape == parameter.shape
                    else value
                    for key, value in state.items()
                }

    def late_values(self, units: Sequence[Sequence[Tensor]]) -> list[LatePart]:
        """Return the parameters that are here in part, as parts that come late: one per memory."""
        found: dict[int, list[Tensor]] = {}
        for parameter in (p for unit in units for p in unit if p in self._store.in_part):
            key = parameter.untyped_storage()._cdata  # noqa: SLF001 - torch's key for a storage
            found.setdefault(key, []).append(parameter)
        return [
            LatePart(
                storage=some[0].untyped_storage(),
                bring=partial(self._bring_values, some),
                release=partial(self._store.release_rest, some),
            )
            for some in found.values()
        ]

    def owned_values(self) -> list[OwnedPart]:
        """Return what this host owns of all parameters that are divided."""
        found = []
        for parameter in self._ownership:
            piece = self._owned(parameter) or Piece(parameter, 0, 0)
            found.append(OwnedPart(parameter, piece.of(parameter), piece.start))
        return found

    def whole_state(
        self, optimizer: Optimizer, *, comes_late: bool
    ) -> tuple[dict[str, Any], Sequence[LatePart]]:
        """Return an optimizer's `state_dict()`: on host 0 the whole state. Every host calls this.

        Nothing may be stepped meanwhile.

        Args:
            comes_late: Whether values may wait until they are written, so that no host needs memory
                for all of them; the same on all hosts.

        Returns:
            The state, and what waits: the same parts on all hosts. What waits has its place in the
            state of every host.
        """
        rank = self._exchange.hosts.rank
        tensors = [p for group in optimizer.param_groups for p in group["params"]]
        here = [
            {key: _described(value) for key, value in optimizer.state.get(p, {}).items()}
            for p in tensors
        ]
        whole, parts = copy.copy(optimizer.state), list[LatePart]()
        whole.clear()
        for parameter, *of_hosts in zip(tensors, *self._exchange.agree(here), strict=True):
            if parameter not in self._ownership:
                of_hosts[1:] = [{}] * (len(of_hosts) - 1)
            state: dict[str, Any] = {}
            for key in next(filter(None, of_hosts), {}):
                described = [of.get(key) for of in of_hosts]
                state[key] = next(each for each in described if each is not None)
                if isinstance(state[key], _Shape):
                    values, sizes = _place_for(parameter, described)
                    held = optimizer.state.get(parameter, {}).get(key)
                    mine = values.view(-1)[:0]
                    if held is not None and sizes[rank]:
                        mine = held.detach().reshape(-1)
                    parts.append(
                        LatePart(
                            storage=values.untyped_storage(),
                            bring=partial(self._bring_state, mine, sizes, values),
                            release=partial(values.untyped_storage().resize_, 0),
                            owned=OwnedPart(values, mine, sum(sizes[:rank])),
                        )
                    )
                    state[key] = values
            if state:
                whole[parameter] = state
        form = _state_dict(optimizer, whole) if comes_late else {"state": {}}
        written = {each.data_ptr() for state in form["state"].values() for each in _tensors(state)}
        places = {part.storage.data_ptr() for part in parts}
        if comes_late and self._exchange.agree(written >= places)[0]:
            return form, parts
        for part in parts:  # perhaps it is written in another form, which is made of the values
            part.bring()
        return (_state_dict(optimizer, whole) if rank == 0 else {"state": {}}), ()

    def _bring_state(self, mine: Tensor, sizes: Sequence[int], values: Tensor) -> None:
        is_first = self._exchange.hosts.rank == 0
        taken = self._exchange.to_first(mine, sizes if is_first else [0] * len(sizes))
        if is_first:
            values.view(-1).copy_(torch.cat(list(taken)))

    def _bring_values(self, parameters: Sequence[Tensor]) -> None:
        """Bring parameters to host 0, one at a time."""
        rank = self._exchange.hosts.rank
        for parameter in parameters:
            pieces = [None, *self._ownership.pieces(parameter)[1:]]
            values = parameter.detach()
            places = [p.of(values) if p else values.view(-1)[:0] for p in pieces]
            sizes = [len(place) if rank == 0 else 0 for place in places]
            taken = self._exchange.to_first(places[rank], sizes)
            for place, new in zip(places if rank == 0 else (), taken, strict=False):
                place.copy_(new)


@dataclass(frozen=True, eq=False)
class OwnedPart:
    """What this host has of a tensor that is divided."""

    whole: Tensor  # the tensor, or its place in a checkpoint
    values: Tensor  # elements of it, one-dimensional; perhaps none
    start: int  # the number of the first one in the flattened tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class LatePart:
    """A part of a checkpoint that comes to host 0 when it is to be written."""

    storage: torch.UntypedStorage  # host 0's place for it
    bring: Callable[[], None]  # every host calls this, for the same part
    release: Callable[[], object]  # lets host 0's memory go
    owned: OwnedPart | None = None  # what this host has of it, where it is not a parameter


@dataclass(frozen=True)
class _Shape:
    shape: torch.Size
    dtype: torch.dtype


def _place_for(
    parameter: Tensor, described: Sequence[_Shape | None]
) -> tuple[Tensor, Sequence[int]]:
    """Return an empty tensor for values that hosts have pieces of, and how many each gives."""
    sizes = [0 if each is None else each.shape.numel() for each in described]
    first = next(each for each in described if each is not None)
    shape = first.shape
    if sum(sizes) == parameter.numel():
        shape = parameter.shape
    else:  # the same on all that have it
        giver = described.index(first)
        sizes = [size if host == giver else 0 for host, size in enumerate(sizes)]
    return torch.empty(shape, dtype=first.dtype), sizes


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


def grads_of(parameters: Iterable[Tensor]) -> dict[Tensor, Tensor]:
    found = {p: p.grad for p in parameters if p.grad is not None}
    for parameter in found:
        parameter.grad = None
    return found


def _settle(future: Future[Any], value: Any) -> None:
    """Give a result, unless an error came first, which whoever waits is told."""
    with suppress(InvalidStateError):
        future.set_result(value)


def _values_of(pieces: Mapping[Tensor, Piece], parameter: Tensor) -> Tensor:
    return _shaped(pieces[parameter].of(parameter), pieces[parameter])


def _shaped(values: Tensor, piece: Piece) -> Tensor:
    return values.view(piece.tensor.shape) if piece.is_whole else values
