"""Changes that make a job fit, each verified by planning it, the cheapest first.

What a change costs is an order of kinds, then speed: first what leaves the results alone, then
what rounds differently, then what trains something else, then what costs money.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from roundpipe_lightning.cli.build import read_adapters
from roundpipe_lightning.cli.plan_answer import longest_seq_len
from roundpipe_lightning.cli.plan_settings import PRECISIONS, JobMaker, PlanSettings
from roundpipe_lightning.errors import RoundPipeError
from roundpipe_lightning.planning.model.storage import WeightStorage
from roundpipe_lightning.planning.search.fit import FitAnswer, Search, fit_training, fits_memory
from roundpipe_lightning.planning.search.request import PartitionHints

_GIB = 2**30
_HINT_KEYS = {
    "forward": "forward",
    "backward": "backward",
    "most_forward": "limits.forward",
    "most_backward": "limits.backward",
    "most_fused": "limits.fused",
    "team_size": "team_size",
    "round_size": "round_size",
    "recompute": "recompute",
    "weight_slots": "weight_slots",
    "resident": "resident",
}
_LORA = {
    "_target_": "peft.LoraConfig",
    "r": 32,
    "lora_alpha": 64,
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
}


class Price(IntEnum):
    """What a change costs, the cheapest kind first."""

    NOTHING = 0
    """Results stay the same, but for rounding."""

    PRECISION = 1
    """Numbers are rounded more."""

    CONTEXT = 2
    """Sequences are shorter."""

    TRAINABLE = 3
    """Fewer parameters are trained."""

    HOST_MEMORY = 4
    """More host memory."""

    MACHINE = 5
    """Another machine."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """Settings that differ.

    Attributes:
        overrides: What to add to the command line.
        price: What it costs.
        settings: All settings with the change.
    """

    overrides: tuple[str, ...]
    price: Price
    settings: PlanSettings


@dataclass(frozen=True, kw_only=True)
class VerifiedChange:
    """A change, and the plan that fits with it.

    Attributes:
        change: What differs.
        answer: The plan.
    """

    change: Change
    answer: FitAnswer


def cheapest_changes(
    settings: PlanSettings, *, maker: JobMaker, count: int = 3
) -> list[VerifiedChange]:
    """Return changes that make a job fit, the cheapest first; pairs where single ones are too few.

    Args:
        settings: A job that does not fit.
        maker: Makes jobs; it has measured the model.
        count: How many to return, at most.
    """
    singles = list(_changes(settings, maker))
    found = _verified(singles, maker, count)
    if len(found) < count:
        alone = {change.change.overrides for change in found}
        found += _verified(_pairs(singles, maker, alone=alone), maker, count - len(found))
    return found


def _verified(changes: list[Change], maker: JobMaker, count: int) -> list[VerifiedChange]:
    """Plan the changes, kind by kind, until there are enough; the fastest of a kind first."""
    found: list[VerifiedChange] = []
    ordered = sorted(changes, key=lambda change: change.price)
    for _, kind in itertools.groupby(ordered, key=lambda change: change.price):
        planned = [VerifiedChange(change=c, answer=a) for c in kind if (a := _plan(c, maker))]
        found += sorted(planned, key=lambda change: -change.answer.tokens_per_second)
        if len(found) >= count:
            break
    return found[:count]


def _plan(change: Change, maker: JobMaker) -> FitAnswer | None:
    """Plan a change; None where it does not fit, or is refused."""
    settings = change.settings
    try:
        job = maker.job(
            settings, num_microbatches=settings.microbatch_counts()[0], search=Search.QUICK
        )
        answer = fit_training(job)
    except RoundPipeError:
        return None
    return answer if answer.fits else None


def _pairs(changes: list[Change], maker: JobMaker, *, alone: set[tuple[str, ...]]) -> list[Change]:
    """Put two changes together, neither of which is enough alone, the second one the dearer."""
    longest = max((c.settings.seq_len for c in changes if c.price is Price.CONTEXT), default=0)
    return [
        dataclasses.replace(second, overrides=first.overrides + second.overrides)
        for first in changes
        if first.overrides not in alone
        for second in _changes(first.settings, maker)
        if second.price > first.price and second.overrides not in alone
        if second.price is not Price.CONTEXT or second.settings.seq_len > longest
    ]


# --- what can be changed ----------------------------------------------------------------------


def _changes(settings: PlanSettings, maker: JobMaker) -> Iterator[Change]:
    yield from _free_changes(settings)
    if "mixed" in settings.precision.name or settings.precision.name == "32-true":
        precision = PRECISIONS["bf16-true"]
        yield _changed(
            settings, Price.PRECISION, f"trainer.precision={precision.name}", precision=precision
        )
    if settings.adapters is not None:
        for bits in (8, 4):
            if bits < settings.frozen_bits:
                yield _changed(
                    settings, Price.PRECISION, f"peft.frozen_bits={bits}", frozen_bits=bits
                )
    longest = longest_seq_len(settings, maker=maker)
    if 0 < longest < settings.seq_len:
        yield _changed(settings, Price.CONTEXT, f"data.seq_len={longest}", seq_len=longest)
    if settings.adapters is None:
        yield _changed(settings, Price.TRAINABLE, "peft=lora", adapters=read_adapters(_LORA))
    yield from _machines(settings, maker)


def _free_changes(settings: PlanSettings) -> Iterator[Change]:
    """What leaves the results alone."""
    if settings.given_plan is not None or settings.hints != PartitionHints():
        hints = dataclasses.asdict(settings.hints)
        taken = [_HINT_KEYS[name] for name, value in hints.items() if value is not None]
        overrides = [f"partition.{key}={'auto' if key == 'recompute' else 'null'}" for key in taken]
        if settings.given_plan is not None:
            overrides = ["partition=auto", "partition.num_microbatches=auto"]
        yield _changed(
            settings, Price.NOTHING, " ".join(overrides), hints=PartitionHints(), given_plan=None
        )
    count = settings.num_microbatches
    while count is not None and count < settings.batch_size:
        count = min(2 * count, settings.batch_size)
        yield _changed(
            settings,
            Price.NOTHING,
            f"partition.num_microbatches={count}",
            num_microbatches=count,
        )
    if settings.batch_size % 2 == 0 and settings.num_microbatches is None:
        size, batches = settings.batch_size // 2, 2 * settings.num_batches
        yield _changed(
            settings,
            Price.NOTHING,
            f"data.batch_size={size} trainer.accumulate_grad_batches={batches}",
            batch_size=size,
            num_batches=batches,
        )
    if settings.weights is WeightStorage.PAGE_LOCKED and settings.adapters is not None:
        yield _changed(
            settings,
            Price.NOTHING,
            "weights=memory_mapped",
            weights=WeightStorage.MEMORY_MAPPED,
        )


def _machines(settings: PlanSettings, maker: JobMaker) -> Iterator[Change]:
    """More host memory, and the machine with the smallest devices that are large enough."""
    hardware = settings.hardware
    count = settings.microbatch_counts()[0]
    job = maker.job(settings, num_microbatches=count, search=Search.QUICK)
    missing = fit_training(job).memory.host.missing_bytes
    if missing:
        size = 64 * _GIB
        size *= -(-(hardware.host_bytes + missing) // size)
        yield _changed(
            settings,
            Price.HOST_MEMORY,
            f"hardware.host_bytes={size}",
            hardware=dataclasses.replace(hardware, host_bytes=size),
        )
    larger = [
        spec
        for spec in maker.machines
        if spec.num_devices == hardware.num_devices
        and spec.device_bytes > hardware.device_bytes
        and spec.shares_host_memory == hardware.shares_host_memory
    ]
    for spec in sorted(larger, key=lambda spec: spec.device_bytes):
        change = _changed(settings, Price.MACHINE, f"hardware={spec.name}", hardware=spec)
        if fits_memory(maker.job(change.settings, num_microbatches=count)):
            yield change
            return


def _changed(settings: PlanSettings, price: Price, overrides: str, **fields: object) -> Change:
    return Change(
        overrides=tuple(overrides.split()),
        price=price,
        settings=dataclasses.replace(settings, **fields),  # type: ignore[arg-type]
    )
