"""Optimizers for parameters in host memory."""

from roundpipe_lightning.optim.adamw import HostAdamW

__all__ = ["HostAdamW"]
