from dataclasses import replace
from pathlib import Path

import lightning
import pytest
import torch

from roundpipe_lightning.planning.model.hardware import RESERVED_BYTES, HardwareSpec, load_hardware
from roundpipe_lightning.planning.model.profile import BlockProfile, ModelProfile
from roundpipe_lightning.planning.schedule.plan import Plan
from roundpipe_lightning.planning.schedule.schedule import Timeline
from roundpipe_lightning.planning.search.fit import TrainingJob, fit_training
from roundpipe_lightning.planning.search.planner import PlannedTraining, plan_training
from roundpipe_lightning.planning.search.request import PartitionHints, PlanningRequest
from roundpipe_lightning.testing import EmulatedStrategy
from tests.kit.profiles import machine, uniform_profile
from tests.kit.training import QUIET, Regressor, make_trainer, regression_data
from tests.planning.test_fit import job

pytestmark = pytest.mark.filterwarnings(*QUIET)


def idle_shares(timeline: Timeline) -> list[float]:
    """Idle share of every worker's own time."""
    busy = [sum(entry.busy_seconds for entry in row) for row in timeline.rows()]
    return [1 - each / timeline.makespan_seconds for each in busy]


def planned(
    speeds: tuple[float, ...], *, count: int, team: int = 0, batches: int = 1
) -> PlannedTraining:
    spec = machine(len(speeds))
    spec = replace(spec, unequal=(replace(spec, num_devices=1),) * len(speeds))
    request = PlanningRequest(
        num_microbatches=count,
        num_batches=batches,
        speeds=speeds,
        hints=PartitionHints(team_size=team or None),
    )
    return plan_training(uniform_profile(24), hardware=spec, request=request)


@pytest.mark.long("speeds1-16-0-1-0.05", "speeds3-16-4-1-0.06")
@pytest.mark.parametrize(
    ("speeds", "count", "team", "batches", "most_idle"),
    [
        ((1.0,) * 4 + (0.5,) * 4, 24, 0, 1, 0.05),  # any team: microbatches are dealt by speed
        ((1.0,) * 4 + (0.5,) * 4, 16, 0, 1, 0.05),  # they do not divide by speed
        ((1.0,) * 4 + (0.5,) * 4, 16, 8, 1, 0.05),  # a team of eight
        ((1.0,) * 4 + (0.5,) * 4, 16, 4, 1, 0.06),  # two teams, with a pipeline to fill
        ((1.0, 0.5, 0.5), 12, 3, 1, 0.05),  # a team of three
        ((1.0, 0.5, 0.5), 6, 1, 3, 0.1),  # stages by speed, a stream
    ],
)
def test_shares_of_the_work_follow_speed(
    speeds: tuple[float, ...], count: int, team: int, batches: int, most_idle: float
) -> None:
    found = planned(speeds, count=count, team=team, batches=batches)
    assert max(idle_shares(found.timeline)) <= most_idle
    assert found.plan.speeds == speeds
    assert Plan.from_json(found.plan.to_json()) == found.plan


def test_speeds_are_those_of_the_devices_rates() -> None:
    mixed = job(hardware=load_hardware("rtx4090x1+rtx3090x2"))
    rates = [one.matrix_rates.of("bfloat16") for one in mixed.hardware.workers]
    assert mixed.speeds == pytest.approx([rate / rates[0] for rate in rates])
    assert isinstance(mixed, TrainingJob)
    assert job().speeds == ()


def test_weights_take_the_links_of_the_device_they_go_to() -> None:
    def seconds(rate: float) -> float:
        slow = replace(load_hardware("rtx4090x1"), upload_bytes_per_second=rate)
        spec = replace(load_hardware("rtx4090x2"), unequal=(load_hardware("rtx4090x1"), slow))
        hints = PartitionHints(team_size=2, round_size=2, resident=0)
        found = fit_training(job(hardware=spec, num_microbatches=2, hints=hints)).planned
        assert found is not None
        return found.timeline.makespan_seconds

    assert seconds(1e9) > 1.3 * seconds(25e9)


def with_memory(*sizes: int) -> HardwareSpec:
    spec = machine(len(sizes))
    ones = tuple(replace(spec, num_devices=1, device_bytes=RESERVED_BYTES + s) for s in sizes)
    return replace(spec, device_bytes=min(one.device_bytes for one in ones), unequal=ones)


def test_a_stage_may_be_as_large_as_its_own_device_allows() -> None:
    block = BlockProfile(
        name="block", forward_seconds=1.0, backward_seconds=2.0, activation_bytes=100
    )
    profile = ModelProfile(blocks=(block,) * 12, fingerprint="")

    def largest(sizes: tuple[int, int], speeds: tuple[float, ...]) -> dict[int, int]:
        request = PlanningRequest(
            num_microbatches=2, hints=PartitionHints(team_size=1, round_size=2), speeds=speeds
        )
        found = plan_training(profile, hardware=with_memory(*sizes), request=request)
        most = {0: 0, 1: 0}
        for action in found.plan.schedule:
            stage = found.plan.partition.stage(action.kind, action.stage)
            if stage.kind.value != "F":
                most[action.worker] = max(most[action.worker], len(stage.blocks))
        return most

    most = largest((800, 250), (1.0, 0.3))
    assert most[0] > 2
    assert most[1] <= 2


def test_what_stays_has_room_on_its_own_device() -> None:
    one = replace(load_hardware("rtx4090x1"), reserved_bytes=1)
    kinds = tuple(replace(one, device_bytes=mib * 2**20) for mib in (4000, 600))
    spec = replace(load_hardware("rtx4090x2"), unequal=kinds, device_bytes=600 * 2**20)
    hints = PartitionHints(team_size=1)
    asked = job(num_blocks=12, num_microbatches=4, hardware=spec, hints=hints)
    answer = fit_training(asked)
    assert answer.fits
    assert answer.planned is not None
    assert len(answer.planned.plan.resident[0]) > 5 > len(answer.planned.plan.resident[1])


def test_a_mixed_machine_trains(tmp_path: Path) -> None:
    def losses(strategy: EmulatedStrategy, devices: int) -> dict[str, torch.Tensor]:
        lightning.seed_everything(1, verbose=False)
        trainer = make_trainer(
            tmp_path, strategy=strategy, devices=devices, max_steps=3, max_epochs=-1
        )
        module = Regressor("adamw")
        trainer.fit(module, regression_data(64, batch_size=8))
        return {name: value.clone() for name, value in module.state_dict().items()}

    mixed = EmulatedStrategy(hardware="rtx4090x1+rtx3090x2", num_microbatches=4)
    weights = losses(mixed, 3)
    assert mixed.plan is not None
    assert len(set(mixed.plan.speeds)) == 2
    even = losses(EmulatedStrategy(hardware="rtx4090x3", num_microbatches=4), 3)
    for name, value in even.items():
        torch.testing.assert_close(weights[name], value)
