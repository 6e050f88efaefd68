from roundpipe_lightning.planning.report.progress import StepProgress
from roundpipe_lightning.planning.schedule.plan import Plan
from roundpipe_lightning.planning.schedule.schedule import ActionKey, Schedule
from roundpipe_lightning.planning.schedule.stages import Partition, StageKind

PLAN = Plan(
    model="any",
    partition=Partition(forward=(1, 1), backward=(1, 2)),
    num_workers=2,
    num_microbatches=3,
    round_size=3,
    schedule=Schedule.from_text(
        "worker 0: F0.0 F0.1 F0.2 X0.0 X0.1 X0.2\nworker 1: F1.0 F1.1 F1.2 B1.0 B1.1 B1.2\n"
    ),
    block_names=("a", "b", "c"),
)


def _key(text: str) -> ActionKey:
    stage, microbatch = text[1:].split(".")
    return ActionKey(StageKind(text[0]), int(stage), int(microbatch))


def _text(ended: str, running: dict[str, float], plan: Plan = PLAN) -> str:
    return StepProgress(
        plan=plan,
        ended={_key(word) for word in ended.split()},
        running={_key(word): seconds for word, seconds in running.items()},
    ).to_text()


def test_a_worker_in_user_code_and_one_that_waits_for_it() -> None:
    assert _text("F0.0 F0.1 F1.0", {"F0.2": 612.44}).splitlines() == [
        "[done] >running<  waiting; a row has a worker's actions in order",
        "worker 0 | [F0.0] [F0.1] >F0.2<  X0.0   X0.1   X0.2",
        "worker 1 | [F1.0]  F1.1   F1.2   B1.0   B1.1   B1.2",
        "worker 0: 2 of 6 done, runs F0.2 for 612.4 s",
        "worker 1: 1 of 6 done, may begin F1.1, which its microbatch has not come to",
    ]


def test_what_is_waited_for_is_named_with_its_worker() -> None:
    lines = _text("F0.0 F0.1 F0.2 F1.0 F1.1 F1.2", {"X0.0": 3.0}).splitlines()
    assert lines[-2] == "worker 0: 3 of 6 done, runs X0.0 for 3.0 s"
    assert lines[-1] == ("worker 1: 3 of 6 done, waits to begin B1.0 for X0.0 (worker 0, running)")
    lines = _text("F0.0", {"F0.1": 1.0, "F1.0": 2.0}).splitlines()
    assert lines[-1] == "worker 1: 0 of 6 done, runs F1.0 for 2.0 s"
    assert _text("", {}).splitlines()[-1] == (
        "worker 1: 0 of 6 done, waits to begin F1.0 for F0.0 (worker 0, not begun)"
    )


def test_a_finished_step() -> None:
    everything = " ".join(str(action.key) for action in PLAN.schedule)
    assert _text(everything, {}).splitlines()[-1] == "worker 1: 6 of 6 done, is through"


def test_a_long_schedule_is_shown_where_it_stands() -> None:
    count = 40
    forward = " ".join(f"X0.{i}" for i in range(count))
    plan = Plan(
        model="any",
        partition=Partition(forward=(), backward=(3,)),
        num_workers=1,
        num_microbatches=count,
        round_size=count,
        schedule=Schedule.from_text(f"worker 0: {forward}\n"),
        block_names=("a", "b", "c"),
    )
    grid = _text(" ".join(f"X0.{i}" for i in range(20)), {"X0.20": 1.0}, plan).splitlines()[1]
    assert grid.startswith("worker 0 | ... [X0.17] [X0.18] [X0.19] >X0.20<  X0.21 ")
    assert grid.endswith(" ...")
    assert len(grid) < 160
