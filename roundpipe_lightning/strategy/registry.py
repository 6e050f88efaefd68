"""Makes `Trainer(strategy="roundpipe")` known to Lightning."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

from lightning.fabric.strategies import STRATEGY_REGISTRY as FABRICS_REGISTRY
from lightning.fabric.strategies.strategy import Strategy as FabricsStrategy
from lightning.pytorch.strategies import Strategy, StrategyRegistry

from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.strategy.checks import refuse_fabric


def register(strategy: type[Strategy], *, name: str) -> None:
    """Enter the strategy's name; doing so twice changes nothing.

    `pytorch_lightning` is a class tree of its own, which cannot use a strategy of `lightning`.
    Where it has been imported, it is told the name too, to say so. Fabric is told the name and the
    class, for the same reason: an instance that it takes for one of its own reaches the refusal.

    Args:
        strategy: The class.
        name: What `Trainer(strategy=...)` calls it.
    """
    if name not in StrategyRegistry:
        StrategyRegistry.register(
            name,
            strategy,
            description="Round-robin pipeline over stateless workers, model state in host memory",
        )
    if name not in FABRICS_REGISTRY:
        FABRICS_REGISTRY.register(name, refuse_fabric)
    FabricsStrategy.register(strategy)
    foreign = getattr(sys.modules.get("pytorch_lightning.strategies"), "StrategyRegistry", None)
    if foreign is not None and name not in foreign:
        foreign.register(name, _refuse_pytorch_lightning)


def _refuse_pytorch_lightning(**_: Any) -> NoReturn:
    raise ConfigurationError(
        "strategy='roundpipe' works with lightning.pytorch, but this Trainer is "
        "pytorch_lightning's; the two do not mix. Write `import lightning.pytorch as pl` in place "
        "of `import pytorch_lightning as pl`, everywhere."
    )
