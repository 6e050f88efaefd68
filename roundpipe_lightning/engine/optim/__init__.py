"""Optimizers for parameters in host memory, and what they are made of."""

from roundpipe_lightning.engine.optim.adamw import HostAdamW

__all__ = ["HostAdamW"]
