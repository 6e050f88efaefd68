"""Draws timelines: as a trace for Perfetto, and on one scale of time as SVG and PNG."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from roundpipe_lightning.files import replaced_file, write_text
from roundpipe_lightning.planning.schedule.schedule import Timeline, TimelineEntry
from roundpipe_lightning.planning.schedule.stages import StageKind


def render_trace(timelines: Mapping[str, Timeline]) -> str:
    """Write timelines by their titles in the Trace Event Format, which ui.perfetto.dev opens.

    Every timeline is a process, every worker a thread of it; times are in microseconds.
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


_SHADES = {
    StageKind.FORWARD: ("#8ecae6", "#61b4dc", "#b6dff0"),
    StageKind.FUSED: ("#ffb703",),
    StageKind.BACKWARD: ("#90be6d", "#6fa84a", "#b5d59c"),
}
"""Colours of a kind's stages, in turn, so that neighbours can be told apart."""

_IDLE = "#edeff2"
_MARGIN, _RIGHT = 72, 16
_ROW, _GAP, _STRIP = 24, 4, 5
_CAPTION, _AXIS, _LEGEND = 30, 26, 26
_LETTER = 5.2  # width of a letter of a label, in pixels
_MOST_TICKS = 12


def render_svg(
    timelines: Mapping[str, Timeline], *, width: int = 1200, notes: Mapping[str, str] | None = None
) -> str:
    """Draw timelines one above the other on one scale of time, one row per worker.

    Each stage has a colour of its kind, with its number and its microbatch where there is room;
    grey is idle. The strip at the foot of an action is the part of it that waited.

    Args:
        timelines: By title, e.g. `{"predicted": ..., "measured": ...}`; drawn from top to bottom.
        width: Of the picture in pixels.
        notes: What to add to a timeline's caption, by title.
    """
    longest = max((line.makespan_seconds for line in timelines.values()), default=0.0) or 1.0
    scale = (width - _MARGIN - _RIGHT) / longest
    parts = []
    top = 6
    for title, timeline in timelines.items():
        caption = f"{title}: {timeline.makespan_seconds:.4g} s, idle {timeline.bubble_fraction:.1%}"
        parts.append(f'<text x="8" y="{top + 18}" class="c">{escape(caption)}</text>')
        note = (notes or {}).get(title)
        if note:
            right = width - _RIGHT
            parts.append(f'<text x="{right}" y="{top + 18}" class="n">{escape(note)}</text>')
        top += _CAPTION
        for worker, row in enumerate(timeline.rows()):
            y = top + worker * (_ROW + _GAP)
            parts.append(f'<text x="8" y="{y + 16}">worker {worker}</text>')
            parts.append(_rect(_MARGIN, y, longest * scale, _ROW, "i"))
            parts.extend(_entry(entry, y, scale, timeline.start_seconds) for entry in row)
        top += timeline.num_workers * (_ROW + _GAP)
        parts.extend(_axis(top, longest, scale))
        top += _AXIS
    parts.extend(_legend(top))
    height = top + _LEGEND
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">\n'
        f"<style>{_style()}</style>\n"
        f'<rect width="{width}" height="{height}" fill="#fff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _style() -> str:
    fills = "".join(
        f".{kind.value.lower()}{number}{{fill:{shade}}}"
        for kind, shades in _SHADES.items()
        for number, shade in enumerate(shades)
    )
    return (
        f"text{{fill:#212529}}.c{{font-weight:bold}}.n{{text-anchor:end}}.i{{fill:{_IDLE}}}"
        ".w{fill:#fff;fill-opacity:.65}.l{font-size:9px}.t{font-size:10px;text-anchor:middle}"
        f".a{{fill:#868e96}}{fills}"
    )


def _rect(x: float, y: float, width: float, height: float, name: str) -> str:
    return (
        f'<rect class="{name}" x="{_number(x)}" y="{_number(y)}" width="{_number(width)}" '
        f'height="{_number(height)}"/>'
    )


def _number(value: float) -> str:
    """A coordinate to a tenth of a pixel: a whole number has no point."""
    return f"{value:.1f}".removesuffix(".0")


def _shade(kind: StageKind, stage: int) -> str:
    return f"{kind.value.lower()}{stage % len(_SHADES[kind])}"


def _entry(entry: TimelineEntry, y: int, scale: float, origin: float) -> str:
    action = entry.action
    x = _MARGIN + (entry.start_seconds - origin) * scale
    width = (entry.end_seconds - entry.start_seconds) * scale
    hint = (
        f"{action}: {entry.start_seconds:.6g} to {entry.end_seconds:.6g} s, "
        f"waiting {entry.waiting_seconds:.6g} s"
    )
    # Half a pixel less, so that neighbours of one stage can be told apart.
    body = _rect(x, y, max(width - 0.5, 0.3), _ROW, _shade(action.kind, action.stage))
    pale = min(entry.waiting_seconds * scale, width)
    if pale >= 0.05:
        body += _rect(x, y + _ROW - _STRIP, pale, _STRIP, "w")
    label = f"{action.kind.value}{action.stage}.{action.microbatch}"
    if width > _LETTER * len(label) + 2:
        body += f'<text x="{_number(x + 2)}" y="{y + 15}" class="l">{label}</text>'
    return f"<g><title>{escape(hint)}</title>{body}</g>"


def _axis(top: int, longest: float, scale: float) -> Iterator[str]:
    yield _rect(_MARGIN, top, longest * scale, 1, "a")
    least = longest / _MOST_TICKS
    power: float = 10.0 ** math.floor(math.log10(least))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * 0.999)
    unit, factor = ("s", 1.0) if longest >= 1.0 else ("ms", 1e3) if longest >= 1e-3 else ("µs", 1e6)
    for number in range(math.floor(longest / step * (1 + 1e-9)) + 1):
        x = _MARGIN + number * step * scale
        yield _rect(x, top, 1, 4, "a")
        text = f"{number * step * factor:.6g}" if number else f"0 {unit}"
        yield f'<text x="{_number(x)}" y="{top + 14}" class="t">{text}</text>'


def _legend(top: int) -> Iterator[str]:
    x = float(_MARGIN)
    words: list[tuple[tuple[str, ...], str]] = [
        (
            tuple(_shade(kind, number) for number in range(len(shades))),
            f"{kind.name.lower()} ({kind.value}stage.microbatch)",
        )
        for kind, shades in _SHADES.items()
    ]
    for classes, text in [*words, (("i",), "idle")]:
        for name in classes:
            yield _rect(x, top + 4, 14, 14, name)
            x += 14
        yield f'<text x="{_number(x + 6)}" y="{top + 15}">{text}</text>'
        x += 6 * len(text) + 40
    yield _rect(x, top + 4, 28, 14, "b0") + _rect(x, top + 18 - _STRIP, 14, _STRIP, "w")
    yield f'<text x="{_number(x + 34)}" y="{top + 15}">waits inside an action</text>'


_SCALE = 2  # pixels of the PNG for one of the SVG

_log = logging.getLogger(__name__)


def write_picture(path: Path, svg: str) -> None:
    """Write `path`, which ends in .svg, and a PNG beside it."""
    write_text(path, svg)
    try:
        image = _drawn(svg)
    except ImportError as error:
        _log.warning("%s is not written: %s. pip install pillow", path.with_suffix(".png"), error)
        return
    with replaced_file(path.with_suffix(".png")) as file:
        image.save(file, format="PNG")


def _drawn(svg: str) -> Any:
    """Draw what our pictures are made of: rectangles, lines and text, coloured by class."""
    from PIL import Image, ImageColor, ImageDraw, ImageFont

    rules = {
        name: dict(part.split(":") for part in body.split(";"))
        for name, body in re.findall(r"\.(\w+)\{([^}]*)\}", svg)
    }
    root = ET.fromstring(svg)
    size = int(root.attrib["width"]) * _SCALE, int(root.attrib["height"]) * _SCALE
    image = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(image, "RGBA")
    for element in root.iter():
        look = {"font-size": "12", **element.attrib, **rules.get(element.get("class", ""), {})}
        x, y, width, height, line = (
            float(look.get(name, 0)) * _SCALE
            for name in ("x", "y", "width", "height", "stroke-width")
        )
        kind = element.tag.rpartition("}")[2]
        if kind == "rect":
            alpha = round(255 * float(look.get("fill-opacity", 1)))
            colour = (*ImageColor.getrgb(look["fill"])[:3], alpha)
            pen.rectangle((x, y, max(x, x + width - 1), max(y, y + height - 1)), fill=colour)
        elif kind == "text":
            font = ImageFont.load_default(float(look["font-size"].removesuffix("px")) * _SCALE)
            anchor = {"start": "ls", "middle": "ms", "end": "rs"}[look.get("text-anchor", "start")]
            pen.text((x, y), element.text or "", fill="#212529", font=font, anchor=anchor)
        elif kind == "polyline":
            pairs = (pair.split(",") for pair in look["points"].split())
            points = [(float(a) * _SCALE, float(b) * _SCALE) for a, b in pairs]
            pen.line(points, fill=look["stroke"], width=round(line) or _SCALE, joint="curve")
    return image
