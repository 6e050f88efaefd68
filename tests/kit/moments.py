import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from roundpipe_lightning.engine import steps as running
from roundpipe_lightning.engine.worker.turns import Turns
from tests.kit.engine import Block

PATIENCE_SECONDS = 60.0
"""For what comes at once, however busy the machine is."""


class WatchClock:
    """The clock of the thread that watches a step.

    Args:
        monkeypatch: Puts it in place.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._changed = threading.Condition()
        self._num_looks = 0
        self._offset_seconds = 0.0
        self._seconds_per_look = 0.0
        monkeypatch.setattr(running, "monotonic", self.monotonic)

    def monotonic(self) -> float:
        with self._changed:
            self._num_looks += 1
            self._offset_seconds += self._seconds_per_look
            self._changed.notify_all()
            return time.monotonic() + self._offset_seconds

    def advance(self, seconds: float) -> None:
        with self._changed:
            self._offset_seconds += seconds

    def advance_with_each_look(self, seconds: float) -> None:
        """Let so much time pass whenever the step is looked at, from now on."""
        with self._changed:
            self._seconds_per_look = seconds

    def await_looks(self, num: int) -> None:
        """Wait until a step has been looked at so many times more."""
        with self._changed:
            wanted = self._num_looks + num
            assert self._changed.wait_for(lambda: self._num_looks >= wanted, PATIENCE_SECONDS)


class GivenUp:
    """The moment at which a step is given up: all who wait for their turn are released.

    Args:
        monkeypatch: Listens.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._event = threading.Event()
        abort = Turns.abort

        def abort_and_set(turns: Turns) -> None:
            abort(turns)
            self._event.set()

        monkeypatch.setattr(Turns, "abort", abort_and_set)

    def wait(self) -> None:
        assert self._event.wait(PATIENCE_SECONDS)


class ObservedCondition(threading.Condition):
    """A condition that counts when a thread other than the test's waits for it.

    Attributes:
        waits: Released once for every wait. Nothing that the condition guards changes between that
            and the wait: the thread holds the lock.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits = threading.Semaphore(0)

    def wait(self, timeout: float | None = None) -> bool:
        if threading.current_thread() is not threading.main_thread():
            self.waits.release()
        return super().wait(timeout)


class _OwnGradient(torch.autograd.Function):
    @staticmethod
    def forward(tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.change = inputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.change(gradient), None


def with_gradient(
    tensor: Tensor, change: Callable[[Tensor], Tensor], *, by_name: bool = False
) -> Tensor:
    """Return the same tensor by a function of the user's, whose gradient is what `change` gives."""
    apply: Any = _OwnGradient.apply
    same: Tensor = apply(change=change, tensor=tensor) if by_name else apply(tensor, change)
    return same


def call_in_backward(tensor: Tensor, call: Callable[[], object]) -> Tensor:
    """Return the same tensor; `call` is called when its gradient comes, before that goes on."""

    def call_and_go_on(gradient: Tensor) -> Tensor:
        call()
        return gradient

    return with_gradient(tensor, call_and_go_on)


class ObservedBlock(Block):
    on_backward: Callable[[], None] = staticmethod(lambda: None)

    def forward(self, x: Tensor) -> Tensor:
        return call_in_backward(super().forward(x), self.on_backward)
