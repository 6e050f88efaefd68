"""Callbacks that look into the pipeline, and the one that hands the model on."""

from roundpipe_lightning.callbacks.export import ExportPretrained
from roundpipe_lightning.callbacks.live import LiveView
from roundpipe_lightning.callbacks.monitor import PipelineMonitor
from roundpipe_lightning.callbacks.plan_report import PlanReport
from roundpipe_lightning.callbacks.report import RunReport
from roundpipe_lightning.callbacks.timeline import PipelineTimeline

__all__ = [
    "ExportPretrained",
    "LiveView",
    "PipelineMonitor",
    "PipelineTimeline",
    "PlanReport",
    "RunReport",
]
