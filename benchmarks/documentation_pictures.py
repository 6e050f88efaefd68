"""Draws the pictures of the documentation that are no measurements: packages, architecture, memory.

The memory is the planner's, for LoRA of Qwen3-32B on four RTX 4090.

    python benchmarks/documentation_pictures.py docs/pictures
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path

from hydra import compose, initialize_config_dir

from roundpipe_lightning.cli.job import Job
from roundpipe_lightning.planning.cost.device_memory import MemoryNeed
from roundpipe_lightning.planning.model.hardware import config_folder

_GIB = 2**30
_LINE, _PALE, _BLUE, _ORANGE, _GREEN = "#455a64", "#eceff1", "#90caf9", "#ffcc80", "#a5d6a7"
_COLOURS = ("#90caf9", "#ffcc80", "#a5d6a7", "#ce93d8", "#ef9a9a", "#80cbc4", "#e6ee9c", "#bcaaa4")


def box(x: float, y: float, width: float, height: float, text: str, fill: str = _PALE) -> str:
    """A rectangle with lines of text in its middle."""
    lines = text.split("\n")
    first = y + height / 2 + 4.5 - 8 * (len(lines) - 1)
    middle = x + width / 2
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" fill="{fill}"/>'
        + "".join(
            f'<text x="{middle}" y="{first + 16 * number}" text-anchor="middle">{line}</text>'
            for number, line in enumerate(lines)
        )
    )


def label(x: float, y: float, text: str, *, anchor: str = "start") -> str:
    """A line of text."""
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{text}</text>'


def arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    """A line with a head at its end."""
    return f'<path d="M{x} {y} L{to_x} {to_y}" stroke="{_LINE}" marker-end="url(#head)"/>'


def picture(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    """A whole file, on white, so that it can be read in a dark page, too."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="sans-serif" font-size="13" role="img">'
        f"<title>{title}</title>"
        f'<defs><marker id="head" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
        f'<path d="M0 0 L8 4 L0 8 z" fill="{_LINE}"/></marker></defs>'
        f'<rect width="{width}" height="{height}" rx="6" fill="white"/>{"".join(parts)}</svg>\n'
    )


def architecture() -> str:
    """Host memory above, stateless workers below, stages that go round."""
    parts = [
        label(20, 24, "Host memory: parameters, gradients, optimizer state"),
        box(15, 32, 730, 62, "", _PALE),
    ]
    parts += [box(25 + 72 * n, 42, 64, 42, f"block {n}", _BLUE) for n in range(8)]
    parts.append(box(605, 42, 130, 42, "optimizer on\nthe processors", _ORANGE))
    rows = ("F0 B1 B4", "F1 B2 B5", "F2 B3 B6", "F3+loss B0")
    colours = (_GREEN, _GREEN, _GREEN, _ORANGE)
    for number, (row, colour) in enumerate(zip(rows, colours, strict=True)):
        x = 35 + 180 * number
        parts += [arrow(x + 60, 94, x + 60, 150), arrow(x + 95, 150, x + 95, 94)]
        parts += [
            box(x, 152, 150, 66, "", _PALE),
            label(x + 75, 172, f"GPU {number}, keeps nothing", anchor="middle"),
            box(x, 184, 150, 34, row, colour),
        ]
    parts += [
        label(90, 126, "weights", anchor="end"),
        label(136, 126, "gradients"),
        box(
            0,
            226,
            760,
            44,
            "Stages go round the GPUs: forward (F), the last blocks with the loss, backward (B).\n"
            "Boundaries between them pass the host.",
            "white",
        ),
    ]
    return picture(760, 274, "Architecture", parts)


def packages() -> str:
    """What imports what."""
    rows = {
        20: [(20, 200, "cli\nthe commands"), (500, 200, "testing\nfor tests of your own")],
        90: [
            (20, 200, "modules, data"),
            (260, 220, "strategy, precision,\ncheckpoint, callbacks"),
            (500, 200, "emulation\ndevices on paper"),
        ],
        160: [(20, 200, "models\nblocks, weights, losses"), (260, 220, "optim\nhost optimizers")],
        230: [(260, 220, "engine\nruns a schedule (PyTorch)")],
        300: [(260, 220, "planning\nnumbers only")],
        370: [(260, 220, "files\nwritten whole or not at all"), (20, 200, "errors")],
    }
    parts = [
        box(x, y, width, 48, text, _BLUE if y < 230 else _GREEN)
        for y, row in rows.items()
        for x, width, text in row
    ]
    arrows = [(120, 68, 120, 90), (220, 114, 260, 114), (520, 68, 470, 90), (600, 68, 600, 90)]
    arrows += [(300, 138, 200, 160), (370, 138, 370, 160), (120, 208, 260, 245)]
    arrows += [(370, 208, 370, 230), (600, 138, 480, 250), (370, 278, 370, 300)]
    parts += [arrow(*ends) for ends in [*arrows, (370, 348, 370, 370), (260, 394, 220, 394)]]
    return picture(720, 432, "Packages and what they import", parts)


def memory(needs: Mapping[str, MemoryNeed]) -> str:
    """A bar for every place, by kind."""
    parts = [label(20, 26, "LoRA of Qwen3-32B on four RTX 4090, predicted")]
    for row, (title, need) in enumerate(needs.items()):
        x, y, total = 20.0, 66 + 120 * row, need.available_bytes
        parts.append(
            label(20, y - 8, f"{title}: {need.total_bytes / _GIB:.1f} of {total / _GIB:.0f} GiB")
        )
        parts.append(box(20, y, 720, 30, ""))
        for number, (kind, size) in enumerate(need.num_bytes):
            width = 720 * size / total
            parts.append(box(x, y, width, 30, "", _COLOURS[number % len(_COLOURS)]))
            x += width
            left, top = 20 + 240 * (number % 3), y + 40 + 20 * (number // 3)
            parts.append(box(left, top, 12, 12, "", _COLOURS[number % len(_COLOURS)]))
            parts.append(label(left + 18, top + 11, f"{kind.value}, {size / _GIB:.1f} GiB"))
    return picture(760, 30 + 120 * len(needs), "Memory by kind", parts)


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    settings = ["recipe=qwen3_32b/lora", "hardware=rtx4090", "hardware.devices=4"]
    settings += ["hardware.host_memory=256GiB", "paths.output_dir=unused"]
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        found = Job(compose("train", overrides=settings)).answer().memory
    (folder / "architecture.svg").write_text(architecture(), encoding="utf-8")
    (folder / "packages.svg").write_text(packages(), encoding="utf-8")
    needs = {"Each device": found.device, "Host": found.host}
    (folder / "memory.svg").write_text(memory(needs), encoding="utf-8")


if __name__ == "__main__":
    main()
