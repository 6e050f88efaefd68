"""The batch that logged values are weighed by: what a step has left of it.

Lightning looks for the number of samples in the batch itself when `self.log` is called. A step that
has taken something out of its batch (`batch.pop("text")`) has taken it out of a microbatch, or of a
copy on a device; on one device Lightning would not have found it any more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule

from roundpipe_lightning.strategy import compat


class LoggedBatch:
    """Follows what a step takes out of its batch.

    Args:
        batch: On the host, as hooks are given it; it is not changed.
    """

    def __init__(self, batch: Any) -> None:
        self._batch = batch
        self._left = batch

    def note(self, used: Any) -> None:
        """Look at a microbatch, or at a copy of the batch, after its step.

        Args:
            used: What the step was called with.
        """
        self._left = _left_of(self._batch, used)

    def use(self, module: LightningModule) -> None:
        """Let Lightning look for the number of samples in what is left, until the next batch."""
        results = compat.step_results(module.trainer)
        if results is not None and results.batch is self._batch:
            results.batch = self._left


def _left_of(batch: Any, used: Any) -> Any:
    """Return a batch without the entries of mappings that `used` has no more."""
    if not isinstance(batch, Mapping) or not isinstance(used, Mapping):
        return batch
    left = {key: _left_of(value, used[key]) for key, value in batch.items() if key in used}
    same = len(left) == len(batch) and all(left[key] is batch[key] for key in left)
    return batch if same else left
