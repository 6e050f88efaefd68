"""Optimizers for parameters in host memory."""

from roundpipe_lightning.engine.optim.adamw import HostAdamW

__all__ = ["HostAdamW"]
