"""Answers what `roundpipe-plan` is asked: the best plan, the longest sequence, the bottleneck.

Where a job does not fit, changes that make it fit are each verified by planning them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from roundpipe_lightning.cli.build import read_adapters
from roundpipe_lightning.cli.plan_settings import PRECISIONS, JobMaker, PlanSettings
from roundpipe_lightning.planning.cost.memory import longest_that_fits
from roundpipe_lightning.planning.model.hardware import HardwareSpec, MatrixRates
from roundpipe_lightning.planning.model.storage import WeightStorage
from roundpipe_lightning.planning.search.fit import FitAnswer, fit_training, memory_shortage
from roundpipe_lightning.planning.search.remedies import Price, Remedy, other_machines, verified
from roundpipe_lightning.planning.search.request import PartitionHints

_LONGEST = 2**22
"""Tokens of a sequence at which the search for the longest one stops."""

_MULTIPLE = 128
"""The longest sequence is a multiple of this."""

_LORA = {
    "_target_": "peft.LoraConfig",
    "r": 32,
    "lora_alpha": 64,
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
}


def answer(settings: PlanSettings, *, maker: JobMaker) -> FitAnswer:
    """Return the best plan over all numbers of microbatches that are to be chosen from.

    Raises:
        RoundPipeError: The model cannot be measured, or a hint cannot be kept.
    """
    hints, counts = settings.hints, settings.microbatch_counts()
    fewest = max(hints.team_size or 1, hints.round_size or 1)
    first, *others = [count for count in counts if count >= fewest] or counts[:1]
    return fit_training(
        maker.job(settings, num_microbatches=first),
        *(maker.job(settings, num_microbatches=count) for count in others),
    )


def longest_seq_len(settings: PlanSettings, *, maker: JobMaker) -> int:
    """Return the longest sequence that fits; 0 where none does.

    The microbatches are those of the settings, or of one sequence where their number is open.
    """

    def shortage(units: int) -> float:
        shorter = dataclasses.replace(settings, seq_len=units * _MULTIPLE)
        return memory_shortage(maker.first_job(shorter))

    return _MULTIPLE * longest_that_fits(shortage, too_long=_LONGEST // _MULTIPLE + 1)


# --- the bottleneck ---------------------------------------------------------------------------

_RESOURCES = {
    "matrix products and attention": ("matrix_rates",),
    "device memory bandwidth": ("memory_bytes_per_second",),
    "links between host and devices": (
        "upload_bytes_per_second",
        "download_bytes_per_second",
        "root_upload_bytes_per_second",
        "root_download_bytes_per_second",
    ),
    "host memory bandwidth": ("host_bytes_per_second",),
}
"""Figures of a machine that become twice as large where a resource is twice as fast."""


def gains(found: FitAnswer) -> dict[str, float]:
    """Return by what share the step gets shorter when one resource is twice as fast.

    The plan stays the same. The first entry is the bottleneck.
    """
    if found.prediction is None:
        return {}
    seconds = found.prediction.step_seconds

    def gain(figures: Sequence[str]) -> float:
        job = dataclasses.replace(found.job, hardware=_twice_as_fast(found.job.hardware, figures))
        return max(0.0, 1 - job.predict(found.layout).step_seconds / seconds)

    by_name = {name: gain(figures) for name, figures in _RESOURCES.items()}
    return dict(sorted(by_name.items(), key=lambda pair: -pair[1]))


def _twice_as_fast(hardware: HardwareSpec, figures: Sequence[str]) -> HardwareSpec:
    def twice(value: float | MatrixRates) -> float | MatrixRates:
        if not isinstance(value, MatrixRates):
            return 2 * value
        rates = {name: rate for name, rate in vars(value).items() if rate is not None}
        return MatrixRates(**{name: 2 * rate for name, rate in rates.items()})

    doubled = {name: twice(getattr(hardware, name)) for name in figures}
    return dataclasses.replace(hardware, **doubled)  # type: ignore[arg-type]


# --- what makes it fit ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Change:
    """Settings that differ.

    Attributes:
        overrides: What to add to the command line.
        settings: All settings with the change.
    """

    overrides: tuple[str, ...]
    settings: PlanSettings


def cheapest_changes(
    settings: PlanSettings, *, maker: JobMaker, count: int = 3
) -> list[tuple[Remedy[Change], FitAnswer]]:
    """Return changes that make a job fit, the cheapest first; pairs where one is not enough."""
    singles = list(_changes(settings, maker))
    found = verified(singles, count=count)
    if len(found) < count:
        alone = {remedy.change.overrides for remedy, _ in found}
        pairs = sorted(_pairs(singles, maker, alone=alone), key=lambda remedy: remedy.price)
        found += verified(pairs, count=count - len(found))
    return found


def _pairs(
    singles: Sequence[Remedy[Change]], maker: JobMaker, *, alone: set[tuple[str, ...]]
) -> Iterator[Remedy[Change]]:
    """Put two changes together, neither of which is enough alone, the more expensive one second."""
    shorter = [s.change.settings.seq_len for s in singles if s.price is Price.CONTEXT]
    longest = max(shorter, default=0)
    for first in singles:
        if first.change.overrides in alone:
            continue
        for second in _changes(first.change.settings, maker):
            is_new = second.price > first.price and second.change.overrides not in alone
            if second.price is Price.CONTEXT and second.change.settings.seq_len <= longest:
                is_new = False
            if is_new:
                overrides = first.change.overrides + second.change.overrides
                change = dataclasses.replace(second.change, overrides=overrides)
                yield dataclasses.replace(second, change=change)


def _changes(settings: PlanSettings, maker: JobMaker) -> Iterator[Remedy[Change]]:
    """Yield what can be changed, the cheapest first."""

    def change(price: Price, overrides: str, **fields: object) -> Remedy[Change]:
        other = dataclasses.replace(settings, **fields)  # type: ignore[arg-type]
        return Remedy(
            change=Change(overrides=tuple(overrides.split()), settings=other),
            price=price,
            job=lambda: maker.first_job(other),
        )

    for overrides, fields in _free_changes(settings):
        yield change(Price.NOTHING, overrides, **fields)
    if "mixed" in settings.precision.name or settings.precision.name == "32-true":
        half = PRECISIONS["bf16-true"]
        yield change(Price.PRECISION, f"trainer.precision={half.name}", precision=half)
    for bits in (8, 4) if settings.adapters is not None else ():
        if bits < settings.frozen_bits:
            yield change(Price.PRECISION, f"peft.frozen_bits={bits}", frozen_bits=bits)
    longest = longest_seq_len(settings, maker=maker)
    if 0 < longest < settings.seq_len:
        yield change(Price.CONTEXT, f"data.seq_len={longest}", seq_len=longest)
    if settings.adapters is None:
        yield change(Price.TRAINABLE, "peft=lora", adapters=read_adapters(_LORA))
    for price, spec in other_machines(maker.first_job(settings)):
        is_named = price is Price.MACHINE
        override = f"={spec.name}" if is_named else f".host_bytes={spec.host_bytes}"
        yield change(price, f"hardware{override}", hardware=spec)


def _free_changes(settings: PlanSettings) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield what leaves the results alone: overrides, and the settings that they change."""
    if settings.given_plan is not None or settings.hints != PartitionHints():
        overrides = "partition=auto partition.num_microbatches=auto"
        if settings.given_plan is None:
            overrides = " ".join(
                f"partition.{key}={'auto' if key == 'recompute' else 'null'}"
                for key in settings.hints.keys_given()
            )
        yield overrides, {"hints": PartitionHints(), "given_plan": None}
    count = settings.num_microbatches
    while count is not None and count < settings.batch_size:
        count = min(2 * count, settings.batch_size)
        yield f"partition.num_microbatches={count}", {"num_microbatches": count}
    if settings.batch_size % 2 == 0 and settings.num_microbatches is None:
        size, batches = settings.batch_size // 2, 2 * settings.num_batches
        yield (
            f"data.batch_size={size} trainer.accumulate_grad_batches={batches}",
            {"batch_size": size, "num_batches": batches},
        )
    if settings.weights is WeightStorage.PAGE_LOCKED and settings.adapters is not None:
        yield "weights=memory_mapped", {"weights": WeightStorage.MEMORY_MAPPED}
