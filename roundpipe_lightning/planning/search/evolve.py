"""Searches for the partition with the shortest step: stages of uneven size, a fused stage to match.

Even stages are not the best: while the pipeline fills, every worker waits for all stages before its
first, and while it drains, for all after its last. So good partitions have short FORWARD stages
first that grow, and BACKWARD stages that shrink towards the end. The search is an evolution of such
partitions (forward counts ascending, backward counts descending): on several islands, each from its
own random start, the best of a generation are varied by moving a block, splitting or dissolving a
stage, changing the fused stage, or taking the other half of another one, and `Evaluator` measures
all children at once. The last island starts from the best of all others and also tries orders that
are not sorted, which matter where blocks differ. Same arguments, same result: the random numbers
are seeded.

Cost: `Effort.num_actions` bounds the number of simulated actions, about 3e7 per second and core.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from random import Random

import numpy as np
import numpy.typing as npt

from roundpipe_lightning.planning.cost.partition_table import Evaluator, PartitionTable
from roundpipe_lightning.planning.schedule.stages import Partition, call_lengths, grouped
from roundpipe_lightning.planning.search.partition import StageLimits

Fits = Callable[[PartitionTable], npt.NDArray[np.bool_]]
"""Mask of the partitions of a table that fit the devices' memory."""

_PATIENCE = 6  # generations without a better partition after which an island is left
_ISLAND_GENERATIONS = 20  # per island, at most
_NEIGHBOURS = 64  # partitions near the best one that are estimated at a time

_ISLANDS_FUSED = (1_000_000, 0, 4, 1)
"""Most blocks of the fused stage on each island in turn: plans with few need their own search."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Limits of a search.

    Attributes:
        num_actions: Actions to simulate, at most, in all generations together.
        num_children: Partitions per generation.
        num_parents: Partitions that survive a generation.
        num_generations: Generations of all islands together, at most; 0: no search.
        num_even: Numbers of stages to choose from among even partitions, about.
        num_verified_actions: Actions of the simulations, together, that even partitions get which
            might be better than what was found.
    """

    num_actions: int = 30_000_000
    num_children: int = 256
    num_parents: int = 48
    num_generations: int = 200
    num_even: int = 12
    num_verified_actions: int = 20_000


QUICK = Effort(num_generations=0, num_even=2, num_verified_actions=0)
"""A few even partitions alone."""


def search_partitions(
    evaluator: Evaluator,
    *,
    even: Sequence[Partition],
    limits: StageLimits,
    effort: Effort,
    num_results: int = 8,
    fits: Fits | None = None,
) -> tuple[Partition, ...]:
    """Return the best partitions found, the best first.

    Args:
        even: Partitions to begin with, from `even_partitions`.
        fits: Which partitions fit; None: all do.
    """
    profile = evaluator.profile
    if profile.num_blocks == 0:
        return (Partition(forward=(), backward=(0,)),)
    random = Random(0)
    best = _Island(evaluator=evaluator, limits=limits, effort=effort, random=random, fits=fits)
    best.add(even)
    if effort.num_generations == 0:
        return best.results(num_results)
    stages = sum(partition.num_stages for partition in even) // len(even)
    generation = effort.num_children * stages * sum(evaluator.rounds)
    num_generations = min(max(4, effort.num_actions // generation), effort.num_generations)
    num_islands = max(1, round(num_generations / _ISLAND_GENERATIONS) - 1)
    each = min(_ISLAND_GENERATIONS, max(1, num_generations // (num_islands + 1)))
    for number in range(num_islands):
        fused = min(limits.fused, _ISLANDS_FUSED[number % len(_ISLANDS_FUSED)])
        near = replace(limits, fused=fused)
        some = [partition for partition in even if partition.backward[0] <= fused]
        start = random.sample(some, min(len(some), 24))
        one = replace(best, limits=near, makespans={})
        one.add(start)
        one.add([_random_partition(one.calls, near, random) for _ in range(effort.num_children)])
        one.evolve(each)
        best.adopt(one)
    last = replace(best, in_order=False, makespans={})
    last.adopt(best)
    last.evolve(each)
    return last.results(num_results)


def neighbours(
    partition: Partition,
    evaluator: Evaluator,
    *,
    limits: StageLimits,
    effort: Effort,
    seed: int,
    fits: Fits,
) -> tuple[Partition, ...]:
    """Return partitions that differ little from one, those with the shortest estimates first."""
    island = _Island(
        evaluator=evaluator,
        limits=limits,
        effort=effort,
        random=Random(seed),
        in_order=False,
        fits=fits,
    )
    island.add([island.child([partition]) for _ in range(_NEIGHBOURS)])
    return tuple(each for each in island.results(_NEIGHBOURS) if each != partition)


@dataclass(eq=False, kw_only=True)
class _Island:
    """Partitions with their makespans, of which the best have children."""

    evaluator: Evaluator
    limits: StageLimits
    effort: Effort
    random: Random
    in_order: bool = True
    fits: Fits | None
    makespans: dict[Partition, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.in_order &= not self.evaluator.pipelines  # else stages fit their workers
        profile = self.evaluator.profile
        self.calls = call_lengths(profile.num_blocks, profile.cuts)

    def add(self, partitions: Sequence[Partition]) -> None:
        new = [each for each in dict.fromkeys(partitions) if each not in self.makespans]
        if not new:
            return
        table = PartitionTable.of(new)
        makespans = self.evaluator.seconds(table)
        if self.fits is not None:
            makespans = np.where(self.fits(table), makespans, np.inf)
        self.makespans.update(zip(new, makespans.tolist(), strict=True))

    def adopt(self, other: _Island) -> None:
        for partition in other._parents():
            self.makespans[partition] = other.makespans[partition]

    def evolve(self, num_generations: int) -> None:
        """Replace bad partitions by children of good ones until that stops to help."""
        best, stalled = math.inf, 0
        for _ in range(num_generations):
            parents = self._parents()
            self.makespans = {parent: self.makespans[parent] for parent in parents}
            self.add([self.child(parents) for _ in range(self.effort.num_children)])
            leader = min(self.makespans.values())
            best, stalled = (leader, 0) if leader < best else (best, stalled + 1)
            if stalled == _PATIENCE:
                return

    def results(self, count: int) -> tuple[Partition, ...]:
        best = self._parents()[:count]
        return tuple(each for each in best if self.makespans[each] < math.inf)

    def _parents(self) -> list[Partition]:
        ranked = sorted(self.makespans, key=self.makespans.__getitem__)
        return ranked[: self.effort.num_parents]

    def child(self, parents: list[Partition]) -> Partition:
        random, limits = self.random, self.limits
        parent = parents[int(len(parents) * random.random() ** 2)]
        fused, *backward_counts = parent.backward
        if random.random() < 0.2:
            other = random.choice(parents)
            if other.backward[0] == fused:
                backward_counts = list(other.backward[1:])
        forward = grouped(parent.forward, self.calls)
        backward = grouped(backward_counts, self._backward_calls(fused))
        if random.random() < 0.16:
            fused = self._change_fused(fused, forward, backward)
        for _ in range(random.choice((1, 1, 2, 3, 4))):
            if random.random() < 0.5:
                _change_counts(_any(forward, random), limit=limits.forward, random=random)
            else:
                _change_counts(_any(backward, random), limit=limits.backward, random=random)
        if self.in_order:
            for counts in forward:
                counts.sort()
            for counts in backward:
                counts.sort(reverse=True)
        return Partition(forward=tuple(chain(*forward)), backward=(fused, *chain(*backward)))

    def _backward_calls(self, fused: int) -> list[int]:
        last, *others = reversed(self.calls)
        return [last - fused, *others] if fused < last else others

    def _change_fused(self, fused: int, forward: list[list[int]], backward: list[list[int]]) -> int:
        """Give the fused stage one block of the last call more or less; return its new number."""
        if fused == self.calls[-1]:  # nothing else of the last call is left
            forward.append([])
            backward.insert(0, [])
        random, limits = self.random, self.limits
        last = forward[-1] if forward else []
        first = backward[0] if backward else []
        if random.random() < 0.5:
            if fused < min(limits.fused, self.calls[-1]) and last and first:
                _take_one(last, random.randrange(len(last)))
                _take_one(first, random.randrange(len(first)))
                return fused + 1
        elif fused > 0:
            for counts, limit in ((last, limits.forward), (first, limits.backward)):
                room = [i for i, count in enumerate(counts) if count < limit]
                if room:
                    counts[random.choice(room)] += 1
                else:
                    counts.append(1)
            return fused - 1
        return fused


def _any(groups: list[list[int]], random: Random) -> list[int]:
    """Choose one group; no random number is spent where there is no choice."""
    if len(groups) < 2:
        return groups[0] if groups else []
    return random.choice(groups)


def _change_counts(counts: list[int], *, limit: int, random: Random) -> None:
    """Move one block, split a stage, or dissolve one into the others."""
    if not counts:
        return
    choice = random.random()
    place = random.randrange(len(counts))
    if choice < 0.5:
        other = random.randrange(len(counts))
        if place != other and counts[other] < limit:
            counts[other] += 1
            _take_one(counts, place)
    elif choice < 0.75:
        if counts[place] > 1:
            part = random.randrange(1, counts[place])
            counts[place] -= part
            counts.insert(place, part)
    elif sum(limit - count for count in counts) - limit >= 0:
        for _ in range(counts.pop(place)):
            room = [i for i, count in enumerate(counts) if count < limit]
            counts[random.choice(room)] += 1


def _take_one(counts: list[int], place: int) -> None:
    counts[place] -= 1
    if counts[place] == 0:
        counts.pop(place)


def _random_partition(calls: Sequence[int], limits: StageLimits, random: Random) -> Partition:
    *others, last = calls
    fused = random.randint(0, min(limits.fused, last))
    left = [*others, last - fused] if fused < last else others
    forward, backward = (
        [_random_counts(call, limit=limit, random=random) for call in left]
        for limit in (limits.forward, limits.backward)
    )
    behind = chain(*(sorted(counts, reverse=True) for counts in reversed(backward)))
    return Partition(
        forward=tuple(chain(*(sorted(counts) for counts in forward))), backward=(fused, *behind)
    )


def _random_counts(total: int, *, limit: int, random: Random) -> list[int]:
    """Start even and make large parts larger at the expense of small ones."""
    if total == 0:
        return []
    limit = min(limit, total)
    num_parts = max(-(-total // limit), round(total / random.uniform(1, limit)))
    quotient, remainder = divmod(total, num_parts)
    counts = [quotient + 1] * remainder + [quotient] * (num_parts - remainder)
    for _ in range(random.randrange(2 * num_parts)):
        small, large = random.randrange(num_parts), random.randrange(num_parts)
        if 1 < counts[small] <= counts[large] < limit and small != large:
            counts[small] -= 1
            counts[large] += 1
    return counts
