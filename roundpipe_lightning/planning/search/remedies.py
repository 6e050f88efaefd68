"""Changes that would make a training fit that does not, each verified by planning it.

The order is that of the price: what leaves the results as they are, then coarser numbers, then less
that is trained, then more memory, then another machine; of one price the fastest first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Generic, TypeVar

from roundpipe_lightning.errors import RoundPipeError
from roundpipe_lightning.planning.model.hardware import HardwareSpec, device_names, load_hardware
from roundpipe_lightning.planning.model.work import BlockWork
from roundpipe_lightning.planning.search.fit import (
    FitAnswer,
    TrainingJob,
    fit_training,
    fits_memory,
)
from roundpipe_lightning.planning.search.partition import QUICK
from roundpipe_lightning.planning.search.request import PartitionHints

_GIB = 2**30
_MEMORY_STEP = 16 * _GIB
_PLENTY_BYTES = 2**60

T = TypeVar("T")


class Price(IntEnum):
    """Price of a change, the cheapest kind first."""

    NOTHING = 0  # results stay the same, but for rounding
    PRECISION = 1
    CONTEXT = 2  # shorter sequences
    DISK = 3
    TRAINABLE = 4  # fewer parameters are trained
    HOST_MEMORY = 5  # in this host or in others
    MACHINE = 6


@dataclass(frozen=True, kw_only=True)
class Remedy(Generic[T]):
    """A change that may make a training fit.

    Attributes:
        change: What differs, in the words of whoever asks.
        job: Makes the job with the change; it may be refused with a `RoundPipeError`.
    """

    change: T
    price: Price
    job: Callable[[], TrainingJob]


def verified(remedies: Iterable[Remedy[T]], *, count: int) -> list[tuple[Remedy[T], FitAnswer]]:
    """Plan remedies, price by price, until enough fit; later ones are not asked for."""
    found: list[tuple[Remedy[T], FitAnswer]] = []
    for _, alike in itertools.groupby(remedies, key=lambda remedy: remedy.price):
        if len(found) >= count:
            break
        planned = [(remedy, answer) for remedy in alike if (answer := _fitting(remedy.job))]
        found += sorted(planned, key=lambda pair: -pair[1].tokens_per_second)
    return found[:count]


def _fitting(make_job: Callable[[], TrainingJob]) -> FitAnswer | None:
    try:
        job = replace(make_job(), effort=QUICK)
        answer = fit_training(job) if fits_memory(job) else None
    except RoundPipeError:
        return None
    return answer if answer is not None and answer.fits else None


def upload_cost(*, rounded: bool) -> str:
    """What it costs to upload rounded copies, which take memory of the host, or not to."""
    return f"the same results; {'half' if rounded else 'twice'} the bytes of weights uploaded"


def other_machines(job: TrainingJob) -> Iterator[tuple[Price, HardwareSpec]]:
    """Yield this machine with more host memory, and a named one with larger devices that do."""
    missing = fit_training(replace(job, effort=QUICK)).memory.host.missing_bytes
    if missing:
        size = math.ceil((job.hardware.host_bytes + missing) / _MEMORY_STEP) * _MEMORY_STEP
        yield Price.HOST_MEMORY, _with_host_bytes(job.hardware, size)
    yield from ((Price.MACHINE, spec) for spec in _larger_devices(job))


def may_fit_elsewhere(job: TrainingJob) -> bool:
    """Whether `other_machines` may have one, without a plan: more host memory, larger devices."""
    plenty = replace(job, hardware=_with_host_bytes(job.hardware, _PLENTY_BYTES))
    return fits_memory(plenty) or any(True for _ in _larger_devices(job))


def _with_host_bytes(machine: HardwareSpec, size: int) -> HardwareSpec:
    device = size if machine.shares_host_memory else machine.device_bytes
    return replace(machine, host_bytes=size, device_bytes=device)


def _larger_devices(job: TrainingJob) -> Iterator[HardwareSpec]:
    """Yield a named machine that fits, if there is one."""
    machine = job.hardware
    if machine.shares_host_memory:
        return
    named = (
        replace(load_hardware(f"{name}x{machine.num_devices}"), num_nodes=machine.num_nodes)
        for name in device_names()
    )
    by_size = sorted(named, key=lambda spec: spec.device_bytes)
    if fits_memory(replace(job, hardware=by_size[-1])):  # what the largest cannot hold none can
        larger = (spec for spec in by_size if spec.device_bytes > machine.device_bytes)
        fitting = (spec for spec in larger if fits_memory(replace(job, hardware=spec)))
        yield from itertools.islice(fitting, 1)


@dataclass(frozen=True, kw_only=True)
class Alternatives:
    """Settings that a strategy's user could change beside the machine.

    Attributes:
        most_microbatches: As many as a batch has samples.
        with_microbatches: Returns the job with another number of microbatches, or None where it
            cannot be made.
        narrower_precision: `Trainer(precision=...)` with values of half the width; None: it has the
            narrowest already.
        other_uploads: Rounded copies to upload, or none, in words, and the job with them.
    """

    most_microbatches: int = 1
    with_microbatches: Callable[[int], TrainingJob | None] = lambda count: None
    narrower_precision: str | None = None
    other_uploads: tuple[str, TrainingJob] | None = None


def remedies(
    job: TrainingJob, alternatives: Alternatives, *, free_hints: PartitionHints, count: int = 3
) -> tuple[str, ...]:
    """Return changes that make a job fit, the cheapest first, no more than `count`.

    `free_hints` are the job's hints without those that the user gave.
    """
    found = verified(_remedies(job, alternatives, free_hints), count=count)
    return tuple(remedy.change for remedy, _ in found)


def _remedies(
    job: TrainingJob, alternatives: Alternatives, free_hints: PartitionHints
) -> Iterator[Remedy[str]]:
    if job.hints != free_hints:
        free = replace(job, hints=free_hints)
        yield _remedy("drop the hints about stages (hints=None)", Price.NOTHING, free)
    yield from _more_microbatches(job, alternatives)
    if alternatives.other_uploads is not None:
        text, other = alternatives.other_uploads
        yield _remedy(text, Price.NOTHING, other)
    narrower = alternatives.narrower_precision
    if narrower is not None:
        yield _remedy(f"set Trainer(precision={narrower!r})", Price.PRECISION, _halved(job))
    if job.work.num_trainable:
        yield _remedy(
            "train adapters (peft) or few layers and freeze the other parameters",
            Price.TRAINABLE,
            replace(job, work=job.work.each(_mostly_frozen)),
        )
    for price, spec in other_machines(job):
        text = f"use larger devices, such as {spec.name}"
        if price is Price.HOST_MEMORY:
            text = f"use a machine with {spec.host_bytes // _GIB} GiB of host memory"
        yield _remedy(text, price, replace(job, hardware=spec))


def _remedy(change: str, price: Price, job: TrainingJob) -> Remedy[str]:
    return Remedy(change=change, price=price, job=lambda: job)


def _more_microbatches(job: TrainingJob, alternatives: Alternatives) -> Iterator[Remedy[str]]:
    """The fewest microbatches that fit, by doubling."""
    count = job.num_microbatches
    while count < alternatives.most_microbatches:
        count = min(2 * count, alternatives.most_microbatches)
        other = alternatives.with_microbatches(count)
        if other is not None and fits_memory(other):
            text = f"set num_microbatches={count} (smaller microbatches, the same results)"
            yield _remedy(text, Price.NOTHING, other)
            return


def _halved(job: TrainingJob) -> TrainingJob:
    """The job with values of half the width everywhere."""
    storage = replace(
        job.storage,
        gradient_bytes=job.storage.gradient_bytes / 2,
        optimizer_bytes=job.storage.optimizer_bytes / 2,
        disk_bytes=job.storage.disk_bytes / 2,
    )
    return replace(job, work=job.work.each(_narrow), storage=storage)


def _narrow(part: BlockWork) -> BlockWork:
    return replace(
        part.part(0.5),
        forward=part.forward,
        backward=part.backward,
        parameter_bytes=part.parameter_bytes // 2,
        trainable_bytes=part.trainable_bytes // 2,
        mapped_bytes=part.mapped_bytes // 2,
    )


def _mostly_frozen(part: BlockWork) -> BlockWork:
    """One parameter in a hundred is trained, about what adapters have."""
    return replace(
        part, num_trainable=part.num_trainable // 100, trainable_bytes=part.trainable_bytes // 100
    )
