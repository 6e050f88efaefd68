"""The random generators in a checkpoint: a resumed run goes on with the same numbers.

Lightning does not save them. Everything random in a roundpipe run follows from them: shuffling and
augmentation directly, dropout through the step's seed, which is made from torch's seed and the
number of the batch. Stored as tensors and numbers, so that `weights_only=True` loads them.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class HostRandomness:
    """Where the host's three generators stand; cheap to take, packed only for a checkpoint.

    Attributes:
        torch: Torch's state, uint8.
        python: `random.getstate()`.
        numpy: `numpy.random.get_state()`, or None where numpy is not in use.
    """

    torch: Tensor
    python: Any
    numpy: Any

    @classmethod
    def now(cls) -> HostRandomness:
        """Where the generators stand."""
        numpy = sys.modules.get("numpy")
        return cls(
            torch=torch.get_rng_state(),
            python=random.getstate(),
            numpy=None if numpy is None else numpy.random.get_state(),
        )

    def restore(self) -> None:
        """Put the generators back to where they stood."""
        torch.set_rng_state(self.torch)
        random.setstate(self.python)
        numpy = sys.modules.get("numpy")
        if numpy is not None and self.numpy is not None:
            numpy.random.set_state(self.numpy)

    def packed(self) -> dict[str, Any]:
        """The states as tensors and numbers."""
        version, words, gauss = self.python
        state: dict[str, Any] = {
            "torch": self.torch,
            "python": {"version": version, "words": _tensor(words), "gauss": gauss},
        }
        if self.numpy is not None:
            _, words, position, has_gauss, gauss = self.numpy
            state["numpy"] = {
                "words": _tensor(words.tolist()),
                "position": int(position),
                "has_gauss": int(has_gauss),
                "gauss": float(gauss),
            }
        return state

    @classmethod
    def unpacked(cls, state: Mapping[str, Any]) -> HostRandomness:
        """The reverse of `packed`."""
        python, saved, numpy = state["python"], state.get("numpy"), None
        if saved is not None:
            words = saved["words"].to(torch.uint32).numpy()
            numpy = ("MT19937", words, saved["position"], saved["has_gauss"], saved["gauss"])
        return cls(
            torch=state["torch"].cpu(),
            python=(python["version"], tuple(python["words"].tolist()), python["gauss"]),
            numpy=numpy,
        )


def random_state() -> dict[str, Any]:
    """Return the state of torch's, Python's and numpy's host generators and of devices in use."""
    state = HostRandomness.now().packed()
    if torch.cuda.is_initialized():
        state["devices"] = torch.cuda.get_rng_state_all()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore what `random_state` returned; devices that are not there are passed over.

    Args:
        state: Host tensors and numbers.
    """
    HostRandomness.unpacked(state).restore()
    devices = state.get("devices", ())
    for index, device_state in enumerate(devices[: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(device_state.cpu(), index)


def _tensor(words: Any) -> Tensor:
    return torch.tensor(words, dtype=torch.int64)
