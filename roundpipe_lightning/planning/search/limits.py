"""Limits of a device's memory: the most blocks of a stage, and the blocks that stay on it.

`Footprint` says what a layout needs. The limits are the most blocks of each kind of stage with
which stages of that size still fit. Where a profile says nothing about activations, a BACKWARD or
FUSED stage gets no more blocks than a device would hold if the blocks were dealt out evenly, and a
FORWARD stage twice as many.

What memory a device has to spare while it runs the stage that needs the most is given to blocks
that it runs anyway. A frozen block that stays is never uploaded again. A trainable one changes
when the step ends, so it stays from its first run of a step on, usually its FORWARD, to the last
one: its BACKWARD, and those of later rounds. Greedy: blocks that save the most uploads per byte
first. While such a block's stage runs, the block needs no room in a slot for weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby

import numpy as np

from roundpipe_lightning.errors import FitError
from roundpipe_lightning.planning.cost.device_memory import Footprint
from roundpipe_lightning.planning.cost.partition_table import PartitionTable
from roundpipe_lightning.planning.model.hardware import HardwareSpec
from roundpipe_lightning.planning.model.profile import ModelProfile
from roundpipe_lightning.planning.schedule.plan import PipelineConfig, PipelineLayout
from roundpipe_lightning.planning.schedule.stages import (
    Partition,
    call_lengths,
    cuts_before,
    reversed_cuts,
)
from roundpipe_lightning.planning.search.partition import StageLimits, largest_cuts

_GIB = 2**30


ONES = StageLimits(forward=1, fused=0, backward=1)
"""Limits that allow the smallest stages alone."""


def limits_within(footprint: Footprint, *, config: PipelineConfig) -> StageLimits | None:
    """Return the most blocks per stage with which every device can hold its part.

    None where stages of one block do not fit.
    """
    widest = widest_limits(footprint, config=config)
    return widest and joint_limits(widest, footprint=footprint, config=config)


def widest_limits(footprint: Footprint, *, config: PipelineConfig) -> StageLimits | None:
    """Return the most blocks of one kind of stage while the others have the fewest.

    None where stages of one block do not fit.
    """

    def holds(**changes: int) -> bool:
        return _are_held(replace(ONES, **changes), footprint=footprint, config=config)

    if not holds():
        return None
    num_blocks = footprint.profile.num_blocks
    most = max(num_blocks, 1)
    return StageLimits(
        forward=_largest(lambda n: holds(forward=n), least=1, most=most),
        backward=_largest(lambda n: holds(backward=n), least=1, most=most),
        fused=_largest(lambda n: holds(fused=n), least=0, most=num_blocks),
    )


def joint_limits(
    limits: StageLimits, *, footprint: Footprint, config: PipelineConfig
) -> StageLimits:
    """Narrow limits until stages as large as all of them fit: neighbours share the two slots."""
    while not _are_held(limits, footprint=footprint, config=config):
        limits = _narrower(limits)
    return limits


def even_share(
    limits: StageLimits, *, profile: ModelProfile, hardware: HardwareSpec
) -> StageLimits:
    """Return limits for a profile that may say nothing about activations."""
    if any(block.activation_bytes or block.working_bytes for block in profile.blocks):
        return limits
    share = max(-(-profile.num_blocks // hardware.num_devices), 1)
    return limits.within(StageLimits(forward=2 * share, backward=share, fused=share))


def _are_held(limits: StageLimits, *, footprint: Footprint, config: PipelineConfig) -> bool:
    """Return whether every device can hold its part where all stages are as large as the limits.

    Of unequal devices the largest one: which stage runs where is looked at with each partition.
    """
    layout = config.with_stages(largest_stages(footprint.profile, limits))
    largest = max(one.device_bytes for one in footprint.hardware.workers)
    return footprint.most_bytes(layout) <= largest


def _narrower(limits: StageLimits) -> StageLimits:
    forward, fused, backward = limits.forward, limits.fused, limits.backward
    if forward > max(backward, fused):
        forward -= 1
    elif fused > backward:
        fused -= 1
    elif backward > 1:
        backward -= 1
    else:
        forward, fused = max(forward - 1, 1), max(fused - 1, 0)
    return StageLimits(forward=forward, fused=fused, backward=backward)


def largest_stages(profile: ModelProfile, limits: StageLimits) -> Partition:
    """Return stages as large as the limits and the model's cuts allow."""
    num_blocks, cuts = profile.num_blocks, profile.cuts
    fused = min(limits.fused, sum(call_lengths(num_blocks, cuts)[-1:]))
    rest = num_blocks - fused
    forward = largest_cuts(rest, most=limits.forward, cuts=cuts_before(rest, cuts))
    backward = largest_cuts(rest, most=limits.backward, cuts=reversed_cuts(rest, cuts))
    return Partition(forward=forward, backward=(fused, *backward))


def describe_lack(footprint: Footprint, *, config: PipelineConfig) -> str:
    """Name what no device can hold: the stage of one block or of the tail segment, at its least."""
    profile, hardware = footprint.profile, footprint.hardware
    ones = largest_stages(profile, ONES)
    need = footprint.need(config.with_stages(ones))
    part, what = profile.tail, "the tail segment"
    if need.stage and not need.stage.has_tail:
        part = profile.blocks[need.stage.blocks.start]
        what = f"even one block, {part.name!r}"
    sizes = ", ".join(f"{kind.value} {size / _GIB:.2f}" for kind, size in need.num_bytes)
    return (
        f"{hardware.name} cannot hold {what}: it has {part.parameter_bytes / _GIB:.2f} GiB of "
        f"weights and needs {need.total_bytes / _GIB:.2f} GiB of a device's "
        f"{hardware.device_bytes / _GIB:.2f} GiB ({sizes}). Use smaller microbatches, LoRA, or "
        "devices with more memory."
    )


def _largest(holds: Callable[[int], bool], *, least: int, most: int) -> int:
    """The largest number that holds, of which `least` does: by doubling, then by bisection."""
    stride = 1
    while least + stride <= most and holds(least + stride):
        least, stride = least + stride, 2 * stride
    most = min(most, least + stride - 1)
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if holds(middle) else (least, middle - 1)
    return least


def resident_blocks(
    footprint: Footprint, layout: PipelineLayout, *, at_least: int = 0, at_most: int | None = None
) -> tuple[tuple[int, ...], ...]:
    """Return for every worker the blocks that stay on it, ascending; empty where none do.

    Args:
        layout: The plan's stages, teams and rounds; it must fit.
        at_least: Blocks that must stay on every worker that runs as many.
        at_most: Blocks that may stay on a worker; None: as many as fit and save uploads.

    Raises:
        FitError: A worker has no room for `at_least` blocks.
    """
    hardware, blocks = footprint.hardware, footprint.profile.blocks
    moves = not hardware.shares_host_memory and any(block.parameter_bytes for block in blocks)
    if not moves or at_most == 0:
        return ()
    table = PartitionTable.of([layout.partition])
    stage_needs = np.sum(list(footprint.stage_bytes(layout).values()), axis=0)
    by_worker: list[tuple[int, ...]] = [()] * hardware.num_devices
    for team, members in enumerate(layout.teams(hardware.num_devices)):
        runs = footprint.team_stages(layout, team=team)
        if not runs:
            continue
        places, ranked = sorted(set(runs)), _ranked(footprint.profile, layout, runs)
        needs = stage_needs[places]
        room = min(hardware.workers[worker].device_bytes for worker in members)
        chosen: list[int] = []
        resident = 0
        for block in ranked:
            if len(chosen) == at_most:
                break
            size = blocks[block].parameter_bytes
            left = needs - size * footprint.slots_of(table, block, layout=layout)[places]
            if resident + size + left.max() <= room:
                chosen.append(block)
                needs, resident = left, resident + size
        if len(chosen) < min(at_least, len(ranked)):
            block = next(block for block in ranked if block not in chosen)
            raise FitError(
                f"{at_least} blocks cannot stay on a device of {hardware.name}: with {len(chosen)} "
                f"of them it holds {(resident + needs.max()) / _GIB:.2f} of {room / _GIB:.2f} GiB, "
                f"and {blocks[block].name!r} has {blocks[block].parameter_bytes / _GIB:.2f} GiB "
                "more. Ask for fewer, or leave it to the planner."
            )
        for worker in members:
            by_worker[worker] = tuple(sorted(chosen))
    return tuple(by_worker) if any(by_worker) else ()


def _ranked(profile: ModelProfile, layout: PipelineLayout, runs: list[int]) -> list[int]:
    """Return the blocks that save uploads in a team's stages, the most per byte first."""
    num_runs: Counter[int] = Counter()
    for place, _ in groupby(runs):  # the same stage again is the same stage run
        num_runs.update(layout.partition.stages()[place].blocks)
    saved = {
        index: count - min(1.0, part.trainable_bytes / part.parameter_bytes)
        for index, count in num_runs.items()
        if (part := profile.blocks[index]).parameter_bytes
    }
    worthwhile = [index for index, share in saved.items() if share > 0]
    return sorted(worthwhile, key=lambda index: (-saved[index], index))
