import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundpipe_lightning.errors import PlanError
from roundpipe_lightning.planning.model.profile import ModelProfile
from roundpipe_lightning.planning.schedule.plan import Plan
from roundpipe_lightning.planning.schedule.stages import RecomputePolicy
from tests.kit.plans import default_plan
from tests.kit.profiles import random_profiles, uniform_profile


@pytest.fixture
def plan() -> Plan:
    return default_plan(uniform_profile(6), num_workers=2, num_microbatches=4)


@given(random_profiles(), st.integers(1, 5), st.integers(1, 6))
def test_json_round_trips(profile: ModelProfile, workers: int, microbatches: int) -> None:
    made = default_plan(profile, num_workers=workers, num_microbatches=microbatches)
    assert Plan.from_json(made.to_json()) == made


def test_what_is_held_round_trips(plan: Plan) -> None:
    held = replace(plan, weight_slots=1, num_batches=3, resident=((0, 1, 2, 5), ()))
    assert json.loads(held.to_json())["resident"] == ["0 1 2 5", ""]
    assert Plan.from_json(held.to_json()) == held
    pieces = replace(plan, round_size=4, schedule=plan.schedule, joined=True)
    assert Plan.from_json(pieces.to_json()) == pieces
    assert replace(plan, resident=((), ())).resident == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_slots": 3}, "weight_slots=3 must be 1 or 2"),
        ({"num_batches": 0}, "num_batches=0 must be 1 or more"),
        ({"recompute": RecomputePolicy.NONE}, "the fused stage must have all blocks"),
        ({"resident": ((1,),)}, "for 1 workers, but num_workers=2"),
        ({"resident": ((6,), ())}, r"resident blocks \[6\] of worker 0: give ascending .* 0 to 5"),
        ({"resident": ((), (2, 1))}, r"resident blocks \[2, 1\] of worker 1"),
    ],
)
def test_choices_that_cannot_be_are_refused(
    plan: Plan, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        replace(plan, **change)


def test_save_and_load(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "plan.json"
    plan.save(path)
    plan.save(path)
    assert Plan.load(path) == plan
    assert [p.name for p in path.parent.iterdir()] == ["plan.json"]


def test_only_the_planned_model_is_accepted(plan: Plan) -> None:
    names = uniform_profile(6).block_names
    plan.check_model("uniform", block_names=names)
    with pytest.raises(PlanError, match=r"for 6 blocks, the model has 5.*Make a new plan"):
        plan.check_model("uniform", block_names=names[:5])
    with pytest.raises(PlanError, match=r"'layers.5' is 'other' in the model"):
        plan.check_model("uniform", block_names=(*names[:5], "other"))
    with pytest.raises(PlanError, match=r"'uniform', not for 'changed'"):
        plan.check_model("changed", block_names=names)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_workers": 3}, "schedule has 2 workers, but num_workers=3"),
        ({"num_microbatches": 5}, "missing"),
        ({"team_size": 3}, r"team_size=3 does not divide num_workers=2; choose one of \[1, 2\]"),
        ({"round_size": 9}, "round_size=9 is more than num_microbatches=4"),
        ({"round_size": 0}, "round_size=0 must be 1 or more"),
        ({"block_names": ("a",)}, "1 block names for a partition of 6 blocks"),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    plan: Plan, change: dict[str, object], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        replace(plan, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Not a plan"),
        ("[]", "format_version=None"),
        ('{"format_version": 4}', "format_version=4, but this version reads 3"),
        ('{"format_version": true}', "format_version=True"),
        ('{"format_version": 2}', "format_version=2, but"),
        ('{"format_version": 3}', "has no 'num_workers'"),
    ],
)
def test_a_file_that_is_no_plan_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(PlanError, match=message) as caught:
        Plan.load(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="does not exist"):
        Plan.load(tmp_path / "none.json")
    with pytest.raises(PlanError, match="cannot be read"):
        Plan.load(tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_workers", "two", "malformed"),
        ("resident", ["a", ""], "malformed"),
        ("resident", 3, "malformed"),
        ("schedule", 3, "malformed"),
        ("schedule", ["worker 0: G2.5"], "'G2.5' is not an action"),
        ("team_size", 0, "team_size=0 must be 1 or more"),
    ],
)
def test_malformed_values_are_refused(plan: Plan, field: str, value: object, message: str) -> None:
    values = json.loads(plan.to_json())
    values[field] = value
    with pytest.raises(PlanError, match=message):
        Plan.from_json(json.dumps(values))
