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
from dataclasses import dataclass, replace
from itertools import chain
from random import Random

import numpy as np
import numpy.typing as npt

from roundpipe_lightning.errors import PlanError
from roundpipe_lightning.planning.model.profile import ModelProfile
from roundpipe_lightning.planning.schedule.cuts import (
    call_lengths,
    cuts_before,
    grouped,
    reversed_cuts,
)
from roundpipe_lightning.planning.schedule.stages import Partition
from roundpipe_lightning.planning.search.makespan_table import Evaluator, PartitionTable
from roundpipe_lightning.planning.search.partition import balanced_cuts

Counts = tuple[int, ...]

Fits = Callable[[PartitionTable], npt.NDArray[np.bool_]]

_PATIENCE = 6
"""Generations without a better partition after which an island is left."""

_ISLANDS_FUSED = (1_000_000, 0, 4, 1)
"""Most blocks of the fused stage on each island in turn: plans with few need their own search."""


@dataclass(frozen=True, kw_only=True)
class StageLimits:
    """How many blocks a stage may have at most, for memory's or the user's sake.

    Attributes:
        forward: Blocks of a FORWARD stage.
        backward: Blocks of a BACKWARD stage.
        fused: Blocks of the FUSED stage; 0 allows only the tail segment.

    Raises:
        PlanError: If a limit leaves no stage possible.
    """

    forward: int
    backward: int
    fused: int

    def __post_init__(self) -> None:
        for name in ("forward", "backward"):
            if getattr(self, name) < 1:
                raise PlanError(f"limit {name}={getattr(self, name)} must be 1 or more.")
        if self.fused < 0:
            raise PlanError(f"limit fused={self.fused} must be 0 or more.")

    def allow(self, partition: Partition) -> bool:
        return (
            max(partition.forward, default=0) <= self.forward
            and max(partition.backward[1:], default=0) <= self.backward
            and partition.backward[0] <= self.fused
        )


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How long to search.

    Attributes:
        num_actions: Actions to simulate, at most, in all generations together.
        num_children: Partitions per generation.
        num_parents: Partitions that survive a generation.
        num_generations: Generations of all islands together, at most; 0: no search.
        island_generations: Generations per island, at most.
        num_even: Numbers of stages to choose from among even partitions, about.
        num_verified_actions: Actions of the simulations, together, that even partitions get which
            might be better than what was found.
        seed: Seed of the random numbers.
    """

    num_actions: int = 30_000_000
    num_children: int = 256
    num_parents: int = 48
    num_generations: int = 200
    island_generations: int = 20
    num_even: int = 12
    num_verified_actions: int = 20_000
    seed: int = 0


QUICK = Effort(num_generations=0, num_even=2, num_verified_actions=0)
"""A few even partitions alone."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """A partition that the search found.

    Attributes:
        partition: The stages.
        makespan_seconds: Its makespan according to the `Evaluator`.
    """

    partition: Partition
    makespan_seconds: float


def search_partitions(
    evaluator: Evaluator,
    *,
    even: Sequence[Candidate],
    limits: StageLimits,
    effort: Effort,
    num_results: int = 8,
    fits: Fits | None = None,
) -> tuple[Found, ...]:
    """Return the best partitions found, the best first.

    Args:
        evaluator: Knows the model and the workers.
        even: Partitions to begin with, from `even_candidates`.
        limits: What every partition must keep.
        effort: How long to search.
        num_results: How many to return, at most.
        fits: Says which partitions of a table fit the devices' memory; None: all do.
    """
    num_blocks = evaluator.profile.num_blocks
    if num_blocks == 0:
        only = Partition(forward=(), backward=(0,))
        return (Found(partition=only, makespan_seconds=_makespan(evaluator, only)),)
    random = Random(effort.seed)
    best = _Island(evaluator, limits, effort, random, in_order=True, fits=fits)
    best.add(even)
    if effort.num_generations == 0:
        return best.results(num_results)
    stages = sum(len(c.forward) + len(c.backward) + 1 for c in even) // len(even)
    generation = effort.num_children * stages * sum(evaluator.rounds)
    num_generations = min(max(4, effort.num_actions // generation), effort.num_generations)
    num_islands = max(1, round(num_generations / effort.island_generations) - 1)
    each = min(effort.island_generations, max(1, num_generations // (num_islands + 1)))
    for number in range(num_islands):
        fused = min(limits.fused, _ISLANDS_FUSED[number % len(_ISLANDS_FUSED)])
        near = replace(limits, fused=fused)
        island = _Island(evaluator, near, effort, random, in_order=True, fits=fits)
        some = [candidate for candidate in even if candidate.fused <= fused]
        island.add(random.sample(some, min(len(some), 24)))
        cuts = evaluator.profile.cuts
        island.add(
            [
                _random_candidate(num_blocks, near, random, cuts=cuts)
                for _ in range(effort.num_children)
            ]
        )
        island.evolve(each)
        best.adopt(island)
    last = _Island(evaluator, limits, effort, random, in_order=False, fits=fits)
    last.adopt(best)
    last.evolve(each)
    return last.results(num_results)


def _makespan(evaluator: Evaluator, partition: Partition) -> float:
    table = PartitionTable.of([(partition.forward, partition.backward)], pad=1)
    return float(evaluator.makespans(table)[0])


@dataclass(frozen=True)
class Candidate:
    """A partition, lighter than `Partition`: blocks per stage, `backward` without the fused one."""

    forward: Counts
    fused: int
    backward: Counts

    @property
    def partition(self) -> Partition:
        return Partition(forward=self.forward, backward=(self.fused, *self.backward))


class _Island:
    """Partitions with their makespans, of which the best have children."""

    def __init__(
        self,
        evaluator: Evaluator,
        limits: StageLimits,
        effort: Effort,
        random: Random,
        *,
        in_order: bool,
        fits: Fits | None,
    ) -> None:
        self._fits = fits
        self._evaluator = evaluator
        self._limits = limits
        self._effort = effort
        self._random = random
        self._in_order = in_order
        self._calls = call_lengths(evaluator.profile.num_blocks, evaluator.profile.cuts)
        self._makespans: dict[Candidate, float] = {}

    def add(self, candidates: Sequence[Candidate]) -> None:
        new = [c for c in dict.fromkeys(candidates) if c not in self._makespans]
        if not new:
            return
        table = PartitionTable.of([(c.forward, (c.fused, *c.backward)) for c in new])
        makespans = self._evaluator.makespans(table)
        if self._fits is not None:
            makespans = np.where(self._fits(table), makespans, np.inf)
        self._makespans.update(zip(new, makespans.tolist(), strict=True))

    def adopt(self, other: _Island) -> None:
        for candidate in other._parents():
            self._makespans[candidate] = other._makespans[candidate]

    def evolve(self, num_generations: int) -> None:
        """Replace bad partitions by children of good ones until that stops to help."""
        best, stalled = math.inf, 0
        for _ in range(num_generations):
            parents = self._parents()
            self._makespans = {parent: self._makespans[parent] for parent in parents}
            self.add([self._child(parents) for _ in range(self._effort.num_children)])
            leader = min(self._makespans.values())
            best, stalled = (leader, 0) if leader < best else (best, stalled + 1)
            if stalled == _PATIENCE:
                return

    def results(self, count: int) -> tuple[Found, ...]:
        found = []
        for candidate in self._parents()[:count]:
            if self._makespans[candidate] == math.inf:
                break
            seconds = self._makespans[candidate]
            found.append(Found(partition=candidate.partition, makespan_seconds=seconds))
        return tuple(found)

    def _parents(self) -> list[Candidate]:
        ranked = sorted(self._makespans, key=lambda candidate: self._makespans[candidate])
        return ranked[: self._effort.num_parents]

    def _child(self, parents: list[Candidate]) -> Candidate:
        """Vary a parent, a good one more often than a bad one."""
        random, limits = self._random, self._limits
        parent = parents[int(len(parents) * random.random() ** 2)]
        fused, backward_counts = parent.fused, parent.backward
        if random.random() < 0.2:
            other = random.choice(parents)
            if other.fused == fused:
                backward_counts = other.backward
        forward = grouped(parent.forward, self._calls)
        backward = grouped(backward_counts, self._backward_calls(fused))
        if random.random() < 0.16:
            fused = self._change_fused(fused, forward, backward)
        for _ in range(random.choice((1, 1, 2, 3, 4))):
            if random.random() < 0.5:
                _change_counts(_any(forward, random), limit=limits.forward, random=random)
            else:
                _change_counts(_any(backward, random), limit=limits.backward, random=random)
        if self._in_order:
            for counts in forward:
                counts.sort()
            for counts in backward:
                counts.sort(reverse=True)
        return Candidate(tuple(chain(*forward)), fused, tuple(chain(*backward)))

    def _backward_calls(self, fused: int) -> list[int]:
        """Blocks of every call behind the fused stage's, the last call first."""
        last, *others = reversed(self._calls)
        return [last - fused, *others] if fused < last else others

    def _change_fused(self, fused: int, forward: list[list[int]], backward: list[list[int]]) -> int:
        """Vary the fused stage within the last call; return its new number of blocks."""
        if fused == self._calls[-1]:  # nothing else of the last call is left
            forward.append([])
            backward.insert(0, [])
        limits = self._limits
        if len(self._calls) > 1:
            limits = replace(limits, fused=min(limits.fused, self._calls[-1]))
        first = backward[0] if backward else []
        last = forward[-1] if forward else []
        return _change_fused(fused, last, first, limits=limits, random=self._random)


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


def _change_fused(
    fused: int, forward: list[int], backward: list[int], *, limits: StageLimits, random: Random
) -> int:
    """Give the fused stage one block more or one less; return its new number."""
    if random.random() < 0.5:
        if fused < limits.fused and forward and backward:
            _take_one(forward, random.randrange(len(forward)))
            _take_one(backward, random.randrange(len(backward)))
            return fused + 1
    elif fused > 0:
        for counts, limit in ((forward, limits.forward), (backward, limits.backward)):
            room = [i for i, count in enumerate(counts) if count < limit]
            if room:
                counts[random.choice(room)] += 1
            else:
                counts.append(1)
        return fused - 1
    return fused


def _take_one(counts: list[int], place: int) -> None:
    counts[place] -= 1
    if counts[place] == 0:
        counts.pop(place)


def even_candidates(
    profile: ModelProfile, *, limits: StageLimits, count: int = 12
) -> tuple[Candidate, ...]:
    """Return partitions into any reasonable number of stages of about equal duration.

    Args:
        profile: The model.
        limits: What every partition must keep.
        count: Numbers of BACKWARD stages to choose from, about.
    """
    candidates = []
    last_call = sum(call_lengths(profile.num_blocks, profile.cuts)[-1:])
    for fused in _spread(0, min(limits.fused, last_call), count=min(count, 4)):
        blocks = profile.blocks[: profile.num_blocks - fused]
        if not blocks:
            candidates.append(Candidate((), fused, ()))
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
        fewest_backward = _fewest(calls, limits.backward)
        for num_backward in _spread(fewest_backward, len(blocks), count=count):
            backward = _balanced(backward_seconds, num_backward, limits.backward, cuts=cuts_back)
            for extra in (0, 1, 3):
                num_forward = min(len(blocks), max(fewest, 1, round(num_backward * share) + extra))
                forward = _balanced(forward_seconds, num_forward, limits.forward, cuts=cuts)
                candidates.append(Candidate(forward, fused, backward))
    return tuple(dict.fromkeys(candidates))


def _fewest(calls: Sequence[int], limit: int) -> int:
    """Fewest stages that keep the cuts and a limit."""
    return sum(-(-call // limit) for call in calls)


def _balanced(
    weights: Sequence[float], num_parts: int, limit: int, *, cuts: Sequence[int]
) -> Counts:
    """Balance by weight; by number of blocks where that would break the limit."""
    counts = balanced_cuts(weights, num_parts=num_parts, cuts=cuts)
    if max(counts) > limit:
        counts = balanced_cuts([1.0] * len(weights), num_parts=num_parts, cuts=cuts)
    return counts


def _spread(first: int, last: int, *, count: int) -> list[int]:
    """Return about `count` whole numbers from `first` to `last`, evenly spaced, both included."""
    step = max(1, -(-(last - first) // count))
    return sorted({*range(first, last, step), last})


def _random_candidate(
    num_blocks: int, limits: StageLimits, random: Random, *, cuts: Sequence[int]
) -> Candidate:
    last_call = call_lengths(num_blocks, cuts)[-1]
    fused = random.randint(0, min(limits.fused, last_call))
    calls = call_lengths(num_blocks - fused, cuts)
    forward, backward = (
        [_random_counts(call, limit=limit, random=random) for call in calls]
        for limit in (limits.forward, limits.backward)
    )
    return Candidate(
        tuple(chain(*(sorted(counts) for counts in forward))),
        fused,
        tuple(chain(*(sorted(counts, reverse=True) for counts in reversed(backward)))),
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
