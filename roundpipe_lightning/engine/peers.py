"""Which accelerators copy from each other's memory without the host, as their driver says."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import torch


def reaches(here: torch.device, there: torch.device) -> bool:
    """Say whether one device copies from another one's memory; from its own it does."""
    if here == there or here.type != "cuda" or there.type != "cuda":
        return here == there
    return torch.cuda.can_device_access_peer(here, there)


def all_reach(devices: Sequence[torch.device]) -> bool:
    """Say whether each of some devices copies from every other one's memory; no where none is."""
    return bool(devices) and all(reaches(here, there) for here, there in permutations(devices, 2))
