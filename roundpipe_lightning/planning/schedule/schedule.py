"""A schedule is data: every worker's actions, in order, with a text form that round-trips.

```
worker 0: F0.0 F0.1 X0.0 X0.1
worker 1: F1.0 F1.1 B1.0 B1.1
```
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from roundpipe_lightning.errors import PlanError
from roundpipe_lightning.planning.schedule.stages import StageKind

_ACTION = re.compile(r"(?P<kind>[FXB])(?P<stage>\d+)\.(?P<microbatch>\d+)(?:@(?P<worker>\d+))?")
_ROW = re.compile(r"worker (?P<worker>\d+):(?P<actions>.*)")


class ActionKey(NamedTuple):
    """What an action does, whichever worker does it; unique in a schedule."""

    kind: StageKind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        """Text form, e.g. `F2.5`."""
        return f"{self.kind.value}{self.stage}.{self.microbatch}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """One stage for one microbatch on one worker.

    Attributes:
        kind: The stage's kind.
        stage: The stage's index (`Stage.index`).
        microbatch: Index of the microbatch.
        worker: Index of the worker that runs it.
    """

    kind: StageKind
    stage: int
    microbatch: int
    worker: int

    @property
    def key(self) -> ActionKey:
        """The action without its worker."""
        return ActionKey(self.kind, self.stage, self.microbatch)

    def __str__(self) -> str:
        """Text form, e.g. `F2.5@1`: FORWARD stage 2, microbatch 5, worker 1."""
        return f"{self.kind.value}{self.stage}.{self.microbatch}@{self.worker}"

    @classmethod
    def parse(cls, text: str, *, worker: int | None = None) -> Action:
        """Read the text form back.

        Args:
            text: For example `F2.5@1`.
            worker: The worker where the text names none.

        Raises:
            PlanError: If the text is not an action, or no worker is known.
        """
        match = _ACTION.fullmatch(text.strip())
        if match is None:
            raise PlanError(f"{text!r} is not an action; write for example 'F2.5@1'.")
        named = match["worker"]
        if named is None and worker is None:
            raise PlanError(f"{text!r} names no worker; write for example '{text.strip()}@0'.")
        return cls(
            kind=StageKind(match["kind"]),
            stage=int(match["stage"]),
            microbatch=int(match["microbatch"]),
            worker=int(named) if named is not None else int(worker or 0),
        )


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Every worker's actions in the order in which it runs them.

    A schedule is not checked where it is made, so that `validate_schedule` can show a wrong one as
    a whole; a `Plan` holds only checked schedules.

    Attributes:
        workers: One tuple of actions per worker.
    """

    workers: tuple[tuple[Action, ...], ...]

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        return len(self.workers)

    def __iter__(self) -> Iterator[Action]:
        """All actions, worker by worker."""
        for actions in self.workers:
            yield from actions

    def worker_of(self, key: ActionKey) -> int:
        """Return the worker that runs the action.

        Raises:
            PlanError: If no worker runs it.
        """
        try:
            return self._worker_of[key]
        except KeyError:
            raise PlanError(f"No worker of this schedule runs {key}.") from None

    @cached_property
    def _worker_of(self) -> dict[ActionKey, int]:
        return {action.key: action.worker for action in self}

    def to_text(self) -> str:
        """Text form, one line per worker."""
        rows = []
        for worker, actions in enumerate(self.workers):
            words = [str(a.key) if a.worker == worker else str(a) for a in actions]
            rows.append(f"worker {worker}: {' '.join(words)}".rstrip())
        return "\n".join(rows) + "\n"

    @classmethod
    def from_text(cls, text: str) -> Schedule:
        """Read the text form back.

        Raises:
            PlanError: If a line is not a worker's, or workers are missing or out of order.
        """
        rows: list[tuple[Action, ...]] = []
        for line in filter(None, (line.strip() for line in text.splitlines())):
            match = _ROW.fullmatch(line)
            if match is None or int(match["worker"]) != len(rows):
                raise PlanError(
                    f"Expected a line 'worker {len(rows)}: F0.0 ...', got {line[:80]!r}."
                )
            words = match["actions"].split()
            rows.append(tuple(Action.parse(word, worker=len(rows)) for word in words))
        return cls(workers=tuple(rows))

    def __str__(self) -> str:
        """Return the text form."""
        return self.to_text()
