"""Callbacks that look into the pipeline, and the one that hands the model on."""

from roundpipe_lightning.callbacks.export import ExportPretrained
from roundpipe_lightning.callbacks.timeline import PipelineTimeline

__all__ = ["ExportPretrained", "PipelineTimeline"]
