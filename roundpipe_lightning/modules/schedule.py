"""The learning rate over a run: linear warm-up, then a cosine down to a share of the peak."""

import math
from dataclasses import dataclass

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from roundpipe_lightning.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class WarmupCosine:
    """Linear warm-up over `warmup_steps`, then a cosine that ends at `final_share` of the peak.

    Attributes:
        warmup_steps: Optimizer steps until the learning rate has reached the optimizer's `lr`.
            The first step already uses `1 / (warmup_steps + 1)` of it.
        total_steps: Optimizer steps until the end of the cosine; None takes the length of the run.
        final_share: Learning rate at and after `total_steps`, as a share of the peak (0 to 1).

    Raises:
        ConfigurationError: A figure is out of its range.
    """

    warmup_steps: int = 0
    total_steps: int | None = None
    final_share: float = 0.1

    def __post_init__(self) -> None:
        if self.warmup_steps < 0:
            raise ConfigurationError(
                f"scheduler.warmup_steps={self.warmup_steps} is negative: use 0 for no warm-up."
            )
        if self.total_steps is not None and self.total_steps < 1:
            raise ConfigurationError(
                f"scheduler.total_steps={self.total_steps} must be at least 1, or null for the "
                "length of the run."
            )
        if not 0.0 <= self.final_share <= 1.0:
            raise ConfigurationError(
                f"scheduler.final_share={self.final_share} must lie between 0 and 1."
            )

    def factor(self, step: int, *, total_steps: int) -> float:
        """Learning rate of optimizer step `step` (0 is the first), as a share of the peak."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        decay_steps = max(1, total_steps - self.warmup_steps)
        progress = min(1.0, (step - self.warmup_steps) / decay_steps)
        cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.final_share + (1.0 - self.final_share) * cosine

    def attach(self, optimizer: Optimizer, *, run_steps: float) -> LambdaLR:
        """Make the torch scheduler for an optimizer.

        Args:
            optimizer: Its `lr` is the peak.
            run_steps: Optimizer steps of the run; infinity for one without an end.

        Raises:
            ConfigurationError: Neither the run nor the cosine has an end.
        """
        if self.total_steps is None and math.isinf(run_steps):
            raise ConfigurationError(
                "The run has no end (max_steps=-1 and max_epochs=-1), so the length of the cosine "
                "is unknown. Set scheduler.total_steps, trainer.max_steps or trainer.max_epochs."
            )
        total_steps = int(run_steps) if self.total_steps is None else self.total_steps
        return LambdaLR(optimizer, lambda step: self.factor(step, total_steps=total_steps))
