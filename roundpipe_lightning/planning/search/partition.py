"""Cuts a chain of blocks into stages, and searches for the cut with the shortest step.

The search begins with even partitions and varies the best ones: it moves blocks to other stages or
to new ones, changes the fused stage, or takes the other half of another partition. `Evaluator`
measures all variants at once. First stages stand in the order of their sizes (docs/planning.md says
why); then in any order, which matters where blocks differ. Same arguments, same result: the random
numbers are seeded.

Cost: `Effort.num_actions` bounds the number of simulated actions, about 3e7 per second and core.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import gt
from random import Random

import numpy as np
import numpy.typing as npt

from roundpipe_lightning.planning.cost.costs import Evaluator, PartitionTable
from roundpipe_lightning.planning.model.profile import ModelProfile
from roundpipe_lightning.planning.schedule.stages import (
    Partition,
    call_lengths,
    cuts_before,
    reversed_cuts,
)


@dataclass(frozen=True, kw_only=True)
class StageLimits:
    """Most blocks that a stage may have, for memory's or the user's sake."""

    forward: int
    backward: int
    fused: int

    @classmethod
    def none(cls, num_blocks: int) -> StageLimits:
        most = max(num_blocks, 1)
        return cls(forward=most, backward=most, fused=num_blocks)

    def within(self, other: StageLimits) -> StageLimits:
        return StageLimits(
            forward=min(self.forward, other.forward),
            backward=min(self.backward, other.backward),
            fused=min(self.fused, other.fused),
        )


def largest_cuts(num_blocks: int, *, most: int, cuts: Sequence[int]) -> tuple[int, ...]:
    """Return the fewest stages of at most so many blocks, none of which spans a cut."""
    found: list[int] = []
    for length in call_lengths(num_blocks, cuts):
        found += [most] * (length // most) + [length % most] * (length % most > 0)
    return tuple(found)


def balanced_cuts(
    weights: Sequence[float], *, num_parts: int, cuts: Sequence[int] = ()
) -> tuple[int, ...]:
    """Return the sizes of contiguous parts that are about equally heavy, none of them empty.

    First each part ends where the weights up to it come nearest to its share of them all. Then
    there are as few parts as can be without a heavier one.

    Args:
        num_parts: How many parts there are at most, besides those that the cuts make.
        cuts: Ascending indices i such that weights i-1 and i are in different parts.
    """
    sums = np.cumsum([0.0, *(weights if sum(weights) else [1.0] * len(weights))])
    shares = sums[-1] * np.arange(1, num_parts) / num_parts
    middles = (sums[1:] + sums[:-1]) / 2
    ends = [0, *sorted({*np.searchsorted(middles, shares).tolist(), *cuts, len(weights)} - {0})]
    heaviest = max(np.diff(sums[ends]), default=0.0) * (1 + 1e-9)
    sizes: list[int] = []
    start = 0
    for stop in range(1, len(weights) + 1):
        is_end = stop == len(weights) or stop in cuts
        if is_end or sums[stop + 1] - sums[start] > heaviest:
            sizes.append(stop - start)
            start = stop
    return tuple(sizes)


def even_cuts(num_blocks: int, *, most: int, cuts: Sequence[int]) -> Sequence[tuple[int, ...]]:
    """Cuts into stages of about as many blocks each, the largest at most `most`."""
    if num_blocks == 0:
        return [()]
    counts = range(_fewest(call_lengths(num_blocks, cuts), most), num_blocks + 1)
    step = max(1, len(counts) // 12)
    even = (
        balanced_cuts([1.0] * num_blocks, num_parts=count, cuts=cuts) for count in counts[::step]
    )
    return list(dict.fromkeys(even))


@functools.lru_cache(maxsize=256)  # cases of the same model share them
def even_partitions(
    profile: ModelProfile, *, limits: StageLimits, count: int = 12, plain: bool = False
) -> tuple[Partition, ...]:
    """Return partitions into any reasonable number of stages of about equal duration.

    `count` is about how many numbers of BACKWARD stages there are to choose from.
    """
    found = [*_even_plain_partitions(profile, limits=limits, count=count)] if plain else []
    last_call = sum(call_lengths(profile.num_blocks, profile.cuts)[-1:])
    most_fused = min(limits.fused, last_call)
    if plain:
        most_fused = min(most_fused, limits.forward)
    for fused in _spread(0, most_fused, count=min(count, 4)):
        blocks = profile.blocks[: profile.num_blocks - fused]
        if not blocks:
            found.append(_turning((), (fused,), plain=plain))
            continue
        forward_seconds = [block.forward_seconds for block in blocks]
        backward_seconds = [
            block.recompute_seconds + block.backward_seconds for block in reversed(blocks)
        ]
        share = sum(forward_seconds) / (sum(backward_seconds) or 1.0)
        cuts = cuts_before(len(blocks), profile.cuts)
        cuts_back = reversed_cuts(len(blocks), cuts)
        calls = call_lengths(len(blocks), cuts)
        fewest = _fewest(calls, limits.forward)
        for num_backward in _spread(_fewest(calls, limits.backward), len(blocks), count=count):
            backward = _balanced(backward_seconds, num_backward, limits.backward, cuts=cuts_back)
            for extra in (0, 1, 3):
                num_forward = min(len(blocks), max(fewest, 1, round(num_backward * share) + extra))
                forward = _balanced(forward_seconds, num_forward, limits.forward, cuts=cuts)
                found.append(_turning(forward, (fused, *backward), plain=plain))
    return tuple(dict.fromkeys(found))


def _turning(forward: tuple[int, ...], backward: tuple[int, ...], *, plain: bool) -> Partition:
    """Return the partition that turns round in `backward[0]` without a recompute."""
    if plain:
        forward = (*forward, backward[0])
    return Partition(forward=forward, backward=backward, plain=plain, keeps_graphs=plain)


def _even_plain_partitions(
    profile: ModelProfile, *, limits: StageLimits, count: int
) -> tuple[Partition, ...]:
    """Balance both passes with the tail segment as one unit more."""
    found, num_blocks, cuts = [], profile.num_blocks, profile.cuts
    forward_seconds = [unit.forward_seconds for unit in profile.units]
    backward_seconds = [unit.recompute_seconds + unit.backward_seconds for unit in profile.units]
    share = sum(forward_seconds) / (sum(backward_seconds) or 1.0)
    calls, most = call_lengths(num_blocks, cuts), max(num_blocks, 1)
    fewest = _fewest(calls, limits.forward)
    for num_backward in _spread(_fewest(calls, limits.backward), most, count=2 * count):
        parts = balanced_cuts(backward_seconds, num_parts=max(num_backward, 1), cuts=cuts)
        first = min(parts[-1] - 1, limits.fused)
        rest = num_blocks - first
        others = _balanced(
            backward_seconds[:rest][::-1],
            max(num_backward - 1, _fewest(call_lengths(rest, cuts), limits.backward)),
            limits.backward,
            cuts=reversed_cuts(rest, cuts),
        )
        for extra in (0, 1, 3):
            num_forward = min(most, max(fewest, 1, round(num_backward * share) + extra))
            *ahead, last = balanced_cuts(forward_seconds, num_parts=num_forward, cuts=cuts)
            forward = (*ahead, last - 1)
            if max(forward) > limits.forward:
                forward = balanced_cuts([1.0] * num_blocks, num_parts=num_forward, cuts=cuts)
            found.append(Partition(forward=forward, backward=(first, *others), plain=True))
    return tuple(dict.fromkeys(found))


def _fewest(calls: Sequence[int], limit: int) -> int:
    return sum(-(-call // limit) for call in calls)


def _balanced(
    weights: Sequence[float], num_parts: int, limit: int, *, cuts: Sequence[int]
) -> tuple[int, ...]:
    """Balance by weight; by number of blocks where that would break the limit."""
    counts = balanced_cuts(weights, num_parts=num_parts, cuts=cuts)
    if max(counts, default=0) > limit:
        counts = balanced_cuts([1.0] * len(weights), num_parts=num_parts, cuts=cuts)
    return counts


def _spread(first: int, last: int, *, count: int) -> list[int]:
    """Return about `count` whole numbers from `first` to `last`, evenly spaced, both included."""
    step = max(1, -(-(last - first) // count))
    return sorted({*range(first, last, step), last})


Fits = Callable[[PartitionTable], npt.NDArray[np.bool_]]
"""Mask of the partitions of a table that fit the devices' memory."""

_CHILDREN = 256  # partitions of a generation, at most
_CHILDREN_OF_BLOCK = 16  # and for each block: few blocks have few partitions
_PARENTS = 48  # partitions that survive one
_PATIENCE = 30  # generations without a better partition after which the search ends


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Limits of a search.

    Attributes:
        num_actions: Actions to simulate, at most, in all generations together.
        num_generations: Generations, at most; 0: no search.
        num_even: Numbers of stages to choose from among even partitions, about.
        num_verified_actions: Actions of the simulations, together, that even partitions get which
            might be better than what was found.
    """

    num_actions: int = 30_000_000
    num_generations: int = 200
    num_even: int = 12
    num_verified_actions: int = 20_000


QUICK = Effort(num_generations=0, num_even=2, num_verified_actions=0)
"""A few even partitions alone."""


@dataclass(eq=False, kw_only=True)
class PartitionSearch:
    """Partitions of one model with their estimated steps, of which the best are varied."""

    evaluator: Evaluator
    limits: StageLimits
    effort: Effort
    fits: Fits | None = None
    seconds: dict[Partition, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._random = Random(1)

    def best(self, even: Sequence[Partition], *, count: int = 8) -> tuple[Partition, ...]:
        """Return the best partitions found from some to begin with, the best first."""
        self._add(even)
        if num_blocks := self.evaluator.profile.num_blocks:
            children = min(_CHILDREN, _CHILDREN_OF_BLOCK * num_blocks)
            stages = sum(partition.num_stages for partition in even) // len(even)
            generation = _CHILDREN * stages * sum(self.evaluator.rounds)
            most = min(max(4, self.effort.num_actions // generation), self.effort.num_generations)
            # Unequal workers' stages are as long as the workers are fast, and in no order.
            in_order = not (self.evaluator.speeds or self.evaluator.profile.cuts)
            for ordered in (True, False) if in_order else (False,):
                self._evolve(most // 2, children, in_order=ordered)
        return self._fitting(count)

    def near(self, partition: Partition, *, count: int = 64) -> tuple[Partition, ...]:
        """Return partitions that differ little from one, the shortest estimates first."""
        self.seconds.clear()
        self._add_children([partition], count, in_order=False)
        self.seconds.pop(partition, None)
        return self._fitting(count)

    def _add(self, partitions: Sequence[Partition]) -> None:
        new = [each for each in dict.fromkeys(partitions) if each not in self.seconds]
        if not new:
            return
        table = PartitionTable.of(new)
        seconds = self.evaluator.seconds(table)
        if self.fits is not None:
            seconds = np.where(self.fits(table), seconds, np.inf)
        self.seconds.update(zip(new, seconds.tolist(), strict=True))

    def _add_children(self, parents: Sequence[Partition], count: int, *, in_order: bool) -> None:
        children = (self._child(parents, in_order=in_order) for _ in range(count))
        self._add([child for child in children if self._is_allowed(child)])

    def _is_allowed(self, partition: Partition) -> bool:
        """Return whether a partition keeps the limits, and no stage of it spans a cut."""
        (fused, *backward), limits = partition.backward, self.limits
        sizes = (max(partition.forward, default=0), max(backward, default=0), fused)
        if any(map(gt, sizes, (limits.forward, limits.backward, limits.fused))):
            return False
        cuts, num_blocks = set(self.evaluator.profile.cuts), partition.num_blocks
        ahead = {*accumulate(partition.forward)}
        if not partition.plain:
            ahead.update(range(num_blocks - fused, num_blocks))
        return cuts <= ahead and cuts <= {num_blocks - n for n in accumulate(partition.backward)}

    def _evolve(self, num_generations: int, children: int, *, in_order: bool) -> None:
        """Replace bad partitions by variants of good ones until that stops to help."""
        best, stalled = float("inf"), 0
        for _ in range(num_generations):
            parents = self._ranked()[:_PARENTS]
            self.seconds = {parent: self.seconds[parent] for parent in parents}
            self._add_children(parents, children, in_order=in_order)
            leader = min(self.seconds.values())
            best, stalled = (leader, 0) if leader < best else (best, stalled + 1)
            if stalled == _PATIENCE:
                return

    def _ranked(self) -> list[Partition]:
        return sorted(self.seconds, key=self.seconds.__getitem__)

    def _fitting(self, count: int) -> tuple[Partition, ...]:
        return tuple(each for each in self._ranked()[:count] if self.seconds[each] < float("inf"))

    def _child(self, parents: Sequence[Partition], *, in_order: bool) -> Partition:
        random = self._random
        parent = parents[int(len(parents) * random.random() ** 2)]
        turns = parent.keeps_graphs or not parent.plain
        forward, (fused, *backward) = [*parent.forward], parent.backward
        if parent.keeps_graphs:
            forward.pop()
        other = random.choice(parents).backward
        if random.random() < 0.2 and other[0] == fused:
            backward = [*other[1:]]
        if random.random() < 0.16:  # a block more or less in the first stage that runs backward
            change = random.choice((-1, 1))
            if backward if change > 0 else fused:
                fused += change
                forward, backward = forward or [0], backward or [0]
                forward[-1] -= change * turns
                backward[0] -= change
        for _ in range(random.choice((1, 1, 2, 3, 4))):
            _vary(random.choice((forward, backward)), random)
        if in_order:
            if turns:
                forward.sort()
            backward.sort(reverse=True)
        ahead, back = tuple(filter(None, forward)), (fused, *filter(None, backward))
        if turns:
            return _turning(ahead, back, plain=parent.plain)
        return Partition(forward=ahead or (0,), backward=back, plain=True)


def _vary(counts: list[int], random: Random) -> None:
    """Move a block to another stage, split a stage, or dissolve one into the others."""
    if not any(counts):
        return
    place = random.choice([place for place, count in enumerate(counts) if count])
    choice = random.random()
    if choice < 0.25:
        part = random.randrange(counts[place])
        counts[place] -= part
        counts.insert(place, part)
        return
    moved = counts[place] if choice < 0.5 else 1
    counts[place] -= moved
    for _ in range(moved):
        counts[random.randrange(len(counts))] += 1
