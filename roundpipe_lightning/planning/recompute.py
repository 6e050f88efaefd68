"""What the backward pass of a block starts from."""

from __future__ import annotations

from enum import Enum


class RecomputePolicy(Enum):
    """What BACKWARD stages do before their backward."""

    FULL = "full"
    """They run their blocks again, from the stored boundary."""

    SELECTIVE = "selective"
    """They run their blocks again, but for attention, whose outputs are kept: less to recompute,
    more to hold and to move."""

    NONE = "none"
    """There are no BACKWARD stages: the fused stage has all blocks, and what it runs is never run
    again."""
