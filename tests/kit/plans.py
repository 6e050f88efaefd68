from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import nn

from roundpipe_lightning.errors import PlanError
from roundpipe_lightning.models.work.work_profile import Blocks, parameter_work
from roundpipe_lightning.planning.cost.costs import Evaluator, PartitionTable, RecomputeStart
from roundpipe_lightning.planning.model.profile import BlockProfile, ModelProfile
from roundpipe_lightning.planning.model.work import BlockWork, MicrobatchShape, size_model
from roundpipe_lightning.planning.schedule.plan import Plan, split_rounds
from roundpipe_lightning.planning.schedule.stages import (
    Partition,
    call_lengths,
    cuts_before,
    reversed_cuts,
)
from roundpipe_lightning.planning.search.partition import StageLimits, balanced_cuts


def profile_module(module: nn.Module, stack: Blocks) -> ModelProfile:
    """Return what the parameters say, in seconds of a device of 10^12 operations per second."""

    def timed(part: BlockWork, sized: BlockProfile) -> BlockProfile:
        passes = (part.forward, part.backward)
        forward, backward = (one.matrix_operations.fixed / 1e12 for one in passes)
        return replace(sized, forward_seconds=forward, backward_seconds=backward)

    work = parameter_work(module, stack)
    sized = size_model(work, shape=MicrobatchShape(sequences=1, seq_len=1))
    blocks = tuple(map(timed, work.blocks, sized.blocks))
    head, tail = timed(work.head, sized.head), timed(work.tail, sized.tail)
    return replace(sized, blocks=blocks, head=head, tail=tail)


def default_plan(
    profile: ModelProfile,
    *,
    num_workers: int,
    num_microbatches: int,
    block_names: Sequence[str] | None = None,
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
        recompute_start: When the workers begin a recompute.
    """
    if min(num_workers, num_microbatches) < 1:
        raise PlanError(f"{num_workers=} and {num_microbatches=} must be 1 or more.")
    timed = _with_durations(profile)
    partitions = list(_even_partitions(timed, num_workers=num_workers))
    table = PartitionTable.of(partitions)
    ranked: list[tuple[tuple[float, ...], int, Partition]] = []
    for round_size in _round_sizes(num_workers, num_microbatches):
        makespans = Evaluator(
            profile=timed,
            num_workers=num_workers,
            rounds=split_rounds(num_microbatches, round_size=round_size),
            hop_seconds=0.0,
            recompute_start=recompute_start,
        ).makespans(table)
        for partition, makespan in zip(partitions, makespans, strict=True):
            seconds = float(f"{makespan:.6g}")
            rank = (seconds, max(partition.backward), -round_size, partition.num_stages)
            ranked.append((rank, len(ranked), partition))
    best, _, partition = min(ranked)
    return round_robin_plan(
        partition,
        num_workers=num_workers,
        num_microbatches=num_microbatches,
        round_size=-int(best[2]),
        model=profile.fingerprint,
        block_names=profile.block_names if block_names is None else block_names,
    )


def round_robin_plan(
    partition: Partition,
    *,
    num_workers: int,
    num_microbatches: int,
    round_size: int,
    team_size: int = 1,
    model: str = "any",
    block_names: Sequence[str] | None = None,
) -> Plan:
    names = [f"layers.{index}" for index in range(partition.num_blocks)]
    return Plan(
        model=model,
        partition=partition,
        num_workers=num_workers,
        num_microbatches=num_microbatches,
        round_size=round_size,
        team_size=team_size,
        block_names=tuple(names if block_names is None else block_names),
    )


def balanced_partition(
    profile: ModelProfile, *, num_fused: int, num_forward: int, num_backward: int
) -> Partition:
    """Balance the forward and the backward stages separately, with the fused stage between.

    Args:
        profile: The model.
        num_fused: Blocks of the fused stage, no more than follow the last cut.
        num_forward: FORWARD stages at most; at least one where blocks remain.
        num_backward: BACKWARD stages at most.
    """
    blocks = profile.blocks[: profile.num_blocks - num_fused]
    cuts = cuts_before(len(blocks), profile.cuts)
    forward = balanced_cuts(
        [block.forward_seconds for block in blocks], num_parts=max(1, num_forward), cuts=cuts
    )
    backward = balanced_cuts(
        [block.recompute_seconds + block.backward_seconds for block in reversed(blocks)],
        num_parts=max(1, num_backward),
        cuts=reversed_cuts(len(blocks), cuts),
    )
    return Partition(forward=forward, backward=(num_fused, *backward))


def keeps_limits(partition: Partition, limits: StageLimits) -> bool:
    return (
        max(partition.forward, default=0) <= limits.forward
        and max(partition.backward[1:], default=0) <= limits.backward
        and partition.backward[0] <= limits.fused
    )


def keeps_cuts(partition: Partition, cuts: Sequence[int]) -> bool:
    spans = [stage.blocks for stage in partition.stages()]
    return not any(span.start < cut < span.stop for span in spans for cut in cuts)


def _with_durations(profile: ModelProfile) -> ModelProfile:
    """Give unknown durations values that balance by number of blocks."""
    segments = (*profile.blocks, profile.tail)
    if any(segment.forward_seconds or segment.backward_seconds for segment in segments):
        return profile

    def unit(block: BlockProfile) -> BlockProfile:
        return replace(block, forward_seconds=1.0, backward_seconds=2.0)

    return replace(profile, blocks=tuple(map(unit, profile.blocks)), tail=unit(profile.tail))


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
    weights = [block.recompute_seconds + block.backward_seconds for block in profile.blocks]
    share = sum(block.forward_seconds for block in profile.blocks) / (sum(weights) or 1.0)
    last_call = call_lengths(profile.num_blocks, profile.cuts)[-1]
    step = max(1, (profile.num_blocks - fewest) // 12)
    for num_backward in [*range(fewest, profile.num_blocks, step), profile.num_blocks]:
        parts = balanced_cuts(weights, num_parts=num_backward, cuts=profile.cuts)
        largest = min(max(parts), last_call)
        for num_fused in sorted({0, largest // 2, largest}):
            for extra in (0, 1):
                partition = balanced_partition(
                    profile,
                    num_fused=num_fused,
                    num_forward=max(1, round(num_backward * share)) + extra,
                    num_backward=num_backward,
                )
                if partition not in seen:
                    seen.add(partition)
                    yield partition


def _round_sizes(num_workers: int, num_microbatches: int) -> list[int]:
    sizes = {num_microbatches, num_workers, -(-num_microbatches // num_workers), 1}
    return sorted(size for size in sizes if size <= num_microbatches)
