"""The host's random generators in a checkpoint: a resumed run goes on with the same numbers.

Lightning does not save them. Everything random in a roundpipe run follows from them: shuffling and
augmentation directly, dropout through the step's seed, which is made from torch's seed and the
number of the batch. Stored as tensors and numbers, so that `weights_only=True` loads them.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def random_state() -> dict[str, Any]:
    """Return the state of torch's, Python's and numpy's host generators."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": {
            "version": version,
            "words": torch.tensor(words, dtype=torch.int64),
            "gauss": gauss,
        },
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        _, words, position, has_gauss, gauss = numpy.random.get_state()
        state["numpy"] = {
            "words": torch.tensor(words.tolist(), dtype=torch.int64),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "gauss": float(gauss),
        }
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Restore what `random_state` returned.

    Args:
        state: Host tensors and numbers.
    """
    torch.set_rng_state(state["torch"].cpu())
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        saved = state["numpy"]
        words = numpy.array(saved["words"].tolist(), dtype=numpy.uint32)
        numpy.random.set_state(
            ("MT19937", words, saved["position"], saved["has_gauss"], saved["gauss"])
        )
