"""Drawings of a timeline: text and trace."""

from __future__ import annotations

import json

from roundpipe_lightning.planning.report.render import render_text, render_trace
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


def test_text() -> None:
    assert render_text(TIMELINE, width=8) == (
        "worker 0 |FBBBBBBB|\nworker 1 |.XXX....|\n8 s, idle 50.0%\n"
    )


def test_text_of_nothing() -> None:
    assert render_text(Timeline(num_workers=1, entries=()), width=3) == (
        "worker 0 |...|\n0 s, idle 0.0%\n"
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
