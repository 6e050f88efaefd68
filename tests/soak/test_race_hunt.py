"""Random models, plans and delays on an emulated server; and faults, planted, that are found."""

from typing import Any

import pytest
import torch

from roundpipe_lightning.planning.schedule.stages import RecomputePolicy
from tests.soak.race_faults import FAULTS
from tests.soak.race_hunt import Case, hunt
from tests.soak.race_models import PlainModel, make_model


@pytest.mark.parametrize(
    ("first", "cases", "is_small"),
    [
        (0, 50, True),
        *(pytest.param(50 * part, 50, False, marks=pytest.mark.soak) for part in range(10)),
    ],
)
def test_every_result_is_that_of_plain_pytorch(first: int, cases: int, is_small: bool) -> None:
    wrong, kinds = hunt(cases, seed=first, is_small=is_small)
    assert not wrong
    assert kinds["checked"] > 3
    assert kinds["in flight"] > 3
    assert kinds["blocks"] > 3


def test_the_cases_are_of_every_kind() -> None:
    cases = [Case.drawn(seed) for seed in range(400)]
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
        lambda case: case.model.counts and case.num_batches > 1,
        lambda case: case.model.num_second and case.model.num_experts,
        lambda case: case.planned_passes < case.model.num_passes,
        lambda case: case.model.dropout and case.model.frozen,
        lambda case: case.model.shares or case.model.tied,
        lambda case: case.is_joined and case.is_stale,
        lambda case: case.is_joined and case.num_batches > 1 and case.num_microbatches > 1,
    ):
        assert sum(map(bool, map(wanted, cases))) > 20


def test_a_case_is_the_same_every_time() -> None:
    assert Case.drawn(7) == Case.drawn(7)
    model = make_model(Case.drawn(7).model)
    again = make_model(Case.drawn(7).model)
    assert all(map(torch.equal, model.parameters(), again.parameters()))


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_a_wait_that_is_left_out_is_found(fault: str) -> None:
    """By wrong numbers or by the checker."""
    for seed in (5, 8, 11, *range(20, 60)):
        if hunt(1, seed=seed, fault=fault)[0]:
            return
    pytest.fail("found in none of 43 cases")


def test_a_wrong_number_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    step = PlainModel.step

    def off_by_a_bit(self: PlainModel, batches: Any, **options: int) -> object:
        losses, gradients = step(self, batches, **options)
        return [losses[0] * 1.001, *losses[1:]], gradients

    monkeypatch.setattr(PlainModel, "step", off_by_a_bit)
    wrong, _ = hunt(1, seed=0, is_small=True)
    assert "loss 0: off by" in wrong[0][0]
