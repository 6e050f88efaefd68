"""Draws timelines: as text and as a trace for Perfetto; `svg.py` draws pictures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from roundpipe_lightning.planning.schedule.timeline import Timeline, TimelineEntry


def render_text(timeline: Timeline, *, width: int = 96) -> str:
    """Draw a timeline with one row per worker and one column per slice of time.

    A column shows the kind of the action that took most of it (`F`, `X`, `B`), or `.` for idle.

    Args:
        timeline: What to draw.
        width: Columns for the whole step.
    """
    slot = timeline.makespan_seconds / width or 1.0
    lines = []
    for worker, row in enumerate(timeline.rows()):
        best = [(slot / 2, ".")] * width
        for entry in row:
            begin = entry.start_seconds - timeline.start_seconds
            end = entry.end_seconds - timeline.start_seconds
            for column in range(int(begin / slot), min(width, int(end / slot) + 1)):
                overlap = min(end, (column + 1) * slot) - max(begin, column * slot)
                best[column] = max(best[column], (overlap, entry.action.kind.value))
        lines.append(f"worker {worker} |{''.join(letter for _, letter in best)}|")
    lines.append(f"{timeline.makespan_seconds:.6g} s, idle {timeline.idle_share:.1%}")
    return "\n".join(lines) + "\n"


def render_trace(timelines: Mapping[str, Timeline]) -> str:
    """Write timelines in the Trace Event Format, which ui.perfetto.dev opens.

    Every timeline is a process, every worker a thread of it; times are in microseconds.

    Args:
        timelines: By title, e.g. `{"predicted": ..., "measured": ...}`.
    """
    events: list[dict[str, Any]] = []
    for process, (title, timeline) in enumerate(timelines.items()):
        events.append(_metadata("process_name", title, process))
        for worker, row in enumerate(timeline.rows()):
            events.append(_metadata("thread_name", f"worker {worker}", process, thread=worker))
            events.extend(_trace_event(entry, process, timeline.start_seconds) for entry in row)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"


def _metadata(name: str, value: str, process: int, *, thread: int = 0) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": process, "tid": thread, "args": {"name": value}}


def _trace_event(entry: TimelineEntry, process: int, origin: float) -> dict[str, Any]:
    action = entry.action
    return {
        "name": str(action.key),
        "cat": action.kind.name.lower(),
        "ph": "X",
        "pid": process,
        "tid": action.worker,
        "ts": (entry.start_seconds - origin) * 1e6,
        "dur": (entry.end_seconds - entry.start_seconds) * 1e6,
        "args": {
            "stage": action.stage,
            "microbatch": action.microbatch,
            "waiting_us": entry.waiting_seconds * 1e6,
        },
    }
