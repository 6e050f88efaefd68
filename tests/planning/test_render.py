import json
import re
from xml.etree import ElementTree as ET

import pytest

from roundpipe_lightning.planning.report.render import render_svg, render_trace
from roundpipe_lightning.planning.schedule.schedule import Action
from roundpipe_lightning.planning.schedule.timeline import Timeline, TimelineEntry


def entry(text: str, start: float, end: float, waiting: float = 0.0) -> TimelineEntry:
    return TimelineEntry(
        action=Action.parse(text), start_seconds=start, end_seconds=end, waiting_seconds=waiting
    )


TIMELINE = Timeline(
    num_workers=2,
    entries=(entry("F0.0@0", 0, 1), entry("X0.0@1", 1, 4), entry("B1.0@0", 1, 8, waiting=3)),
)


def test_trace_opens_as_trace_events() -> None:
    events = json.loads(render_trace({"predicted": TIMELINE, "measured": TIMELINE}))["traceEvents"]
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
