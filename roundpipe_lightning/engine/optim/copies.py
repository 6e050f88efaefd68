"""The copies of parameters that are uploaded, written in the pass that steps them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from roundpipe_lightning.engine.optim.pieces import flat, flat_like
from roundpipe_lightning.errors import ConfigurationError


class UploadCopies:
    """Where the new values of parameters are also written.

    A parameter is known by its memory, because a step in parts sees aliases of it. Copies of this
    object are the object itself.
    """

    def __init__(self) -> None:
        self._flat: dict[tuple[int, int], Tensor] = {}

    def set(self, copies: Mapping[nn.Parameter, Tensor]) -> None:
        """Take the copies, in place of those before.

        Raises:
            ConfigurationError: A copy has another shape than its parameter, or gaps.
        """
        self._flat = {}
        for parameter, copy in copies.items():
            mine = flat_like(copy, parameter)
            if copy.shape != parameter.shape or mine.data_ptr() != copy.data_ptr():
                raise ConfigurationError(
                    f"The copy of a parameter of shape {tuple(parameter.shape)} and strides "
                    f"{parameter.stride()} has shape {tuple(copy.shape)} and strides "
                    f"{copy.stride()}: both must be the same, without gaps."
                )
            if flat(parameter) is not None:
                self._flat[_place(parameter)] = mine

    def of(self, parameter: Tensor) -> Tensor | None:
        """Return the flat copy of a parameter, or of an alias of it; None: it has none."""
        return self._flat.get(_place(parameter))

    def __deepcopy__(self, memo: dict[int, Any]) -> UploadCopies:
        return self


def _place(parameter: Tensor) -> tuple[int, int]:
    return parameter.data_ptr(), parameter.numel()
