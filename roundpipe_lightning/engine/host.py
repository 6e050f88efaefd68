"""How much memory the host has."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

UNKNOWN_BYTES = 2**60
"""Taken for the memory of a host that cannot be asked: none has as much, so nothing is refused."""

_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")


def host_bytes() -> int | None:
    """Return the host's memory, or what a container may use of it; None where that is not known."""
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # not on this system (Windows)
        return None
    with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
        total = min(total, int(_CONTAINER_LIMIT.read_text(encoding="ascii")))
    return total if total > 0 else None
