"""Cuts a chain of blocks into stages of nearly equal duration: where a search begins."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from roundpipe_lightning.errors import PlanError
from roundpipe_lightning.planning.model.profile import ModelProfile
from roundpipe_lightning.planning.schedule.stages import (
    Partition,
    call_lengths,
    cuts_before,
    reversed_cuts,
)


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
        weights: Non-negative weights.
        num_parts: How many parts there are at most, besides those that the cuts make.
        cuts: Ascending indices i such that weights i-1 and i are in different parts.

    Raises:
        PlanError: If `num_parts` is less than 1.
    """
    if num_parts < 1:
        raise PlanError(f"num_parts={num_parts} must be 1 or more.")
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
