"""The balanced partitioner against an exhaustive search."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundpipe_lightning.errors import PlanError
from roundpipe_lightning.planning.search.partition import (
    balanced_cuts,
    greedy_cuts,
)

_weights = st.lists(
    st.floats(0, 100, allow_nan=False, allow_subnormal=False), min_size=1, max_size=7
)


def heaviest(weights: list[float], stops: tuple[int, ...]) -> float:
    return max(sum(weights[a:b]) for a, b in pairwise((0, *stops, len(weights))))


@given(_weights, st.integers(1, 8))
def test_balanced_cuts_are_optimal(weights: list[float], num_parts: int) -> None:
    sizes = balanced_cuts(weights, num_parts=num_parts)
    assert sum(sizes) == len(weights)
    assert 1 <= len(sizes) <= num_parts
    assert min(sizes) >= 1
    stops = [sum(sizes[:i]) for i in range(1, len(sizes))]
    best = min(
        heaviest(weights, cut)
        for parts in range(min(num_parts, len(weights)))
        for cut in combinations(range(1, len(weights)), parts)
    )
    assert heaviest(weights, tuple(stops)) <= best + 1e-6 * (1 + best)


def test_greedy_cuts_fill_up_to_the_limit() -> None:
    assert greedy_cuts([1, 1, 1, 5, 1, 1], limit=2) == (2, 1, 1, 2)
    assert greedy_cuts([0.1] * 9, limit=0.3) == (3, 3, 3)


def test_impossible_counts_are_refused() -> None:
    with pytest.raises(PlanError, match="num_parts=0"):
        balanced_cuts([1.0], num_parts=0)
    assert balanced_cuts([], num_parts=3) == ()
