"""Random models, plans and delays on an emulated server; and faults, planted, that are found."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch

from roundpipe_lightning.planning.schedule.stages import RecomputePolicy

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def race_hunt(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("race_hunt")


@pytest.mark.parametrize("part", range(4))
def test_every_result_is_that_of_plain_pytorch(race_hunt: ModuleType, part: int) -> None:
    result = race_hunt.hunt(50, seed=1000 * part, is_small=True)
    assert not result["wrong"]
    assert result["num_checked"] > 3
    assert result["num_in_flight"] > 3


def test_the_cases_are_of_every_kind(race_hunt: ModuleType) -> None:
    cases = [race_hunt.Case.drawn(seed) for seed in range(300)]
    plans = [case.plan([f"b{i}" for i in range(case.partition.num_blocks)]) for case in cases]
    assert {plan.num_workers for plan in plans} == set(range(1, 9))
    assert {plan.weight_slots for plan in plans} == {1, 2}
    assert {case.num_batches for case in cases} == {1, 2, 3}
    assert {plan.recompute for plan in plans} == {RecomputePolicy.FULL}
    for wanted in (
        lambda case: case.team_size > 1,
        lambda case: case.round_size < case.num_microbatches,
        lambda case: any(case.resident),
        lambda case: case.is_direct,
        lambda case: case.is_early,
        lambda case: case.is_stale,
        lambda case: case.model.rounds,
        lambda case: case.model.num_second and case.model.num_experts,
        lambda case: case.planned_passes < case.model.num_passes,
        lambda case: case.model.dropout and case.model.frozen,
        lambda case: case.model.shares or case.model.tied,
    ):
        assert sum(map(bool, map(wanted, cases))) > 20


def test_a_case_is_the_same_every_time(race_hunt: ModuleType) -> None:
    assert race_hunt.Case.drawn(7) == race_hunt.Case.drawn(7)
    model = race_hunt.make_model(race_hunt.Case.drawn(7).model)
    again = race_hunt.make_model(race_hunt.Case.drawn(7).model)
    assert all(map(torch.equal, model.parameters(), again.parameters()))


FAULTS = ["boundary", "compute", "download_told", "gathered", "outside", "slot", "upload_told"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wait_that_is_left_out_is_found(race_hunt: ModuleType, fault: str) -> None:
    """By wrong numbers or by the checker."""
    assert sorted(race_hunt.FAULTS) == FAULTS
    for seed in (5, 8, 11, *range(20, 60)):
        if race_hunt.hunt(1, seed=seed, fault=fault)["wrong"]:
            return
    pytest.fail("found in none of 43 cases")


def test_a_wrong_number_is_told(race_hunt: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    step = race_hunt.PlainModel.step

    def off_by_a_bit(self: object, batches: object, *, step_seed: int) -> object:
        losses, gradients = step(self, batches, step_seed=step_seed)
        return [losses[0] * 1.001, *losses[1:]], gradients

    monkeypatch.setattr(race_hunt.PlainModel, "step", off_by_a_bit)
    result = race_hunt.hunt(1, seed=0, is_small=True)
    assert result["num_wrong"] == 1
    assert "loss 0: off by" in race_hunt.format_text(result)
