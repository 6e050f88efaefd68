"""Parameters whose values stay in a file: frozen weights that need no host memory of their own.

The tensor is a view of a private mapping of the file. The kernel reads its pages when they are
used and drops them again when memory is short, for they can be read once more. A write would make
private copies of them that the file does not see: so a parameter that was written to is refused
when it is used next.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from roundpipe_lightning.errors import ConfigurationError


class MappedParameter(nn.Parameter):
    """A frozen parameter that is a view of a mapped file."""

    file: Path  # what it is a view of, for messages
    _address: int
    _written: int

    def __new__(cls, data: Tensor, *, file: Path) -> MappedParameter:
        """Make a parameter that does not require a gradient.

        Args:
            data: The view; a plain host tensor.
        """
        parameter = super().__new__(cls, data, requires_grad=False)
        parameter.file = file
        parameter._address = data.data_ptr()
        parameter._written = parameter._version
        return parameter

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Copy the values into memory: whoever copies a module may write to the copy."""
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.data.clone(), requires_grad=self.requires_grad)
        copied: nn.Parameter = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as an ordinary parameter, with its values."""
        return nn.Parameter(self.data, requires_grad=self.requires_grad).__reduce_ex__(protocol)

    def check_unconverted(self, name: str) -> None:
        """Raise a ConfigurationError, naming the file, if it was converted, and is in memory."""
        if not self.requires_grad and self.data_ptr() != self._address:
            raise ConfigurationError(
                f"Parameter {name} was a view of {self.file} (model.frozen_weights=mmap) and has "
                f"been converted to {self.dtype} in memory. Choose a precision that keeps the "
                "dtype of the files (trainer.precision=bf16-mixed or 32-true), or "
                "model.frozen_weights=memory."
            )

    @property
    def is_mapped(self) -> bool:
        """Whether the values are still those of the file, and to stay so.

        A parameter that is to be trained, or was converted to another dtype, is ordinary.
        """
        return self.data_ptr() == self._address and not self.requires_grad

    def check_unwritten(self, name: str) -> None:
        """Raise a ConfigurationError, naming the file, if the parameter was written to in place."""
        if self.data_ptr() == self._address and self._version != self._written:
            raise ConfigurationError(
                f"Parameter {name} of shape {tuple(self.shape)} was written to, but it is a "
                f"read-only view of {self.file} (model.frozen_weights=mmap); the file is as it "
                "was. Keep the weights in memory (model.frozen_weights=memory), or do not change "
                "frozen parameters."
            )


def is_mapped(parameter: Tensor) -> bool:
    return isinstance(parameter, MappedParameter) and parameter.is_mapped
