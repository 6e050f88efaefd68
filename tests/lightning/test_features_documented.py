import inspect
import re
from pathlib import Path

import lightning.pytorch.callbacks
from lightning.pytorch import Trainer

PAGE = Path(__file__).parents[2] / "docs" / "lightning.md"


def rows(heading: str) -> dict[str, str]:
    """The first table below a heading: what its first column names, and the second."""
    section = PAGE.read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    pairs = [re.fullmatch(r"\| `(\w+)` \| (.+) \|", line) for line in lines]
    assert all(pairs), lines
    names = [pair[1] for pair in pairs if pair]
    assert len(set(names)) == len(names)
    return {pair[1]: pair[2] for pair in pairs if pair}


def test_every_flag_of_the_trainer() -> None:
    flags = list(inspect.signature(Trainer).parameters)
    assert list(rows("Trainer flags")) == flags


def test_every_callback() -> None:
    assert list(rows("Callbacks")) == list(lightning.pytorch.callbacks.__all__)
