"""Makes `Trainer(strategy="roundpipe")` known to Lightning."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

from lightning.pytorch.strategies import StrategyRegistry

from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.strategy import RoundPipeStrategy


def register() -> None:
    """Enter the strategy's name; doing so twice changes nothing.

    `pytorch_lightning` is a class tree of its own, which cannot use a strategy of `lightning`.
    Where it has been imported, it is told the name too, to say so.
    """
    if RoundPipeStrategy.strategy_name not in StrategyRegistry:
        StrategyRegistry.register(
            RoundPipeStrategy.strategy_name,
            RoundPipeStrategy,
            description="Round-robin pipeline over stateless workers, model state in host memory",
        )
    foreign = getattr(sys.modules.get("pytorch_lightning.strategies"), "StrategyRegistry", None)
    if foreign is not None and RoundPipeStrategy.strategy_name not in foreign:
        foreign.register(RoundPipeStrategy.strategy_name, _refuse_pytorch_lightning)


def _refuse_pytorch_lightning(**_: Any) -> NoReturn:
    raise ConfigurationError(
        "strategy='roundpipe' works with lightning.pytorch, but this Trainer is "
        "pytorch_lightning's; the two do not mix. Write `import lightning.pytorch as pl` in place "
        "of `import pytorch_lightning as pl`, everywhere."
    )
