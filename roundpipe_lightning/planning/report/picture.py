"""Writes pictures of a run: as SVG, and the same drawing as PNG."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from roundpipe_lightning.files import replaced_file, write_text

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
        elif kind in ("path", "polyline"):
            points = [(a * _SCALE, b * _SCALE) for a, b in _points(look)]
            pen.line(points, fill=look["stroke"], width=round(line) or _SCALE, joint="curve")
    return image


def _points(look: dict[str, str]) -> list[tuple[float, float]]:
    """The corners of a polyline, or of a path of lines along the axes."""
    if "points" in look:
        pairs = (pair.split(",") for pair in look["points"].split())
        return [(float(x), float(y)) for x, y in pairs]
    found, x, y = list[tuple[float, float]](), 0.0, 0.0
    for command, text in re.findall(r"([MHVv])([\d. ]+)", look["d"]):
        values = [float(value) for value in text.split()]
        x = values[0] if command in "MH" else x
        y = values[-1] if command in "MV" else y + values[0] if command == "v" else y
        found.append((x, y))
    return found
