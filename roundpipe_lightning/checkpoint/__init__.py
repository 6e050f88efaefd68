"""Checkpoints: written as plain Lightning checkpoints, whole or not at all."""

from roundpipe_lightning.checkpoint.io import (
    RoundPipeAsyncCheckpointIO,
    RoundPipeCheckpointIO,
    merge_checkpoint,
)

__all__ = ["RoundPipeAsyncCheckpointIO", "RoundPipeCheckpointIO", "merge_checkpoint"]
