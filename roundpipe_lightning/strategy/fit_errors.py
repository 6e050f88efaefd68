"""What is said of a step that does not fit, beside what is missing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from roundpipe_lightning.errors import FitError
from roundpipe_lightning.models.lengths import length_of, shortened
from roundpipe_lightning.planning.search.fit import FitAnswer, TrainingJob
from roundpipe_lightning.planning.search.remedies import longest_that_fits
from roundpipe_lightning.strategy.dry_run import TrialFailedError

Shortage: TypeAlias = Callable[[TrainingJob], float]
"""What of memory a job lacks: 0 or less where it fits."""


def refusal(
    answer: FitAnswer, remedies: Sequence[str], *, what: str, shorter: str, is_first: bool
) -> FitError:
    """Return the error for what does not fit.

    Args:
        answer: What it needs.
        remedies: Changes that make it fit.
        what: What does not fit.
        shorter: How long sequences may be; empty where that is not known.
        is_first: Whether nothing was trained before.
    """
    alone = "" if answer.planned is not None else _smallest_stage(answer)
    listed = "; ".join(f"({number}) {text}" for number, text in enumerate(remedies, start=1))
    none = "Nothing else" if shorter else "No single change"
    remedy = f"What makes it fit: {listed}." if remedies else f"{none} makes it fit."
    so_far = "No training step has run" if is_first else "The step has not begun"
    return FitError(
        f"The {what} does not fit {answer.job.hardware.name}: {answer.memory.reason} {alone}"
        f"{shorter}{remedy} {so_far}; roundpipe-plan tries more changes."
    )


def _smallest_stage(answer: FitAnswer) -> str:
    """Name what no device can hold, though it is alone there."""
    job = answer.job
    stage = job.memory.footprint(job.shape).need(answer.layout).stage
    names = job.work.block_names[stage.blocks.start : stage.blocks.stop]
    what = f"a stage of {', '.join(names)}" if names else "the tail segment"
    return f"Not even {what} alone fits. "


def length_advice(microbatch: Any, *, job: Callable[[Any], TrainingJob], shortage: Shortage) -> str:
    """Say how long sequences may be for a step to fit; nothing where no length is known to help.

    Args:
        microbatch: A part of the batch that does not fit.
        job: What is trained with such a part; a `TrialFailedError` where that is not known.
        shortage: What a job lacks.
    """
    length = length_of(microbatch)
    if length is None:
        return ""
    try:
        most = longest_that_fits(
            lambda count: shortage(job(shortened(microbatch, count))), too_long=length
        )
    except TrialFailedError:  # it is no length, or the step needs this one
        return ""
    if most < 1:
        return ""
    return f"Sequences of {length:,} are too long: those of up to {most:,} fit. "
