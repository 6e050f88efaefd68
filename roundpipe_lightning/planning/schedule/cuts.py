"""Places where a chain of blocks must be cut, whatever else is chosen: no stage spans one.

A chain may come from several calls of stacks with user code between them. Stages lie within one
call, so the chain has a *cut* where one call ends and the next begins: cut i stands between block
i-1 and block i.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from roundpipe_lightning.errors import PlanError
from roundpipe_lightning.planning.schedule.stages import Partition


def check_cuts(cuts: Sequence[int], *, num_blocks: int) -> None:
    """Refuse cuts that do not ascend or do not lie between two blocks; PlanError: they do not."""
    if any(first >= second for first, second in pairwise((0, *cuts, max(num_blocks, 1)))):
        raise PlanError(
            f"cuts={tuple(cuts)} of {num_blocks} blocks: give ascending numbers from 1 to "
            f"{num_blocks - 1}; cut i stands between block i-1 and block i."
        )


def call_lengths(num_blocks: int, cuts: Sequence[int]) -> tuple[int, ...]:
    """Return the number of blocks between neighbouring cuts, those of the first call first.

    Only the first `num_blocks` count; cuts behind them do not matter.
    """
    if not num_blocks:
        return ()
    stops = (0, *cuts_before(num_blocks, cuts), num_blocks)
    return tuple(second - first for first, second in pairwise(stops))


def cuts_before(num_blocks: int, cuts: Sequence[int]) -> tuple[int, ...]:
    return tuple(cut for cut in cuts if cut < num_blocks)


def reversed_cuts(num_blocks: int, cuts: Sequence[int]) -> tuple[int, ...]:
    return tuple(num_blocks - cut for cut in reversed(cuts_before(num_blocks, cuts)))


def check_partition(
    partition: Partition, *, cuts: Sequence[int], block_names: Sequence[str], what: str
) -> None:
    """Raise a PlanError if a stage spans a cut; `what` has it, for the message."""
    for stage in partition.stages():
        blocks = stage.blocks
        cut = next((cut for cut in cuts if blocks.start < cut < blocks.stop), None)
        if cut is not None:
            raise PlanError(
                f"{what}: stage {stage} of '{partition}' has both {block_names[cut - 1]!r} and "
                f"{block_names[cut]!r}, but other code runs between them, and no stage spans that. "
                f"Cut there (the model's cuts are {tuple(cuts)}), or let the planner choose."
            )


def grouped(counts: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
    """Split stages' block counts by the calls that they lie in; no stage spans a cut."""
    groups: list[list[int]] = []
    stops = list(accumulate(lengths))
    total = 0
    for count in counts:
        if not groups or total == stops[len(groups) - 1]:
            groups.append([])
        groups[-1].append(count)
        total += count
    return groups
