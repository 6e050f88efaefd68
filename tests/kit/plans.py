from collections.abc import Sequence
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
    cuts_before,
    reversed_cuts,
)
from roundpipe_lightning.planning.search.partition import (
    StageLimits,
    balanced_cuts,
    even_partitions,
)


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
    the largest rounds (they upload the weights least often). No stage behind the forward pass has
    more than about a quarter of the blocks: their activations are what a worker must hold at once.

    Args:
        profile: The model.
        num_workers: Number of workers.
        num_microbatches: Number of microbatches per step.
        block_names: Names of the blocks; the profile's where none are given.
        recompute_start: When the workers begin a recompute.
    """
    if min(num_workers, num_microbatches) < 1:
        raise PlanError(f"{num_workers=} and {num_microbatches=} must be 1 or more.")
    most = max(1, -(-profile.num_blocks // max(num_workers, 4)))
    limits = StageLimits(forward=max(1, profile.num_blocks), backward=most, fused=most)
    partitions = even_partitions(profile, limits=limits)
    table = PartitionTable.of(partitions)
    ranked: list[tuple[tuple[float, ...], int, Partition]] = []
    for round_size in _round_sizes(num_workers, num_microbatches):
        makespans = Evaluator(
            profile=profile,
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


def _round_sizes(num_workers: int, num_microbatches: int) -> list[int]:
    sizes = {num_microbatches, num_workers, -(-num_microbatches // num_workers), 1}
    return sorted(size for size in sizes if size <= num_microbatches)
