"""docs/troubleshooting.md explains messages that the package still has."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from roundpipe_lightning import errors

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "troubleshooting.md"
VALUE = "…"
"""Stands for whatever is put into a message."""
ROW = re.compile(r"^\| `(?P<opening>[^`]+)` \| (?P<kinds>[^|]+) \| (?P<cure>.+) \|$")


def _texts() -> Iterator[str]:
    """Every text in the source, with `VALUE` where something is put in."""
    for path in sorted((ROOT / "roundpipe_lightning").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        constants: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, (ast.Constant, ast.JoinedStr, ast.BinOp)):
                yield _skeleton(node, constants)
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                constants[node.targets[0].id] = _skeleton(node.value, {})


def _skeleton(node: ast.expr, constants: Mapping[str, str]) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"\{[^{}]*\}|%s", VALUE, node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_skeleton(part, constants) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _skeleton(node.left, constants) + _skeleton(node.right, constants)
    return constants.get(node.id, VALUE) if isinstance(node, ast.Name) else VALUE


def test_every_row_is_a_message() -> None:
    _, _, ours = DOCUMENT.read_text(encoding="utf-8").partition("## Messages of this package")
    rows = [ROW.match(line) for line in ours.splitlines() if line.startswith("| `")]
    assert None not in rows, "Rows have the form | `message` | class | what to do |"
    said = [text.strip().replace("`", "'") for text in _texts() if len(text) > 8]
    stale = []
    for row in filter(None, rows):
        parts = (re.escape(part) for part in row["opening"].split(VALUE))
        pattern = re.compile(r"\S*".join(parts))
        known = all(kind.endswith("Warning") or hasattr(errors, kind) for kind in [row["kinds"]])
        if not known or not any(pattern.match(text) for text in said):
            stale.append(row["opening"])
    assert not stale, f"No message begins so any more; remove or mend these rows: {stale}"
