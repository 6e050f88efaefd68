"""What the strategy and the timeline know of a run, for its folder and its summary."""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.accelerators import CPUAccelerator

from roundpipe_lightning.callbacks.monitor import PipelineMonitor
from roundpipe_lightning.callbacks.timeline import PipelineTimeline
from roundpipe_lightning.planning.report.step_record import IdleCause
from roundpipe_lightning.strategy.strategy import RoundPipeStrategy


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


def pipeline_figures(trainer: Trainer, callbacks: Iterable[Callback]) -> PipelineFigures:
    """The figures of a run that has ended, whatever its strategy.

    Args:
        trainer: The run's Trainer.
        callbacks: The run's callbacks; a `PipelineTimeline` among them has the idle shares.
    """
    timelines = [callback for callback in callbacks if isinstance(callback, PipelineTimeline)]
    predicted = timelines[0].predicted_idle_share if timelines else None
    measured = timelines[0].measured_idle_share if timelines else None
    strategy = trainer.strategy
    if not isinstance(strategy, RoundPipeStrategy):
        return PipelineFigures(
            bubble_predicted=None,
            bubble_measured=None,
            peak_device_bytes=_peak_of_one_device(strategy.root_device),
            num_workers=trainer.num_devices,
            num_microbatches=1,
        )
    return PipelineFigures(
        bubble_predicted=predicted,
        bubble_measured=measured,
        peak_device_bytes=strategy.peak_device_bytes,
        num_workers=strategy.num_workers,
        num_microbatches=strategy.num_microbatches,
    )


def monitored_rows(callbacks: Iterable[Callback]) -> list[tuple[str, str]]:
    """Rows of the summary's table that a `PipelineMonitor` has measured over the whole run."""
    monitors = [callback for callback in callbacks if isinstance(callback, PipelineMonitor)]
    figures = monitors[0].figures if monitors else {}
    rows = []
    if "tflop_per_second" in figures:
        peak = figures.get("share_of_peak")
        of_peak = "" if peak is None else f", {peak:.1%} of the devices' peak"
        rows.append(("Arithmetic", f"{figures['tflop_per_second']:.3g} TFLOP/s{of_peak}"))
    if "idle_share" in figures:
        parts = {cause.value: figures[f"idle_{cause.value}_share"] for cause in IdleCause}
        longest = sorted(parts.items(), key=lambda part: -part[1])
        named = ", ".join(f"{name} {share:.0%}" for name, share in longest if share >= 0.005)
        idle = f"{figures['idle_share']:.0%} of the time: {named}"
        rows.append(("Idle altogether", idle))
    return rows


@contextlib.contextmanager
def uncrowded_threads(trainer: Trainer) -> Iterator[None]:
    """Let the Trainer's own thread compute alone where the CPU workers take every core.

    Intra-op threads that wait for one another on busy cores cost far more than they save: steps
    of the main job took four times as long on two busy cores. The setting of before is put back.
    """
    total = torch.get_num_threads()
    strategy = trainer.strategy
    crowded = (
        isinstance(strategy, RoundPipeStrategy)
        and isinstance(trainer.accelerator, CPUAccelerator)
        and strategy.num_workers >= total > 1
    )
    if crowded:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if crowded:
            torch.set_num_threads(total)


def save_plan(trainer: Trainer, folder: Path) -> None:
    """Write `plan.json` if the strategy has a plan."""
    strategy = trainer.strategy
    if isinstance(strategy, RoundPipeStrategy) and strategy.plan is not None:
        strategy.plan.save(folder / "plan.json")


def _peak_of_one_device(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
