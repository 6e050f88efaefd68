"""Measured durations of blocks, as moving averages: they replace estimates in a running training.

The engine measures actions, so stages, while a plan needs blocks. A stage's duration is a sum,

    FORWARD     forward of its blocks
    FUSED       forward and backward of its blocks, and the tail's
    BACKWARD    recompute and backward of its blocks

and in the first stage the head's forward, in the last one its backward.
What is measured is dealt out over the terms in proportion to what they are taken to be. With
one partition only the sums can be known; every other partition adds knowledge of their
parts, and the terms converge to durations that explain all of them.

A step gives for each stage the median over its microbatches, three steps give the median of those,
so one slow step (the first one, say) changes nothing. From then on the average follows the medians
exponentially: what is older than `HALF_LIFE_STEPS` steps counts half.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from roundpipe_lightning.planning.model.profile import BlockProfile, ModelProfile
from roundpipe_lightning.planning.schedule.stages import Partition, Stage, StageKind
from roundpipe_lightning.planning.schedule.timeline import Timeline

HALF_LIFE_STEPS = 8.0
"""Steps after which a measurement counts half."""

_WINDOW = 3  # steps of which the middle one counts

_Key = tuple[StageKind, int]


class MeasuredProfile:
    """The durations of a model's blocks as far as they have been measured.

    Args:
        estimate: The model with estimated durations, in any unit: their ratios are where the
            measurement begins, and what is not measured yet is scaled to what is.
    """

    def __init__(self, estimate: ModelProfile) -> None:
        self.num_steps = 0
        self._estimate = estimate
        self._terms = _terms(estimate)
        self._seconds: list[float | None] = [None] * len(self._terms)
        self._partition: Partition | None = None
        self._windows: dict[_Key, deque[float]] = {}

    @property
    def is_ready(self) -> bool:
        return any(seconds is not None for seconds in self._seconds)

    def observe(
        self, timeline: Timeline, *, partition: Partition, speeds: Sequence[float] = ()
    ) -> None:
        """Take in a step.

        Args:
            speeds: How fast every worker is; empty: as fast as the estimate says.
        """
        self.num_steps += 1
        if partition != self._partition:
            self._partition, self._windows = partition, {}
        durations: dict[_Key, list[float]] = {}
        for entry in timeline.entries:
            key = (entry.action.kind, entry.action.stage)
            speed = speeds[entry.action.worker] if speeds else 1.0
            durations.setdefault(key, []).append(entry.busy_seconds * speed)
        for key, values in durations.items():
            window = self._windows.setdefault(key, deque(maxlen=_WINDOW))
            window.append(median(values))
        share = 1.0 - 0.5 ** (1.0 / HALF_LIFE_STEPS)
        current = self._current()
        for stage in partition.stages():
            seen = self._windows.get((stage.kind, stage.index), ())
            if len(seen) == _WINDOW:
                terms = _terms_of(stage, num_blocks=partition.num_blocks)
                self._deal_out(median(seen), terms, current, share)

    def _deal_out(
        self, seconds: float, terms: Sequence[int], current: Sequence[float], share: float
    ) -> None:
        """Move the terms of a stage towards what was measured of their sum."""
        total = sum(current[term] for term in terms)
        for term in terms:
            part = current[term] / total if total > 0 else 1.0 / len(terms)
            before = self._seconds[term]
            target = seconds * part
            self._seconds[term] = target if before is None else before + share * (target - before)

    def _current(self) -> list[float]:
        """All terms: measured ones as they are, others scaled to those of their kind, or to all."""
        num_blocks = self._estimate.num_blocks
        kinds = [range(num_blocks), range(num_blocks, 2 * num_blocks)]
        everything = self._ratio(range(len(self._terms)), otherwise=1.0)
        ratios = [everything] * len(self._terms)
        for kind in kinds:
            ratio = self._ratio(kind, otherwise=everything)
            for term in kind:
                ratios[term] = ratio
        return [
            estimate * ratio if seconds is None else seconds
            for estimate, ratio, seconds in zip(self._terms, ratios, self._seconds, strict=True)
        ]

    def _ratio(self, terms: Sequence[int], *, otherwise: float) -> float:
        known = [(self._seconds[term], self._terms[term]) for term in terms]
        measured = sum(seconds for seconds, _ in known if seconds is not None)
        estimated = sum(estimate for seconds, estimate in known if seconds is not None)
        return measured / estimated if measured > 0 and estimated > 0 else otherwise

    def profile(self) -> ModelProfile:
        """Return the model with measured durations, and with the estimate's sizes."""
        estimate, current = self._estimate, self._current()
        num_blocks = estimate.num_blocks
        head_forward, head_backward, tail = current[2 * num_blocks :]
        blocks = tuple(
            _timed(block, forward=forward, backward=max(0.0, both - forward))
            for block, forward, both in zip(
                estimate.blocks,
                current[:num_blocks],
                current[num_blocks : 2 * num_blocks],
                strict=True,
            )
        )
        whole = estimate.tail.forward_seconds + estimate.tail.backward_seconds
        share = estimate.tail.forward_seconds / whole if whole > 0 else 1 / 3
        return replace(
            estimate,
            blocks=blocks,
            head=_timed(estimate.head, forward=head_forward, backward=head_backward),
            tail=_timed(estimate.tail, forward=share * tail, backward=(1 - share) * tail),
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "fingerprint": self._estimate.fingerprint,
            "num_steps": self.num_steps,
            "seconds": list(self._seconds),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Take over what `state_dict` returned.

        Returns:
            Whether it was of this model; if not, nothing is changed.
        """
        seconds = state.get("seconds", ())
        if state.get("fingerprint") != self._estimate.fingerprint or len(seconds) != len(
            self._terms
        ):
            return False
        self.num_steps = int(state["num_steps"])
        self._seconds = [None if value is None else float(value) for value in seconds]
        return True


def _terms(profile: ModelProfile) -> list[float]:
    """Forward of every block, both passes of every block, head's forward and backward, tail."""
    head, tail = profile.head, profile.tail
    return [
        *(block.forward_seconds for block in profile.blocks),
        *(block.forward_seconds + block.backward_seconds for block in profile.blocks),
        head.forward_seconds,
        head.backward_seconds,
        tail.forward_seconds + tail.backward_seconds,
    ]


def _terms_of(stage: Stage, *, num_blocks: int) -> list[int]:
    """Indices of the terms that a stage's duration is the sum of."""
    offset = 0 if stage.kind is StageKind.FORWARD else num_blocks
    terms = [offset + block for block in stage.blocks]
    if stage.has_head_forward:
        terms.append(2 * num_blocks)
    if stage.has_head_backward:
        terms.append(2 * num_blocks + 1)
    if stage.has_tail:
        terms.append(2 * num_blocks + 2)
    return terms


def _timed(part: BlockProfile, *, forward: float, backward: float) -> BlockProfile:
    return replace(part, forward_seconds=forward, backward_seconds=backward)


__all__ = ["HALF_LIFE_STEPS", "MeasuredProfile"]
