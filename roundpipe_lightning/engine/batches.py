"""With which worker each batch of a stream begins (`planning/rotation.py`)."""

from __future__ import annotations

from roundpipe_lightning.planning.plan import Plan
from roundpipe_lightning.planning.rotation import rotated, turns_of_batch

_PLANS_REMEMBERED = 64


class BatchStarts:
    """The workers with which the batches of one engine begin."""

    def __init__(self) -> None:
        self._next = 0  # the worker with which a batch begins that follows the last one
        self._rotated: list[tuple[Plan, int, Plan]] = []
        self._turns: list[tuple[Plan, int]] = []

    def following(self, plan: Plan) -> Plan:
        """Return a plan as it is run by a batch that follows the last one."""
        first = self._first(plan)
        for known, worker, found in self._rotated:
            if known is plan and worker == first:
                return found
        found = rotated(plan, first)
        self._rotated = [(plan, first, found), *self._rotated][:_PLANS_REMEMBERED]
        return found

    def _first(self, plan: Plan) -> int:
        if not self._turns_of(plan):
            return 0
        return self._next - self._next % plan.team_size

    def began(self, plan: Plan, *, follows: bool) -> None:
        """Note that a batch has begun.

        Args:
            plan: Its plan, as if it began with worker 0.
            follows: Whether it follows the last one; else it begins with worker 0.
        """
        first = self._first(plan) if follows else 0
        self._next = (first + self._turns_of(plan)) % plan.num_workers

    def _turns_of(self, plan: Plan) -> int:
        for known, turns in self._turns:
            if known is plan:
                return turns
        turns = turns_of_batch(plan)
        self._turns = [(plan, turns), *self._turns][:_PLANS_REMEMBERED]
        return turns
