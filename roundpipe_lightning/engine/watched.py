"""Tells the protocol's checker of what host threads launch."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from roundpipe_lightning.engine.placement import Operand, operands_of
from roundpipe_lightning.engine.protocol import HOST, ProtocolChecker
from roundpipe_lightning.engine.tagged import raw_of, tag_of


class WatchedOperations(TorchDispatchMode):
    """Tells the checker of every operation of a thread.

    Args:
        checker: The checker.
        lines: Compute queues by the name of their device.
    """

    def __init__(self, checker: ProtocolChecker, lines: dict[str, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._checker = checker
        self._lines = lines

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload) or func.is_view:
            return func(*args, **kwargs)
        operands = list(operands_of(func, args, kwargs, place_of=tag_of))
        line = self._line(operands)
        self._checker.begin(line)
        what = f"{func} in {threading.current_thread().name}"
        for operand in operands:
            self._checker.access(
                raw_of(operand.tensor), line=line, writes=operand.written, what=what
            )
        result = func(*args, **kwargs)
        read = {id(operand.tensor) for operand in operands}
        for made in _tensors(result):
            if id(made) not in read:
                self._made(made, line, what)
        return result

    def _line(self, operands: Sequence[Operand]) -> str:
        """Return where an operation runs: on the device of its tensors, else on the host.

        Values behind a tag are read as plain tensors where they go to the host or to another
        device; the host waits for that.
        """
        for operand in operands:
            if operand.place is not None:
                return self._lines[operand.place]
        for operand in operands:
            line = self._checker.line_of(operand.tensor)
            if line != HOST:
                self._checker.wait(HOST, self._checker.stamp(line))
        return HOST

    def _made(self, tensor: Tensor, line: str, what: str) -> None:
        place = tag_of(tensor)
        if place is not None:
            self._checker.computes_in(raw_of(tensor), self._lines[place])
        self._checker.access(raw_of(tensor), line=line, writes=True, what=what)


def _tensors(result: Any) -> list[Tensor]:
    values = result if isinstance(result, (list, tuple)) else [result]
    return [value for value in values if isinstance(value, Tensor)]
