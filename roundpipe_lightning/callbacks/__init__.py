"""Callbacks that look into the pipeline, and the one that hands the model on."""

from roundpipe_lightning.callbacks.export import ExportPretrained
from roundpipe_lightning.callbacks.live import LiveView
from roundpipe_lightning.callbacks.monitor import PipelineMonitor
from roundpipe_lightning.callbacks.pictures import PipelineTimeline, PlanReport, RunReport

__all__ = [
    "ExportPretrained",
    "LiveView",
    "PipelineMonitor",
    "PipelineTimeline",
    "PlanReport",
    "RunReport",
]
