"""Notes on exceptions: where in a step they happened."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn


def add_note(error: BaseException, note: str) -> None:
    """Attach a note to an exception, also in Python 3.10, which keeps but does not print it."""
    noted: Any = error
    noted.__notes__ = [*getattr(error, "__notes__", []), note]


@contextmanager
def noted(place: str) -> Iterator[None]:
    """Have errors of the body say where they happened."""
    try:
        yield
    except Exception as error:
        if not any(place in note for note in getattr(error, "__notes__", ())):
            add_note(error, f"This happened in {place}.")
        raise


def raise_noted(error: BaseException, place: str) -> NoReturn:
    """Raise an error again, with a note that says where it happened."""
    add_note(error, f"This happened in {place}.")
    try:
        raise error
    finally:  # its traceback refers to this frame: no circle that holds the step's tensors
        del error
