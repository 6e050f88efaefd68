"""The longest sequences that fit, where every length can be asked what it lacks."""

from __future__ import annotations

from collections.abc import Callable


def longest_that_fits(shortage: Callable[[int], float], *, too_long: int) -> int:
    """Return the longest length that fits; 0 where none does.

    What is missing grows with the length nearly as a line, so every second length is guessed from
    the known ones on either side; the others halve what is left, so that no curve takes long.

    Args:
        shortage: What is missing at a length: 0 or less where it fits. It must not fall.
        too_long: A length that does not fit.
    """
    low, high = 0, too_long
    below, above = None, shortage(too_long)
    halves = True
    while high - low > 1:
        guess = (low + high) // 2
        if below is not None and not halves:
            guess = low + round((high - low) * -below / (above - below))
            guess = min(max(guess, low + 1), high - 1)
        halves = not halves
        missing = shortage(guess)
        if missing > 0:
            high, above = guess, missing
        else:
            low, below = guess, missing
    return low


__all__ = ["longest_that_fits"]
