"""Cuts a chain of blocks into stages of nearly equal duration.

`balanced_cuts` solves the chains-on-chains problem: of all cuts of n weights into at most k
contiguous parts, one whose heaviest part is lightest. Method: bisection between the trivial bounds
on the heaviest part, each probe filling parts greedily by binary search on prefix sums (A. Pinar
and C. Aykanat, "Fast optimal load balancing algorithms for 1D partitioning", J. Parallel Distrib.
Comput. 64, 2004). Complexity: O(n + k log n log(1 / RESOLUTION)).
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from roundpipe_lightning.errors import PlanError
from roundpipe_lightning.planning.model.profile import ModelProfile
from roundpipe_lightning.planning.schedule.stages import (
    Partition,
    call_lengths,
    cuts_before,
    reversed_cuts,
)

RESOLUTION = 1e-9
"""Parts that differ by less than this share of the sum of all weights count as equally heavy."""


@dataclass(frozen=True, kw_only=True)
class StageLimits:
    """Most blocks that a stage may have, for memory's or the user's sake.

    Attributes:
        fused: 0 allows only the tail segment.

    Raises:
        PlanError: If a limit leaves no stage possible.
    """

    forward: int
    backward: int
    fused: int

    def __post_init__(self) -> None:
        for name, least in (("forward", 1), ("backward", 1), ("fused", 0)):
            if getattr(self, name) < least:
                raise PlanError(f"limit {name}={getattr(self, name)} must be {least} or more.")

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


def greedy_cuts(
    weights: Sequence[float], *, limit: float, cuts: Sequence[int] = ()
) -> tuple[int, ...]:
    """Return the sizes of the fewest contiguous parts that weigh no more than `limit`.

    A weight above the limit gets a part of its own. Every part takes what fits, so the last is
    lightest. No part spans one of the ascending `cuts`.
    """
    return tuple(_greedy_sizes([0.0, *accumulate(weights)], limit, cuts))


def balanced_cuts(
    weights: Sequence[float], *, num_parts: int, cuts: Sequence[int] = ()
) -> tuple[int, ...]:
    """Return the sizes of at most `num_parts` parts with the lightest possible heaviest one.

    Args:
        weights: Non-negative weights.
        num_parts: How many parts there may be; no part is empty, so no more than there are weights.
            There are at least as many as the cuts make.
        cuts: Ascending indices i such that weights i-1 and i are in different parts.

    Raises:
        PlanError: If `num_parts` is less than 1.
    """
    if num_parts < 1:
        raise PlanError(f"num_parts={num_parts} must be 1 or more.")
    return _balanced_cuts(tuple(weights), num_parts, tuple(cuts))


@functools.lru_cache(maxsize=8192)  # cases with other limits ask for the same cuts
def _balanced_cuts(
    weights: tuple[float, ...], num_parts: int, cuts: tuple[int, ...]
) -> tuple[int, ...]:
    if not weights:
        return ()
    sums = [0.0, *accumulate(weights)]
    low, high = max(weights), sums[-1]
    best = _greedy_sizes(sums, high, cuts)
    num_parts = max(num_parts, len(best))
    if not cuts:  # parts that are filled up to this are no more than there may be
        low = max(low, high / num_parts)
        high = min(high, high / num_parts + max(weights))
        best = _greedy_sizes(sums, high, cuts)
    while high - low > RESOLUTION * sums[-1]:
        limit = (low + high) / 2
        sizes = _greedy_sizes(sums, limit, cuts)
        if len(sizes) <= num_parts:
            best, high = sizes, min(limit, _heaviest(sums, sizes))
        else:
            low = limit
    sizes = _greedy_sizes(sums, low, cuts)
    return tuple(sizes if len(sizes) <= num_parts else best)


def _greedy_sizes(sums: Sequence[float], limit: float, cuts: Sequence[int]) -> list[int]:
    """Fill parts up to `limit` or a cut; `sums` are the prefix sums of the weights."""
    sizes = []
    ahead = [*reversed(cuts)]
    start, count = 0, len(sums) - 1
    limit += RESOLUTION * sums[-1]
    while start < count:
        stop = max(bisect_right(sums, sums[start] + limit, lo=start) - 1, start + 1)
        if ahead and stop >= ahead[-1]:
            stop = ahead.pop()
        sizes.append(stop - start)
        start = stop
    return sizes


def _heaviest(sums: Sequence[float], sizes: Sequence[int]) -> float:
    stops = list(accumulate(sizes, initial=0))
    return max(sums[b] - sums[a] for a, b in pairwise(stops))


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
    profile: ModelProfile, *, limits: StageLimits, count: int = 12
) -> tuple[Partition, ...]:
    """Return partitions into any reasonable number of stages of about equal duration.

    `count` is about how many numbers of BACKWARD stages there are to choose from.
    """
    found = []
    last_call = sum(call_lengths(profile.num_blocks, profile.cuts)[-1:])
    for fused in _spread(0, min(limits.fused, last_call), count=min(count, 4)):
        blocks = profile.blocks[: profile.num_blocks - fused]
        if not blocks:
            found.append(Partition(forward=(), backward=(fused,)))
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
                found.append(Partition(forward=forward, backward=(fused, *backward)))
    return tuple(dict.fromkeys(found))


@functools.lru_cache(maxsize=256)
def speed_partitions(
    profile: ModelProfile, *, limits: StageLimits, speeds: tuple[float, ...]
) -> tuple[Partition, ...]:
    """Return partitions whose stages are as long as their workers are fast, laid round them.

    Stages are filled one after the other, each up to a duration times its worker's speed.
    """
    blocks, tail = profile.blocks, profile.tail
    last_call = sum(call_lengths(profile.num_blocks, profile.cuts)[-1:])
    work = profile.busy_seconds + profile.seconds_to_recompute()
    shares = [2 ** (power / 8) / sum(speeds) for power in range(-40, 9)]
    found = []
    for fused in range(min(limits.fused, last_call, 4) + 1):
        rest = profile.num_blocks - fused
        both = sum(b.forward_seconds + b.backward_seconds for b in (*blocks[rest:], tail))
        cuts = cuts_before(rest, profile.cuts)
        behind = [b.recompute_seconds + b.backward_seconds for b in reversed(blocks[:rest])]
        ahead = [b.forward_seconds for b in blocks[:rest]]
        for share in shares:
            seconds = max(share * work, both / max(speeds))
            forward = _filled(ahead, seconds, speeds, 0, most=limits.forward, cuts=cuts)
            backward = _filled(
                behind,
                seconds,
                speeds,
                len(forward) + 1,
                most=limits.backward,
                cuts=reversed_cuts(rest, cuts),
            )
            found.append(Partition(forward=forward, backward=(fused, *backward)))
    return tuple(dict.fromkeys(found))


def _filled(
    weights: Sequence[float],
    seconds: float,
    speeds: Sequence[float],
    turn: int,
    *,
    most: int,
    cuts: Sequence[int],
) -> tuple[int, ...]:
    """Fill stages up to their workers' share, rounded, with at least a block each."""
    sizes: list[int] = []
    ahead, start = {*cuts, len(weights)}, 0
    while start < len(weights):
        limit = seconds * speeds[(turn + len(sizes)) % len(speeds)]
        stop = start + 1
        filled = weights[start]
        while stop not in ahead and stop - start < most and filled + weights[stop] / 2 <= limit:
            filled += weights[stop]
            stop += 1
        sizes.append(stop - start)
        start = stop
    return tuple(sizes)


def _fewest(calls: Sequence[int], limit: int) -> int:
    return sum(-(-call // limit) for call in calls)


def _balanced(
    weights: Sequence[float], num_parts: int, limit: int, *, cuts: Sequence[int]
) -> tuple[int, ...]:
    """Balance by weight; by number of blocks where that would break the limit."""
    counts = balanced_cuts(weights, num_parts=num_parts, cuts=cuts)
    if max(counts) > limit:
        counts = balanced_cuts([1.0] * len(weights), num_parts=num_parts, cuts=cuts)
    return counts


def _spread(first: int, last: int, *, count: int) -> list[int]:
    """Return about `count` whole numbers from `first` to `last`, evenly spaced, both included."""
    step = max(1, -(-(last - first) // count))
    return sorted({*range(first, last, step), last})
