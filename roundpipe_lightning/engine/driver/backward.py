"""A backward pass through the driver's graph, as the workers see it.

```
driver's thread            autograd ─▶ CallNode 9 ─▶ CallNode 8 ─▶ .. ─▶ CallNode 0 ─▶ ParameterNode
                                          │ reached       │                 │ waits        │ waits
unit 2 (calls 7 to 9)                     ▼               ▼                 ▲              ▲
worker 1                              recompute 7 8 9, backward ─ gradients ┘              │
parameters                                                  sums, in the order of the parts ┘
```

A unit may go backward when the driver has reached all of its calls that take part: the gradients
that user code gives are complete then. Within a unit the parts follow the order of the units behind
it: what these give to its outputs must be there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from roundpipe_lightning.engine.driver.calls import Call, join_parts
from roundpipe_lightning.engine.driver.route import Unit
from roundpipe_lightning.engine.transfer.gradient_reduce import (
    FlatGradients,
    GradientAccumulator,
    Gradients,
    fold,
)
from roundpipe_lightning.engine.transfer.parts import Part, Place
from roundpipe_lightning.planning.schedule.stages import Stage


@dataclass(eq=False)
class BackwardRun:
    """Parts of a unit that a worker runs backward."""

    backward: BackwardPass
    unit: Unit
    parts: list[int]


class BackwardPass:
    """One graph task of autograd that has reached a call.

    Thread: the driver makes it and reaches calls; workers take runs and end parts.
    Guarded by: `Step.changed`.

    Attributes:
        task: The number of the graph task.
        keeps_graph: Whether another pass may follow, so that values must stay.
        is_over: Whether autograd has ended it.
    """

    def __init__(
        self, calls: Iterable[Call], *, task: int, num_workers: int, keeps_graph: bool
    ) -> None:
        self.task = task
        self.keeps_graph = keeps_graph
        self.is_over = False
        self.driver_waits = False
        self._unreached: dict[Unit, set[Call]] = {}
        for call in calls:
            assert call.unit is not None, "it has a gradient"
            self._unreached.setdefault(call.unit, set()).add(call)
        self.units: list[Unit] = sorted(self._unreached, key=lambda unit: -unit.number)
        self._unfinished = {unit: set(range(unit.num_parts)) for unit in self.units}
        self._runs = [self._runs_of(worker) for worker in range(num_workers)]
        self._unlanded = {unit: set(range(unit.num_parts)) for unit in self.units}
        self._sums = {
            unit: (GradientAccumulator(unit.num_parts), GradientAccumulator(unit.num_parts))
            for unit in self.units
        }
        self._total: Gradients = {}
        self._real_gradients: dict[tuple[Call, int], dict[int, Part]] = {}

    def _runs_of(self, worker: int) -> list[BackwardRun]:
        runs = []
        for unit in self.units:
            parts = [part for part in range(unit.num_parts) if unit.workers[part] == worker]
            if parts:
                runs.append(BackwardRun(self, unit, parts))
        return runs

    # Called by the driver ------------------------------------------------------------------------

    def reach(self, call: Call) -> None:
        assert call.unit is not None, "it has a gradient"
        self._unreached[call.unit].discard(call)

    def is_finished(self, unit: Unit | None = None) -> bool:
        """Return whether a unit, or each of them, has gone backward on all parts."""
        return not any(self._unfinished.values() if unit is None else (self._unfinished[unit],))

    def have_landed(self) -> bool:
        """Return whether the gradients of parameters are complete, on the host."""
        return not any(self._unlanded.values())

    def real_gradients(self, call: Call, place: Place) -> list[Tensor | None]:
        """Return the gradients of the tensors of user code that a call was given."""
        found: list[Tensor | None] = []
        for index, tensor in enumerate(call.real_tensors):
            arrived = self._real_gradients.pop((call, index), {})
            parts = [arrived[part].on(place) for part in sorted(arrived)]
            rows = call.rows_of(tensor)
            if not parts:
                found.append(None)
            elif rows is None or len(call.split) == 1:
                found.append(_total(parts))
            else:
                found.append(join_parts(parts, rows))
        return found

    def parameter_gradients(self, parameters: Sequence[nn.Parameter]) -> list[Tensor | None]:
        """Return the sums of all units, the last unit's first, as autograd adds them up."""
        for unit in self.units:
            for accumulator in self._sums.pop(unit, ()):
                fold(self._total, accumulator.sums)
        return [self._total.pop(parameter, None) for parameter in parameters]

    # Called by workers ---------------------------------------------------------------------------

    def next_run(self, worker: int) -> BackwardRun | None:
        """Return the next run of a worker that may begin: in order, unless the driver waits."""
        runs = self._runs[worker]
        for index, run in enumerate(runs):
            if not self._unreached[run.unit]:
                return runs.pop(index)
            if not self.driver_waits:
                return None
        return None

    def has_more(self, stage: Stage, worker: int) -> bool:
        return any(run.unit.stage is stage for run in self._runs[worker])

    def is_ready(self, unit: Unit, part: int) -> bool:
        """Return whether the gradients of a unit's outputs are complete for a part."""
        for consumer in unit.consumers:
            unfinished = self._unfinished.get(consumer)
            if unfinished and (part in unfinished or consumer.num_parts != unit.num_parts):
                return False
        return True

    def end_part(self, unit: Unit, part: int, *, tensors: Mapping[tuple[Call, int], Part]) -> None:
        for key, gradient in tensors.items():
            self._real_gradients.setdefault(key, {})[part] = gradient
        self._unfinished[unit].discard(part)

    def add_sums(
        self, unit: Unit, parts: Sequence[int], *gradients: Gradients | FlatGradients
    ) -> None:
        """Add gradients of parameters, on the host: of the blocks, and of others.

        Not under the step's lock: sums of large parameters take long.
        """
        for accumulator, contribution in zip(self._sums[unit], gradients, strict=True):
            accumulator.add(parts, contribution)

    def land(self, unit: Unit, parts: Sequence[int]) -> None:
        self._unlanded[unit].difference_update(parts)

    def takes_part(self, unit: Unit | None) -> bool:
        return unit in self._unfinished


def _total(tensors: Sequence[Tensor]) -> Tensor:
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total
