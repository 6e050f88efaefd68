"""Which blocks' weights stay on which worker between its visits.

What memory a device has to spare while it runs the stage that needs the most is given to blocks
that it visits anyway. A frozen block that stays is never uploaded again. A trainable one changes
when the step ends, so it stays from its first visit of a step on, usually its FORWARD, to the last
one: its BACKWARD, and those of later rounds. Greedy: blocks that save the most uploads per byte
first. While such a block's stage runs, the block needs no room in a slot for weights.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from roundpipe_lightning.errors import FitError
from roundpipe_lightning.planning.cost.device_memory import Footprint
from roundpipe_lightning.planning.schedule.layout import PipelineLayout

_GIB = 2**30


def resident_blocks(
    footprint: Footprint, layout: PipelineLayout, *, at_least: int = 0, at_most: int | None = None
) -> tuple[tuple[int, ...], ...]:
    """Return for every worker the blocks that stay on it, ascending; empty where none do.

    Args:
        footprint: The model on the machine.
        layout: The plan's stages, teams and rounds; it must fit.
        at_least: Blocks that must stay on every worker that visits as many.
        at_most: Blocks that may stay on a worker; None: as many as fit and save uploads.

    Raises:
        FitError: A worker has no room for `at_least` blocks.
    """
    hardware = footprint.hardware
    nothing_moves = hardware.shares_host_memory or not any(
        block.parameter_bytes for block in footprint.profile.blocks
    )
    if nothing_moves or at_most == 0:
        return ()
    choice = _Choice(footprint, layout, at_least=at_least, at_most=at_most)
    teams = max(hardware.num_devices // layout.team_size, 1)
    by_team = [choice.blocks(team) for team in range(teams)]
    by_worker = tuple(blocks for blocks in by_team for _ in range(layout.team_size))
    return by_worker if any(by_worker) else ()


class _Choice:
    """What all workers' choices have in common."""

    def __init__(
        self,
        footprint: Footprint,
        layout: PipelineLayout,
        *,
        at_least: int,
        at_most: int | None,
    ) -> None:
        self._footprint = footprint
        self._layout = layout
        self._at_least = at_least
        self._at_most = footprint.profile.num_blocks if at_most is None else at_most
        self._table = footprint.table(layout)
        by_kind = footprint.stage_bytes(layout)
        self._needs = np.sum(list(by_kind.values()), axis=0)

    def blocks(self, team: int) -> tuple[int, ...]:
        """Return the blocks that stay on every worker of a team."""
        footprint, layout = self._footprint, self._layout
        runs = footprint.team_stages(layout, team=team)
        if not runs:
            return ()
        places = sorted(set(runs))
        needs = self._needs[places]
        chosen: list[int] = []
        resident = 0
        for block in self._ranked(runs):
            size = footprint.profile.blocks[block].parameter_bytes
            slots = footprint.slots_of(self._table, block, layout=layout)
            left = needs - size * slots[places]
            if resident + size + left.max() <= footprint.hardware.device_bytes:
                chosen.append(block)
                needs, resident = left, resident + size
            if len(chosen) == self._at_most:
                break
        self._check(chosen, runs, float(resident + needs.max()))
        return tuple(sorted(chosen))

    def _ranked(self, runs: list[int]) -> list[int]:
        """Return the blocks that save uploads, those that save the most per byte first."""
        blocks = self._footprint.profile.blocks
        visits: Counter[int] = Counter()
        previous = None
        for place in runs:
            if place != previous:  # the same stage again is the same visit
                visits.update(self._layout.partition.stages()[place].blocks)
            previous = place
        saved = {
            index: count - blocks[index].trainable_bytes / blocks[index].parameter_bytes
            for index, count in visits.items()
            if blocks[index].parameter_bytes
        }
        worthwhile = [index for index, share in saved.items() if share > 0]
        return sorted(worthwhile, key=lambda index: (-saved[index], index))

    def _check(self, chosen: list[int], runs: list[int], used: float) -> None:
        """Refuse a number of blocks that there is no room for."""
        wanted = min(self._at_least, len(self._ranked(runs)))
        if len(chosen) >= wanted:
            return
        hardware, blocks = self._footprint.hardware, self._footprint.profile.blocks
        next_one = next(index for index in self._ranked(runs) if index not in chosen)
        there = hardware.device_bytes / _GIB
        raise FitError(
            f"{self._at_least} blocks cannot stay on a device of {hardware.name}: with "
            f"{len(chosen)} of them it holds {used / _GIB:.2f} of {there:.2f} "
            f"GiB, and {blocks[next_one].name!r} has "
            f"{blocks[next_one].parameter_bytes / _GIB:.2f} GiB more. Ask for fewer, or leave it "
            "to the planner."
        )
