"""The text form of the blocks that stay on each worker: `0-3,7 | - | 0-3`, a worker's per part."""

from __future__ import annotations

from collections.abc import Sequence

from roundpipe_lightning.errors import PlanError

_NONE = "-"


def format_resident(resident: Sequence[Sequence[int]]) -> str:
    """Write ascending blocks per worker, e.g. `0-3,7 | -`; `-` where no worker keeps any."""
    return " | ".join(format_blocks(blocks) for blocks in resident) if any(resident) else _NONE


def format_blocks(blocks: Sequence[int]) -> str:
    """Write ascending numbers, neighbours together: `0-3,7`; `-` for none."""
    runs: list[list[int]] = []
    for block in blocks:
        if runs and runs[-1][1] == block - 1:
            runs[-1][1] = block
        else:
            runs.append([block, block])
    parts = (str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return ",".join(parts) or _NONE


def parse_resident(text: str) -> tuple[tuple[int, ...], ...]:
    """Read the text form back.

    Raises:
        PlanError: It is none.
    """
    if text.strip() == _NONE:
        return ()
    try:
        return tuple(_parse_blocks(part.strip()) for part in text.split("|"))
    except ValueError as error:
        raise PlanError(
            f"{text!r} are no resident blocks: write for example '0-3,7 | -'."
        ) from error


def _parse_blocks(text: str) -> tuple[int, ...]:
    if text == _NONE:
        return ()
    blocks: list[int] = []
    for run in text.split(","):
        first, _, last = run.partition("-")
        blocks.extend(range(int(first), int(last or first) + 1))
    return tuple(blocks)
