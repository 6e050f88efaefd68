"""What a run measured of itself while it trained."""

import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.types import STEP_OUTPUT
from typing_extensions import override


class RunStatistics(Callback):
    """Collects losses, speed and the number of steps.

    Attributes:
        loss_first: Loss of the first training step, nats per token; None before it.
        loss_last: Loss of the latest training step, nats per token; None before the first.
        num_steps: Optimizer steps of this run, those before a resume not counted.
        validated_step: Optimizer step at which val_loss was measured last; None: never.
    """

    def __init__(self) -> None:
        self.loss_first: float | None = None
        self.loss_last: float | None = None
        self.num_steps = 0
        self.validated_step: int | None = None
        self._first_step = 0
        self._started_seconds = 0.0
        self._batches: list[tuple[int, float]] = []

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens trained on per second of training step, the first step left out if it can be.

        Validation, checkpoints and loading data between the steps are not counted.
        """
        batches = self._batches[1:] if len(self._batches) > 1 else self._batches
        seconds = sum(duration for _, duration in batches)
        return sum(tokens for tokens, _ in batches) / seconds if seconds > 0 else None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remember the step that the run starts at."""
        self._first_step = trainer.global_step

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Start the clock."""
        self._started_seconds = time.perf_counter()

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: STEP_OUTPUT,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Stop the clock and keep the loss."""
        seconds = time.perf_counter() - self._started_seconds
        self._batches.append((int(batch["input_ids"].numel()), seconds))
        loss = float(trainer.callback_metrics["train_loss"])
        self.loss_first = loss if self.loss_first is None else self.loss_first
        self.loss_last = loss
        self.num_steps = trainer.global_step - self._first_step

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remember the step that val_loss belongs to."""
        if not trainer.sanity_checking:
            self.validated_step = trainer.global_step
