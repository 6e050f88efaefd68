from dataclasses import replace

import pytest

from roundpipe_lightning.planning.cost.costs import RecomputeStart, stage_costs
from roundpipe_lightning.planning.cost.simulate import simulate
from roundpipe_lightning.planning.model.hardware import load_hardware
from roundpipe_lightning.planning.model.profile import (
    HALF_LIFE_STEPS,
    BlockProfile,
    MeasuredProfile,
    ModelProfile,
)
from roundpipe_lightning.planning.model.work import (
    Amount,
    BlockWork,
    MicrobatchShape,
    ParameterStorage,
    Work,
    WorkProfile,
)
from roundpipe_lightning.planning.schedule.plan import Plan
from roundpipe_lightning.planning.schedule.schedule import Timeline, TimelineEntry
from roundpipe_lightning.planning.schedule.stages import Partition
from roundpipe_lightning.planning.search.fit import LEAST_GAIN, TrainingJob, improved_plan
from roundpipe_lightning.planning.search.partition import Effort
from roundpipe_lightning.planning.search.request import PartitionHints
from tests.kit.plans import round_robin_plan

NUM_BLOCKS = 6
NUM_MICROBATCHES = 4


def model(forward: list[float], *, tail: float = 0.5) -> ModelProfile:
    return ModelProfile(
        blocks=tuple(
            BlockProfile(name=f"layers.{i}", forward_seconds=f, backward_seconds=2 * f)
            for i, f in enumerate(forward)
        ),
        head=BlockProfile(
            name="head", forward_seconds=forward[0] / 10, backward_seconds=forward[0] / 5
        ),
        tail=BlockProfile(name="tail", forward_seconds=tail, backward_seconds=2 * tail),
        fingerprint="a model",
    )


ESTIMATE = model([1.0] * NUM_BLOCKS)
TRUTH = model([0.010, 0.010, 0.030, 0.010, 0.020, 0.010], tail=0.004)
PARTITIONS = [
    Partition(forward=(2, 2), backward=(2, 2, 2)),
    Partition(forward=(3,), backward=(3, 1, 2)),
    Partition(forward=(1, 2, 2), backward=(1, 2, 3)),
    Partition(forward=(1, 1, 1, 1, 1), backward=(1, 1, 1, 1, 1, 1)),
]


def plan_of(partition: Partition, *, num_workers: int = 2) -> Plan:
    return round_robin_plan(
        partition,
        num_workers=num_workers,
        num_microbatches=NUM_MICROBATCHES,
        round_size=NUM_MICROBATCHES,
        model="a model",
    )


def step(partition: Partition, truth: ModelProfile = TRUTH, *, slow: float = 1.0) -> Timeline:
    plan = plan_of(partition)
    costs = stage_costs(truth, partition=partition, recompute_start=RecomputeStart.WITH_GRADIENT)
    timeline = simulate(plan.schedule, partition=partition, costs=costs)
    return Timeline(
        num_workers=timeline.num_workers,
        entries=tuple(
            TimelineEntry(
                action=entry.action,
                start_seconds=slow * entry.start_seconds,
                end_seconds=slow * entry.end_seconds,
            )
            for entry in timeline.entries
        ),
    )


def stage_seconds(profile: ModelProfile, partition: Partition) -> list[float]:
    costs = stage_costs(profile, partition=partition)
    return [cost.seconds for cost in (*costs.forward, *costs.backward)]


def test_sums_of_stages_are_known_after_three_steps() -> None:
    measured, partition = MeasuredProfile(ESTIMATE), PARTITIONS[0]
    for _ in range(2):
        measured.observe(step(partition), partition=partition)
    before = measured.is_ready
    measured.observe(step(partition), partition=partition)
    assert (before, measured.is_ready) == (False, True)
    assert stage_seconds(measured.profile(), partition) == pytest.approx(
        stage_seconds(TRUTH, partition)
    )


def test_several_partitions_tell_the_blocks_apart() -> None:
    measured = MeasuredProfile(ESTIMATE)
    for number in range(240):
        partition = PARTITIONS[number // 4 % len(PARTITIONS)]
        measured.observe(step(partition), partition=partition)
    found = [block.forward_seconds for block in measured.profile().blocks]
    expected = [block.forward_seconds for block in TRUTH.blocks]
    assert found[:-1] == pytest.approx(expected[:-1], rel=0.06)  # the last is never in a FORWARD
    both = [block.forward_seconds + block.backward_seconds for block in measured.profile().blocks]
    assert both[2] == pytest.approx(0.09, rel=0.05)
    assert both[0] == pytest.approx(0.03, rel=0.05)


def test_what_is_not_measured_is_scaled_to_what_is() -> None:
    truth = model([0.01] * NUM_BLOCKS)
    measured, partition = MeasuredProfile(ESTIMATE), PARTITIONS[0]
    for _ in range(3):
        measured.observe(step(partition, truth), partition=partition)
    never_forward = measured.profile().blocks[-1]  # in the fused stage
    assert never_forward.forward_seconds == pytest.approx(0.01, rel=0.05)


def test_one_slow_step_changes_nothing() -> None:
    measured, partition = MeasuredProfile(ESTIMATE), PARTITIONS[0]
    for number in range(12):
        measured.observe(
            step(partition, slow=50.0 if number in (0, 7) else 1.0), partition=partition
        )
    assert stage_seconds(measured.profile(), partition) == pytest.approx(
        stage_seconds(TRUTH, partition)
    )


def test_a_lasting_change_counts_half_after_its_half_life() -> None:
    measured, partition = MeasuredProfile(ESTIMATE), PARTITIONS[0]
    for _ in range(3):
        measured.observe(step(partition), partition=partition)
    for _ in range(round(HALF_LIFE_STEPS) + 1):  # the median follows one step later
        measured.observe(step(partition, slow=3.0), partition=partition)
    before, now = stage_seconds(TRUTH, partition), stage_seconds(measured.profile(), partition)
    assert now == pytest.approx([2.0 * seconds for seconds in before])


def test_estimates_without_durations_are_dealt_out_evenly() -> None:
    blank = ModelProfile(
        blocks=tuple(BlockProfile(name=f"layers.{i}") for i in range(NUM_BLOCKS)),
        fingerprint="a model",
    )
    measured, partition = MeasuredProfile(blank), PARTITIONS[0]
    for _ in range(3):
        measured.observe(step(partition), partition=partition)
    profile = measured.profile()
    assert stage_seconds(profile, partition) == pytest.approx(stage_seconds(TRUTH, partition))
    assert profile.blocks[2].forward_seconds == profile.blocks[3].forward_seconds > 0


def test_averages_are_saved_and_restored_for_their_model_only() -> None:
    measured, partition = MeasuredProfile(ESTIMATE), PARTITIONS[0]
    for _ in range(5):
        measured.observe(step(partition), partition=partition)
    state = measured.state_dict()
    again = MeasuredProfile(ESTIMATE)
    assert again.load_state_dict(state)
    assert again.profile() == measured.profile()
    assert again.num_steps == 5
    other = MeasuredProfile(replace(ESTIMATE, fingerprint="another model"))
    assert not other.load_state_dict(state)
    assert not other.is_ready
    assert not MeasuredProfile(model([1.0])).load_state_dict(state)


# --- plans that follow ----------------------------------------------------------------------------


def job_of(**changes: object) -> TrainingJob:
    def work(name: str) -> BlockWork:
        return BlockWork(name=name, forward=Work(matrix_operations=Amount(fixed=1.0)))

    job = TrainingJob(
        work=WorkProfile(
            blocks=tuple(work(name) for name in ESTIMATE.block_names), fingerprint="a model"
        ),
        hardware=replace(load_hardware("cpu"), num_devices=2, devices_per_root=2),
        dtype="float32",
        storage=ParameterStorage(),
        shape=MicrobatchShape(sequences=1, seq_len=1),
        num_microbatches=NUM_MICROBATCHES,
        hints=PartitionHints(most_backward=2, most_fused=2),
        effort=Effort(num_actions=1_000_000),
    )
    return replace(job, **changes)  # type: ignore[arg-type]


UNEVEN = Partition(forward=(4, 1), backward=(1, 1, 4))


def test_an_uneven_plan_is_improved() -> None:
    plan = plan_of(UNEVEN)
    better = improved_plan(plan, profile=TRUTH, job=job_of())
    assert better is not None
    before, after = better
    assert after.seconds <= (1 - LEAST_GAIN) * before.seconds
    assert after.plan.partition != UNEVEN
    assert max(after.plan.partition.backward) <= 2
    same = ("num_microbatches", "round_size", "team_size", "num_workers")
    assert all(getattr(after.plan, name) == getattr(plan, name) for name in same)
    assert improved_plan(after.plan, profile=TRUTH, job=job_of()) is None  # nothing left to gain


def test_no_search_where_it_is_not_repaid() -> None:
    plan, job = plan_of(UNEVEN), job_of()
    step_seconds = step(UNEVEN).makespan_seconds
    assert improved_plan(plan, profile=TRUTH, job=job, planning_seconds=3.0, remaining_steps=1000)
    none = improved_plan(
        plan, profile=TRUTH, job=job, planning_seconds=3 * step_seconds, remaining_steps=2
    )
    assert none is None


def test_fixed_cuts_are_kept() -> None:
    hints = PartitionHints(forward=(4, 1), backward=(1, 1, 4))
    assert improved_plan(plan_of(UNEVEN), profile=TRUTH, job=job_of(hints=hints)) is None


def test_one_worker_has_nothing_to_gain() -> None:
    partition = Partition(forward=(), backward=(NUM_BLOCKS,))
    job = job_of(hardware=replace(load_hardware("cpu"), num_devices=1, devices_per_root=1))
    assert improved_plan(plan_of(partition, num_workers=1), profile=TRUTH, job=job) is None
