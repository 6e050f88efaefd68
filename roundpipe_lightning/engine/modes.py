"""Torch's function modes of a thread, put away while the engine's own code runs.

While a mode is on the stack, PyTorch asks it about every function and every attribute of a tensor
that Python code reads, `x.shape` too: some ten times the price of the answer. The engine reads many
and needs no mode to, so that only the user's code runs under them.

```
user code   [ UserCode, torch.device(...) ]
engine        [ ]              put away
block           [ UserCode, torch.device(...) ]   put back
```
"""

# ruff: noqa: SLF001 - PyTorch has no public way to the stack of modes

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch


class ModeStack:
    """What is put away of one thread's modes."""

    def __init__(self) -> None:
        self._away: list[Any] = []

    def without(self) -> _Changed:
        """Put all modes away until the end of the context."""
        return _Changed(self.put_away, self.put_back)

    def again(self) -> _Changed:
        """Put those back that are away, until the end of the context."""
        return _Changed(self.put_on, self.put_off)

    def put_away(self) -> list[Any]:
        """Take all modes from the stack, and return them; the lowest first."""
        taken = [
            torch._C._pop_torch_function_stack()
            for _ in range(torch._C._len_torch_function_stack())
        ]
        taken.reverse()
        self._away = self._away + taken
        return taken

    def put_back(self, taken: list[Any]) -> None:
        """Undo `put_away`, which returned these."""
        if taken:
            self._away = self._away[: -len(taken)]
            _push(taken)

    def put_on(self) -> list[Any]:
        """Put all that is away on the stack, and return it."""
        back, self._away = self._away, []
        _push(back)
        return back

    def put_off(self, back: list[Any]) -> None:
        """Undo `put_on`, which returned these."""
        for _ in back:
            torch._C._pop_torch_function_stack()
        self._away = back


def _push(modes: list[Any]) -> None:
    for mode in modes:
        torch._C._push_on_torch_function_stack(mode)


class _Changed:
    """Runs code with other modes. A class: it is entered for every call of a block.

    Args:
        change: Changes the stack, and returns what `undo` is given.
        undo: Undoes it.
    """

    __slots__ = ("_change", "_moved", "_undo")

    def __init__(self, change: Callable[[], list[Any]], undo: Callable[[list[Any]], None]) -> None:
        self._change = change
        self._undo = undo

    def __enter__(self) -> None:
        self._moved = self._change()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._undo(self._moved)
