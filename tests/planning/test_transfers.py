"""Transfers: hand-checked steps, and agreement with the simulator where links are fast."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundpipe_lightning.errors import PlanError
from roundpipe_lightning.planning.cost.costs import RecomputeStart, stage_costs
from roundpipe_lightning.planning.cost.simulate import simulate, simulate_transfers
from roundpipe_lightning.planning.cost.traffic import stage_bytes
from roundpipe_lightning.planning.model.hardware import HardwareSpec
from roundpipe_lightning.planning.model.profile import BlockProfile, ModelProfile
from roundpipe_lightning.planning.schedule.schedule import Schedule
from roundpipe_lightning.planning.schedule.stages import Partition
from roundpipe_lightning.planning.schedule.timeline import Timeline
from tests.kit.plans import default_plan
from tests.kit.profiles import machine, random_profiles

PARTITION = Partition(forward=(1, 1), backward=(0, 1, 1))
ONE_WORKER = Schedule.from_text("worker 0: F0.0 F1.0 X0.0 B1.0 B2.0")


def profile(*, parameter_bytes: int, trainable_bytes: int, boundary_bytes: int) -> ModelProfile:
    block = BlockProfile(
        name="block",
        forward_seconds=1.0,
        backward_seconds=1.0,
        parameter_bytes=parameter_bytes,
        trainable_bytes=trainable_bytes,
        boundary_bytes=boundary_bytes,
    )
    tail = BlockProfile(name="tail", forward_seconds=0.5, backward_seconds=0.5)
    return ModelProfile(blocks=(block, block), tail=tail, fingerprint="")


def run(model: ModelProfile, hardware: HardwareSpec, schedule: Schedule = ONE_WORKER) -> Timeline:
    costs = stage_costs(model, partition=PARTITION)
    return simulate_transfers(
        schedule, partition=PARTITION, costs=costs, profile=model, hardware=hardware
    )


def starts(timeline: Timeline) -> dict[str, float]:
    return {str(entry.action.key): entry.start_seconds for entry in timeline.entries}


def test_the_next_weights_come_while_the_present_stage_computes() -> None:
    model = profile(parameter_bytes=300, trainable_bytes=0, boundary_bytes=0)
    found = starts(run(model, machine(1, link=100.0)))
    # Three seconds per upload. F1's weights come from 3 to 6; X0 has none. B1's begin when F1 ends
    # at 7, which frees a slot.
    assert found == {"F0.0": 3.0, "F1.0": 6.0, "X0.0": 7.0, "B1.0": 10.0, "B2.0": 13.0}


def test_a_visit_begins_with_its_first_block_and_waits_inside_for_the_others() -> None:
    model = profile(parameter_bytes=300, trainable_bytes=0, boundary_bytes=0)
    partition = Partition(forward=(2,), backward=(0, 2))
    timeline = simulate_transfers(
        Schedule.from_text("worker 0: F0.0 F0.1 X0.0 B1.0 X0.1 B1.1"),
        partition=partition,
        costs=stage_costs(model, partition=partition),
        profile=model,
        hardware=machine(1, link=100.0),
    )
    entries = {str(entry.action.key): entry for entry in timeline.entries}
    first, second = entries["F0.0"], entries["F0.1"]
    # The blocks' weights come at 3 and 6; the second block runs from 6 to 7.
    assert (first.start_seconds, first.waiting_seconds, first.end_seconds) == (3.0, 2.0, 7.0)
    assert (second.start_seconds, second.waiting_seconds, second.end_seconds) == (7.0, 0.0, 9.0)
    # Of the recompute's two seconds the second begins when the last weights have come, at 15.
    back = entries["B1.0"]
    assert (back.start_seconds, back.waiting_seconds, back.end_seconds) == (12.0, 2.0, 18.0)


def test_gradients_hold_their_slot_until_they_are_downloaded() -> None:
    model = profile(parameter_bytes=0, trainable_bytes=500, boundary_bytes=0)
    partition = Partition(forward=(2,), backward=(0, 1, 1))
    schedule = Schedule.from_text("worker 0: F0.0 X0.0 B1.0 B2.0 F0.1 X0.1 B1.1 B2.1")
    timeline = simulate_transfers(
        schedule,
        partition=partition,
        costs=stage_costs(model, partition=partition),
        profile=model,
        hardware=machine(1, link=100.0),
    )
    found = starts(timeline)
    # B1.0 ends at 5 and its 500 bytes have left at 10, B2.0's at 15: the visits after next wait.
    assert found["F0.1"] == 10.0
    assert found["X0.1"] == 15.0


def test_workers_share_the_bandwidth_of_the_host() -> None:
    model = profile(parameter_bytes=300, trainable_bytes=0, boundary_bytes=0)
    schedule = Schedule.from_text("worker 0: F0.0 X0.0 B2.0\nworker 1: F1.0 B1.0")
    alone = starts(run(model, machine(2, link=100.0), schedule))
    shared = starts(run(model, machine(2, link=100.0, host=100.0), schedule))
    assert (alone["F0.0"], alone["F1.0"]) == (3.0, 4.0)
    assert (shared["F0.0"], shared["F1.0"]) == (6.0, 7.0)


def test_workers_share_a_root_of_the_bus() -> None:
    model = profile(parameter_bytes=300, trainable_bytes=0, boundary_bytes=0)
    schedule = Schedule.from_text("worker 0: F0.0 X0.0 B2.0\nworker 1: F1.0 B1.0")
    hardware = replace(machine(2, link=100.0), root_upload_bytes_per_second=100.0)
    assert starts(run(model, hardware, schedule))["F0.0"] == 6.0
    apart = replace(hardware, devices_per_root=1)
    assert starts(run(model, apart, schedule))["F0.0"] == 3.0


def test_what_a_stage_moves() -> None:
    model = profile(parameter_bytes=300, trainable_bytes=7, boundary_bytes=10)
    model = replace(
        model,
        head=BlockProfile(name="head", parameter_bytes=1000, trainable_bytes=1),
        tail=BlockProfile(name="tail", parameter_bytes=2000, trainable_bytes=2),
    )
    moved = {
        str(stage)[:2]: stage_bytes(model, stage=stage, partition=PARTITION)
        for stage in PARTITION.stages()
    }
    assert [m.weight_bytes for m in moved.values()] == [1300, 300, 2000, 300, 1300]
    assert [m.gradient_bytes for m in moved.values()] == [0, 0, 2, 7, 8]
    assert [m.input_bytes for m in moved.values()] == [0, 10, 10, 20, 20]
    assert [m.output_bytes for m in moved.values()] == [20, 10, 10, 10, 0]


@settings(max_examples=50)
@given(random_profiles(max_blocks=8), st.integers(1, 4), st.sampled_from(RecomputeStart))
def test_fast_links_change_nothing(
    model: ModelProfile, workers: int, recompute_start: RecomputeStart
) -> None:
    plan = default_plan(model, num_workers=workers, num_microbatches=4)
    costs = stage_costs(
        model, partition=plan.partition, hop_seconds=0.25, recompute_start=recompute_start
    )
    fast = simulate_transfers(
        plan.schedule,
        partition=plan.partition,
        costs=costs,
        profile=model,
        hardware=machine(workers, link=1e30),
    )
    plain = simulate(plan.schedule, partition=plan.partition, costs=costs)
    times = {entry.action: entry for entry in plain.entries}
    assert len(fast.entries) == len(times)
    for entry in fast.entries:
        assert entry.end_seconds == pytest.approx(times[entry.action].end_seconds, abs=1e-9)


def test_a_deadlock_is_refused() -> None:
    model = profile(parameter_bytes=1, trainable_bytes=1, boundary_bytes=1)
    with pytest.raises(PlanError, match="deadlocks"):
        run(model, machine(1), Schedule.from_text("worker 0: F1.0 F0.0 X0.0 B1.0 B2.0"))
