"""Answers what `roundpipe-plan` is asked: the best plan, the longest sequence, the bottleneck."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from roundpipe_lightning.cli.plan_settings import JobMaker, PlanSettings
from roundpipe_lightning.planning.model.hardware import HardwareSpec, MatrixRates
from roundpipe_lightning.planning.search.fit import (
    FitAnswer,
    TrainingJob,
    fit_training,
    fits_memory,
)

_LONGEST = 2**22
"""Tokens of a sequence at which the search for the longest one stops."""

_MULTIPLE = 128
"""The longest sequence is a multiple of this."""


def answer(settings: PlanSettings, *, maker: JobMaker) -> FitAnswer:
    """Return the best plan over all numbers of microbatches that are to be chosen from.

    Raises:
        RoundPipeError: The model cannot be measured, or a hint cannot be kept.
    """
    counts = [n for n in settings.microbatch_counts() if _allows(settings, n)]
    first, *others = counts or settings.microbatch_counts()[:1]
    return fit_training(
        maker.job(settings, num_microbatches=first),
        *(maker.job(settings, num_microbatches=count) for count in others),
    )


def _allows(settings: PlanSettings, num_microbatches: int) -> bool:
    """Say whether hints leave room for so few microbatches."""
    hints = settings.hints
    return num_microbatches >= max(hints.team_size or 1, hints.round_size or 1)


def longest_seq_len(settings: PlanSettings, *, maker: JobMaker) -> int:
    """Return the longest sequence that fits, by bisection; 0 where none does.

    The microbatches are those of the settings, or of one sequence where their number is open.
    """
    count = settings.microbatch_counts()[0]

    def fits(units: int) -> bool:
        shorter = dataclasses.replace(settings, seq_len=units * _MULTIPLE)
        return fits_memory(maker.job(shorter, num_microbatches=count))

    if not fits(1):
        return 0
    low, high = 1, 2
    while high * _MULTIPLE <= _LONGEST and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * _MULTIPLE


# --- the bottleneck ---------------------------------------------------------------------------


def _faster_products(hardware: HardwareSpec) -> HardwareSpec:
    rates = dataclasses.asdict(hardware.matrix_rates)
    doubled = {name: None if rate is None else 2 * rate for name, rate in rates.items()}
    return dataclasses.replace(hardware, matrix_rates=MatrixRates(**doubled))  # type: ignore[arg-type]


def _faster_device_memory(hardware: HardwareSpec) -> HardwareSpec:
    return dataclasses.replace(
        hardware, memory_bytes_per_second=2 * hardware.memory_bytes_per_second
    )


def _faster_links(hardware: HardwareSpec) -> HardwareSpec:
    return dataclasses.replace(
        hardware,
        upload_bytes_per_second=2 * hardware.upload_bytes_per_second,
        download_bytes_per_second=2 * hardware.download_bytes_per_second,
        root_upload_bytes_per_second=2 * hardware.root_upload_bytes_per_second,
        root_download_bytes_per_second=2 * hardware.root_download_bytes_per_second,
    )


def _faster_host(hardware: HardwareSpec) -> HardwareSpec:
    return dataclasses.replace(hardware, host_bytes_per_second=2 * hardware.host_bytes_per_second)


_RESOURCES: tuple[tuple[str, Callable[[HardwareSpec], HardwareSpec]], ...] = (
    ("matrix products and attention", _faster_products),
    ("device memory bandwidth", _faster_device_memory),
    ("links between host and devices", _faster_links),
    ("host memory bandwidth", _faster_host),
)


def gains(found: FitAnswer) -> dict[str, float]:
    """Return by what share the step gets shorter when one resource is twice as fast.

    The plan stays the same. The first entry is the bottleneck.
    """
    if found.prediction is None:
        return {}
    seconds = found.prediction.step_seconds

    def gain(faster: Callable[[HardwareSpec], HardwareSpec]) -> float:
        job: TrainingJob = dataclasses.replace(found.job, hardware=faster(found.job.hardware))
        return max(0.0, 1 - job.predict(found.layout).step_seconds / seconds)

    by_name = {name: gain(faster) for name, faster in _RESOURCES}
    return dict(sorted(by_name.items(), key=lambda pair: -pair[1]))
