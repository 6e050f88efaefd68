from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundpipe_lightning.planning.cost.costs import (
    Evaluator,
    PartitionTable,
    RecomputeStart,
    stage_costs,
)
from roundpipe_lightning.planning.cost.simulate import simulate
from roundpipe_lightning.planning.model.profile import ModelProfile
from roundpipe_lightning.planning.schedule.plan import PipelineConfig, schedule_of
from roundpipe_lightning.planning.schedule.stages import Partition
from roundpipe_lightning.planning.search.partition import (
    Effort,
    PartitionSearch,
    StageLimits,
    even_partitions,
)
from tests.kit.plans import balanced_partition
from tests.kit.profiles import random_profiles, uniform_profile

QUICK = Effort(num_actions=100_000)


def simulated(evaluator: Evaluator, partition: Partition) -> float:
    count, size = sum(evaluator.rounds), evaluator.rounds[0]
    config = PipelineConfig(num_microbatches=count, round_size=size)
    schedule = schedule_of(config.with_stages(partition), num_workers=evaluator.num_workers)
    partition = replace(partition, joined=evaluator.joined)
    costs = stage_costs(
        evaluator.profile,
        partition=partition,
        hop_seconds=evaluator.hop_seconds,
        recompute_start=evaluator.recompute_start,
    )
    return simulate(schedule, partition=partition, costs=costs).makespan_seconds


def random_counts(data: st.DataObject, total: int) -> tuple[int, ...]:
    counts = []
    while total:
        counts.append(data.draw(st.integers(1, total)))
        total -= counts[-1]
    return tuple(counts)


@given(
    random_profiles(max_blocks=9),
    st.integers(1, 4),
    st.sampled_from([(1,), (4,), (3, 3), (4, 2)]),
    st.sampled_from(RecomputeStart),
    st.booleans(),
    st.data(),
)
def test_evaluator_agrees_with_the_simulator(
    profile: ModelProfile,
    workers: int,
    rounds: tuple[int, ...],
    recompute_start: RecomputeStart,
    joined: bool,
    data: st.DataObject,
) -> None:
    joined = joined and len(rounds) == 1
    evaluator = Evaluator(
        profile=profile,
        num_workers=workers,
        rounds=rounds,
        hop_seconds=0.25,
        recompute_start=recompute_start,
        joined=rounds[0] if joined else 0,
    )
    partitions = []
    for _ in range(3):
        fused = 0 if joined else data.draw(st.integers(0, profile.num_blocks))
        rest = profile.num_blocks - fused
        backward = (fused, *random_counts(data, rest))
        partitions.append(Partition(forward=random_counts(data, rest), backward=backward))
    table = PartitionTable.of(partitions)
    for partition, makespan in zip(partitions, evaluator.makespans(table), strict=True):
        exact = simulated(evaluator, partition)
        # An early recompute may also have to wait for its stored boundary, which is left out.
        if recompute_start is RecomputeStart.WITH_GRADIENT or workers == 1:
            assert makespan == pytest.approx(exact, abs=1e-9)
        else:
            assert makespan <= exact + 1e-9


def test_uneven_stages_beat_even_ones_and_the_search_repeats_itself() -> None:
    profile = uniform_profile(28, tail=3.0)
    evaluator = Evaluator(profile=profile, num_workers=8, rounds=(16,), hop_seconds=0.2)
    limits = StageLimits(forward=28, backward=4, fused=4)
    search = PartitionSearch(
        evaluator=evaluator, limits=limits, effort=Effort(num_actions=2_000_000)
    )
    best = search.best(even_partitions(profile, limits=limits))
    even = [
        balanced_partition(profile, num_fused=fused, num_forward=forward, num_backward=backward)
        for fused in range(4)
        for forward in range(1, 25, 2)
        for backward in range(7, 29, 2)
    ]
    table = PartitionTable.of(even)
    assert simulated(evaluator, best[0]) < 0.98 * min(evaluator.makespans(table))
    again = replace(search, seconds={}).best(even_partitions(profile, limits=limits))
    assert again == best
