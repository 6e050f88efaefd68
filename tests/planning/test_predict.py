from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundpipe_lightning.errors import PlanError
from roundpipe_lightning.planning.cost.costs import (
    ActionCost,
    Evaluator,
    HostCosts,
    PartitionTable,
    RecomputeStart,
    StageCosts,
    UpdateTiming,
    stage_costs,
)
from roundpipe_lightning.planning.cost.predict import StepModel, StepPrediction
from roundpipe_lightning.planning.cost.simulate import simulate
from roundpipe_lightning.planning.model.hardware import Efficiency, HardwareSpec, load_hardware
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
    WeightStorage,
    Work,
    WorkProfile,
)
from roundpipe_lightning.planning.schedule.plan import PipelineLayout, Plan
from roundpipe_lightning.planning.schedule.schedule import Schedule, Timeline, TimelineEntry
from roundpipe_lightning.planning.schedule.stages import Partition, RecomputePolicy
from roundpipe_lightning.planning.search.fit import LEAST_GAIN, TrainingJob, improved_plan
from roundpipe_lightning.planning.search.partition import Effort
from roundpipe_lightning.planning.search.request import PartitionHints
from tests.kit.plans import default_plan, round_robin_plan
from tests.kit.profiles import random_profiles

LAYOUT = PipelineLayout(
    partition=Partition(forward=(2, 2), backward=(0, 1, 1, 1, 1)), num_microbatches=8, round_size=4
)
BLOCK = BlockProfile(
    name="b",
    forward_seconds=1.0,
    backward_seconds=2.0,
    parameter_bytes=1000,
    trainable_bytes=1000,
)


def model(block: BlockProfile = BLOCK) -> ModelProfile:
    tail = replace(block, name="t", forward_seconds=0.5, backward_seconds=1.0)
    return ModelProfile(blocks=(block,) * 4, tail=tail, fingerprint="m")


def machine(**changes: float) -> HardwareSpec:
    fast = {
        "upload_bytes_per_second": 1e12,
        "download_bytes_per_second": 1e12,
        "root_upload_bytes_per_second": 1e12,
        "root_download_bytes_per_second": 1e12,
        "host_bytes_per_second": 1e12,
    }
    efficiency = Efficiency(host=0.5)
    spec = replace(load_hardware("rtx4090x2"), efficiency=efficiency)
    return replace(spec, **{**fast, **changes})  # type: ignore[arg-type]


STORAGE = ParameterStorage()
AFTER, BEHIND = UpdateTiming.AFTER_STEP, UpdateTiming.BEHIND_NEXT_STEP


def predicted(
    timing: UpdateTiming, layout: PipelineLayout = LAYOUT, **changes: Any
) -> StepPrediction:
    options = {"profile": model(), "hardware": machine(), "storage": STORAGE, **changes}
    return StepModel(timing=timing, **options).predict(layout)


def test_the_optimizer_passes_beside_the_next_forward_pass_or_the_next_step() -> None:
    work = 8 * (4 * 4.0 + 1.5) / 2
    share = 4.5 / 17.5  # of the forward pass
    for num_trainable, optimizer in ((0, 0.0), (10**10, 0.6), (10**12 * 5, 300.0)):
        after, behind = (
            predicted(timing, num_trainable=num_trainable) for timing in (AFTER, BEHIND)
        )
        assert after.optimizer_seconds == pytest.approx(optimizer)
        assert after.compute_seconds == pytest.approx(work)
        late = max(0.0, optimizer - share * after.pipeline_seconds)
        assert after.step_seconds == pytest.approx(after.pipeline_seconds + late, rel=1e-6)
        assert (after.step_seconds > after.pipeline_seconds) == (optimizer > 100)
        assert behind.step_seconds == pytest.approx(max(behind.pipeline_seconds, optimizer))
        assert work <= behind.pipeline_seconds + 1e-9
        assert behind.pipeline_seconds <= after.pipeline_seconds + 1e-9
        assert 0 <= after.bubble_fraction < 1


@pytest.mark.parametrize("backward", [(4,), (0, 4), (0, 2, 2), (0, 1, 1, 1, 1)])
@pytest.mark.parametrize("teams", [1, 2])
def test_steps_in_a_stream_take_the_workers_time(backward: tuple[int, ...], teams: int) -> None:
    """Few stages leave workers to the next batch, but not to the one after that."""
    partition = Partition(forward=() if backward == (4,) else (4 - backward[0],), backward=backward)
    machines = replace(machine(), num_devices=8)
    recompute = RecomputePolicy.FULL if partition.forward else RecomputePolicy.NONE
    layout = PipelineLayout(
        partition=partition,
        num_microbatches=16,
        round_size=16,
        team_size=teams,
        recompute=recompute,
    )
    behind = predicted(BEHIND, layout, hardware=machines)
    assert behind.step_seconds >= behind.compute_seconds - 1e-9
    assert behind.step_seconds >= behind.timeline.makespan_seconds / 2
    profile, rounds = model(), (16 // teams,)
    host = HostCosts(timing=BEHIND)
    evaluator = Evaluator(
        profile=profile, num_workers=8 // teams, rounds=rounds, hop_seconds=0.0, host=host
    )
    estimate = replace(evaluator, team_size=teams, recompute=recompute).seconds(
        PartitionTable.of([partition])
    )
    assert estimate.item() == pytest.approx(behind.step_seconds, rel=0.1)


def test_bytes_moved_are_counted() -> None:
    prediction = predicted(AFTER, num_trainable=5000)
    assert prediction.uploaded_bytes == 2 * (4 + 4 + 1) * 1000  # two rounds, forward and backward
    assert prediction.downloaded_bytes == 2 * (4 + 1) * 1000


def test_the_host_adds_up_what_comes_down() -> None:
    big = model(replace(BLOCK, parameter_bytes=2 * 10**12, trainable_bytes=2 * 10**12))
    fast = machine(
        upload_bytes_per_second=1e15,
        root_upload_bytes_per_second=1e15,
        download_bytes_per_second=1e15,
        root_download_bytes_per_second=1e15,
        host_bytes_per_second=5e12,
    )
    given: Any = {"profile": big, "hardware": fast, "num_trainable": 5 * 10**12}
    after, behind = (predicted(timing, **given) for timing in (AFTER, BEHIND))
    moved = 2 * (9 + 5) * 2e12  # as above
    sums = 2 * 5 * 1e12 * (2 + 2 * 4)  # of each parameter 2 bytes are read, and 4 read and written
    assert after.host_seconds == pytest.approx(moved / 5e12 + sums / 2.5e12)
    assert after.host_seconds == behind.host_seconds < behind.pipeline_seconds
    assert behind.optimizer_seconds == pytest.approx(5e12 * 30 / 2.5e12)
    host = behind.host_seconds + behind.optimizer_seconds
    assert host > behind.pipeline_seconds
    assert behind.step_seconds == pytest.approx(host)
    late = after.optimizer_seconds - 4.5 / 17.5 * after.timeline.makespan_seconds
    assert after.step_seconds == pytest.approx(after.pipeline_seconds + late)
    shared = replace(fast, shares_host_memory=True)
    alone = predicted(AFTER, **given | {"hardware": shared})
    assert alone.step_seconds == pytest.approx(alone.pipeline_seconds + alone.optimizer_seconds)


def test_accumulated_batches_leave_an_update_the_first_ones_forward_pass() -> None:
    one, two = (
        predicted(
            AFTER, replace(LAYOUT, num_microbatches=8 * n, num_batches=n), num_trainable=10**12
        )
        for n in (1, 2)
    )
    late = [each.step_seconds - each.pipeline_seconds for each in (one, two)]
    assert late == pytest.approx([60 - 4.5 / 17.5 * one.pipeline_seconds] * 2, rel=0.01)


def test_workers_that_share_the_host_s_memory_copy_nothing() -> None:
    arguments = {"uploaded_bytes": 1e9, "downloaded_bytes": 1e9}
    shared = replace(machine(), shares_host_memory=True)
    assert STORAGE.transfer_seconds(**arguments, hardware=shared) == 0
    plain = STORAGE.transfer_seconds(**arguments, hardware=machine())
    assert plain == pytest.approx(2e9 / 1e12)
    mapped = ParameterStorage(weights=WeightStorage.MEMORY_MAPPED)
    seconds = mapped.transfer_seconds(**arguments, hardware=machine())
    assert seconds == pytest.approx(3e9 / 0.5e12 + 1e9 / 1e12)


def test_slow_links_make_a_step_longer_and_compressed_frozen_weights_shorter() -> None:
    size = 10**9
    frozen = model(
        replace(
            BLOCK,
            parameter_bytes=size,
            trainable_bytes=0,
            num_quantizable=size // 2,
            quantizable_bytes=size,
        )
    )
    slow = machine(upload_bytes_per_second=0.5e8, root_upload_bytes_per_second=1e8)

    def seconds(storage: ParameterStorage, hardware: HardwareSpec = slow) -> float:
        given: Any = {"profile": frozen, "hardware": hardware, "storage": storage}
        return predicted(BEHIND, num_trainable=0, **given).step_seconds

    plain, byte, nibble = (seconds(ParameterStorage(frozen_bits=bits)) for bits in (16, 8, 4))
    assert plain > byte > nibble > seconds(STORAGE, machine())
    mapped = ParameterStorage(weights=WeightStorage.MEMORY_MAPPED)
    slow_host = machine(host_bytes_per_second=3e8)
    assert seconds(mapped, slow_host) > 1.5 * seconds(STORAGE, slow_host)
    # five parts of the model, of which the page cache holds four
    small = machine(host_bytes=4 * size, disk_bytes_per_second=1e8)
    assert seconds(mapped, small) == pytest.approx(9 * size * 2 / 1e8, rel=0.3)
    assert seconds(mapped, small) > 2 * seconds(mapped, replace(small, host_bytes=5 * size))


def test_storage_says_what_a_step_moves() -> None:
    assert STORAGE.update_bytes == 4 + 8 + 16 + 2
    on_disk = ParameterStorage(optimizer_bytes=0, disk_bytes=8)
    assert on_disk.update_bytes == STORAGE.update_bytes
    assert on_disk.state_bytes(1000) == 8 * 1000
    slow_disk = machine(disk_bytes_per_second=1e9)
    assert on_disk.update_seconds(10**9, slow_disk) == pytest.approx(16.0)
    assert on_disk.state_bytes(10**12) == 3 * 64 * 2**20
    assert STORAGE.state_bytes(1000) == 8 * 1000
    half = replace(BLOCK, trainable_bytes=200, num_quantizable=400, quantizable_bytes=800)
    stored = ParameterStorage(frozen_bits=4).stored(model(half))
    assert stored.blocks[0].parameter_bytes == 200 + 200 + 400 // 64 * 4 + 1
    assert ParameterStorage(frozen_bits=4).expanded_seconds(half, machine()) > 0
    assert STORAGE.expanded_seconds(half, machine()) == 0
    assert STORAGE.stored(model()) == model()
    assert STORAGE.links(machine()) == machine()


PARTITION = Partition(forward=(1,), backward=(0, 1))
ONE = PipelineLayout(partition=PARTITION, num_microbatches=1, round_size=1)
SCHEDULE = Schedule.from_text("worker 0: F0.0 B1.0\nworker 1: X0.0\n")
COSTS = StageCosts(
    stages=(
        ActionCost(compute_seconds=1.0),
        ActionCost(compute_seconds=3.0),
        ActionCost(recompute_seconds=1.0, compute_seconds=2.0),
    ),
    hop_seconds=0.5,
)


def rows(timeline: Timeline) -> list[tuple[str, float, float, float]]:
    return [
        (str(e.action), e.start_seconds, e.end_seconds, e.waiting_seconds) for e in timeline.entries
    ]


def test_an_early_recompute_waits_inside_its_action() -> None:
    timeline = simulate(SCHEDULE, layout=ONE, costs=COSTS)
    assert rows(timeline) == [
        ("F0.0@0", 0.0, 1.0, 0.0),
        ("X0.0@1", 1.5, 4.5, 0.0),
        ("B1.0@0", 1.0, 7.0, 3.0),
    ]
    assert timeline.makespan_seconds == 7.0
    assert timeline.busy_seconds == 7.0
    assert timeline.bubble_fraction == pytest.approx(0.5)


def test_a_recompute_with_its_gradient_begins_late() -> None:
    costs = replace(COSTS, recompute_start=RecomputeStart.WITH_GRADIENT)
    timeline = simulate(SCHEDULE, layout=ONE, costs=costs)
    assert rows(timeline)[-1] == ("B1.0@0", 5.0, 8.0, 0.0)


def test_a_plain_step_waits_at_the_barrier_and_runs_the_tail_again() -> None:
    """Three blocks of 1 and 2 s, a tail of 4 and 8 s, two microbatches, two workers.

    worker 0  F0.0 F0.1 | B1.0 recomputes ... and waits for B0.0
    worker 1       F1.0 F1.1 | B0.0 B0.1
    """
    profile = ModelProfile(
        blocks=tuple(
            BlockProfile(name=f"b{i}", forward_seconds=1.0, backward_seconds=2.0) for i in range(3)
        ),
        tail=BlockProfile(name="tail", forward_seconds=4.0, backward_seconds=8.0),
        fingerprint="",
    )
    partition = Partition(forward=(2, 1), backward=(1, 2), plain=True)
    layout = PipelineLayout(partition=partition, num_microbatches=2, round_size=2)
    costs = stage_costs(profile, partition=partition, hop_seconds=0.5)
    pairs = [(cost.recompute_seconds, cost.compute_seconds) for cost in costs.stages]
    assert pairs == [(0.0, 2.0), (0.0, 5.0), (5.0, 10.0), (2.0, 4.0)]
    schedule = Schedule.from_text("worker 0: F0.0 F0.1 B0.0 B0.1\nworker 1: F1.0 F1.1 B1.0 B1.1\n")
    assert rows(simulate(schedule, layout=layout, costs=costs)) == [
        ("F0.0@0", 0.0, 2.0, 0.0),
        ("F0.1@0", 2.0, 4.0, 0.0),
        ("F1.0@1", 2.5, 7.5, 0.0),
        ("F1.1@1", 7.5, 12.5, 0.0),
        ("B0.0@0", 4.0, 23.0, 4.0),  # recomputed at 9, the driver's gradient is there at 13
        ("B0.1@0", 23.0, 38.0, 0.0),
        ("B1.0@1", 12.5, 27.5, 9.0),
        ("B1.1@1", 27.5, 42.5, 9.0),
    ]
    kept = Partition(forward=(2, 1), backward=(1, 2), plain=True, keeps_graphs=True)
    again = stage_costs(profile, partition=kept).stages
    assert [cost.recompute_seconds for cost in again] == [0.0, 0.0, 0.0, 2.0]


def test_head_and_tail_are_counted_once() -> None:
    profile = ModelProfile(
        blocks=tuple(
            BlockProfile(name=f"b{i}", forward_seconds=1.0, backward_seconds=2.0) for i in range(3)
        ),
        head=BlockProfile(name="head", forward_seconds=10.0, backward_seconds=20.0),
        tail=BlockProfile(name="tail", forward_seconds=100.0, backward_seconds=200.0),
        fingerprint="",
    )
    costs = stage_costs(profile, partition=Partition(forward=(1, 1), backward=(1, 2)))
    assert [cost.seconds for cost in costs.stages] == [11.0, 1.0, 303.0, 26.0]
    assert costs.stages[3].recompute_seconds == 2.0
    fused = stage_costs(profile, partition=Partition(forward=(), backward=(3,)))
    assert sum(cost.seconds for cost in fused.stages) == 339.0
    with pytest.raises(PlanError, match="3 blocks"):
        stage_costs(profile, partition=PARTITION)


@given(random_profiles(), st.integers(1, 5), st.integers(1, 7), st.sampled_from(RecomputeStart))
def test_a_default_plan_is_valid_and_its_simulation_consistent(
    profile: ModelProfile, workers: int, microbatches: int, recompute_start: RecomputeStart
) -> None:
    plan = default_plan(
        profile,
        num_workers=workers,
        num_microbatches=microbatches,
        recompute_start=recompute_start,
    )
    costs = stage_costs(profile, partition=plan.partition, recompute_start=recompute_start)
    timeline = simulate(plan.schedule, layout=plan, costs=costs)
    assert len(timeline.entries) == plan.partition.num_stages * microbatches
    assert timeline.busy_seconds == pytest.approx(
        microbatches * sum(cost.seconds for cost in costs.stages)
    )
    assert -1e-9 <= timeline.bubble_fraction <= 1.0
    for row in timeline.rows():
        for before, after in pairwise(row):
            assert before.end_seconds <= after.start_seconds


# Measured profiles --------------------------------------------------------------------------------


NUM_BLOCKS = 6
NUM_MICROBATCHES = 4


def measured_model(forward: list[float], *, tail: float = 0.5) -> ModelProfile:
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


ESTIMATE = measured_model([1.0] * NUM_BLOCKS)
TRUTH = measured_model([0.010, 0.010, 0.030, 0.010, 0.020, 0.010], tail=0.004)
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
    timeline = simulate(plan.schedule, layout=plan, costs=costs)
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
    return [cost.seconds for cost in costs.stages]


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
    truth = measured_model([0.01] * NUM_BLOCKS)
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
    assert not MeasuredProfile(measured_model([1.0])).load_state_dict(state)


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


def test_an_uneven_plain_plan_is_improved_and_stays_plain() -> None:
    uneven = Partition(forward=(4, 1, 1), backward=(1, 1, 4), plain=True)
    better = improved_plan(plan_of(uneven), profile=TRUTH, job=job_of(plain=True))
    assert better is not None
    before, after = better
    assert before.plan.partition == uneven
    assert after.seconds <= (1 - LEAST_GAIN) * before.seconds
    assert after.plan.plain


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
