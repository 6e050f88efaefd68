"""What would make a training fit that does not: changes, each verified by planning it.

The order is that of the price: what leaves the results as they are, then coarser numbers, then less
that is trained, then more memory, then another machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from roundpipe_lightning.errors import RoundPipeError
from roundpipe_lightning.planning.model.hardware import HardwareSpec, hardware_names, load_hardware
from roundpipe_lightning.planning.model.work import Amount, BlockWork, Peak, WorkProfile
from roundpipe_lightning.planning.search.fit import Search, TrainingJob, fit_training
from roundpipe_lightning.planning.search.request import PartitionHints


def longest_that_fits(shortage: Callable[[int], float], *, too_long: int) -> int:
    """Return the longest length that fits; 0 where none does.

    What is missing grows with the length nearly as a line, so every second length is guessed from
    the known ones on either side; the others halve what is left, so that no curve takes long.

    Args:
        shortage: What is missing at a length: 0 or less where it fits. It must not fall.
        too_long: A length that does not fit.
    """
    low, high = 0, too_long
    below, above = None, shortage(too_long)
    halves = True
    while high - low > 1:
        guess = (low + high) // 2
        if below is not None and not halves:
            guess = low + round((high - low) * -below / (above - below))
            guess = min(max(guess, low + 1), high - 1)
        halves = not halves
        missing = shortage(guess)
        if missing > 0:
            high, above = guess, missing
        else:
            low, below = guess, missing
    return low


_GIB = 2**30
_MEMORY_STEP = 16 * _GIB


@dataclass(frozen=True, kw_only=True)
class Alternatives:
    """What a strategy's user could change beside the machine.

    Attributes:
        most_microbatches: As many as a batch has samples.
        with_microbatches: Returns the job with another number of microbatches, or None where it
            cannot be made.
        narrower_precision: `Trainer(precision=...)` with values of half the width; None: it has the
            narrowest already.
    """

    most_microbatches: int = 1
    with_microbatches: Callable[[int], TrainingJob | None] = lambda count: None
    narrower_precision: str | None = None


@dataclass(frozen=True, kw_only=True)
class _Change:
    text: str
    job: TrainingJob


def remedies(
    job: TrainingJob, alternatives: Alternatives, *, free_hints: PartitionHints, count: int = 3
) -> tuple[str, ...]:
    """Return changes that make a job fit, the cheapest first.

    Args:
        job: What does not fit.
        alternatives: What can be changed.
        free_hints: The job's hints without those that the user gave.
        count: How many to return, at most.
    """
    found: list[str] = []
    for change in _changes(job, alternatives, free_hints):
        if len(found) == count:
            break
        if _fits(change.job):
            found.append(change.text)
    return tuple(found)


def _fits(job: TrainingJob) -> bool:
    try:
        return fit_training(replace(job, search=Search.QUICK)).fits
    except RoundPipeError:
        return False


def _changes(
    job: TrainingJob, alternatives: Alternatives, free_hints: PartitionHints
) -> Iterator[_Change]:
    if job.hints != free_hints:
        yield _Change(
            text="drop the hints about stages (hints=None)", job=replace(job, hints=free_hints)
        )
    more = _more_microbatches(job, alternatives)
    if more is not None:
        yield more
    narrower = alternatives.narrower_precision
    if narrower is not None:
        yield _Change(text=f"set Trainer(precision={narrower!r})", job=_halved(job))
    if job.work.num_trainable:
        yield _Change(
            text="train adapters (peft) or few layers and freeze the other parameters",
            job=replace(job, work=_frozen(job.work)),
        )
    yield from _machines(job)


def _more_microbatches(job: TrainingJob, alternatives: Alternatives) -> _Change | None:
    """The fewest microbatches that fit, by doubling."""
    count = job.num_microbatches
    while count < alternatives.most_microbatches:
        count = min(2 * count, alternatives.most_microbatches)
        other = alternatives.with_microbatches(count)
        if other is not None and _fits(other):
            text = f"set num_microbatches={count} (smaller microbatches, the same results)"
            return _Change(text=text, job=other)
    return None


def _machines(job: TrainingJob) -> Iterator[_Change]:
    """More memory in this machine, then the smallest larger devices that have a name and do."""
    machine = job.hardware
    missing = fit_training(replace(job, search=Search.QUICK)).memory.host.missing_bytes
    if missing:
        size = math.ceil((machine.host_bytes + missing) / _MEMORY_STEP) * _MEMORY_STEP
        device = size if machine.shares_host_memory else machine.device_bytes
        yield _Change(
            text=f"use a machine with {size // _GIB} GiB of host memory",
            job=replace(job, hardware=replace(machine, host_bytes=size, device_bytes=device)),
        )
    if machine.shares_host_memory:
        return
    larger = [
        spec for spec in _named(machine.num_devices) if spec.device_bytes > machine.device_bytes
    ]
    for spec in sorted(larger, key=lambda spec: spec.device_bytes):
        other = replace(job, hardware=spec)
        if _fits(other):
            yield _Change(text=f"use larger devices, such as {spec.name}", job=other)
            return


def _named(num_devices: int) -> Iterator[HardwareSpec]:
    for name in hardware_names():
        spec = load_hardware(name)
        if spec.num_devices == num_devices and not spec.shares_host_memory:
            yield spec


def _halved(job: TrainingJob) -> TrainingJob:
    """The job with values of half the width everywhere."""
    storage = replace(
        job.storage,
        gradient_bytes=job.storage.gradient_bytes / 2,
        optimizer_bytes=job.storage.optimizer_bytes / 2,
        disk_bytes=job.storage.disk_bytes / 2,
    )
    return replace(job, work=_each(job.work, _narrow), storage=storage)


def _narrow(part: BlockWork) -> BlockWork:
    def half(amount: Amount) -> Amount:
        return Amount(
            fixed=amount.fixed / 2,
            per_token=amount.per_token / 2,
            per_square=amount.per_square / 2,
        )

    def half_peak(peak: Peak) -> Peak:
        return Peak(amounts=tuple(half(amount) for amount in peak.amounts))

    return replace(
        part,
        parameter_bytes=part.parameter_bytes // 2,
        trainable_bytes=part.trainable_bytes // 2,
        boundary_bytes=half(part.boundary_bytes),
        kept_bytes=half(part.kept_bytes),
        forward_peak_bytes=half_peak(part.forward_peak_bytes),
        peak_bytes=half_peak(part.peak_bytes),
    )


def _frozen(work: WorkProfile) -> WorkProfile:
    """The model with one parameter in a hundred trained, about what adapters have."""

    def freeze(part: BlockWork) -> BlockWork:
        return replace(
            part,
            num_trainable=part.num_trainable // 100,
            trainable_bytes=part.trainable_bytes // 100,
        )

    return _each(work, freeze)


def _each(work: WorkProfile, change: Callable[[BlockWork], BlockWork]) -> WorkProfile:
    return replace(
        work,
        blocks=tuple(change(block) for block in work.blocks),
        head=change(work.head),
        tail=change(work.tail),
    )
