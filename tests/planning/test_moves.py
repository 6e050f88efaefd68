"""What moves visit by visit, with blocks that stay and with slots for weights."""

from __future__ import annotations

from dataclasses import replace

import pytest

from roundpipe_lightning.planning.cost.costs import stage_costs
from roundpipe_lightning.planning.cost.simulate import simulate_transfers
from roundpipe_lightning.planning.cost.traffic import stage_bytes, worker_stage_runs
from roundpipe_lightning.planning.model.profile import BlockProfile, ModelProfile
from roundpipe_lightning.planning.schedule.schedule import Schedule
from roundpipe_lightning.planning.schedule.stages import Partition, RecomputePolicy
from roundpipe_lightning.planning.schedule.timeline import Timeline
from tests.kit.profiles import machine

PARTITION = Partition(forward=(1, 1), backward=(0, 1, 1))
ONE_WORKER = Schedule.from_text("worker 0: F0.0 F1.0 X0.0 B1.0 B2.0")


def profile(*, trainable_bytes: int = 0, parameter_bytes: int = 300) -> ModelProfile:
    block = BlockProfile(
        name="block",
        forward_seconds=1.0,
        backward_seconds=1.0,
        parameter_bytes=parameter_bytes,
        trainable_bytes=trainable_bytes,
        boundary_bytes=10,
        attention_seconds=0.25,
        attention_bytes=40,
    )
    tail = BlockProfile(name="tail", forward_seconds=0.5, backward_seconds=0.5)
    return ModelProfile(blocks=(block, block), tail=tail, fingerprint="")


def weights(model: ModelProfile, *, resident: tuple[tuple[int, ...], ...]) -> list[int]:
    (row,) = worker_stage_runs(ONE_WORKER, partition=PARTITION, profile=model, resident=resident)
    return [visit.weight_bytes for visit in row]


def run(model: ModelProfile, *, slots: int = 2, resident: tuple[tuple[int, ...], ...]) -> Timeline:
    without_boundaries = replace(
        model, blocks=tuple(replace(block, boundary_bytes=0) for block in model.blocks)
    )
    return simulate_transfers(
        ONE_WORKER,
        partition=PARTITION,
        costs=stage_costs(model, partition=PARTITION),
        profile=without_boundaries,
        hardware=machine(1, link=100.0),
        weight_slots=slots,
        resident=resident,
    )


def test_a_frozen_head_is_not_uploaded_for_the_last_backward_stage() -> None:
    frozen = BlockProfile(name="head", parameter_bytes=1000)
    for head, last in ((frozen, 300), (replace(frozen, trainable_bytes=1), 1300)):
        model = replace(profile(), head=head)
        moved = [
            stage_bytes(model, stage=stage, partition=PARTITION).weight_bytes
            for stage in PARTITION.stages()
        ]
        assert moved == [1300, 300, 0, 300, last]


def test_frozen_blocks_that_stay_are_never_uploaded() -> None:
    assert weights(profile(), resident=()) == [300, 300, 0, 300, 300]
    assert weights(profile(), resident=((0,),)) == [0, 300, 0, 300, 0]
    assert weights(profile(), resident=((0, 1),)) == [0, 0, 0, 0, 0]


def test_trained_blocks_that_stay_are_uploaded_once_a_step() -> None:
    model = profile(trainable_bytes=300)
    assert weights(model, resident=((0, 1),)) == [300, 300, 0, 0, 0]
    adapted = profile(trainable_bytes=20)
    assert weights(adapted, resident=((0,),)) == [20, 300, 0, 300, 0]


def test_one_slot_exposes_the_upload() -> None:
    model = profile(parameter_bytes=300)
    # Three seconds per upload; the next begins when a stage has ended.
    one = {str(e.action.key): e.start_seconds for e in run(model, slots=1, resident=()).entries}
    assert one == {"F0.0": 3.0, "F1.0": 7.0, "X0.0": 8.0, "B1.0": 12.0, "B2.0": 17.0}
    two = run(model, resident=())
    assert two.makespan_seconds < max(one.values())


def test_what_stays_takes_no_time_to_upload() -> None:
    starts = [entry.start_seconds for entry in run(profile(), resident=((0, 1),)).entries]
    assert starts == [0.0, 1.0, 2.0, 3.0, 5.0]


@pytest.mark.parametrize("policy", RecomputePolicy)
def test_kept_attention_is_moved_and_not_recomputed(policy: RecomputePolicy) -> None:
    moved = {
        str(stage)[:2]: stage_bytes(profile(), stage=stage, partition=PARTITION, recompute=policy)
        for stage in PARTITION.stages()
    }
    kept = 40 if policy is RecomputePolicy.SELECTIVE else 0
    assert [moved[name].output_bytes for name in ("F0", "F1")] == [20 + kept, 10 + kept]
    assert [moved[name].input_bytes for name in ("X0", "B1", "B2")] == [10, 20 + kept, 20 + kept]
    costs = stage_costs(profile(), partition=PARTITION, recompute=policy)
    again = 0.75 if policy is RecomputePolicy.SELECTIVE else 1.0
    assert [cost.recompute_seconds for cost in costs.backward] == [0.0, again, again]
