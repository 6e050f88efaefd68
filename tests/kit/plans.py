"""Chooses a good plan from block durations alone: no hardware, no search over uneven stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from roundpipe_lightning.errors import PlanError
from roundpipe_lightning.planning.cost.costs import RecomputeStart
from roundpipe_lightning.planning.model.profile import BlockProfile, ModelProfile
from roundpipe_lightning.planning.schedule.cuts import call_lengths
from roundpipe_lightning.planning.schedule.plan import Plan
from roundpipe_lightning.planning.schedule.round_robin import round_robin_schedule, split_rounds
from roundpipe_lightning.planning.schedule.stages import Partition
from roundpipe_lightning.planning.search.makespan_table import Evaluator, PartitionTable
from roundpipe_lightning.planning.search.partition import balanced_cuts, balanced_partition


def default_plan(
    profile: ModelProfile,
    *,
    num_workers: int,
    num_microbatches: int,
    block_names: Sequence[str] | None = None,
    round_sizes: Sequence[int] = (),
    recompute_start: RecomputeStart = RecomputeStart.WITH_GRADIENT,
) -> Plan:
    """Return a balanced round-robin plan.

    The makespans of a few even partitions and round sizes are compared and the shortest is taken;
    of equally short ones that with the smallest BACKWARD stages (they need the least memory), then
    the largest rounds (they upload the weights least often).

    Args:
        profile: The model. Where all durations are zero, a block's backward counts as two forwards.
        num_workers: Number of workers.
        num_microbatches: Number of microbatches per step.
        block_names: Names of the blocks; the profile's where none are given.
        round_sizes: Round sizes to choose from; empty: some that suit the counts. A model whose
            forward pass writes running statistics needs one round: `[num_microbatches]`.
        recompute_start: When the workers begin a recompute.

    Raises:
        PlanError: If a count is less than 1 or the names are not as many as the blocks.
    """
    counts = [("num_workers", num_workers), ("num_microbatches", num_microbatches)]
    for name, value in [*counts, *(("round_sizes", size) for size in round_sizes)]:
        if value < 1:
            raise PlanError(f"{name}={value} must be 1 or more.")
    names = tuple(profile.block_names if block_names is None else block_names)
    timed = _with_durations(profile)
    partition, round_size = _best(
        timed,
        num_workers=num_workers,
        num_microbatches=num_microbatches,
        round_sizes=round_sizes or _round_sizes(num_workers, num_microbatches),
        recompute_start=recompute_start,
    )
    return Plan(
        model=profile.fingerprint,
        partition=partition,
        num_workers=num_workers,
        num_microbatches=num_microbatches,
        round_size=round_size,
        schedule=round_robin_schedule(
            partition,
            num_workers=num_workers,
            num_microbatches=num_microbatches,
            round_size=round_size,
        ),
        block_names=names,
    )


def _best(
    profile: ModelProfile,
    *,
    num_workers: int,
    num_microbatches: int,
    round_sizes: Sequence[int],
    recompute_start: RecomputeStart,
) -> tuple[Partition, int]:
    """Return the best even partition and round size."""
    partitions = list(_even_partitions(profile, num_workers=num_workers))
    table = PartitionTable.of([(p.forward, p.backward) for p in partitions])
    ranked: list[tuple[tuple[float, ...], int, Partition]] = []
    for round_size in round_sizes:
        evaluator = Evaluator(
            profile=profile,
            num_workers=num_workers,
            rounds=split_rounds(num_microbatches, round_size=round_size),
            hop_seconds=0.0,
            recompute_start=recompute_start,
        )
        for partition, makespan in zip(partitions, evaluator.makespans(table), strict=True):
            seconds = float(f"{makespan:.6g}")
            rank = (seconds, max(partition.backward), -round_size, partition.num_stages)
            ranked.append((rank, len(ranked), partition))
    best, _, partition = min(ranked)
    return partition, -int(best[2])


def _with_durations(profile: ModelProfile) -> ModelProfile:
    """Give unknown durations values that balance by number of blocks."""
    segments = (*profile.blocks, profile.tail)
    if any(segment.forward_seconds or segment.backward_seconds for segment in segments):
        return profile
    return replace(
        profile,
        blocks=tuple(_unit(block) for block in profile.blocks),
        tail=_unit(profile.tail),
    )


def _unit(block: BlockProfile) -> BlockProfile:
    return replace(block, forward_seconds=1.0, backward_seconds=2.0)


def _even_partitions(profile: ModelProfile, *, num_workers: int) -> Iterator[Partition]:
    """Yield partitions whose forward and backward stages take about equally long.

    No BACKWARD stage has more than about a quarter of the blocks, the fused stage no more than a
    BACKWARD one: their activations are what a worker must hold at once.
    """
    if not profile.blocks:
        yield Partition(forward=(), backward=(0,))
        return
    seen: set[Partition] = set()
    fewest = min(max(num_workers, 4), profile.num_blocks)
    for num_backward in _spread(fewest, profile.num_blocks):
        weights = [block.recompute_seconds + block.backward_seconds for block in profile.blocks]
        last_call = call_lengths(profile.num_blocks, profile.cuts)[-1]
        largest = min(
            max(balanced_cuts(weights, num_parts=num_backward, cuts=profile.cuts)), last_call
        )
        forward_share = sum(block.forward_seconds for block in profile.blocks) / (
            sum(weights) or 1.0
        )
        num_forward = max(1, round(num_backward * forward_share))
        for num_fused in sorted({0, largest // 2, largest}):
            for extra in (0, 1):
                partition = balanced_partition(
                    profile,
                    num_fused=num_fused,
                    num_forward=num_forward + extra,
                    num_backward=num_backward,
                )
                if partition not in seen:
                    seen.add(partition)
                    yield partition


def _spread(first: int, last: int, *, count: int = 12) -> list[int]:
    """Return up to about `count` whole numbers from `first` to `last`, evenly spaced."""
    step = max(1, (last - first) // count)
    return sorted({*range(first, last, step), last})


def _round_sizes(num_workers: int, num_microbatches: int) -> list[int]:
    sizes = {num_microbatches, num_workers, -(-num_microbatches // num_workers), 1}
    return sorted(size for size in sizes if size <= num_microbatches)
