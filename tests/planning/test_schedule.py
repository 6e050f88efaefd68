import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundpipe_lightning.errors import PlanError
from roundpipe_lightning.planning.model.profile import ModelProfile
from roundpipe_lightning.planning.schedule.plan import (
    PipelineConfig,
    Plan,
    rotated,
    schedule_of,
    turns_of_batch,
)
from roundpipe_lightning.planning.schedule.schedule import (
    Action,
    ActionKey,
    Schedule,
    Timeline,
    TimelineEntry,
    dependencies,
    validate_schedule,
)
from roundpipe_lightning.planning.schedule.stages import Partition, RecomputePolicy, StageKind
from tests.kit.plans import default_plan, round_robin_plan
from tests.kit.profiles import random_profiles, uniform_profile


def test_stages_run_forward_then_fused_then_backward() -> None:
    partition = Partition(forward=(3, 3), backward=(2, 4, 2))
    assert " ".join(map(str, partition.stages())) == "F0[0:3] F1[3:6] X0[6:8] B1[2:6] B2[0:2]"
    assert partition.num_blocks == 8


def test_plain_stages_run_forward_then_backward() -> None:
    partition = Partition(forward=(3, 3, 2), backward=(3, 3, 2), plain=True)
    stages = "F0[0:3] F1[3:6] F2[6:8] B0[5:8] B1[2:5] B2[0:2]"
    assert " ".join(map(str, partition.stages())) == stages
    assert [str(stage) for stage in partition.stages() if stage.has_tail] == ["F2[6:8]", "B0[5:8]"]
    assert (partition.num_forward, partition.num_backward, partition.num_blocks) == (3, 3, 8)
    kept = [partition.num_readers(stage) for stage in partition.stages()]
    assert kept == [2, 1, 0, 0, 0, 0]  # F0 has the inputs of blocks 0 and 2, F1 that of block 5


def test_a_model_without_blocks_has_only_the_tail() -> None:
    partition = Partition(forward=(), backward=(0,))
    assert [str(stage) for stage in partition.stages()] == ["X0[0:0]"]
    plain = Partition(forward=(0,), backward=(0,), plain=True)
    assert [str(stage) for stage in plain.stages()] == ["F0[0:0]", "B0[0:0]"]


def test_the_tail_may_be_a_stage_of_its_own() -> None:
    partition = Partition(forward=(2, 2, 0), backward=(0, 3, 1), plain=True)
    assert (
        " ".join(map(str, partition.stages())) == "F0[0:2] F1[2:4] F2[4:4] B0[4:4] B1[1:4] B2[0:1]"
    )
    assert str(partition.producer(4)) == "F1[2:4]"


@pytest.mark.parametrize(
    ("forward", "backward", "plain", "message"),
    [
        ((), (), False, "backward=.. has no stage with the tail"),
        ((), (2,), True, "forward=.. has no stage with the tail"),
        ((2,), (-1, 3), False, "0 or more"),
        ((2, 0), (0, 2), False, "at least one block"),
        ((0, 2), (0, 2), True, "at least one block"),
        ((2,), (0, 2, 0), False, "at least one block"),
        ((3,), (0, 2), False, "the fused stage 0, but .* covers 2: .* must be 2"),
        ((3,), (0, 2), True, "runs 3 blocks, but .* covers 2: .* must be 2"),
    ],
)
def test_a_malformed_partition_is_refused(
    forward: tuple[int, ...], backward: tuple[int, ...], plain: bool, message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        Partition(forward=forward, backward=backward, plain=plain)


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=6),
    st.integers(0, 3),
    st.integers(1, 4),
    st.booleans(),
)
def test_text_round_trips(forward: list[int], last: int, size: int, plain: bool) -> None:
    total = sum(forward)
    sizes = [size] * (total // size) + ([total % size] if total % size else [])
    if plain:
        forward.append(last)
    partition = Partition(forward=tuple(forward), backward=(last, *sizes), plain=plain)
    assert Partition.parse(str(partition)) == partition
    blocks = [stage.blocks for stage in partition.stages() if stage.kind is not StageKind.FORWARD]
    assert sorted(block for r in blocks for block in r) == list(range(partition.num_blocks))


@pytest.mark.parametrize(
    "text", ["", "plain", "forward 1", "forward x | backward 0 1", "3 3 | 2 3 3"]
)
def test_text_that_is_no_partition_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="not a partition"):
        Partition.parse(text)


PARTITION = Partition(forward=(2, 2), backward=(1, 2, 2))

GOLDEN = {
    (2, 4, 2, 1): """\
worker 0: F0.0 F0.1 X0.0 X0.1 B2.0 B2.1 F1.2 F1.3 B1.2 B1.3
worker 1: F1.0 F1.1 B1.0 B1.1 F0.2 F0.3 X0.2 X0.3 B2.2 B2.3
""",
    (3, 2, 2, 1): """\
worker 0: F0.0 F0.1 B1.0 B1.1
worker 1: F1.0 F1.1 B2.0 B2.1
worker 2: X0.0 X0.1
""",
    (2, 4, 4, 2): """\
worker 0: F0.0 F0.2 F1.0 F1.2 X0.0 X0.2 B1.0 B1.2 B2.0 B2.2
worker 1: F0.1 F0.3 F1.1 F1.3 X0.1 X0.3 B1.1 B1.3 B2.1 B2.3
""",
    (1, 3, 2, 1): """\
worker 0: F0.0 F0.1 F1.0 F1.1 X0.0 X0.1 B1.0 B1.1 B2.0 B2.1 F0.2 F1.2 X0.2 B1.2 B2.2
""",
}


@pytest.mark.parametrize("shape", GOLDEN)
def test_stages_are_laid_round_the_workers(shape: tuple[int, int, int, int]) -> None:
    num_workers, num_microbatches, round_size, team_size = shape
    config = PipelineConfig(
        num_microbatches=num_microbatches, round_size=round_size, team_size=team_size
    )
    schedule = schedule_of(config.with_stages(PARTITION), num_workers=num_workers)
    assert schedule.to_text() == GOLDEN[shape]
    assert Schedule.from_text(GOLDEN[shape]) == schedule


PLAIN = Partition(forward=(2, 3), backward=(1, 2, 2), plain=True)

GOLDEN_PLAIN = {
    (2, 4, 2, 1): """\
worker 0: F0.0 F0.1 B0.0 B0.1 B2.0 B2.1 F1.2 F1.3 B1.2 B1.3
worker 1: F1.0 F1.1 B1.0 B1.1 F0.2 F0.3 B0.2 B0.3 B2.2 B2.3
""",
    (3, 2, 2, 1): """\
worker 0: F0.0 F0.1 B1.0 B1.1
worker 1: F1.0 F1.1 B2.0 B2.1
worker 2: B0.0 B0.1
""",
    (4, 4, 4, 2): """\
worker 0: F0.0 F0.2 B0.0 B0.2 B2.0 B2.2
worker 1: F0.1 F0.3 B0.1 B0.3 B2.1 B2.3
worker 2: F1.0 F1.2 B1.0 B1.2
worker 3: F1.1 F1.3 B1.1 B1.3
""",
}


@pytest.mark.parametrize("shape", GOLDEN_PLAIN)
def test_stages_of_a_plain_step_are_laid_round_the_workers(
    shape: tuple[int, int, int, int],
) -> None:
    num_workers, num_microbatches, round_size, team_size = shape
    plan = round_robin_plan(
        PLAIN,
        num_workers=num_workers,
        num_microbatches=num_microbatches,
        round_size=round_size,
        team_size=team_size,
    )
    assert plan.schedule.to_text() == GOLDEN_PLAIN[shape]
    assert Plan.from_json(plan.to_json()) == plan


def test_graphs_are_kept_where_they_were_made() -> None:
    kept = Partition(forward=(2, 2, 1), backward=(1, 2, 2), plain=True, keeps_graphs=True)
    assert str(kept) == "plain forward 2 2 1 | backward =1 2 2"
    assert Partition.parse(str(kept)) == kept
    assert [str(stage) for stage in kept.stages() if stage.keeps_graph] == ["F2[4:5]", "B0[4:5]"]
    plan = round_robin_plan(kept, num_workers=2, num_microbatches=2, round_size=2)
    assert (
        plan.schedule.to_text()
        == """\
worker 0: F0.0 F0.1 F2.0 F2.1 B0.0 B0.1 B2.0 B2.1
worker 1: F1.0 F1.1 B1.0 B1.1
"""
    )
    assert turns_of_batch(plan) == 1  # the next batch begins where B2 has not run
    waits = plan.dependencies(Action.parse("B0.1").key)
    assert [str(key) for key in waits] == ["F2.0", "F2.1"]  # no boundary to start from
    with pytest.raises(PlanError, match=r"'plain forward 2 3 . backward =1 2 2' keeps graphs"):
        replace(PLAIN, keeps_graphs=True)


def test_all_workers_may_share_the_backward_stages() -> None:
    plan = replace(
        round_robin_plan(PLAIN, num_workers=2, num_microbatches=3, round_size=3),
        shares_backward=True,
        schedule=Schedule(workers=()),
    )
    assert (
        plan.schedule.to_text()
        == """\
worker 0: F0.0 F0.1 F0.2 B0.0 B0.2 B1.0 B1.2 B2.0 B2.2
worker 1: F1.0 F1.1 F1.2 B0.1 B1.1 B2.1
"""
    )
    assert turns_of_batch(plan) == 0
    assert Plan.from_json(plan.to_json()) == plan
    with pytest.raises(PlanError, match=r"shares_backward, but 'forward 2 2 . backward 1 2 2'"):
        replace(plan, partition=PARTITION, schedule=Schedule(workers=()))


def test_a_row_out_of_order_is_refused() -> None:
    with pytest.raises(PlanError, match="Expected a line 'worker 0"):
        Schedule.from_text("worker 1: F0.0")


def test_dependencies_of_every_kind() -> None:
    def waits(text: str, joined: int = 0) -> list[str]:
        partition = replace(PARTITION, joined=joined)
        return [str(key) for key in dependencies(Action.parse(text, worker=0).key, partition)]

    assert waits("F0.3") == []
    assert waits("F1.3") == ["F0.3"]
    assert waits("X0.3") == ["F1.3"]
    assert waits("B1.3") == ["F0.3", "X0.3"]
    assert waits("B2.3") == ["F0.3", "B1.3"]
    assert waits("X0.2", joined=2) == ["F1.2", "F1.3"]  # the tail segment of both
    assert waits("X0.3", joined=2) == ["X0.2"]
    assert waits("B1.3", joined=2) == waits("B1.3")
    only_fused = Partition(forward=(), backward=(3,))
    assert dependencies(ActionKey(StageKind.FUSED, 0, 1), only_fused) == ()


def test_dependencies_of_a_plain_step() -> None:
    def waits(text: str) -> list[str]:
        key = Action.parse(text, worker=0).key
        return [str(each) for each in dependencies(key, PLAIN, round_size=2)]

    assert waits("F0.3") == []
    assert waits("F1.3") == ["F0.3"]
    assert waits("B0.3") == ["F1.3", "F1.2", "F1.3"]  # its boundary, and the losses of the batch
    assert waits("B1.3") == ["F0.3", "B0.3"]
    assert waits("B2.3") == ["F0.3", "B1.3"]


def test_a_microbatch_that_goes_back_before_all_have_gone_forward_is_a_deadlock() -> None:
    text = "worker 0: F0.0 F1.0 B0.0 F0.1 F1.1 B0.1 B1.0 B1.1 B2.0 B2.1"
    with pytest.raises(PlanError, match=r"worker 0 stands at B0.0, waiting for F1.1; none"):
        validate_schedule(
            Schedule.from_text(text), partition=PLAIN, num_microbatches=2, round_size=2
        )


SMALL = Partition(forward=(1, 1), backward=(0, 1, 1))
GOOD = "worker 0: F0.0 F0.1 X0.0 X0.1 B2.0 B2.1\nworker 1: F1.0 F1.1 B1.0 B1.1\n"


def check(text: str, *, num_microbatches: int = 2) -> None:
    validate_schedule(Schedule.from_text(text), partition=SMALL, num_microbatches=num_microbatches)


def test_a_good_schedule_passes() -> None:
    check(GOOD)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("F1.1 ", "", "1 action.s. are missing: F1.1"),
        ("F1.1", "F1.0", "F1.0 is run twice"),
        ("F1.1 ", "F1.1 F1.1 ", "F1.1 is run twice"),
        ("F1.1", "F1.1@0", "F1.1@0 stands in the row of worker 1"),
        ("F1.1", "F2.1", "F2.1@1 is no action"),
        ("B1.1", "B0.1", "B0.1@1 is no action"),
        ("F1.1", "F1.2", "F1.2@1 is no action"),
    ],
)
def test_a_planted_defect_is_found_and_marked(old: str, new: str, message: str) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        check(GOOD.replace(old, new))
    if "missing" not in message:
        assert f">{new.split()[-1]}<" in str(caught.value)


def test_a_deadlock_is_found_and_drawn() -> None:
    with pytest.raises(PlanError) as caught:
        check("worker 0: X0.0 F0.0 B2.0\nworker 1: F1.0 B1.0\n", num_microbatches=1)
    assert str(caught.value) == (
        "The schedule deadlocks: worker 0 stands at X0.0, waiting for F1.0; "
        "worker 1 stands at F1.0, waiting for F0.0; none of these can come.\n"
        "worker 0 | >X0.0<  F0.0   B2.0\n"
        "worker 1 | >F1.0<  B1.0"
    )


def plan_with(
    *, num_workers: int, team_size: int = 1, num_rounds: int = 1, backward: int = 2
) -> Plan:
    return round_robin_plan(
        Partition(forward=(backward,), backward=(1, *[1] * backward)),
        num_workers=num_workers,
        num_microbatches=2 * num_rounds,
        round_size=2,
        team_size=team_size,
    )


def as_batch(plan: Plan, batch: int) -> Schedule:
    first = batch * plan.num_microbatches
    rows = plan.schedule.workers
    return Schedule(
        workers=tuple(
            tuple(replace(action, microbatch=first + action.microbatch) for action in row)
            for row in rows
        )
    )


@settings(deadline=None, max_examples=40)
@given(
    num_teams=st.integers(1, 5),
    team_size=st.integers(1, 2),
    num_rounds=st.integers(1, 3),
    backward=st.integers(1, 5),
)
def test_batches_one_after_the_other_are_the_planned_stream(
    num_teams: int, team_size: int, num_rounds: int, backward: int
) -> None:
    num_workers = num_teams * team_size
    plan = plan_with(
        num_workers=num_workers, team_size=team_size, num_rounds=num_rounds, backward=backward
    )
    whole = replace(plan.layout, num_microbatches=4 * plan.num_microbatches)
    stream = schedule_of(whole, num_workers=num_workers)
    rows: list[list[object]] = [[] for _ in range(num_workers)]
    for batch in range(4):
        schedule = as_batch(rotated(plan, batch * turns_of_batch(plan)), batch)
        for row, actions in zip(rows, schedule.workers, strict=True):
            row += actions
    assert rows == [list(row) for row in stream.workers]


def test_a_plan_that_is_not_laid_round_the_workers_begins_where_it_says() -> None:
    plan = plan_with(num_workers=3)
    first, second, third = plan.schedule.workers
    moved = tuple(replace(action, worker=2) for action in second)
    assert turns_of_batch(plan) == 1
    other = replace(plan, schedule=Schedule(workers=(first, (), (*moved, *third))))
    assert turns_of_batch(other) == 0


@pytest.mark.parametrize(
    ("resident", "num_batches", "turns"),
    [
        ((), 1, 1),
        (((0, 1),) * 3, 1, 1),  # wherever a batch begins, they are there
        (((0,), (1,), ()), 1, 0),  # chosen for the workers of one batch
        (((0,), (1,), ()), 2, 1),  # chosen for a stream
    ],
)
def test_blocks_that_stay_decide(
    resident: tuple[tuple[int, ...], ...], num_batches: int, turns: int
) -> None:
    plan = replace(plan_with(num_workers=3), resident=resident, num_batches=num_batches)
    assert turns_of_batch(plan) == turns
    assert rotated(plan, 2).resident == plan.resident


def timeline_of(plan: Plan) -> Timeline:
    entries = [
        TimelineEntry(action=action, start_seconds=number, end_seconds=number + 1)
        for row in plan.schedule.workers
        for number, action in enumerate(row)
    ]
    return Timeline(num_workers=plan.num_workers, entries=tuple(entries))


def test_a_prediction_is_shown_beside_what_has_run_on_other_workers() -> None:
    plan = plan_with(num_workers=3)
    predicted = timeline_of(plan)
    for further in range(3):
        measured = timeline_of(rotated(plan, further))
        assert predicted.beside(measured).rows() == measured.rows()
    assert predicted.beside(Timeline(num_workers=3, entries=())) == predicted
    nothing = Timeline(num_workers=3, entries=())
    assert nothing.beside(predicted) == nothing


# Plans --------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"round_size": 3}, "num_microbatches=4 are no rounds of round_size=3"),
        ({"recompute": RecomputePolicy.NONE}, "the only FORWARD stage keep its graphs"),
    ],
)
def test_choices_that_cannot_be_of_a_plain_plan_are_refused(
    change: dict[str, Any], message: str
) -> None:
    plan = round_robin_plan(PLAIN, num_workers=2, num_microbatches=4, round_size=4)
    with pytest.raises(PlanError, match=message):
        replace(plan, **change, schedule=Schedule(workers=()))


def test_a_plain_plan_may_keep_all_graphs() -> None:
    whole = Partition(forward=(5,), backward=(5,), plain=True, keeps_graphs=True)
    plan = round_robin_plan(whole, num_workers=2, num_microbatches=4, round_size=4, team_size=2)
    kept = replace(plan, recompute=RecomputePolicy.NONE)
    assert (
        kept.schedule.to_text()
        == """\
worker 0: F0.0 F0.2 B0.0 B0.2
worker 1: F0.1 F0.3 B0.1 B0.3
"""
    )


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
