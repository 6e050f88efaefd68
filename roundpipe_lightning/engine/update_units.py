"""What an updater updates together, and when it did."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from roundpipe_lightning.engine.partial_step import CapturedStep


@dataclass(frozen=True, kw_only=True, eq=False)
class UpdateUnit:
    """Parameters that are updated together.

    Attributes:
        name: A block's name, or that of a parameter that has uses elsewhere.
        parameters: Each parameter is in one unit.
    """

    name: str
    parameters: tuple[nn.Parameter, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the parameters."""
        return sum(parameter.nbytes for parameter in self.parameters)


@dataclass(frozen=True, kw_only=True)
class UpdateSpan:
    """When a unit was updated.

    Attributes:
        name: The unit's.
        start_seconds: In the time of `time.perf_counter`.
        end_seconds: Likewise.
    """

    name: str
    start_seconds: float
    end_seconds: float


@dataclass(kw_only=True, eq=False)
class BegunStep:
    """A step whose gradients come block by block.

    Attributes:
        step: It.
        num_before: Jobs that were there before.
        taken: Parameters that are updated before it is submitted.
        spans: When.
    """

    step: CapturedStep
    num_before: int
    taken: set[Tensor] = field(default_factory=set)
    spans: list[UpdateSpan] = field(default_factory=list)

    def rest_of(self, unit: UpdateUnit) -> UpdateUnit:
        """Return what is left of a unit."""
        left = tuple(p for p in unit.parameters if p not in self.taken)
        return UpdateUnit(name=unit.name, parameters=left)


def update_units(
    module: nn.Module, blocks: Mapping[str, nn.Module], *, shared: Collection[nn.Parameter]
) -> list[UpdateUnit]:
    """Divide a module's parameters: one unit per block, one per parameter used elsewhere.

    Args:
        module: The module.
        blocks: Its blocks by name.
        shared: Parameters of blocks that others use, too.
    """
    block_of = {p: name for name, block in blocks.items() for p in block.parameters()}
    members: dict[str, list[nn.Parameter]] = {}
    for name, parameter in module.named_parameters():
        unit = name if parameter in shared else block_of.get(parameter, name)
        members.setdefault(unit, []).append(parameter)
    return [UpdateUnit(name=name, parameters=tuple(some)) for name, some in members.items()]
