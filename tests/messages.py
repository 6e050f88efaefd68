"""Finds the messages of the errors and warnings that the package raises, in its source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from roundpipe_lightning import errors

PACKAGE = Path(__file__).resolve().parent.parent / "roundpipe_lightning"
VALUE = "…"
"""Stands for whatever is put into a message."""

_MOST_OPENING = 110
_CURES = ("give ", "set ", "choose ", "make ", "use ", "name ", "drop ", "write ", "leave ")
_WARNERS = ("warnings.warn", "rank_zero_warn")
_PLACEHOLDER = re.compile(r"\{[^{}]*\}|%s")


@dataclass(frozen=True, kw_only=True)
class Message:
    """A message in the source.

    Attributes:
        kind: Class that is raised, or category of the warning.
        text: Its text, with `VALUE` where something is put in.
        place: File and line.
    """

    kind: str
    text: str
    place: str

    @property
    def _first(self) -> str:
        """The first sentence, or what stands before the cure in it."""
        first = re.split(r"(?<=[^.])\. (?=[A-Z`…])|\n", self.text.strip(), maxsplit=1)[0]
        head, colon, tail = first.partition(": ")
        says_what = re.search(r"[a-z]{2}", head) is not None
        return head + ":" if colon and says_what and tail.startswith(_CURES) else first

    @property
    def opening(self) -> str:
        """Its opening words, by which it is found."""
        first = self._first
        if len(first) > _MOST_OPENING:
            first = first[:_MOST_OPENING].rsplit(" ", 1)[0]
        return first.rstrip(" .")

    @property
    def cure(self) -> str:
        """What the message itself says after its first sentence."""
        return " ".join(self.text.strip()[len(self._first) :].lstrip(" .:").split())

    @property
    def row(self) -> str:
        """A row for the table of docs/troubleshooting.md."""
        cure = self.cure[:1].upper() + self.cure[1:] or "(say what to do)"
        cure = re.sub(r"(?<!`)__init__(?!`)", "`__init__`", cure)
        cure = cure.replace("|", "\\|").replace("<", "&lt;")
        return f"| `{in_code(self.opening)}` | {self.kind} | {cure} |"


def in_code(text: str) -> str:
    """Return a text as it stands in a code span in a cell of a Markdown table."""
    return text.replace("|", "\\|").replace("`", "'")


@cache
def messages() -> tuple[Message, ...]:
    """Every message that the source gives to a class of errors.py, or to a warning."""
    kinds = {name for name, value in vars(errors).items() if isinstance(value, type)}
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        constants = _constants(tree)
        for node in ast.walk(tree):
            for kind, argument in _said(node, kinds):
                text = _skeleton(argument, constants)
                if len(re.findall(r"[A-Za-z_]{2,}", text)) >= 2:
                    place = f"{path.relative_to(PACKAGE).as_posix()}:{argument.lineno}"
                    found.append(Message(kind=kind, text=text, place=place))
    return tuple(found)


@cache
def texts() -> frozenset[str]:
    """Every text in the source, with `VALUE` where something is put in."""
    found = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        constants = _constants(tree)
        for node in ast.walk(tree):
            if isinstance(node, (ast.Constant, ast.JoinedStr)):
                found.add(_skeleton(node, constants))
    return frozenset(found)


def _said(node: ast.AST, kinds: set[str]) -> Iterator[tuple[str, ast.expr]]:
    """What an expression says, and as what."""
    if not isinstance(node, ast.Call) or not node.args:
        return
    name = ast.unparse(node.func)
    if name.rpartition(".")[2] in kinds:
        yield name.rpartition(".")[2], node.args[0]
    elif name in _WARNERS:
        given = [ast.unparse(k.value) for k in node.keywords if k.arg == "category"]
        yield (given[0] if given else "UserWarning"), node.args[0]


def _constants(tree: ast.Module) -> dict[str, str]:
    """Texts that a module has under a name."""
    found: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            text = _skeleton(node.value, {})
            if text != VALUE:
                found[node.targets[0].id] = text
    return found


def _skeleton(node: ast.expr, constants: Mapping[str, str]) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return _PLACEHOLDER.sub(VALUE, node.value)
    if isinstance(node, ast.JoinedStr):
        parts = (p.value if isinstance(p, ast.Constant) else VALUE for p in node.values)
        return "".join(str(part) for part in parts)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _skeleton(node.left, constants) + _skeleton(node.right, constants)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return _skeleton(node.func.value, constants) if node.func.attr == "format" else VALUE
    if isinstance(node, ast.Name):
        return constants.get(node.id, VALUE)
    return VALUE
