"""Ctrl-C that stops between two steps, where everything can be saved."""

import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.types import STEP_OUTPUT
from typing_extensions import Self, override


class GracefulInterrupt(Callback):
    """Turns Ctrl-C within a training step into a KeyboardInterrupt right after that step.

    Used as a context manager around the Trainer, and as one of its callbacks. A second Ctrl-C, or
    one outside a training step, interrupts at once. The handler of before is put back at the end.
    """

    def __init__(self) -> None:
        self._in_step = False
        self._requested = False
        self._previous: Any = None
        self._installed = False

    def __enter__(self) -> Self:
        """Take over SIGINT, where that is possible: in the main thread."""
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._handle)
            self._installed = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Put the previous handler back."""
        if self._installed:
            signal.signal(signal.SIGINT, self._previous)
            self._installed = False

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """From here on an interrupt waits."""
        self._in_step = True

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: STEP_OUTPUT,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Raise an interrupt that came during the step."""
        self._in_step = False
        if self._requested:
            raise KeyboardInterrupt

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        if not self._in_step or self._requested:
            raise KeyboardInterrupt
        self._requested = True
        sys.stderr.write("\nStopping after this step; Ctrl-C again stops at once.\n")
