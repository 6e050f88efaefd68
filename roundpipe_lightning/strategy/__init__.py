"""The strategy: what Lightning calls, and the parts it is made of."""

from roundpipe_lightning.strategy.strategy import NoBlocksWarning, RoundPipeStrategy

__all__ = ["NoBlocksWarning", "RoundPipeStrategy"]
