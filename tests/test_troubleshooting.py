"""docs/troubleshooting.md has every message with its cure, and no message that there is not."""

from __future__ import annotations

import re
from pathlib import Path

from roundpipe_lightning import errors
from tests.messages import VALUE, Message, in_code, messages, texts

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "troubleshooting.md"
_ROW = re.compile(r"^\| `(?P<opening>(?:[^`])+)` \| (?P<kinds>[^|]+) \| (?P<cure>.+) \|$")


def _rows() -> list[re.Match[str]]:
    """The rows of the tables about this package's messages."""
    text = DOCUMENT.read_text(encoding="utf-8")
    _, _, ours = text.partition("## Messages of this package")
    lines = [line for line in ours.splitlines() if line.startswith("| `")]
    rows = [_ROW.match(line) for line in lines]
    broken = [line for line, row in zip(lines, rows, strict=True) if row is None]
    assert not broken, f"Not of the form | `message` | class | what to do |: {broken}"
    return [row for row in rows if row is not None]


def _pattern(opening: str) -> re.Pattern[str]:
    """What a row stands for: a value is a run of letters without a space."""
    return re.compile(r"\S*".join(re.escape(part) for part in opening.split(VALUE)))


def _rows_of(message: Message, patterns: list[re.Pattern[str]]) -> list[int]:
    text = in_code(message.text.strip())
    return [index for index, pattern in enumerate(patterns) if pattern.match(text)]


def test_every_message_has_a_row() -> None:
    rows = _rows()
    patterns = [_pattern(row["opening"]) for row in rows]
    missing = {
        message.row: message.place for message in messages() if not _rows_of(message, patterns)
    }
    listed = "\n".join(f"{row}    <- {place}" for row, place in missing.items())
    assert not missing, (
        f"{len(missing)} messages are not in docs/troubleshooting.md. Put each row (without its "
        "place) into the table it belongs to there and say what to do; nothing else is needed:\n"
        f"{listed}"
    )


def test_every_row_is_a_message() -> None:
    said = [in_code(message.text.strip()) for message in messages()]
    said += [in_code(text.strip()) for text in texts() if len(text) > 8]
    patterns = {row["opening"]: _pattern(row["opening"]) for row in _rows()}
    stale = [
        opening
        for opening, pattern in patterns.items()
        if not any(pattern.match(text) for text in said)
    ]
    listed = "\n".join(stale)
    assert not stale, (
        "No message begins so any more. Remove or mend these rows of docs/troubleshooting.md; "
        f"nothing else is needed:\n{listed}"
    )


def test_rows_name_the_class_that_is_raised() -> None:
    rows = _rows()
    patterns = [_pattern(row["opening"]) for row in rows]
    wrong = {
        f"{message.kind}: {message.opening}    <- {message.place}"
        for message in messages()
        if (found := _rows_of(message, patterns))
        and not any(message.kind in rows[index]["kinds"].split(", ") for index in found)
    }
    listed = "\n".join(sorted(wrong))
    assert not wrong, f"Name these classes in the rows of docs/troubleshooting.md:\n{listed}"


def test_every_class_and_warning_appears() -> None:
    named = {kind for row in _rows() for kind in row["kinds"].split(", ")}
    classes = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert classes - {"RoundPipeError"} <= named, "Each class of errors.py needs a row."
    assert {message.kind for message in messages() if "Warning" in message.kind} <= named


def test_rows_differ_and_cures_say_something() -> None:
    rows = _rows()
    openings = [row["opening"] for row in rows]
    assert len(set(openings)) == len(openings), "A message has two rows."
    empty = [row["opening"] for row in rows if len(row["cure"]) < 8 or "(say what" in row["cure"]]
    assert not empty, f"Say what to do: {empty}"


def test_messages_are_found_where_they_are_raised() -> None:
    found = {message.opening: message for message in messages()}
    flag = found["num_nodes=…: strategy='roundpipe' runs in one process on one machine"]
    assert flag.kind == "ConfigurationError"
    assert flag.cure == "Set Trainer(num_nodes=1)."
    assert flag.place.startswith("strategy/checks.py:")
    assert any(message.kind == "NoBlocksWarning" for message in found.values())
    assert len(found) > 300
