"""Draws timelines: as text, as SVG (predicted above measured), as a trace for Perfetto."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from typing import Any

from roundpipe_lightning.planning.stages import StageKind
from roundpipe_lightning.planning.timeline import Timeline, TimelineEntry

_COLOURS = {
    StageKind.FORWARD: "#8ecae6",
    StageKind.FUSED: "#ffb703",
    StageKind.BACKWARD: "#90be6d",
}
_RECOMPUTE_OPACITY = 0.35
_MARGIN, _ROW, _GAP, _TITLE = 80, 26, 4, 30


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


def render_svg(timelines: Mapping[str, Timeline], *, width: int = 1200) -> str:
    """Draw timelines one above the other on one scale of time, one row per worker.

    Args:
        timelines: By title, e.g. `{"predicted": ..., "measured": ...}`; drawn from top to bottom.
        width: Width of the picture in pixels.
    """
    longest = max((line.makespan_seconds for line in timelines.values()), default=0.0) or 1.0
    scale = (width - _MARGIN - 10) / longest
    parts = []
    top = 8
    for title, timeline in timelines.items():
        caption = f"{title}: {timeline.makespan_seconds:.4g} s, idle {timeline.idle_share:.1%}"
        parts.append(f'<text x="8" y="{top + 16}" font-weight="bold">{escape(caption)}</text>')
        top += _TITLE
        for worker, row in enumerate(timeline.rows()):
            y = top + worker * (_ROW + _GAP)
            parts.append(f'<text x="8" y="{y + 17}">worker {worker}</text>')
            parts.append(
                f'<rect x="{_MARGIN}" y="{y}" width="{width - _MARGIN - 10}" height="{_ROW}" '
                'fill="#f1f3f5"/>'
            )
            parts.extend(_svg_entry(entry, y, scale, timeline.start_seconds) for entry in row)
        top += timeline.num_workers * (_ROW + _GAP) + 12
    legend, height = _svg_legend(top), top + 30
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">\n'
        + "\n".join([*parts, legend])
        + "\n</svg>\n"
    )


def _svg_entry(entry: TimelineEntry, y: int, scale: float, origin: float) -> str:
    """Draw one action; what it waited for its gradient is drawn pale."""
    x = _MARGIN + (entry.start_seconds - origin) * scale
    width = (entry.end_seconds - entry.start_seconds) * scale
    action = entry.action
    hint = (
        f"{action}: {entry.start_seconds:.6g} to {entry.end_seconds:.6g} s, "
        f"waiting {entry.waiting_seconds:.6g} s"
    )
    pale = min(entry.waiting_seconds * scale, width)
    label = f"{action.kind.value}{action.stage}.{action.microbatch}"
    text = (
        f'<text x="{x + 2:.2f}" y="{y + 17}" font-size="9">{label}</text>'
        if width > 6 * len(label)
        else ""
    )
    return (
        f'<g><title>{escape(hint)}</title><rect x="{x:.2f}" y="{y}" width="{width:.2f}" '
        f'height="{_ROW}" fill="{_COLOURS[action.kind]}" stroke="#fff" stroke-width="0.5"/>'
        f'<rect x="{x:.2f}" y="{y + _ROW - 5}" width="{pale:.2f}" height="5" fill="#fff" '
        f'opacity="{1 - _RECOMPUTE_OPACITY}"/>{text}</g>'
    )


def _svg_legend(top: int) -> str:
    parts = []
    for place, kind in enumerate(StageKind):
        x = _MARGIN + place * 120
        parts.append(
            f'<rect x="{x}" y="{top}" width="14" height="14" fill="{_COLOURS[kind]}"/>'
            f'<text x="{x + 20}" y="{top + 12}">{kind.name.lower()}</text>'
        )
    return "".join(parts)


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
