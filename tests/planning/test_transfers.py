from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundpipe_lightning.errors import HardwareError, PlanError
from roundpipe_lightning.planning.cost.costs import (
    BoundaryRoute,
    RecomputeStart,
    UpdateTiming,
    stage_costs,
)
from roundpipe_lightning.planning.cost.device_memory import Footprint
from roundpipe_lightning.planning.cost.predict import StepModel
from roundpipe_lightning.planning.cost.simulate import simulate
from roundpipe_lightning.planning.cost.traffic import (
    StageRun,
    boundary_route,
    hop_seconds,
    stage_bytes,
    worker_stage_runs,
)
from roundpipe_lightning.planning.model.hardware import HardwareSpec, load_hardware
from roundpipe_lightning.planning.model.profile import BlockProfile, ModelProfile
from roundpipe_lightning.planning.model.work import ParameterStorage
from roundpipe_lightning.planning.schedule.plan import PipelineLayout
from roundpipe_lightning.planning.schedule.schedule import Schedule, Timeline
from roundpipe_lightning.planning.schedule.stages import Partition, RecomputePolicy
from tests.kit.plans import default_plan
from tests.kit.profiles import machine, random_profiles

HOST, GRADIENTS, DIRECT = BoundaryRoute
PARTITION = Partition(forward=(1, 1), backward=(0, 1, 1))
ONE_WORKER = Schedule.from_text("worker 0: F0.0 F1.0 X0.0 B1.0 B2.0")
TWO_WORKERS = Schedule.from_text("worker 0: F0.0 X0.0 B2.0\nworker 1: F1.0 B1.0")
LAYOUT = PipelineLayout(partition=PARTITION, num_microbatches=4, round_size=2)


def model(**sizes: Any) -> ModelProfile:
    block = BlockProfile(name="block", forward_seconds=1.0, backward_seconds=1.0, **sizes)
    tail = BlockProfile(name="tail", forward_seconds=0.5, backward_seconds=0.5)
    return ModelProfile(blocks=(block, block), tail=tail, fingerprint="")


def run(
    profile: ModelProfile,
    hardware: HardwareSpec,
    schedule: Schedule = ONE_WORKER,
    partition: Partition = PARTITION,
    **options: Any,
) -> Timeline:
    count = 1 + max(action.microbatch for action in schedule)
    return simulate(
        schedule,
        layout=PipelineLayout(
            partition=partition, num_microbatches=count, round_size=count, **options
        ),
        costs=stage_costs(profile, partition=partition),
        profile=profile,
        hardware=hardware,
    )


def starts(timeline: Timeline) -> dict[str, float]:
    return {str(entry.action.key): entry.start_seconds for entry in timeline.entries}


# --- hand-checked steps --------------------------------------------------------------------------


def test_the_next_weights_come_while_the_present_stage_computes() -> None:
    # Three seconds per upload. F1's weights come from 3 to 6; X0 has none. B1's begin when F1 ends
    # at 7, which frees a slot. With one slot the next upload begins when a stage has ended.
    two = starts(run(model(parameter_bytes=300), machine(1, link=100.0)))
    assert two == {"F0.0": 3.0, "F1.0": 6.0, "X0.0": 7.0, "B1.0": 10.0, "B2.0": 13.0}
    one = starts(run(model(parameter_bytes=300), machine(1, link=100.0), weight_slots=1))
    assert one == {"F0.0": 3.0, "F1.0": 7.0, "X0.0": 8.0, "B1.0": 12.0, "B2.0": 17.0}


def test_a_run_begins_with_its_first_block_and_waits_inside_for_the_others() -> None:
    timeline = run(
        model(parameter_bytes=300),
        machine(1, link=100.0),
        Schedule.from_text("worker 0: F0.0 F0.1 X0.0 B1.0 X0.1 B1.1"),
        Partition(forward=(2,), backward=(0, 2)),
    )
    times = {
        str(entry.action.key): (entry.start_seconds, entry.waiting_seconds, entry.end_seconds)
        for entry in timeline.entries
    }
    # The blocks' weights come at 3 and 6; the second block runs from 6 to 7.
    assert times["F0.0"] == (3.0, 2.0, 7.0)
    assert times["F0.1"] == (7.0, 0.0, 9.0)
    # Of the recompute's two seconds the second begins when the last weights have come, at 15.
    assert times["B1.0"] == (12.0, 2.0, 18.0)


def test_gradients_hold_their_slot_until_they_are_downloaded() -> None:
    found = starts(
        run(
            model(trainable_bytes=500),
            machine(1, link=100.0),
            Schedule.from_text("worker 0: F0.0 X0.0 B1.0 B2.0 F0.1 X0.1 B1.1 B2.1"),
            Partition(forward=(2,), backward=(0, 1, 1)),
        )
    )
    # B1.0 ends at 5 and its 500 bytes have left at 10, B2.0's at 15: the runs after next wait.
    assert (found["F0.1"], found["X0.1"]) == (10.0, 15.0)


def test_workers_share_the_bandwidth_of_the_host_and_of_a_root_of_the_bus() -> None:
    alone = machine(2, link=100.0)
    root = replace(alone, root_upload_bytes_per_second=100.0)
    for hardware, first in (
        (alone, 3.0),
        (machine(2, link=100.0, host=100.0), 6.0),
        (root, 6.0),
        (replace(root, devices_per_root=1), 3.0),
    ):
        assert starts(run(model(parameter_bytes=300), hardware, TWO_WORKERS))["F0.0"] == first


@settings(max_examples=50)
@given(random_profiles(max_blocks=8), st.integers(1, 4), st.sampled_from(RecomputeStart))
def test_fast_links_change_nothing(
    profile: ModelProfile, workers: int, recompute_start: RecomputeStart
) -> None:
    plan = default_plan(profile, num_workers=workers, num_microbatches=4)
    costs = stage_costs(
        profile, partition=plan.partition, hop_seconds=0.25, recompute_start=recompute_start
    )
    fast = simulate(
        plan.schedule,
        layout=plan,
        costs=costs,
        profile=profile,
        hardware=machine(workers, link=1e30),
    )
    plain = simulate(plan.schedule, layout=plan, costs=costs)
    times = {entry.action: entry for entry in plain.entries}
    assert len(fast.entries) == len(times)
    for entry in fast.entries:
        assert entry.end_seconds == pytest.approx(times[entry.action].end_seconds, abs=1e-9)


def test_a_deadlock_is_refused() -> None:
    with pytest.raises(PlanError, match="deadlocks"):
        run(model(), machine(1), Schedule.from_text("worker 0: F1.0 F0.0 X0.0 B1.0 B2.0"))


# --- what moves ----------------------------------------------------------------------------------


def test_what_a_stage_moves() -> None:
    profile = replace(
        model(parameter_bytes=300, trainable_bytes=7, boundary_bytes=10),
        head=BlockProfile(name="head", parameter_bytes=1000, trainable_bytes=1),
        tail=BlockProfile(name="tail", parameter_bytes=2000, trainable_bytes=2),
    )
    stages = PARTITION.stages()
    moved = [stage_bytes(profile, stage=stage, partition=PARTITION) for stage in stages]
    assert [m.weight_bytes for m in moved] == [1300, 300, 2000, 300, 1300]
    assert [m.gradient_bytes for m in moved] == [0, 0, 2, 7, 8]
    assert [m.input_bytes for m in moved] == [0, 10, 10, 20, 20]
    assert [m.output_bytes for m in moved] == [20, 10, 10, 10, 0]
    # a frozen head is not uploaded for the last stage
    frozen = replace(profile, head=replace(profile.head, trainable_bytes=0))
    assert stage_bytes(frozen, stage=stages[-1], partition=PARTITION).weight_bytes == 300


@pytest.mark.parametrize(
    ("trainable_bytes", "resident", "moved"),
    [
        (0, (), [300, 300, 0, 300, 300]),
        (0, (0,), [0, 300, 0, 300, 0]),  # frozen: never
        (0, (0, 1), [0, 0, 0, 0, 0]),
        (300, (0, 1), [300, 300, 0, 0, 0]),  # trained: once a step
        (20, (0,), [20, 300, 0, 300, 0]),  # of adapted ones the adapters
    ],
)
def test_blocks_that_stay_are_not_uploaded_again(
    trainable_bytes: int, resident: tuple[int, ...], moved: list[int]
) -> None:
    profile = model(parameter_bytes=300, trainable_bytes=trainable_bytes)
    (row,) = worker_stage_runs(
        ONE_WORKER, partition=PARTITION, profile=profile, resident=(resident,) if resident else ()
    )
    assert [each.weight_bytes for each in row] == moved


def test_what_stays_takes_no_time_to_upload() -> None:
    profile = model(parameter_bytes=300)
    found = starts(run(profile, machine(1, link=100.0), resident=((0, 1),)))
    assert list(found.values()) == [0.0, 1.0, 2.0, 3.0, 5.0]


@pytest.mark.parametrize("policy", RecomputePolicy)
def test_kept_attention_is_moved_and_not_recomputed(policy: RecomputePolicy) -> None:
    profile = model(boundary_bytes=10, attention_seconds=0.25, attention_bytes=40)
    moved = [
        stage_bytes(profile, stage=stage, partition=PARTITION, recompute=policy)
        for stage in PARTITION.stages()
    ]
    kept = 40 if policy is RecomputePolicy.SELECTIVE else 0
    assert [each.output_bytes for each in moved[:2]] == [20 + kept, 10 + kept]
    assert [each.input_bytes for each in moved[2:]] == [10, 20 + kept, 20 + kept]
    costs = stage_costs(profile, partition=PARTITION, recompute=policy)
    again = {RecomputePolicy.FULL: 1.0, RecomputePolicy.SELECTIVE: 0.75}.get(policy, 0.0)
    assert [cost.recompute_seconds for cost in costs.stages[PARTITION.num_forward :]] == [
        0.0,
        again,
        again,
    ]


# --- boundaries that go from device to device, or stay -------------------------------------------


def stage_runs(route: BoundaryRoute, *, attention_bytes: int = 0) -> list[StageRun]:
    rows = worker_stage_runs(
        TWO_WORKERS,
        partition=PARTITION,
        profile=model(boundary_bytes=100, attention_bytes=attention_bytes),
        recompute=RecomputePolicy.SELECTIVE if attention_bytes else RecomputePolicy.FULL,
        route=route,
    )
    order = [str(stage) for stage in PARTITION.stages()]
    return sorted((each for row in rows for each in row), key=lambda r: order.index(str(r.stage)))


@pytest.mark.parametrize(
    ("route", "up", "down", "copied"),
    [
        (HOST, (0, 100, 100, 200, 200), (200, 100, 100, 100, 0), (0, 0, 0, 0, 0)),
        # of X0 and B1, whose gradients go to the other worker
        (GRADIENTS, (0, 100, 100, 100, 100), (200, 100, 0, 0, 0), (0, 0, 0, 100, 100)),
        # B1 starts from what F0 made on the other worker, B2 from what F0 has kept on its own
        (DIRECT, (0, 0, 0, 0, 0), (0, 0, 0, 0, 0), (0, 100, 100, 200, 100)),
    ],
)
def test_what_goes_which_way(
    route: BoundaryRoute, up: tuple[int, ...], down: tuple[int, ...], copied: tuple[int, ...]
) -> None:
    found = stage_runs(route)
    assert tuple(each.input_bytes for each in found) == up
    assert tuple(each.output_bytes for each in found) == down
    assert tuple(each.direct_bytes for each in found) == copied


def test_kept_attention_goes_with_the_boundaries() -> None:
    found = stage_runs(DIRECT, attention_bytes=7)
    # B1 runs F1's block on F1's worker, and B2 F0's on F0's
    assert [each.direct_bytes for each in found[3:]] == [200, 100]
    assert not any(each.input_bytes or each.output_bytes for each in found)
    assert stage_runs(GRADIENTS, attention_bytes=7)[3].input_bytes == 107


def footprint(hardware: HardwareSpec) -> Footprint:
    return Footprint(model(boundary_bytes=100), hardware=replace(hardware, reserved_bytes=1))


def test_boundaries_go_directly_where_devices_reach_each_other_and_have_room() -> None:
    far = machine(2)
    near = replace(far, devices_reach_each_other=True)
    # Worker 0 keeps F0's two boundaries of two microbatches in the first round; F0 of the second
    # is on worker 1.
    need = footprint(near).most_bytes(LAYOUT) + 2 * 2 * 100
    full = replace(near, device_bytes=int(need / 0.8))
    for hardware, route in (
        (far, HOST),
        (near, DIRECT),
        (full, GRADIENTS),
        (replace(full, device_bytes=10**6), DIRECT),
        (replace(near, shares_host_memory=True), HOST),
        (machine(1), DIRECT),  # a microbatch never changes its worker
    ):
        assert boundary_route(footprint(hardware), LAYOUT) is route
    assert boundary_route(footprint(machine(2)), replace(LAYOUT, team_size=2)) is DIRECT
    (row,) = worker_stage_runs(
        ONE_WORKER, partition=PARTITION, profile=model(boundary_bytes=100), route=DIRECT
    )
    assert not any(each.input_bytes or each.output_bytes or each.direct_bytes for each in row)


def test_a_direct_hop_is_one_copy() -> None:
    hardware, profile = machine(2, link=100.0), model(boundary_bytes=100)
    hops = [hop_seconds(hardware, 100, route=route) for route in BoundaryRoute]
    assert hops == [2.0, 2.0, 1.0]
    through, gradients, direct = (
        simulate(
            TWO_WORKERS,
            layout=LAYOUT,
            costs=stage_costs(profile, partition=PARTITION, hop_seconds=hop, route=route),
            profile=profile,
            hardware=hardware,
        ).makespan_seconds
        for route, hop in zip(BoundaryRoute, hops, strict=True)
    )
    assert direct < gradients <= through


def test_a_step_is_shorter_where_devices_reach_each_other() -> None:
    far = machine(2, link=100.0)
    apart, near = (
        StepModel(
            profile=model(boundary_bytes=100),
            hardware=hardware,
            num_trainable=0,
            storage=ParameterStorage(),
            timing=UpdateTiming.AFTER_STEP,
        )
        .predict(LAYOUT)
        .step_seconds
        for hardware in (far, replace(far, devices_reach_each_other=True))
    )
    assert near < apart


def test_which_machines_reach_what() -> None:
    names = ("a100", "a800", "h100", "h200", "rtx3090", "rtx4090", "rtx5090", "w7800")
    near = [name for name in names if load_hardware(f"{name}x8").devices_reach_each_other]
    assert near == ["a100", "a800", "h100", "h200"]
    with pytest.raises(HardwareError, match="devices_reach_each_other='yes'"):
        replace(machine(2), devices_reach_each_other="yes")  # type: ignore[arg-type]
