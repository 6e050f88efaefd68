"""Callbacks that look into the pipeline."""

from roundpipe_lightning.callbacks.timeline import PipelineTimeline

__all__ = ["PipelineTimeline"]
