"""Boundaries that go from device to device, or stay: what is moved, how long it takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from roundpipe_lightning.errors import HardwareError
from roundpipe_lightning.planning.cost.costs import BoundaryRoute, stage_costs
from roundpipe_lightning.planning.cost.device_memory import Footprint
from roundpipe_lightning.planning.cost.predict import StepPrediction, UpdateTiming, predict_step
from roundpipe_lightning.planning.cost.simulate import simulate_transfers
from roundpipe_lightning.planning.cost.traffic import (
    StageRun,
    boundary_route,
    hop_seconds,
    worker_stage_runs,
)
from roundpipe_lightning.planning.model.hardware import HardwareSpec, load_hardware
from roundpipe_lightning.planning.model.profile import BlockProfile, ModelProfile
from roundpipe_lightning.planning.model.storage import ParameterStorage
from roundpipe_lightning.planning.schedule.plan import PipelineLayout
from roundpipe_lightning.planning.schedule.schedule import Schedule
from roundpipe_lightning.planning.schedule.stages import Partition, RecomputePolicy
from tests.kit.profiles import machine

HOST, GRADIENTS, DIRECT = BoundaryRoute
PARTITION = Partition(forward=(1, 1), backward=(0, 1, 1))
TWO_WORKERS = Schedule.from_text("worker 0: F0.0 X0.0 B2.0\nworker 1: F1.0 B1.0")
LAYOUT = PipelineLayout(partition=PARTITION, num_microbatches=4, round_size=2)


def profile(*, attention_bytes: int = 0) -> ModelProfile:
    block = BlockProfile(
        name="block",
        forward_seconds=1.0,
        backward_seconds=1.0,
        boundary_bytes=100,
        attention_bytes=attention_bytes,
    )
    return ModelProfile(blocks=(block, block), tail=replace(block, name="tail"), fingerprint="")


def visits(route: BoundaryRoute, *, attention_bytes: int = 0) -> dict[str, StageRun]:
    rows = worker_stage_runs(
        TWO_WORKERS,
        partition=PARTITION,
        profile=profile(attention_bytes=attention_bytes),
        recompute=RecomputePolicy.SELECTIVE if attention_bytes else RecomputePolicy.FULL,
        route=route,
    )
    return {str(visit.stage)[:2]: visit for row in rows for visit in row}


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
    found = [visits(route)[name] for name in ("F0", "F1", "X0", "B1", "B2")]
    assert tuple(visit.input_bytes for visit in found) == up
    assert tuple(visit.output_bytes for visit in found) == down
    assert tuple(visit.direct_bytes for visit in found) == copied


def test_kept_attention_goes_with_the_boundaries() -> None:
    found = visits(DIRECT, attention_bytes=7)
    # B1 runs F1's block on F1's worker, and B2 F0's on F0's
    assert (found["B1"].direct_bytes, found["B2"].direct_bytes) == (200, 100)
    assert not any(visit.input_bytes or visit.output_bytes for visit in found.values())
    assert visits(GRADIENTS, attention_bytes=7)["B1"].input_bytes == 107


def footprint(hardware: HardwareSpec) -> Footprint:
    return Footprint(profile(), hardware=hardware, reserved_bytes=0)


def test_boundaries_go_directly_where_devices_reach_each_other_and_have_room() -> None:
    far = machine(2)
    near = replace(far, devices_reach_each_other=True)
    assert boundary_route(footprint(far), LAYOUT) is HOST
    assert boundary_route(footprint(near), LAYOUT) is DIRECT
    # Worker 0 keeps F0's two boundaries of two microbatches in the first round; F0 of the second
    # is on worker 1.
    need = footprint(near).most_bytes(LAYOUT) + 2 * 2 * 100
    full = replace(near, device_bytes=int(need / 0.8))
    assert boundary_route(footprint(full), LAYOUT) is GRADIENTS
    assert boundary_route(footprint(replace(full, device_bytes=10**6)), LAYOUT) is DIRECT
    on_host = replace(near, shares_host_memory=True)
    assert boundary_route(footprint(on_host), LAYOUT) is HOST


def test_boundaries_stay_where_a_microbatch_never_changes_its_worker() -> None:
    assert boundary_route(footprint(machine(1)), LAYOUT) is DIRECT
    assert boundary_route(footprint(machine(2)), replace(LAYOUT, team_size=2)) is DIRECT
    (row,) = worker_stage_runs(
        Schedule.from_text("worker 0: F0.0 F1.0 X0.0 B1.0 B2.0"),
        partition=PARTITION,
        profile=profile(),
        route=DIRECT,
    )
    assert not any(visit.input_bytes or visit.output_bytes or visit.direct_bytes for visit in row)


def test_a_direct_hop_is_one_copy() -> None:
    hardware = machine(2, link=100.0)
    hops = [hop_seconds(hardware, 100, route=route) for route in BoundaryRoute]
    assert hops == [2.0, 2.0, 1.0]
    ends = []
    for route, hop in zip(BoundaryRoute, hops, strict=True):
        costs = stage_costs(profile(), partition=PARTITION, hop_seconds=hop, route=route)
        timeline = simulate_transfers(
            TWO_WORKERS, partition=PARTITION, costs=costs, profile=profile(), hardware=hardware
        )
        ends.append(timeline.makespan_seconds)
    assert ends[2] < ends[1] <= ends[0]


def predicted(hardware: HardwareSpec) -> StepPrediction:
    return predict_step(
        profile(),
        hardware=hardware,
        layout=LAYOUT,
        num_trainable=0,
        storage=ParameterStorage(),
        timing=UpdateTiming.AFTER_STEP,
    )


def test_a_step_is_shorter_where_devices_reach_each_other() -> None:
    far = machine(2, link=100.0)
    near = replace(far, devices_reach_each_other=True)
    assert predicted(near).step_seconds < predicted(far).step_seconds


def test_which_machines_reach_what() -> None:
    names = ("a100", "a800", "h100", "h200", "rtx3090", "rtx4090", "rtx5090", "w7800")
    near = [name for name in names if load_hardware(f"{name}x8").devices_reach_each_other]
    assert near == ["a100", "a800", "h100", "h200"]
    with pytest.raises(HardwareError, match="devices_reach_each_other='yes'"):
        replace(machine(2), devices_reach_each_other="yes")  # type: ignore[arg-type]
