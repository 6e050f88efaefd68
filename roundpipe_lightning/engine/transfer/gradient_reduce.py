"""Sums of gradients on the host, in the order of the microbatches.

Step W7 of docs/design.md; docs/engine.md (exactness) says why in this order.

    arrives   m=0   m=2 (waits)   m=1          sum  ((g0 + g1) + g2)

Sums are of the parameter's `grad_dtype`.

A tied embedding gets two gradients from a microbatch: that of the LM head (h) early, that of the
embedding (e) when the backward pass ends. The plain loop adds (h0 + e0) + (h1 + e1). Whole LM-head
gradients of all microbatches would wait. But the embedding's gradient has few rows, known
beforehand, so only those rows of h wait, and the others are added at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from roundpipe_lightning.engine.device.threads import Countdown
from roundpipe_lightning.engine.store.block_layout import FlatLayout, gradient_dtype
from roundpipe_lightning.engine.store.host_store import TakeGradients

Gradients: TypeAlias = dict[nn.Parameter, Tensor]
Rows: TypeAlias = dict[nn.Parameter, Tensor]

AddShared: TypeAlias = Callable[..., None]  # takes gradients, and perhaps rows

T = TypeVar("T", bound=Tensor)


def fold(sums: dict[T, Tensor], contribution: dict[T, Tensor]) -> None:
    """Add a contribution to running sums, in place; new entries are taken over, not copied."""
    if not sums:  # all at once: a tensor's hash is expensive
        sums.update(contribution)
        return
    old, new = [], []
    for parameter, gradient in contribution.items():
        if parameter not in sums:
            sums[parameter] = gradient
        elif sums[parameter].is_sparse:  # in this order PyTorch adds any two layouts
            sums[parameter] = gradient + sums[parameter]
        elif gradient.is_sparse and gradient.sparse_dim() == 1:
            # Not `add_`, which would copy the rows together first.
            rows, values = gradient._indices()[0], gradient._values()  # noqa: SLF001
            sums[parameter].index_add_(0, rows, values)
        elif gradient.is_sparse:
            sums[parameter] = sums[parameter] + gradient
        else:
            old.append(sums[parameter])
            new.append(gradient)
    if old:
        torch._foreach_add_(old, new)


def add_to_grad(gradients: Mapping[Any, Tensor], *, share: float) -> None:
    """Add gradients, which are multiplied by a share, to parameters' `.grad`; they are taken over.

    A share of 0 adds nothing: gradients of a mean over nothing are not numbers.
    """
    if not share:
        return
    with torch.no_grad():
        for parameter, gradient in gradients.items():
            scaled = gradient if share == 1 else gradient.mul_(share)
            sums = {} if parameter.grad is None else {parameter: parameter.grad}
            fold(sums, {parameter: scaled})
            parameter.grad = sums[parameter]


@dataclass(eq=False)
class FlatGradients:
    """Gradients in one flat host buffer: they are added up without looking at each."""

    flat: Tensor
    _: KW_ONLY
    layout: FlatLayout  # what lies where
    present: tuple[int, ...]  # which of the layout's parameters have a gradient

    def take(self, wanted: Collection[nn.Parameter]) -> Gradients:
        """Return copies of the gradients of some parameters, and leave these out from now on."""
        taken = {p: g.clone() for p, g in self.expanded().items() if p in wanted}
        known = self.layout.parameters
        self.present = tuple(index for index in self.present if known[index] not in taken)
        return taken

    def expanded(self) -> Gradients:
        layout = self.layout
        return {
            layout.parameters[index]: layout.places[index].within(self.flat, offset=0)
            for index in self.present
        }

    def add(self, other: FlatGradients) -> bool:
        """Add others, if they are of the same parameters; return whether they were."""
        if self.layout is not other.layout or self.present != other.present:
            return False
        for dtype, start, stop in self.layout.spans:
            self.flat[start:stop].view(dtype).add_(other.flat[start:stop].view(dtype))
        return True


class GradientAccumulator:
    """Sums of contributions, in the order of their numbers, whichever comes first."""

    def __init__(self, num: int) -> None:
        self._lock = threading.Lock()
        self._missing = list(range(num))
        self._held: dict[int, tuple[Sequence[int], Gradients | FlatGradients]] = {}
        self._sums: Gradients = {}
        self._flat: FlatGradients | None = None  # sums, as long as all contributions are such

    def add(self, numbers: Sequence[int], gradients: Gradients | FlatGradients) -> bool:
        """Add host tensors, which are taken over; return whether these were the last missing ones.

        Several numbers, ascending, contribute together where a device sums over a round.
        """
        with self._lock:
            self._held[numbers[0]] = (numbers, gradients)
            while self._missing and self._missing[0] in self._held:
                done, contribution = self._held.pop(self._missing[0])
                self._fold(contribution)
                self._missing = [number for number in self._missing if number not in done]
            return not self._missing

    def _fold(self, contribution: Gradients | FlatGradients) -> None:
        if isinstance(contribution, FlatGradients):
            if self._flat is None and not self._sums:
                self._flat = contribution
                return
            if self._flat is not None and self._flat.add(contribution):
                return
            contribution = contribution.expanded()
        if contribution:
            fold(self.sums, contribution)

    @property
    def sums(self) -> Gradients:
        if self._flat is not None:
            self._sums, self._flat = self._flat.expanded(), None
        return self._sums


@dataclass(eq=False)
class _Microbatch:
    """What a microbatch has contributed to sums over several uses."""

    num_reserved: int = 0  # contributions that will come
    num_added: int = 0  # those added, in order
    # those that came before their turn
    arrived: dict[int, tuple[Gradients, Rows]] = field(default_factory=dict)
    # of the microbatch alone, not yet taken into the sums over all
    sums: Gradients = field(default_factory=dict)
    left: Rows = field(default_factory=dict)  # rows that later contributions may have, where known
    # what waits, of parameters that have been taken into the sums over all: rows, and their values
    held: dict[nn.Parameter, tuple[Tensor, Tensor]] = field(default_factory=dict)
    is_closed: bool = False

    @property
    def is_complete(self) -> bool:
        return self.is_closed and self.num_added == self.num_reserved


class SharedGradients:
    """Sums for parameters with several uses: per microbatch first, then over the microbatches.

    Both in order, whichever contribution comes first.
    """

    def __init__(self, num_microbatches: int) -> None:
        self.sums: Gradients = {}
        self._lock = threading.Lock()
        self._microbatches = tuple(_Microbatch() for _ in range(num_microbatches))
        self._next: dict[nn.Parameter, int] = {}  # microbatch whose turn it is to be taken in
        self._num_ended = 0

    def reserve(self, microbatch: int) -> int:
        """Return the number of a contribution that is to come."""
        with self._lock:
            one = self._microbatches[microbatch]
            one.num_reserved += 1
            return one.num_reserved - 1

    def add(
        self, microbatch: int, number: int, gradients: Gradients, left: Rows | None = None
    ) -> bool:
        """Add a contribution; return whether it was the last missing one.

        Args:
            number: From `reserve`.
            gradients: Host tensors, which are taken over.
            left: The only rows, on the host, that later contributions of this microbatch may have.
                Empty: nothing comes. A parameter that is not named may get anything.
        """
        with self._lock:
            one = self._microbatches[microbatch]
            one.arrived[number] = (gradients, left or {})
            while one.num_added in one.arrived:
                contribution, rows = one.arrived.pop(one.num_added)
                one.num_added += 1
                for parameter in contribution.keys() & one.held.keys():
                    held, values = one.held[parameter]
                    values += contribution.pop(parameter)[held]
                known = {p for p in contribution if self._next.get(p, 0) > microbatch}
                assert not known, "more came than was left"
                fold(one.sums, contribution)
                one.left.update(rows)
            return self._advance(one)

    def close(self, microbatch: int) -> bool:
        """Say that a microbatch reserves nothing more; return whether nothing is missing."""
        with self._lock:
            one = self._microbatches[microbatch]
            one.is_closed = True
            return self._advance(one)

    def _advance(self, changed: _Microbatch) -> bool:
        """Take in what has its turn, beginning with one microbatch; return whether that was all."""
        for parameter in changed.sums:
            self._next.setdefault(parameter, 0)
        for parameter in list(self._next if changed.is_complete else changed.sums):
            self._take_in(parameter)
        before = self._num_ended
        while self._num_ended < len(self._microbatches):
            one = self._microbatches[self._num_ended]
            if not one.is_complete:
                break
            self._num_ended += 1
            for parameter, (held, values) in one.held.items():
                self.sums[parameter][held] += values
            one.held.clear()
        return before < self._num_ended == len(self._microbatches)

    def _take_in(self, parameter: nn.Parameter) -> None:
        while (number := self._next[parameter]) < len(self._microbatches):
            one = self._microbatches[number]
            gradient = one.sums.get(parameter)
            if not one.is_complete and (gradient is None or parameter not in one.left):
                return
            self._next[parameter] += 1
            if gradient is None:
                continue
            del one.sums[parameter]
            # rows to which something is to be added before this microbatch's
            waiting = [m.held[parameter][0] for m in self._microbatches if parameter in m.held]
            waiting += [] if one.is_complete else [one.left[parameter]]
            if not any(map(len, waiting)):
                fold(self.sums, {parameter: gradient})
                continue
            rows = torch.cat(waiting).unique()
            gradient = gradient.to_dense() if gradient.is_sparse else gradient
            one.held[parameter] = rows, gradient[rows]
            if parameter not in self.sums:
                self.sums[parameter] = gradient
                gradient[rows] = 0
                continue
            before = self.sums[parameter][rows]
            self.sums[parameter] += gradient
            self.sums[parameter][rows] = before


@dataclass(kw_only=True, eq=False)
class GradientReducer:
    """All gradients of one step, on the host.

    Parameters that only one stage uses are summed over the microbatches. Those with several uses
    are summed per microbatch first.
    """

    num_microbatches: int
    num_stages: int  # number of FUSED and BACKWARD stages
    # given the sums of a stage's parameters that only this stage uses, as soon as they are there,
    # in the thread that brought the last part; returns those it wants to keep, which `sums` leaves
    # out
    take: TakeGradients | None = None
    shared: Iterable[nn.Parameter] = ()  # parameters that are known to have uses elsewhere

    def __post_init__(self) -> None:
        self._taken: set[nn.Parameter] = set()
        self._elsewhere = set(self.shared)
        self._stages = tuple(
            GradientAccumulator(self.num_microbatches) for _ in range(self.num_stages)
        )
        self._shared = SharedGradients(self.num_microbatches)
        self._whole: dict[nn.Parameter, int] = {}  # which microbatch brings all rows first
        self._open = Countdown(self.num_stages + 1)
        self._lock = threading.Lock()

    def add_stage(
        self, stage: int, microbatches: Sequence[int], gradients: Gradients | FlatGradients
    ) -> None:
        """Add gradients of parameters that only this stage of the backward partition uses.

        They are of some microbatches, ascending, and host tensors, which are taken over.
        """
        if not isinstance(gradients, FlatGradients):  # those have it already
            gradients = in_their_dtype(gradients)
        accumulator = self._stages[stage]
        if not accumulator.add(microbatches, gradients):
            return
        if self.take is not None:
            with self._lock:
                alone = {p: g for p, g in accumulator.sums.items() if p not in self._elsewhere}
            for parameter in self.take(alone, self._elsewhere) if alone else ():
                self._taken.add(parameter)
                del accumulator.sums[parameter]
        self._open.count()

    def can_add_rows(self, parameter: nn.Parameter, microbatch: int) -> bool:
        """Return whether rows can be added as a microbatch's gradient of a parameter.

        A whole one was reserved before, in the order of the sums. Else whoever asks sends one.
        """
        with self._lock:
            first = self._whole.get(parameter)
            self._whole.setdefault(parameter, microbatch)
        return first is not None and first <= microbatch

    def await_all(self, seconds: float) -> bool:
        return self._open.wait(seconds)

    def note_elsewhere(self, parameters: Iterable[nn.Parameter]) -> None:
        """Say that a microbatch has used parameters outside their stage.

        Before it adds gradients of that stage: so nothing comes after these that belongs to them.
        """
        if self.take is not None:
            with self._lock:
                self._elsewhere.update(parameters)

    def reserve_shared(self, microbatch: int) -> AddShared:
        """Reserve a place in the order of such gradients; return what takes them, in any thread.

        It is called with the gradients, and perhaps with what `SharedGradients.add` calls `left`.
        """
        number = self._shared.reserve(microbatch)

        def add(gradients: Gradients, left: Rows | None = None) -> None:
            assert self._taken.isdisjoint(gradients), "who has uses elsewhere is not taken"
            if self._shared.add(microbatch, number, in_their_dtype(gradients), left):
                self._open.count()

        return add

    def close_microbatch(self, microbatch: int) -> None:
        if self._shared.close(microbatch):
            self._open.count()

    def sums(self) -> Gradients:
        """Return the sums, after all microbatches are closed, and let go of them. Call it once."""
        total: Gradients = {}
        for sums in (*(stage.sums for stage in self._stages), self._shared.sums):
            fold(total, sums)
            sums.clear()  # a step may be held for longer than its gradients
        return total


def in_their_dtype(gradients: Gradients) -> Gradients:
    for parameter, gradient in gradients.items():
        dtype = gradient_dtype(parameter)
        if gradient.dtype is not dtype:
            gradients[parameter] = gradient.to(dtype)
    return gradients
