"""The longest length that fits is found exactly, whatever the curve, in few questions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundpipe_lightning.planning.cost.memory import longest_that_fits


@given(st.integers(0, 5000), st.integers(1, 5000), st.sampled_from([0.2, 1.0, 2.0, 5.0]))
def test_it_is_the_longest(most: int, beyond: int, power: float) -> None:
    def shortage(length: int) -> float:
        return float((length + 1) ** power - (most + 1.5) ** power)

    assert longest_that_fits(shortage, too_long=most + beyond) == most


@pytest.mark.parametrize("square", [0.0, 1e-3])
def test_curves_of_memory_take_few_questions(square: float) -> None:
    asked: list[int] = []

    def shortage(length: int) -> float:
        asked.append(length)
        return 3.0 * length + square * length**2 - (3.0 * 61_803 + square * 61_803**2 + 1.0)

    assert longest_that_fits(shortage, too_long=200_000) == 61_803
    assert len(asked) < 16
