"""Whether the parameters that are trained are still those that the optimizers were made for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer

from roundpipe_lightning.errors import ConfigurationError


class TrainedParameters:
    """What was trained when a training began, to be compared with what is.

    Args:
        module: The user's module.
        optimizers: Its optimizers.
    """

    def __init__(self, module: LightningModule, optimizers: Sequence[Optimizer]) -> None:
        self._module = module
        self._optimizers = optimizers
        self._seen = {p for p in module.parameters() if p.requires_grad}

    def check(self) -> None:
        """Refuse parameters that came or were frozen since, unless an optimizer has been told.

        Raises:
            ConfigurationError: Naming the first.
        """
        stepped = {p for p in self._members() if p.requires_grad}
        trained = {p for p in self._module.parameters() if p.requires_grad}
        if trained <= self._seen and len(trained) == len(self._seen):
            return
        for name, parameter in self._module.named_parameters():
            if parameter.requires_grad and parameter not in self._seen | stepped:
                raise ConfigurationError(
                    f"Parameter {name!r} is trained, but no optimizer has it: it was added or "
                    "unfrozen after the optimizer was made. Make it in `configure_model` or "
                    "`__init__`, or hand it over with optimizer.add_param_group(...)."
                )
        members = set(self._members())
        for name, parameter in self._module.named_parameters():
            if not parameter.requires_grad and parameter in self._seen & members:
                raise ConfigurationError(
                    f"Parameter {name!r} was frozen (requires_grad=False) after the optimizer was "
                    "made: it would stand still, while its gradient's place and its optimizer "
                    "state stay in memory. Freeze it before `configure_optimizers`, or give it a "
                    "learning rate of 0 in a parameter group of its own."
                )
        self._seen = trained

    def _members(self) -> Iterator[Tensor]:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                yield from group["params"]
