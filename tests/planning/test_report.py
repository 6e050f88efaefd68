import json
import re
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundpipe_lightning.errors import PlanError
from roundpipe_lightning.planning.cost.costs import ActionCost, RecomputeStart, StageCosts
from roundpipe_lightning.planning.cost.simulate import simulate
from roundpipe_lightning.planning.report.render import render_svg, render_trace
from roundpipe_lightning.planning.report.step_record import IdleCause, StepProgress, idle_seconds
from roundpipe_lightning.planning.schedule.plan import PipelineConfig, Plan, schedule_of
from roundpipe_lightning.planning.schedule.schedule import (
    Action,
    ActionKey,
    Schedule,
    Timeline,
    TimelineEntry,
)
from roundpipe_lightning.planning.schedule.stages import Partition, StageKind

PARTITION = Partition(forward=(1,), backward=(1, 1))
LAYOUT = PipelineConfig(num_microbatches=2, round_size=2).with_stages(PARTITION)


def entry(text: str, start: float, end: float, waiting: float = 0.0) -> TimelineEntry:
    return TimelineEntry(
        action=Action.parse(text), start_seconds=start, end_seconds=end, waiting_seconds=waiting
    )


# worker 0 |F|F|.......|B|   |B|      from 10 s to 22 s
# worker 1 |   |X.....X|X| .......    (one second of the first X0 is waiting)
TIMELINE = Timeline(
    num_workers=2,
    entries=(
        entry("F0.0@0", 10, 11),
        entry("F0.1@0", 11, 12),
        entry("X0.0@1", 11.5, 15, waiting=1),
        entry("X0.1@1", 15, 17),
        entry("B1.0@0", 15.5, 18),
        entry("B1.1@0", 20, 22),
    ),
)


def test_a_timeline_made_by_hand() -> None:
    parts = idle_seconds(TIMELINE, layout=LAYOUT)
    assert parts == {
        IdleCause.FILL: 1.5,  # worker 1 before 11.5
        IdleCause.DRAIN: 5.0,  # worker 1 after 17
        IdleCause.BOUNDARY: 3.0 + 1.0,  # worker 0 until X0.0 has ended at 15, and inside X0.0
        IdleCause.OTHER: 0.5 + 2.0,  # 15 to 15.5, and 18 to 20: X0.1 had ended at 17
        IdleCause.UPLOAD: 0.0,
        IdleCause.OPTIMIZER: 0.0,
        IdleCause.DATA: 0.0,
    }
    assert sum(parts.values()) == 2 * 12 - TIMELINE.busy_seconds


def test_other_stages_are_refused() -> None:
    timeline = Timeline(num_workers=1, entries=(entry("F0.0@0", 0, 1), entry("F7.0@0", 1, 4)))
    with pytest.raises(PlanError, match="There is no stage F7 in forward 1"):
        idle_seconds(timeline, layout=LAYOUT)


@given(
    num_workers=st.integers(1, 4),
    num_microbatches=st.integers(1, 6),
    costs=st.lists(st.floats(0.01, 5.0), min_size=5, max_size=5),
    start=st.sampled_from(RecomputeStart),
    hop_seconds=st.sampled_from([0.0, 0.1]),
    kind=st.sampled_from(["fused", "joined", "plain", "kept"]),
)
def test_parts_add_up(
    num_workers: int,
    num_microbatches: int,
    costs: list[float],
    start: RecomputeStart,
    hop_seconds: float,
    kind: str,
) -> None:
    plain, keeps = kind in ("plain", "kept"), kind == "kept"
    forward = (2, 1, 1) if plain else (2, 1)
    partition = Partition(forward=forward, backward=(1, 2, 1), plain=plain, keeps_graphs=keeps)
    layout = PipelineConfig(
        num_microbatches=num_microbatches, round_size=num_microbatches, joined=kind == "joined"
    ).with_stages(partition)
    timeline = simulate(
        schedule_of(layout, num_workers=num_workers),
        layout=layout,
        costs=StageCosts(
            stages=(
                *(ActionCost(compute_seconds=c) for c in costs[: len(forward)]),
                *(ActionCost(compute_seconds=c, recompute_seconds=c / 4) for c in costs[2:5]),
            ),
            hop_seconds=hop_seconds,
            recompute_start=start,
        ),
    )
    parts = idle_seconds(timeline, layout=layout)
    idle = num_workers * timeline.makespan_seconds - timeline.busy_seconds
    assert sum(parts.values()) == pytest.approx(idle, abs=1e-9)
    assert min(parts.values()) >= -1e-9
    assert hop_seconds or parts[IdleCause.OTHER] == pytest.approx(0, abs=1e-9)


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


PICTURED = Timeline(
    num_workers=2,
    entries=(entry("F0.0@0", 0, 1), entry("X0.0@1", 1, 4), entry("B1.0@0", 1, 8, waiting=3)),
)


def test_trace_opens_as_trace_events() -> None:
    events = json.loads(render_trace({"predicted": PICTURED, "measured": PICTURED}))["traceEvents"]
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {
        "predicted",
        "measured",
    }
    spans = [e for e in events if e["ph"] == "X" and e["pid"] == 1]
    assert len(spans) == 3
    backward = next(e for e in spans if e["name"] == "B1.0")
    assert (backward["tid"], backward["ts"], backward["dur"]) == (0, 1e6, 7e6)


SVG = "{http://www.w3.org/2000/svg}"


OVERLAPPED = Timeline(
    num_workers=2,
    entries=(
        entry("F0.0@0", 1, 2),
        entry("F1.0@1", 2, 3),
        entry("X0.0@1", 3, 5),
        entry("B1.0@0", 2, 9, waiting=3),
    ),
)
SHORT = Timeline(num_workers=1, entries=(entry("X0.0@0", 0, 4),))


def texts(root: ET.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def bars(root: ET.Element) -> dict[str, tuple[float, float]]:
    found = {}
    for group in root.iter(f"{SVG}g"):
        title, bar = group.find(f"{SVG}title"), group.find(f"{SVG}rect")
        assert title is not None
        assert title.text
        assert bar is not None
        found[title.text.split(":")[0]] = (float(bar.attrib["x"]), float(bar.attrib["width"]))
    return found


def test_a_row_per_worker_of_each_timeline() -> None:
    root = ET.fromstring(render_svg({"predicted <p>": OVERLAPPED, "measured": SHORT}))
    written = texts(root)
    assert written.count("worker 0") == 2
    assert written.count("worker 1") == 1
    assert "predicted <p>: 8 s, idle 50.0%" in written
    assert "measured: 4 s, idle 0.0%" in written
    assert written.index("predicted <p>: 8 s, idle 50.0%") < written.index(
        "measured: 4 s, idle 0.0%"
    )
    titles = [element.text for element in root.iter(f"{SVG}title")]
    assert titles.count("B1.0@0: 2 to 9 s, waiting 3 s") == 1


def test_bars_lie_on_one_scale_of_time() -> None:
    root = ET.fromstring(render_svg({"a": OVERLAPPED}, width=72 + 16 + 800))
    scale, left = 100, 72  # eight seconds on 800 pixels, from the first action on
    found = bars(root)
    for key, start, seconds in [("F0.0@0", 0, 1), ("F1.0@1", 1, 1), ("X0.0@1", 2, 2)]:
        assert found[key] == pytest.approx((left + start * scale, seconds * scale - 0.5))
    both = bars(ET.fromstring(render_svg({"a": OVERLAPPED, "b": SHORT}, width=888)))
    assert both["X0.0@0"] == pytest.approx((left, 4 * scale - 0.5))


def test_stages_have_colours_and_the_legend_has_them_all() -> None:
    text = render_svg({"a": OVERLAPPED})
    root = ET.fromstring(text)
    style = root.findtext(f"{SVG}style") or ""
    classes = {e.attrib["class"] for e in root.iter(f"{SVG}rect") if "class" in e.attrib}
    assert {"f0", "f1", "x0", "b1", "i", "w"} <= classes
    for name in classes:
        assert f".{name}{{" in style
    shades = re.findall(r"\.[fxb]\d{fill:(#\w+)}", style)
    assert len(shades) == len(set(shades)) == 7
    legend = " ".join(texts(root))
    for word in ("forward (F", "fused (X", "backward (B", "idle", "waits inside an action"):
        assert word in legend


@pytest.mark.parametrize(
    ("seconds", "first", "last"),
    [(8.0, "0 s", "8"), (0.37, "0 ms", "350"), (0.002, "0 ms", "2"), (3e-5, "0 µs", "30")],
)
def test_the_axis_has_round_numbers(seconds: float, first: str, last: str) -> None:
    timeline = Timeline(num_workers=1, entries=(entry("X0.0@0", 0, seconds),))
    root = ET.fromstring(render_svg({"a": timeline}))
    ticks = [e.text for e in root.iter(f"{SVG}text") if e.attrib.get("class") == "t"]
    assert ticks[0] == first
    assert ticks[-1] == last
    assert 5 <= len(ticks) <= 13


def test_notes_stand_beside_their_caption() -> None:
    root = ET.fromstring(
        render_svg({"a": OVERLAPPED, "b": SHORT}, notes={"a": "fill <4%>", "b": ""})
    )
    (note,) = [e for e in root.iter(f"{SVG}text") if e.attrib.get("class") == "n"]
    assert note.text == "fill <4%>"


def test_nothing_to_draw() -> None:
    ET.fromstring(render_svg({}))
    root = ET.fromstring(render_svg({"a": Timeline(num_workers=2, entries=())}))
    assert "a: 0 s, idle 0.0%" in texts(root)
