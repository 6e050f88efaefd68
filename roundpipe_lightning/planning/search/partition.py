"""Cuts a chain of blocks into stages of nearly equal duration.

`balanced_cuts` solves the chains-on-chains problem: of all cuts of n weights into at most k
contiguous parts, one whose heaviest part is lightest. Method: bisection between the trivial bounds
on the heaviest part, each probe filling parts greedily by binary search on prefix sums (A. Pinar
and C. Aykanat, "Fast optimal load balancing algorithms for 1D partitioning", J. Parallel Distrib.
Comput. 64, 2004). Complexity: O(n + k log n log(1 / RESOLUTION)).

No framework is imported, no device is touched.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

from roundpipe_lightning.errors import PlanError
from roundpipe_lightning.planning.model.profile import ModelProfile
from roundpipe_lightning.planning.schedule.cuts import call_lengths, cuts_before, reversed_cuts
from roundpipe_lightning.planning.schedule.stages import Partition

RESOLUTION = 1e-9
"""Parts that differ by less than this share of the sum of all weights count as equally heavy."""


def greedy_cuts(
    weights: Sequence[float], *, limit: float, cuts: Sequence[int] = ()
) -> tuple[int, ...]:
    """Return the sizes of the fewest contiguous parts that weigh no more than `limit`.

    A weight above the limit gets a part of its own. Every part takes what fits, so the last is
    lightest. No part spans one of the ascending `cuts`.
    """
    sums = [0.0, *accumulate(weights)]
    return tuple(_greedy_sizes(sums, limit, cuts))


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


def balanced_partition(
    profile: ModelProfile, *, num_fused: int, num_forward: int, num_backward: int
) -> Partition:
    """Balance the forward and the backward stages separately, with the fused stage between.

    A BACKWARD stage weighs its recompute and its backward, about three times its forward, so both
    cuts have stages of similar duration only if there are about three BACKWARD stages for each
    FORWARD one.

    Args:
        profile: The model.
        num_fused: Blocks of the fused stage.
        num_forward: FORWARD stages at most; at least one where blocks remain.
        num_backward: BACKWARD stages at most.

    Raises:
        PlanError: If `num_fused` is more than there are blocks, or than follow the last cut.
    """
    if not 0 <= num_fused <= profile.num_blocks:
        raise PlanError(f"num_fused={num_fused} of {profile.num_blocks} blocks cannot be fused.")
    blocks = profile.blocks[: profile.num_blocks - num_fused]
    if num_fused > sum(call_lengths(profile.num_blocks, profile.cuts)[-1:]):
        raise PlanError(f"num_fused={num_fused} spans one of the cuts {profile.cuts}.")
    cuts = cuts_before(len(blocks), profile.cuts)
    forward = balanced_cuts(
        [block.forward_seconds for block in blocks], num_parts=max(1, num_forward), cuts=cuts
    )
    backward = balanced_cuts(
        [block.recompute_seconds + block.backward_seconds for block in reversed(blocks)],
        num_parts=max(1, num_backward),
        cuts=reversed_cuts(len(blocks), cuts),
    )
    return Partition(forward=forward, backward=(num_fused, *backward))


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
