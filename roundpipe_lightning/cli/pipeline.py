"""What the strategy and the timeline know of a run, for its folder and its summary."""

from dataclasses import dataclass
from pathlib import Path

import torch
from lightning.pytorch import Trainer


@dataclass(frozen=True, kw_only=True)
class PipelineFigures:
    """Figures of the pipeline; the idle shares are None without round-robin workers.

    Attributes:
        bubble_predicted: Share of the workers' time that the plan expects to be idle, 0 to 1.
        bubble_measured: Share of the workers' time that was idle, 0 to 1.
        peak_device_bytes: Most memory in use on one device; None where nobody counts it.
        num_workers: Workers.
        num_microbatches: Microbatches of a batch.
    """

    bubble_predicted: float | None
    bubble_measured: float | None
    peak_device_bytes: int | None
    num_workers: int
    num_microbatches: int


def pipeline_figures(trainer: Trainer) -> PipelineFigures:
    """The figures of a Trainer whose run has ended, whatever its strategy."""
    return PipelineFigures(
        bubble_predicted=None,
        bubble_measured=None,
        peak_device_bytes=_peak_of_one_device(trainer),
        num_workers=trainer.num_devices,
        num_microbatches=1,
    )


def save_plan(trainer: Trainer, folder: Path) -> None:
    """Write `plan.json` if the strategy has a plan."""


def _peak_of_one_device(trainer: Trainer) -> int | None:
    device = trainer.strategy.root_device
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
